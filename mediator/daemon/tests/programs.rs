//! Tests of `mediatord` and `mediatorctl` as processes: startup, notifications, sockets from a service manager,
//! signals, and invalid input.

mod support;

use std::fs;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::Signal;
use support::{DAEMON, Place, ctl};
use vmm_glue::client::Client;

const CARD: &str = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 128\n";
const WIRED: &str = "[[vm]]\nname = \"p\"\ncard = \"card0\"\npassthrough = true\n";

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn daemon_reports_ready_serves_and_exits_on_term_or_int() {
    for signal in [Signal::TERM, Signal::INT] {
        let place = Place::new(&format!("{CARD}{WIRED}"));
        let running = place.start(&mut place.daemon());
        let mut client = Client::connect(&place.path("p.sock")).unwrap();
        assert_eq!(client.read32(7, 0).unwrap(), 0x06d8_10de);
        let shown = place.ctl(&["--output", "json", "vm", "show", "p"]);
        let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
        assert_eq!((&shown["state"], &shown["mode"]), (&"connected".into(), &"passthrough".into()));
        running.end(signal);
        assert!(client.read32(7, 0).is_err());
        assert!(!place.path("p.sock").exists() && !place.path("admin.sock").exists());
    }
}

#[test]
fn memory_settings_of_a_passed_through_card_do_not_change() {
    let place = Place::new(&format!("{CARD}{WIRED}"));
    let running = place.start(&mut place.daemon());
    let refused = place.ctl(&["memory", "set", "card0", "--victims", "clock"]);
    assert!(!refused.status.success(), "{}", text(&refused.stdout));
    assert!(place.ctl(&["vm", "remove", "p"]).status.success());
    let shown = place.ctl(&["--output", "json", "memory", "show", "card0"]);
    let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(shown["settings"]["victims"], "random", "{shown}");
    running.end(Signal::TERM);
}

#[test]
fn vms_come_and_go_while_another_is_connected() {
    let place = Place::new(&format!("{CARD}[[card]]\nname = \"card1\"\nkind = \"simgpu\"\nvram_mib = 64\n{WIRED}"));
    let running = place.start(&mut place.daemon());
    let mut client = Client::connect(&place.path("p.sock")).unwrap();
    for _ in 0..2 {
        let added = place.ctl(&["vm", "add", "a", "--card", "card1", "--vram-mib", "16"]);
        assert!(added.status.success(), "{}", text(&added.stderr));
        let mut guest = Client::connect(&place.path("a.sock")).unwrap();
        assert_eq!(guest.read32(7, 0).unwrap(), 0x06d8_10de);
        assert!(place.ctl(&["vm", "remove", "a"]).status.success());
        assert!(guest.read32(7, 0).is_err());
        assert_eq!(client.read32(7, 0).unwrap(), 0x06d8_10de);
    }
    running.end(Signal::TERM);
}

#[test]
fn vram_left_by_one_passthrough_vm_is_not_shown_to_the_next() {
    // The BAR0 window onto VRAM, and the register that sets its base in units of 64 KiB.
    const PRAMIN: u64 = 0x70_0000;
    const PLACE: u64 = 0x1700;
    let place = Place::new(CARD);
    let running = place.start(&mut place.daemon());
    let add = || {
        let added = place.ctl(&["vm", "add", "p", "--card", "card0", "--passthrough"]);
        assert!(added.status.success(), "{}", text(&added.stderr));
        let mut client = Client::connect(&place.path("p.sock")).unwrap();
        client.write32(0, PLACE, 0x300).unwrap();
        client
    };
    let mut client = add();
    client.write32(0, PRAMIN + 0x10, 0x5ec2_e7ed).unwrap();
    assert_eq!(client.read32(0, PRAMIN + 0x10).unwrap(), 0x5ec2_e7ed);
    assert!(place.ctl(&["vm", "remove", "p"]).status.success());
    assert_eq!(add().read32(0, PRAMIN + 0x10).unwrap(), 0);
    running.end(Signal::TERM);
}

#[test]
fn config_check_reports_line_and_key_of_error() {
    let good = Place::new(CARD);
    let output = good.daemon().arg("--check").output().unwrap();
    assert!(output.status.success());
    assert!(text(&output.stdout).ends_with("good: cards 1, VMs 0, tenants 0, profiles 0\n"));
    let cuda = "[[card]]\nname = \"h100\"\nkind = \"cuda\"\nvram_mib = 64\n[[tenant]]\nname = \"t\"\n";
    let output = Place::new(&format!("{cuda}vram_mib = 64\n")).daemon().arg("--check").output().unwrap();
    assert!(text(&output.stdout).ends_with("good: cards 1, VMs 0, tenants 1, profiles 0\n"), "{output:?}");
    let output = Place::new(&format!("{cuda}vram_mib = 80\n")).daemon().arg("--check").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let error = text(&output.stderr);
    assert!(error.contains("tenant[0].vram_mib: 80 MiB, expected at most 64: card `h100` has 64 MiB"), "{error}");

    let bad = Place::new(&format!("{CARD}[[vm]]\nname = \"a\"\ncard = \"card0\"\nvram_mb = 64\n"));
    for arguments in [&["--check"][..], &[]] {
        let output = bad.daemon().args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let error = text(&output.stderr);
        assert!(error.contains("m.toml:11:1: vm[0].vram_mb: unknown key `vram_mb`, expected one of"), "{error}");
    }
}

#[test]
fn second_daemon_exits_with_reason_and_first_keeps_serving() {
    let place = Place::new(CARD);
    let running = place.start(&mut place.daemon());
    let output = place.daemon().output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("admin.sock is in use"), "{}", text(&output.stderr));
    assert!(place.ctl(&["vm", "list"]).status.success());
    running.end(Signal::TERM);
}

#[test]
fn missing_socket_folder_is_reported() {
    let place = Place::new(&format!("{CARD}{WIRED}socket = \"/nonexistent/p.sock\"\n"));
    let output = place.daemon().output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("/nonexistent does not exist"), "{}", text(&output.stderr));
    assert!(!place.path("admin.sock").exists());
}

#[test]
fn sockets_from_the_service_manager_are_served_by_name() {
    let place = Place::new(&format!("{CARD}{WIRED}"));
    let admin = UnixListener::bind(place.path("theirs-admin")).unwrap();
    let vm = UnixListener::bind(place.path("theirs-p")).unwrap();
    let mut command = activated(&place, "admin:p", [&admin, &vm]);
    let running = place.start(&mut command);
    drop((admin, vm));

    let mut client = Client::connect(&place.path("theirs-p")).unwrap();
    assert_eq!(client.read32(7, 0).unwrap(), 0x06d8_10de);
    let list =
        Command::new(ctl()).arg("--socket").arg(place.path("theirs-admin")).args(["vm", "list"]).output().unwrap();
    assert!(text(&list.stdout).contains("(from the service manager)"), "{}", text(&list.stdout));
    assert!(!place.path("p.sock").exists() && !place.path("admin.sock").exists());
    running.end(Signal::TERM);
    assert!(place.path("theirs-p").exists(), "the service manager's socket is not removed");
}

/// Returns a command that starts the daemon like a service manager, with two sockets as descriptors 3 and 4. A shell
/// moves the sockets to these descriptors, and sets `LISTEN_PID` to its own process ID, which the daemon inherits
/// through `exec`.
fn activated(place: &Place, names: &str, [third, fourth]: [&UnixListener; 2]) -> Command {
    let handed = |socket: &UnixListener| Stdio::from(OwnedFd::from(socket.try_clone().unwrap()));
    let mut command = Command::new("sh");
    command.stdin(handed(third)).stdout(handed(fourth));
    let script = "exec 3<&0 4<&1 </dev/null >/dev/null; export LISTEN_PID=$$; exec \"$0\" \"$@\"";
    command.arg("-c").arg(script).arg(DAEMON).arg("--config").arg(place.path("m.toml"));
    command.env("LISTEN_FDS", "2").env("LISTEN_FDNAMES", names);
    command
}

#[test]
fn help_of_daemon_and_ctl_describes_program() {
    for (program, what) in [(PathBuf::from(DAEMON), "Shares NVIDIA cards"), (ctl(), "Exit codes: 0 done")] {
        let output = Command::new(program).arg("--help").stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success());
        assert!(text(&output.stdout).contains(what));
    }
}

#[test]
fn example_of_the_documentation_is_good() {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/configuration.md"))
        .unwrap();
    let example = page.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.toml");
    fs::File::create(&path).unwrap().write_all(example.as_bytes()).unwrap();
    let output = Command::new(DAEMON).arg("--check").arg("--config").arg(&path).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
}
