//! Time limits. A hanging test fails, its threads are listed, and the other tests continue.

use std::fmt::Write as _;
use std::fs;
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

/// Maximum number of processes to search for children, and of threads to list per process, because a test may fork
/// endlessly.
const MAX_PROCESSES: usize = 4096;

/// Multiplies a limit by the factor for slow hosts. The `tests` crate reads the same environment variable, but this
/// program does not depend on it.
pub fn scaled(limit: Duration) -> Duration {
    let scale = std::env::var("GPU_MEDIATOR_TIME_SCALE").ok().and_then(|text| text.parse::<f64>().ok());
    let scale = scale.filter(|scale| scale.is_finite() && *scale > 0.0).unwrap_or(1.0);
    Duration::try_from_secs_f64(limit.as_secs_f64() * scale).unwrap_or(limit)
}

/// Waits for `child` to exit, for at most `limit`. Returns true if it has exited.
pub fn ends_within(child: &Child, limit: Duration) -> Result<bool> {
    let fd = pidfd_open(Pid::from_child(child), PidfdFlags::empty()).context("watching a test")?;
    let began = Instant::now();
    loop {
        let left = limit.saturating_sub(began.elapsed());
        let timeout =
            Timespec { tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("watching a test"),
        }
    }
}

/// Kills a process and all its descendants. Returns one line per thread, with the kernel function in which it was
/// waiting.
pub fn end(process: u32) -> String {
    let processes = family(process);
    let mut text = String::new();
    for &process in &processes {
        threads(process, &mut text);
    }
    for process in processes.into_iter().filter_map(|process| Pid::from_raw(process.try_into().ok()?)) {
        // The process may already have exited.
        let _ = kill_process(process, Signal::KILL);
    }
    text
}

/// Returns a process and all its descendants.
fn family(first: u32) -> Vec<u32> {
    let parents = || fs::read_dir("/proc").into_iter().flatten().flatten();
    let all: Vec<(u32, u32)> = parents()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|process: u32| Some((process, parent(process)?)))
        .collect();
    let mut found = vec![first];
    let mut at = 0;
    while let Some(&parent) = found.get(at).filter(|_| at < MAX_PROCESSES) {
        found.extend(all.iter().filter(|(_, of)| *of == parent).map(|(process, _)| process));
        at += 1;
    }
    found
}

fn parent(process: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The state and the parent's ID follow the program name, which may contain any characters.
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// Appends one line per thread of a process: its name, its state, and the kernel function in which it is waiting.
fn threads(process: u32, text: &mut String) {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    for task in tasks.take(MAX_PROCESSES) {
        let file = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let stat = file("stat");
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).unwrap_or('?');
        let thread = task.file_name();
        let (name, waits) = (file("comm"), file("wchan"));
        let _ = writeln!(text, "  {process}/{} {}: {state} {waits}", thread.display(), name.trim());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn stuck_test_is_ended_with_children_and_threads_are_reported() {
        let mut child = Command::new("sh").args(["-c", "sleep 1000 & wait"]).spawn().unwrap();
        assert!(!ends_within(&child, Duration::from_millis(1)).unwrap());
        let sleeper = loop {
            match family(child.id()).get(1) {
                Some(&sleeper) if parent(sleeper) == Some(child.id()) => break sleeper,
                _ => std::thread::yield_now(),
            }
        };
        let told = end(child.id());
        assert!(told.contains(&format!("{}/{}", child.id(), child.id())), "{told}");
        assert!(told.contains(&format!("{sleeper}/{sleeper}")), "{told}");
        assert!(ends_within(&child, Duration::from_secs(60)).unwrap());
        assert!(!child.wait().unwrap().success());
    }
}
