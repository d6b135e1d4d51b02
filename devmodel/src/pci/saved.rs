//! Configuration space as it is saved.

use super::{PciConfig, STATUS_INTERRUPT, header};
use saved_state::Invalid;

impl PciConfig {
    /// All of configuration space.
    #[must_use]
    pub fn save(&self) -> Vec<u8> {
        let Self {
            bytes,
            // Both follow from what the function is.
            writable: _,
            initial: _,
        } = self;
        bytes.to_vec()
    }

    /// Makes a new function what it was. Only what a guest can write may be other than after a reset.
    ///
    /// # Errors
    /// When it is another function's. Nothing has changed then.
    pub fn restore(&mut self, saved: &[u8]) -> Result<(), Invalid> {
        let Self { bytes, writable, initial } = self;
        Invalid::unless(saved.len() == bytes.len(), || format!("{} bytes are no configuration space", saved.len()))?;
        for (((at, saved), writable), initial) in saved.iter().enumerate().zip(writable.iter()).zip(initial.iter()) {
            let shown = if at == header::STATUS { STATUS_INTERRUPT } else { 0 };
            Invalid::unless((saved ^ initial) & !(writable | shown) == 0, || {
                format!("byte {at:#x} of configuration space is another function's")
            })?;
        }
        bytes.copy_from_slice(saved);
        Ok(())
    }
}
