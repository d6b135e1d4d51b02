//! What benchmarks report: metrics with their baseline and target, as a table and as JSON.

use std::borrow::Cow;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// What a target demands of a metric.
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
    /// What it is compared with, measured in the same run.
    pub baseline: Option<f64>,
    /// What is demanded, of value over baseline if there is one, else of the value.
    pub target: Target,
    /// What others have published of the same.
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

    /// Whether the target is met; `None` without one.
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

/// Prints the table, and writes the JSON file if one is wanted.
pub fn report(metrics: &[Metric], file: Option<&Path>) -> Result<()> {
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
    file.map_or(Ok(()), |file| write(metrics, file))
}

/// Writes the JSON file.
pub fn write(metrics: &[Metric], file: &Path) -> Result<()> {
    let text = serde_json::to_string_pretty(&json!({
        "metrics": metrics.iter().map(Metric::json).collect::<Vec<_>>()
    }))?;
    fs::write(file, text + "\n").with_context(|| format!("cannot write {}", file.display()))
}

/// Reads the figures of a JSON file that [`write()`] has made. None when there is no such file.
pub fn read(file: &Path) -> Result<Vec<Metric>> {
    if !file.exists() {
        return Ok(Vec::new());
    }
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let found: Value = serde_json::from_str(&text).with_context(|| format!("{} holds no figures", file.display()))?;
    Ok(found["metrics"].as_array().into_iter().flatten().filter_map(Metric::of_json).collect())
}

/// Small values with the digits that tell them apart.
fn shown(value: f64) -> String {
    if value.abs() < 10.0 { format!("{value:.3}") } else { format!("{value:.1}") }
}

/// Who of `count` goes first, second and so on in a round: another one each time, and forwards and backwards in turns, so that none
/// always follows the same one.
pub fn order(count: usize, round: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    order.rotate_left(round % count.max(1));
    if !round.is_multiple_of(2) {
        order.reverse();
    }
    order
}

/// The middle one of some measurements; of an even number, the lower.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().checked_sub(1)? / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_is_of_the_ratio_when_there_is_a_baseline() {
        let metric = Metric::ratio("read", 24.0, "us", 20.0, Target::AtMost(1.2));
        assert_eq!(metric.met(), Some(true));
        assert_eq!(Metric { value: 24.1, ..metric }.met(), Some(false));
        assert_eq!(Metric::plain("count", 3.0, "messages").met(), None);
    }

    #[test]
    fn what_was_written_is_read() {
        let metrics = [
            Metric::ratio("read", 24.0, "us", 20.0, Target::AtMost(1.2)),
            Metric::ratio("kept", 96.0, "1/s", 100.0, Target::AtLeast(0.96)),
            Metric::plain("strikes", 0.0, "strikes").target(Target::AtMost(0.0)),
            Metric::plain("count", 3.0, "messages"),
        ];
        let file = tempfile::NamedTempFile::new().unwrap();
        write(&metrics, file.path()).unwrap();
        assert_eq!(read(file.path()).unwrap(), metrics);
        assert!(read(&file.path().with_extension("none")).unwrap().is_empty());
    }

    #[test]
    fn median_is_of_the_sorted_values() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[]), None);
    }
}
