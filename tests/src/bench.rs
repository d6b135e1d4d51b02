//! Reports of benchmarks: metrics with their baseline and target, as a table and as JSON.

pub mod conditions;
mod record;

use std::borrow::Cow;

use serde_json::{Value, json};

pub use record::Record;

/// Demand on a metric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    /// At most this.
    AtMost(f64),
    /// At least this.
    AtLeast(f64),
    /// Reported only.
    None,
}

/// One figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    /// Name, dotted.
    pub name: String,
    /// Value.
    pub value: f64,
    /// Unit of value and baseline.
    pub unit: Cow<'static, str>,
    /// Value that it is compared with, measured in the same run.
    pub baseline: Option<f64>,
    /// Demand on the value over baseline if there is one, else on the value.
    pub target: Target,
    /// Value that others have published of the same.
    pub peer: Option<&'static str>,
}

impl Metric {
    /// A figure that is only reported.
    pub fn plain(name: impl Into<String>, value: f64, unit: &'static str) -> Self {
        Self { name: name.into(), value, unit: Cow::Borrowed(unit), baseline: None, target: Target::None, peer: None }
    }

    /// A figure with its baseline; the target is of the ratio.
    pub fn ratio(name: impl Into<String>, value: f64, unit: &'static str, baseline: f64, target: Target) -> Self {
        Self { name: name.into(), value, unit: Cow::Borrowed(unit), baseline: Some(baseline), target, peer: None }
    }

    /// A figure as it stands in a file, if it is one.
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
            // Said again by who measures.
            peer: None,
        })
    }

    /// With a target.
    #[must_use]
    pub fn target(self, target: Target) -> Self {
        Self { target, ..self }
    }

    /// Beside what others have published.
    #[must_use]
    pub fn beside(self, peer: &'static str) -> Self {
        Self { peer: Some(peer), ..self }
    }

    fn judged(&self) -> f64 {
        self.baseline.map_or(self.value, |baseline| self.value / baseline)
    }

    /// Returns whether the target is met; `None` without one.
    pub fn met(&self) -> Option<bool> {
        match self.target {
            Target::AtMost(most) => Some(self.judged() <= most),
            Target::AtLeast(least) => Some(self.judged() >= least),
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
        })
    }
}

/// Prints the table.
pub fn print(metrics: &[Metric]) {
    println!(
        "{:44} {:>14} {:8} {:>14} {:>8} {:>10}  met  what others report",
        "metric", "value", "unit", "baseline", "ratio", "target"
    );
    for metric in metrics {
        let baseline = metric.baseline.map_or("-".to_owned(), |baseline| format!("{baseline:.1}"));
        let ratio = metric.baseline.map_or("-".to_owned(), |_| format!("{:.3}", metric.judged()));
        let met = match metric.met() {
            Some(true) => "yes",
            Some(false) => "NO",
            None => "-",
        };
        println!(
            "{:44} {:>14} {:8} {baseline:>14} {ratio:>8} {:>10}  {met:3}  {}",
            metric.name,
            shown(metric.value),
            metric.unit,
            metric.target_text(),
            metric.peer.unwrap_or_default()
        );
    }
}

/// Small values with the digits that tell them apart.
fn shown(value: f64) -> String {
    if value.abs() < 10.0 { format!("{value:.3}") } else { format!("{value:.1}") }
}

/// Returns who of `count` goes first, second and so on in a round: another one each time, and forwards and backwards in
/// turns, so that none always follows the same one.
pub fn order(count: usize, round: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    order.rotate_left(round % count.max(1));
    if !round.is_multiple_of(2) {
        order.reverse();
    }
    order
}

/// The value that so many of some measurements are at most: 0.99 of them, say.
pub fn quantile(values: &[f64], part: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(place.max(1) - 1).copied()
}

/// The middle one of some measurements; of an even number, the lower.
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
    fn target_is_of_the_ratio_when_there_is_a_baseline() {
        let metric = Metric::ratio("read", 24.0, "us", 20.0, Target::AtMost(1.2));
        assert_eq!(metric.met(), Some(true));
        assert_eq!(Metric { value: 24.1, ..metric }.met(), Some(false));
        assert_eq!(Metric::plain("count", 3.0, "messages").met(), None);
    }

    /// A figure that is a little beyond what its target demands.
    fn worsened(metric: &Metric) -> Metric {
        let of = metric.baseline.unwrap_or(1.0);
        let value = match metric.target {
            Target::AtMost(most) => (most + most.abs() * 0.01 + 1e-6) * of,
            Target::AtLeast(least) => (least - least.abs() * 0.01 - 1e-6) * of,
            Target::None => metric.value,
        };
        Metric { value, ..metric.clone() }
    }

    /// The files of figures in the documentation, with the rows that benchmarks of this program have.
    fn committed() -> Vec<(String, Vec<Metric>, Vec<Value>)> {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
        let paths = fs::read_dir(docs).unwrap().map(|entry| entry.unwrap().path());
        let files = paths.filter(|path| path.extension().is_some_and(|of| of == "json")).filter_map(|path| {
            let text = fs::read_to_string(&path).unwrap();
            let rows = serde_json::from_str::<Value>(&text).unwrap()["metrics"].as_array()?.clone();
            let metrics = rows.iter().filter_map(Metric::of_json).collect();
            Some((path.file_name().unwrap().to_string_lossy().into_owned(), metrics, rows))
        });
        files.collect()
    }

    #[test]
    fn figures_in_the_documentation_are_judged_and_would_be_missed_if_they_were_worse() {
        let files = committed();
        assert!(files.iter().any(|(_, metrics, _)| metrics.iter().any(|metric| metric.met() == Some(true))));
        for (file, metrics, rows) in files {
            assert_eq!(metrics.len(), rows.len(), "{file}: a row is no figure");
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
