//! Users of workers: each VM's workers have one that no other VM's have.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::thread::{CapabilitySet, capabilities};

/// Capabilities that a daemon needs, which is not root, to start and to end processes of other users.
const NEEDED: [(CapabilitySet, &str); 3] =
    [(CapabilitySet::SETUID, "CAP_SETUID"), (CapabilitySet::SETGID, "CAP_SETGID"), (CapabilitySet::KILL, "CAP_KILL")];

/// Reason that a VM's workers get no user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoUser {
    /// The daemon may not change users.
    #[error(
        "workers cannot have the users of `cuda.worker_users`: the daemon lacks {0}; grant it in the unit as the drop-in \
         cuda.conf of the package describes, or remove the key"
    )]
    Rights(String),
    /// All users are in use.
    #[error("all {0} users of `cuda.worker_users` have VMs, expected a larger range")]
    Exhausted(usize),
}

/// The users of a card's workers.
#[derive(Debug)]
pub(super) struct Users {
    first: u32,
    /// The users that VMs have. `None` without a range.
    taken: Option<Arc<[AtomicBool]>>,
}

/// The user of a VM's workers. Another VM may have it once this is dropped.
#[derive(Debug)]
pub(super) struct User {
    number: u32,
    index: usize,
    taken: Arc<[AtomicBool]>,
    is_kept: AtomicBool,
}

impl Users {
    pub(super) fn new(range: Option<[u32; 2]>) -> Self {
        let Some([first, last]) = range else { return Self { first: 0, taken: None } };
        Self { first, taken: Some((first..=last).map(|_| AtomicBool::new(false)).collect()) }
    }

    /// Returns a user that no other VM has. `None` if workers have the daemon's user.
    pub(super) fn take(&self) -> Result<Option<User>, NoUser> {
        let held = capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective);
        self.take_with(held)
    }

    fn take_with(&self, held: CapabilitySet) -> Result<Option<User>, NoUser> {
        let Some(taken) = &self.taken else { return Ok(None) };
        let missing: Vec<_> = NEEDED.iter().filter(|(one, _)| !held.contains(*one)).map(|(_, name)| *name).collect();
        if !missing.is_empty() {
            return Err(NoUser::Rights(missing.join(", ")));
        }
        let index = taken.iter().position(|taken| !taken.swap(true, Ordering::Relaxed));
        let index = index.ok_or(NoUser::Exhausted(taken.len()))?;
        let number = self.first.saturating_add(u32::try_from(index).unwrap_or(u32::MAX));
        Ok(Some(User { number, index, taken: Arc::clone(taken), is_kept: AtomicBool::new(false) }))
    }
}

impl User {
    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// Gives the user to no other VM: processes of it are left.
    pub(super) fn keep(&self) {
        self.is_kept.store(true, Ordering::Relaxed);
    }
}

impl Drop for User {
    fn drop(&mut self) {
        if let Some(taken) = self.taken.get(self.index).filter(|_| !*self.is_kept.get_mut()) {
            taken.store(false, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> CapabilitySet {
        NEEDED.iter().fold(CapabilitySet::empty(), |all, (one, _)| all | *one)
    }

    #[test]
    fn vms_have_different_users_until_they_are_removed() {
        let users = Users::new(Some([500, 501]));
        let take = || users.take_with(all()).map(|user| user.expect("a range"));
        let (first, second) = (take().expect("free"), take().expect("free"));
        assert_eq!([first.number(), second.number()], [500, 501]);
        assert_eq!(take().map(|_| ()), Err(NoUser::Exhausted(2)));
        drop(first);
        assert_eq!(take().map(|user| user.number()), Ok(500));
        second.keep();
        drop(second);
        let first = take().expect("free");
        assert_eq!(first.number(), 500);
        assert!(take().is_err(), "processes of the other user are left");
    }

    #[test]
    fn daemon_without_rights_names_them() {
        let users = Users::new(Some([500, 501]));
        let error = users.take_with(CapabilitySet::KILL).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("lacks CAP_SETUID, CAP_SETGID; grant"), "{error}");
        assert!(matches!(Users::new(None).take_with(CapabilitySet::empty()), Ok(None)));
    }
}
