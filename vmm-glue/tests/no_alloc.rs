//! Checks that accesses do not allocate memory once the buffers have grown.
#![allow(unsafe_code, reason = "a global allocator that counts")]
// UNSAFETY: forwards every call to the system allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use vmm_glue::client::{QEMU_CAPABILITIES, multi_body, write_body};
use vmm_glue::connection::Connection;
use vmm_glue::echo::EchoDevice;
use vmm_glue::protocol::{Command, FLAG_NO_REPLY, HEADER_SIZE, Header, RegionAccess, Version};
use vmm_glue::{ClientInfo, IrqCounts, Link, ServerOptions};
use zerocopy::IntoBytes;

struct Counting;

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: the system allocator fulfils the contract, and counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.with(|calls| calls.set(calls.get() + 1));
        // SAFETY: the caller fulfils the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller fulfils the contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn message(command: Command, flags: u32, body: &[u8]) -> Vec<u8> {
    let size = u32::try_from(HEADER_SIZE + body.len()).unwrap();
    [Header::request(1, command, size, flags).as_bytes(), body].concat()
}

#[test]
fn hundred_thousand_accesses_allocate_nothing() {
    let link = Link::new(IrqCounts { msi: 1, ..IrqCounts::default() }).unwrap();
    let mut device = EchoDevice::new(4096, 1, 2);
    let mut connection = Connection::new(link, &ServerOptions::default(), ClientInfo { pid: 0, uid: 0, domain: None });
    let version = [Version { major: 0, minor: 0 }.as_bytes(), QEMU_CAPABILITIES.as_bytes(), &[0]].concat();
    let access = RegionAccess { offset: 8, region: 0, count: 4 };
    let round = [
        message(Command::REGION_READ, 0, access.as_bytes()),
        message(Command::REGION_WRITE, 0, &write_body(0, 8, &[1; 4])),
        message(Command::REGION_WRITE, FLAG_NO_REPLY, &write_body(0, 16, &[1; 8])),
        message(Command::REGION_WRITE_MULTI, FLAG_NO_REPLY, &multi_body(&[(0, 0, &[2; 8]), (0, 8, &[3; 4])])),
    ]
    .concat();
    let mut feed = |bytes: &[u8]| {
        let rest = connection.handle_bytes(&mut device, bytes, Vec::new()).unwrap();
        assert!(rest.is_empty());
        connection.work(&mut device).unwrap();
        let sent = connection.pending_output();
        connection.output().advance(sent);
    };
    feed(&message(Command::VERSION, 0, &version));
    feed(&round);
    let before = CALLS.with(Cell::get);
    assert_ne!(before, 0, "the counting works");
    for _ in 0..25_000 {
        feed(&round);
    }
    assert_eq!(CALLS.with(Cell::get) - before, 0);
}
