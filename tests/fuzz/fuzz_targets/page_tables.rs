//! Runs arbitrary operations on a VM's address spaces, guest and GPU. `shadow_pt::fuzz` documents the checks.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| shadow_pt::fuzz(input));
