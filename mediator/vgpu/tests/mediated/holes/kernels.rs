//! Kernels that attempt forbidden accesses, next to a neighbour on the same engine.

use super::{A, B, Channel, Driver, ID, Scene, object};
use nvspec::class::compute90c0::{self as class, warp_error};
use nvspec::regs::{fecs, pgraph, sm_trap};
use rig::driver::methods;

const COMPUTE: (u32, u32) = (1, 0x90c0);

/// Launches a kernel with a single thread on a channel.
fn launch(evil: &mut Driver, channel: &mut Channel, source: &str) {
    let program = sm20::assemble(source).expect("the kernel can be assembled");
    let code = evil.buffer(channel, A, 1, 0);
    evil.guest.vram_write(code, &program.bytes());
    let kernel = &program.kernels[0];
    let words = [
        object(COMPUTE),
        methods(1, class::CODE_ADDRESS_HIGH, &[0, A as u32]),
        methods(1, class::PROGRAM_START, &[kernel.entry_offset]),
        methods(1, class::REGISTERS, &[kernel.registers.max(4)]),
        methods(1, class::BLOCK_YX, &[1 << 16 | 1, 1]),
        methods(1, class::GRID_YX, &[1 << 16 | 1, 1]),
        methods(1, class::LAUNCH, &[0]),
    ];
    evil.submit(channel, &words.concat());
}

#[test]
fn warp_error_is_reported_to_its_guest_and_channel_continues() {
    let mut scene = Scene::new();
    let cases = [
        (".quad 0xffffffffffffffff", warp_error::ILLEGAL_ENCODING),
        ("MOV32I R0, 0x2; LD R1, [R0]", warp_error::MISALIGNED_ADDRESS),
        ("LDS R0, [0x100]", warp_error::OUT_OF_RANGE_ADDRESS),
        ("BRK", warp_error::EMPTY_STACK),
    ];
    for round in 0..4 {
        for (body, expected) in cases {
            let evil = &mut scene.evil;
            let mut channel = evil.channel(ID);
            launch(evil, &mut channel, &format!(".kernel k\n{body}\nEXIT"));
            while evil.guest.rd(pgraph::INTR::OFFSET) == 0 {
                evil.guest.wait_msi();
                evil.service();
            }
            let shown = [
                pgraph::INTR::OFFSET,
                pgraph::TRAP::OFFSET,
                pgraph::TRAP_GPCS::OFFSET,
                sm_trap::gpc(0),
                sm_trap::tpc(0, 0),
                sm_trap::warp_error(0, 0),
                fecs::CURRENT::OFFSET,
            ];
            let current = fecs::CURRENT::VALID.mask() | (channel.instance >> 12) as u32;
            let trap = [pgraph::INTR::TRAP.mask(), pgraph::TRAP::GPC.mask(), 1, 1 << 16, 2, expected, current];
            assert_eq!(shown.map(|register| evil.guest.rd(register)), trap, "round {round}: {body}");
            scene.check(body);
            let evil = &mut scene.evil;
            for register in shown.into_iter().rev().skip(2) {
                evil.guest.wr(register, u32::MAX);
            }
            evil.guest.wr(sm_trap::warp_error(0, 0), 0);
            assert_eq!(shown[..6].iter().map(|register| evil.guest.rd(*register)).sum::<u32>(), 0, "{body}");
            evil.wait(&channel);
            evil.unbind(&channel);
            evil.rewind();
        }
    }
    scene.finish();
}

#[test]
fn kernel_access_to_unmapped_memory_faults_its_channel() {
    let mut scene = Scene::new();
    for access in ["LD R1, [R0]", "ST [R0], R1"] {
        let mut channel = scene.evil.channel(ID);
        launch(&mut scene.evil, &mut channel, &format!(".kernel k\nMOV32I R0, {B:#x}\n{access}\nEXIT"));
        let fault = scene.evil.wait_fault();
        assert_eq!((fault.instance, fault.va), (channel.instance, B), "{access}");
        scene.check(access);
        scene.evil.unbind(&channel);
        scene.evil.rewind();
    }
    scene.finish();
}

#[test]
fn kernel_without_end_goes_with_its_channel() {
    let mut scene = Scene::new();
    for round in 0..3 {
        let mut channel = scene.evil.channel(ID);
        launch(&mut scene.evil, &mut channel, ".kernel k\nhere: BRA here");
        scene.evil.unbind(&channel);
        scene.check(&format!("round {round}"));
        scene.evil.faults.clear();
        scene.evil.rewind();
    }
    scene.finish();
}
