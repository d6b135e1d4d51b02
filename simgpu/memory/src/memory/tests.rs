use super::{BusAddr, BusError, Memory, Sysmem, VRAM_MAX, VRAM_MIN, Vram, VramError};
use card::{DmaError, DmaMemory};
use nvspec::addr::{Iova, VramAddr};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vm_memory::MmapRegion;

const PAGE: u64 = 4096;

fn host(pages: usize, writable: bool) -> DmaMemory {
    let region: Arc<MmapRegion> = Arc::new(MmapRegion::new(pages * 4096).expect("map"));
    DmaMemory::new(region, 0, pages * 4096, writable).expect("in the region")
}

fn memory() -> Memory {
    Memory::new(Vram::new(VRAM_MIN).expect("vram"))
}

fn vram(address: u64) -> BusAddr {
    BusAddr::Vram(VramAddr(address))
}

fn system(address: u64) -> BusAddr {
    BusAddr::System(Iova(address))
}

#[test]
fn vram_sizes_out_of_range_or_not_in_mib_are_refused() {
    for size in [0, VRAM_MIN - (1 << 20), VRAM_MIN + 4096, VRAM_MAX + (1 << 20), u64::MAX] {
        assert!(matches!(Vram::new(size), Err(VramError::Size { size: s }) if s == size), "{size:#x}");
    }
    assert_eq!(Vram::new(VRAM_MIN).expect("smallest").size(), VRAM_MIN);
}

#[test]
fn vram_that_is_not_touched_costs_nothing() {
    fn resident() -> u64 {
        let statm = std::fs::read_to_string("/proc/self/statm").expect("statm");
        statm.split(' ').nth(1).expect("resident").parse::<u64>().expect("a number") * PAGE
    }
    let before = resident();
    let vram = Vram::new(VRAM_MAX).expect("vram");
    vram.write32(VramAddr(VRAM_MAX - 4), 0x1234_5678).expect("last word");
    vram.write32(VramAddr(VRAM_MAX / 2), 1).expect("middle");
    assert_eq!(vram.read32(VramAddr(VRAM_MAX - 4)), Ok(0x1234_5678));
    assert_eq!(vram.read32(VramAddr(VRAM_MAX - 8)), Ok(0));
    // A scrubber overwrites memory that is already zero.
    let zeros = vec![0; 1 << 20];
    for at in (0..VRAM_MAX / 8).step_by(zeros.len()) {
        vram.write(VramAddr(at), &zeros).expect("zeros");
    }
    assert!(resident().saturating_sub(before) < VRAM_MAX / 16, "{} bytes became resident", resident() - before);
    // Zeros that overwrite other data are stored.
    vram.write(VramAddr(VRAM_MAX / 2), &zeros).expect("zeros");
    assert_eq!(vram.read32(VramAddr(VRAM_MAX / 2)), Ok(0));
}

#[test]
fn vram_ends_where_it_ends() {
    let memory = memory();
    assert_eq!(memory.write32(vram(VRAM_MIN - 4), 7), Ok(()));
    assert_eq!(memory.read32(vram(VRAM_MIN - 4)), Ok(7));
    for (address, len) in [(VRAM_MIN - 3, 4), (VRAM_MIN, 4), (u64::MAX - 1, 4), (u64::MAX, 4)] {
        let error = BusError::BeyondVram { address: VramAddr(address), len, size: VRAM_MIN };
        assert_eq!(memory.read32(vram(address)), Err(error));
        assert_eq!(memory.write32(vram(address), 1), Err(error));
    }
    assert!(memory.read(vram(0), &mut vec![0; VRAM_MIN as usize + 1]).is_err());
    assert!(memory.copy(vram(VRAM_MIN - 8), vram(0), 16).is_err());
}

#[test]
fn words_have_the_byte_order_of_the_card_aligned_or_not() {
    let memory = memory();
    memory.write(vram(0x100), &[1, 2, 3, 4, 5, 6, 7, 8, 9]).expect("write");
    assert_eq!(memory.read32(vram(0x100)), Ok(0x0403_0201));
    assert_eq!(memory.read32(vram(0x101)), Ok(0x0504_0302));
    assert_eq!(memory.read64(vram(0x100)), Ok(0x0807_0605_0403_0201));
    assert_eq!(memory.read64(vram(0x101)), Ok(0x0908_0706_0504_0302));
    memory.write32(vram(0x203), 0xa0b0_c0d0).expect("unaligned");
    assert_eq!(memory.read32(vram(0x200)), Ok(0xd000_0000));
    assert_eq!(memory.read32(vram(0x204)), Ok(0x00a0_b0c0));
}

#[test]
fn host_memory_maps_whole_pages_below_40_bits_without_overlap() {
    let table = Sysmem::new();
    let page = host(1, true);
    let half: DmaMemory = {
        let region: Arc<MmapRegion> = Arc::new(MmapRegion::new(4096).expect("map"));
        DmaMemory::new(region, 0, 2048, true).expect("half a page")
    };
    assert!(matches!(table.map(Iova(0x1800), page.clone()), Err(DmaError::Unaligned { iova: 0x1800, len: 0x1000 })));
    assert!(matches!(table.map(Iova(0x1000), half), Err(DmaError::Unaligned { .. })));
    assert!(matches!(
        table.map(Iova((1 << 40) - PAGE), host(2, true)),
        Err(DmaError::OutOfReach { iova: 0xff_ffff_f000, len: 0x2000, bits: 40 })
    ));
    assert!(matches!(table.map(Iova(!0xfff), page.clone()), Err(DmaError::OutOfReach { .. })));
    table.map(Iova((1 << 40) - PAGE), page.clone()).expect("the last page");
    table.map(Iova(0x4000), host(4, true)).expect("four pages");
    for (iova, pages) in [(0x4000, 1), (0x7000, 1), (0x2000, 3), (0x2000, 8), (0x7000, 4)] {
        let refused = table.map(Iova(iova), host(pages, true));
        assert!(matches!(refused, Err(DmaError::Overlap { existing: 0x4000, .. })), "{iova:#x} {refused:?}");
    }
    table.map(Iova(0x3000), page.clone()).expect("before");
    table.map(Iova(0x8000), page).expect("behind");
    assert_eq!(table.len(), 4);
}

#[test]
fn only_a_whole_mapping_can_be_withdrawn() {
    let table = Sysmem::new();
    table.map(Iova(0x4000), host(4, true)).expect("map");
    for (iova, len) in [(0x4000, 0x1000), (0x5000, 0x3000), (0x3000, 0x5000), (0x4000, 0x5000), (0, 0)] {
        assert!(matches!(table.unmap(Iova(iova), len), Err(DmaError::NotMapped { .. })), "{iova:#x}+{len:#x}");
    }
    table.unmap(Iova(0x4000), 0x4000).expect("whole");
    assert!(table.is_empty());
    assert!(table.unmap(Iova(0x4000), 0x4000).is_err());
    table.map(Iova(0x4000), host(4, true)).expect("again");
}

#[test]
fn accesses_cross_from_one_mapping_to_the_next() {
    let memory = memory();
    let (first, second) = (host(1, true), host(1, true));
    memory.sysmem.map(Iova(0x1_0000), first.clone()).expect("first");
    memory.sysmem.map(Iova(0x1_1000), second.clone()).expect("second");
    memory.write(system(0x1_0ffd), b"abcdef").expect("across");
    let mut bytes = [0; 3];
    second.slice(0, 3).expect("second").copy_to(&mut bytes[..]);
    assert_eq!(&bytes, b"def");
    assert_eq!(memory.read32(system(0x1_0ffe)), Ok(u32::from_le_bytes(*b"bcde")));
    memory.copy(system(0x1_0ff0), vram(0x800), 0x20).expect("copy");
    let mut bytes = [0; 6];
    memory.read(vram(0x80d), &mut bytes).expect("read");
    assert_eq!(&bytes, b"abcdef");
    assert_eq!(
        memory.read(system(0x1_1ffe), &mut bytes),
        Err(BusError::Unmapped { iova: Iova(0x1_2000) }),
        "the end of the second"
    );
    assert_eq!(memory.read32(system(0xffff)), Err(BusError::Unmapped { iova: Iova(0xffff) }));
}

#[test]
fn read_only_host_memory_is_not_written() {
    let memory = memory();
    memory.sysmem.map(Iova(0), host(1, false)).expect("map");
    assert_eq!(memory.read32(system(8)), Ok(0));
    assert_eq!(memory.write32(system(8), 1), Err(BusError::ReadOnly { iova: Iova(8) }));
    assert_eq!(memory.copy(vram(0), system(16), 4), Err(BusError::ReadOnly { iova: Iova(16) }));
    assert_eq!(memory.read32(system(8)), Ok(0));
}

#[test]
fn withdrawing_waits_for_accesses_under_way() {
    let memory = memory();
    memory.sysmem.map(Iova(0), host(1, true)).expect("map");
    let returned = AtomicBool::new(false);
    std::thread::scope(|threads| {
        let view = memory.view();
        view.write(system(8), &[1]).expect("mapped");
        let withdrawal = threads.spawn(|| {
            memory.sysmem.unmap(Iova(0), PAGE).expect("unmap");
            returned.store(true, Ordering::SeqCst);
        });
        // The lock rejects new readers while a writer is waiting.
        while memory.sysmem.is_free() {
            std::thread::yield_now();
        }
        view.write(system(0), &[1]).expect("still mapped");
        assert!(!returned.load(Ordering::SeqCst));
        drop(view);
        withdrawal.join().expect("joined");
    });
    assert!(returned.load(Ordering::SeqCst));
    assert!(memory.read32(system(0)).is_err());
}

proptest! {
    #[test]
    fn overlapping_copies_go_byte_by_byte_upwards(
        from in 0u64..300, to in 0u64..300, len in 0u64..300, system_side in any::<bool>()
    ) {
        let memory = memory();
        memory.sysmem.map(Iova(0), host(1, true)).expect("map");
        let at = |address| if system_side { system(address) } else { vram(address) };
        let mut model: Vec<u8> = (0..700u32).map(|i| (i * 7 + i / 256) as u8).collect();
        memory.write(at(0), &model).expect("fill");
        for i in 0..len as usize {
            model[to as usize + i] = model[from as usize + i];
        }
        memory.copy(at(from), at(to), len).expect("copy");
        let mut bytes = vec![0; model.len()];
        memory.read(at(0), &mut bytes).expect("read");
        prop_assert_eq!(bytes, model);
    }

    #[test]
    fn table_agrees_with_a_list_of_pages(
        operations in prop::collection::vec((any::<bool>(), 0u64..24, 1usize..5), 1..40)
    ) {
        let table = Sysmem::new();
        let mut model: Vec<(u64, u64)> = Vec::new();
        for (map, page, pages) in operations {
            let len = pages as u64;
            if map {
                let free = model.iter().all(|(p, l)| page + len <= *p || p + l <= page);
                prop_assert_eq!(table.map(Iova(page * PAGE), host(pages, true)).is_ok(), free);
                if free {
                    model.push((page, len));
                }
            } else {
                let known = model.iter().position(|mapping| *mapping == (page, len));
                prop_assert_eq!(table.unmap(Iova(page * PAGE), len * PAGE).is_ok(), known.is_some());
                if let Some(which) = known {
                    model.remove(which);
                }
            }
            for page in 0..30 {
                let mapped = model.iter().any(|(p, l)| (*p..p + l).contains(&page));
                prop_assert_eq!(table.view().piece(Iova(page * PAGE + 5), 1, true).is_ok(), mapped);
            }
        }
    }
}
