//! Scale of the workloads: small by default, or full with `cargo xtask test --full`.

/// Environment variable that `cargo xtask test --full` sets.
const FULL_VARIABLE: &str = "GPU_MEDIATOR_FULL";

/// Returns true if tests run their full workloads.
#[must_use]
pub fn is_full() -> bool {
    std::env::var_os(FULL_VARIABLE).is_some()
}

/// Returns `full` if tests run their full workloads, and `small` otherwise.
pub fn pick<T>(small: T, full: T) -> T {
    if is_full() { full } else { small }
}
