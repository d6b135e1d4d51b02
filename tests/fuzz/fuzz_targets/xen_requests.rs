//! Runs arbitrary operations of Xen domains, on a simulated hypervisor. `xen_device::fuzz` documents the checks.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| xen_device::fuzz::run(input));
