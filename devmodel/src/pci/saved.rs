//! Saved form of configuration space.

use super::{PciConfig, STATUS_INTERRUPT, header};
use saved_state::Invalid;

impl PciConfig {
    /// Returns the contents of configuration space.
    #[must_use]
    pub fn save(&self) -> Vec<u8> {
        let Self {
            bytes,
            // Derived from the function's configuration.
            writable: _,
            initial: _,
        } = self;
        bytes.to_vec()
    }

    /// Restores the contents of a new function's configuration space. Only guest-writable bits may differ from the
    /// initial contents.
    ///
    /// # Errors
    /// Returns an error if the saved state belongs to a different function. Nothing is changed in this case.
    pub fn restore(&mut self, saved: &[u8]) -> Result<(), Invalid> {
        let Self { bytes, writable, initial } = self;
        Invalid::unless(saved.len() == bytes.len(), || format!("configuration space has {} bytes", saved.len()))?;
        for (((at, saved), writable), initial) in saved.iter().enumerate().zip(writable.iter()).zip(initial.iter()) {
            let shown = if at == header::STATUS { STATUS_INTERRUPT } else { 0 };
            Invalid::unless((saved ^ initial) & !(writable | shown) == 0, || {
                format!("byte {at:#x} of configuration space belongs to a different function")
            })?;
        }
        bytes.copy_from_slice(saved);
        Ok(())
    }
}
