//! Benchmark reports: metrics with baseline, target and interval, as a table and as JSON.

pub mod conditions;
pub mod interval;
mod record;

use std::borrow::Cow;

use serde_json::{Value, json};

pub use interval::Interval;
pub use record::Record;

/// Target for a metric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    /// The value must not exceed this limit.
    AtMost(f64),
    /// The value must be at least this limit.
    AtLeast(f64),
    /// The value is only reported.
    None,
}

/// A figure of a benchmark.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    /// Name. Its parts are separated by dots.
    pub name: String,
    /// Measured or modelled value.
    pub value: f64,
    /// Unit of value and baseline.
    pub unit: Cow<'static, str>,
    /// Value for comparison, measured in the same run.
    pub baseline: Option<f64>,
    /// Target for the ratio of value to baseline, or for the value if the metric has no baseline.
    pub target: Target,
    /// Interval of the ratio of value to baseline, or of the value if the metric has no baseline. The target applies to
    /// the worse bound.
    pub interval: Option<Interval>,
    /// Published value of the same metric, as text.
    pub peer: Option<&'static str>,
}

impl Metric {
    /// Creates a metric that is only reported.
    pub fn plain(name: impl Into<String>, value: f64, unit: &'static str) -> Self {
        let (name, unit) = (name.into(), Cow::Borrowed(unit));
        Self { name, value, unit, baseline: None, target: Target::None, interval: None, peer: None }
    }

    /// Creates a metric with a baseline.
    pub fn ratio(name: impl Into<String>, value: f64, unit: &'static str, baseline: f64, target: Target) -> Self {
        Self { baseline: Some(baseline), ..Self::plain(name, value, unit).target(target) }
    }

    /// Creates a metric from the median of the samples and its interval. Without samples, the value is NaN, which fails
    /// every target.
    pub fn of_samples(name: impl Into<String>, samples: &[f64], unit: &'static str) -> Self {
        let value = median(samples).unwrap_or(f64::NAN);
        Self { interval: Interval::from_samples(samples, median), ..Self::plain(name, value, unit) }
    }

    /// Creates a metric from the medians of samples and of a baseline from the same rounds, with the interval of their
    /// ratio.
    pub fn ratio_of_samples(
        name: impl Into<String>,
        samples: &[f64],
        unit: &'static str,
        baseline: &[f64],
        target: Target,
    ) -> Self {
        let interval = Interval::of_ratio(samples, baseline, median);
        let [value, baseline] = [samples, baseline].map(|of| median(of).unwrap_or(f64::NAN));
        Self { interval, ..Self::ratio(name, value, unit, baseline, target) }
    }

    /// Parses a row of a results file as a metric. Returns `None` if the row is not a metric.
    fn of_json(row: &Value) -> Option<Self> {
        let number = |key: &str| row[key].as_f64();
        let target = row["target"].as_str()?;
        let bound = |sign: &str| target.strip_prefix(sign)?.trim().trim_end_matches('x').parse().ok();
        let target = match (bound("<="), bound(">=")) {
            (Some(most), _) => Target::AtMost(most),
            (_, Some(least)) => Target::AtLeast(least),
            (None, None) => Target::None,
        };
        Some(Self {
            name: row["name"].as_str()?.to_owned(),
            value: number("value")?,
            unit: Cow::Owned(row["unit"].as_str()?.to_owned()),
            baseline: number("baseline"),
            target,
            interval: Interval::of_json(row),
            // The benchmark sets this value later.
            peer: None,
        })
    }

    /// Sets the target.
    #[must_use]
    pub fn target(self, target: Target) -> Self {
        Self { target, ..self }
    }

    /// Sets the interval.
    #[must_use]
    pub fn within(self, interval: Option<Interval>) -> Self {
        Self { interval, ..self }
    }

    /// Sets the published value.
    #[must_use]
    pub fn beside(self, peer: &'static str) -> Self {
        Self { peer: Some(peer), ..self }
    }

    fn judged(&self) -> f64 {
        self.baseline.map_or(self.value, |baseline| self.value / baseline)
    }

    /// Returns true if the target is met by the worse bound of the interval, or by the value if the metric has no
    /// interval. Returns `None` if there is no target.
    pub fn met(&self) -> Option<bool> {
        let (low, high) = self.interval.map_or((self.judged(), self.judged()), |Interval { low, high }| (low, high));
        match self.target {
            Target::AtMost(most) => Some(high <= most),
            Target::AtLeast(least) => Some(low >= least),
            Target::None => None,
        }
    }

    fn target_text(&self) -> String {
        let of = if self.baseline.is_some() { "x" } else { "" };
        match self.target {
            Target::AtMost(most) => format!("<= {most}{of}"),
            Target::AtLeast(least) => format!(">= {least}{of}"),
            Target::None => "-".to_owned(),
        }
    }

    fn json(&self) -> Value {
        json!({
            "name": self.name, "value": self.value, "unit": self.unit, "baseline": self.baseline,
            "ratio": self.baseline.map(|_| self.judged()), "target": self.target_text(), "met": self.met(), "peer": self.peer,
            "low": self.interval.map(|interval| interval.low), "high": self.interval.map(|interval| interval.high),
        })
    }
}

/// Prints the metrics as a table.
pub fn print(metrics: &[Metric]) {
    println!(
        "{:44} {:>14} {:8} {:>14} {:>8} {:>15} {:>10}  met  what others report",
        "metric", "value", "unit", "baseline", "ratio", "95 %", "target"
    );
    for metric in metrics {
        let baseline = metric.baseline.map_or("-".to_owned(), |baseline| format!("{baseline:.1}"));
        let ratio = metric.baseline.map_or("-".to_owned(), |_| format!("{:.3}", metric.judged()));
        let interval = metric.interval.map_or("-".to_owned(), |of| format!("{} to {}", shown(of.low), shown(of.high)));
        let met = match metric.met() {
            Some(true) => "yes",
            Some(false) => "NO",
            None => "-",
        };
        println!(
            "{:44} {:>14} {:8} {baseline:>14} {ratio:>8} {interval:>15} {:>10}  {met:3}  {}",
            metric.name,
            shown(metric.value),
            metric.unit,
            metric.target_text(),
            metric.peer.unwrap_or_default()
        );
    }
}

/// Formats a value with one decimal place, or with three if its magnitude is less than 10.
fn shown(value: f64) -> String {
    if value.abs() < 10.0 { format!("{value:.3}") } else { format!("{value:.1}") }
}

/// Returns the order of `count` participants in a round. The order rotates and changes direction, so that no
/// participant always follows the same other participant.
pub fn order(count: usize, round: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    order.rotate_left(round % count.max(1));
    if !round.is_multiple_of(2) {
        order.reverse();
    }
    order
}

/// Returns the quantile of the measurements at the fraction `part`, such as 0.99.
pub fn quantile(values: &[f64], part: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(place.max(1) - 1).copied()
}

/// Returns the median. For an even number of values, returns the lower of the two middle values.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().checked_sub(1)? / 2).copied()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn target_applies_to_ratio_if_there_is_a_baseline() {
        let metric = Metric::ratio("read", 24.0, "us", 20.0, Target::AtMost(1.2));
        assert_eq!(metric.met(), Some(true));
        assert_eq!(Metric { value: 24.1, ..metric }.met(), Some(false));
        assert_eq!(Metric::plain("count", 3.0, "messages").met(), None);
    }

    /// Returns the metric with a value slightly worse than its target, or unchanged if it has no target.
    fn worsened(metric: &Metric) -> Metric {
        let of = metric.baseline.unwrap_or(1.0);
        let value = match metric.target {
            Target::AtMost(most) => (most + most.abs() * 0.01 + 1e-6) * of,
            Target::AtLeast(least) => (least - least.abs() * 0.01 - 1e-6) * of,
            Target::None => metric.value,
        };
        let shift = (value - metric.value) / of;
        let interval = metric.interval.map(|Interval { low, high }| Interval { low: low + shift, high: high + shift });
        Metric { value, interval, ..metric.clone() }
    }

    #[test]
    fn target_is_met_if_worse_end_of_interval_meets_it() {
        let baseline = [20.0, 21.0, 19.5, 20.5, 20.0, 19.0, 20.0];
        let slower = |by: f64| baseline.map(|value| value * by);
        let measured =
            |samples: &[f64]| Metric::ratio_of_samples("read", samples, "us", &baseline, Target::AtMost(1.1));
        let even = measured(&slower(1.05));
        assert_eq!((even.met(), even.interval.is_some()), (Some(true), true));
        // A few rounds are deliberately slow, which affects the interval but not the median.
        let mut unsteady = slower(1.05);
        unsteady[1..4].iter_mut().for_each(|value| *value *= 1.3);
        let unsteady = measured(&unsteady);
        assert!(unsteady.judged() <= 1.1 && unsteady.met() == Some(false), "{unsteady:?}");
        assert_eq!(measured(&slower(1.11)).met(), Some(false));
        let rate = |least| Metric::of_samples("rate", &baseline, "1/s").target(Target::AtLeast(least));
        assert_eq!([rate(19.0).met(), rate(19.9).met()], [Some(true), Some(false)], "{:?}", rate(0.0));
        assert_eq!(Metric::of_samples("rate", &[], "1/s").target(Target::AtLeast(0.0)).met(), Some(false));
    }

    #[test]
    fn figure_in_a_file_keeps_its_interval() {
        let metric = Metric::plain("read", 3.0, "us").within(Some(Interval { low: 2.5, high: 3.5 }));
        let metric = metric.target(Target::AtMost(3.2));
        assert_eq!(Metric::of_json(&metric.json()), Some(metric.clone()));
        assert_eq!(metric.json()["met"], Value::Bool(false));
    }

    /// Returns the committed results files, with the rows produced by this program's benchmarks.
    fn committed() -> Vec<(String, Vec<Metric>, Vec<Value>)> {
        let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("results");
        let paths = fs::read_dir(results).unwrap().map(|entry| entry.unwrap().path());
        let files = paths.filter(|path| path.extension().is_some_and(|of| of == "json")).filter_map(|path| {
            let text = fs::read_to_string(&path).unwrap();
            let rows = serde_json::from_str::<Value>(&text).unwrap()["metrics"].as_array()?.clone();
            let metrics = rows.iter().filter_map(Metric::of_json).collect();
            Some((path.file_name().unwrap().to_string_lossy().into_owned(), metrics, rows))
        });
        files.collect()
    }

    #[test]
    fn documented_figures_are_judged_and_worse_ones_are_missed() {
        let files = committed();
        assert!(files.iter().any(|(_, metrics, _)| metrics.iter().any(|metric| metric.met() == Some(true))));
        for (file, metrics, rows) in files {
            assert_eq!(metrics.len(), rows.len(), "{file}: a row is not a figure");
            for (metric, row) in metrics.iter().zip(rows) {
                assert_eq!(row["met"].as_bool(), metric.met(), "{file}: {}", metric.name);
                if metric.target == Target::None {
                    continue;
                }
                let worse = worsened(metric);
                assert_eq!(worse.met(), Some(false), "{file}: {} cannot be missed", metric.name);
                assert!(worse.json()["met"] == Value::Bool(false), "{file}: {}", metric.name);
            }
        }
    }

    #[test]
    fn median_is_of_the_sorted_values() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[]), None);
    }
}
