//! Tests of the interrupt tree, MSI with rearming, INTx, and events that raise interrupts.

use super::mock::{Call, Rig};
use crate::backend::{InterruptLine, Place};
use crate::events::{CopyError, EngineError, GraphError, MmuFault, PbdmaError, SmError};
use nvspec::addr::{GpuVa, GuestVramAddr};
use nvspec::fifo::VirtualChannelId;

const PENDING: u32 = 0x000100;
const LINE_EN: u32 = 0x000140;
const REARM: u64 = 0x088704;
const FIFO: u32 = 1 << 8;

fn fault(unit: u32, va: u64) -> MmuFault {
    MmuFault {
        unit,
        instance: Some(Place::Vram(GuestVramAddr(0x12_3000))),
        va: GpuVa(va),
        reason: 2,
        client: 6,
        hub: true,
        write: true,
        gpc: 0,
    }
}

#[test]
fn a_message_is_sent_once_until_the_driver_rearms() {
    let mut rig = Rig::new();
    rig.enable_msi();
    rig.gpu.runlist_done(&mut rig.mock);
    rig.gpu.runlist_done(&mut rig.mock);
    assert_eq!(rig.mock.messages(), 1);
    assert_eq!(rig.rd(PENDING), FIFO);
    rig.wr8(REARM, 0xff);
    assert_eq!(rig.mock.messages(), 1, "a pending interrupt must be signalled again");
    rig.wr(0x002a00, 0x1000_0000);
    rig.wr8(REARM, 0xff);
    assert_eq!((rig.mock.messages(), rig.rd(PENDING)), (0, 0));
    rig.gpu.runlist_done(&mut rig.mock);
    assert_eq!(rig.mock.messages(), 1);
}

#[test]
fn the_drivers_interrupt_handler_loses_no_event() {
    let mut rig = Rig::new();
    rig.enable_msi();
    rig.wr(0x002628, 1);
    rig.gpu.runlist_done(&mut rig.mock);
    assert_eq!(rig.mock.messages(), 1);
    // Run the handler: mask the line, rearm MSI, read and acknowledge the interrupt, and unmask the line. Another event
    // occurs in the meantime.
    rig.wr(LINE_EN, 0);
    rig.rd(LINE_EN);
    rig.wr8(REARM, 0xff);
    assert_eq!(rig.rd(PENDING), FIFO);
    rig.wr(0x002a00, 0x1000_0000);
    rig.gpu.non_stall(4, &mut rig.mock);
    assert_eq!(rig.mock.messages(), 0, "the line is masked");
    rig.wr(LINE_EN, 1);
    assert_eq!(rig.mock.messages(), 1);
    assert_eq!(rig.rd(0x002100), 0x8000_0000);
}

#[test]
fn only_the_rearm_value_rearms() {
    let mut rig = Rig::new();
    rig.enable_msi();
    rig.gpu.runlist_done(&mut rig.mock);
    rig.mock.take();
    rig.wr8(REARM, 0x7f);
    rig.wr8(REARM + 1, 0xff);
    assert_eq!(rig.mock.messages(), 0);
}

#[test]
fn masks_hide_units_from_the_line() {
    let mut rig = Rig::new();
    rig.enable_msi();
    rig.wr(0x000640, !FIFO);
    rig.gpu.runlist_done(&mut rig.mock);
    assert_eq!((rig.rd(PENDING), rig.mock.messages()), (0, 0));
    rig.wr(0x000640, FIFO);
    assert_eq!((rig.rd(PENDING), rig.mock.messages()), (FIFO, 1));
}

#[test]
fn a_unit_that_is_not_enabled_does_not_assert() {
    let mut rig = Rig::new();
    rig.enable_msi();
    rig.wr(0x002140, 0);
    rig.gpu.runlist_done(&mut rig.mock);
    assert_eq!((rig.rd(0x002100), rig.rd(PENDING), rig.mock.messages()), (0x4000_0000, 0, 0));
    rig.wr(0x002140, 0x4000_0000);
    assert_eq!((rig.rd(PENDING), rig.mock.messages()), (FIFO, 1));
}

#[test]
fn intx_follows_the_level() {
    let mut rig = Rig::new();
    rig.wr(0x002140, u32::MAX);
    rig.wr(LINE_EN, 1);
    rig.gpu.runlist_done(&mut rig.mock);
    rig.gpu.runlist_done(&mut rig.mock);
    rig.wr(0x002a00, 0x1000_0000);
    assert_eq!(
        rig.mock.take(),
        [Call::Interrupt(InterruptLine::Intx(true)), Call::Interrupt(InterruptLine::Intx(false))]
    );
}

#[test]
fn intx_is_silent_while_forbidden_or_replaced_by_msi() {
    let mut rig = Rig::new();
    rig.wr(0x002140, u32::MAX);
    rig.wr(LINE_EN, 1);
    rig.config(4, &[0x06, 0x04]);
    rig.mock.take();
    rig.gpu.runlist_done(&mut rig.mock);
    assert_eq!(rig.mock.take(), []);
    assert_eq!(rig.gpu.pci().read32(4) >> 16 & 8, 8, "the interrupt must be visible in the status register");
    rig.config(4, &[0x06, 0x00]);
    assert_eq!(rig.mock.take(), [Call::Interrupt(InterruptLine::Intx(true))]);
    rig.config(0x6a, &[1]);
    assert_eq!(rig.mock.take(), [Call::Interrupt(InterruptLine::Intx(false)), Call::Interrupt(InterruptLine::Msi)]);
}

#[test]
fn non_stall_latches_per_engine_and_counts_when_enabled() {
    let mut rig = Rig::new();
    rig.enable_msi();
    rig.gpu.non_stall(5, &mut rig.mock);
    assert_eq!((rig.rd(0x0025a4), rig.mock.messages()), (0, 0), "the interrupt is not enabled");
    rig.wr(0x002628, 1);
    rig.gpu.non_stall(0, &mut rig.mock);
    assert_eq!((rig.rd(0x0025a4), rig.mock.messages()), (0x21, 1));
    assert_eq!((rig.rd(0x0025a8), rig.rd(0x0025bc)), (1, 1));
    rig.wr(0x0025a8, 1);
    assert_eq!((rig.rd(0x0025a4), rig.rd(0x002100)), (0x20, 0x8000_0000));
    rig.wr(0x0025bc, 1);
    assert_eq!(rig.rd(0x002100), 0);
    rig.gpu.non_stall(6, &mut rig.mock);
    assert_eq!(rig.rd(0x0025a4), 0, "the engine does not exist");
}

#[test]
fn fault_stays_in_registers_until_acknowledged() {
    let mut rig = Rig::new();
    rig.enable_msi();
    rig.gpu.mmu_fault(fault(7, 0x12_3456_7000), &mut rig.mock);
    assert_eq!(rig.mock.messages(), 1);
    assert_eq!((rig.rd(0x002100), rig.rd(0x00259c)), (0x1000_0000, 0x80));
    let unit = 0x002800 + 7 * 0x10;
    assert_eq!(
        [rig.rd(unit), rig.rd(unit + 4), rig.rd(unit + 8), rig.rd(unit + 12)],
        [0x123, 0x3456_7000, 0x12, 0x0000_06c2]
    );
    rig.wr(0x00259c, 0x80);
    assert_eq!((rig.rd(0x002100), rig.rd(0x00259c), rig.rd(unit)), (0, 0, 0x123));
}

#[test]
fn further_faults_of_a_unit_wait_their_turn() {
    let mut rig = Rig::new();
    rig.enable_msi();
    for page in 1..=3 {
        rig.gpu.mmu_fault(fault(0, page << 12), &mut rig.mock);
    }
    rig.gpu.mmu_fault(fault(21, 0x9000), &mut rig.mock);
    let mut seen = Vec::new();
    while rig.rd(0x00259c) & 1 != 0 {
        seen.push(rig.rd(0x002804));
        rig.wr(0x00259c, 1);
    }
    assert_eq!(seen, [0x1000, 0x2000, 0x3000]);
    assert_eq!(rig.rd(0x00259c), 1 << 21, "the fault of the other unit must remain");
}

#[test]
fn a_driver_can_ask_for_a_fault_to_recover_an_engine() {
    let mut rig = Rig::new();
    rig.enable_msi();
    rig.wr(0x002a30, 0x100);
    assert_eq!((rig.rd(0x00259c), rig.rd(0x002a30), rig.mock.messages()), (1, 0x100, 1));
    rig.mask(0x002a30, 0x100, 0);
    rig.wr(0x00259c, 1);
    assert_eq!((rig.rd(0x00259c), rig.rd(0x002a30)), (0, 0));
}

#[test]
fn faults_without_end_are_dropped_and_counted() {
    let mut rig = Rig::new();
    for page in 0..1000 {
        rig.gpu.mmu_fault(fault(0, page << 12), &mut rig.mock);
    }
    rig.gpu.mmu_fault(fault(32, 0), &mut rig.mock);
    let inspect = rig.gpu.inspect();
    let get = |name| inspect.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_str());
    assert_eq!(get("mmu_faults_shown"), Some("1"));
    assert_eq!(get("mmu_faults_waiting"), Some("128"));
    assert_eq!(get("mmu_faults_dropped"), Some("871"));
}

#[test]
fn a_pbdma_error_is_shown_and_acknowledged() {
    let mut rig = Rig::new();
    rig.enable_msi();
    let error =
        |data| PbdmaError { unit: 1, channel: VirtualChannelId(6), intr: 1 << 23, subchannel: 7, method: 0x500, data };
    rig.gpu.pbdma_error(error(1), &mut rig.mock);
    assert_eq!(rig.rd(0x002100), 0, "the unit's interrupt is disabled");
    rig.wr(0x04210c, 0x0fff_feff);
    rig.gpu.pbdma_error(error(2), &mut rig.mock);
    assert_eq!((rig.rd(0x002100), rig.rd(0x0025a0)), (0x2000_0000, 2));
    assert_eq!([rig.rd(0x042108), rig.rd(0x0420c0), rig.rd(0x0420c4), rig.rd(0x042120)], [1 << 23, 0x8007_0500, 1, 6]);
    rig.wr(0x0420c0, 0x8060_0008);
    rig.wr(0x042108, 1 << 23);
    assert_eq!(rig.rd(0x0420c4), 2, "the next error must be visible");
    rig.wr(0x042108, 1 << 23);
    rig.wr(0x0025a0, 2);
    assert_eq!((rig.rd(0x002100), rig.rd(0x0025a0)), (0, 0));
}

#[test]
fn a_graph_error_names_its_channel_method_and_class() {
    let mut rig = Rig::new();
    rig.enable_msi();
    rig.wr(0x40013c, 0xffff_ffff);
    let error = GraphError {
        intr: 0x10,
        code: 0,
        instance: Some(Place::Vram(GuestVramAddr(0x45_6000))),
        subchannel: 2,
        class: 0x9039,
        method: 0x1ffc,
        data: 0xabcd,
        trap: 0,
        sm: None,
    };
    rig.gpu.engine_error(EngineError::Graph(error), &mut rig.mock);
    assert_eq!((rig.rd(PENDING), rig.mock.messages()), (1 << 12, 1));
    assert_eq!(
        [rig.rd(0x400100), rig.rd(0x400704), rig.rd(0x400708), rig.rd(0x404208), rig.rd(0x409b00)],
        [0x10, 0x2_1ffc, 0xabcd, 0x9039, 0x8000_0456]
    );
    rig.wr(0x400100, 0x10);
    rig.wr(0x400500, 0x0001_0001);
    assert_eq!((rig.rd(0x400100), rig.rd(PENDING)), (0, 0));
}

#[test]
fn a_warps_error_is_shown_where_it_happened_and_cleared_by_ones() {
    let mut rig = Rig::new();
    rig.wr(0x40013c, 0xffff_ffff);
    let mut error = GraphError {
        intr: 1 << 21,
        code: 0,
        instance: Some(Place::Vram(GuestVramAddr(0x45_6000))),
        subchannel: 1,
        class: 0x90c0,
        method: 0x368,
        data: 0x1000,
        trap: 1 << 24,
        sm: Some(SmError { gpc: 0, tpc: 2, warp: 0xf, global: 0x5 }),
    };
    rig.gpu.engine_error(EngineError::Graph(error), &mut rig.mock);
    // If the guest's GPU does not have the unit, the error is shown for the first unit.
    error.sm = Some(SmError { gpc: 9, tpc: 7, warp: 0x9, global: 0 });
    rig.gpu.engine_error(EngineError::Graph(error), &mut rig.mock);
    assert_eq!([rig.rd(0x400100), rig.rd(0x400108), rig.rd(0x400118)], [1 << 21, 1 << 24, 1]);
    assert_eq!([rig.rd(0x502c90), rig.rd(0x505508), rig.rd(0x505648), rig.rd(0x505650)], [4 << 16, 2, 0xf, 5]);
    for (register, value) in [(0x505648, 0), (0x505650, 5), (0x505508, 2), (0x502c90, 4 << 16), (0x400118, 1)] {
        rig.wr(register, value);
    }
    assert_eq!([0x502c90, 0x505508, 0x505648, 0x505650, 0x400118].map(|register| rig.rd(register)), [0; 5]);
    rig.wr(0x400108, 1 << 24);
    rig.wr(0x400100, 1 << 21);
    assert_eq!(
        [rig.rd(0x400100), rig.rd(0x400118), rig.rd(0x502c90)],
        [1 << 21, 1, 1 << 16],
        "the next error must be visible"
    );
    assert_eq!([rig.rd(0x504508), rig.rd(0x504648)], [2, 9]);
}

#[test]
fn a_copy_engines_error_is_routed_when_its_firmware_runs() {
    let mut rig = Rig::new();
    rig.enable_msi();
    let error = EngineError::Copy(CopyError {
        engine: 1,
        intr: 0x40,
        instance: Some(Place::Vram(GuestVramAddr(0x7000))),
        report: 0x20c1_0001,
        data: 0xabcd,
    });
    rig.gpu.engine_error(error, &mut rig.mock);
    assert_eq!(rig.rd(PENDING), 0);
    rig.wr(0x105100, 2);
    rig.gpu.engine_error(error, &mut rig.mock);
    assert_eq!(rig.rd(PENDING), 1 << 6);
    let routed = rig.rd(0x10501c);
    assert_eq!(rig.rd(0x105008) & routed & !(routed >> 16), 0x40, "the driver must see a routed interrupt");
    assert_eq!(rig.rd(0x105050) & 0x0fff_ffff, 7);
    // Decode the report as the driver does: the error code, the method and its data.
    let report = rig.rd(0x105040);
    assert_eq!((report & 0xffff, (report >> 16 & 0x7ff) << 2, report >> 27 & 7), (1, 0x304, 4));
    assert_eq!((rig.rd(0x105044), rig.rd(0x104040)), (0xabcd, 0), "the other engine must have no report");
    rig.wr(0x105004, 0x40);
    assert_eq!(rig.rd(PENDING), 0);
}

#[test]
fn the_alarm_rings_at_its_time() {
    let mut rig = Rig::new();
    rig.enable_msi();
    rig.wr(0x009410, 3);
    rig.wr(0x009400, 0xffff_f000);
    assert_eq!(rig.gpu.alarm_at(), None);
    // The alarm is due after the low dword of the clock has wrapped.
    rig.wr(0x009420, 0x0000_1000);
    assert_eq!(rig.gpu.alarm_at(), None, "the alarm interrupt is disabled");
    rig.wr(0x009140, 1);
    let at = rig.gpu.alarm_at().expect("the alarm is set");
    assert!(at > rig.mock.now && at < rig.mock.now + 0x3000);
    rig.gpu.tick(&mut rig.mock);
    assert_eq!(rig.mock.messages(), 0);
    rig.mock.now = at;
    rig.gpu.tick(&mut rig.mock);
    assert_eq!((rig.rd(PENDING), rig.mock.messages(), rig.rd(0x009100)), (1 << 20, 1, 1));
    assert_eq!(rig.rd(0x009410), 4);
    rig.wr(0x009100, 1);
    assert_eq!((rig.rd(PENDING), rig.gpu.alarm_at()), (0, None));
}
