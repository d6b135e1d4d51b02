//! A virtual machine goes on with another card while it works.

use super::{Daemon, DaemonError};

impl Daemon {
    /// Moves a virtual machine to another card, live, if the revision is still `expected`.
    ///
    /// # Errors
    /// When it, or the card, is none that can be; the virtual machine goes on where it is then.
    pub fn move_vm(&self, name: &str, card: &str, expected: Option<&str>) -> Result<api::Moved, DaemonError> {
        self.move_if(name, Some(card), expected)
    }

    /// Moves a virtual machine, which [`Self::may_move`], to another card. Needs `changing`.
    ///
    /// # Errors
    /// As [`Self::move_vm`].
    pub(crate) fn move_vm_now(&self, name: &str, card: &str) -> Result<api::Moved, DaemonError> {
        let why = "this daemon cannot move VMs yet".to_owned();
        Err(DaemonError::CannotMove { vm: name.to_owned(), to: card.to_owned(), why })
    }
}
