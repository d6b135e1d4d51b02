//! Tests the exit code of every command for every kind of error, and `--watch`.

use super::*;
use mediatord::fixture::one_card;
use std::io;

/// Commands with valid arguments, in an order in which all succeed. VM `a` and card `card0` exist.
const GOOD: [&[&str]; 43] = [
    &["tenant", "list"],
    &["profile", "list"],
    &["profile", "show", "sliver"],
    &["vm", "list"],
    &["vm", "show", "a"],
    &["vm", "add", "b", "--card", "card0", "--vram-mib", "16"],
    &["vm", "remove", "b"],
    &["vm", "launch-args", "a"],
    &["card", "show"],
    &["card", "show", "card0"],
    &["card", "list"],
    &["card", "list", "--host"],
    &["card", "undrain", "card0"],
    &["daemon", "show"],
    &["sched", "show"],
    &["sched", "show", "card0"],
    &["sched", "set", "card0", "--strikes", "4"],
    &["sched", "set-vm", "a", "--weight", "5"],
    &["sched", "release", "a"],
    &["sched", "record", "card0", "--for", "10ms", "--out", "/dev/null"],
    &["memory", "show"],
    &["memory", "set", "card0", "--victims", "clock"],
    &["memory", "set-quota", "a", "16"],
    &["memory", "set-guarantee", "a", "16"],
    &["memory", "set-swap-cap", "a", "default"],
    &["memory", "set-ram", "a", "--ram-quota-mib", "64", "--ram-guarantee-mib", "64", "--ram-touch-mib", "default"],
    &["memory", "set-weight", "a", "5"],
    &["memory", "set-policy", "a", "queue", "--queue-ms", "2000"],
    &["memory", "pin", "a", "0+2M"],
    &["memory", "unpin", "a", "0+2M"],
    &["memory", "priority", "a", "0+2M", "9"],
    &["memory", "profile", "record", "a", "--for", "10ms", "--out", "/dev/null"],
    &["memory", "profile", "load", "a", "/dev/null"],
    &["memory", "evict", "a"],
    &["memory", "return", "a"],
    &["top", "--once"],
    &["events"],
    &["export"],
    &["apply", "-f", "/dev/null"],
    &["assert", "-f", "/dev/null"],
    &["schema"],
    &["completion", "bash"],
    &["sched", "report", "card0", "--out", "/dev/null"],
];

fn served() -> Served {
    let served = one_card("[[profile]]\nname = \"sliver\"\nvram_mib = 16\n");
    let ran = ctl(&served, &["vm", "add", "a", "--card", "card0", "--vram-mib", "16"]);
    assert_eq!(ran.code, Code::Good, "{}", ran.err);
    served
}

#[test]
fn commands_exit_0_on_success_5_without_daemon_2_on_bad_option() {
    let served = served();
    for arguments in GOOD {
        let ran = ctl(&served, arguments);
        assert_eq!(ran.code, Code::Good, "{arguments:?}: {}", ran.err);
        let local = ["schema", "completion"].contains(&arguments[0]) || arguments.contains(&"--host");
        let ran = ctl_at("/nonexistent/admin.sock", arguments);
        assert_eq!(ran.code, if local { Code::Good } else { Code::Unreachable }, "{arguments:?}");
        assert_eq!(ctl(&served, &[arguments, &["--frobnicate"]].concat()).code, Code::Usage, "{arguments:?}");
    }
    // A replay needs a recording.
    let record = served.fixture.path("record.jsonl");
    let record = record.to_str().unwrap();
    assert_eq!(ctl(&served, &["sched", "record", "card0", "--for", "10ms", "--out", record]).code, Code::Good);
    assert_eq!(ctl_at("/nonexistent/admin.sock", &["sched", "replay", record]).code, Code::Good);
    assert_eq!(ctl(&served, &["sched", "replay", record, "--frobnicate"]).code, Code::Usage);
    // The list must contain every command that is not tested elsewhere.
    fn leaves(command: &clap::Command, path: &str, names: &mut Vec<String>) {
        let mut inner = command.get_subcommands().filter(|command| !command.is_hide_set()).peekable();
        if inner.peek().is_none() {
            names.push(path.trim().to_owned());
        }
        inner.for_each(|inner| leaves(inner, &format!("{path} {}", inner.get_name()), names));
    }
    let mut names = Vec::new();
    leaves(&<Arguments as clap::CommandFactory>::command(), "", &mut names);
    for name in names {
        let words: Vec<_> = name.split(' ').collect();
        // The replay was tested above, and `doctor` needs a whole host. The tests of `cuda-rig` run the commands that
        // need a tenant, and the tests of `host` those that need a host with cards.
        let known = [
            "sched replay",
            "doctor",
            "tenant add",
            "tenant remove",
            "tenant show",
            "tenant set",
            "tenant cdi",
            "tenant move",
            "run",
            "card bind",
            "card unbind",
            // These commands need a second card as the target: see the tests of `moving`.
            "vm move",
            "card drain",
            // This command needs a VM whose programs use CUDA: see `functions` of `cuda-rig`.
            "vm restart-workers",
            // These commands need files: see the tests of `saving`.
            "vm save",
            "vm restore",
            // This command needs a daemon in its own process: see `guest upgrade`.
            "daemon upgrade",
            // These commands need a state folder: see the tests of `firmware`.
            "card firmware list",
            "card firmware import",
            "card firmware approve",
            "card firmware remove",
        ]
        .contains(&name.as_str())
            || GOOD.iter().any(|arguments| arguments.starts_with(&words));
        assert!(known, "no arguments for `{name}`");
    }
}

#[test]
fn each_status_of_the_man_pages_is_given_by_a_command() {
    let served = served();
    for (code, meaning) in crate::sections::STATUSES {
        let ran = match code {
            Code::Good => ctl(&served, &["vm", "list"]),
            Code::Failed => ctl(&served, &["sched", "report", "card0", "--out", "/nonexistent/uses.svg"]),
            Code::Usage => ctl(&served, &["sched", "set-vm", "a", "--weight", "0"]),
            Code::NotFound => ctl(&served, &["vm", "show", "z"]),
            Code::Conflict => ctl(&served, &["vm", "add", "a", "--card", "card0", "--vram-mib", "16"]),
            Code::Unreachable => ctl_at("/nonexistent/admin.sock", &["vm", "list"]),
        };
        assert_eq!(ran.code, code, "{meaning}: {}", ran.err);
    }
}

#[test]
fn commands_about_something_that_is_not_there_end_with_3() {
    let served = served();
    let unknown: [&[&str]; 13] = [
        &["vm", "show", "z"],
        &["vm", "remove", "z"],
        &["vm", "launch-args", "z"],
        &["vm", "add", "b", "--card", "z", "--vram-mib", "16"],
        &["card", "show", "z"],
        &["profile", "show", "z"],
        &["tenant", "move", "z", "--card", "card0"],
        &["sched", "show", "z"],
        &["sched", "set", "z", "--strikes", "4"],
        &["sched", "set-vm", "z", "--weight", "5"],
        &["sched", "release", "z"],
        &["sched", "report", "z", "--out", "/dev/null"],
        &["top", "z", "--once"],
    ];
    for arguments in unknown {
        let ran = ctl(&served, arguments);
        assert_eq!(ran.code, Code::NotFound, "{arguments:?}: {}", ran.err);
        assert!(ran.err.contains("`z`") && ran.err.contains("\n  see `mediatorctl "), "{}", ran.err);
        let ran = ctl(&served, &[&["--json"], arguments].concat());
        let error: api::Error = serde_json::from_str(&ran.err).unwrap();
        assert_eq!((error.code, &*ran.out), (ErrorCode::NotFound, ""));
    }
}

#[test]
fn commands_exit_2_for_value_out_of_range_and_4_on_conflict() {
    let served = served();
    let cases: [(&[&str], Code, &str); 8] = [
        (&["vm", "add", "b", "--card", "card0", "--vram-mib", "15"], Code::Usage, "VM `b`: vram_mib: 15 MiB"),
        (&["sched", "set", "card0", "--period-ms", "0"], Code::Usage, "card `card0`: band.period_ns = 0"),
        (&["sched", "set-vm", "a", "--weight", "0"], Code::Usage, "VM `a`: weight = 0 is not between 1 and 10000"),
        (&["sched", "report", "card0", "--since", "2m", "--out", "x"], Code::Usage, "since_ms = 120000"),
        (&["vm", "list", "--watch=0"], Code::Usage, "expected seconds from 0.1"),
        (&["vm", "add", "a", "--card", "card0", "--vram-mib", "16"], Code::Conflict, "VM `a`: name: `a` is the name"),
        (&["vm", "add", "b", "--card", "card0", "--vram-mib", "1024"], Code::Conflict, "VM `b`: vram_mib: 1024 MiB"),
        (&["vm", "add", "p", "--card", "card0", "--passthrough"], Code::Conflict, "VM `a` uses card `card0`"),
    ];
    for (arguments, code, what) in cases {
        let ran = ctl(&served, arguments);
        assert_eq!(ran.code, code, "{arguments:?}: {}", ran.err);
        assert!(ran.err.contains(what), "{arguments:?}: {}", ran.err);
    }
}

/// A writer that fails like a closed pipe after `looks` flushes.
struct Reader {
    looks: usize,
    text: String,
    flushes: usize,
}

impl Write for Reader {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.flushes == self.looks {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        self.text.push_str(std::str::from_utf8(bytes).unwrap());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.flushes += 1;
        Ok(())
    }
}

#[test]
fn watch_repeats_until_reader_closes() {
    let served = served();
    let socket = served.fixture.path("admin.sock").display().to_string();
    let commands: [&[&str]; 4] =
        [&["vm", "list"], &["vm", "show", "a"], &["card", "show"], &["sched", "show", "card0"]];
    for command in commands {
        let mut reader = Reader { looks: 3, text: String::new(), flushes: 0 };
        let head = ["mediatorctl", "--socket", &socket, "--json", "--watch=0.1"];
        // Append the option to the command.
        let all: Vec<_> = head[..4].iter().chain(command).chain(&head[4..]).copied().collect();
        assert_eq!(run(all, &mut reader, &mut Vec::new()), Code::Good);
        let looks: Vec<serde_json::Value> =
            reader.text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(looks.len(), 3, "one line for each refresh: {}", reader.text);
    }
    // The command exits if the daemon is unreachable.
    let mut err = Vec::new();
    let all = ["mediatorctl", "--socket", "/nonexistent", "vm", "list", "--watch"];
    assert_eq!(run(all, &mut Vec::new(), &mut err), Code::Unreachable);
}
