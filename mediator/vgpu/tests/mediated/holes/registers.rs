//! Hole 6: undeclared registers, machine registers, and registers that the reference code does not handle.

use super::{A, At, B, C, GOOD, IDLE};
use super::{CE0, ID, SHARE_BYTES, Scene, blocks, ce_copy, ce0, ce1, object, pbus, pfb, pfifo, pgraph, ptimer, tally};
use nvspec::Access;
use nvspec::regs::{fecs, gpccs, pclock, pdisp, pfuse, pmc, pmu, ppci, ptop, windows};
use vmm_glue::RegionIndex;

/// Distance between writes in the sweep over undeclared offsets, in bytes.
const STRIDE: u32 = 0x100;

#[test]
fn hole_06_no_register_is_passed_on() {
    let mut scene = Scene::new();
    // Sweep over all declared registers, regardless of their policies.
    let declared: Vec<u32> = blocks()
        .flat_map(|(_, _, _, info)| *info)
        .flat_map(|reg| (0..reg.count).map(|index| reg.offset + index * reg.stride))
        .collect();
    assert!(declared.len() > 1000);
    for value in [u32::MAX, 0x5555_5555, 0] {
        scene.virtual_only(&format!("{value:#x} in every register"), |s| {
            declared.iter().for_each(|&offset| s.evil.guest.wr(offset, value));
        });
    }
    scene.fresh();
    // Then sweep over the offsets between these registers.
    let before = tally(&scene.evil.guest);
    scene.virtual_only("a sweep over the remaining registers", |s| {
        for offset in (0..windows::BAR0_BYTES as u32).step_by(STRIDE as usize) {
            s.evil.guest.wr(offset + (offset / STRIDE * 4) % STRIDE, u32::MAX);
        }
    });
    assert!(tally(&scene.evil.guest) > before + 10_000, "unclaimed accesses are counted");
    scene.fresh();

    // The reference code passes accesses to these registers through.
    scene.virtual_only("microcode for the falcons", |s| {
        for (control, data, tag, boot, start) in [
            (
                fecs::IMEM_CONTROL::OFFSET,
                fecs::IMEM_DATA::OFFSET,
                fecs::IMEM_TAG::OFFSET,
                fecs::BOOT_VECTOR::OFFSET,
                fecs::CPU_CONTROL::OFFSET,
            ),
            (
                gpccs::IMEM_CONTROL::OFFSET,
                gpccs::IMEM_DATA::OFFSET,
                gpccs::IMEM_TAG::OFFSET,
                gpccs::BOOT_VECTOR::OFFSET,
                gpccs::CPU_CONTROL::OFFSET,
            ),
            (
                ce0::IMEM_CONTROL::OFFSET,
                ce0::IMEM_DATA::OFFSET,
                ce0::IMEM_TAG::OFFSET,
                ce0::BOOT_VECTOR::OFFSET,
                ce0::CPU_CONTROL::OFFSET,
            ),
            (
                ce1::IMEM_CONTROL::OFFSET,
                ce1::IMEM_DATA::OFFSET,
                ce1::IMEM_TAG::OFFSET,
                ce1::BOOT_VECTOR::OFFSET,
                ce1::CPU_CONTROL::OFFSET,
            ),
            (
                pmu::IMEM_CONTROL::OFFSET,
                pmu::IMEM_DATA::OFFSET,
                pmu::IMEM_TAG::OFFSET,
                pmu::BOOT_VECTOR::OFFSET,
                pmu::CPU_CONTROL::OFFSET,
            ),
        ] {
            s.evil.guest.wr(control, 1 << 24);
            for block in 0..16 {
                s.evil.guest.wr(tag, block);
                (0..64).for_each(|word| s.evil.guest.wr(data, 0xf4f4_0000 | word));
            }
            s.evil.guest.wr(boot, 0);
            s.evil.guest.wr(start, 2);
        }
    });
    scene.virtual_only("resets, clocks, fuses, PCI's mirror", |s| {
        for register in
            [pmc::ENABLE::OFFSET, pmc::PBDMA_ENABLE::OFFSET, pmc::INTR_EN_0::OFFSET, pmc::INTR_MASK_0::OFFSET]
        {
            for value in [0, u32::MAX, 0, 1] {
                s.evil.guest.wr(register, value);
            }
        }
        (0..64).for_each(|index| s.evil.guest.wr(pclock::PLL_A::at(index), 0xdead));
        (0..64).for_each(|index| s.evil.guest.wr(pclock::MEM::at(index), 0));
        (0..ppci::CONFIG::COUNT).for_each(|index| s.evil.guest.wr(ppci::CONFIG::at(index), 0));
        (0..ppci::CAPABILITIES::COUNT).for_each(|index| s.evil.guest.wr(ppci::CAPABILITIES::at(index), u32::MAX));
        (0..pfuse::FUSE::COUNT).for_each(|index| s.evil.guest.wr(pfuse::FUSE::at(index), u32::MAX));
        for register in
            [ptop::FUSE_CTRL::OFFSET, ptop::GPC_COUNT::OFFSET, ptop::FBP_COUNT::OFFSET, ptop::FBP_DISABLED::OFFSET]
        {
            s.evil.guest.wr(register, 7);
        }
    });
    scene.virtual_only("acknowledging interrupts of other VMs", |s| {
        for register in [
            pfifo::INTR::OFFSET,
            pfifo::MMU_FAULT_ID::OFFSET,
            pfifo::PBDMA_INTR_ID::OFFSET,
            pfifo::RUNLIST_INTR::OFFSET,
            pgraph::INTR::OFFSET,
            pbus::INTR::OFFSET,
            ce0::INTR_CLEAR::OFFSET,
            ce1::INTR_CLEAR::OFFSET,
        ] {
            s.evil.guest.wr(register, u32::MAX);
        }
    });
    scene.finish();
}

#[test]
fn acknowledging_a_fault_keeps_the_neighbours_faults() {
    let mut scene = Scene::new();
    // Make the working VM fault while the attacker acknowledges all interrupts.
    let good = &mut scene.good;
    good.driver.submit(&mut good.channel, &[object(CE0), ce_copy(A, 64 << 20, 1)].concat());
    for _ in 0..1000 {
        for register in [pfifo::MMU_FAULT_ID::OFFSET, pfifo::INTR::OFFSET, pfifo::SCHED_ENABLE_ACK::OFFSET] {
            scene.evil.guest.wr(register, u32::MAX);
        }
    }
    let fault = scene.good.driver.wait_fault();
    assert_eq!((fault.instance, fault.va), (scene.good.channel.instance, 64 << 20));
    assert_eq!(scene.evil.guest.counter("faults"), 0);
    assert_eq!(scene.evil.guest.rd(pfifo::MMU_FAULT_ID::OFFSET), 0);
}

#[test]
fn flushes_of_foreign_directories_do_nothing() {
    let mut scene = Scene::new();
    let directories = [
        scene.on_card(GOOD, scene.good.channel.space.directory),
        scene.on_card(IDLE, 0),
        SHARE_BYTES,
        (1 << 40) - 0x1000,
    ];
    let flushes = scene.good.driver.guest.counter("tlb_flushes");
    for at in directories {
        scene.denied(&format!("directory {at:#x}"), |s| {
            for target in 0..4 {
                s.evil.guest.wr(pfb::MMU_INVALIDATE_PDB::OFFSET, ((at >> 12) << 4) as u32 | target);
                for trigger in [0x8000_0000, 0x8000_0001, 0x8000_0004, 0x8000_0005, 0xffff_fffd] {
                    s.evil.guest.wr(pfb::MMU_INVALIDATE::OFFSET, trigger);
                }
            }
        });
    }
    assert_eq!(scene.good.driver.guest.counter("tlb_flushes"), flushes, "counted for the neighbour");
    scene.finish();
}

#[test]
fn scheduler_masks_hold_back_the_guests_own_work_only() {
    let mut scene = Scene::new();
    for (what, register, value) in [
        ("no PBDMA for any engine", pfifo::ENGINE_PBDMA_MASK::at(0), u32::MAX),
        ("no PBDMA present", pfifo::PBDMA_PRESENT::OFFSET, 0),
        ("the scheduler off", pfifo::SCHED_EN::OFFSET, 0),
        ("no non-stall interrupts", pfifo::NON_STALL_EN::OFFSET, 0),
        ("all engines disabled", pfifo::SCHED_DISABLE::OFFSET, u32::MAX),
        ("all engines acknowledged", pfifo::SCHED_ENABLE_ACK::OFFSET, u32::MAX),
        ("faults triggered by hand", pfifo::FAULT_TRIGGER::at(0), 0x11f),
    ] {
        scene.contained(what, |s| s.evil.guest.wr(register, value));
        scene.contained(what, |s| s.evil.guest.wr(register, !value));
    }
    for index in 0..6 {
        scene.contained("masks of all engines", |s| {
            s.evil.guest.wr(pfifo::ENGINE_PBDMA_MASK::at(index), u32::MAX);
            s.evil.guest.wr(pfifo::FAULT_TRIGGER::at(index), 0x100 | index);
        });
    }
    scene.fresh();
    // The same must hold while the VM blocks its engines and has pending work.
    let mut channel = scene.evil.channel(ID);
    scene.evil.buffer(&channel, A, 1, 1);
    scene.evil.buffer(&channel, B, 1, 2);
    scene.contained("engines disabled under work", |s| {
        s.evil.guest.wr(pfifo::SCHED_DISABLE::OFFSET, u32::MAX);
        s.evil.submit(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
    });
    scene.finish();
}

#[test]
fn written_timer_does_not_change_time_of_others() {
    let mut scene = Scene::new();
    let time = |s: &mut Scene| {
        let guest = &mut s.idle.driver.guest;
        u64::from(guest.rd(ptimer::TIME_1::OFFSET)) << 32 | u64::from(guest.rd(ptimer::TIME_0::OFFSET))
    };
    let card = scene.rig.card.clone();
    let mut last = time(&mut scene);
    for value in [0, u32::MAX, 1, 0x1000_0000] {
        scene.contained(&format!("time {value:#x}"), |s| {
            for register in [
                ptimer::TIME_0::OFFSET,
                ptimer::TIME_1::OFFSET,
                ptimer::NUMERATOR::OFFSET,
                ptimer::DENOMINATOR::OFFSET,
                ptimer::CLOCK_MUL::OFFSET,
                ptimer::ALARM_0::OFFSET,
            ] {
                s.evil.guest.wr(register, value);
            }
        });
        let now = time(&mut scene);
        // If the low word wraps between the two reads, the result is too small by less than 2^32 ns.
        assert!(now + (1 << 32) > last && now < last + (1 << 40), "from {last} to {now}");
        last = now;
    }
    assert_eq!(card::Card::read32(&*card, ptimer::NUMERATOR::OFFSET), {
        let fresh = rig::Rig::new(64);
        card::Card::read32(&*fresh.card, ptimer::NUMERATOR::OFFSET)
    });
    scene.finish();
}

#[test]
fn display_pmu_and_msi_registers_are_virtual() {
    let mut scene = Scene::new();
    let page = scene.on_card(IDLE, 0);
    scene.virtual_only("display", |s| {
        s.evil.guest.wr(pdisp::INSTANCE::OFFSET, (page >> 8) as u32 | 9);
        s.evil.guest.wr(pdisp::VBIOS_IN_VRAM::OFFSET, (page >> 8) as u32 | 9);
        (0x61_0000..0x62_0000).step_by(0x40).for_each(|offset| s.evil.guest.wr(offset, (page >> 8) as u32));
        (0x64_0000..0x65_0000).step_by(0x40).for_each(|offset| s.evil.guest.wr(offset, u32::MAX));
    });
    scene.virtual_only("the PMU's DMA and queues", |s| {
        (0..pmu::DMA_TARGET::COUNT).for_each(|index| s.evil.guest.wr(pmu::DMA_TARGET::at(index), 0x0000_0007));
        for offset in (0x10_a110..0x10_a130).step_by(4) {
            s.evil.guest.wr(offset, (page >> 8) as u32);
        }
        (0..4).for_each(|index| s.evil.guest.wr(pmu::QUEUE_HEAD::at(index), u32::MAX));
        s.evil.guest.wr(pmu::DMEM_CONTROL::at(0), 1 << 24);
        (0..4096).for_each(|word| s.evil.guest.wr(pmu::DMEM_DATA::at(0), word));
    });
    scene.virtual_only("re-arming MSI over and over", |s| {
        (0..1000).for_each(|_| s.evil.guest.wr(ppci::MSI_REARM::OFFSET, u32::MAX));
    });
    scene.virtual_only("side doors of PGRAPH", |s| {
        for index in 0..256 {
            s.evil.guest.wr(pgraph::ICMD_DATA::OFFSET, u32::MAX);
            s.evil.guest.wr(pgraph::ICMD_COMMAND::OFFSET, index);
            s.evil.guest.wr(pgraph::MTHD_DATA::OFFSET, u32::MAX);
            s.evil.guest.wr(pgraph::MTHD_COMMAND::OFFSET, 0x8000_0000 | index << 14 | 0x9039);
        }
    });
    scene.finish();
}

#[test]
fn narrow_wide_and_unaligned_accesses_are_split() {
    let mut scene = Scene::new();
    let writable = blocks().flat_map(|(_, _, _, info)| *info).filter(|reg| matches!(reg.access, Access::Rw));
    let offsets: Vec<u64> = writable.map(|reg| reg.offset.into()).collect();
    scene.virtual_only("accesses of any size at any offset", |s| {
        for &offset in &offsets {
            for (at, size) in [(0u64, 1usize), (1, 1), (2, 2), (1, 2), (3, 2), (1, 4), (0, 8), (5, 8), (2, 3)] {
                s.evil.guest.write(RegionIndex::Bar0, offset + at, &[0xff; 8][..size]);
                let mut data = [0; 8];
                s.evil.guest.read(RegionIndex::Bar0, offset + at, &mut data[..size]);
            }
        }
    });
    scene.fresh();
    for region in [RegionIndex::Bar0, RegionIndex::Bar1, RegionIndex::Bar3] {
        scene.denied(&format!("{region:?} at its end and beyond"), |s| {
            for at in [windows::BAR0_BYTES - 1, windows::BAR0_BYTES, u64::MAX - 7, u64::from(u32::MAX) - 3, 1 << 32] {
                let mut data = [0; 8];
                s.evil.guest.read(region, at, &mut data);
                s.evil.guest.write(region, at, &[0xff; 8]);
                s.evil.guest.write(region, at, &[0xff; 1]);
            }
        });
    }
    scene.finish();
}

#[test]
fn configuration_writes_move_nothing_but_the_guests_own() {
    let mut scene = Scene::new();
    let page = scene.on_card(IDLE, 0);
    // Write all registers in the first 256 bytes with accesses of 1, 2, 4 and 8 bytes.
    scene.virtual_only("configuration space", |s| {
        for fill in [0xffu8, 0x00, 0xa5] {
            for at in 0..0x100u64 {
                for size in [1usize, 2, 4, 8] {
                    s.evil.guest.write(RegionIndex::Config, at, &[fill; 8][..size]);
                }
            }
        }
        for at in 0x100..0x1000u64 {
            s.evil.guest.write(RegionIndex::Config, at, &[0xff; 4]);
        }
        let bar = (page as u32).to_le_bytes();
        [0x10u64, 0x14, 0x18, 0x1c, 0x20, 0x24, 0x30]
            .iter()
            .for_each(|&at| s.evil.guest.write(RegionIndex::Config, at, &bar));
        for at in [0xfff, 0x1000, u64::MAX - 3] {
            s.evil.guest.write(RegionIndex::Config, at, &bar);
            s.evil.guest.read(RegionIndex::Config, at, &mut [0; 4]);
        }
    });
    let mut identity = [0; 4];
    scene.evil.guest.read(RegionIndex::Config, 0, &mut identity);
    assert_eq!(u16::from_le_bytes([identity[0], identity[1]]), 0x10de, "identity is read-only");
    scene.fresh();

    // Disable bus mastering while work runs. This must affect only the VM's own accesses to RAM.
    let mut channel = scene.evil.channel(ID);
    scene.evil.buffer(&channel, A, 8, 1);
    scene.evil.map(channel.space, C, At::Ram(0), 8);
    scene.contained("bus mastering off under work", |s| {
        s.evil.submit(&mut channel, &[object(CE0), ce_copy(A, C, 8)].concat());
        for command in [2u16, 6, 0, 6] {
            s.evil.guest.write(RegionIndex::Config, 4, &command.to_le_bytes());
        }
    });
    scene.finish();
}
