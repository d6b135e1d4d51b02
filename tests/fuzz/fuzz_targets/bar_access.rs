//! Runs arbitrary accesses of a hostile guest alongside a guest that must remain unaffected. `rig::fuzz` documents the
//! checks.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| rig::fuzz::run(input));
