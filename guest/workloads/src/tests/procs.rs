//! Concurrent processes, each with its own GPU address space.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::Facts;
use crate::options::Options;
use crate::rig::{Counts, Rig};

/// Runs `procs [--n N] [--quick]`: N processes, each of which runs a sweep.
pub fn run(rig: &Rig, options: &Options) -> Result<Facts> {
    let count = options.number("n", if options.flag("quick") { 2 } else { 4 })?;
    if count == 0 || count > 64 {
        bail!("--n {count}: from 1 to 64");
    }
    let this = std::env::current_exe().context("the path of this program")?;
    let node = options.text("node").unwrap_or(crate::DEFAULT_NODE);
    let children: Vec<Child> = (0..count)
        .map(|_| {
            let seed = rig.random().next().to_string();
            let arguments = ["sweep", "--quick", "--node", node, "--seed", &seed];
            Command::new(&this).args(arguments).stdout(Stdio::piped()).spawn().context("starting a process")
        })
        .collect::<Result<_>>()?;
    let mut failed = 0;
    for (number, mut child) in children.into_iter().enumerate() {
        let stdout = child.stdout.take().context("output of a process")?;
        let mut result = None;
        for line in BufReader::new(stdout).lines() {
            let line = line?;
            println!("process {number}: {line}");
            if line.starts_with("RESULT ") {
                result = Some(line);
            }
        }
        let good = child.wait()?.success();
        match result.as_deref().and_then(counts_of) {
            Some(counts) if good => rig.add(counts),
            _ => failed += 1,
        }
    }
    ensure!(failed == 0, "{failed} of {count} processes failed");
    Ok(vec![("n", count.to_string())])
}

/// Parses the counts in the result line of a successful process.
fn counts_of(line: &str) -> Option<Counts> {
    let field = |name: &str| line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    let number = |name| field(name)?.parse().ok();
    (field("ok") == Some("true")).then_some(())?;
    Some(Counts { bytes: number("bytes")?, copies: number("copies")?, channels: number("channels")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_come_from_good_results_only() {
        let line = "RESULT name=sweep ok=true bytes=5 copies=6 channels=7 seconds=1.0";
        assert_eq!(counts_of(line), Some(Counts { bytes: 5, copies: 6, channels: 7 }));
        assert_eq!(counts_of("RESULT name=sweep ok=false bytes=5 copies=6 channels=7"), None);
        assert_eq!(counts_of("RESULT name=sweep ok=true bytes=5"), None);
    }
}
