//! Any life of domains of Xen, on a hypervisor that is none: `vmm_glue::xen::fuzz` says what is checked.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| vmm_glue::xen::fuzz::run(input));
