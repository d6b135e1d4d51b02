//! Checks that descriptors of mappable regions do not accumulate. This test has its own file, because it counts the
//! descriptors of the whole process.

mod support;

use std::sync::Arc;

use support::*;
use vmm_glue::mappable::region_memory;
use vmm_glue::protocol::{Command, RegionInfoBody};
use vmm_glue::{MmapArea, RegionIndex, RegionInfo, ServerOptions};
use zerocopy::IntoBytes;

const BAR1: u32 = 1;

/// Returns the number of open descriptors of this process, including the one used for counting.
fn open() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn descriptors_do_not_pile_up() {
    let file = Arc::new(region_memory("bar1", 0x4000).unwrap());
    let areas = vec![MmapArea { offset: 0, size: 0x4000 }];
    let bar1 = RegionInfo::read_write(0x4000).with_mappable(file.clone(), areas).unwrap();
    let host = Host::start_with(ServerOptions::default(), |device| device.bar1 = bar1);

    // Once the reply has arrived, the server has finished handling the previous client and this client's request.
    let mut client = host.client();
    client.device_info().unwrap();
    let (fds, owners) = (open(), Arc::strong_count(&file));
    let check = |what: &str| {
        assert_eq!(open(), fds, "descriptors after {what}");
        assert_eq!(Arc::strong_count(&file), owners, "owners of the file after {what}");
    };

    for _ in 0..1000 {
        assert!(client.region(BAR1).unwrap().file.is_some());
    }
    client.device_info().unwrap();
    check("1000 queries");

    let kept: Vec<_> = (0..10).map(|_| client.region(BAR1).unwrap()).collect();
    assert_eq!(open(), fds + kept.len(), "each query returns one descriptor, which shows that the count is correct");
    drop(kept);

    for _ in 0..100 {
        client.region(BAR1).unwrap();
        drop(client);
        host.wait_for(&Event::Disconnected);
        client = host.client();
    }
    client.device_info().unwrap();
    check("100 connections");

    // Request more data than the socket buffers, so that replies with descriptors are queued in the socket and in the
    // server when the client disconnects.
    let body = RegionInfoBody { argsz: 64, index: BAR1, ..Default::default() };
    for _ in 0..5 {
        for _ in 0..2000 {
            client.send(Command::DEVICE_GET_REGION_INFO, 0, body.as_bytes(), &[]).unwrap();
        }
        client.post(0, 0x40, &[1; 4]).unwrap();
        host.wait_for(&Event::Write(RegionIndex::Bar0, 0x40, vec![1; 4]));
        assert!(Arc::strong_count(&file) > owners + 100, "replies wait");
        drop(client);
        host.wait_for(&Event::Disconnected);
        client = host.client();
    }
    client.device_info().unwrap();
    check("clients that do not read");
}
