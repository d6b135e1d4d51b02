use super::*;
use crate::model::machine::OP_BYTES;
use proptest::prelude::*;

fn ops() -> impl Strategy<Value = Vec<[u8; OP_BYTES]>> {
    prop::collection::vec(any::<[u8; OP_BYTES]>(), 1..80)
}

fn run(mode: u8, ops: &[[u8; OP_BYTES]]) {
    let mut data = vec![mode];
    data.extend(ops.as_flattened());
    fuzz(&data);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn naive_keeps_the_invariants(ops in ops()) {
        run(0, &ops);
    }

    #[test]
    fn lazy_keeps_the_invariants(ops in ops()) {
        run(1, &ops);
    }

    #[test]
    fn incremental_keeps_the_invariants(ops in ops()) {
        run(2, &ops);
    }

    #[test]
    fn lazy_add_keeps_the_invariants(ops in ops()) {
        run(3, &ops);
    }

    #[test]
    fn without_room_for_all_tables_nothing_stale_remains(mode in 4u8..8, ops in ops()) {
        run(mode, &ops);
    }
}

/// Inputs that are kept, each run in all modes.
#[test]
fn saved_inputs_keep_the_invariants() {
    for seed in SEEDS {
        for mode in 0..8 {
            let mut data = seed.to_vec();
            data[0] = mode;
            fuzz(&data);
        }
    }
}

const SEEDS: [&[u8]; 3] = [
    include_bytes!("seeds/gpu_writes_tables.bin"),
    include_bytes!("seeds/ram_comes_back.bin"),
    include_bytes!("seeds/mixture.bin"),
];
