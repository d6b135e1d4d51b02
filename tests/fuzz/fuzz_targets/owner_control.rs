//! Lines of the daemon to the owner of a CUDA card: `cuda_owner::fuzz::control` says what is checked.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| cuda_owner::fuzz::control(input));
