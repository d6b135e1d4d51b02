//! Any life of Xen domains, on a simulated hypervisor: `vmm_glue::xen::fuzz` documents the checks.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| vmm_glue::xen::fuzz::run(input));
