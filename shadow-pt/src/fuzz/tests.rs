use super::*;
use crate::model::machine::{MAX_OPS, OP_BYTES};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

mod seeds;

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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Compares address spaces that are saved and restored between operations with ones that are not.
    #[test]
    fn restored_spaces_map_same_memory_as_unsaved_spaces(mode in 0usize..4, tight: bool, ops in ops(), every in 1usize..12) {
        Machine::new(Mode::ALL[mode], tight).run_restored(ops.as_flattened(), every);
    }
}

/// Fills a directory with entries of full-size tables, whose total size exceeds the limit.
#[test]
fn tables_beyond_the_limit_may_be_missing_after_a_restore() {
    let ops: [[u8; OP_BYTES]; 6] = [
        [47, 16, 0, 15, 0, 0, 0, 0],
        [176, 1, 33, 63, 0, 0, 0, 0],
        [108, 5, 15, 133, 8, 0, 19, 228],
        [11, 20, 113, 83, 52, 86, 42, 207],
        [104, 131, 157, 50, 185, 183, 194, 70],
        [11, 8, 188, 164, 121, 47, 39, 252],
    ];
    for mode in Mode::ALL {
        Machine::new(mode, false).run_restored(ops.as_flattened(), 4);
    }
}

/// Returns the seed corpus of the fuzz target. Files named `found_*` are inputs that failed or almost failed in the
/// past. All other files are the output of [`seeds::seeds`]. To regenerate them, run `UPDATE_SEEDS=1 cargo test -p
/// shadow-pt seeds`.
fn corpus() -> BTreeMap<String, Vec<u8>> {
    let files = std::fs::read_dir(folder()).unwrap().map(|entry| {
        let entry = entry.unwrap();
        (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())
    });
    files.collect()
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus/page_tables")
}

#[test]
fn seeds_in_the_repository_are_up_to_date() {
    let seeds = seeds::seeds();
    if std::env::var_os("UPDATE_SEEDS").is_some() {
        std::fs::create_dir_all(folder()).unwrap();
        for (name, bytes) in &seeds {
            std::fs::write(folder().join(name), bytes).unwrap();
        }
    }
    let mut corpus = corpus();
    corpus.retain(|name, _| !name.starts_with("found_"));
    assert_eq!(corpus.keys().collect::<Vec<_>>(), seeds.keys().collect::<Vec<_>>());
    for (name, bytes) in &seeds {
        assert!(corpus[*name] == *bytes, "{name} is outdated; UPDATE_SEEDS=1 updates it");
        let whole = bytes.len() % OP_BYTES == 1 && bytes.len() / OP_BYTES <= MAX_OPS;
        assert!(whole, "{name} is truncated, or longer than the maximum");
    }
    let kinds: BTreeSet<u8> = seeds.values().flat_map(|bytes| bytes[1..].chunks(OP_BYTES).map(|op| op[0])).collect();
    assert_eq!(kinds, (0..32).collect(), "the seeds lack an operation");
}

/// Runs each input in every mode.
#[test]
fn saved_inputs_keep_the_invariants() {
    let corpus = corpus();
    assert!(!corpus.is_empty());
    for (name, mut data) in corpus {
        assert!(!data.is_empty() && data.len() < 4096, "{name}");
        for mode in 0..8 {
            data[0] = mode;
            println!("{name} in mode {mode}");
            fuzz(&data);
        }
    }
}
