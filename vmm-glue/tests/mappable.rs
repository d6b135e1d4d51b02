//! Tests mappable regions: their descriptions, descriptors and contents.

mod support;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};
use support::*;
use vmm_glue::client::{CLOUD_HYPERVISOR_CAPABILITIES, Client, ClientError};
use vmm_glue::mappable::{MAX_AREAS, region_memory};
use vmm_glue::memory::MemoryError;
use vmm_glue::protocol::{Command, FLAG_NO_REPLY};
use vmm_glue::{MmapArea, RegionIndex, RegionInfo, ServerOptions};

const BAR1: u32 = 1;
const REGION_BYTES: u64 = 0x8000;
/// Size of the body of a reply that describes a region with two areas, in bytes.
const FULL: u32 = 32 + 16 + 2 * 16;

/// Creates a server whose BAR1 has mappable `areas` (offset, size). Also returns the device's own descriptor of the
/// file.
fn host_with(areas: &[(u64, u64)]) -> (Host, Arc<OwnedFd>) {
    let file = Arc::new(region_memory("bar1", REGION_BYTES).unwrap());
    let areas = areas.iter().map(|&(offset, size)| MmapArea { offset, size }).collect();
    let bar1 = RegionInfo::read_write(REGION_BYTES).with_mappable(file.clone(), areas).unwrap();
    (Host::start_with(ServerOptions::default(), |device| device.bar1 = bar1), file)
}

/// Creates a server whose BAR1 is mappable at 0x1000 and 0x4000.
fn host() -> (Host, Arc<OwnedFd>) {
    host_with(&[(0x1000, 0x2000), (0x4000, 0x1000)])
}

/// Returns a request in the specification's layout, with only the required fields.
fn request(argsz: u32, index: u32) -> Vec<u8> {
    let mut body = vec![0; 32];
    body[0..4].copy_from_slice(&argsz.to_ne_bytes());
    body[8..12].copy_from_slice(&index.to_ne_bytes());
    body
}

/// Sends the request. Returns the reply (its body as dwords, parsed by hand) and its descriptors.
fn ask(client: &mut Client, argsz: u32, index: u32) -> (Vec<u32>, Vec<OwnedFd>) {
    let reply = client.request(Command::DEVICE_GET_REGION_INFO, &request(argsz, index), &[]).unwrap();
    assert_eq!(reply.header.size as usize, 16 + reply.body.len());
    let (words, rest) = reply.body.as_chunks::<4>();
    assert!(rest.is_empty());
    (words.iter().map(|word| u32::from_ne_bytes(*word)).collect(), reply.fds)
}

#[test]
fn reply_is_laid_out_as_specified() {
    let (host, _) = host();
    let (words, fds) = ask(&mut host.client(), FULL, BAR1);
    assert_eq!(words[..4], [FULL, 0b1111, BAR1, 32], "argsz, flags (read, write, mmap, caps), index, offset of caps");
    assert_eq!(words[4..8], [REGION_BYTES as u32, 0, 0, 0], "size, offset in the file");
    assert_eq!(words[8..10], [0x0001_0001, 0], "capability 1 (sparse mmap), version 1, no next capability");
    assert_eq!(words[10..12], [2, 0], "areas, reserved");
    assert_eq!(words[12..], [0x1000, 0, 0x2000, 0, 0x4000, 0, 0x1000, 0], "offset and size of each area");
    assert_eq!(fds.len(), 1);
}

#[test]
fn one_area_that_is_the_whole_region_is_listed_too() {
    let (host, _) = host_with(&[(0, REGION_BYTES)]);
    let (words, fds) = ask(&mut host.client(), 64, BAR1);
    assert_eq!(words[..4], [64, 0b1111, BAR1, 32]);
    assert_eq!(words[8..], [0x0001_0001, 0, 1, 0, 0, 0, REGION_BYTES as u32, 0]);
    assert_eq!(fds.len(), 1);
}

#[test]
fn most_areas_fit_into_one_reply() {
    let file = Arc::new(region_memory("bar1", 1 << 20).unwrap());
    let areas: Vec<_> = (0..MAX_AREAS as u64).map(|at| MmapArea { offset: at * 0x2000, size: 0x1000 }).collect();
    let bar1 = RegionInfo::read_write(1 << 20).with_mappable(file, areas.clone()).unwrap();
    let host = Host::start_with(ServerOptions::default(), |device| device.bar1 = bar1);
    let region = host.client().region(BAR1).unwrap();
    let got: Vec<_> = region.areas.iter().map(|area| MmapArea { offset: area.offset, size: area.size }).collect();
    assert_eq!(got, areas);
}

#[test]
fn small_argsz_returns_needed_size_without_descriptor() {
    let (host, _) = host();
    let mut client = host.client();
    for argsz in [32, 33, 48, FULL - 1] {
        let (words, fds) = ask(&mut client, argsz, BAR1);
        // The flags and the capability offset equal those of the full reply, because clients check them immediately.
        assert_eq!(words, [FULL, 0b1111, BAR1, 32, REGION_BYTES as u32, 0, 0, 0], "buffer of {argsz} bytes");
        assert!(fds.is_empty(), "buffer of {argsz} bytes");
    }
    for argsz in [FULL, FULL + 1, u32::MAX] {
        let (words, fds) = ask(&mut client, argsz, BAR1);
        assert_eq!((words[0], words.len(), fds.len()), (FULL, FULL as usize / 4, 1), "buffer of {argsz} bytes");
    }
}

#[test]
fn request_without_room_for_a_description_is_refused() {
    let (host, _) = host();
    let mut client = host.client();
    for argsz in [0, 1, 31] {
        assert_eq!(client.region_info(BAR1, argsz).unwrap_err().errno(), EINVAL, "buffer of {argsz} bytes");
        assert_eq!(client.region_info(0, argsz).unwrap_err().errno(), EINVAL, "buffer of {argsz} bytes");
    }
    assert_eq!(client.region(BAR1).unwrap().areas.len(), 2, "the connection continues");
}

#[test]
fn unknown_regions_and_short_requests_are_rejected() {
    let (host, _) = host();
    let mut client = host.client();
    for index in [9, 0x100, 0x101, 0x8000_0001, u32::MAX] {
        let id = client.send(Command::DEVICE_GET_REGION_INFO, 0, &request(FULL, index), &[]).unwrap();
        let reply = client.receive_message().unwrap();
        assert_eq!((reply.header.id, Some(reply.header.error)), (id, EINVAL), "region {index}");
        assert!(reply.body.is_empty() && reply.fds.is_empty(), "region {index}");
    }
    for len in [0, 4, 12, 31] {
        let error = client.request(Command::DEVICE_GET_REGION_INFO, &request(FULL, BAR1)[..len], &[]).unwrap_err();
        assert_eq!(error.errno(), EINVAL, "{len} bytes");
    }
    assert_eq!(client.region(BAR1).unwrap().areas.len(), 2, "the connection continues");
}

#[test]
fn unmappable_regions_have_no_descriptor_or_capabilities() {
    let (host, _) = host();
    let mut client = host.client();
    for index in (0..9).filter(|&index| index != BAR1) {
        let (words, fds) = ask(&mut client, 4096, index);
        assert_eq!((words[0], words[1] & !3, words[3], words.len()), (32, 0, 0, 8), "region {index}");
        assert!(fds.is_empty(), "region {index}");
        assert!(matches!(client.map_region(index), Err(ClientError::Protocol(_))), "region {index}");
    }
}

#[test]
fn request_that_wants_no_reply_brings_no_descriptor_to_the_next() {
    let (host, _) = host();
    let mut client = host.client();
    client.send(Command::DEVICE_GET_REGION_INFO, FLAG_NO_REPLY, &request(FULL, BAR1), &[]).unwrap();
    let (words, fds) = ask(&mut client, 32, 0);
    assert_eq!((words[2], fds.len()), (0, 0));
}

#[test]
fn client_that_takes_no_descriptors_is_offered_none() {
    let (host, _) = host();
    let mut client = host.client_as("{\"capabilities\":{\"max_msg_fds\":0}}");
    let (words, fds) = ask(&mut client, 4096, BAR1);
    assert_eq!(words, [32, 3, BAR1, 0, REGION_BYTES as u32, 0, 0, 0]);
    assert!(fds.is_empty());
}

#[test]
fn clients_that_know_less_can_map_as_well() {
    let (host, _) = host();
    let region = host.client_as(CLOUD_HYPERVISOR_CAPABILITIES).region(BAR1).unwrap();
    assert_eq!((region.areas.len(), region.file.is_some()), (2, true));
}

#[test]
fn client_and_device_see_each_others_writes() {
    let (host, file) = host();
    let mut client = host.client();
    let region = client.map_region(BAR1).unwrap();
    let mut data = [0; 6];

    rustix::io::pwrite(&*file, b"device", 0x1ffd).unwrap();
    region.read(0x1ffd, &mut data).unwrap();
    assert_eq!(&data, b"device", "across a page, at the offset in the region");
    region.write(0x4ff8, b"client").unwrap();
    rustix::io::pread(&*file, &mut data, 0x4ff8).unwrap();
    assert_eq!(&data, b"client");

    assert!(host.quiet(), "the device received no message");
    assert_eq!(host.link.counters().region_reads.load(std::sync::atomic::Ordering::Relaxed), 0);
}

#[test]
fn nothing_is_mapped_between_the_areas() {
    let (host, _) = host();
    let region = host.client().map_region(BAR1).unwrap();
    for gpa in [0, 0xfff, 0x3000, 0x3fff, 0x5000, REGION_BYTES - 1, REGION_BYTES] {
        assert_eq!(region.read(gpa, &mut [0]), Err(MemoryError::NotMapped { gpa }));
    }
    assert_eq!(region.write(0x2fff, &[1, 2]), Err(MemoryError::NotMapped { gpa: 0x3000 }));
}

#[test]
fn accesses_by_messages_still_go_to_the_device() {
    let (host, file) = host();
    let mut client = host.client();
    let region = client.map_region(BAR1).unwrap();
    region.write(0x1000, &[0xaa; 4]).unwrap();
    client.write32(BAR1, 0x1000, 0x1234_5678).unwrap();
    host.expect(Event::Write(RegionIndex::Bar1, 0x1000, vec![0x78, 0x56, 0x34, 0x12]));
    assert_eq!(client.read32(BAR1, 0x1000).unwrap(), 0, "the device's data, not the file's");
    host.expect(Event::Read(RegionIndex::Bar1, 0x1000, 4));
    client.write32(BAR1, 0x3000, 1).unwrap();
    host.expect(Event::Write(RegionIndex::Bar1, 0x3000, vec![1, 0, 0, 0]));
    let mut data = [0; 4];
    rustix::io::pread(&*file, &mut data, 0x1000).unwrap();
    assert_eq!(data, [0xaa; 4], "the server wrote nothing to the file itself");
}

#[test]
fn client_cannot_cut_or_seal_the_file_under_the_device() {
    let (host, file) = host();
    let region = host.client().region(BAR1).unwrap();
    let theirs = region.file.unwrap();
    assert_eq!(rustix::fs::ftruncate(&theirs, 0), Err(rustix::io::Errno::PERM));
    assert_eq!(rustix::fs::ftruncate(&theirs, 1 << 30), Err(rustix::io::Errno::PERM));
    assert!(rustix::fs::fcntl_add_seals(&theirs, SealFlags::WRITE).is_err());
    assert_eq!(rustix::fs::fstat(&*file).unwrap().st_size, REGION_BYTES as i64);
}

#[test]
fn read_only_region_is_mapped_read_only() {
    let file = rustix::fs::memfd_create("bar1", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, REGION_BYTES).unwrap();
    rustix::io::pwrite(&file, b"table", 0x1000).unwrap();
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals).unwrap();
    let areas = vec![MmapArea { offset: 0x1000, size: 0x1000 }];
    let bar1 = RegionInfo::read_only(REGION_BYTES).with_mappable(Arc::new(file), areas).unwrap();
    let host = Host::start_with(ServerOptions::default(), |device| device.bar1 = bar1);
    let mut client = host.client();
    let (words, fds) = ask(&mut client, 4096, BAR1);
    assert_eq!(words[1], 0b1101);
    assert_eq!(rustix::io::pwrite(&fds[0], b"x", 0x1000), Err(rustix::io::Errno::PERM));
    let region = client.map_region(BAR1).unwrap();
    let mut data = [0; 5];
    region.read(0x1000, &mut data).unwrap();
    assert_eq!(&data, b"table");
    assert_eq!(region.write(0x1000, b"x"), Err(MemoryError::NotWritable { gpa: 0x1000 }));
}

#[test]
fn mapping_outlives_the_connection() {
    let (host, file) = host();
    let mut client = host.client();
    let region = client.map_region(BAR1).unwrap();
    drop(client);
    host.wait_for(&Event::Disconnected);
    rustix::io::pwrite(&*file, b"later", 0x1000).unwrap();
    let mut data = [0; 5];
    region.read(0x1000, &mut data).unwrap();
    assert_eq!(&data, b"later", "this is why the next client needs another file");
}
