//! Runs arbitrary commands of a guest against the CUDA function of a VM. `vcuda::fuzz` documents the checks.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| vcuda::fuzz::run(input));
