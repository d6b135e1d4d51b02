//! Tests of `mediatorctl events -f` across an upgrade and a restart of the daemon. The tool and the daemons run as
//! processes.

mod support;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use support::guest::Guest;
use support::{DAEMON, Manager, Place, Service, ctl};

const CARD: &str = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 128\n";
const VM: &str = "[[vm]]\nname = \"web\"\ncard = \"card0\"\nvram_mib = 32\napertures = \"trapped\"\n";

/// A running `mediatorctl events -f --json`.
struct Follower {
    _process: Service,
    lines: std::io::Lines<BufReader<ChildStdout>>,
    /// All events so far. `notes` reports lost events.
    events: Vec<Value>,
    notes: Vec<String>,
}

impl Follower {
    fn new(place: &Place, more: &[&str]) -> Self {
        let mut command = Command::new(ctl());
        command.arg("--socket").arg(place.path("admin.sock")).args(["--json", "events", "-f"]).args(more);
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Self { _process: Service(process), lines, events: Vec::new(), notes: Vec::new() }
    }

    /// Reads until an event of this kind about the object arrives.
    fn until(&mut self, kind: &str, name: &str) -> &Value {
        let is = |event: &Value| event["kind"] == kind && event["subject"]["name"] == name;
        while !self.events.iter().any(is) {
            let line = self.lines.next().expect("it follows").unwrap();
            let page: Value = serde_json::from_str(&line).unwrap();
            self.events.extend(page["events"].as_array().unwrap().iter().cloned());
            self.notes.extend(page["note"].as_str().map(str::to_owned));
        }
        self.events.iter().find(|event| is(event)).unwrap()
    }
}

fn start(manager: &Manager<'_>) -> Service {
    let mut command = manager.manager.command(Path::new(DAEMON)).unwrap();
    command.arg("--config").arg(manager.place.path("m.toml"));
    let log = std::fs::File::options().create(true).append(true).open(manager.place.path("log")).unwrap();
    let daemon = Service(command.stderr(log).spawn().unwrap());
    manager.until("READY=1");
    daemon
}

#[test]
fn follower_misses_nothing_over_upgrade_and_is_told_of_restart() {
    let place = Place::new(&format!("{CARD}{VM}"));
    let manager = Manager::new(&place);
    let mut daemon = start(&manager);
    let mut guest = Guest::new(&place, "web");
    let mut follower = Follower::new(&place, &[]);
    assert_eq!(follower.until("added", "web")["author"]["kind"], "configuration");
    guest.begin();
    place.ctl_json(&["sched", "set-vm", "web", "--weight", "7"]);
    let next = place.ctl_json(&["daemon", "upgrade"]);
    assert!(daemon.0.wait().unwrap().success());
    guest.check();
    let upgraded = follower.until("upgraded", "mediatord").clone();
    assert!(upgraded["text"].as_str().unwrap().contains(&next["pid"].to_string()), "{upgraded}");
    let began = follower.until("upgrade_began", "mediatord").clone();
    assert_eq!((&began["author"]["kind"], &began["author"]["program"]), (&"client".into(), &"mediatorctl".into()));
    place.ctl_json(&["vm", "add", "new", "--card", "card0", "--vram-mib", "16"]);
    follower.until("added", "new");
    // Event numbers continue without a gap.
    let numbers: Vec<u64> = follower.events.iter().map(|event| event["number"].as_u64().unwrap()).collect();
    assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "{numbers:?}");
    assert_eq!(follower.notes, Vec::<String>::new());
    // A new client reads the same events.
    let listed = place.ctl_json(&["events"]);
    assert_eq!(listed["events"].as_array().unwrap()[..follower.events.len()], follower.events);
    // Kill the daemon, and start it again.
    let pid = i32::try_from(next["pid"].as_i64().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    drop(guest);
    let last = *numbers.last().unwrap();
    let _daemon = start(&manager);
    place.ctl_json(&["sched", "set-vm", "web", "--weight", "9"]);
    follower.events.clear();
    follower.until("changed", "web");
    assert!(follower.notes[0].starts_with("the cursor is from a daemon that has exited"), "{:?}", follower.notes);
    assert!(follower.events.iter().all(|event| event["number"].as_u64().unwrap() > last));
}

#[test]
fn failed_upgrade_is_an_event_and_the_log_continues() {
    // A passed-through VM cannot be handed over.
    let vm = "[[vm]]\nname = \"whole\"\ncard = \"card0\"\npassthrough = true\n";
    let place = Place::new(&format!("{CARD}{vm}"));
    let running = place.start(&mut place.daemon());
    let mut follower = Follower::new(&place, &["--kind", "upgrade_failed", "--kind", "ended"]);
    assert!(!place.ctl(&["daemon", "upgrade"]).status.success());
    let failed = follower.until("upgrade_failed", "mediatord");
    assert!(failed["text"].as_str().unwrap().contains("VM `whole`"), "{failed}");
    // The first event may be one of the past events that the follower lists. The second one can only come through its
    // stream, which the daemon must have accepted before it exits.
    follower.events.clear();
    assert!(!place.ctl(&["daemon", "upgrade"]).status.success());
    follower.until("upgrade_failed", "mediatord");
    running.end(Signal::TERM);
    follower.until("ended", "mediatord");
}
