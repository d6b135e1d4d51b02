//! Points of a takeover at which a test kills a process, as with SIGKILL; and a switch that makes a process use the
//! versions of the release before.
//!
//! They exist only in a program with debug assertions. In a release, [`here`] and [`spoken`] do nothing, and the
//! environment is not read.

use saved_state::Known;

/// Names the file with the point at which to die.
#[cfg(debug_assertions)]
const FILE: &str = "MEDIATORD_DIES_AT";
/// Names the file that says `before` if this program must act as the release before.
#[cfg(debug_assertions)]
const SPEAKS: &str = "MEDIATORD_SPEAKS";

/// Returns the text of the file that the environment names.
#[cfg(debug_assertions)]
fn said(variable: &str) -> Option<String> {
    let text = std::fs::read_to_string(std::env::var_os(variable)?).ok()?;
    Some(text.trim().to_owned())
}

/// Dies, if a test has named this point.
#[cfg(debug_assertions)]
pub(crate) fn here(point: &str) {
    if said(FILE).is_some_and(|named| named == point) {
        tracing::warn!(point, "a test has this process die here");
        // No code of this process runs after this.
        let _unreached = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}

/// Does nothing.
#[cfg(not(debug_assertions))]
pub(crate) fn here(_: &str) {}

/// Returns the versions of parts that this program uses: those of the release before, if a test asks for them.
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

/// Returns the versions of parts that this program reads and writes.
#[cfg(not(debug_assertions))]
pub(super) fn spoken(known: Vec<Known>) -> Vec<Known> {
    known
}
