//! Makes a worker execute a guest program's CUDA ring with arbitrary contents.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    cuda_worker::fuzz::execute(input);
});
