//! Messages on standard error, if they are asked for.

use std::sync::OnceLock;

/// Returns whether messages are asked for.
pub fn wanted() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    *WANTED.get_or_init(|| std::env::var_os(cuda_protocol::LOG_VARIABLE).is_some_and(|v| v == "1"))
}

/// Writes one line if messages are asked for.
macro_rules! report {
    ($($part:tt)*) => {
        if $crate::log::wanted() {
            eprintln!("gpu-mediator: libcuda: {}", format_args!($($part)*));
        }
    };
}
pub(crate) use report;
