//! Reads truncated and corrupted saved state, both single parts and whole files. `card_state::fuzz` documents the
//! checks.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| card_state::fuzz(input));
