//! Tests hostile code in a worker: a kernel of the fake driver makes system calls in the worker's process. All are real
//! processes.

mod support;

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Output, Stdio};

use support::guest::Loopback;
use support::{PROGRAM, Program, Rig, owner};

/// User ID of the workers in tests with a separate user.
const USER: u32 = 54_321;

/// System calls that end the worker: each with its name in the worker's report, and the words for `cuda-program
/// syscalls`. The owner's socket address is at 65536.
const FORBIDDEN: [(&str, &str); 35] = [
    ("execve", "59 text:/bin/sh 0 0"),
    ("execveat", "322 -100 text:/bin/sh 0 0 0"),
    ("socket", "41 2 1 0"),
    ("socket", "41 16 3 0"),
    ("socket", "41 1 2 0"),
    ("socketpair", "53 1 2 0 text:x"),
    ("bind", "41 1 524293 0 / 49 last unix:/tmp/x 10"),
    ("connect", "41 1 524293 0 / 42 last unix:/run/gpu-mediator/admin.sock 110"),
    ("sendto", "44 4 text:x 1 0 unix:/tmp/x 10"),
    ("ptrace", "101 16 program"),
    ("process_vm_readv", "310 program text:x 1 text:x 1 0"),
    ("process_vm_writev", "311 program text:x 1 text:x 1 0"),
    ("pidfd_getfd", "438 0 0 0"),
    ("kill", "62 program 9"),
    ("tgkill", "234 program program 9"),
    ("tkill", "200 program 9"),
    ("fcntl", "72 4 8 1"),
    ("ioctl", "16 4 35073 text:x"),
    ("unshare", "272 268435456"),
    ("setns", "308 0 0"),
    ("mount", "165 text:/ text:/mnt 0 4096 0"),
    ("chroot", "161 text:/"),
    ("bpf", "321 0 0 0"),
    ("perf_event_open", "298 0 0 0 0 0"),
    ("add_key", "248 text:user text:x text:x 1 -1"),
    ("keyctl", "250 0 0"),
    ("io_uring_setup", "425 1 text:x"),
    ("userfaultfd", "323 0"),
    ("prctl", "157 4 1"),
    // The worker cannot change the owner's address or the signal handler.
    ("munmap", "11 0 131072"),
    ("mmap", "9 65536 4096 3 50 -1 0"),
    ("mprotect", "10 65536 4096 3"),
    ("mremap", "25 65536 4096 4096 1 0"),
    ("madvise", "28 65536 4096 4"),
    ("rt_sigaction", "13 31 0 0 8"),
];

/// Runs a guest program that makes system calls in its worker.
fn make(rig: &Rig, guest: &Loopback, words: &str) -> Output {
    guest.command(rig, PROGRAM).arg("syscalls").args(words.split(' ')).output().expect("starts")
}

/// Makes system calls that are not forbidden. Returns their results.
fn results(rig: &Rig, guest: &Loopback, words: &str) -> Vec<i64> {
    let output = make(rig, guest, words);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{words}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text.lines().map(|line| line.parse().expect("a number")).collect()
}

/// Starts `cuda-loopback` with the workers' reports written to a file.
fn start(rig: &Rig, arguments: &[&str]) -> (Loopback, PathBuf) {
    let path = rig.folder.path().join("workers.log");
    let errors = Stdio::from(File::create(&path).expect("a file"));
    (Loopback::start_with(rig, "a", errors, arguments), path)
}

/// Returns the value of a line in a process's `/proc/PID/status`.
fn status(pid: i32, name: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("runs");
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.expect("such a line").trim().to_owned()
}

#[test]
fn forbidden_call_ends_its_program_alone_and_is_named() {
    let rig = Rig::new(256);
    let _owner = owner(&rig, 64, &[]);
    let (guest, log) = start(&rig, &[]);
    let mut neighbour = Program::start(guest.command(&rig, PROGRAM).args(["live", "--mib", "8"]));
    let mut seen = 0;
    for (name, words) in FORBIDDEN {
        let output = make(&rig, &guest, words);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains("failed with 719"), "{words}: {error}");
        let text = fs::read_to_string(&log).expect("a file");
        let added = text.get(seen..).unwrap_or_default();
        assert!(added.contains(&format!("the call `{name}` is forbidden")), "{words}: {added}");
        seen = text.len();
        neighbour.steps(1);
    }
    neighbour.steps(3);
    assert_eq!(neighbour.end(), "held 4");
    rig.until_free();
}

#[test]
fn worker_opens_no_files_of_others() {
    const DENIED: i64 = -(libc::EACCES as i64);
    const REFUSED: i64 = -(libc::EPERM as i64);
    let rig = Rig::new(256);
    let _owner = owner(&rig, 64, &[]);
    let (guest, _) = start(&rig, &[]);
    let secret = rig.folder.path().join("secret");
    fs::write(&secret, "another tenant's").expect("written");
    let (secret, new) = (secret.display(), rig.folder.path().join("new"));
    let new = new.display();
    for (words, expected) in [
        (format!("257 -100 text:{secret} 0"), DENIED),
        (format!("2 text:{secret} 2"), DENIED),
        (format!("257 -100 text:{new} 66 384"), DENIED),
        ("257 -100 text:/etc/shadow 0".to_owned(), DENIED),
        (format!("257 -100 text:/proc/{}/mem 2", std::process::id()), DENIED),
        (format!("257 -100 text:/proc/{}/environ 0", std::process::id()), DENIED),
        (format!("87 text:{secret}"), REFUSED),
        // These calls create processes.
        ("57".to_owned(), REFUSED),
        ("56 17 0 0 0 0".to_owned(), REFUSED),
    ] {
        assert_eq!(results(&rig, &guest, &words), [expected], "{words}");
    }
    assert!(
        fs::metadata(rig.folder.path().join("secret")).is_ok() && fs::metadata(rig.folder.path().join("new")).is_err()
    );
    // The worker can read descriptions of the host, and its own files.
    let own = results(&rig, &guest, "257 -100 text:/proc/self/maps 0 / 257 -100 text:/proc/cpuinfo 0");
    assert!(own.iter().all(|descriptor| *descriptor > 2), "{own:?}");
}

#[test]
fn worker_has_no_capabilities_and_its_own_user() {
    let rig = Rig::new(256);
    // The fake card consists of files that workers of other users must also be able to modify.
    rustix::process::umask(rustix::fs::Mode::empty());
    let _owner = owner(&rig, 64, &[]);
    let is_root = rustix::process::geteuid().is_root();
    let (user, group) = (format!("--user={USER}"), format!("--group={USER}"));
    let (guest, _) = if is_root {
        rig.let_others_in();
        start(&rig, &[&user, &group])
    } else {
        // Only root can run workers as another user.
        start(&rig, &[])
    };
    let mut program = Program::start(guest.command(&rig, PROGRAM).args(["live", "--mib", "8"]));
    program.steps(3);
    let [worker] = guest.workers()[..] else { panic!("one worker") };
    for name in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(status(worker, name).trim_start_matches('0'), "", "{name}");
    }
    assert_eq!([status(worker, "NoNewPrivs"), status(worker, "Seccomp")], ["1", "2"]);
    if is_root {
        assert_eq!(status(worker, "CapBnd").trim_start_matches('0'), "");
        assert_eq!(
            status(worker, "Uid"),
            [USER.to_string(), USER.to_string(), USER.to_string(), USER.to_string()].join("\t")
        );
        assert_eq!(status(worker, "Groups"), "");
    }
    let limits = fs::read_to_string(format!("/proc/{worker}/limits")).expect("runs");
    assert!(limits.lines().any(|line| line.starts_with("Max core file size        0 ")), "{limits}");
    program.end();
}
