//! Points of a takeover at which a test has a process die, as by SIGKILL; and a process that a test has speak as one of the version before.
//!
//! They are there in a program with debug assertions only: in what is released [`here`] and [`spoken`] do nothing, and nothing asks the
//! environment.

use saved_state::Known;

/// Names the file with the point at which to die.
#[cfg(debug_assertions)]
const FILE: &str = "MEDIATORD_DIES_AT";
/// Names the file that says `before` if this is to be a program of the version before.
#[cfg(debug_assertions)]
const SPEAKS: &str = "MEDIATORD_SPEAKS";

/// Text of the file that the environment names.
#[cfg(debug_assertions)]
fn said(variable: &str) -> Option<String> {
    let text = std::fs::read_to_string(std::env::var_os(variable)?).ok()?;
    Some(text.trim().to_owned())
}

/// Dies, if a test has this point named.
#[cfg(debug_assertions)]
pub(crate) fn here(point: &str) {
    if said(FILE).is_some_and(|named| named == point) {
        tracing::warn!(point, "a test has this process die here");
        // Nothing of this process goes on behind it.
        let _unreached = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}

/// Does nothing.
#[cfg(not(debug_assertions))]
pub(crate) fn here(_: &str) {}

/// The versions of parts that this program reads and writes: those before, if a test has it so.
#[cfg(debug_assertions)]
pub(super) fn spoken(mut known: Vec<Known>) -> Vec<Known> {
    if said(SPEAKS).is_some_and(|speaks| speaks == "before") {
        for part in known.iter_mut().filter(|part| part.version > 1) {
            part.version -= 1;
            tracing::warn!(part = part.name, version = part.version, "a test has this process speak so");
        }
    }
    known
}

/// The versions of parts that this program reads and writes.
#[cfg(not(debug_assertions))]
pub(super) fn spoken(known: Vec<Known>) -> Vec<Known> {
    known
}
