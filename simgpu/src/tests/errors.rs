//! Tests errors and the driver's recovery from them.

use super::driver::{
    CE0, CE1, Driver, IMAGE_VA, M2MF, PAGE, ce_copy, m2mf_copy, methods, object, release, small, words,
};
use crate::{EngineId, Fault, FaultKind};
use card::{Aperture, Card};
use nvspec::falcon::Falcon;
use nvspec::regs::windows::pramin;
use nvspec::regs::{ce0, fecs, pbdma, pfifo, pgraph, pmc};

const A: u64 = 0x100_0000;
const B: u64 = 0x200_0000;
const SEM: u64 = 0x300_0000;

#[test]
fn fault_of_a_copy_stops_its_channel_and_engine_only() {
    let mut driver = Driver::new(&small());
    let (mut bad, mut good) = (driver.channel(1), driver.channel(2));
    driver.submit_runlist(&[1, 2]);
    driver.buffer(&bad, A, 2, 1);
    let partly = driver.buffer(&bad, B, 1, 2);
    driver.buffer(&good, A, 1, 3);
    let to = driver.buffer(&good, B, 1, 4);
    // Copy to a destination whose second page is unmapped.
    driver.push(&mut bad, &words(&[object(CE0), ce_copy(A, B, 2)]));
    driver.run_until_idle();
    let unit = 0x15;
    assert_eq!(driver.rd(pfifo::MMU_FAULT_ID::OFFSET), 1 << unit);
    assert_eq!(driver.rd(pfifo::FAULT_INST::at(unit)), (bad.instance >> 12) as u32);
    assert_eq!(driver.rd(pfifo::FAULT_VA_LO::at(unit)), (B + PAGE) as u32);
    // Expect reason 2, hub, write, client 1 (copy engine 0).
    assert_eq!(driver.rd(pfifo::FAULT_TYPE::at(unit)), 0x1c2);
    assert_eq!(driver.rd(pfifo::SCHED_ENABLE_ACK::OFFSET), 1 << 4);
    assert_eq!(driver.rd(pfifo::ENGINE_STATUS::at(4)) & 0x9000_007f, 0x9000_0001, "busy with channel 1");
    assert!(driver.holds(partly, 1, 1), "the data before the fault was written");

    driver.push(&mut good, &words(&[object(CE1), ce_copy(A, B, 1)]));
    driver.run_until_idle();
    assert!(driver.holds(to, 1, 3), "the other engine continues");

    // Recover like a driver: fix the mapping, acknowledge the fault, reset the engine, and restart the channel.
    driver.wr(pfifo::MMU_FAULT_ID::OFFSET, 1 << unit);
    driver.wr(pfifo::CHANNEL_STATE::at(1), 0x001f_0000);
    driver.wr(pfifo::SCHED_ENABLE_ACK::OFFSET, 1 << 4);
    let second = driver.buffer(&bad, B, 2, 7);
    driver.push(&mut good, &words(&[object(CE0), ce_copy(A, B, 1)]));
    driver.run_until_idle();
    assert_eq!(
        driver.rd(pfifo::ENGINE_STATUS::at(4)) & 0x9000_007f,
        0x9000_0001,
        "acknowledging does not clear the fault"
    );
    driver.reset_engine(pmc::ENABLE::CE0.mask());
    assert_eq!(driver.rd(pfifo::ENGINE_STATUS::at(4)), 0);
    driver.wr(pfifo::CHANNEL_STATE::at(1), 0x001f_0001);
    driver.push(&mut bad, &words(&[object(CE0), ce_copy(A, B, 2)]));
    driver.run_until_idle();
    assert!(driver.holds(second, 2, 1));
}

#[test]
fn disabled_engine_does_not_start_and_resumes_when_enabled() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(1);
    driver.buffer(&channel, A, 1, 1);
    let to = driver.buffer(&channel, B, 1, 2);
    driver.wr(pfifo::SCHED_DISABLE::OFFSET, u32::MAX);
    driver.push(&mut channel, &words(&[object(M2MF), m2mf_copy(A, B, PAGE as u32)]));
    driver.run_until_idle();
    assert!(driver.holds(to, 1, 2));
    driver.wr(pfifo::SCHED_DISABLE::OFFSET, 0);
    driver.run_until_idle();
    assert!(driver.holds(to, 1, 1));
}

#[test]
fn fault_of_a_push_buffer_is_the_hosts() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(3);
    driver.unmap(channel.space, super::driver::PUSH_VA);
    driver.push(&mut channel, &release(SEM, 1));
    driver.run_until_idle();
    assert_eq!(driver.rd(pfifo::MMU_FAULT_ID::OFFSET), 1 << 7);
    assert_eq!(driver.rd(pfifo::FAULT_TYPE::at(7)), 0x642);
    assert_eq!(driver.rd(pfifo::SCHED_ENABLE_ACK::OFFSET), 0, "no engine is affected");
}

#[test]
fn missing_context_image_is_ctxctls_fault() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(3);
    driver.unmap(channel.space, IMAGE_VA);
    // Binding an object does not require a context, but the object's methods do.
    driver.push(&mut channel, &object(M2MF));
    driver.run_until_idle();
    assert_eq!(driver.rd(pfifo::MMU_FAULT_ID::OFFSET), 0);
    driver.push(&mut channel, &methods(M2MF.0, 0x100, &[0]));
    driver.run_until_idle();
    assert_eq!(driver.rd(pfifo::MMU_FAULT_ID::OFFSET), 1);
    // Expect reason 2, hub, write, client 5 (CTXCTL).
    assert_eq!(driver.rd(pfifo::FAULT_TYPE::at(0)), 0x5c2);
    assert_eq!(driver.rd(pfifo::FAULT_VA_LO::at(0)), IMAGE_VA as u32);
}

#[test]
fn channel_without_pgraph_context_copies_and_faults_on_pgraph() {
    let mut driver = Driver::new(&small());
    let (mut copies, mut good) = (driver.channel(1), driver.channel(2));
    driver.submit_runlist(&[1, 2]);
    // Clear the context pointers, as nouveau does when it closes a channel.
    [0x210, 0x214].into_iter().for_each(|offset| driver.poke(copies.instance + offset, 0));
    for (channel, seed) in [(&copies, 1), (&good, 3)] {
        driver.buffer(channel, A, 1, seed);
    }
    let [to, other] = [&copies, &good].map(|channel| driver.buffer(channel, B, 1, 9));
    driver.push(&mut good, &words(&[object(M2MF), m2mf_copy(A, B, PAGE as u32)]));
    driver.push(&mut copies, &words(&[object(M2MF), object(CE0), ce_copy(A, B, 1)]));
    driver.run_until_idle();
    assert!(driver.holds(to, 1, 1) && driver.holds(other, 1, 3));
    assert_eq!(driver.rd(pfifo::MMU_FAULT_ID::OFFSET), 0);
    driver.buffer(&copies, B, 1, 9);
    driver.push(&mut copies, &words(&[m2mf_copy(A, B, PAGE as u32)]));
    driver.run_until_idle();
    // Expect reason 2, hub, client 5 (CTXCTL). The engine waits for the driver.
    assert_eq!(driver.rd(pfifo::MMU_FAULT_ID::OFFSET), 1);
    assert_eq!(driver.rd(pfifo::FAULT_TYPE::at(0)), 0x542);
    assert_eq!(driver.rd(pfifo::FAULT_INST::at(0)), (copies.instance >> 12) as u32);
    assert_eq!(driver.rd(pfifo::SCHED_ENABLE_ACK::OFFSET), 1);
}

#[test]
fn software_method_is_handed_to_the_driver_and_replaced_by_it() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(0x21);
    let at = driver.buffer(&channel, SEM, 1, 9);
    driver.push(&mut channel, &words(&[object((7, 0x1f_906e)), methods(7, 0x500, &[0x1234]), release(SEM, 1)]));
    for (method, data) in [(0x8007_0000, 0x1f_906e), (0x8007_0500, 0x1234)] {
        driver.run_until_idle();
        assert_eq!(driver.rd(pfifo::PBDMA_INTR_ID::OFFSET), 1);
        assert_eq!(driver.rd(pbdma::INTR_0::at(0)), 0x0080_0000);
        assert_eq!((driver.rd(pbdma::METHOD_0::at(0)), driver.rd(pbdma::DATA_0::at(0))), (method, data));
        assert_eq!(driver.rd(pbdma::CHANNEL::at(0)), 0x21);
        assert_ne!(driver.peek(at), 1);
        driver.wr(pbdma::METHOD_0::at(0), 0x8060_0008);
        driver.wr(pbdma::INTR_0::at(0), 0x0080_0000);
    }
    driver.run_until_idle();
    assert_eq!(driver.rd(pfifo::PBDMA_INTR_ID::OFFSET), 0);
    assert_eq!(driver.peek(at), 1);
}

#[test]
fn method_without_an_object_and_undefined_header_stop_the_pbdma() {
    for (words, bits) in
        [(methods(3, 0x100, &[0]), 0x0080_0000), (vec![0xc000_0000], 0x8000), (methods(0, 0x70, &[0]), 0x20_0000)]
    {
        let mut driver = Driver::new(&small());
        let mut channel = driver.only_channel(1);
        driver.push(&mut channel, &words);
        driver.run_until_idle();
        assert_eq!(driver.rd(pbdma::INTR_0::at(0)), bits);
        assert_eq!(driver.rd(pmc::INTR_0::OFFSET) & 0x100, 0x100);
    }
}

#[test]
fn illegal_method_and_class_trap_pgraph_until_cleared() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(1);
    let at = driver.buffer(&channel, SEM, 1, 9);
    let illegal = words(&[object((0, 0x9097)), methods(0, 0x1234, &[5]), release(SEM, 1)]);
    driver.push(&mut channel, &illegal);
    driver.run_until_idle();
    assert_eq!(driver.rd(pgraph::INTR::OFFSET), 0x10);
    assert_eq!((driver.rd(pgraph::TRAPPED_ADDRESS::OFFSET), driver.rd(pgraph::TRAPPED_DATA_LO::OFFSET)), (0x1234, 5));
    assert_eq!(driver.rd(pgraph::SUBCHANNEL_CLASS::at(0)), 0x9097);
    assert_eq!(driver.rd(fecs::CURRENT::OFFSET), 0x8000_0000 | (channel.instance >> 12) as u32);
    assert_eq!(driver.rd(pmc::INTR_0::OFFSET) & 0x1000, 0x1000);
    driver.wr(pgraph::INTR::OFFSET, 0x10);
    driver.wr(pgraph::CONTROL::OFFSET, 0x0001_0001);
    driver.advance(1_000_000);
    assert_eq!(driver.peek(at), 1);
    driver.push(&mut channel, &object((0, 0x4242)));
    driver.run_until_idle();
    assert_eq!(driver.rd(pgraph::INTR::OFFSET), 0x20);
}

#[test]
fn copy_engine_reports_unknown_method() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(1);
    driver.push(&mut channel, &words(&[object(CE0), methods(4, 0x700, &[9])]));
    driver.run_until_idle();
    assert_eq!(driver.rd(pmc::INTR_0::OFFSET) & 0x20, 0x20);
    assert_eq!(driver.rd(ce0::INTR::OFFSET), 0x40);
    let word = driver.rd(ce0::SCRATCH::at(0));
    // Decode the word as the driver's handler does.
    assert_eq!(((word >> 16) & 0x7ff) << 2, 0x700);
    assert_eq!((word >> 27) & 7, 4);
    assert_eq!(driver.rd(ce0::SCRATCH::at(1)), 9);
    driver.wr(ce0::INTR_CLEAR::OFFSET, 0x40);
    assert_eq!(driver.rd(pmc::INTR_0::OFFSET) & 0x20, 0);
}

#[test]
fn bad_signature_and_bad_gp_put_are_reported() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.channel(1);
    driver.poke(channel.instance + 0x10, 0xdead);
    driver.submit_runlist(&[1]);
    driver.push(&mut channel, &release(SEM, 1));
    driver.run_until_idle();
    assert_eq!(driver.rd(pbdma::INTR_0::at(0)), 0x8000_0000);

    let mut driver = Driver::new(&small());
    let channel = driver.only_channel(1);
    driver.ring_doorbell(&channel, 0x1000);
    driver.run_until_idle();
    assert_eq!(driver.rd(pbdma::INTR_0::at(0)), 0x1_0000);
}

#[test]
fn runlist_with_a_bad_channel_is_a_scheduler_error() {
    let mut driver = Driver::new(&small());
    let list = driver.vram(1);
    driver.poke(list, 0x80);
    driver.wr(pfifo::RUNLIST_BASE::OFFSET, (list >> 12) as u32);
    driver.wr(pfifo::RUNLIST::OFFSET, 0x01f0_0001);
    assert_eq!(driver.rd(pfifo::INTR::OFFSET) & 0x100, 0x100);
    driver.wr(pfifo::INTR::OFFSET, 0x100);
    assert_eq!(driver.rd(pfifo::INTR::OFFSET) & 0x100, 0);
}

#[test]
fn hung_engine_holds_its_channel_until_it_is_reset() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(1);
    driver.card.inject(Fault { engine: EngineId::Graph, kind: FaultKind::Hang, after: 1, count: 1 });
    driver.buffer(&channel, A, 1, 1);
    let (first, second) = (driver.buffer(&channel, B, 1, 2), driver.buffer(&channel, SEM, 1, 3));
    let copies = [object(M2MF), m2mf_copy(A, B, PAGE as u32), m2mf_copy(A, SEM, PAGE as u32)];
    driver.push(&mut channel, &words(&copies));
    driver.run_until_idle();
    assert!(driver.holds(first, 1, 1) && driver.holds(second, 1, 3));
    driver.wr(pfifo::CHANNEL_STATE::at(1), 0x001f_0000);
    driver.wr(pfifo::PREEMPT::OFFSET, 1);
    driver.run_until_idle();
    assert_eq!(driver.rd(pfifo::INTR::OFFSET) & 0x100, 0);
    driver.advance(1_000_000_000);
    assert_eq!(driver.rd(pfifo::PREEMPT::OFFSET), 0x0010_0001, "the preemption does not complete");
    assert_eq!((driver.rd(pfifo::INTR::OFFSET) & 0x100, driver.rd(pfifo::SCHED_ERROR_REASON::OFFSET)), (0x100, 0x0a));
    // Drivers check that the engine is busy and in the middle of a switch.
    assert_eq!(driver.rd(pfifo::ENGINE_STATUS::at(0)), 0x9004_1001);
    driver.wr(pfifo::INTR::OFFSET, 0x100);
    driver.advance(5_000_000_000);
    assert_eq!(driver.rd(pfifo::INTR::OFFSET) & 0x100, 0, "said once");
    driver.wr(pmc::ENABLE::OFFSET, !0x1000);
    driver.wr(pmc::ENABLE::OFFSET, u32::MAX);
    driver.run_until_idle();
    assert_eq!(driver.rd(pfifo::PREEMPT::OFFSET), 1);
    driver.start_engines();
    driver.wr(pfifo::CHANNEL_STATE::at(1), 0x001f_0001);
    driver.push(&mut channel, &words(&[object(M2MF), m2mf_copy(A, SEM, PAGE as u32)]));
    driver.run_until_idle();
    assert!(driver.holds(second, 1, 1));
}

#[test]
fn triggered_fault_removes_hung_channel_from_engine() {
    let mut driver = Driver::new(&small());
    let (mut hung, mut other) = (driver.channel(1), driver.channel(2));
    driver.submit_runlist(&[1, 2]);
    driver.card.inject(Fault { engine: EngineId::Copy1, kind: FaultKind::Hang, after: 0, count: 1 });
    for channel in [&hung, &other] {
        driver.buffer(channel, A, 1, 1);
    }
    driver.buffer(&hung, B, 1, 2);
    let to = driver.buffer(&other, B, 1, 3);
    let copy = words(&[object(CE1), ce_copy(A, B, 1)]);
    driver.push(&mut hung, &copy);
    driver.run_until_idle();
    driver.push(&mut other, &copy);
    driver.run_until_idle();
    driver.advance(10_000_000);
    driver.advance(1_000_000_000);
    assert_eq!(driver.rd(pfifo::SCHED_ERROR_REASON::OFFSET), 0x0a, "the other waits for the engine");
    driver.wr(pfifo::INTR::OFFSET, 0x100);
    driver.wr(pfifo::FAULT_TRIGGER::at(5), 0x116);
    assert_eq!(driver.rd(pfifo::MMU_FAULT_ID::OFFSET), 1 << 0x16);
    assert_eq!(driver.rd(pfifo::FAULT_INST::at(0x16)), (hung.instance >> 12) as u32);
    // Recover like a driver: disable the channel, reset the engine, and acknowledge the errors.
    driver.wr(pfifo::CHANNEL_STATE::at(1), 0x001f_0000);
    driver.wr(pmc::ENABLE::OFFSET, !0x80);
    driver.wr(pmc::ENABLE::OFFSET, u32::MAX);
    driver.start_engines();
    driver.submit_runlist(&[2]);
    driver.wr(pfifo::SCHED_ENABLE_ACK::OFFSET, 1 << 5);
    driver.advance(1_000_000);
    assert!(driver.holds(to, 1, 1));
}

#[test]
fn corrupted_copy_differs_and_dropped_interrupt_is_missing() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(1);
    driver.card.inject(Fault { engine: EngineId::Copy1, kind: FaultKind::Corrupt, after: 0, count: 1 });
    driver.card.inject(Fault { engine: EngineId::Copy1, kind: FaultKind::DropInterrupt, after: 0, count: 1 });
    driver.buffer(&channel, A, 1, 1);
    let to = driver.buffer(&channel, B, 1, 2);
    let copy = words(&[object(CE1), ce_copy(A, B, 1), methods(4, 0x20, &[0])]);
    driver.push(&mut channel, &copy);
    driver.run_until_idle();
    assert!(!driver.holds(to, 1, 1));
    assert_eq!(driver.rd(pfifo::NON_STALL_ID::OFFSET), 0);
    driver.push(&mut channel, &copy);
    driver.run_until_idle();
    assert!(driver.holds(to, 1, 1));
    assert_eq!(driver.rd(pfifo::NON_STALL_ID::OFFSET), 1 << 5);
}

#[test]
fn card_lost_from_bus_reads_ones_and_stays_dead_after_reset() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(1);
    driver.card.inject(Fault { engine: EngineId::Copy1, kind: FaultKind::Vanish, after: 1, count: 1 });
    driver.buffer(&channel, A, 1, 1);
    driver.buffer(&channel, B, 1, 2);
    let copy = words(&[object(CE1), ce_copy(A, B, 1)]);
    driver.push(&mut channel, &copy);
    driver.run_until_idle();
    assert_ne!(driver.rd(pmc::BOOT_0::OFFSET), u32::MAX);
    driver.push(&mut channel, &copy);
    driver.run_until_idle();
    let mut read = [0; 4];
    driver.card.aperture_read(Aperture::Bar1, 0, &mut read);
    assert_eq!((driver.rd(pmc::ENABLE::OFFSET), driver.rd(pramin::BASE), read), (u32::MAX, u32::MAX, [0xff; 4]));
    // A reset does not bring the card back either.
    driver.card.reset();
    assert_eq!(driver.rd(pmc::BOOT_0::OFFSET), u32::MAX);
}

#[test]
fn engine_without_firmware_lets_channels_wait() {
    let mut driver = Driver::new(&small());
    driver.wr(pmc::ENABLE::OFFSET, !0x40);
    driver.wr(pmc::ENABLE::OFFSET, u32::MAX);
    let mut channel = driver.only_channel(1);
    driver.buffer(&channel, A, 1, 1);
    let to = driver.buffer(&channel, B, 1, 2);
    driver.push(&mut channel, &words(&[object(CE0), ce_copy(A, B, 1)]));
    driver.run_until_idle();
    assert!(driver.holds(to, 1, 2));
    assert_eq!(driver.card.gpu().run_until_idle(), crate::fifo::Progress::Idle, "waits for an event, not a deadline");
    driver.wr(ce0::CPU_CONTROL::OFFSET, 2);
    driver.run_until_idle();
    assert!(driver.holds(to, 1, 2), "nothing was loaded");
    driver.load(Falcon::Copy0);
    driver.wr(ce0::CPU_CONTROL::OFFSET, 2);
    driver.run_until_idle();
    assert!(driver.holds(to, 1, 1));
}

#[test]
fn pgraph_works_once_both_of_its_falcons_have_programs() {
    let driver = Driver::new(&small());
    let ready = || {
        driver.wr(fecs::CPU_CONTROL::OFFSET, 2);
        fecs::MAILBOX::READY.is_set(driver.rd(fecs::MAILBOX::at(0)))
    };
    let graph = pmc::ENABLE::PGRAPH.mask();
    driver.wr(pmc::ENABLE::OFFSET, !graph);
    driver.wr(pmc::ENABLE::OFFSET, u32::MAX);
    driver.wr(fecs::MAILBOX::at(0), 0);
    assert!(!ready());
    driver.load(Falcon::Gpccs);
    assert!(!ready());
    driver.load(Falcon::Fecs);
    driver.wr(fecs::BOOT_VECTOR::OFFSET, 0x100);
    assert!(!ready(), "no code at the start address");
    driver.wr(fecs::BOOT_VECTOR::OFFSET, 0);
    assert!(ready());
}

#[test]
fn fecs_loads_and_unloads_contexts_for_the_driver() {
    let mut driver = Driver::new(&small());
    let channel = driver.channel(1);
    let instance = 0x8000_0000 | (channel.instance >> 12) as u32;
    assert_eq!(driver.rd(fecs::MAILBOX::at(1)), nvspec::chip::GF100.graph_context_bytes);
    driver.wr(fecs::MAILBOX_CLEAR::at(0), 0x8000_0000);
    driver.wr(fecs::COMMAND_DATA::OFFSET, instance);
    driver.wr(fecs::COMMAND::OFFSET, 1);
    assert_eq!(driver.rd(fecs::MAILBOX::at(0)) & 0x8000_0000, 0x8000_0000);
    assert_eq!(driver.rd(fecs::CURRENT::OFFSET), instance);
    driver.wr(fecs::NEXT::OFFSET, 0);
    driver.wr(fecs::INTR_SET::OFFSET, 0x100);
    assert_eq!(driver.rd(fecs::CURRENT::OFFSET), 0);
    driver.wr(fecs::COMMAND::OFFSET, 0x77);
    assert_eq!(driver.rd(pgraph::INTR::OFFSET), 0x8_0000);
    assert_eq!(driver.rd(fecs::UCODE_INTR::OFFSET), 1);
    driver.wr(fecs::UCODE_ERROR::at(0), 1);
    assert_eq!(driver.rd(fecs::UCODE_INTR::OFFSET), 0);
}
