//! The shards that Slurm has assigned to a job on a node, as reported by the controller.
//!
//! A step's environment also contains the shards. However, Slurm keeps variables that it does not set, so the step's
//! user can write them. The environment is therefore only a hint.
//!
//! The controller's response also contains text from the user, such as the job's name. Ambiguous responses are
//! rejected.
//!
//! Sources: `scontrol(1)`, output of `show job --details`.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::nodes;

/// Maximum size of the controller's response in bytes, which suffices for an array of thousands of jobs.
const MAX_ANSWER: u64 = 16 << 20;
/// Interval at which the plugin polls for the response.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Shards of a job on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Granted {
    /// Number of shards.
    pub shards: u32,
    /// The GPUs to which the shards belong. Empty if Slurm does not report them.
    pub gpus: Vec<Gpu>,
}

/// Shards of a job on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Index of the GPU, in the order of `gres.conf`.
    pub index: usize,
    /// Number of shards.
    pub shards: u32,
}

/// The numbers that identify a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Number {
    /// The job's own number.
    pub id: u32,
    /// Number of the job's array and the job's index in it, if the job is in an array.
    pub of_array: Option<(u32, u32)>,
}

/// Queries the controller until it responds, for at most `patience`.
///
/// # Errors
/// Returns an error if the controller does not respond, or does not list the job on this node.
pub fn ask(scontrol: &Path, job: &Number, node: &str, patience: Duration) -> Result<Granted, String> {
    let begin = Instant::now();
    loop {
        let left = patience.saturating_sub(begin.elapsed());
        match answer(scontrol, job, left) {
            Ok(text) => return read(&text, job.id, node),
            Err(what) if left.is_zero() => {
                return Err(format!("the shards of job {} are unknown: {}: {what}", job.id, scontrol.display()));
            }
            Err(_) => thread::sleep(Duration::from_millis(500).min(left)),
        }
    }
}

/// Returns the controller's response about a job.
fn answer(scontrol: &Path, job: &Number, patience: Duration) -> Result<String, String> {
    let mut command = Command::new(scontrol);
    // For a job in an array, query only this job.
    let name = job.of_array.map_or_else(|| job.id.to_string(), |(array, task)| format!("{array}_{task}"));
    command.args(["--details", "show", "job", &name]);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| error.to_string())?;
    let output = child.stdout.take();
    let reader = thread::spawn(move || {
        let mut text = Vec::new();
        let read = output.map(|output| output.take(MAX_ANSWER).read_to_end(&mut text));
        read.transpose().map(|_| text)
    });
    let begin = Instant::now();
    let status = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break Some(status),
            None if begin.elapsed() >= patience.max(POLL_INTERVAL) => break None,
            None => thread::sleep(POLL_INTERVAL),
        }
    };
    if status.is_none() {
        let _ = child.kill();
        let _ = child.wait();
        return Err("it does not respond".to_owned());
    }
    let text = reader.join().map_err(|_| "its output cannot be read".to_owned())?.map_err(|error| error.to_string())?;
    match status {
        Some(status) if status.success() => Ok(String::from_utf8_lossy(&text).into_owned()),
        _ => Err("it has no such job, or its controller does not respond".to_owned()),
    }
}

/// Parses the controller's response about one job: an unindented line, followed by indented lines.
fn read(text: &str, job: u32, node: &str) -> Result<Granted, String> {
    let mut heads = text.lines().filter(|line| !line.is_empty() && !line.starts_with(' '));
    let unclear = |what: &str| {
        format!(
            "job {job}: Slurm's description of it {what}; give the job a name and paths without line breaks. A heterogeneous job \
             cannot have shards"
        )
    };
    match (heads.next(), heads.next()) {
        (Some(head), None) if head.starts_with(&format!("JobId={job} ")) => {}
        (None, _) => return Err(format!("Slurm does not describe job {job}")),
        _ => return Err(unclear("lists several jobs, or another job")),
    }
    let here = |line: &str| {
        let (names, rest) = line.trim_start().strip_prefix("Nodes=")?.split_once(" CPU_IDs=")?;
        nodes::contains(names, node).then(|| rest.split_once(" GRES=").map_or("", |(_, gres)| gres.trim()).to_owned())
    };
    let found: Vec<_> = text.lines().filter_map(here).collect();
    match &found[..] {
        [gres] => shards(gres).ok_or_else(|| format!("job {job}: `{gres}`, expected shards as Slurm describes them")),
        [] => Err(format!("Slurm does not report the resources of job {job} on node `{node}`")),
        _ => Err(unclear("names this node several times")),
    }
}

/// Parses the shards in a list such as `gpu:1(IDX:0),shard:a:25(0/100,25/75)`.
fn shards(list: &str) -> Option<Granted> {
    let mut granted = Granted::default();
    let (mut depth, mut begin) = (0usize, 0);
    let mut entries = Vec::new();
    for (at, c) in list.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.checked_sub(1)?,
            ',' if depth == 0 => {
                entries.push(list.get(begin..at)?);
                begin = at + 1;
            }
            _ => {}
        }
    }
    entries.push(list.get(begin..)?);
    for entry in entries {
        let (words, details) = match entry.split_once('(') {
            Some((words, details)) => (words, details.strip_suffix(')')?),
            None => (entry, ""),
        };
        let mut words = words.split(':');
        if words.next() != Some("shard") {
            continue;
        }
        let count = match details.strip_prefix("CNT:") {
            Some(count) => count,
            None => words.next_back()?,
        };
        granted.shards = granted.shards.checked_add(count.parse().ok()?)?;
        // Each GPU has two numbers: the job's shards and the GPU's total.
        for (index, part) in details.split(',').enumerate() {
            let Some((given, _)) = part.split_once('/') else { continue };
            let shards = given.parse::<u32>().ok()?;
            match granted.gpus.iter_mut().find(|gpu| gpu.index == index) {
                _ if shards == 0 => {}
                // This is another type of shard of the same GPU.
                Some(gpu) => gpu.shards = gpu.shards.checked_add(shards)?,
                None => granted.gpus.push(Gpu { index, shards }),
            }
        }
    }
    Some(granted)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEVEN: Number = Number { id: 7, of_array: None };
    const TEXT: &str = "JobId=7 JobName=wrap\n   UserId=alice(1001) GroupId=alice(1001) MCS_label=N/A\n   \
        JOB_GRES=shard:25\n     Nodes=n1 CPU_IDs=0 Mem=0 GRES=shard:25(25/100)\n     Nodes=n[2-3] CPU_IDs=1 Mem=0 GRES=\n   \
        WorkDir=/jobs\n\n";

    fn on_first(shards: u32) -> Granted {
        Granted { shards, gpus: vec![Gpu { index: 0, shards }] }
    }

    #[test]
    fn the_controllers_word_counts() {
        assert_eq!(read(TEXT, 7, "n1"), Ok(on_first(25)));
        assert_eq!(read(TEXT, 7, "n3"), Ok(Granted::default()));
        assert!(read(TEXT, 7, "n4").unwrap_err().contains("does not report"));
        for (text, job) in [(TEXT, 8), (TEXT, 70), ("", 7)] {
            assert!(read(text, job, "n1").is_err(), "{job}");
        }
        // The job belongs to an array.
        let array = TEXT.replace("JobId=7 ", "JobId=9 ArrayJobId=7 ArrayTaskId=2 ");
        assert_eq!(read(&array, 9, "n1").unwrap().shards, 25);
    }

    #[test]
    fn description_of_several_jobs_is_refused() {
        let job = |id: u32, node: &str| {
            format!("JobId={id} JobName=x\n     Nodes={node} CPU_IDs=0 Mem=0 GRES=shard:50(50/100)\n\n")
        };
        assert_eq!(read(&job(7, "n1"), 7, "n1"), Ok(on_first(50)));
        for text in [job(7, "n2") + &job(8, "n1"), job(7, "n1") + &job(8, "n2"), job(7, "n2") + &job(7, "n1")] {
            assert!(read(&text, 7, "n1").unwrap_err().contains("several jobs"), "{text}");
        }
    }

    /// The parser must not mistake the user's text for Slurm's text.
    #[test]
    fn words_of_the_user_raise_nothing() {
        let line = "     Nodes=n1 CPU_IDs=0 Mem=0 GRES=shard:100(100/100)";
        let names = [
            format!("wrap\n{line}"),
            format!("wrap\n\nJobId=7 JobName=x\n{line}"),
            format!("x{line}"),
            format!("wrap\nJobId=7 x\n{line}"),
            format!("wrap\nJobId=8 x\n{line}"),
            format!("wrap\n{line}\nJobId=8 x"),
            format!("wrap\n{line}\n\nJobId=8 x"),
            format!("wrap\n{line}\n JobId=8 x"),
        ];
        for name in names {
            for text in [TEXT.replace("wrap", &name), TEXT.replace("/jobs", &name)] {
                let got = read(&text, 7, "n1");
                assert!(got.as_ref().is_err() || got == Ok(on_first(25)), "{name:?}: {got:?}");
            }
        }
    }

    #[test]
    fn lists_of_gres_are_read() {
        let granted = |shards, gpus: &[(usize, u32)]| {
            Some(Granted { shards, gpus: gpus.iter().map(|&(index, shards)| Gpu { index, shards }).collect() })
        };
        for (list, expected) in [
            ("", granted(0, &[])),
            ("gpu:1(IDX:0)", granted(0, &[])),
            ("gpu:1(IDX:0),shard:a:25(0/100,25/75)", granted(25, &[(1, 25)])),
            ("shard:30(20/80,10/90)", granted(30, &[(0, 20), (1, 10)])),
            ("shard:a:20(20/80,0/90),shard:b:15(5/80,10/90)", granted(35, &[(0, 25), (1, 10)])),
            ("shard(CNT:5)", granted(5, &[])),
            ("shard:5", granted(5, &[])),
            ("shards:100(1/1)", granted(0, &[])),
            ("shard:99999999999", None),
            ("shard:x(1/1)", None),
            ("shard:5(1/1", None),
            (")", None),
        ] {
            assert_eq!(shards(list), expected, "{list}");
        }
    }

    #[test]
    fn failing_scontrol_is_reported() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("scontrol");
        for (script, told) in [("sleep 600", "does not respond"), ("exit 1", "has no such job")] {
            std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
            let error = ask(&path, &SEVEN, "n1", Duration::ZERO).unwrap_err();
            assert!(error.contains(told) && error.contains("the shards of job 7"), "{error}");
        }
        assert!(ask(&folder.path().join("none"), &SEVEN, "n1", Duration::ZERO).is_err());
    }
}
