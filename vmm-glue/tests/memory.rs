//! Tests guest memory: mapping, unmapping, withdrawal, and access through messages.

mod support;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::RecvFlags;
use support::*;
use vmm_glue::ServerOptions;
use vmm_glue::client::{CLOUD_HYPERVISOR_CAPABILITIES, Client, DmaTarget, memory_file};
use vmm_glue::dma::DmaError;
use vmm_glue::memory::{MemoryError, MemoryLimits};
use vmm_glue::protocol::{Command, DmaMap, DmaUnmap};
use zerocopy::IntoBytes;

const MIB: u64 = 1 << 20;

fn lend(client: &mut Client, gpa: u64, size: u64) -> OwnedFd {
    let file = memory_file(size, true).unwrap();
    client.dma_map(gpa, size, true, Some((file.as_fd(), 0))).unwrap();
    file
}

fn mapped(gpa: u64, size: u64) -> Event {
    Event::Map { gpa, size, readable: true, writable: true, mapped: true }
}

#[test]
fn lent_memory_is_the_clients_own() {
    let host = Host::start();
    let mut client = host.client();
    let file = lend(&mut client, 0x10_0000, MIB);
    host.expect(mapped(0x10_0000, MIB));
    rustix::io::pwrite(&file, b"from the guest", 0x123).unwrap();
    let mut data = [0; 14];
    host.link.memory().read(0x10_0123, &mut data).unwrap();
    assert_eq!(&data, b"from the guest");
    host.link.memory().write(0x1f_fffc, b"last").unwrap();
    let mut last = [0; 4];
    rustix::io::pread(&file, &mut last, MIB - 4).unwrap();
    assert_eq!(&last, b"last");
}

#[test]
fn file_offset_is_respected() {
    let host = Host::start();
    let mut client = host.client();
    let file = memory_file(4 * MIB, true).unwrap();
    rustix::io::pwrite(&file, b"here", 3 * MIB).unwrap();
    client.dma_map(0, MIB, true, Some((file.as_fd(), 3 * MIB))).unwrap();
    let mut data = [0; 4];
    host.link.memory().read(0, &mut data).unwrap();
    assert_eq!(&data, b"here");
}

#[test]
fn access_across_regions_that_touch_works_and_beyond_them_fails() {
    let host = Host::start();
    let mut client = host.client();
    lend(&mut client, 0x1000, 0x1000);
    lend(&mut client, 0x2000, 0x1000);
    let memory = host.link.memory();
    memory.write(0x1ffe, &[1, 2, 3, 4]).unwrap();
    let mut data = [0; 4];
    memory.read(0x1ffe, &mut data).unwrap();
    assert_eq!(data, [1, 2, 3, 4]);
    assert_eq!(memory.read(0x2ffe, &mut data), Err(MemoryError::NotMapped { gpa: 0x3000 }));
    assert_eq!(memory.read(0xffe, &mut data), Err(MemoryError::NotMapped { gpa: 0xffe }));
    assert_eq!(memory.read(u64::MAX, &mut data), Err(MemoryError::NotMapped { gpa: u64::MAX }));
}

#[test]
fn read_only_memory_cannot_be_written() {
    let host = Host::start();
    let mut client = host.client();
    let file = memory_file(0x1000, true).unwrap();
    client.dma_map(0, 0x1000, false, Some((file.as_fd(), 0))).unwrap();
    assert_eq!(host.link.memory().write(0, &[1]), Err(MemoryError::NotWritable { gpa: 0 }));
    host.link.memory().read(0, &mut [0]).unwrap();
}

#[test]
fn unmapped_memory_is_gone_for_the_device_before_the_reply() {
    let host = Host::start();
    let mut client = host.client();
    lend(&mut client, 0, MIB);
    host.expect(mapped(0, MIB));
    let snapshot = host.link.memory().snapshot();
    client.dma_unmap(0, MIB).unwrap();
    host.expect(Event::Unmap { gpa: 0, size: MIB });
    assert_eq!(host.link.memory().read(0, &mut [0]), Err(MemoryError::NotMapped { gpa: 0 }));
    snapshot.read(0, &mut [0]).expect("an old snapshot remains valid memory");
    assert_eq!(host.link.counters().dma_regions.load(Relaxed), 0);
}

#[test]
fn unmap_is_answered_only_when_the_device_is_done() {
    let (release, held) = std::sync::mpsc::channel();
    let host = Host::start_with(ServerOptions::default(), |device| device.held_unmap = Some(held));
    let mut client = host.client();
    for gpa in [0, MIB] {
        lend(&mut client, gpa, MIB);
        host.expect(mapped(gpa, MIB));
    }
    let body = DmaUnmap { argsz: 24, flags: 0, address: 0, size: 2 * MIB };
    let id = client.send(Command::DMA_UNMAP, 0, body.as_bytes(), &[]).unwrap();
    for gpa in [0, MIB] {
        host.expect(Event::Unmap { gpa, size: MIB });
        let answer = rustix::net::recv(client.stream(), &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        assert_eq!(answer.map(|(_, len)| len), Err(Errno::AGAIN), "the device still works on {gpa:#x}");
        assert_eq!(host.link.memory().read(gpa, &mut [0]), Err(MemoryError::NotMapped { gpa }));
        release.send(()).unwrap();
    }
    client.reply(id).unwrap();
}

#[test]
fn whole_regions_can_be_unmapped_but_not_parts() {
    let host = Host::start();
    let mut client = host.client();
    for gpa in [0, MIB, 4 * MIB] {
        lend(&mut client, gpa, MIB);
    }
    assert_eq!(client.dma_unmap(0, 0x1000).unwrap_err().errno(), EINVAL);
    assert_eq!(client.dma_unmap(0x1000, MIB).unwrap_err().errno(), EINVAL);
    assert_eq!(client.dma_unmap(0, 0).unwrap_err().errno(), EINVAL);
    assert_eq!(client.dma_unmap(u64::MAX, MIB).unwrap_err().errno(), EINVAL);
    assert_eq!(
        client.dma_unmap(0, 3 * MIB).unwrap(),
        2 * MIB,
        "all regions in the range are removed, with or without gaps"
    );
    assert_eq!(host.link.memory().snapshot().regions().len(), 1);
    client.dma_unmap_all().unwrap();
    assert_eq!(host.link.memory().snapshot().regions().len(), 0);
    client.dma_unmap_all().unwrap();
}

#[test]
fn range_in_which_nothing_is_mapped_is_unmapped_with_size_0() {
    let host = Host::start();
    let mut client = host.client();
    lend(&mut client, MIB, MIB);
    assert_eq!(client.dma_unmap(2 * MIB, MIB).unwrap(), 0);
    assert_eq!(client.dma_unmap(0, MIB).unwrap(), 0);
    // A VMM that covers the address space with power-of-two IOMMU ranges reaches the end of the address space.
    assert_eq!(client.dma_unmap(1 << 63, 1 << 63).unwrap(), 0);
    assert_eq!(host.link.memory().snapshot().regions().len(), 1, "regions next to the range stay");
    assert_eq!(host.link.counters().snapshot().errors, 0);
}

#[test]
fn unmapped_range_must_be_of_whole_pages() {
    let host = Host::start();
    let mut client = host.client();
    assert_eq!(client.dma_unmap(0x800, 0x1000).unwrap_err().errno(), EINVAL);
    assert_eq!(client.dma_unmap(0x1000, 0x800).unwrap_err().errno(), EINVAL);
}

#[test]
fn bad_maps_are_refused() {
    let host = Host::start();
    let mut client = host.client();
    lend(&mut client, 2 * MIB, MIB);
    host.expect(mapped(2 * MIB, MIB));
    let file = memory_file(MIB, true).unwrap();
    let mut refused =
        |gpa, size, offset| client.dma_map(gpa, size, true, Some((file.as_fd(), offset))).unwrap_err().errno();
    assert_eq!(refused(0, 0, 0), EINVAL);
    assert_eq!(refused(0x800, 0x1000, 0), EINVAL);
    assert_eq!(refused(0, 0x1001, 0), EINVAL);
    assert_eq!(refused(0, 0x1000, 0x10), EINVAL);
    assert_eq!(refused(u64::MAX - 0xfff, 0x2000, 0), EINVAL);
    assert_eq!(refused(0, MIB + 0x1000, 0), EINVAL, "the file is too short");
    assert_eq!(refused(0, MIB, 0x1000), EINVAL, "the file is too short");
    assert_eq!(refused(0, 0x1000, u64::MAX - 0xfff), EINVAL);
    assert_eq!(refused(2 * MIB, MIB, 0), EEXIST);
    assert_eq!(refused(MIB + 0x1000, MIB, 0), EEXIST);
    assert_eq!(refused(3 * MIB - 0x1000, 0x1000, 0), EEXIST);
    for flags in [0, 4, 0xffff_ffff] {
        let body = DmaMap { argsz: 32, flags, offset: 0, address: 0, size: 0x1000 };
        let error = client.request(Command::DMA_MAP, body.as_bytes(), &[file.as_fd()]).unwrap_err();
        assert_eq!(error.errno(), EINVAL);
    }
    let body = DmaMap { argsz: 32, flags: 3, offset: 0, address: 0, size: 0x1000 };
    let two = client.request(Command::DMA_MAP, body.as_bytes(), &[file.as_fd(), file.as_fd()]).unwrap_err();
    assert_eq!(two.errno(), EINVAL);
    assert!(host.quiet(), "the device received none of these calls");
    assert_eq!(host.link.memory().snapshot().regions().len(), 1);
}

#[test]
fn descriptor_that_is_no_memory_file_is_refused() {
    let host = Host::start();
    let mut client = host.client();
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    assert_eq!(client.dma_map(0, 0x1000, true, Some((pipe.as_fd(), 0))).unwrap_err().errno(), EINVAL);
    let null = std::fs::File::open("/dev/zero").unwrap();
    assert_eq!(client.dma_map(0, 0x1000, true, Some((null.as_fd(), 0))).unwrap_err().errno(), EINVAL);
    let proc = std::fs::File::open("/proc/self/status").unwrap();
    assert_eq!(client.dma_map(0, 0x1000, false, Some((proc.as_fd(), 0))).unwrap_err().errno(), EINVAL);
}

#[test]
fn limits_on_regions_and_bytes_hold() {
    let memory = MemoryLimits { regions: 3, files: 3, mapped_bytes: 2 * MIB, any_file_system: false };
    let host = Host::start_with(ServerOptions { memory, ..Default::default() }, |_| ());
    let mut client = host.client();
    lend(&mut client, 0, MIB);
    let file = memory_file(2 * MIB, true).unwrap();
    let error = client.dma_map(8 * MIB, 2 * MIB, true, Some((file.as_fd(), 0))).unwrap_err();
    assert_eq!(error.errno(), ENOSPC);
    lend(&mut client, MIB, MIB);
    client.dma_map(2 * MIB, MIB, true, None).expect("memory without a file uses no address space");
    assert_eq!(client.dma_map(4 * MIB, MIB, true, None).unwrap_err().errno(), ENOSPC);
    assert!(client.capabilities().contains("\"max_dma_maps\":3"), "{}", client.capabilities());
}

#[test]
fn map_that_the_device_refuses_is_taken_out_again() {
    let host = Host::start_with(ServerOptions::default(), |device| device.refused_map = Some(MIB));
    let mut client = host.client();
    let file = memory_file(MIB, true).unwrap();
    assert_eq!(client.dma_map(MIB, MIB, true, Some((file.as_fd(), 0))).unwrap_err().errno(), EINVAL);
    assert!(host.link.memory().snapshot().regions().is_empty());
}

#[test]
fn truncated_memory_reads_zeros_and_ends_only_its_client() {
    let other = Host::start();
    let mut other_client = other.client();
    let host = Host::start();
    let mut client = host.client();
    let file = memory_file(MIB, false).unwrap();
    rustix::io::pwrite(&file, &[0xaa; 0x2000], 0).unwrap();
    client.dma_map(0, MIB, true, Some((file.as_fd(), 0))).unwrap();
    let snapshot = host.link.memory().snapshot();
    rustix::fs::ftruncate(&file, 0x1000).unwrap();

    let mut data = [1; 4];
    snapshot.read(0x1000, &mut data).unwrap();
    assert_eq!(data, [0; 4], "this access would have killed the process");
    assert!(snapshot.regions()[0].is_withdrawn());
    assert_eq!(snapshot.read(0, &mut data), Err(MemoryError::Withdrawn { gpa: 0 }));

    host.wait_for(&Event::Unmap { gpa: 0, size: MIB });
    host.wait_for(&Event::Disconnected);
    assert_eq!(host.link.counters().withdrawn.load(Relaxed), 1);
    assert_eq!(other_client.read32(0, 0).unwrap(), 0, "the other client is served");
    host.client().read32(0, 0).expect("the next client is served");
}

#[test]
fn memory_that_is_cut_short_can_be_written_to_as_well() {
    let host = Host::start();
    let mut client = host.client();
    let file = memory_file(MIB, false).unwrap();
    client.dma_map(0, MIB, true, Some((file.as_fd(), 0))).unwrap();
    let snapshot = host.link.memory().snapshot();
    rustix::fs::ftruncate(&file, 0).unwrap();
    snapshot.write(0x8000, &[1; 64]).unwrap();
    host.wait_for(&Event::Disconnected);
}

/// Client memory that consists of `bytes`, starting at address 0.
struct Memory {
    bytes: Vec<u8>,
    errno: u32,
    longest: usize,
}

impl DmaTarget for Memory {
    fn read(&mut self, gpa: u64, data: &mut [u8]) -> Result<(), u32> {
        self.longest = self.longest.max(data.len());
        let place = self.bytes.get(gpa as usize..gpa as usize + data.len()).ok_or(14u32)?;
        data.copy_from_slice(place);
        if self.errno != 0 { Err(self.errno) } else { Ok(()) }
    }

    fn write(&mut self, gpa: u64, data: &[u8]) -> Result<(), u32> {
        self.longest = self.longest.max(data.len());
        self.bytes.get_mut(gpa as usize..gpa as usize + data.len()).ok_or(14u32)?.copy_from_slice(data);
        Ok(())
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8).collect()
}

#[test]
fn memory_without_a_file_is_read_by_messages_in_pieces() {
    let host = Host::start();
    let mut client = host.client();
    client.dma_map(0, MIB, true, None).unwrap();
    host.expect(Event::Map { gpa: 0, size: MIB, readable: true, writable: true, mapped: false });
    assert_eq!(host.link.memory().read(0, &mut [0]), Err(MemoryError::NoFile { gpa: 0 }));
    let mut memory = Memory { bytes: pattern(MIB as usize), errno: 0, longest: 0 };
    let pending = host.link.dma().read(0x100, 200_000).unwrap();
    for _ in 0..200_000usize.div_ceil(65536) {
        client.serve_dma(&mut memory).unwrap();
    }
    assert_eq!(pending.wait(EVENT_TIMEOUT).unwrap(), memory.bytes[0x100..][..200_000]);
    assert_eq!(memory.longest, 65536);
    assert_eq!(client.read32(0, 0).unwrap(), 0, "requests of the client continue");
}

#[test]
fn memory_without_a_file_is_written_by_messages() {
    let host = Host::start();
    let mut client = host.client();
    let mut memory = Memory { bytes: vec![0; MIB as usize], errno: 0, longest: 0 };
    let data = pattern(100_000);
    let pending = host.link.dma().write(0x777, data.clone()).unwrap();
    client.serve_dma(&mut memory).unwrap();
    client.serve_dma(&mut memory).unwrap();
    pending.wait(EVENT_TIMEOUT).unwrap();
    assert_eq!(memory.bytes[0x777..][..data.len()], data);
}

#[test]
fn error_of_the_client_surfaces() {
    let host = Host::start();
    let mut client = host.client();
    let pending = host.link.dma().read(0, 64).unwrap();
    client.serve_dma(&mut Memory { bytes: vec![0; 64], errno: 19, longest: 0 }).unwrap();
    assert_eq!(pending.wait(EVENT_TIMEOUT), Err(DmaError::Refused { gpa: 0, errno: 19 }));
}

#[test]
fn requests_are_bounded_and_fail_when_the_client_goes() {
    let host = Host::start();
    let client = host.client();
    let dma = host.link.dma();
    assert_eq!(dma.read(0, 0).unwrap_err(), DmaError::Length(0));
    assert_eq!(dma.read(0, usize::MAX).unwrap_err(), DmaError::Length(usize::MAX));
    let pending: Vec<_> = std::iter::from_fn(|| dma.read(0, 4096).ok()).take(1000).collect();
    assert_eq!(pending.len(), vmm_glue::dma::MAX_REQUESTS);
    assert_eq!(dma.read(0, 1).unwrap_err(), DmaError::Busy);
    drop(client);
    for request in pending {
        assert_eq!(request.wait(EVENT_TIMEOUT), Err(DmaError::NotConnected));
    }
    host.wait_for(&Event::Disconnected);
    assert_eq!(dma.read(0, 1).unwrap_err(), DmaError::NotConnected);
}

#[test]
fn request_without_an_answer_times_out() {
    let host = Host::start();
    let _client = host.client();
    let pending = host.link.dma().read(0, 1).unwrap();
    assert_eq!(pending.wait(Duration::from_millis(1)), Err(DmaError::TimedOut));
}

#[test]
fn client_that_takes_no_requests_gets_none() {
    let host = Host::start();
    let _client = host.client_as(CLOUD_HYPERVISOR_CAPABILITIES);
    assert_eq!(host.link.dma().read(0, 1).unwrap_err(), DmaError::Unsupported);
}

#[test]
fn private_memory_is_detected_by_asking_the_client() {
    let host = Host::start();
    let mut client = host.client();
    lend(&mut client, 0, MIB);
    let memory = Memory { bytes: pattern(MIB as usize), errno: 0, longest: 0 };
    // The file stays empty but the client's own memory does not, as with `share=off`.
    check_shared(&mut client, memory, 2);
    host.wait_for(&Event::NotShared(0));
    assert_eq!(host.link.memory().read(0, &mut [0]), Err(MemoryError::NotShared { gpa: 0 }));
    assert_eq!(host.link.counters().not_shared.load(Relaxed), 1);
    assert_eq!(client.read32(0, 0).unwrap(), 0, "the connection continues");
}

#[test]
fn shared_memory_is_recognized_and_not_looked_at_again() {
    let host = Host::start();
    let mut client = host.client();
    let file = lend(&mut client, 0, MIB);
    let bytes = pattern(MIB as usize);
    rustix::io::pwrite(&file, &bytes, 0).unwrap();
    check_shared(&mut client, Memory { bytes, errno: 0, longest: 0 }, 1);
    client.write32(0, CHECK_SHARED, 1).unwrap();
    assert_eq!(client.read32(0, 0).unwrap(), 0);
    host.link.memory().read(0, &mut [0]).unwrap();
    drop(client);
    while host.next() != Event::Disconnected {}
    assert_eq!(host.link.counters().dma_requests.load(Relaxed), 1);
    assert_eq!(host.link.counters().not_shared.load(Relaxed), 0);
}

#[test]
fn empty_memory_and_bus_mastering_off_prove_nothing() {
    let host = Host::start();
    let mut client = host.client();
    lend(&mut client, 0, MIB);
    check_shared(&mut client, Memory { bytes: vec![0; MIB as usize], errno: 19, longest: 0 }, 1);
    assert_eq!(client.read32(0, 0).unwrap(), 0);
    host.link.memory().read(0, &mut [0]).unwrap();
    assert_eq!(host.link.counters().not_shared.load(Relaxed), 0);
}

#[test]
fn client_that_takes_no_requests_is_judged_by_its_file() {
    let host = Host::start();
    let mut client = host.client_as(CLOUD_HYPERVISOR_CAPABILITIES);
    let used = lend(&mut client, 0, MIB);
    rustix::io::pwrite(&used, b"x", 0).unwrap();
    lend(&mut client, 4 * MIB, MIB);
    client.write32(0, CHECK_SHARED, 1).unwrap();
    host.wait_for(&Event::NotShared(4 * MIB));
    host.link.memory().read(0, &mut [0]).unwrap();
}

/// Makes the server check memory sharing, and replies to its requests.
fn check_shared(client: &mut Client, mut memory: Memory, requests: usize) {
    client.write32(0, CHECK_SHARED, 1).unwrap();
    for _ in 0..requests {
        client.serve_dma(&mut memory).unwrap();
    }
}

#[test]
fn memory_that_the_client_never_touched_is_counted_and_bounded() {
    let host = Host::start();
    let mut client = host.client();
    let file = memory_file(MIB, true).unwrap();
    rustix::io::pwrite(&file, &[0xaa; 0x1000], 0x2000).unwrap();
    client.dma_map(0, MIB, true, Some((file.as_fd(), 0))).unwrap();
    let memory = host.link.memory();
    let touches = memory.first_touches();
    let mut data = [1; 4];
    memory.read(0x2000, &mut data).unwrap();
    assert_eq!((data, touches.bytes()), ([0xaa; 4], 0), "the client's own page");
    memory.read(0x3000, &mut data).unwrap();
    memory.write(0x5ffe, &data).unwrap();
    memory.write(0x5000, &data).unwrap();
    assert_eq!(touches.bytes(), 0x3000, "one page was read, two were written");

    touches.set_limit(0x4000);
    memory.write(0x8000, &data).unwrap();
    assert_eq!(memory.write(0x9000, &data), Err(MemoryError::Untouched { gpa: 0x9000 }));
    assert_eq!(memory.read(0xa000, &mut data), Err(MemoryError::Untouched { gpa: 0xa000 }));
    memory.write(0x5000, &data).expect("touched data is present");
    rustix::io::pwrite(&file, &[1], 0x9000).unwrap();
    memory.write(0x9000, &data).expect("the client has touched the page");
    let blocks = rustix::fs::fstat(&file).unwrap().st_blocks;
    assert_eq!(blocks * 512, 0x1000 + 0x4000 + 0x1000, "the file has the counted pages, and the client's two");
    assert_eq!((touches.bytes(), touches.refused()), (0x4000, 2));

    // The next client has different memory.
    drop(client);
    host.wait_for(&Event::Disconnected);
    assert_eq!(touches.bytes(), 0);
}
