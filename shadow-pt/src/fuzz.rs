//! Interprets bytes as operations of a guest, a GPU and a host. Checks the address spaces against the model after each
//! operation.

use crate::Mode;
use crate::model::machine::Machine;

/// Runs the operations in `data`. Panics if an invariant is violated. Two bits of the first byte select the mode, and a
/// third bit selects a low table limit. Each operation consists of eight bytes.
pub fn fuzz(data: &[u8]) {
    let Some((first, ops)) = data.split_first() else { return };
    let mode = Mode::ALL.into_iter().nth(usize::from(first & 3)).unwrap_or_default();
    Machine::new(mode, first & 4 != 0).run(ops);
}

#[cfg(test)]
mod tests;
