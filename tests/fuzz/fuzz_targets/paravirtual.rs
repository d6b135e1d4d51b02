//! Any batches of a guest, and the page tables that the mediator keeps for it: `pv::fuzz` documents the checks.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| pv::fuzz(input));
