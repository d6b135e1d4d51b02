//! Tests of hung work and rejected channels: the values that guest drivers read, and their reactions. The sequences,
//! offsets and bits are those of the drivers in Linux 6.1 and 6.12.

use super::mock::{Call, Rig};
use crate::backend::{EngineStatus, Place};
use crate::events::MmuFault;
use nvspec::addr::{GpuVa, GuestVramAddr};
use nvspec::fifo::VirtualChannelId;
use nvspec::mmu::fault;

const SCHED_ERROR: u32 = 0x100;
/// Number of each engine, its bits in the unit enable register, and its fault unit.
const UNITS: [(u32, u32, u32); 3] = [(0, 0x1000, 0x00), (4, 0x40, 0x15), (5, 0x80, 0x16)];

fn instance(channel: u32) -> u32 {
    0x100 + channel
}

/// Creates a guest with an initialized driver and channels 5 and 6. Channel 6 is on all engines that would otherwise be
/// idle.
fn rig() -> Rig {
    let mut rig = Rig::new();
    rig.wr(0x000200, u32::MAX);
    for channel in [5, 6] {
        rig.wr(0x003000 + channel * 8, 0xc000_0000 | instance(channel));
        rig.wr(0x003004 + channel * 8, 0x001f_0001);
    }
    rig.mock.engine = EngineStatus { channel: Some(VirtualChannelId(6)), busy: true };
    rig.enable_msi();
    rig
}

fn hang(rig: &mut Rig, engine: u32, channel: u8) {
    rig.gpu.ctxsw_timeout(engine, VirtualChannelId(channel), &mut rig.mock);
}

/// Returns the pending interrupt causes that the driver has enabled.
fn causes(rig: &mut Rig) -> u32 {
    rig.rd(0x002100) & rig.rd(0x002140)
}

fn unit_enable(engine: u32) -> u32 {
    UNITS.iter().find(|(number, ..)| *number == engine).expect("the engine does not exist").1
}

/// Resets an engine as all drivers do.
fn reset_engine(rig: &mut Rig, engine: u32) {
    rig.mask(0x000200, unit_enable(engine), 0);
    rig.mask(0x000200, unit_enable(engine), unit_enable(engine));
}

fn submit(rig: &mut Rig) {
    rig.wr(0x002270, 0x200);
    rig.wr(0x002274, 0x01f0_0001);
    rig.gpu.runlist_done(&mut rig.mock);
    assert_eq!(rig.rd(0x00227c) & 0x0010_0000, 0);
    rig.wr(0x002a00, 0x1000_0000);
}

/// Executes the interrupt handler of Linux 6.1, which stops the channels of hung engines. Returns these channels and
/// engines.
fn handler_6_1(rig: &mut Rig) -> Vec<(u32, u32)> {
    assert_eq!(causes(rig), SCHED_ERROR);
    assert_eq!(rig.rd(0x00254c) & 0xff, 0x0a);
    let mut found = Vec::new();
    for engine in 0..6 {
        let status = rig.rd(0x002640 + engine * 4);
        let channel = status & 0x7f;
        if status & 0x8004_1000 == 0x8004_1000 {
            rig.mask(0x003004 + channel * 8, 1, 0);
            found.push((engine, channel));
        }
    }
    rig.wr(0x002100, SCHED_ERROR);
    found
}

/// Executes the work item that the handler queues for the hung `engines`.
fn work_6_1(rig: &mut Rig, engines: &[u32]) {
    let mask = engines.iter().fold(0, |mask, engine| mask | 1 << engine);
    rig.mask(0x002630, mask, mask);
    for &engine in engines {
        reset_engine(rig, engine);
    }
    submit(rig);
    rig.wr(0x00262c, mask);
    rig.mask(0x002630, mask, 0);
}

/// Returns the channel that Linux 6.12 finds on an engine, and a flag that is true if a context switch is in progress.
fn engine_6_12(rig: &mut Rig, engine: u32) -> Option<(u32, bool)> {
    let status = rig.rd(0x002640 + engine * 4);
    (status & 0x1000_0000 != 0).then_some((status & 0x7f, status & 0x5000 != 0))
}

/// Executes the scheduler error handler of Linux 6.12, which triggers a fault on each hung engine. Returns these
/// engines.
fn handler_6_12(rig: &mut Rig) -> Vec<u32> {
    assert_eq!(causes(rig), SCHED_ERROR);
    assert_eq!(rig.rd(0x00254c) & 0xff, 0x0a);
    let switching: Vec<u32> = UNITS
        .iter()
        .filter_map(|unit| engine_6_12(rig, unit.0).filter(|(_, switching)| *switching))
        .map(|on| on.0)
        .collect();
    rig.mask(0x002630, u32::MAX, u32::MAX);
    let mut triggered = Vec::new();
    for channel in switching {
        for (engine, _, unit) in UNITS {
            if engine_6_12(rig, engine).is_some_and(|(on, _)| on == channel) {
                rig.mask(0x002140, SCHED_ERROR, 0);
                rig.wr(0x002100, SCHED_ERROR);
                rig.wr(0x002a30 + engine * 4, 0x100 | unit);
                triggered.push(engine);
            }
        }
    }
    rig.mask(0x002630, u32::MAX, 0);
    rig.wr(0x002100, SCHED_ERROR);
    triggered
}

/// Executes the MMU fault handler of Linux 6.12. Returns the channels that its work item must kill.
fn faults_6_12(rig: &mut Rig) -> Vec<u32> {
    assert_eq!(causes(rig), 0x1000_0000);
    let mut kill = Vec::new();
    let pending = rig.rd(0x00259c);
    for unit in (0..32).filter(|unit| pending & 1 << unit != 0) {
        let engine = UNITS.iter().find(|(.., number)| *number == unit).map(|(engine, ..)| *engine);
        let faulting = rig.rd(0x002800 + unit * 16);
        let asked = engine.is_some_and(|engine| rig.rd(0x002a30 + engine * 4) & 0x100 != 0);
        if let (Some(engine), true) = (engine, asked) {
            rig.mask(0x002a30 + engine * 4, 0x100, 0);
            rig.mask(0x002140, SCHED_ERROR, SCHED_ERROR);
            kill.extend(engine_6_12(rig, engine).map(|(channel, _)| channel));
        } else {
            kill.extend((0..128).filter(|&channel| instance(channel) == faulting));
        }
        rig.wr(0x00259c, 1 << unit);
    }
    if !kill.is_empty() {
        rig.mask(0x002630, u32::MAX, u32::MAX);
    }
    kill
}

/// Executes the work item of Linux 6.12: removes channels, resets the engines that they occupy, and acknowledges the
/// errors.
fn work_6_12(rig: &mut Rig, kill: &[u32]) {
    for channel in kill {
        rig.mask(0x003004 + channel * 8, 1, 0);
    }
    for (engine, ..) in UNITS {
        if engine_6_12(rig, engine).is_some_and(|(channel, _)| kill.contains(&channel)) {
            reset_engine(rig, engine);
        }
    }
    rig.wr(0x002270, 0x200);
    rig.wr(0x002274, 0x01f0_0001);
    let stopped = rig.rd(0x00262c);
    rig.wr(0x00262c, stopped);
    rig.mask(0x002630, u32::MAX, 0);
    rig.gpu.runlist_done(&mut rig.mock);
    assert_eq!(rig.rd(0x00227c) & 0x0010_0000, 0);
}

/// Removes the recorded calls to the mediator, and returns all except interrupts.
fn asked(rig: &mut Rig) -> Vec<Call> {
    rig.mock.take().into_iter().filter(|call| !matches!(call, Call::Interrupt(_))).collect()
}

fn list() -> Call {
    Call::Runlist(Place::Vram(GuestVramAddr(0x20_0000)), 1)
}

#[test]
fn linux_6_1_kills_the_channel_that_hangs_and_no_other() {
    for (engine, ..) in UNITS {
        let mut rig = rig();
        hang(&mut rig, engine, 5);
        assert_eq!(rig.mock.messages(), 1);
        assert_eq!(handler_6_1(&mut rig), [(engine, 5)]);
        assert_eq!(causes(&mut rig), 0);
        work_6_1(&mut rig, &[engine]);
        let mask = 1 << engine;
        assert_eq!(
            asked(&mut rig),
            [
                Call::Enable(5, false),
                Call::Block(mask, true),
                Call::ResetEngine(engine),
                list(),
                Call::Block(mask, false)
            ]
        );
        assert_eq!(rig.rd(0x002640 + engine * 4), 0x9000_0006, "the other channel must be on the engine again");
        assert_eq!((rig.rd(0x003004 + 5 * 8) & 1, rig.rd(0x003004 + 6 * 8) & 1), (0, 1));
        assert_eq!(rig.denied(), [""; 0]);
    }
}

#[test]
fn linux_6_12_kills_the_channel_that_hangs_and_no_other() {
    for (engine, ..) in UNITS {
        let mut rig = rig();
        hang(&mut rig, engine, 5);
        assert_eq!(rig.mock.messages(), 1);
        assert_eq!(handler_6_12(&mut rig), [engine]);
        let kill = faults_6_12(&mut rig);
        assert_eq!(kill, [5]);
        assert_eq!(causes(&mut rig), 0);
        rig.mock.take();
        work_6_12(&mut rig, &kill);
        assert_eq!(
            asked(&mut rig),
            [Call::Enable(5, false), Call::ResetEngine(engine), list(), Call::Block(0x3f, false)]
        );
        assert_eq!(rig.rd(0x002640 + engine * 4), 0x9000_0006);
        assert_eq!((rig.rd(0x003004 + 5 * 8) & 1, rig.rd(0x003004 + 6 * 8) & 1), (0, 1));
        assert_eq!((causes(&mut rig), rig.rd(0x002140) & SCHED_ERROR), (0x4000_0000, SCHED_ERROR));
        assert_eq!(rig.denied(), [""; 0]);
    }
}

#[test]
fn driver_requested_fault_names_channel_on_engine() {
    let mut rig = rig();
    hang(&mut rig, 4, 5);
    rig.wr(0x002a30 + 4 * 4, 0x115);
    rig.wr(0x002a30 + 5 * 4, 0x116);
    assert_eq!(rig.rd(0x00259c), 1 << 0x15 | 1 << 0x16);
    assert_eq!((rig.rd(0x002800 + 0x15 * 16), rig.rd(0x002800 + 0x16 * 16)), (instance(5), instance(6)));
}

#[test]
fn hangs_are_shown_one_at_a_time_and_none_is_lost() {
    let mut rig = rig();
    hang(&mut rig, 0, 5);
    hang(&mut rig, 0, 5);
    hang(&mut rig, 5, 6);
    hang(&mut rig, 5, 6);
    assert_eq!(handler_6_1(&mut rig), [(0, 5)]);
    assert_eq!(causes(&mut rig), 0, "the error must be reported only once");
    work_6_1(&mut rig, &[0]);
    assert_eq!(handler_6_1(&mut rig), [(5, 6)]);
    work_6_1(&mut rig, &[5]);
    assert_eq!(causes(&mut rig), 0);

    // The driver resets the engine before it acknowledges the error. The acknowledgement must not remove the next
    // error.
    hang(&mut rig, 0, 5);
    hang(&mut rig, 4, 6);
    reset_engine(&mut rig, 0);
    assert_eq!(rig.rd(0x002650), 0x9000_0006, "the hang must not be visible yet");
    rig.wr(0x002100, SCHED_ERROR);
    assert_eq!((causes(&mut rig), rig.rd(0x002650)), (SCHED_ERROR, 0x9004_1006));
}

#[test]
fn a_hang_ends_with_its_channel() {
    let mut rig = rig();
    hang(&mut rig, 0, 5);
    hang(&mut rig, 4, 6);
    assert_eq!(rig.rd(0x002640), 0x9004_1005);
    rig.wr(0x002100, SCHED_ERROR);
    rig.wr(0x003000 + 5 * 8, 0);
    assert_eq!((rig.rd(0x002640), causes(&mut rig)), (0x9000_0006, SCHED_ERROR), "the next hang must be visible");
    rig.wr(0x002100, SCHED_ERROR);
    // A channel with a new instance block is a new channel.
    rig.wr(0x003000 + 6 * 8, 0xc000_0099);
    assert_eq!(rig.rd(0x002650), 0x9000_0006);

    // Unbinding a channel removes its queued hangs.
    hang(&mut rig, 0, 6);
    rig.wr(0x003000 + 5 * 8, 0xc000_0105);
    hang(&mut rig, 4, 5);
    rig.wr(0x003000 + 5 * 8, 0);
    rig.wr(0x002100, SCHED_ERROR);
    reset_engine(&mut rig, 0);
    assert_eq!((causes(&mut rig), rig.rd(0x002650)), (0, 0x9000_0006));
}

#[test]
fn hang_of_unknown_channel_or_engine_is_not_reported() {
    let mut rig = rig();
    for (engine, channel) in [(0, 7), (6, 5), (u32::MAX, 5), (0, 128), (0, 133), (0, 255)] {
        hang(&mut rig, engine, channel);
    }
    assert_eq!((causes(&mut rig), rig.mock.messages()), (0, 0));
}

#[test]
fn reset_of_the_host_unit_ends_all_hangs() {
    let mut rig = rig();
    hang(&mut rig, 0, 5);
    hang(&mut rig, 4, 6);
    rig.mask(0x000200, 0x100, 0);
    rig.mask(0x000200, 0x100, 0x100);
    assert_eq!((rig.rd(0x002100), rig.rd(0x002640)), (0, 0x9000_0006));
    rig.wr(0x003000 + 6 * 8, 0xc000_0106);
    rig.wr(0x002100, SCHED_ERROR);
    assert_eq!(rig.rd(0x002100), 0);
}

#[test]
fn an_unacknowledged_scheduler_error_keeps_the_reason() {
    let mut rig = rig();
    rig.gpu.sched_error(0x05, &mut rig.mock);
    hang(&mut rig, 0, 5);
    assert_eq!((rig.rd(0x00254c), rig.rd(0x002640)), (0x05, 0x9000_0006));
    rig.wr(0x002100, SCHED_ERROR);
    assert_eq!((rig.rd(0x00254c), causes(&mut rig)), (0x0a, SCHED_ERROR));
    rig.gpu.sched_error(0x05, &mut rig.mock);
    assert_eq!(rig.rd(0x00254c), 0x0a);
}

/// Returns the fault that the mediator reports for a channel that the host could not bind.
fn refusal(channel: u32) -> MmuFault {
    MmuFault {
        unit: fault::unit::FIFO,
        instance: Some(Place::Vram(GuestVramAddr(u64::from(instance(channel)) << 12))),
        va: GpuVa(0),
        reason: fault::UNBOUND_INST,
        client: fault::hub_client::FIFO,
        hub: true,
        write: false,
        gpc: 0,
    }
}

#[test]
fn linux_6_1_kills_a_channel_that_is_refused() {
    let mut rig = rig();
    rig.gpu.mmu_fault(refusal(5), &mut rig.mock);
    assert_eq!((causes(&mut rig), rig.rd(0x00259c)), (0x1000_0000, 1 << 7));
    let words: Vec<u32> = (0..4).map(|word| rig.rd(0x002800 + 7 * 16 + word * 4)).collect();
    assert_eq!(
        words,
        [instance(5), 0, 0, 0x0000_0644],
        "the fault must name the host client in the hub, and report that no channel is bound"
    );
    rig.mock.take();
    // The fault belongs to the host unit, so no engine is reset.
    rig.mask(0x003004 + 5 * 8, 1, 0);
    rig.wr(0x00259c, 1 << 7);
    work_6_1(&mut rig, &[]);
    assert_eq!(asked(&mut rig), [Call::Enable(5, false), list()]);
    assert_eq!(causes(&mut rig), 0);
}

#[test]
fn linux_6_12_kills_a_channel_that_is_refused() {
    let mut rig = rig();
    rig.gpu.mmu_fault(refusal(5), &mut rig.mock);
    let kill = faults_6_12(&mut rig);
    assert_eq!(kill, [5]);
    work_6_12(&mut rig, &kill);
    assert_eq!(
        asked(&mut rig),
        [Call::Block(0x3f, true), Call::Enable(5, false), list(), Call::Block(0x3f, false)],
        "no engine must be reset"
    );
}
