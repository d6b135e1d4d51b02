//! Tests `events`: its table, its selection, and following.

use super::*;
use mediatord::fixture::eventually;
use std::io;
use std::sync::{Arc, Mutex};

/// Splits a table into cells, line by line.
fn cells(text: &str) -> Vec<Vec<String>> {
    let cells =
        |line: &str| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).map(str::to_owned).collect();
    text.lines().map(cells).collect()
}

/// Returns the kinds of the events that `events` shows with these arguments.
fn kinds(served: &Served, arguments: &[&str]) -> Vec<String> {
    let ran = ctl(served, &[&["events"], arguments].concat());
    assert_eq!((ran.code, &*ran.err), (Code::Good, ""));
    cells(&ran.out).into_iter().skip(1).map(|mut cells| cells.remove(1)).collect()
}

#[test]
fn events_are_a_table_with_author_and_can_be_selected() {
    let served = Served::new();
    added(&served, "a");
    added(&served, "b");
    assert_eq!(ctl(&served, &["vm", "remove", "a"]).code, Code::Good);
    assert_eq!(ctl(&served, &["card", "drain", "card1"]).code, Code::Good);
    let shown = cells(&ctl(&served, &["events"]).out);
    assert_eq!(shown[0], ["TIME", "KIND", "SUBJECT", "TEXT"]);
    assert_eq!(shown[2][1..3], ["added", "vm a"]);
    let own = format!("process {})", std::process::id());
    assert!(shown[2][3].starts_with("added to card `card0` (by ") && shown[2][3].ends_with(&own), "{shown:?}");
    assert!(shown[1][3].ends_with(&format!("process {}", std::process::id())), "the daemon is not named: {shown:?}");
    assert_eq!(kinds(&served, &[]), ["started", "added", "added", "removed", "drain_began", "drained"]);
    assert_eq!(kinds(&served, &["--vm", "a"]), ["added", "removed"]);
    assert_eq!(kinds(&served, &["--tenant", "a"]), Vec::<String>::new());
    assert_eq!(kinds(&served, &["--card", "card0"]), ["added", "added", "removed"]);
    assert_eq!(kinds(&served, &["--card", "card1", "--kind", "drained"]), ["drained"]);
    assert_eq!(kinds(&served, &["--kind", "added", "--kind", "started", "-n", "2"]), ["added", "added"]);
    assert_eq!(ctl(&served, &["events", "--vm", "z"]).out, "no events\n");
    let page: api::EventPage = serde_json::from_str(&ctl(&served, &["--json", "events", "-n", "1"]).out).unwrap();
    let cursor = page.next;
    assert_eq!((page.events.len(), kinds(&served, &["--after", &cursor])), (1, Vec::new()));
    // An earlier daemon's cursor yields all events, after a line about the unknown cursor.
    let other = ctl(&served, &["events", "--after", "1f-3"]).out;
    assert!(other.starts_with("-- the cursor is from a daemon that has exited"), "{other}");
    for wrong in [["--after", "x"], ["--kind", "burnt"]] {
        let ran = ctl(&served, &["events", wrong[0], wrong[1]]);
        assert_eq!(ran.code, Code::Usage, "{}", ran.err);
    }
}

/// A writer that accepts lines until one contains `word`, and then fails like a closed pipe.
struct Until {
    word: &'static str,
    text: Arc<Mutex<String>>,
}

impl io::Write for Until {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut text = self.text.lock().unwrap();
        if text.contains(self.word) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        text.push_str(std::str::from_utf8(bytes).unwrap());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn following_shows_aligned_lines_until_the_reader_closes() {
    let served = Served::new();
    for name in (0..6).map(|n| format!("v{n}")) {
        added(&served, &name);
        assert_eq!(ctl(&served, &["vm", "remove", &name]).code, Code::Good);
    }
    let socket = served.fixture.path("admin.sock").display().to_string();
    let text = Arc::<Mutex<String>>::default();
    let mut out = Until { word: "last", text: Arc::clone(&text) };
    let follower = std::thread::spawn(move || {
        run(["mediatorctl", "--socket", &socket, "events", "-f"], &mut out, &mut Vec::new())
    });
    eventually("the last ten are shown", || text.lock().unwrap().lines().count() == 10);
    // Add more than one event, because the follower stops at the first event that it cannot write.
    let mut number = 0;
    while !follower.is_finished() {
        number += 1;
        assert_eq!(
            ctl(&served, &["vm", "add", &format!("last{number}"), "--card", "card1", "--passthrough"]).code,
            Code::Good
        );
        assert_eq!(ctl(&served, &["vm", "remove", &format!("last{number}")]).code, Code::Good);
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(follower.join().unwrap(), Code::Good);
    let text = text.lock().unwrap().clone();
    let lines = cells(&text);
    assert!(lines.len() > 10 && lines[0].len() == 4, "{text}");
    let at = text.lines().map(|line| line.find("added to").or_else(|| line.find("removed (")).unwrap_or(0));
    let columns: std::collections::BTreeSet<usize> = at.collect();
    assert_eq!(columns.len(), 1, "{text}");
    assert!(text.contains("vm last1"), "{text}");
}

#[test]
fn following_without_a_daemon_ends_with_5() {
    assert_eq!(ctl_at("/nonexistent/admin.sock", &["events", "-f"]).code, Code::Unreachable);
}
