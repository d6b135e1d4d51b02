//! Figures of the workloads: measured times, counts, and modelled times.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use super::{BASELINE, DRIVER, KINDS, Measured, NATIVE, PHASES, Table, workloads};
use crate::model::{Bill, Counts, Platform};
use crate::report::{Metric, Target, median};

/// Counts that GPUvm published for one benchmark.
const PUBLISHED: [(&str, &str); 2] =
    [("shadow_updates", "GPUvm: 26-52 naive, 6-7 lazy"), ("calls", "GPUvm: 1,169-34,784 naive, 81-218 multicall")];

/// A column of the report.
struct Column {
    name: &'static str,
    /// Kind that provides the counts.
    counts: &'static str,
    platform: Platform,
    target: Target,
}

/// Returns the columns of all kinds, and a column for the host, which uses the driver's counts in passthrough mode.
fn columns() -> impl Iterator<Item = Column> {
    let native = Column { name: NATIVE, counts: BASELINE, platform: Platform::Native, target: Target::None };
    let kinds = KINDS.iter().map(|kind| Column {
        name: kind.name,
        counts: kind.name,
        platform: kind.platform,
        target: kind.target,
    });
    [native].into_iter().chain(kinds)
}

fn measurement<'a>(table: &'a Table, workload: &'static str, kind: &'static str) -> Result<&'a Measured> {
    table.get(&(workload, kind)).with_context(|| format!("{workload}: no measurement of {kind}"))
}

/// Returns the total counts of several phases.
fn sum<'a>(counts: impl IntoIterator<Item = &'a Counts>) -> Counts {
    counts.into_iter().fold(Counts::default(), |sum, counts| sum.plus(counts))
}

/// Returns all figures of the table. `factor` is the factor by which a guest's CPU is slower than the host's.
pub fn all(table: &Table, factor: f64) -> Result<Vec<Metric>> {
    let measured: Vec<&'static str> =
        workloads().filter(|workload| table.contains_key(&(*workload, BASELINE))).collect();
    let mut metrics = vec![Metric::plain("pv.emulation", factor, "x")];
    let mut ratios: BTreeMap<(&'static str, &'static str), Vec<f64>> = BTreeMap::new();
    for &workload in &measured {
        let base = measurement(table, workload, BASELINE)?;
        let base_bill = Bill::for_counts(Platform::Passthrough, &sum(base.counts.values()));
        let common = common(table, workload, factor)? * 1e6;
        for column in columns() {
            let kind = measurement(table, workload, column.counts)?;
            let counts = sum(kind.counts.values());
            let bill = Bill::for_counts(column.platform, &counts);
            let name = format!("pv.{workload}.{}", column.name);
            let modelled = |what: &str, common: f64| {
                let [us, of] = [bill.us() + common, base_bill.us() + common];
                let metric = Metric::ratio(format!("{name}.{what}"), us / 1e3, "ms", of / 1e3, column.target);
                metric.within(Some(bill.ratio(&base_bill, common)))
            };
            metrics.push(modelled("model", 0.0));
            metrics.push(modelled("model_whole", common));
            let mut note = |what, ratio| {
                if workload != DRIVER {
                    ratios.entry((column.name, what)).or_default().push(ratio);
                }
            };
            note("model", bill.us() / base_bill.us());
            note("model_whole", (bill.us() + common) / (base_bill.us() + common));
            for phase in PHASES {
                let Some(counts) = kind.counts.get(phase) else { continue };
                let us = Bill::for_counts(column.platform, counts).us();
                metrics.push(Metric::plain(format!("{name}.model.{phase}"), us / 1e3, "ms"));
            }
            if column.name == NATIVE {
                continue;
            }
            let milliseconds = |measured: &Measured| measured.totals.iter().map(|s| s * 1e3).collect::<Vec<_>>();
            if column.name != BASELINE {
                let (own, of) = (milliseconds(kind), milliseconds(base));
                metrics.push(Metric::ratio_of_samples(format!("{name}.time"), &own, "ms", &of, Target::None));
                note("time", middle(&kind.totals)? / middle(&base.totals)?);
            }
            metrics.extend(counted(&name, &counts));
        }
    }
    for ((column, what), ratios) in &ratios {
        let target = columns().find(|known| known.name == *column).map_or(Target::None, |known| known.target);
        let target = if *what == "time" { Target::None } else { target };
        let name = format!("pv.geometric_mean.{column}.{what}");
        metrics.push(Metric::ratio(name, geometric_mean(ratios), "x", 1.0, target));
    }
    metrics.extend(phases(table, &measured)?);
    Ok(metrics)
}

/// Returns the figures of all workloads combined, by phase.
fn phases(table: &Table, measured: &[&'static str]) -> Result<Vec<Metric>> {
    let programs: Vec<&'static str> = measured.iter().copied().filter(|workload| *workload != DRIVER).collect();
    let mut metrics = Vec::new();
    for phase in PHASES {
        let counts = |kind: &'static str| -> Result<Counts> {
            let found = programs.iter().map(|workload| Ok(measurement(table, workload, kind)?.counts.get(phase)));
            Ok(sum(found.collect::<Result<Vec<_>>>()?.into_iter().flatten()))
        };
        let seconds = |kind: &'static str| -> Result<f64> {
            let times = programs.iter().map(|workload| {
                let phases = &measurement(table, workload, kind)?.phases;
                middle(phases.get(phase).context("no measurement")?)
            });
            times.sum()
        };
        let base = Bill::for_counts(Platform::Passthrough, &counts(BASELINE)?);
        for column in columns() {
            let counts = counts(column.counts)?;
            let bill = Bill::for_counts(column.platform, &counts);
            let name = format!("pv.{phase}.{}", column.name);
            let metric = Metric::ratio(format!("{name}.model"), bill.us() / 1e3, "ms", base.us() / 1e3, Target::None);
            metrics.push(metric.within(Some(bill.ratio(&base, 0.0))));
            if column.name != NATIVE {
                let (own, of) = (seconds(column.name)? * 1e3, seconds(BASELINE)? * 1e3);
                metrics.push(Metric::ratio(format!("{name}.time"), own, "ms", of, Target::None));
                metrics.extend(counted(&name, &counts));
            }
        }
    }
    Ok(metrics)
}

/// Returns the nonzero counts.
fn counted(name: &str, counts: &Counts) -> Vec<Metric> {
    let some = counts.named().into_iter().filter(|(_, count)| *count != 0.0);
    some.map(|(what, count)| {
        let metric = Metric::plain(format!("{name}.{what}"), count, "count");
        match PUBLISHED.iter().find(|(of, _)| *of == what) {
            Some((_, peer)) => metric.beside(peer),
            None => metric,
        }
    })
    .collect()
}

/// Returns the time that is common to all kinds, in seconds. This is the sum over all phases of the lowest median of
/// any kind, scaled to a real CPU. It includes messages and the software card, so it exceeds the guest's own time.
fn common(table: &Table, workload: &'static str, factor: f64) -> Result<f64> {
    let mut seconds = 0.0;
    for phase in PHASES {
        let mut least = f64::INFINITY;
        for kind in &KINDS {
            if let Some(times) = measurement(table, workload, kind.name)?.phases.get(phase) {
                least = least.min(middle(times)?);
            }
        }
        seconds += if least.is_finite() { least / factor } else { 0.0 };
    }
    Ok(seconds)
}

fn middle(values: &[f64]) -> Result<f64> {
    median(values).context("no measurement")
}

fn geometric_mean(ratios: &[f64]) -> f64 {
    (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp()
}
