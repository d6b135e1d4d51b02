//! `mediatorctl memory profile`: files with access counts for ranges of a guest's VRAM.
//!
//! Each line is `RANGE COUNT`, such as `16M+2M 4711`; `#` starts a comment.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;
use hyper::Method;
use serde_json::json;

use super::{RangeOf, about, hint, vm_path};
use crate::Form;
use crate::client::{Client, ClientError};
use crate::values::span;

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum ProfileCommand {
    /// Counts accesses to a guest's VRAM for a given time, and writes a profile
    Record {
        /// Name of the virtual machine
        vm: String,
        /// Duration of the recording, such as 10s; at most one minute
        #[arg(long = "for", value_name = "TIME", default_value = "10s", value_parser = span)]
        length: Duration,
        /// File to write, with lines of `RANGE COUNT`
        #[arg(long = "out", value_name = "FILE")]
        out: PathBuf,
    },
    /// Loads a profile, which replaces the existing counts of its ranges
    Load {
        /// Name of the virtual machine
        vm: String,
        /// File with lines of `RANGE COUNT`, such as `16M+2M 4711`; `#` starts a comment
        file: PathBuf,
    },
}

impl ProfileCommand {
    pub(super) fn answer(self, client: &Client, form: Form) -> Result<String, ClientError> {
        match self {
            Self::Load { vm, file } => {
                let text = std::fs::read_to_string(&file)
                    .map_err(|source| ClientError::File { path: file.clone(), source })?;
                let hints = read(&text).map_err(|what| ClientError::Desired { path: file, what })?;
                hint(client, &vm, hints)
            }
            Self::Record { vm, length, out } => {
                let path = format!("{}/accesses?for_ms={}", vm_path(&vm), length.as_millis());
                let answer = client.request(Method::POST, &path, Default::default())?;
                let profile: api::AccessProfile =
                    serde_json::from_slice(&answer).map_err(|error| ClientError::protocol(error.to_string()))?;
                let text = written(&vm, length, &profile);
                std::fs::write(&out, text).map_err(|source| ClientError::File { path: out.clone(), source })?;
                let (file, ranges, counted) = (out.display().to_string(), profile.ranges.len(), unit(profile.counted));
                let summary = json!({ "file": file, "ranges": ranges, "counted": profile.counted });
                Ok(form
                    .render(&summary, |_| format!("{ranges} ranges of {vm}'s VRAM in {file}, counted by {counted}\n")))
            }
        }
    }
}

fn unit(counted: api::Counted) -> &'static str {
    match counted {
        api::Counted::Bursts => "the card's bursts",
        api::Counted::Submissions => "submissions that refer to them",
    }
}

/// Returns the lines of a profile.
fn written(vm: &str, length: Duration, profile: &api::AccessProfile) -> String {
    let (unit, seconds) = (unit(profile.counted), length.as_secs_f64());
    let mut text = format!("# accesses of {vm} in {seconds} s, counted by {unit}\n");
    // Loaded counts are limited to 32 bits. Only their ratios matter.
    let most = profile.ranges.iter().map(|accessed| accessed.count).max().unwrap_or(0);
    let shift = 32u32.saturating_sub(most.leading_zeros());
    for api::Accessed { range: api::Range { start, bytes }, count } in &profile.ranges {
        let count = (count >> shift).max(1);
        let _ = writeln!(text, "{start}+{bytes} {count}");
    }
    text
}

/// Parses a profile's lines as hints.
fn read(text: &str) -> Result<Vec<api::Hint>, String> {
    let line = |(number, line): (usize, &str)| {
        let said = line.split('#').next().unwrap_or_default().trim();
        if said.is_empty() {
            return None;
        }
        let parsed = said.split_once(char::is_whitespace).and_then(|(range, count)| {
            let (range, count) = (range.parse::<RangeOf>().ok()?, count.trim().parse().ok()?);
            Some(about(range, |hint| hint.accesses = Some(count)))
        });
        Some(parsed.ok_or_else(|| format!("line {}: `{said}`, expected RANGE COUNT such as `16M+2M 4711`", number + 1)))
    };
    text.lines().enumerate().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_names_the_line_that_is_wrong() {
        let hints = read("# of a run\n0+2M 5\n\n2M+2M 7 # hot\n").unwrap();
        assert_eq!(hints.iter().map(|hint| hint.accesses).collect::<Vec<_>>(), [Some(5), Some(7)]);
        assert!(read("0+2M 5\n2M 7\n").unwrap_err().starts_with("line 2: `2M 7`"));
    }

    #[test]
    fn written_profile_when_read_keeps_order_of_counts() {
        let accessed = |start, count| api::Accessed { range: api::Range { start, bytes: 2 << 20 }, count };
        for most in [3, u64::from(u32::MAX), 1 << 32, u64::MAX] {
            let ranges = vec![accessed(0, most), accessed(4 << 20, most / 3), accessed(6 << 20, 1)];
            let profile = api::AccessProfile { counted: api::Counted::Bursts, ranges };
            let hints = read(&written("a", Duration::from_secs(2), &profile)).unwrap();
            let counts: Vec<u32> = hints.iter().filter_map(|hint| hint.accesses).collect();
            assert!(counts[0] > counts[1] && counts[1] >= counts[2] && counts[2] == 1, "{counts:?}");
            assert_eq!(hints[1].range, api::Range { start: 4 << 20, bytes: 2 << 20 });
        }
    }
}
