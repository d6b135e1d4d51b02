//! Sends arbitrary lines of the control protocol to the owner of a CUDA card. `cuda_owner::fuzz` documents the checks.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| cuda_owner::fuzz::control(input));
