//! Interprets bytes as a sequence of operations by a guest, a GPU and a host, and checks them against the model.

use crate::Mode;
use crate::model::machine::Machine;

/// Runs the operations in `data`; panics if an invariant does not hold. The first byte selects the mode (two bits) and
/// a low table limit (the third bit); each operation then takes eight bytes.
pub fn fuzz(data: &[u8]) {
    let Some((first, ops)) = data.split_first() else { return };
    let mode = Mode::ALL.into_iter().nth(usize::from(first & 3)).unwrap_or_default();
    Machine::new(mode, first & 4 != 0).run(ops);
}

#[cfg(test)]
mod tests;
