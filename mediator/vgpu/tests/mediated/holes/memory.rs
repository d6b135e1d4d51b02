//! Holes 9 and 17: memory that was unmapped or removed, and residue of an earlier client or VM.

use super::{
    A, At, B, C, CE0, CE1, EVIL, ID, M2MF, MIB, PAGE, RAM, SECRET, SHARE_BYTES, Scene, ce_copy, m2mf_copy, object,
    pattern, stops, wait_stopped,
};
use nvspec::Access;
use nvspec::instance::userd;
use nvspec::regs::{blocks, pbus, pfifo, pgraph, pmc, windows::STATE_RANGES};
use rig::read_file;
use vmm_glue::RegionIndex;

#[test]
fn hole_09_unmapped_pages_are_unreachable_after_flush() {
    let mut scene = Scene::new();
    for (what, at) in [("RAM", At::Ram(0x4_0000)), ("VRAM", At::Vram(SHARE_BYTES - 8 * PAGE))] {
        let mut channel = scene.evil.channel(ID);
        scene.evil.buffer(&channel, A, 1, 1);
        scene.evil.map(channel.space, B, at, 1);
        // Access the page first, so that all caches on the path contain it.
        for engine in [CE0, CE1] {
            scene.evil.submit(&mut channel, &[object(engine), ce_copy(A, B, 1)].concat());
            scene.evil.wait(&channel);
        }
        scene.denied(what, |s| {
            s.evil.pte(channel.space, B, 0, 0);
            s.evil.flush();
            match at {
                At::Ram(gpa) => s.evil.guest.ram_write(gpa, &pattern(9, 0)),
                At::Vram(at) => s.evil.guest.vram_write(at, &pattern(9, 0)),
            }
            s.evil.submit(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
            assert_eq!(s.evil.wait_fault().va, B);
        });
        let held = match at {
            At::Ram(gpa) => scene.evil.ram_holds(gpa, 1, 9),
            At::Vram(at) => scene.evil.vram_holds(at, 1, 9),
        };
        assert!(held, "{what} was written after the page was unmapped");
        scene.fresh();
    }
    scene.finish();
}

#[test]
fn hole_09_unmapping_under_load_completes_at_flush() {
    let mut scene = Scene::new();
    let gpa = 0x4_0000;
    for round in 0..10u32 {
        let mut channel = scene.evil.channel(ID);
        scene.evil.buffer(&channel, A, 32, 1);
        scene.evil.map(channel.space, B, At::Ram(gpa), 32);
        scene.contained("unmapping under work", |s| {
            let copy = match round % 2 {
                0 => [object(CE0), ce_copy(A, B, 32)].concat(),
                _ => [object(M2MF), m2mf_copy(A, B, 32 * PAGE as u32)].concat(),
            };
            for _ in 0..8 {
                s.evil.queue(&mut channel, &copy);
            }
            let before = stops(&s.evil.guest);
            s.evil.submit(&mut channel, &copy);
            (0..32).for_each(|page| s.evil.pte(channel.space, B + page * PAGE, 0, 0));
            s.evil.flush();
            // From now on, the guest's kernel reuses the pages for other processes.
            s.evil.fill_ram(gpa, 32, 0x900 + round);
            // Earlier work must have completed or must fault.
            let mut later = channel;
            s.evil.submit(&mut later, &copy);
            wait_stopped(&mut s.evil, before, "unmapping under work");
        });
        assert!(scene.evil.ram_holds(gpa, 32, 0x900 + round), "round {round}: written after it was unmapped");
        scene.fresh();
    }
    scene.finish();
}

#[test]
fn hole_09_memory_that_the_vmm_takes_back_is_out_of_reach() {
    let mut scene = Scene::new();
    let gpa = 16 * MIB;
    assert!(scene.evil.guest.map_ram(gpa, 4 * PAGE, true));
    let mut channel = scene.evil.channel(ID);
    scene.evil.buffer(&channel, A, 4, 1);
    scene.evil.map(channel.space, B, At::Ram(gpa), 4);
    scene.evil.submit(&mut channel, &[object(CE0), ce_copy(A, B, 4)].concat());
    scene.evil.wait(&channel);
    assert!(scene.evil.ram_holds(gpa, 4, 1));
    let file = scene.evil.guest.unmap_ram(gpa).unwrap();
    assert_eq!(rustix::io::pwrite(&file, &[0xee; 4 * PAGE as usize], 0), Ok(4 * PAGE as usize));
    // The guest neither unmaps the pages nor flushes its TLB.
    scene.denied("RAM that was removed", |s| {
        s.evil.submit(&mut channel, &[object(CE0), ce_copy(A, B, 4)].concat());
        assert_eq!(s.evil.wait_fault().va, B);
    });
    let mut data = [0; 4 * PAGE as usize];
    read_file(&file, 0, &mut data);
    assert!(data.iter().all(|&byte| byte == 0xee));
    scene.finish();
}

#[test]
fn hole_17_a_client_finds_nothing_of_the_one_before() {
    let mut scene = Scene::new();
    // Let a client use each engine, and write to all VRAM, including USERD, and to each register that keeps a value.
    let mut channel = scene.evil.channel(ID);
    scene.evil.buffer(&channel, A, 2, 1);
    scene.evil.buffer(&channel, B, 2, 2);
    scene.evil.map(channel.space, C, At::Ram(0), 2);
    for engine in [CE0, CE1] {
        let words = [object(engine), ce_copy(A, B, 2), ce_copy(B, C, 2), object(M2MF), m2mf_copy(A, B, 64)];
        scene.evil.submit(&mut channel, &words.concat());
        scene.evil.wait(&channel);
    }
    let reference = stored(&mut scene);
    for (offset, _) in &reference {
        scene.evil.guest.wr(*offset, 0x7e0a_4705);
    }
    let mark = vec![0x7e; MIB as usize];
    (0..SHARE_BYTES / MIB).for_each(|mib| scene.evil.guest.vram_write(mib * MIB, &mark));

    scene.evil.guest.reconnect();
    let mut data = vec![0; MIB as usize];
    for mib in 0..SHARE_BYTES / MIB {
        scene.evil.guest.vram_read(mib * MIB, &mut data);
        assert!(data.iter().all(|&byte| byte == 0), "MiB {mib}");
    }
    for (offset, before) in stored(&mut scene) {
        assert_ne!(before, 0x7e0a_4705, "register {offset:#x} kept the previous client's value");
    }
    // An aperture without an instance block must show no memory.
    for region in [RegionIndex::Bar1, RegionIndex::Bar3] {
        let mut word = [0; 8];
        scene.evil.guest.read(region, 0, &mut word);
        assert_eq!(word, [0xff; 8]);
    }
    assert_eq!(scene.evil.guest.rd(pbus::PRAMIN_WINDOW::OFFSET), 0);

    // The next client uses the same channel. USERD and the engines must be in their initial state.
    assert!(scene.evil.guest.map_ram(0, RAM, true));
    scene.evil.bring_up();
    let mut channel = scene.evil.channel(ID);
    for offset in (0..userd::BYTES).step_by(4) {
        assert_eq!(scene.evil.guest.peek(channel.userd + offset), 0, "USERD {offset:#x}");
    }
    // If a copy engine had kept addresses, the launch alone would copy. The addresses must be 0, where nothing is
    // mapped.
    scene.contained("a launch with nothing set", |s| {
        let launch = [object(CE0), rig::driver::methods(4, 0x300, &[0x110])].concat();
        s.evil.submit(&mut channel, &launch);
        while !s.evil.is_done(&channel) && s.evil.faults.is_empty() {
            s.evil.guest.wait_msi();
            s.evil.service();
        }
    });
    assert_eq!(scene.evil.guest.rd(pgraph::INTR::OFFSET), 0);
    assert!(scene.card_instance(EVIL, ID).is_some());
    scene.finish();
}

#[test]
fn hole_17_engines_that_a_client_held_back_run_for_the_next() {
    let mut scene = Scene::new();
    scene.evil.guest.wr(pfifo::SCHED_DISABLE::OFFSET, u32::MAX);
    scene.fresh();
    let mut channel = scene.evil.channel(ID);
    scene.evil.submit(&mut channel, &[]);
    scene.evil.wait(&channel);
    scene.finish();
}

#[test]
fn hole_17_a_vm_finds_nothing_of_the_one_before() {
    let mut scene = Scene::new();
    // Remove the idle VM, whose memory is full of the secret. This memory is assigned to a new VM.
    let Scene { rig, evil, good, idle, .. } = scene;
    let before: Vec<u64> = {
        let mut state = rig.host.lock();
        let at = |mib: u64| state.vram_mut().place(super::IDLE, nvspec::addr::GuestVramAddr(mib * 2 * MIB), PAGE);
        (0..SHARE_BYTES / (2 * MIB)).filter_map(at).map(|at| at.card().expect("the chunk is on the card").0).collect()
    };
    let mut held = vec![0; PAGE as usize];
    super::card_vram(&rig, *before.last().unwrap(), &mut held);
    assert!(held.iter().all(|&byte| byte == SECRET), "the secret is in memory");
    idle.driver.guest.remove().unwrap();
    let heir = super::born(&rig, vram::TenantId(7));
    assert_eq!(super::finds(&heir.guest, SECRET), 0);
    // The secret must not be at the start of the removed VM's former chunks either, whether they are free or reused.
    for at in before {
        super::card_vram(&rig, at, &mut held);
        assert!(!held.windows(16).any(|run| run.iter().all(|&byte| byte == SECRET)), "{at:#x}");
    }
    scene = Scene {
        rig,
        evil,
        good,
        idle: super::Bystander { driver: heir, structures: Vec::new(), interrupts: 0 },
        bus: [0; 2],
    };
    scene.good.work("another VM's end");
}

/// Returns the attacker's registers that keep written values, and these values.
fn stored(scene: &mut Scene) -> Vec<(u32, u32)> {
    let registers = blocks().flat_map(|(_, _, _, info)| *info).filter(|reg| matches!(reg.access, Access::Rw));
    let offsets = registers.flat_map(|reg| (0..reg.count).map(|index| reg.offset + index * reg.stride));
    let states = STATE_RANGES.iter().flat_map(|&(_, base, end)| (base..end).step_by(0x400));
    // Exclude the unit reset register, because it would change the others, and the register that stops engines.
    let spared = [pmc::ENABLE::OFFSET, pfifo::SCHED_DISABLE::OFFSET];
    let offsets = offsets.chain(states).filter(|offset| !spared.contains(offset));
    offsets.collect::<Vec<_>>().into_iter().map(|offset| (offset, scene.evil.guest.rd(offset))).collect()
}
