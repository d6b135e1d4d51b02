//! Tests of the MMU. They write tables with explicit bits instead of `nvspec`'s formats, so that the tests and the
//! formats check each other.

mod faults;
mod model;
mod tlb;

use super::fixture::{PTE_VALID, Tables};
use super::{Access, AddressSpace, CopyFault, MmuFault};
use crate::memory::{BusAddr, Memory, VRAM_MIN, Vram};
use nvspec::addr::{GpuVa, Target, VramAddr};

#[test]
fn instance_block_gives_directory_and_limit() {
    let memory = Memory::new(Vram::new(VRAM_MIN).expect("vram"));
    let instance = BusAddr::Vram(VramAddr(0x3000));
    for (offset, value) in [(0x200, 0x1234_5002), (0x204, 0x9a), (0x208, 0xffff_ffff), (0x20c, 0x7f)] {
        memory.write32(instance.offset(offset), value).expect("write");
    }
    let space = AddressSpace::from_instance(&memory, (Target::Vram, 0x3000)).expect("space");
    assert_eq!(space.directory, BusAddr::System(nvspec::addr::Iova(0x9a_1234_5000)));
    assert_eq!(space.limit, GpuVa(0x7f_ffff_ffff));
    memory.write32(instance.offset(0x200), 0x0001_0004).expect("write");
    let space = AddressSpace::from_instance(&memory, (Target::Vram, 0x3000)).expect("space");
    assert_eq!(space.directory, BusAddr::Vram(VramAddr(0x9a_0001_0000)));
}

#[test]
fn bytes_go_through_pages_that_are_scattered() {
    let mut tables = Tables::new();
    let frames = [0x80_0000u64, 0x71_3000, 0x60_2000];
    for (index, frame) in frames.iter().enumerate() {
        tables.small(0x10_0000 + 0x1000 * index as u64, PTE_VALID | frame >> 8);
    }
    let data: Vec<u8> = (0..0x2800u32).map(|i| (i % 251) as u8).collect();
    tables.session().write(GpuVa(0x10_0400), &data).expect("write");
    let mut back = vec![0; data.len()];
    tables.session().read(GpuVa(0x10_0400), &mut back).expect("read");
    assert_eq!(back, data);
    let mut page = [0; 0x1000];
    tables.memory.read(BusAddr::Vram(VramAddr(frames[1])), &mut page).expect("second frame");
    assert_eq!(page[..], data[0xc00..0x1c00]);
}

#[test]
fn words_across_a_page_border_are_put_together() {
    let mut tables = Tables::new();
    tables.small(0x1000, PTE_VALID | 0x80_0000 >> 8);
    tables.small(0x2000, PTE_VALID | 0x70_0000 >> 8);
    let mut session = tables.session();
    session.write32(GpuVa(0x1ffe), 0x4433_2211).expect("write");
    assert_eq!(session.read32(GpuVa(0x1ffe)), Ok(0x4433_2211));
    assert_eq!(session.read32(GpuVa(0x2000)), Ok(0x4433));
    drop(session);
    assert_eq!(tables.memory.read32(BusAddr::Vram(VramAddr(0x80_0ffc))), Ok(0x2211_0000));
}

#[test]
fn unanswered_bus_access_reads_ones_and_is_counted() {
    let mut tables = Tables::new();
    tables.small(0x1000, PTE_VALID | (0x7_0000_0000u64 >> 8));
    tables.small(0x2000, PTE_VALID | 2 << 33 | 0x5000 >> 8);
    let mut session = tables.session();
    assert_eq!(session.read32(GpuVa(0x1000)), Ok(u32::MAX));
    assert_eq!(session.write32(GpuVa(0x2000), 5), Ok(()));
    let mut bytes = [0; 3];
    session.read(GpuVa(0x2001), &mut bytes).expect("no fault");
    assert_eq!(bytes, [0xff; 3]);
    session.copy(GpuVa(0x1000), GpuVa(0x2000), 0x1000).expect("no fault");
    drop(session);
    assert_eq!(tables.memory.lost(), 4);
}

#[test]
fn copy_of_contiguous_pages_stops_at_unmapped_page() {
    let mut tables = Tables::new();
    let (from, to) = (0x100_0000u64, 0x200_0000u64);
    for page in 0..200u64 {
        tables.small(from + page * 0x1000, PTE_VALID | (0x40_0000 + page * 0x1000) >> 8);
        // One destination page maps a different frame, and one is missing.
        let frame = if page == 70 { 0x60_0000 } else { 0x80_0000 + page * 0x1000 };
        tables.small(to + page * 0x1000, if page == 150 { 0 } else { PTE_VALID | frame >> 8 });
    }
    let data: Vec<u8> = (0..200 * 0x1000u32).map(|i| (i / 3 + i / 4096) as u8).collect();
    tables.session().write(GpuVa(from), &data).expect("mapped");
    let result = tables.session().copy(GpuVa(from + 8), GpuVa(to + 4), 190 * 0x1000);
    let fault = MmuFault { reason: 2, va: GpuVa(to + 150 * 0x1000), write: true };
    assert_eq!(result, Err(CopyFault { copied: 150 * 0x1000 - 4, fault }));
    let copied = tables.bytes(to, 150 * 0x1000);
    assert!(copied[4..] == data[8..][..150 * 0x1000 - 4]);
    assert_eq!(copied[..4], [0; 4]);
    assert_eq!(tables.bytes(to + 151 * 0x1000, 0x1000), [0; 0x1000], "nothing written beyond the fault");
    tables.session().copy(GpuVa(from), GpuVa(to), 150 * 0x1000).expect("up to the hole");
    assert!(tables.bytes(to, 150 * 0x1000) == data[..150 * 0x1000]);
}

#[test]
fn address_space_is_translated_at_the_size_of_the_page() {
    let mut tables = Tables::new();
    tables.small(0x7fff_f000, PTE_VALID | 0x12_3000 >> 8 | 0xfe << 36);
    tables.large(0x8802_0000, PTE_VALID | 0x40_0000 >> 8);
    let small = tables.translate(0x7fff_f123, false).expect("small");
    assert_eq!((small.address, small.bytes), (BusAddr::Vram(VramAddr(0x12_3123)), 0x1000 - 0x123));
    assert_eq!(small.kind, 0xfe);
    let large = tables.translate(0x8803_2345, true).expect("large");
    assert_eq!((large.address, large.bytes), (BusAddr::Vram(VramAddr(0x41_2345)), 0x2_0000 - 0x1_2345));
    assert_eq!(Access::USER.client, super::Client::Hub);
}
