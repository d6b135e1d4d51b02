//! Runs arbitrary accesses of a hostile guest, next to a guest that must not be affected. `rig::fuzz` documents the
//! checks.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| rig::fuzz::run(input));
