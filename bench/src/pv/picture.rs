//! Draws charts from a results file. The charts show only data in the file.

use std::path::Path;

use anyhow::Result;

use super::{BASELINE, NATIVE, workloads};
use crate::bars::{self, Axis, Kind};
use crate::report::Metric;

/// Names of the kinds in charts.
const TITLES: [(&str, &str); 9] = [
    (NATIVE, "native"),
    (BASELINE, "passthrough"),
    ("fv-naive", "FV naive"),
    ("fv-remap", "FV BAR remap"),
    ("fv-lazy", "FV lazy"),
    ("fv-both", "FV both"),
    ("fv", "FV default"),
    ("pv-naive", "PV naive"),
    ("pv", "PV multicall"),
];
/// Value above which bars of measured times are clipped.
const MAX_SHOWN: f64 = 3.0;
/// Value above which bars of modelled times are clipped. Their scale is logarithmic.
const MODEL_TOP: f64 = 1000.0;
/// Numbers of contexts shown in the chart.
const CONTEXTS: [&str; 4] = ["1", "2", "4", "8"];
/// Ways of creating the contexts, with their names in the results and in the chart.
const WAYS: [(&str, &str); 6] = [
    ("native", "native"),
    ("passthrough", "passthrough"),
    ("fv-one-vm", "FV, one VM"),
    ("fv-vms", "FV, a VM each"),
    ("pv-one-vm", "PV, one VM"),
    ("pv-vms", "PV, a VM each"),
];

/// Draws charts next to the results file `file`: `NAME.svg` and `NAME-model.svg` for workloads, and `NAME.svg` for
/// contexts. Skips charts without data.
///
/// # Errors
/// Returns an error if a chart cannot be written.
pub fn draw(file: &Path, metrics: &[Metric]) -> Result<()> {
    let value = |name: &str| metrics.iter().find(|metric| metric.name == name).map(|metric| metric.value);
    let groups: Vec<&str> =
        workloads().filter(|workload| value(&format!("pv.{workload}.{BASELINE}.model")).is_some()).collect();
    if !groups.is_empty() {
        let kinds = |what: &str, base: &str| -> Vec<Kind> {
            let of = |workload: &str, kind: &str| {
                let name = format!("pv.{workload}.{kind}.{what}");
                let measured = metrics.iter().find(|metric| metric.name == name)?;
                Some(if what == "time" {
                    measured.value / measured.baseline?
                } else {
                    measured.value / value(&format!("pv.{workload}.{base}.{what}"))?
                })
            };
            let bars = TITLES.iter().filter_map(|(kind, title)| {
                let values = groups.iter().map(|workload| of(workload, kind)).collect::<Option<Vec<_>>>()?;
                Some(Kind { name: (*title).to_owned(), values })
            });
            bars.collect()
        };
        let measured = Axis { label: "time / passthrough", top: MAX_SHOWN, tens: false };
        let title = "measured on emulated guests: workload time relative to passthrough";
        bars::draw(&file.with_extension("svg"), title, &groups, &kinds("time", BASELINE), measured)?;
        let modelled = Axis { label: "time / native", top: MODEL_TOP, tens: true };
        let title = "modelled: workload time relative to native (GPUvm's figure 4)";
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let beside = file.with_file_name(format!("{name}-model.svg"));
        bars::draw(&beside, title, &groups, &kinds("model", NATIVE), modelled)?;
    }
    let bars = WAYS.iter().filter_map(|(way, title)| {
        let of = |contexts: &&str| value(&format!("pv-contexts.{way}.{contexts}.model"));
        let values = CONTEXTS.iter().map(of).collect::<Option<Vec<_>>>()?;
        Some(Kind { name: (*title).to_owned(), values })
    });
    let bars: Vec<Kind> = bars.collect();
    if !bars.is_empty() {
        let axis = Axis { label: "ms per context", top: MODEL_TOP, tens: true };
        let title = "modelled: cost per context with 1 to 8 contexts (GPUvm's figure 6)";
        bars::draw(&file.with_extension("svg"), title, &CONTEXTS, &bars, axis)?;
    }
    Ok(())
}
