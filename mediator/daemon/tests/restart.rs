//! Stops or kills the daemon at arbitrary times, restarts it, and checks the restored state and the waiting clients.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SocketAddrUnix, getsockname, recv};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde_json::{Value, json};
use support::{Manager, Place, Service, WAIT_TIMEOUT, ctl};
use vmm_glue::client::{Client, ClientError};

const CARD: &str = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 128\n";
const WEB: &str = "[[vm]]\nname = \"web\"\ncard = \"card0\"\nvram_mib = 16\napertures = \"trapped\"\n";

/// Returns the exported state without the revision.
fn exported(place: &Place) -> Value {
    let mut exported = place.ctl_json(&["export"]);
    exported.as_object_mut().unwrap().remove("revision").unwrap();
    exported
}

#[test]
fn vms_and_limits_are_there_again_after_an_end_of_either_kind() {
    let place = Place::with_state(&format!("{CARD}{WEB}"));
    let mut before = Value::Null;
    for kill in [false, true, false] {
        let mut running = place.start(&mut place.daemon());
        if before.is_null() {
            for arguments in [
                &["vm", "add", "new", "--card", "card0", "--vram-mib", "32", "--weight", "7", "--channels", "9"][..],
                &["sched", "set-vm", "web", "--weight", "300", "--cap", "70"],
                &["sched", "set", "card0", "--policy", "fifo", "--wait-us", "5"],
                &["vm", "add", "short", "--card", "card0", "--vram-mib", "16"],
                &["vm", "remove", "short"],
            ] {
                place.ctl_json(arguments).as_object().unwrap();
            }
            before = exported(&place);
        }
        let now = exported(&place);
        assert_eq!(now, before);
        assert_eq!((&now["vm"][0]["channels"], &now["vm"][1]["time"]["weight"]), (&json!(9), &json!(300)));
        let scheduler = place.ctl_json(&["sched", "show", "card0"]);
        assert_eq!(
            (&scheduler["settings"]["policy"], &scheduler["vms"][1]["time"]["cap_permille"]),
            (&json!("fifo"), &json!(700))
        );
        Client::connect(&place.path("new.sock")).unwrap();
        match kill {
            true => running.child.kill().unwrap(),
            false => running.end(Signal::TERM),
        }
    }
}

#[test]
fn without_a_folder_for_it_nothing_is_kept_and_that_is_said() {
    let place = Place::new(CARD);
    let names = |place: &Place| -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(place.path(".")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names.into_iter().map(|name| name.into_string().unwrap()).collect()
    };
    let running = place.start(&mut place.daemon());
    assert!(place.ctl(&["vm", "add", "a", "--card", "card0", "--vram-mib", "16"]).status.success());
    running.end(Signal::TERM);
    assert!(fs::read_to_string(place.path("log")).unwrap().contains("no `state_dir` is configured"));
    assert_eq!(names(&place), ["log", "m.toml", "notify"]);
    let running = place.start(&mut place.daemon());
    assert_eq!(place.ctl_json(&["vm", "list"])["vms"], json!([]));
    running.end(Signal::TERM);
}

#[test]
fn damaged_state_prevents_start_until_ignored() {
    let place = Place::with_state(&format!("{CARD}{WEB}"));
    fs::create_dir(place.path("kept")).unwrap();
    fs::write(place.path("kept/state.json"), "{\n  \"version\": 1,\n  \"vms_addde\": []\n}\n").unwrap();
    let output = place.daemon().output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("kept/state.json:3:13: unknown field `vms_addde`"), "{error}");
    assert!(error.contains("start once with --ignore-state"), "{error}");
    let running = place.start(place.daemon().arg("--ignore-state"));
    assert_eq!(place.ctl_json(&["vm", "list"])["vms"][0]["name"], json!("web"));
    running.end(Signal::TERM);
    assert!(place.path("kept/state.json.ignored").exists());
    place.start(&mut place.daemon()).end(Signal::TERM);
}

#[test]
fn unwritable_state_folder_is_reported_as_applied_but_unsaved() {
    let place = Place::with_state(CARD);
    let running = place.start(&mut place.daemon());
    // Opening a directory for writing fails, even for root.
    fs::create_dir(place.path("kept/state.json.new")).unwrap();
    let output = place.ctl(&["vm", "add", "a", "--card", "card0", "--vram-mib", "16"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("applied but not saved; lost on restart: cannot write"), "{error}");
    assert_eq!(place.ctl_json(&["vm", "list"])["vms"].as_array().unwrap().len(), 1);
    // The next save contains both changes.
    fs::remove_dir(place.path("kept/state.json.new")).unwrap();
    place.ctl_json(&["sched", "set", "card0", "--strikes", "9"]);
    running.end(Signal::TERM);
    let running = place.start(&mut place.daemon());
    assert_eq!(place.ctl_json(&["vm", "list"])["vms"][0]["name"], json!("a"));
    running.end(Signal::TERM);
}

#[test]
fn kill_at_any_moment_loses_no_change_that_was_answered() {
    const ROUNDS: u32 = 12;
    let place = Place::with_state(&format!("{CARD}{WEB}"));
    let mut random = fastrand::Rng::with_seed(7);
    // Acknowledged weights by VM, and the number of requests interrupted by a kill.
    let mut sure = BTreeMap::from([("web".to_owned(), 100)]);
    let mut cut_short = 0;
    for _ in 0..ROUNDS {
        let mut running = place.start(&mut place.daemon());
        let end = Instant::now() + Duration::from_millis(random.u64(..250));
        let killer = {
            let pid = Pid::from_child(&running.child);
            std::thread::spawn(move || {
                std::thread::sleep(end.saturating_duration_since(Instant::now()));
                kill_process(pid, Signal::KILL).unwrap();
            })
        };
        let perhaps = loop {
            let name = format!("vm{}", random.u64(..3));
            let weight = 1 + random.u64(..1000);
            let mut perhaps = sure.clone();
            let text = weight.to_string();
            let arguments: Vec<&str> = match (sure.contains_key(&name), random.u64(..3)) {
                (true, 0) => {
                    perhaps.remove(&name);
                    vec!["vm", "remove", &name]
                }
                (true, _) => {
                    perhaps.insert(name.clone(), weight);
                    vec!["sched", "set-vm", &name, "--weight", &text]
                }
                (false, _) => {
                    perhaps.insert(name.clone(), weight);
                    vec!["vm", "add", &name, "--card", "card0", "--vram-mib", "16", "--weight", &text]
                }
            };
            if !place.ctl(&arguments).status.success() {
                cut_short += 1;
                break perhaps;
            }
            sure = perhaps;
        };
        killer.join().unwrap();
        running.child.wait().unwrap();

        let running = place.start(&mut place.daemon());
        let vms = exported(&place)["vm"].as_array().unwrap().clone();
        let there: BTreeMap<String, u64> = vms
            .iter()
            .map(|vm| (vm["name"].as_str().unwrap().to_owned(), vm["time"]["weight"].as_u64().unwrap()))
            .collect();
        assert!(there == sure || there == perhaps, "{there:?}, expected {sure:?} or {perhaps:?}");
        sure = there;
        running.end(Signal::TERM);
    }
    assert_eq!(cut_short, ROUNDS);
}

#[test]
fn clients_connecting_during_restart_are_served_by_next_daemon() {
    for kill in [false, true] {
        let place = Place::with_state(CARD);
        let manager = Manager::new(&place);
        let mut daemon = manager.start();
        manager.until_kept(&["daemon/admin"]);
        assert!(place.ctl(&["vm", "add", "web", "--card", "card0", "--vram-mib", "16"]).status.success());
        manager.until_kept(&["daemon/admin", "vm/web"]);
        if kill {
            drop(daemon);
        } else {
            kill_process(Pid::from_child(&daemon.0), Signal::TERM).unwrap();
            assert!(daemon.0.wait().unwrap().success());
            manager.until("STOPPING=1");
        }
        // An operator and a VMM connect while the daemon is not running.
        let waiting = Command::new(ctl())
            .arg("--socket")
            .arg(place.path("admin.sock"))
            .args(["--json", "vm", "list"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let path = place.path("web.sock");
        let vmm = std::thread::spawn(move || Client::connect(&path).map(|mut client| client.read32(7, 0).unwrap()));

        daemon = manager.spawn();
        let listed = waiting.wait_with_output().unwrap();
        assert!(listed.status.success());
        let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
        assert_eq!(listed["vms"][0]["socket"], json!(place.path("web.sock")), "the daemon created the socket itself");
        assert_eq!(vmm.join().unwrap().unwrap(), 0x06d8_10de);
        manager.until("READY=1");
        manager.until_kept(&["daemon/admin", "vm/web"]);

        // A removed VM's socket disappears from both the directory and the store.
        assert!(place.ctl(&["vm", "remove", "web"]).status.success());
        assert!(!place.path("web.sock").exists());
        manager.until_kept(&["daemon/admin"]);
        drop(daemon);
    }
}

/// Kills the daemon while a VMM's writes are queued on the connection. Returns the error of the VMM's next read. `kept`
/// is true if the store keeps the connection.
fn read_after_kill(manager: &Manager<'_>, daemon: Service, kept: bool) -> ClientError {
    let mut vmm = Client::connect(&manager.place.path("web.sock")).unwrap();
    vmm.set_timeout(Some(WAIT_TIMEOUT)).unwrap();
    manager.until_kept(&["daemon/admin", "vm/web", "vmm/web", "vmm/web/journal"]);
    let pid = Pid::from_child(&daemon.0);
    kill_process(pid, Signal::STOP).unwrap();
    assert!(waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().unwrap().1.stopped());
    for _ in 0..100 {
        vmm.post(7, 0x40, &[0; 4]).unwrap();
    }
    if !kept {
        // The next daemon finds a journal without its connection, and removes it.
        manager.wait(|heard| {
            heard.kept.retain(|(name, _)| name != "vmm/web");
            Some(())
        });
    }
    drop(daemon);
    if kept {
        // Without a journal, no daemon can resume the connection.
        manager.wait(|heard| heard.kept.pop_if(|(name, _)| name == "vmm/web/journal"));
        let waits = recv(vmm.stream(), &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        assert_eq!(waits, Err(Errno::AGAIN));
        let daemon = manager.start();
        manager.until_kept(&["daemon/admin", "vm/web"]);
        let error = vmm.receive_message().unwrap_err();
        drop(daemon);
        return error;
    }
    vmm.receive_message().unwrap_err()
}

#[test]
fn vmm_reads_end_of_connection_after_daemon_kill() {
    let place = Place::new(&format!("{CARD}{WEB}"));
    let manager = Manager::new(&place);
    let daemon = manager.start();
    assert!(matches!(read_after_kill(&manager, daemon, true), ClientError::Closed));
    // Without a stored copy of the connection, the daemon cannot prevent this error.
    let daemon = manager.start();
    let error = read_after_kill(&manager, daemon, false);
    assert!(matches!(&error, ClientError::Io(error) if error.kind() == ErrorKind::ConnectionReset), "{error}");

    // A VMM that disconnects leaves nothing in the store.
    let daemon = manager.start();
    manager.until_kept(&["daemon/admin", "vm/web"]);
    let vmm = Client::connect(&place.path("web.sock")).unwrap();
    manager.until_kept(&["daemon/admin", "vm/web", "vmm/web", "vmm/web/journal"]);
    drop(vmm);
    manager.until_kept(&["daemon/admin", "vm/web"]);
    drop(daemon);
}

#[test]
fn socket_of_a_vm_that_is_gone_or_has_another_path_is_given_up() {
    let place = Place::new(&format!("{CARD}{WEB}"));
    let manager = Manager::new(&place);
    drop(manager.start());
    manager.until_kept(&["daemon/admin", "vm/web"]);
    assert!(place.path("web.sock").exists());
    let text = fs::read_to_string(place.path("m.toml")).unwrap();
    let other = place.path("other.sock");
    fs::write(place.path("m.toml"), format!("{text}socket = \"{}\"\n", other.display())).unwrap();
    drop(manager.start());
    manager.until_kept(&["daemon/admin", "vm/web"]);
    assert!(other.exists() && !place.path("web.sock").exists());
    let address = manager.wait(|heard| {
        let (_, fd) = heard.kept.iter().find(|(name, _)| name == "vm/web")?;
        SocketAddrUnix::try_from(getsockname(fd).unwrap()).ok()
    });
    assert_eq!(address.path_bytes(), Some(other.as_os_str().as_encoded_bytes()));

    fs::write(place.path("m.toml"), text.replace(WEB, "")).unwrap();
    let daemon = manager.start();
    manager.until_kept(&["daemon/admin"]);
    assert!(!other.exists());
    drop(daemon);
}

#[test]
fn running_daemon_feeds_watchdog() {
    let place = Place::new(CARD);
    let manager = Manager::new(&place);
    let daemon = manager.start();
    for _ in 0..5 {
        manager.until("WATCHDOG=1");
    }
    drop(daemon);
}
