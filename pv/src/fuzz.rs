//! Interprets bytes as a guest's batches, and checks their execution against the model.

use crate::model::machine::Machine;

/// Runs the steps in `data`. Panics if an invariant does not hold. The first byte selects the table limit and the
/// accepted features; each step then takes eight bytes.
pub fn fuzz(data: &[u8]) {
    let Some((first, steps)) = data.split_first() else { return };
    Machine::new(*first).run(steps);
}

#[cfg(test)]
mod tests;
