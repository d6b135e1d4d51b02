//! Functions in NVML's header that are not available in guests. `build.rs` generates a function for each of these
//! symbols.
//!
//! UNSAFETY: exports symbols.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, reason = "names of NVML")]
#![allow(missing_docs, reason = "each is a function of NVML's header that returns \"not supported\"")]

use crate::devices;
use crate::result::{NOT_SUPPORTED, UNINITIALIZED};

/// Returns the result code of an unavailable function.
fn refuse() -> i32 {
    if devices::is_ready() { NOT_SUPPORTED } else { UNINITIALIZED }
}

include!(concat!(env!("OUT_DIR"), "/refused.rs"));
