//! Conditions of a measurement: commit, host, command and time. Each results file contains them.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::thread::available_parallelism;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

/// Environment variable that contains the commit, for machines without the sources, such as the machine of the CUDA
/// benchmark.
const COMMIT_VARIABLE: &str = "GPU_MEDIATOR_COMMIT";

/// Records the conditions once. Must be called when the program starts, before it causes load.
pub fn note() -> &'static Value {
    static NOTED: OnceLock<Value> = OnceLock::new();
    NOTED.get_or_init(|| {
        let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        json!({
            "commit": std::env::var(COMMIT_VARIABLE).ok().or_else(commit),
            "started": started,
            "command": std::env::args().skip(1).map(|arg| within(root(), &arg)).collect::<Vec<_>>(),
            "processor": processor(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
            "cpus": available_parallelism().map_or(0, usize::from),
            "kernel": fs::read_to_string("/proc/sys/kernel/osrelease").map(|text| text.trim().to_owned()).ok(),
            "load_before": load(&fs::read_to_string("/proc/loadavg").unwrap_or_default()),
        })
    })
}

/// Returns the project's folder.
fn root() -> &'static Path {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    folder.parent().unwrap_or(folder)
}

/// Makes an argument relative to `root` if it is a path within `root`, because results files are read on other
/// machines.
fn within(root: &Path, arg: &str) -> String {
    Path::new(arg).strip_prefix(root).ok().and_then(Path::to_str).unwrap_or(arg).to_owned()
}

/// Returns the commit of the sources, with a `+` appended if they contain uncommitted changes.
fn commit() -> Option<String> {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).current_dir(root()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let head = git(&["rev-parse", "HEAD"])?;
    // Exclude results of earlier measurements, which are not part of the measured sources.
    let others = [":(top,exclude)docs", ":(top,exclude)bench/results"];
    let changed = git(&[&["status", "--porcelain", "--untracked-files=no", "--", ":/"], &others[..]].concat())?;
    Some(if changed.is_empty() { head } else { head + "+" })
}

/// Returns the CPU model from the text of `/proc/cpuinfo`.
fn processor(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    line.split_once(':').map(|(_, model)| model.trim().to_owned())
}

/// Returns the 1-minute load average from the text of `/proc/loadavg`.
fn load(text: &str) -> Option<f64> {
    text.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_name_no_path_of_this_host() {
        let within = |arg| within(Path::new("/home/me/mediator"), arg);
        assert_eq!(within("/home/me/mediator/bench/results/move.json"), "bench/results/move.json");
        assert_eq!(within("/tmp/move.json"), "/tmp/move.json");
        assert_eq!(within("--json"), "--json");
    }

    #[test]
    fn conditions_are_those_of_this_host() {
        let noted = note();
        assert!(noted["started"].as_u64().unwrap() > 1_700_000_000 && noted["cpus"].as_u64().unwrap() > 0, "{noted}");
        assert_eq!(processor("processor: 0\nmodel name\t: A B 7\n"), Some("A B 7".to_owned()));
        assert_eq!((processor(""), load("0.25 1 2 3/4 5"), load("")), (None, Some(0.25), None));
    }
}
