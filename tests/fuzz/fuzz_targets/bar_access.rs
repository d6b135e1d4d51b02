//! Any accesses of a hostile guest, beside one that must not notice: `rig::fuzz` says what is checked.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| rig::fuzz::run(input));
