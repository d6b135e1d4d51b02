//! Checks that the seed corpus of the fuzz target matches the output of `rig::fuzz::seeds`, and runs each seed.
//!
//! `UPDATE_SEEDS=1 cargo test -p vgpu seeds` rewrites the corpus.

use rig::fuzz::{decode, encode, run, seeds};
use std::collections::BTreeSet;
use std::path::PathBuf;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fuzz/corpus/bar_access")
}

#[test]
fn seeds_in_the_repository_are_up_to_date() {
    let (folder, seeds) = (folder(), seeds());
    if std::env::var_os("UPDATE_SEEDS").is_some() {
        std::fs::create_dir_all(&folder).unwrap();
        for (name, bytes) in &seeds {
            std::fs::write(folder.join(name), bytes).unwrap();
        }
    }
    let names = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.collect::<BTreeSet<_>>(), seeds.keys().map(|name| (*name).to_owned()).collect());
    for (name, bytes) in &seeds {
        assert!(
            std::fs::read(folder.join(name)).unwrap() == *bytes,
            "{name} is out of date; UPDATE_SEEDS=1 rewrites it"
        );
    }
}

#[test]
fn seeds_survive_decoding_and_run() {
    for (name, bytes) in seeds() {
        assert_eq!(encode(&decode(&bytes)), bytes, "{name}");
        run(&bytes);
    }
}
