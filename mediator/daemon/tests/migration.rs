//! Migrates a VM between daemons while its guest runs: through vfio-user messages, and as a file with a slow reader.

mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rig::Machine;
use support::guest::{Guest, MIB, VM_MIB};
use support::{Manager, Place, Service, WAIT_TIMEOUT};
use vmm_glue::client::Client;
use vmm_glue::protocol::{
    MIGRATION_STOP_COPY, STATE_ERROR, STATE_RESUMING, STATE_RUNNING, STATE_STOP, STATE_STOP_COPY,
};

const CARD: &str = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 192\nmemory = { host_mib = 64 }\n";

fn vms(names: &[&str]) -> String {
    let vm = |name| format!("[[vm]]\nname = \"{name}\"\ncard = \"card0\"\nvram_mib = {VM_MIB}\n");
    names.iter().fold(CARD.to_owned(), |text, name| text + &vm(name))
}

fn connect(place: &Place, vm: &str) -> Client {
    let client = Client::connect(&place.path(&format!("{vm}.sock"))).unwrap();
    client.set_timeout(Some(WAIT_TIMEOUT)).unwrap();
    client
}

/// Waits until a VM has no client.
fn until_alone(place: &Place, vm: &str) {
    let began = std::time::Instant::now();
    while place.ctl_json(&["vm", "show", vm])["state"] != "waiting" {
        assert!(began.elapsed() < WAIT_TIMEOUT, "VM {vm} still has a client");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn vm_goes_from_daemon_to_daemon_in_the_midst_of_its_work() {
    let places = [Place::new(&vms(&["web", "beside"])), Place::new(&vms(&["web", "beside"]))];
    let managers = places.each_ref().map(Manager::new);
    let daemons: [Service; 2] = managers.each_ref().map(Manager::start);
    let mut beside = places.each_ref().map(|place| Guest::new(place, "beside"));
    let mut guest = Guest::new(&places[0], "web");
    for round in 1..=6 {
        let (from, to) = (&places[(round + 1) % 2], &places[round % 2]);
        beside.iter_mut().for_each(Guest::begin);
        guest.begin();
        let bytes = guest.driver.guest.migrate_to(&to.path("web.sock")).unwrap();
        assert!(bytes > MIB as usize, "{bytes} bytes");
        guest.check();
        beside.iter_mut().for_each(Guest::check);
        let shown = to.ctl_json(&["vm", "show", "web"]);
        assert_eq!((&shown["counters"]["faults"], &shown["counters"]["hangs"]), (&0.into(), &0.into()), "{shown}");
        until_alone(from, "web");
    }
    // The guest can use the device after a migration that was started but not completed.
    guest.begin();
    guest.driver.guest.set_device_state(STATE_STOP_COPY).unwrap();
    let at = &places[0];
    // Meanwhile, other operations on the VM are rejected.
    for command in [&["daemon", "upgrade"][..], &["vm", "save", "web", at.path("web.vgpu").to_str().unwrap()]] {
        let refused = at.ctl(command);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("its VMM has stopped it"), "{command:?}: {said}");
    }
    guest.driver.guest.set_device_state(STATE_RUNNING).unwrap();
    guest.check();
    drop(daemons);
}

#[test]
fn client_with_invalid_state_gets_failed_device_until_reset() {
    let place = Place::new(&vms(&["web", "other", "beside"]));
    let manager = Manager::new(&place);
    let daemon = manager.start();
    let mut beside = Guest::new(&place, "beside");
    let mut guest = Guest::new(&place, "web");
    guest.begin();
    guest.check();
    // This saved state is corrupted below.
    let state = {
        let mut client = connect(&place, "other");
        assert_eq!(client.migration_flags().unwrap(), MIGRATION_STOP_COPY);
        client.write32(7, 4, 6).unwrap();
        client.set_device_state(STATE_STOP_COPY).unwrap();
        client.migration_read_all(4096).unwrap()
    };
    until_alone(&place, "other");
    let mut client = connect(&place, "other");
    let mut random = fastrand::Rng::with_seed(1);
    for round in 0..40 {
        beside.begin();
        let mut bytes = state.clone();
        let at = random.usize(..bytes.len());
        match round % 3 {
            0 => bytes.truncate(at),
            1 => bytes[at] ^= 1 << random.u32(..8),
            _ => bytes.insert(at, 0x5a),
        }
        client.set_device_state(STATE_RESUMING).unwrap();
        // The daemon rejects either the corrupt chunk or the end of the stream.
        let _refused = bytes.chunks(1000).try_for_each(|part| client.migration_write(part));
        client.set_device_state(STATE_RUNNING).unwrap_err();
        assert_eq!(client.device_state().unwrap(), STATE_ERROR, "round {round}");
        client.set_device_state(STATE_STOP).unwrap_err();
        client.reset().unwrap();
        assert_eq!(client.device_state().unwrap(), STATE_RUNNING);
        beside.check();
    }
    // A state longer than any valid state is also rejected, without blocking other VMs.
    client.set_device_state(STATE_RESUMING).unwrap();
    let endless = std::iter::repeat_with(|| client.migration_write(&vec![0x5a; 60_000])).take(200);
    assert!(endless.filter(Result::is_err).count() >= 199);
    client.reset().unwrap();
    // The unmodified state is still accepted, and the device continues to work.
    client.set_device_state(STATE_RESUMING).unwrap();
    state.chunks(777).for_each(|part| client.migration_write(part).unwrap());
    client.set_device_state(STATE_RUNNING).unwrap();
    assert_eq!(client.read32(7, 4).unwrap() & 0xffff, 6);
    drop(client);
    until_alone(&place, "other");
    let mut other = Guest::new(&place, "other");
    other.begin();
    other.check();
    guest.begin();
    guest.check();
    drop(daemon);
}

/// Sends a request without reading the response.
fn ask(place: &Place, head: &str) -> UnixStream {
    let mut stream = UnixStream::connect(place.path("admin.sock")).unwrap();
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    stream.write_all(head.as_bytes()).unwrap();
    stream
}

fn line_of(stream: &mut UnixStream) -> String {
    let mut line = Vec::new();
    let mut byte = [0];
    while !line.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() == 1 {
        line.push(byte[0]);
    }
    String::from_utf8_lossy(&line).into_owned()
}

#[test]
fn slow_save_or_restore_client_blocks_no_vm_or_operator() {
    let place = Place::with_state(&vms(&["web"]));
    let manager = Manager::new(&place);
    let daemon = manager.start();
    let mut guest = Guest::new(&place, "web");
    // The VM's state exceeds all buffers between the daemon and the reader.
    let filler: Vec<u8> = (0..MIB as usize).map(|at| (at % 251) as u8 | 1).collect();
    (16..VM_MIB - 2).for_each(|mib| guest.driver.guest.vram_write(mib * MIB, &filler));
    guest.begin();
    let mut slow =
        ask(&place, "POST /v1/vms/web/save HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n");
    let head = line_of(&mut slow);
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    // The VM has been saved and continues, and other changes are possible.
    guest.check();
    place.ctl_json(&["vm", "add", "more", "--card", "card0", "--vram-mib", "16"]);
    let mut body = Vec::new();
    slow.read_to_end(&mut body).unwrap();
    assert!(body.len() > 14 * MIB as usize, "{} bytes", body.len());
    // A restore from a slow client does not block other VMs either.
    let file = place.path("web.vgpu");
    place.ctl_json(&["vm", "save", "web", file.to_str().unwrap()]);
    let saved = std::fs::read(&file).unwrap();
    let head = format!(
        "POST /v1/vms/web/restore HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/octet-stream\r\n\
         content-length: {}\r\n\r\n",
        saved.len()
    );
    let mut slow = ask(&place, &head);
    slow.write_all(&saved[..saved.len() / 2]).unwrap();
    guest.begin();
    guest.check();
    place.ctl_json(&["vm", "remove", "more"]);
    slow.write_all(&saved[saved.len() / 2..]).unwrap();
    let head = line_of(&mut slow);
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let mut bytes = vec![0; MIB as usize];
    guest.driver.guest.vram_read(20 * MIB, &mut bytes);
    assert!(bytes == filler);
    let left: Vec<_> = std::fs::read_dir(place.path("kept")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.len() <= 2, "{left:?}");
    drop(guest);
    drop(daemon);
}
