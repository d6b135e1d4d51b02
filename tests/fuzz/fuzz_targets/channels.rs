//! Runs arbitrary operations on two VMs' channels (instance blocks, ring contents, runlists, doorbells).
//! `channels::fuzz` documents the checks.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| channels::fuzz(input));
