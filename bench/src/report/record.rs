//! Figures of a run, which are written to a file immediately, because long measurements may be interrupted.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Metric, conditions};

/// Recorded figures, and the names of completed benchmarks.
#[derive(Debug, Default)]
pub struct Record {
    file: Option<PathBuf>,
    metrics: Vec<Metric>,
    ended: BTreeSet<String>,
}

impl Record {
    /// Opens a record in `file`, if given. If `resume` is true, continues with the contents of an existing file.
    /// Otherwise, starts without figures.
    ///
    /// # Errors
    /// Returns an error if the file is not a record.
    pub fn open(file: Option<PathBuf>, resume: bool) -> Result<Self> {
        let kept = file.as_ref().filter(|file| resume && file.exists());
        let Some(path) = kept else { return Ok(Self { file, ..Self::default() }) };
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let found: Value =
            serde_json::from_str(&text).with_context(|| format!("{} contains no figures", path.display()))?;
        let rows = |key: &str| found[key].as_array().into_iter().flatten();
        let metrics = rows("metrics").filter_map(Metric::of_json).collect();
        let ended = rows("ended").filter_map(Value::as_str).map(str::to_owned).collect();
        Ok(Self { metrics, ended, file })
    }

    /// Returns all figures recorded so far.
    pub fn metrics(&self) -> &[Metric] {
        &self.metrics
    }

    /// Returns true if the figures of a benchmark are complete.
    pub fn has_ended(&self, benchmark: &str) -> bool {
        self.ended.contains(benchmark)
    }

    /// Adds new figures. A new figure replaces an earlier one with the same name.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn put(&mut self, found: Vec<Metric>) -> Result<()> {
        for metric in found {
            match self.metrics.iter_mut().find(|known| known.name == metric.name) {
                Some(known) => *known = metric,
                None => self.metrics.push(metric),
            }
        }
        self.save()
    }

    /// Removes a figure. The file changes with the next call of [`Self::put`] or [`Self::end`].
    pub fn forget(&mut self, name: &str) {
        self.metrics.retain(|metric| metric.name != name);
    }

    /// Records that the figures of a benchmark are complete.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn end(&mut self, benchmark: &str) -> Result<()> {
        self.ended.insert(benchmark.to_owned());
        self.save()
    }

    fn save(&self) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let text = serde_json::to_string_pretty(&json!({
            "run": conditions::note(),
            "ended": self.ended,
            "metrics": self.metrics.iter().map(Metric::json).collect::<Vec<_>>()
        }))?;
        fs::write(file, text + "\n").with_context(|| format!("cannot write {}", file.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Target;
    use super::*;

    fn strikes(value: f64) -> Metric {
        Metric::plain("strikes", value, "strikes").target(Target::AtMost(0.0))
    }

    #[test]
    fn metrics_of_interrupted_run_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let file = Some(folder.path().join("all.json"));
        let metrics = [
            Metric::ratio("read", 24.0, "us", 20.0, Target::AtMost(1.2)),
            Metric::ratio("kept", 96.0, "1/s", 100.0, Target::AtLeast(0.96)),
            strikes(0.0),
            Metric::plain("count", 3.0, "messages"),
        ];
        let mut record = Record::open(file.clone(), false).unwrap();
        record.put(metrics[..1].to_vec()).unwrap();
        record.put(metrics[1..].to_vec()).unwrap();
        record.end("transport").unwrap();
        let mut resumed = Record::open(file.clone(), true).unwrap();
        assert_eq!(resumed.metrics(), metrics);
        assert!(resumed.has_ended("transport") && !resumed.has_ended("fv"));
        resumed.put(vec![strikes(2.0)]).unwrap();
        resumed.forget("count");
        resumed.end("fv").unwrap();
        let again = Record::open(file.clone(), true).unwrap();
        assert_eq!((again.metrics().len(), &again.metrics()[2]), (3, &strikes(2.0)));
        let text = fs::read_to_string(file.as_ref().unwrap()).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["run"], *conditions::note());
        assert!(Record::open(file, false).unwrap().metrics().is_empty(), "a run from the beginning");
    }

    #[test]
    fn file_without_record_is_an_error_with_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("broken.json");
        fs::write(&file, "{").unwrap();
        let error = format!("{:#}", Record::open(Some(file), true).unwrap_err());
        assert!(error.contains("broken.json contains no figures"), "{error}");
    }
}
