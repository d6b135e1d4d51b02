use super::*;
use proptest::prelude::*;

mod seeds;

fn raw() -> impl Strategy<Value = u64> {
    prop_oneof![
        // A range as used by a typical driver.
        6 => (0u64..1 << 20, 1u64..64, any::<bool>()).prop_map(|(at, len, sync)| at << 2 | len << 42 | u64::from(sync) << 63),
        1 => any::<u64>(),
        // A range near the end of the guest's address space.
        1 => (0u64..1 << 12, 1u64..1 << 11).prop_map(|(at, len)| (0xff_f7ff_f000 + 4 * at) | len << 42),
        1 => any::<u32>().prop_map(|operand| operand.into()),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let vm = any::<bool>;
    let id = || prop_oneof![12 => 0u8..5, 1 => any::<u8>()];
    let put = || prop_oneof![8 => 0u32..32, 4 => 0u32..1024, 1 => any::<u32>()];
    let bind =
        (vm(), id(), 0u8..11, 0u16..8, 0u16..8).prop_map(|(vm, id, log2, get, put)| Op::Bind(vm, id, log2, get, put));
    prop_oneof![
        5 => bind,
        2 => (vm(), id()).prop_map(|(vm, id)| Op::Unbind(vm, id)),
        6 => (vm(), id(), prop::bool::weighted(0.8)).prop_map(|(vm, id, on)| Op::Enable(vm, id, on)),
        5 => (vm(), prop::collection::vec(0u8..5, 0..6)).prop_map(|(vm, list)| Op::List(vm, list)),
        1 => (vm(), id()).prop_map(|(vm, id)| Op::Preempt(vm, id)),
        1 => (vm(), any::<bool>()).prop_map(|(vm, on)| Op::Pause(vm, on)),
        1 => (vm(), id()).prop_map(|(vm, id)| Op::Refuse(vm, id)),
        12 => (vm(), id(), put(), prop::bool::weighted(0.7)).prop_map(|(vm, id, put, now)| Op::Ring(vm, id, put, now)),
        3 => any::<u8>().prop_map(Op::Pull),
        1 => any::<bool>().prop_map(Op::Gate),
        4 => any::<u8>().prop_map(Op::Start),
        4 => Just(Op::Pending),
        4 => (vm(), id(), 0u16..32, raw()).prop_map(|(vm, id, at, raw)| Op::Write(vm, id, at, raw)),
        1 => (vm(), id(), prop::bool::weighted(0.3)).prop_map(|(vm, id, gone)| Op::Unmap(vm, id, gone)),
        10 => (vm(), id(), 0u8..40).prop_map(|(vm, id, count)| Op::Fetch(vm, id, count)),
        10 => (vm(), id(), 0u8..40).prop_map(|(vm, id, count)| Op::Execute(vm, id, count)),
        4 => (vm(), id(), 0u8..8, 0u32..8).prop_map(|(vm, id, slot, payload)| Op::Forge(vm, id, slot, payload)),
        2 => (vm(), id()).prop_map(|(vm, id)| Op::Swallow(vm, id)),
        6 => Just(Op::Completed),
        4 => (0u8..8).prop_map(Op::NonStall),
        1 => any::<u64>().prop_map(Op::Look),
        1 => (vm(), id()).prop_map(|(vm, id)| Op::Hang(vm, id)),
        1 => Just(Op::LetGo),
        1 => vm().prop_map(Op::Destroy),
        1 => Just(Op::Reset),
        4 => Just(Op::Restore),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn random_operations_keep_invariants(ops in prop::collection::vec(op(), 1..120)) {
        let mut rig = Rig::new();
        for op in &ops {
            rig.apply(op);
            rig.check();
        }
        rig.drain();
    }

    #[test]
    fn random_bytes_keep_invariants(data in prop::collection::vec(any::<u8>(), 0..2000)) {
        fuzz(&data);
    }
}
