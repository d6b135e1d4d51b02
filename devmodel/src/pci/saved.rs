//! Saved state of configuration space.

use super::{PciConfig, STATUS_INTERRUPT, header};
use saved_state::Invalid;

impl PciConfig {
    /// Returns the whole configuration space.
    #[must_use]
    pub fn save(&self) -> Vec<u8> {
        let Self {
            bytes,
            // Both fields follow from the function's configuration.
            writable: _,
            initial: _,
        } = self;
        bytes.to_vec()
    }

    /// Restores the state to a new function. Only guest-writable bits may differ from the reset state.
    ///
    /// # Errors
    /// Returns an error if the saved state belongs to a different function. In this case, this function is unchanged.
    pub fn restore(&mut self, saved: &[u8]) -> Result<(), Invalid> {
        let Self { bytes, writable, initial } = self;
        Invalid::unless(saved.len() == bytes.len(), || format!("{} bytes are not a configuration space", saved.len()))?;
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
