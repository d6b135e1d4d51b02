//! Tests that log messages caused by clients and guests are rate-limited, and that suppressed messages are counted.

mod support;

use std::fs;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::Command;

use rig::paravirtual::{Interface, RAM_BYTES};
use rig::{Machine, RemoteGuest};
use rustix::process::Signal;
use support::guest::Guest;
use support::{DAEMON, Place, WAIT_TIMEOUT};
use vmm_glue::client::{Client, memory_file};

const TIMES: usize = 2_000;
const VRAM_MIB: u64 = 16;

fn place() -> Place {
    Place::new(
        "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 128\n\
         [[vm]]\nname = \"a\"\ncard = \"card0\"\nvram_mib = 16\nparavirtual = { offered = true }\n",
    )
}

/// Returns the number of messages that the log reports as suppressed.
fn held_back(log: &str) -> usize {
    let counts = log.lines().filter(|line| line.contains("log events were suppressed"));
    counts.filter_map(|line| line.split("count=").nth(1)?.split(' ').next()?.parse::<usize>().ok()).sum()
}

#[test]
fn client_with_repeated_garbage_does_not_flood_log() {
    let place = place();
    let running = place.start(&mut place.daemon());
    let before = fs::read_to_string(place.path("log")).unwrap().lines().count();
    for socket in ["a.sock", "admin.sock"] {
        for round in 0..TIMES {
            let mut stranger = UnixStream::connect(place.path(socket)).unwrap();
            // The daemon may have closed the connection already.
            let _ = stranger.write_all(&[(round % 251) as u8; 64]);
        }
    }
    assert!(place.ctl(&["vm", "list"]).status.success(), "other clients are served");
    running.end(Signal::TERM);
    let log = fs::read_to_string(place.path("log")).unwrap();
    let grown = log.lines().count() - before;
    assert!(grown < 200, "{grown} lines:\n{log}");
    assert!(held_back(&log) > TIMES / 2, "the log contains the number of suppressed events:\n{log}");
}

/// Number of files that each hostile VMM tries to lend. Together, the VMMs' files exceed the daemon's limit on open
/// files.
const FILES: u64 = 600;
/// Number of hostile VMMs.
const LENDERS: usize = 4;
/// The error number `ENOSPC`.
const NO_ROOM: u32 = 28;

#[test]
fn vmms_with_thousands_of_files_leave_descriptors_for_others() {
    let names = ["web", "l0", "l1", "l2", "l3"];
    let vm = |name: &str| format!("[[vm]]\nname = \"{name}\"\ncard = \"card0\"\nvram_mib = 32\n");
    let vms = names.map(vm).concat();
    let place = Place::new(&format!("[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 256\n{vms}"));
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 2048 && exec \"$0\" --config \"$1\"", DAEMON]).arg(place.path("m.toml"));
    let running = place.start(command.env("MEDIATORD_LOG", "info"));
    let lenders: Vec<Client> = (0..LENDERS)
        .map(|number| {
            let mut client = Client::connect(&place.path(&format!("l{number}.sock"))).unwrap();
            client.set_timeout(Some(WAIT_TIMEOUT)).unwrap();
            let mut refused = 0;
            for file in 0..FILES {
                let memory = memory_file(4096, true).unwrap();
                match client.dma_map(file * 4096, 4096, true, Some((memory.as_fd(), 0))) {
                    Ok(()) => {}
                    Err(error) => {
                        assert_eq!(error.errno(), Some(NO_ROOM), "{error}");
                        refused += 1;
                    }
                }
            }
            assert!(refused > 0 && refused < FILES, "{refused} of {FILES} files were rejected");
            // Memory that was already lent stays lent. Several regions of one file count as one file. A file no longer
            // counts after it is withdrawn.
            let memory = memory_file(2 * 4096, true).unwrap();
            let part = |client: &mut Client, gpa, at| client.dma_map(gpa, 4096, true, Some((memory.as_fd(), at)));
            assert!(part(&mut client, 1 << 30, 0).is_err());
            client.dma_unmap(0, 4096).unwrap();
            part(&mut client, 1 << 30, 0).unwrap();
            part(&mut client, (1 << 30) + 4096, 4096).unwrap();
            client
        })
        .collect();
    let mut neighbour = Guest::new(&place, "web");
    neighbour.begin();
    neighbour.check();
    let shown = place.ctl_json(&["vm", "show", "l0"]);
    assert!(shown["transport"]["errors"].as_u64() >= Some(FILES / 2), "{shown}");
    drop(lenders);
    running.end(Signal::TERM);
    let log = fs::read_to_string(place.path("log")).unwrap();
    let told = log.lines().filter(|line| line.contains("lend memory as parts of fewer files")).count();
    assert!((LENDERS..LENDERS * 40).contains(&told), "{told} lines:\n{log}");
}

#[test]
fn guest_with_repeated_invalid_queues_does_not_flood_log() {
    let place = place();
    let running = place.start(&mut place.daemon());
    let mut guest = RemoteGuest::connect(&place.path("a.sock"), VRAM_MIB << 20).unwrap();
    assert!(guest.map_ram(0, RAM_BYTES, true));
    guest.write(vmm_glue::RegionIndex::Config, 4, &6u16.to_le_bytes());
    assert!(Interface::set_up(&mut guest, 0, u32::MAX));
    for _ in 0..TIMES {
        // The rings are in unmapped memory, so the crate `virtio_queue` reports an error.
        assert!(!Interface::set_up(&mut guest, 1 << 40, u32::MAX));
    }
    guest.leave();
    running.end(Signal::TERM);
    let log = fs::read_to_string(place.path("log")).unwrap();
    let errors = log.lines().filter(|line| line.contains("virtio")).count();
    assert!((1..100).contains(&errors), "{errors} lines of the crate:\n{log}");
    assert!(held_back(&log) > TIMES / 2, "the log contains the number of suppressed events:\n{log}");
}
