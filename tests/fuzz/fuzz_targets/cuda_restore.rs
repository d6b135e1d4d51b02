//! Makes a worker restore a program from a file with arbitrary contents, as a hostile worker could leave it.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    cuda_worker::fuzz::restore(input);
});
