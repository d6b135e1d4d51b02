//! Any batches of a guest, and the page tables that the mediator keeps for it: `pv::fuzz` says what is checked.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| pv::fuzz(input));
