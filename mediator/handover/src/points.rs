//! Points in an upgrade at which a test can kill a process with SIGKILL.
//!
//! The points exist only in builds with debug assertions. In a release build, [`here`] does nothing, and does not read
//! the environment.

/// Environment variable with the path of a file that names the selected point.
#[cfg(debug_assertions)]
const FILE: &str = "MEDIATORD_DIES_AT";

/// Kills the process if a test has selected this point.
#[cfg(debug_assertions)]
pub fn here(point: &str) {
    let named = std::env::var_os(FILE).and_then(|file| std::fs::read_to_string(file).ok());
    if named.is_some_and(|named| named.trim() == point) {
        tracing::warn!(point, "a test kills this process here");
        // Not reached, because SIGKILL terminates the process.
        let _unreached = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}

/// Does nothing.
#[cfg(not(debug_assertions))]
pub fn here(_: &str) {}
