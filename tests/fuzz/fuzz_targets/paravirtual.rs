//! Runs arbitrary guest batches against the page tables kept by the mediator. `pv::fuzz` documents the checks.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| pv::fuzz(input));
