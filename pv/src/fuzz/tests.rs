use super::*;
use crate::model::machine::{MAX_STEPS, STEP_BYTES, STEP_KINDS};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

mod seeds;

type Step = [u8; STEP_BYTES];

const SEND: Step = [STEP_KINDS - 1; STEP_BYTES];

/// Generates steps that are typical of a driver. Tables 0 and 5 are directories, 1 and 2 small-page tables, and 3 and 4
/// large-page tables. Entries match the table type.
fn steps() -> impl Strategy<Value = Vec<Step>> {
    let any_table = || 0u8..6;
    let directory = || prop_oneof![9 => prop_oneof![3 => Just(0u8), 1 => Just(5)], 1 => any_table()];
    let small = || prop_oneof![9 => 1u8..3, 3 => Just(0x80), 1 => any_table()];
    let large = || prop_oneof![9 => 3u8..5, 3 => Just(0x80), 1 => any_table()];
    let table = || prop_oneof![9 => 1u8..5, 1 => any_table()];
    let create = (any_table(), 0u8..30).prop_map(|(table, kind)| {
        let kind = if kind < 27 { [0, 1, 1, 2, 2, 0][usize::from(table)] } else { kind };
        [0, table, kind, 0, 0, 0, 0, 0]
    });
    let destroy = any_table().prop_map(|table| [3, table, 0, 0, 0, 0, 0, 0]);
    let set = (directory(), 0u8..3, small(), large())
        .prop_map(|(table, index, small, large)| [4, table, index, small, large, 0, 0, 0]);
    let run = (table(), 0u8..6, 0u8..6, any::<[u8; 4]>())
        .prop_map(|(table, first, count, [d, e, f, g])| [7, table, first, count, d, e, f, g]);
    let list = (table(), 0u8..6, 0u8..6, any::<[u8; 2]>())
        .prop_map(|(table, first, length, [d, e])| [9, table, first, length, d, e, 0, 0]);
    let zero = (table(), 0u8..6, 0u8..6).prop_map(|(table, first, count)| [11, table, first, count, 0, 0, 0, 0]);
    let bind = (directory(), 0u8..4, 0u8..4).prop_map(|(table, at, which)| [12, table, at, which, 0, 0, 0, 0]);
    let read = any::<[u8; 5]>().prop_map(|[a, b, c, d, e]| [20, a, b, c, d, e, 0, 0]);
    let step = prop_oneof![
        6 => create,
        3 => destroy,
        8 => set,
        3 => run,
        3 => list,
        2 => zero,
        4 => bind,
        1 => read,
        2 => any::<Step>(),
    ];
    // Half of the steps complete a batch.
    let step = (step, any::<bool>()).prop_map(|(step, send)| if send { vec![step, SEND] } else { vec![step] });
    prop::collection::vec(step, 20..120).prop_map(|steps| {
        // Most steps require all tables.
        let all = [0, 1, 2, 3, 4, 5].map(|table| [0, table, [0, 1, 1, 2, 2, 0][usize::from(table)], 0, 0, 0, 0, 0]);
        [&all[..], &[SEND], &steps.concat()].concat()
    })
}

fn run(shape: u8, steps: &[Step]) {
    let mut data = vec![shape];
    data.extend(steps.as_flattened());
    fuzz(&data);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Compares tables that are saved and restored between steps with ones that are not.
    #[test]
    fn restored_tables_equal_unsaved_tables(shape: u8, steps in steps(), every in 1usize..20) {
        Machine::new(shape).run_restored(steps.as_flattened(), every);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn batches_keep_the_invariants(steps in steps()) {
        run(0, &steps);
    }

    #[test]
    fn without_room_for_all_tables_the_rest_is_as_it_should_be(steps in steps()) {
        run(1, &steps);
    }

    #[test]
    fn unaccepted_features_stay_unavailable(shape: u8, steps in prop::collection::vec(any::<Step>(), 1..100)) {
        run(shape, &steps);
    }
}

/// Returns the seed corpus of the fuzz target. Files named `found_*` are inputs that failed in the past. All other
/// files are the output of [`seeds::seeds`]. To regenerate them, run `UPDATE_SEEDS=1 cargo test -p pv seeds`.
fn corpus() -> BTreeMap<String, Vec<u8>> {
    let files = std::fs::read_dir(folder()).unwrap().map(|entry| {
        let entry = entry.unwrap();
        (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())
    });
    files.collect()
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus/paravirtual")
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
        let whole = bytes.len() % STEP_BYTES == 1 && bytes.len() / STEP_BYTES <= MAX_STEPS;
        assert!(whole, "{name} is truncated, or longer than the maximum");
    }
    let kinds: BTreeSet<u8> = seeds.values().flat_map(|bytes| bytes[1..].chunks(STEP_BYTES).map(|op| op[0])).collect();
    assert_eq!(kinds, (0..STEP_KINDS).collect(), "the seeds lack a kind of step");
}

#[test]
fn saved_inputs_keep_the_invariants() {
    let corpus = corpus();
    assert!(!corpus.is_empty());
    for (name, mut data) in corpus {
        assert!(!data.is_empty() && data.len() < 4096, "{name}");
        for shape in 0..8 {
            data[0] = shape;
            println!("{name} with shape {shape}");
            fuzz(&data);
        }
    }
}
