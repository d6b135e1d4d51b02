//! Runs arbitrary operations of a guest, a GPU and a host on a VM's address spaces. `shadow_pt::fuzz` documents the
//! checks.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| shadow_pt::fuzz(input));
