//! Random operations on a chunk table.

use super::{BUDGET_MAX, CHUNK};
use crate::{Limits, OnFull, Tier, To};
use proptest::prelude::*;

#[derive(Clone, Debug)]
pub(super) enum Op {
    Create(u32, u64, Limits),
    SetLimits(u32, Limits),
    Destroy(u32),
    Place(u32, u64),
    Unplace(u32, u64),
    UnplaceAll(u32),
    Begin(u32, u32, To),
    EvictionReserve(u32),
    Copy(usize),
    Commit(usize),
    Abort(usize),
    Budget(u32),
    Reserve(u32),
    Release(usize),
    SetAside(u32),
    Claim(u32),
    Repay,
    TakeScrub(Option<Tier>),
    FinishScrub(usize),
    /// Saves and restores the table.
    Restore,
}

fn limits() -> impl Strategy<Value = Limits> {
    let on_full = prop_oneof![3 => Just(OnFull::Swap), 1 => Just(OnFull::Queue), 1 => Just(OnFull::Refuse)];
    let quota = prop_oneof![2 => 0..8u32, 1 => Just(u32::MAX)];
    let guarantee = prop_oneof![4 => 0..5u32, 1 => Just(u32::MAX)];
    let any =
        (quota, guarantee, 0..8u32, 0..4u32, on_full).prop_map(|(quota, guarantee, swap_cap, weight, on_full)| {
            Limits { quota, guarantee, swap_cap, weight, on_full }
        });
    prop_oneof![3 => any, 1 => Just(Limits::RESERVED), 1 => Just(Limits::UNRESERVED), 1 => Just(Limits::default())]
}

pub(super) fn op() -> impl Strategy<Value = Op> {
    let (vm, address) = (|| 0..4u32, || 0..8 * CHUNK);
    let to = prop_oneof![4 => Just(To::Host), 3 => Just(To::Card), 2 => Just(To::Reserve)];
    let tier = prop_oneof![2 => Just(None), 1 => Just(Some(Tier::Card)), 1 => Just(Some(Tier::Host))];
    prop_oneof![
        6 => (vm(), 0..6 * CHUNK, limits()).prop_map(|(vm, bytes, limits)| Op::Create(vm, bytes, limits)),
        2 => (vm(), limits()).prop_map(|(vm, limits)| Op::SetLimits(vm, limits)),
        1 => vm().prop_map(Op::Destroy),
        12 => (vm(), address()).prop_map(|(vm, address)| Op::Place(vm, address)),
        2 => (vm(), address()).prop_map(|(vm, address)| Op::Unplace(vm, address)),
        1 => vm().prop_map(Op::UnplaceAll),
        1 => (0..4u32).prop_map(Op::EvictionReserve),
        14 => (vm(), 0..7u32, to).prop_map(|(vm, index, to)| Op::Begin(vm, index, to)),
        4 => any::<usize>().prop_map(Op::Copy),
        4 => any::<usize>().prop_map(Op::Commit),
        2 => any::<usize>().prop_map(Op::Abort),
        2 => (0..BUDGET_MAX).prop_map(Op::Budget),
        1 => (1..3u32).prop_map(Op::Reserve),
        1 => any::<usize>().prop_map(Op::Release),
        1 => (0..4u32).prop_map(Op::SetAside),
        1 => (0..4u32).prop_map(Op::Claim),
        1 => Just(Op::Repay),
        6 => tier.prop_map(Op::TakeScrub),
        6 => any::<usize>().prop_map(Op::FinishScrub),
        3 => Just(Op::Restore),
    ]
}
