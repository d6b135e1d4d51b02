//! The multi-function unit, special registers, and votes.

use super::super::launch::{Failure, ILLEGAL, Launch};
use super::super::soft::F32;
use super::super::warp::{ALL, LANES, Lanes, Warp};
use super::{Machine, fetch_float, map};
use nvspec::class::compute90c0::{LOCAL_ADDRESS_BITS, WINDOW_BYTES, limit};
use sm20::{MultiFunction, Op, SpecialRegister, VoteMode};

pub(super) fn execute(warp: &mut Warp, op: &Op, mask: u32, machine: &mut Machine<'_, '_>) -> Result<(), Failure> {
    match *op {
        Op::Mufu { dst, a, function, saturate } => {
            let a = fetch_float(warp, a, machine)?;
            let values = map(|lane| {
                let value = multi_function(function, a[lane]);
                if saturate { F32.saturated(u64::from(value)) as u32 } else { value }
            });
            warp.set(dst, &values, mask);
        }
        // On hardware, RRO only prepares the argument of MUFU. The model's MUFU uses the original argument.
        Op::Rro { dst, b, function: _ } => {
            let values = fetch_float(warp, b, machine)?;
            warp.set(dst, &values, mask);
        }
        Op::S2R { dst, special } => {
            let values = special_register(warp, special, machine);
            warp.set(dst, &values, mask);
        }
        // GUESS: zero. Drivers do not read this value, and no thread is waiting while another thread runs.
        Op::B2R { dst, barrier: _ } => warp.set(dst, &[0; LANES], mask),
        Op::Lepc { dst } => {
            let pc = warp.pc;
            warp.set(dst, &[pc; LANES], mask);
        }
        Op::Vote { dst, p, a, mode } => {
            let holds = warp.predicate(a) & mask;
            let result = match mode {
                VoteMode::All => holds == mask,
                VoteMode::Any => holds != 0,
                VoteMode::Eq => holds == 0 || holds == mask,
            };
            warp.set(dst, &[holds; LANES], mask);
            warp.set_predicate(p, if result { ALL } else { 0 }, mask);
        }
        _ => return Err(ILLEGAL),
    }
    Ok(())
}

/// Evaluates a function of the multi-function unit. Denormal arguments and results are flushed to zero.
fn multi_function(function: MultiFunction, bits: u32) -> u32 {
    let single = |f: fn(f64) -> f64| {
        let value = f(f64::from(f32::from_bits(F32.flush(u64::from(bits)) as u32))) as f32;
        if value.is_nan() { F32.nan as u32 } else { F32.flush(u64::from(value.to_bits())) as u32 }
    };
    // The operand and the result are the upper words of doubles.
    let upper = |f: fn(f64) -> f64| {
        let value = f64::from_bits(u64::from(bits) << 32);
        let value = f(if value.is_subnormal() { 0.0f64.copysign(value) } else { value });
        let value = if value.is_subnormal() { 0.0f64.copysign(value) } else { value };
        (value.to_bits() >> 32) as u32
    };
    match function {
        MultiFunction::Cos => single(f64::cos),
        MultiFunction::Sin => single(f64::sin),
        MultiFunction::Ex2 => single(f64::exp2),
        MultiFunction::Lg2 => single(f64::log2),
        MultiFunction::Rcp => single(f64::recip),
        MultiFunction::Rsq => single(|value| value.sqrt().recip()),
        MultiFunction::Rcp64H => upper(f64::recip),
        MultiFunction::Rsq64H => upper(|value| value.sqrt().recip()),
    }
}

fn special_register(warp: &Warp, special: SpecialRegister, machine: &Machine<'_, '_>) -> Lanes {
    let launch: &Launch = machine.launch;
    let thread = |lane: usize| warp.index * LANES as u32 + lane as u32;
    let [x, y, z] = launch.block;
    let tid = |lane: usize| {
        let linear = thread(lane);
        // Lanes beyond the end of the block have the subsequent thread numbers.
        [linear % x, linear / x % y, linear / x / y]
    };
    let bit = |lane: usize| 1u32 << lane;
    let below = |lane: usize| bit(lane) - 1;
    let all = |value: u32| [value; LANES];
    // Blocks are assigned to multiprocessors round-robin.
    let sm = (machine.block % u64::from(launch.sms.max(1))) as u32;
    match special {
        SpecialRegister::LANE_ID => map(|lane| lane as u32),
        SpecialRegister::VIRT_CFG => all(limit::SM_WARPS << 8 | launch.sms << 20),
        SpecialRegister::VIRT_ID => all((warp.index & 0x1f) << 8 | sm << 20),
        SpecialRegister::TID => map(|lane| {
            let [x, y, z] = tid(lane);
            x | y << 16 | z << 26
        }),
        SpecialRegister::TID_X => map(|lane| tid(lane)[0]),
        SpecialRegister::TID_Y => map(|lane| tid(lane)[1]),
        SpecialRegister::TID_Z => map(|lane| tid(lane)[2]),
        SpecialRegister::CTA_PARAM => all(launch.cta_param),
        SpecialRegister::CTAID_X => all(machine.position[0]),
        SpecialRegister::CTAID_Y => all(machine.position[1]),
        SpecialRegister::CTAID_Z => all(machine.position[2]),
        SpecialRegister::NTID => all(x | y << 16 | z << 26),
        SpecialRegister::NTID_X => all(x),
        SpecialRegister::NTID_Y => all(y),
        SpecialRegister::NTID_Z => all(z),
        SpecialRegister::GRID_PARAM => all(launch.grid_param),
        SpecialRegister::NCTAID_X => all(launch.grid[0]),
        SpecialRegister::NCTAID_Y => all(launch.grid[1]),
        SpecialRegister::NCTAID_Z => all(launch.grid[2]),
        SpecialRegister::SWIN_LO => all(launch.shared_window as u32),
        SpecialRegister::SWIN_SZ | SpecialRegister::LWIN_SZ => all(WINDOW_BYTES as u32),
        SpecialRegister::SMEM_SZ => all(launch.shared_bytes),
        SpecialRegister::SMEM_BANKS => all(limit::SHARED_BANKS),
        SpecialRegister::LWIN_LO => all(launch.local_window as u32),
        SpecialRegister::LMEM_LO_SZ => all(launch.local_low),
        SpecialRegister::LMEM_HI_OFF => all((1 << LOCAL_ADDRESS_BITS) - launch.local_high),
        SpecialRegister::EQ_MASK => map(bit),
        SpecialRegister::LT_MASK => map(below),
        SpecialRegister::LE_MASK => map(|lane| below(lane) | bit(lane)),
        SpecialRegister::GT_MASK => map(|lane| !(below(lane) | bit(lane))),
        SpecialRegister::GE_MASK => map(|lane| !below(lane)),
        SpecialRegister::CLOCK_LO => all(machine.clock as u32),
        SpecialRegister::CLOCK_HI => all((machine.clock >> 32) as u32),
        // Performance counters and similar registers read as zero.
        _ => all(0),
    }
}
