//! Runs cloud-hypervisor's own client, the `vfio_user` crate, against the server, with requests in the VMM's order. The
//! client ignores error replies, but must still stay in sync with the server.

mod support;

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use support::*;
use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE, VFIO_PCI_CONFIG_REGION_INDEX,
    VFIO_PCI_MSI_IRQ_INDEX,
};
use vfio_user::Client;
use vmm_glue::client::{memory_file, wait_event};
use vmm_glue::mappable::region_memory;
use vmm_glue::{MmapArea, RegionIndex, RegionInfo, ServerOptions};

const BAR1_BYTES: u64 = 0x4000;
const AREA: MmapArea = MmapArea { offset: 0x1000, size: 0x2000 };

fn client(host: &Host) -> Client {
    let client = Client::new(&host.path).expect("the client is served");
    host.expect(Event::Connected);
    client
}

#[test]
fn regions_are_listed_and_mappable_ones_have_a_file() {
    let file = Arc::new(region_memory("bar1", BAR1_BYTES).unwrap());
    let bar1 = RegionInfo::read_write(BAR1_BYTES).with_mappable(Arc::clone(&file), vec![AREA]).unwrap();
    let host = Host::start_with(ServerOptions::default(), |device| device.bar1 = bar1);
    let client = client(&host);
    // The crate inverts the flag: it reports a resettable device as not resettable, and vice versa.
    assert!(!client.resettable());
    let size = |index: RegionIndex| client.region(index as u32).map(|region| region.size);
    assert_eq!((size(RegionIndex::Bar0), size(RegionIndex::Bar1)), (Some(BAR0_SIZE), Some(BAR1_BYTES)));
    assert_eq!(size(RegionIndex::Config), Some(0x1000));
    let bar1 = client.region(RegionIndex::Bar1 as u32).unwrap();
    let areas: Vec<_> = bar1.sparse_areas.iter().map(|area| (area.offset, area.size)).collect();
    assert_eq!(areas, [(AREA.offset, AREA.size)]);
    let given = bar1.file_offset.as_ref().expect("a file");
    rustix::io::pwrite(given.file(), &[7], given.start() + AREA.offset).unwrap();
    let mut byte = [0];
    rustix::io::pread(&file, &mut byte, AREA.offset).unwrap();
    assert_eq!(byte, [7], "the device's value");
    assert!(client.region(RegionIndex::Bar0 as u32).is_some_and(|region| region.file_offset.is_none()));
}

#[test]
fn registers_are_accessible_and_rejection_keeps_client_in_step() {
    let host = Host::start();
    let mut client = client(&host);
    for round in 0..3_u32 {
        client.region_write(0, 0x10, &round.to_le_bytes()).unwrap();
        // The client ignores both errors. If a reply were too short or too long, the client's next request would
        // misread the stream.
        client.region_write(0, DENIED, &[1, 2, 3, 4]).unwrap();
        client.region_write(0, BAR0_SIZE, &[0; 4]).unwrap();
        let mut data = [0; 4];
        client.region_read(0, DENIED, &mut data).unwrap();
        assert_eq!(data, [0xff; 4]);
        client.region_read(0, 0x10, &mut data).unwrap();
        assert_eq!(data, round.to_le_bytes());
        client.region_read(VFIO_PCI_CONFIG_REGION_INDEX, 0, &mut data).unwrap();
    }
    client.region_write(0, 0x10, &[9; 4]).unwrap();
    client.reset().unwrap();
    host.wait_for(&Event::Reset);
}

#[test]
fn memory_is_lent_taken_back_and_refused() {
    let host = Host::start();
    let mut client = client(&host);
    let file = memory_file(0x4000, true).unwrap();
    let fd = file.as_raw_fd();
    client.dma_map(0x1000, 0x10_0000, 0x2000, fd).unwrap();
    host.expect(Event::Map { gpa: 0x10_0000, size: 0x2000, readable: true, writable: true, mapped: true });
    rustix::io::pwrite(&file, &[5], 0x1000).unwrap();
    let mut byte = [0];
    host.link.memory().read(0x10_0000, &mut byte).unwrap();
    assert_eq!(byte, [5]);
    // Map more than the file contains. Then unmap part of the mapped memory, and memory that was never mapped. The
    // client continues.
    client.dma_map(0x3000, 0x20_0000, 0x2000, fd).unwrap();
    client.dma_unmap(0x10_0000, 0x1000).unwrap();
    client.dma_unmap(0x30_0000, 0x1000).unwrap();
    assert_eq!(host.link.memory().snapshot().regions().len(), 1);
    client.dma_unmap(0x10_0000, 0x2000).unwrap();
    host.expect(Event::Unmap { gpa: 0x10_0000, size: 0x2000 });
    assert!(host.link.memory().snapshot().regions().is_empty());
    client.region_write(0, 0, &[1, 0, 0, 0]).unwrap();
}

#[test]
fn interrupts_come_by_its_descriptors_until_it_turns_them_off() {
    let host = Host::start();
    let mut client = client(&host);
    let info = client.get_irq_info(VFIO_PCI_MSI_IRQ_INDEX).unwrap();
    assert_eq!((info.index, info.count), (VFIO_PCI_MSI_IRQ_INDEX, IRQS.msi));
    let event: OwnedFd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let (signal, none) = (VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE);
    let trigger = VFIO_IRQ_SET_ACTION_TRIGGER;
    client.set_irqs(VFIO_PCI_MSI_IRQ_INDEX, signal | trigger, 0, 1, &[event.as_raw_fd()]).unwrap();
    host.link.interrupts().trigger_msi(0);
    assert_eq!(wait_event(event.as_fd(), EVENT_TIMEOUT).unwrap(), 1);
    client.set_irqs(VFIO_PCI_MSI_IRQ_INDEX, none | trigger, 0, 0, &[]).unwrap();
    assert_eq!(host.link.interrupts().msi_attached(), 0);
    client.shutdown().unwrap();
    host.wait_for(&Event::Disconnected);
    drop(self::client(&host));
}
