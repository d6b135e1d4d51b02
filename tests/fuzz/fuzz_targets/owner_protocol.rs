//! Sends arbitrary messages from several tenants' processes to the owner of a CUDA card. `cuda_owner::fuzz` documents
//! the checks.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| cuda_owner::fuzz::protocol(input));
