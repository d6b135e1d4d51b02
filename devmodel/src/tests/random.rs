//! Executes arbitrary sequences of guest writes. Checks that nothing panics, that no request to the mediator exceeds
//! the guest's bounds, and that the invariants hold.

use super::mock::{Call, Rig, VRAM};
use crate::VGpu;
use crate::backend::{Aperture, Place};
use crate::events::{MmuFault, PbdmaError};
use crate::policy::REGISTERS;
use nvspec::addr::GpuVa;
use nvspec::fifo::VirtualChannelId;
use nvspec::instance::INSTANCE_BYTES;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Op {
    Read(u64, usize),
    Write(u64, Vec<u8>),
    /// Writes a register: its number in the table, its array index, and the value.
    Register(usize, u32, u32),
    Config(u64, Vec<u8>),
    Aperture(bool, u64, Vec<u8>),
    NonStall(u32),
    Fault(u32, u64),
    Hang(u32, u8),
    Pbdma(u32, u8, u32),
    RunlistDone,
    Tick(u64),
    Reset,
    /// Saves and restores the vGPU.
    Restore,
}

fn offset() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0..0x0100_0000u64,
        2 => 0x70_0000..0x80_0010u64,
        2 => 0x2000..0x4000u64,
        1 => any::<u64>(),
    ]
}

/// Generates arbitrary values, and values that decode to valid requests (valid bits with small or very large
/// addresses).
fn value() -> impl Strategy<Value = u32> {
    prop_oneof![
        any::<u32>(),
        (0..0x2000u32).prop_map(|page| 0xc000_0000 | page),
        (0..4u32, 0..0x1010u32).prop_map(|(target, page)| 0x8000_0000 | target << 28 | page),
        Just(u32::MAX),
        Just(0),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..17);
    prop_oneof![
        4 => (offset(), 0..17usize).prop_map(|(at, len)| Op::Read(at, len)),
        4 => (offset(), bytes()).prop_map(|(at, data)| Op::Write(at, data)),
        12 => (0..REGISTERS.len(), any::<u32>(), value()).prop_map(|(reg, index, value)| Op::Register(reg, index, value)),
        2 => (0..5000u64, bytes()).prop_map(|(at, data)| Op::Config(at, data)),
        2 => (any::<bool>(), offset(), bytes()).prop_map(|(bar1, at, data)| Op::Aperture(bar1, at, data)),
        1 => any::<u32>().prop_map(|engine| Op::NonStall(engine % 8)),
        1 => (0..40u32, any::<u64>()).prop_map(|(unit, va)| Op::Fault(unit, va)),
        1 => (0..8u32, any::<u8>()).prop_map(|(engine, channel)| Op::Hang(engine, channel)),
        1 => (0..5u32, any::<u8>(), any::<u32>()).prop_map(|(unit, channel, intr)| Op::Pbdma(unit, channel, intr)),
        1 => Just(Op::RunlistDone),
        1 => any::<u64>().prop_map(Op::Tick),
        1 => Just(Op::Reset),
        2 => Just(Op::Restore),
    ]
}

fn apply(rig: &mut Rig, op: &Op) {
    let Rig { gpu, mock } = rig;
    match op {
        Op::Read(at, len) => gpu.bar0_read(*at, &mut vec![0; *len], mock),
        Op::Write(at, data) => gpu.bar0_write(*at, data, mock).expect("memory is available"),
        Op::Register(which, index, value) => {
            let line = &REGISTERS[*which];
            let (_, info, _) = nvspec::regs::lookup(line.offset).expect("the register is declared");
            let at = info.offset + (index % info.count) * info.stride;
            gpu.bar0_write32(at, *value, mock);
            gpu.bar0_read32(at, mock);
        }
        Op::Config(at, data) => gpu.config_write(*at, data, mock),
        Op::Aperture(bar1, at, data) => {
            let aperture = if *bar1 { Aperture::Bar1 } else { Aperture::Bar3 };
            gpu.aperture_write(aperture, *at, data, mock).expect("memory is available");
            gpu.aperture_read(aperture, *at, &mut vec![0; data.len()], mock);
        }
        Op::NonStall(engine) => gpu.non_stall(*engine, mock),
        Op::Hang(engine, channel) => gpu.ctxsw_timeout(*engine, VirtualChannelId(*channel), mock),
        Op::Fault(unit, va) => gpu.mmu_fault(
            MmuFault {
                unit: *unit,
                instance: None,
                va: GpuVa(*va),
                reason: *unit,
                client: *unit,
                hub: false,
                write: false,
                gpc: *unit,
            },
            mock,
        ),
        Op::Pbdma(unit, channel, intr) => gpu.pbdma_error(
            PbdmaError {
                unit: *unit,
                channel: VirtualChannelId(*channel),
                intr: *intr,
                subchannel: *intr,
                method: *intr,
                data: *intr,
            },
            mock,
        ),
        Op::RunlistDone => gpu.runlist_done(mock),
        Op::Tick(now) => {
            mock.now = *now >> 1;
            gpu.tick(mock);
        }
        Op::Reset => gpu.reset(mock),
        Op::Restore => {
            let bytes = postcard::to_allocvec(&gpu.save()).expect("cannot encode the saved form");
            let saved = postcard::from_bytes(&bytes).expect("cannot decode the saved form");
            *gpu = VGpu::restored(saved, gpu.config().clone()).expect("cannot restore the saved form");
            assert_eq!(postcard::to_allocvec(&gpu.save()).expect("cannot encode the saved form"), bytes);
        }
    }
}

/// Checks that a request to the mediator refers only to the guest's VRAM, and to existing channels and engines.
fn check(call: &Call) -> Result<(), TestCaseError> {
    let inside = |place: Option<Place>, bytes: u64| {
        let Some(Place::Vram(at)) = place else { return Ok(()) };
        prop_assert!(at.0 + bytes <= VRAM, "{call:?}");
        Ok(())
    };
    match *call {
        Call::BindAperture(_, place) | Call::Bind(_, place) => inside(place, INSTANCE_BYTES)?,
        Call::FlushTlb(place, _) => inside(place, 0x1000)?,
        Call::Runlist(place, length) => {
            prop_assert!(length <= 128);
            inside(Some(place), u64::from(length) * 8)?;
        }
        Call::Block(engines, _) => prop_assert!(engines < 1 << 6 && engines != 0),
        Call::ResetEngine(engine) => prop_assert!(engine < 6),
        _ => {}
    }
    if let Call::Bind(id, _) | Call::Enable(id, _) | Call::Preempt(id) = *call {
        prop_assert!(id < 128, "{call:?}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    // The mock panics if a VRAM access is out of bounds.
    #[test]
    fn any_stream_of_accesses_stays_within_bounds(ops in prop::collection::vec(op(), 1..300)) {
        let mut rig = Rig::with(|config| config.channels = 16);
        let mut bound = std::collections::BTreeSet::new();
        for op in &ops {
            apply(&mut rig, op);
            for call in rig.mock.take() {
                check(&call)?;
                match call {
                    Call::Bind(id, Some(_)) => { bound.insert(id); }
                    Call::Bind(id, None) => { bound.remove(&id); }
                    Call::ResetFifo => bound.clear(),
                    _ => {}
                }
                prop_assert!(bound.len() <= 16);
            }
            prop_assert_eq!(rig.rd(0), 0x0c03_00a3);
        }
    }

    /// Compares a saved and restored vGPU with an identical one that was not saved.
    #[test]
    fn restored_vgpu_behaves_like_unsaved_vgpu(ops in prop::collection::vec(op(), 1..200)) {
        let (mut moved, mut kept) = (Rig::new(), Rig::new());
        for op in &ops {
            apply(&mut moved, op);
            if !matches!(op, Op::Restore) {
                apply(&mut kept, op);
            }
            prop_assert_eq!(moved.mock.take(), kept.mock.take());
        }
        for line in REGISTERS {
            let (_, info, _) = nvspec::regs::lookup(line.offset).expect("the register is declared");
            for index in 0..info.count.min(130) {
                let at = info.offset + index * info.stride;
                prop_assert_eq!(moved.rd(at), kept.rd(at), "{}.{}[{}]", line.block, line.name, index);
            }
        }
        prop_assert_eq!(moved.denied(), kept.denied());
    }

    /// Modifies the bytes of a saved vGPU. Either the saved form must be rejected, or the restored vGPU must respect
    /// all bounds.
    #[test]
    fn edited_vgpus_never_panic(
        before in prop::collection::vec(op(), 1..60),
        after in prop::collection::vec(op(), 1..60),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut rig = Rig::new();
        for op in &before {
            apply(&mut rig, op);
        }
        let mut bytes = postcard::to_allocvec(&rig.gpu.save()).expect("cannot encode the saved form");
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let Ok((saved, _)) = postcard::take_from_bytes(&bytes) else { return Ok(()) };
        let Ok(gpu) = VGpu::restored(saved, rig.gpu.config().clone()) else { return Ok(()) };
        rig.gpu = gpu;
        rig.mock.take();
        for op in &after {
            apply(&mut rig, op);
            for call in rig.mock.take() {
                check(&call)?;
            }
        }
    }

    #[test]
    fn after_reset_nothing_of_the_past_is_left(ops in prop::collection::vec(op(), 1..200)) {
        let mut rig = Rig::new();
        for op in &ops {
            apply(&mut rig, op);
        }
        rig.gpu.reset(&mut rig.mock);
        rig.mock.now = 0;
        let mut fresh = Rig::new();
        fresh.mock.now = 0;
        for line in REGISTERS {
            let (_, info, _) = nvspec::regs::lookup(line.offset).expect("the register is declared");
            for index in 0..info.count.min(130) {
                let at = info.offset + index * info.stride;
                prop_assert_eq!(rig.rd(at), fresh.rd(at), "{}.{}[{}]", line.block, line.name, index);
            }
        }
    }
}
