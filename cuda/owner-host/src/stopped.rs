//! Detects stopped processes through `/proc` and the cgroup freezer.

use std::fs;
use std::path::Path;

/// Returns true if no thread of a process runs: a signal or a debugger has stopped it (proc_pid_stat(5), states `T` and
/// `t`), or its cgroup is frozen (`cgroup.events` of cgroup v2). Returns false if the files cannot be read.
#[must_use]
pub fn is_stopped(pid: u32) -> bool {
    let process = format!("/proc/{pid}");
    let read = |name: &str| fs::read_to_string(format!("{process}/{name}")).unwrap_or_default();
    is_stopped_state(&read("stat")) || is_frozen(&read("cgroup"), Path::new("/sys/fs/cgroup"))
}

/// Returns true if the process state in `/proc/PID/stat`, after the program name in parentheses, is that of a stopped
/// process.
fn is_stopped_state(stat: &str) -> bool {
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    matches!(state, Some('T' | 't'))
}

/// Returns true if the process's cgroup of cgroup v2, as listed in `/proc/PID/cgroup`, is frozen.
fn is_frozen(groups: &str, mount: &Path) -> bool {
    let Some(group) = groups.lines().find_map(|line| line.strip_prefix("0::/")) else { return false };
    let events = fs::read_to_string(mount.join(group).join("cgroup.events")).unwrap_or_default();
    events.lines().any(|line| line == "frozen 1")
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::{Duration, Instant};

    use rustix::process::{Pid, Signal, kill_process};

    use super::*;

    #[test]
    fn states_are_read_behind_the_name() {
        assert!(is_stopped_state("12 (a program) T) T 1 12"));
        assert!(is_stopped_state("12 (x) t 1"));
        assert!(!is_stopped_state("12 (T) S 1"));
        assert!(!is_stopped_state(""));
    }

    #[test]
    fn frozen_groups_are_found() {
        let folder = tempfile::tempdir().expect("a folder");
        let group = folder.path().join("a.slice/b.scope");
        fs::create_dir_all(&group).expect("a group");
        let groups = "1:name=systemd:/x\n0::/a.slice/b.scope\n";
        fs::write(group.join("cgroup.events"), "populated 1\nfrozen 0\n").expect("written");
        assert!(!is_frozen(groups, folder.path()));
        fs::write(group.join("cgroup.events"), "populated 1\nfrozen 1\n").expect("written");
        assert!(is_frozen(groups, folder.path()));
        assert!(!is_frozen("1:name=systemd:/a.slice/b.scope\n", folder.path()), "another hierarchy");
    }

    #[test]
    fn stopped_process_is_told_from_a_running_one() {
        let mut child = Command::new("sleep").arg("60").spawn().expect("starts");
        let pid = child.id();
        assert!(!is_stopped(pid));
        kill_process(Pid::from_raw(pid as i32).expect("a number"), Signal::STOP).expect("stops");
        // TIMEOUT: only a failing test waits this long.
        let began = Instant::now();
        while !is_stopped(pid) && began.elapsed() < Duration::from_secs(20) {
            std::thread::yield_now();
        }
        let stopped = is_stopped(pid);
        child.kill().expect("ends");
        child.wait().expect("ended");
        assert!(stopped && !is_stopped(pid));
    }
}
