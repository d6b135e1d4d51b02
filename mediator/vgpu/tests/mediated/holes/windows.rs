//! Holes 1, 2, 10 and 14: windows for CPU accesses to memory.

use super::{At, PAGE, RAM, SHARE_BYTES, Scene, entry, pattern};
use card::Card;
use nvspec::instance::vm;
use nvspec::regs::{pbus, windows::pramin};
use rig::driver::Space;
use vmm_glue::RegionIndex;

/// Offset in an aperture, outside USERD.
const OFFSET: u64 = 0x40_0000;
/// Word that the attacker writes through the windows.
const BRAND: u32 = 0xa77a_c4ed;

/// Region of each aperture, and the register for its instance block.
const APERTURES: [(RegionIndex, u32); 2] =
    [(RegionIndex::Bar1, pbus::BAR1_BLOCK::OFFSET), (RegionIndex::Bar3, pbus::BAR3_BLOCK::OFFSET)];

impl Scene {
    /// Creates an address space in the attacker's memory, and makes an aperture use it. `register` is the register for
    /// the aperture's instance block. Returns the address space and the address of its instance block.
    fn aperture(&mut self, register: u32) -> (Space, u64) {
        let (space, instance) = (self.evil.space(), self.evil.vram(1));
        self.evil.join(instance, space);
        self.evil.guest.wr(register, 0x8000_0000 | (instance >> 12) as u32);
        (space, instance)
    }

    fn peek(&mut self, region: RegionIndex, offset: u64) -> u32 {
        let mut word = [0; 4];
        self.evil.guest.read(region, offset, &mut word);
        u32::from_le_bytes(word)
    }

    fn poke(&mut self, region: RegionIndex, offset: u64, value: u32) {
        self.evil.guest.write(region, offset, &value.to_le_bytes());
    }
}

#[test]
fn hole_01_pramin_ends_with_the_share() {
    let mut scene = Scene::new();
    let guest = &mut scene.evil.guest;
    guest.poke(SHARE_BYTES - 4, 0x600d_600d);
    assert_eq!(guest.peek(SHARE_BYTES - 4), 0x600d_600d, "the share's last word can be read");
    for (what, at) in scene.outside() {
        scene.denied(&format!("reading {what}"), |s| assert_eq!(s.evil.guest.peek(at), u32::MAX, "{what}"));
        scene.denied(&format!("writing {what}"), |s| s.evil.guest.poke(at, BRAND));
    }
    // A window that starts 64 KiB below 2^40 would wrap to address 0.
    for base in [SHARE_BYTES - 0x1_0000, (1 << 40) - 0x1_0000] {
        scene.denied(&format!("beyond the end from {base:#x}"), |s| {
            s.evil.guest.wr(pbus::PRAMIN_WINDOW::OFFSET, (base >> 16) as u32);
            for offset in (0x1_0000..pramin::BYTES).step_by(0x1_0000) {
                assert_eq!(s.evil.guest.rd(pramin::BASE + offset), u32::MAX, "{offset:#x}");
                s.evil.guest.wr(pramin::BASE + offset, BRAND);
            }
        });
    }
    // Half of the access is beyond the end of the share.
    scene.denied("an access across the end of the share", |s| {
        s.evil.guest.wr(pbus::PRAMIN_WINDOW::OFFSET, ((SHARE_BYTES >> 16) - 1) as u32);
        let mut word = [0; 8];
        let at = u64::from(pramin::BASE) + 0x1_0000 - 4;
        s.evil.guest.read(RegionIndex::Bar0, at, &mut word);
        assert_eq!(word, [0xff; 8]);
        s.evil.guest.write(RegionIndex::Bar0, at, &[0x77; 8]);
    });
    assert_eq!(scene.evil.guest.peek(SHARE_BYTES - 4), 0x600d_600d, "no part of the access was executed");
    scene.finish();
}

#[test]
fn hole_02_pramin_does_not_reach_host_memory() {
    let mut scene = Scene::new();
    scene.evil.fill_ram(0, RAM / PAGE, 2);
    let mut places = scene.foreign_ram();
    places.push(("the guest's own RAM", 0));
    for (what, at) in places {
        for target in 1..=3 {
            scene.denied(&format!("{what}, target {target}"), |s| {
                let window = (at >> 16) as u32 & 0x00ff_ffff | target << 24;
                s.evil.guest.wr(pbus::PRAMIN_WINDOW::OFFSET, window);
                let register = pramin::BASE + (at & 0xffff) as u32;
                assert_eq!(s.evil.guest.rd(register), u32::MAX, "{what}");
                s.evil.guest.wr(register, BRAND);
            });
        }
    }
    assert!(scene.evil.ram_holds(0, RAM / PAGE, 2));
    scene.finish();
}

#[test]
fn hole_10_aperture_entries_for_ram_reach_ram_and_never_vram() {
    let mut scene = Scene::new();
    let page = 0x2_0000;
    for (region, register) in APERTURES {
        let (space, _) = scene.aperture(register);
        scene.evil.fill_ram(page, 1, 10);
        scene.evil.guest.vram_write(page, &pattern(11, 0));
        scene.evil.map(space, OFFSET, At::Ram(page), 1);
        scene.contained("the guest's own page", |s| {
            let first = u32::from_le_bytes(pattern(10, 0)[..4].try_into().unwrap());
            assert_eq!(s.peek(region, OFFSET), first, "the data in RAM");
            s.poke(region, OFFSET, BRAND);
            assert_eq!(s.evil.guest.ram_word(page), BRAND, "RAM was written");
        });
        assert!(scene.evil.vram_holds(page, 1, 11), "VRAM at this address was not");
        // Addresses of VRAM and of other VMs' RAM are invalid as guest RAM addresses.
        let numbers = [scene.outside(), scene.foreign_ram()].concat();
        for (what, at) in numbers {
            for aperture in [1, 2, 3] {
                scene.denied(&format!("{what}, aperture {aperture}"), |s| {
                    let bad = entry(at, aperture);
                    s.evil.pte(space, OFFSET, bad as u32, (bad >> 32) as u32);
                    s.evil.flush();
                    assert_eq!(s.peek(region, OFFSET), u32::MAX, "{what}");
                    s.poke(region, OFFSET, BRAND);
                });
            }
        }
        // Without bus mastering, the function must not access RAM.
        scene.evil.map(space, OFFSET, At::Ram(page), 1);
        scene.denied("without bus mastering", |s| {
            s.evil.guest.write(RegionIndex::Config, 4, &2u16.to_le_bytes());
            assert_eq!(s.peek(region, OFFSET), u32::MAX);
            s.poke(region, OFFSET, 0);
            s.evil.guest.write(RegionIndex::Config, 4, &6u16.to_le_bytes());
        });
        assert_eq!(scene.evil.guest.ram_word(page), BRAND);
    }
    scene.finish();
}

#[test]
fn hole_14_apertures_end_with_limit_table_and_region() {
    let mut scene = Scene::new();
    let card = scene.rig.card.identity();
    for (region, register) in APERTURES {
        let size = if region as usize == RegionIndex::Bar1 as usize { card.bar1_size } else { card.bar3_size };
        let (space, instance) = scene.aperture(register);
        let data = scene.evil.vram(1);
        scene.evil.guest.poke(data, 0x600d_600d);
        for va in [OFFSET, OFFSET + PAGE] {
            scene.evil.map(space, va, At::Vram(data), 1);
        }
        assert_eq!(scene.peek(region, OFFSET), 0x600d_600d);

        // Try offsets at the end of the region and far beyond it.
        for offset in [size - 4, size, size + PAGE, 1 << 32, 1 << 40, u64::MAX - 3] {
            scene.denied(&format!("offset {offset:#x}"), |s| {
                assert_eq!(s.peek(region, offset), u32::MAX);
                s.poke(region, offset, BRAND);
            });
        }
        scene.denied("across the region's end", |s| {
            s.evil.guest.write(region, size - 4, &[0x77; 8]);
        });

        // The first limit is the last byte of the first mapped page. `u64::MAX` plus one wraps around, and bit 63 of
        // the last limit must be ignored.
        for (limit, first, second) in [
            (OFFSET + PAGE - 1, true, false),
            (0, false, false),
            (OFFSET - 1, false, false),
            (u64::MAX, true, true),
            (1 << 63 | (OFFSET + PAGE - 1), true, false),
        ] {
            scene.contained(&format!("limit {limit:#x}"), |s| {
                s.evil.guest.poke(instance + vm::LIMIT_LO, limit as u32);
                s.evil.guest.poke(instance + vm::LIMIT_HI, (limit >> 32) as u32);
                s.evil.guest.wr(register, 0x8000_0000 | (instance >> 12) as u32);
                s.evil.flush();
                let word = |seen: bool| if seen { 0x600d_600d } else { u32::MAX };
                assert_eq!(s.peek(region, OFFSET), word(first));
                assert_eq!(s.peek(region, OFFSET + PAGE), word(second));
            });
        }
        scene.evil.join(instance, space);
        scene.evil.flush();

        // Shorten the table to an eighth of its full size. The entry beyond its new end must be ignored.
        let eighth = (128 << 20) / 8;
        if eighth < size {
            scene.evil.map(space, eighth, At::Vram(data), 1);
            scene.denied("beyond a shortened table", |s| {
                s.evil.guest.poke(space.directory, 3 << 2);
                s.evil.flush();
                assert_eq!(s.peek(region, OFFSET), 0x600d_600d, "within it");
                assert_eq!(s.peek(region, eighth), u32::MAX);
                s.poke(region, eighth, BRAND);
            });
            scene.evil.guest.poke(space.directory, 0);
        }

        // Use tables that extend beyond the end of VRAM. Entries beyond the end would be in a neighbour's memory.
        for table in [SHARE_BYTES - PAGE, SHARE_BYTES] {
            scene.denied(&format!("table at {table:#x}"), |s| {
                s.evil.guest.poke(space.directory + 4, ((table >> 12) as u32) << 4 | 1);
                s.evil.flush();
                // Entry 512 is the first entry in the table's second page.
                assert_eq!(s.peek(region, 512 * PAGE), u32::MAX);
                s.poke(region, 512 * PAGE, BRAND);
            });
        }
        scene.fresh();
    }
    scene.finish();
}
