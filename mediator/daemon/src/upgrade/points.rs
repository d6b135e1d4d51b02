//! Points of an upgrade at which a test kills a process, as with SIGKILL.
//!
//! These points exist only in a program with debug assertions. In a release, [`here`] does nothing and does not read
//! the environment.

/// Environment variable with the path of a file that names the point.
#[cfg(debug_assertions)]
const FILE: &str = "MEDIATORD_DIES_AT";

/// Ends the process if a test has named this point.
#[cfg(debug_assertions)]
pub(crate) fn here(point: &str) {
    let named = std::env::var_os(FILE).and_then(|file| std::fs::read_to_string(file).ok());
    if named.is_some_and(|named| named.trim() == point) {
        tracing::warn!(point, "a test has this process die here");
        // This process executes no code after this point.
        let _unreached = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}

/// Does nothing.
#[cfg(not(debug_assertions))]
pub(crate) fn here(_: &str) {}
