//! A bound on the lines that strangers and guests can make the daemon write, and a count of the rest.

mod support;

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;

use rig::paravirtual::{Interface, RAM_BYTES};
use rig::{Machine, RemoteGuest};
use rustix::process::Signal;
use support::Place;

const TIMES: usize = 2_000;
const VRAM_MIB: u64 = 16;

fn place() -> Place {
    Place::new(
        "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 128\n\
         [[vm]]\nname = \"a\"\ncard = \"card0\"\nvram_mib = 16\nparavirtual = { offered = true }\n",
    )
}

/// Events that the log says were held back.
fn held_back(log: &str) -> usize {
    let counts = log.lines().filter(|line| line.contains("log events were held back"));
    counts.filter_map(|line| line.split("count=").nth(1)?.split(' ').next()?.parse::<usize>().ok()).sum()
}

#[test]
fn stranger_who_sends_garbage_again_and_again_fills_no_log() {
    let place = place();
    let running = place.start(&mut place.daemon());
    let before = fs::read_to_string(place.path("log")).unwrap().lines().count();
    for socket in ["a.sock", "admin.sock"] {
        for round in 0..TIMES {
            let mut stranger = UnixStream::connect(place.path(socket)).unwrap();
            // The daemon may have closed it already.
            let _ = stranger.write_all(&[(round % 251) as u8; 64]);
        }
    }
    assert!(place.ctl(&["vm", "list"]).status.success(), "others are served");
    running.end(Signal::TERM);
    let log = fs::read_to_string(place.path("log")).unwrap();
    let grown = log.lines().count() - before;
    assert!(grown < 200, "{grown} lines:\n{log}");
    assert!(held_back(&log) > TIMES / 2, "it says how many there were:\n{log}");
}

#[test]
fn guest_that_sets_up_impossible_queues_again_and_again_fills_no_log() {
    let place = place();
    let running = place.start(&mut place.daemon());
    let mut guest = RemoteGuest::connect(&place.path("a.sock"), VRAM_MIB << 20).unwrap();
    assert!(guest.map_ram(0, RAM_BYTES, true));
    guest.write(vmm_glue::RegionIndex::Config, 4, &6u16.to_le_bytes());
    assert!(Interface::set_up(&mut guest, 0, u32::MAX));
    for _ in 0..TIMES {
        // The rings lie in no memory, which the crate `virtio_queue` reports as an error.
        assert!(!Interface::set_up(&mut guest, 1 << 40, u32::MAX));
    }
    guest.leave();
    running.end(Signal::TERM);
    let log = fs::read_to_string(place.path("log")).unwrap();
    let errors = log.lines().filter(|line| line.contains("virtio")).count();
    assert!((1..100).contains(&errors), "{errors} lines of the crate:\n{log}");
    assert!(held_back(&log) > TIMES / 2, "it says how many there were:\n{log}");
}
