//! A function that is suspended, before it continues here or in another daemon.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::saved::SavedFunction;
use crate::shared::Shared;

/// A suspended function. Dropping it resumes the function.
#[derive(Debug)]
pub struct SuspendedFunction {
    shared: Arc<Shared>,
    is_left: bool,
}

impl SuspendedFunction {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, is_left: false }
    }

    /// Saves the function, with duplicates of its descriptors.
    ///
    /// # Errors
    /// The reason that it cannot be handed over.
    pub fn save(&self) -> Result<(SavedFunction, Vec<OwnedFd>), String> {
        let saved = self.shared.with_idle(|executor| executor.save());
        saved.unwrap_or_else(|| Err("its thread has ended".to_owned()))
    }

    /// Leaves the workers to another daemon, which has the saved function.
    pub fn leave(mut self) {
        self.is_left = true;
        self.shared.leave();
    }
}

impl Drop for SuspendedFunction {
    fn drop(&mut self) {
        if self.is_left {
            return;
        }
        if let Err(error) = self.shared.start() {
            tracing::error!(%error, "CUDA programs of this VM are no longer served: no thread");
        }
    }
}
