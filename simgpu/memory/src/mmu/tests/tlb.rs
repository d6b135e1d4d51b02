use crate::memory::{BusAddr, VRAM_MIN};
use crate::mmu::fixture::{PTE_VALID, Tables, vram};
use crate::mmu::tlb::{Tlb, TlbEntry, TlbKey};
use crate::mmu::{Access, AddressSpace, Client, Flush, Mmu};
use nvspec::addr::GpuVa;
use proptest::prelude::*;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const GPC: Access = Access { privileged: false, client: Client::Gpc };
const A: u64 = PTE_VALID | 0x80_0000 >> 8;
const B: u64 = PTE_VALID | 0x90_0000 >> 8;

fn address(tables: &Tables, va: u64, access: Access) -> Option<BusAddr> {
    tables.mmu.translate(&tables.memory, &tables.space, GpuVa(va), false, access).ok().map(|found| found.address)
}

fn read(tables: &Tables, va: u64) -> Option<BusAddr> {
    address(tables, va, Access::USER)
}

#[test]
fn change_without_a_flush_is_not_seen() {
    for large in [false, true] {
        let mut tables = Tables::new();
        let set = |tables: &mut Tables, pte| if large { tables.large(0, pte) } else { tables.small(0, pte) };
        set(&mut tables, A);
        assert_eq!(read(&tables, 4), Some(vram(0x80_0004)));
        set(&mut tables, B);
        assert_eq!(read(&tables, 4), Some(vram(0x80_0004)), "kept");
        set(&mut tables, 0);
        assert_eq!(read(&tables, 8), Some(vram(0x80_0008)), "kept even when unmapped");
        tables.mmu.flush(Flush::default());
        assert_eq!(read(&tables, 4), None);
        set(&mut tables, B);
        assert_eq!(read(&tables, 4), Some(vram(0x90_0004)));
    }
}

#[test]
fn flush_by_directory_leaves_others() {
    let mut tables = Tables::new();
    tables.small(0, A);
    let other = AddressSpace { directory: vram(0x3f_0000), limit: tables.space.limit };
    let entry = tables.read64(tables.space.directory);
    tables.write64(other.directory, entry);
    let through = |tables: &Tables, space: &AddressSpace| {
        tables.mmu.translate(&tables.memory, space, GpuVa(0), false, Access::USER).map(|found| found.address)
    };
    assert_eq!(through(&tables, &tables.space), through(&tables, &other));
    tables.small(0, B);
    tables.mmu.flush(Flush { directory: Some(other.directory), ..Flush::default() });
    assert_eq!(through(&tables, &other), Ok(vram(0x90_0000)));
    assert_eq!(through(&tables, &tables.space), Ok(vram(0x80_0000)));
    tables.mmu.flush(Flush { directory: Some(vram(0x3e_0000)), ..Flush::default() });
    assert_eq!(through(&tables, &tables.space), Ok(vram(0x80_0000)));
    tables.mmu.flush(Flush { directory: Some(tables.space.directory), ..Flush::default() });
    assert_eq!(through(&tables, &tables.space), Ok(vram(0x90_0000)));
}

#[test]
fn flush_of_directory_leaves_others_of_its_group() {
    let tlb = Tlb::default();
    let keys = [vram(0x1_0000), BusAddr::System(nvspec::addr::Iova(0x1_0000))]
        .map(|directory| TlbKey { directory, va: GpuVa(0x5000) });
    let entry = TlbEntry { pte: nvspec::mmu::Pte::new().with_valid(true), large: false };
    for flushed in [0, 1] {
        for stored in [vec![0], vec![1], vec![0, 1]] {
            tlb.flush(None, None);
            // The two keys have different lines of one set.
            stored.iter().for_each(|&at: &usize| {
                tlb.insert(TlbKey { va: GpuVa(0x5000 + 0x1000 * at as u64), ..keys[at] }, entry)
            });
            tlb.flush(Some(keys[flushed].directory), None);
            for at in [0, 1] {
                let key = TlbKey { va: GpuVa(0x5000 + 0x1000 * at as u64), ..keys[at] };
                assert_eq!(tlb.lookup(key).is_some(), stored.contains(&at) && at != flushed, "{stored:?}, {flushed}");
            }
        }
    }
}

#[test]
fn directory_at_the_same_address_of_the_other_memory_is_another() {
    let mut tables = Tables::new();
    tables.small(0, A);
    read(&tables, 0);
    tables.small(0, B);
    let system = BusAddr::System(nvspec::addr::Iova(0x1_0000));
    tables.mmu.flush(Flush { directory: Some(system), ..Flush::default() });
    assert_eq!(read(&tables, 0), Some(vram(0x80_0000)));
}

#[test]
fn flush_of_the_hub_leaves_the_clusters() {
    let mut tables = Tables::new();
    tables.small(0, A);
    assert_eq!(read(&tables, 0), address(&tables, 0, GPC));
    tables.small(0, B);
    tables.mmu.flush(Flush { hub_only: true, ..Flush::default() });
    assert_eq!(read(&tables, 0), Some(vram(0x90_0000)));
    assert_eq!(address(&tables, 0, GPC), Some(vram(0x80_0000)));
    tables.mmu.flush(Flush::default());
    assert_eq!(address(&tables, 0, GPC), Some(vram(0x90_0000)));
    assert_eq!(tables.mmu.counters(Client::Hub).flushes, 2);
    assert_eq!(tables.mmu.counters(Client::Gpc).flushes, 1);
}

#[test]
fn flush_of_a_page_leaves_the_others() {
    let mut tables = Tables::new();
    for va in [0, 0x1000] {
        tables.small(va, A);
        read(&tables, va);
        tables.small(va, B);
    }
    tables.mmu.flush(Flush { page: Some(GpuVa(0x1abc)), ..Flush::default() });
    assert_eq!(read(&tables, 0), Some(vram(0x80_0000)));
    assert_eq!(read(&tables, 0x1000), Some(vram(0x90_0000)));
}

#[test]
fn known_pages_are_not_walked_for_again() {
    let mut tables = Tables::new();
    tables.small(0, A);
    tables.large(0x2_0000, B);
    for _ in 0..10 {
        read(&tables, 0);
        read(&tables, 0x3_0000);
    }
    let counters = tables.mmu.counters(Client::Hub);
    assert_eq!((counters.hits, counters.misses), (18, 2));
}

#[test]
fn valid_large_page_comes_before_the_small_one() {
    let mut tables = Tables::new();
    tables.small(0x1000, A);
    tables.large(0, B);
    assert_eq!(read(&tables, 0x1000), Some(vram(0x90_1000)));
    tables.large(0, 0);
    tables.mmu.flush(Flush::default());
    assert_eq!(read(&tables, 0x1000), Some(vram(0x80_0000)));
}

#[test]
fn flush_waits_for_accesses_under_way() {
    let mut tables = Tables::new();
    tables.small(0, A);
    let returned = AtomicBool::new(false);
    std::thread::scope(|threads| {
        let mut session = tables.session();
        session.write32(GpuVa(0), 1).expect("mapped");
        let flush = threads.spawn(|| {
            tables.mmu.flush(Flush::default());
            returned.store(true, Ordering::SeqCst);
        });
        // The lock rejects new readers while a writer is waiting.
        while tables.mmu.gate.try_read().is_some() {
            std::thread::yield_now();
        }
        session.write32(GpuVa(4), 2).expect("still mapped");
        assert!(!returned.load(Ordering::SeqCst));
        drop(session);
        flush.join().expect("joined");
    });
    assert!(returned.load(Ordering::SeqCst));
}

#[test]
fn after_a_flush_nothing_reaches_the_old_frame() {
    let mut tables = Tables::new();
    tables.small(0, A);
    let stop = AtomicBool::new(false);
    let written = AtomicU64::new(0);
    /// Stops the writers on drop, even if an assertion fails.
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    std::thread::scope(|threads| {
        let _stop = Stop(&stop);
        for thread in 0..3u64 {
            let (tables, stop, written) = (&tables, &stop, &written);
            threads.spawn(move || {
                let mut value = 0u32;
                while !stop.load(Ordering::Relaxed) {
                    value += 1;
                    let va = GpuVa(thread * 4);
                    tables.mmu.write32(&tables.memory, &tables.space, va, value, Access::USER).expect("always mapped");
                    written.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let entry = {
            let directory = tables.read64(tables.space.directory);
            vram((directory >> 32 & !0xf) << 8)
        };
        for round in 0..200u64 {
            let (old, new) = if round % 2 == 0 { (0x80_0000, B) } else { (0x90_0000, A) };
            tables.write64(entry, new);
            tables.mmu.flush(Flush { directory: Some(tables.space.directory), ..Flush::default() });
            let snapshot = [0, 4, 8].map(|offset| tables.memory.read32(vram(old + offset)));
            let target = written.load(Ordering::Relaxed) + 20;
            while written.load(Ordering::Relaxed) < target {
                std::thread::yield_now();
            }
            assert_eq!(snapshot, [0, 4, 8].map(|offset| tables.memory.read32(vram(old + offset))), "round {round}");
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Looks up many colliding pages of two directories, and compares the results with a table walk. A flush follows
    /// each change.
    #[test]
    fn flushed_tlb_agrees_with_the_tables(
        changes in prop::collection::vec((0u64..3, 0u64..2, 0u64..600, 0u64..200), 1..60),
    ) {
        let mut tables = Tables::new();
        let mut touched: Vec<u64> = Vec::new();
        for (region, large, page, frame) in changes {
            // Regions 8 MiB apart use the same sets.
            let va = region * (8 << 20) + page * 0x1000;
            let target = VRAM_MIN / 2 + frame * 0x1000;
            if large == 1 {
                tables.large(va, PTE_VALID | (target & !0x1_ffff) >> 8);
            } else {
                tables.small(va, PTE_VALID | target >> 8);
            }
            tables.mmu.flush(Flush { directory: Some(tables.space.directory), ..Flush::default() });
            touched.push(va);
            for va in &touched {
                let walked = Mmu::new().translate(&tables.memory, &tables.space, GpuVa(*va), false, Access::USER);
                prop_assert_eq!(tables.translate(*va, false), walked);
                prop_assert_eq!(tables.translate(*va, false), walked);
            }
        }
    }
}
