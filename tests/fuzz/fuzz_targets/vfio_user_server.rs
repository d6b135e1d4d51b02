//! Runs arbitrary operations of an in-process vfio-user client. `vmm_glue::fuzz` documents the checks.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| vmm_glue::fuzz::run(input));
