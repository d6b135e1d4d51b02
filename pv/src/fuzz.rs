//! Interprets bytes as batches of a guest, and compares their execution with the model.

use crate::model::machine::Machine;

/// Executes the steps in `data`. Panics if an invariant is violated. The first byte selects the table limit and the
/// accepted features. Each step consists of eight bytes.
pub fn fuzz(data: &[u8]) {
    let Some((first, steps)) = data.split_first() else { return };
    Machine::new(*first).run(steps);
}

#[cfg(test)]
mod tests;
