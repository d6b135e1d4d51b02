//! Compares the page walker with an independent model that keeps a list of mappings instead of tables.

use crate::memory::BusAddr;
use crate::mmu::fixture::{SYSTEM_BASE, Tables, vram};
use crate::mmu::{Access, Mmu, MmuFault};
use nvspec::addr::{GpuVa, Iova};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Contents of one page table entry.
#[derive(Clone, Copy, Debug)]
struct Page {
    valid: bool,
    privileged: bool,
    read_only: bool,
    /// 0: VRAM; 1: peer; 2 and 3: host.
    aperture: u64,
    frame: u64,
    kind: u64,
}

impl Page {
    fn bits(self) -> u64 {
        let flag = |value: bool, bit: u32| u64::from(value) << bit;
        flag(self.valid, 0)
            + flag(self.privileged, 1)
            + flag(self.read_only, 2)
            + self.frame * 16
            + self.aperture * (1 << 33)
            + self.kind * (1 << 36)
    }
}

/// Mappings in 128 MiB of the address space.
#[derive(Clone, Debug, Default)]
struct Region {
    /// Table size: 0 for full, or 1 to 3 for a half, a quarter or an eighth.
    short: u64,
    large: Option<BTreeMap<u64, Page>>,
    small: Option<BTreeMap<u64, Page>>,
}

#[derive(Clone, Debug)]
struct World {
    limit: u64,
    regions: BTreeMap<u64, Region>,
}

#[derive(Debug, PartialEq)]
enum Answer {
    Fault(u32),
    At(BusAddr),
}

impl World {
    fn answer(&self, va: u64, write: bool, privileged: bool) -> Answer {
        if va > self.limit {
            return Answer::Fault(3);
        }
        let Some(region) = self.regions.get(&(va / 0x800_0000)) else { return Answer::Fault(0) };
        let inside = va % 0x800_0000;
        if region.large.is_none() && region.small.is_none() {
            return Answer::Fault(0);
        }
        if inside * [1, 2, 4, 8][region.short as usize] >= 0x800_0000 {
            return Answer::Fault(1);
        }
        let valid = |pages: &Option<BTreeMap<u64, Page>>, bytes: u64| {
            pages.as_ref().and_then(|pages| pages.get(&(inside / bytes))).copied().filter(|page| page.valid)
        };
        let (page, bytes) = match (valid(&region.large, 0x2_0000), valid(&region.small, 0x1000)) {
            (Some(page), _) => (page, 0x2_0000),
            (None, Some(page)) => (page, 0x1000),
            (None, None) => return Answer::Fault(2),
        };
        if page.privileged && !privileged {
            return Answer::Fault(5);
        }
        if page.read_only && write {
            return Answer::Fault(6);
        }
        // The test uses four storage kinds: pitch, generic, a compressed kind, and an invalid kind.
        match (page.kind, page.aperture) {
            (0xff, _) => return Answer::Fault(0xc),
            (0xdb, 2 | 3) | (_, 1) => return Answer::Fault(0xa),
            _ => {}
        }
        let base = page.frame * 0x1000 / bytes * bytes + va % bytes;
        Answer::At(if page.aperture == 0 { vram(base) } else { BusAddr::System(Iova(base)) })
    }

    /// Builds tables for the mappings. The tables of odd-numbered regions are in host memory.
    fn build(&self) -> Tables {
        let mut tables = Tables::new();
        tables.space.limit = GpuVa(self.limit);
        let mut next = [0x10_0000, SYSTEM_BASE];
        for (index, region) in &self.regions {
            let host = (index % 2) as usize;
            let mut entry = region.short << 2;
            for (pages, bytes, shift) in [(&region.large, 0x2000, 0), (&region.small, 0x4_0000, 32)] {
                let Some(pages) = pages else { continue };
                let table = next[host];
                next[host] += bytes;
                // Target codes are 1 for VRAM, and 2 and 3 for host memory.
                entry |= ([1, 2 + index / 2 % 2][host] | table >> 12 << 4) << shift;
                let place = if host == 0 { vram(table) } else { BusAddr::System(Iova(table)) };
                for (page, what) in pages {
                    tables.write64(place.offset(page * 8), what.bits());
                }
            }
            tables.write64(tables.space.directory.offset(index * 8), entry);
        }
        tables
    }
}

fn page() -> impl Strategy<Value = Page> {
    let kind = prop_oneof![6 => Just(0u64), 4 => Just(0xfe), 1 => Just(0xdb), 1 => Just(0xff)];
    let aperture = prop_oneof![6 => Just(0u64), 1 => Just(1), 2 => Just(2), 2 => Just(3)];
    (prop::bool::weighted(0.9), prop::bool::weighted(0.1), prop::bool::weighted(0.2), aperture, 0u64..1 << 28, kind)
        .prop_map(|(valid, privileged, read_only, aperture, frame, kind)| Page {
            valid,
            privileged,
            read_only,
            aperture,
            frame,
            kind,
        })
}

fn region() -> impl Strategy<Value = Region> {
    let pages = |count: u64| prop::option::weighted(0.7, prop::collection::btree_map(0..count, page(), 0..12));
    (prop_oneof![3 => Just(0u64), 2 => 1u64..4], pages(1024), pages(32768)).prop_map(|(short, large, small)| Region {
        short,
        large,
        small,
    })
}

fn world() -> impl Strategy<Value = World> {
    // Test the first regions and the last region of the address space.
    let index = prop_oneof![0u64..6, Just(8191u64)];
    let limit = prop_oneof![Just((1u64 << 40) - 1), 0u64..6 * 0x800_0000];
    (limit, prop::collection::btree_map(index, region(), 1..5)).prop_map(|(limit, regions)| World { limit, regions })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn walker_agrees_with_the_model(world in world(), probes in prop::collection::vec(any::<u64>(), 24)) {
        let tables = world.build();
        let mut addresses: Vec<u64> = probes.iter().map(|probe| probe % (7 * 0x800_0000)).collect();
        for (index, region) in &world.regions {
            for (pages, bytes) in [(&region.large, 0x2_0000u64), (&region.small, 0x1000)] {
                for page in pages.iter().flatten().map(|(page, _)| page) {
                    let start = index * 0x800_0000 + page * bytes;
                    addresses.extend([start, start + bytes - 1, start + bytes, start + probes[0] % bytes]);
                }
            }
        }
        addresses.extend([world.limit, world.limit + 1]);
        for va in addresses {
            for (write, privileged) in [(false, false), (true, false), (true, true)] {
                let access = Access { privileged, ..Access::USER };
                let expected = world.answer(va, write, privileged);
                // Test with an empty TLB first, then with cached translations.
                for mmu in [&Mmu::new(), &tables.mmu, &tables.mmu] {
                    let found = mmu.translate(&tables.memory, &tables.space, GpuVa(va), write, access);
                    let answer = match found {
                        Ok(translation) => Answer::At(translation.address),
                        Err(MmuFault { reason, va: at, write: was_write }) => {
                            prop_assert_eq!((at, was_write), (GpuVa(va), write));
                            Answer::Fault(reason)
                        }
                    };
                    prop_assert_eq!(&answer, &expected, "{:#x} write {} privileged {}", va, write, privileged);
                }
            }
        }
    }
}
