//! Makes a worker continue a program from a file that contains arbitrary bytes, as a hostile worker leaves it.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    cuda_worker::fuzz::restore(input);
});
