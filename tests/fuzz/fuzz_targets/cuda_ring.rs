//! The ring of a guest's CUDA program: arbitrary bytes, executed by its worker.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    cuda_worker::fuzz::execute(input);
});
