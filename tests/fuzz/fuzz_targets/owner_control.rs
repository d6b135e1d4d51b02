//! Sends lines of the control protocol to the owner of a CUDA card: see `cuda_owner::fuzz::control`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| cuda_owner::fuzz::control(input));
