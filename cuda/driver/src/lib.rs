//! The functions of the real `libcuda.so.1` that `cuda-shim` calls.
//!
//! - [`symbols`]: every symbol of the driver API and of NVML, with its real function once the library is loaded;
//! - [`calls`]: the functions of the driver API that the shim calls itself, with their signatures;
//! - [`streams`]: determines the stream of a submission.
//!
//! This crate does not find libraries or replace functions: `cuda-shim` fills [`symbols::REAL`].

pub mod calls;
pub mod streams;
pub mod symbols;
