//! Kills one of the daemons at each step of an upgrade, while a VM has work in flight. The VM must continue, or reach
//! the state that the operator's guide describes.

mod support;

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{SealFlags, fcntl_add_seals, ftruncate};
use rustix::process::{Pid, Signal, kill_process};
use support::guest::{Guest, MIB};
use support::{DAEMON, Manager, Place, Service, WAIT_TIMEOUT};
use vmm_glue::client::{Client, ClientError, memory_file};

const CARDS: &str = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 128\n\
    [[card]]\nname = \"card1\"\nkind = \"simgpu\"\nvram_mib = 96\n";
const VM: &str = "[[vm]]\nname = \"web\"\ncard = \"card0\"\nvram_mib = 32\napertures = \"trapped\"\n";

/// Starts a daemon that is killed at the point named in the file `dies`. The file also applies to the next daemon.
fn start(manager: &Manager<'_>) -> Service {
    let place = manager.place;
    let mut command = manager.manager.command(Path::new(DAEMON)).unwrap();
    command.arg("--config").arg(place.path("m.toml")).env("MEDIATORD_DIES_AT", place.path("dies"));
    let log = fs::File::options().create(true).append(true).open(place.path("log")).unwrap();
    let daemon = Service(command.stderr(log).spawn().unwrap());
    manager.until("READY=1");
    daemon
}

fn log(place: &Place) -> String {
    fs::read_to_string(place.path("log")).unwrap()
}

/// Waits until all daemons started with this directory have exited, including orphaned ones.
fn all_ended(place: &Place) {
    let named = place.path("dies").display().to_string();
    let is_ours = |process: &fs::DirEntry| {
        let of = |file: &str| fs::read(process.path().join(file)).unwrap_or_default();
        String::from_utf8_lossy(&of("environ")).contains(&named)
    };
    let began = Instant::now();
    while fs::read_dir("/proc").unwrap().flatten().any(|process| is_ours(&process)) {
        assert!(began.elapsed() < WAIT_TIMEOUT, "a daemon does not exit");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Steps at which the next daemon is killed, and the first daemon continues unaffected.
const BEFORE_IT_IS_READY: [&str; 4] = ["receiver: started", "receiver: known", "receiver: given", "receiver: made"];
/// Steps at which the first daemon is killed before the next daemon owns the state.
const BEFORE_IT_LETS_GO: [&str; 7] = [
    "sender: asked",
    "sender: met",
    "sender: clients rest",
    "sender: written",
    "sender: given",
    "sender: the other is ready",
    "sender: the service manager is told",
];

#[test]
fn next_daemon_killed_before_ready_changes_nothing() {
    let place = Place::new(&format!("{CARDS}{VM}{}", VM.replace("web", "other").replace("card0", "card1")));
    let manager = Manager::new(&place);
    let mut daemon = start(&manager);
    let mut guests = ["web", "other"].map(|vm| Guest::new(&place, vm));
    for point in BEFORE_IT_IS_READY {
        fs::write(place.path("dies"), point).unwrap();
        guests.iter_mut().for_each(Guest::begin);
        let ended = place.ctl(&["daemon", "upgrade"]);
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(ended.status.code(), Some(4), "{point}: {said}");
        assert!(said.contains("and continues"), "{point}: {said}");
        assert!(daemon.0.try_wait().unwrap().is_none(), "{point}");
        guests.iter_mut().for_each(Guest::check);
    }
    let said = log(&place);
    assert!(BEFORE_IT_IS_READY.iter().all(|point| said.contains(point)), "{said}");
    // Without a kill, the upgrade succeeds.
    fs::write(place.path("dies"), "nowhere").unwrap();
    guests.iter_mut().for_each(Guest::begin);
    let next = place.ctl_json(&["daemon", "upgrade"]);
    assert!(daemon.0.wait().unwrap().success());
    guests.iter_mut().for_each(Guest::check);
    end(&next);
}

#[test]
fn vms_get_reset_devices_if_daemon_is_killed_before_hand_over() {
    let place = Place::new(&format!("{CARDS}{VM}"));
    let manager = Manager::new(&place);
    fs::write(place.path("dies"), "nowhere").unwrap();
    let mut daemon = start(&manager);
    let mut guest = Guest::new(&place, "web");
    let kept = ["daemon/admin", "vm/web", "vmm/web", "vmm/web/0", "vmm/web/1", "vmm/web/journal"];
    let mut deaths = 0;
    for point in BEFORE_IT_LETS_GO {
        manager.until_kept(&kept);
        guest.begin();
        fs::write(place.path("dies"), point).unwrap();
        // No daemon remains to respond.
        let ended = place.ctl(&["daemon", "upgrade"]);
        assert_ne!(ended.status.code(), Some(0), "{point}");
        daemon.0.wait().unwrap();
        // Wait for the other daemon, which exits by itself or was killed.
        all_ended(&place);
        assert!(log(&place).contains(point), "{point}: {}", log(&place));
        fs::write(place.path("dies"), "nowhere").unwrap();
        daemon = start(&manager);
        deaths += 1;
        guest.begin_anew();
        let shown = place.ctl_json(&["vm", "show", "web"]);
        assert_eq!(shown["state"], "connected", "{point}: {}", log(&place));
        assert_eq!(shown["transport"]["daemon_deaths_survived"], deaths, "{point}");
    }
    drop(daemon);
}

#[test]
fn vms_continue_if_first_daemon_is_killed_after_hand_over() {
    let place = Place::new(&format!("{CARDS}{VM}"));
    let manager = Manager::new(&place);
    fs::write(place.path("dies"), "sender: let go").unwrap();
    let mut daemon = start(&manager);
    let mut guest = Guest::new(&place, "web");
    guest.begin();
    // The first daemon is killed before it can report success.
    place.ctl(&["daemon", "upgrade"]);
    assert!(!daemon.0.wait().unwrap().success());
    guest.check();
    let next = place.ctl_json(&["daemon", "show"]);
    assert_eq!(next["upgrades"], 1);
    guest.begin();
    guest.check();
    end(&next);
}

#[test]
fn context_of_a_host_process_continues_across_an_upgrade() {
    let place = Place::new(&format!("{CARDS}{VM}"));
    let manager = Manager::new(&place);
    fs::write(place.path("dies"), "nowhere").unwrap();
    let mut daemon = start(&manager);
    let mut context = gdev::open(&gdev::Target::Vgpu(place.path("web.sock"))).unwrap();
    let workload = workloads::by_name("madd", workloads::Options::default()).unwrap();
    let memory = context.allocate(gdev::Place::Vram, MIB).unwrap();
    context.write(memory, 0, &[7; 8192]).unwrap();
    workloads::run(&*workload, &mut context).unwrap();
    let next = place.ctl_json(&["daemon", "upgrade"]);
    assert!(daemon.0.wait().unwrap().success());
    workloads::run(&*workload, &mut context).unwrap();
    let mut bytes = [0; 8192];
    context.read(memory, 0, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 8192]);
    drop(context);
    end(&next);
}

#[test]
fn vmm_with_unmappable_memory_is_dropped_and_others_upgrade() {
    let vms = ["web", "cut", "sealed"].map(|name| VM.replace("web", name)).concat();
    let place = Place::new(&format!("{CARDS}{vms}"));
    let manager = Manager::new(&place);
    fs::write(place.path("dies"), "nowhere").unwrap();
    let mut daemon = start(&manager);
    let mut guest = Guest::new(&place, "web");
    guest.begin();
    let mut hostile = ["cut", "sealed"].map(|vm| {
        let file = memory_file(MIB, false).unwrap();
        let mut client = Client::connect(&place.path(&format!("{vm}.sock"))).unwrap();
        client.set_timeout(Some(WAIT_TIMEOUT)).unwrap();
        client.dma_map(0, MIB, true, Some((file.as_fd(), 0))).unwrap();
        match vm {
            "cut" => ftruncate(&file, 0).unwrap(),
            // Existing mappings remain, but the next process cannot map the file as writable.
            _ => fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).unwrap(),
        }
        client
    });
    let next = place.ctl_json(&["daemon", "upgrade"]);
    assert!(daemon.0.wait().unwrap().success());
    guest.check();
    for client in &mut hostile {
        let ended = client.read32(0, 0);
        // The connection may be closed before the request is sent.
        let is_closed = match &ended {
            Err(ClientError::Closed) => true,
            Err(ClientError::Io(error)) => error.kind() == std::io::ErrorKind::BrokenPipe,
            _ => false,
        };
        assert!(is_closed, "{ended:?}");
    }
    let said = log(&place);
    assert_eq!(said.matches("memory of a VMM cannot be mapped again").count(), 2, "{said}");
    // The device is available to the next VMM.
    for vm in ["cut", "sealed"] {
        let mut guest = Guest::new(&place, vm);
        guest.begin();
        guest.check();
    }
    end(&next);
}

/// Kills a daemon that has taken over.
fn end(info: &serde_json::Value) {
    let number = i32::try_from(info["pid"].as_i64().unwrap()).unwrap();
    let _ended = kill_process(Pid::from_raw(number).unwrap(), Signal::KILL);
}
