//! The functions of NVML's header that guests do not have. `build.rs` generates one for each symbol.
//!
//! UNSAFETY: exports symbols.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, reason = "names of NVML")]
#![allow(missing_docs, reason = "each is a function of NVML's header that returns \"not supported\"")]

use crate::devices;
use crate::result::{NOT_SUPPORTED, UNINITIALIZED};

/// The result of an unavailable function.
fn refuse() -> i32 {
    if devices::is_ready() { NOT_SUPPORTED } else { UNINITIALIZED }
}

include!(concat!(env!("OUT_DIR"), "/refused.rs"));
