//! User accounts of the workers. The workers of each VM run as a separate user.
//!
//! The folder of a VM contains a file with the user ID. If workers outlive their daemon, the next daemon reads this
//! file and assigns the same user ID to the VM, and to no other VM.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::thread::{CapabilitySet, capabilities};

/// Capabilities that a daemon without root privileges needs to start and kill processes of other users.
const NEEDED: [(CapabilitySet, &str); 3] =
    [(CapabilitySet::SETUID, "CAP_SETUID"), (CapabilitySet::SETGID, "CAP_SETGID"), (CapabilitySet::KILL, "CAP_KILL")];

/// Name of the file with the user ID of a VM's workers, in the folder of the VM.
const RECORD: &str = "workers.user";

/// Reason why no user ID can be assigned to a VM's workers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoUser {
    /// The daemon lacks the capabilities to change user IDs.
    #[error(
        "workers cannot have the users of `cuda.worker_users`: the daemon lacks {0}; grant it in the unit as the drop-in \
         cuda.conf of the package describes, or remove the key"
    )]
    Rights(String),
    /// All user IDs are assigned.
    #[error("all {0} users of `cuda.worker_users` are assigned to VMs; configure a larger range")]
    Exhausted(usize),
    /// The user ID cannot be recorded.
    #[error("cannot record the user of the VM's workers: {0}")]
    Record(String),
}

/// User IDs of a card's workers.
#[derive(Debug)]
pub struct Users {
    first: u32,
    /// Set for each user ID that is assigned to a VM. `None` if no range is configured.
    taken: Option<Arc<[AtomicBool]>>,
}

/// User ID of a VM's workers. Dropping this value makes the user ID available to other VMs, unless [`Self::keep`] was
/// called.
#[derive(Debug)]
pub struct User {
    number: u32,
    index: usize,
    taken: Arc<[AtomicBool]>,
    is_kept: AtomicBool,
}

impl Users {
    /// Creates the range of user IDs of a card from the first and the last user ID in `cuda.worker_users`.
    #[must_use]
    pub fn new(range: Option<[u32; 2]>) -> Self {
        let Some([first, last]) = range else { return Self { first: 0, taken: None } };
        Self { first, taken: Some((first..=last).map(|_| AtomicBool::new(false)).collect()) }
    }

    /// Returns the user ID recorded in this VM's folder, or an unused user ID. Returns `None` if workers run as the
    /// daemon's user.
    ///
    /// # Errors
    /// Returns an error if no user ID can be assigned.
    pub fn take(&self, folder: &Path) -> Result<Option<User>, NoUser> {
        let user = self.reserve(folder)?;
        user.as_ref().map_or(Ok(()), |user| user.record(folder))?;
        Ok(user)
    }

    /// Like [`Self::take`], but does not record the user ID: until the VM moves, its workers have a user ID of another
    /// card.
    ///
    /// # Errors
    /// Returns an error if no user ID can be assigned.
    pub fn reserve(&self, folder: &Path) -> Result<Option<User>, NoUser> {
        let held = capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective);
        self.reserve_with(held, folder)
    }

    fn reserve_with(&self, held: CapabilitySet, folder: &Path) -> Result<Option<User>, NoUser> {
        let Some(taken) = &self.taken else { return Ok(None) };
        let missing: Vec<_> = NEEDED.iter().filter(|(one, _)| !held.contains(*one)).map(|(_, name)| *name).collect();
        if !missing.is_empty() {
            return Err(NoUser::Rights(missing.join(", ")));
        }
        let number = |index: usize| self.first.saturating_add(u32::try_from(index).unwrap_or(u32::MAX));
        let free = |index: usize| taken.get(index).is_some_and(|taken| !taken.swap(true, Ordering::Relaxed));
        let own = recorded(folder);
        let others = of_others(folder);
        let own = (0..taken.len()).find(|index| own == Some(number(*index))).filter(|index| free(*index));
        let index = own.or_else(|| (0..taken.len()).find(|index| !others.contains(&number(*index)) && free(*index)));
        let index = index.ok_or(NoUser::Exhausted(taken.len()))?;
        Ok(Some(User { number: number(index), index, taken: Arc::clone(taken), is_kept: AtomicBool::new(false) }))
    }
}

/// Returns the user ID recorded for the VM of this folder.
fn recorded(folder: &Path) -> Option<u32> {
    std::fs::read_to_string(folder.join(RECORD)).ok()?.parse().ok()
}

/// Returns the user IDs recorded for the VMs of the other folders.
fn of_others(folder: &Path) -> Vec<u32> {
    let folders = folder.parent().and_then(|parent| std::fs::read_dir(parent).ok());
    let folders = folders.into_iter().flatten().flatten().map(|entry| entry.path());
    folders.filter(|path| path != folder).filter_map(|path| recorded(&path)).collect()
}

/// Deletes the record of a VM that is being removed.
pub fn forget(folder: &Path) {
    // The file does not exist if the VM had no separate user ID.
    let _ = std::fs::remove_file(folder.join(RECORD));
}

impl User {
    /// Returns the user ID.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Records the user ID in the VM's folder.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn record(&self, folder: &Path) -> Result<(), NoUser> {
        let written = std::fs::write(folder.join(RECORD), self.number.to_string());
        written.map_err(|error| NoUser::Record(error.to_string()))
    }

    /// Reserves the user ID permanently, because processes with this ID are still running.
    pub fn keep(&self) {
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

    /// Creates a folder for each of the VMs `names`.
    fn folders(names: &[&str]) -> (tempfile::TempDir, Vec<std::path::PathBuf>) {
        let all = tempfile::tempdir().expect("a folder");
        let folders: Vec<_> = names.iter().map(|name| all.path().join(name)).collect();
        folders.iter().for_each(|folder| std::fs::create_dir(folder).expect("a folder"));
        (all, folders)
    }

    /// Takes a user ID for a VM, as if the daemon had all capabilities.
    fn taken(users: &Users, folder: &Path) -> Result<User, NoUser> {
        let user = users.reserve_with(all(), folder)?.expect("a range");
        user.record(folder)?;
        Ok(user)
    }

    #[test]
    fn vms_have_different_users_until_they_are_removed() {
        let (_all, vms) = folders(&["a", "b", "c"]);
        let users = Users::new(Some([500, 501]));
        let take = |vm: usize| taken(&users, &vms[vm]);
        let (first, second) = (take(0).expect("free"), take(1).expect("free"));
        assert_eq!([first.number(), second.number()], [500, 501]);
        assert_eq!(take(2).map(|_| ()), Err(NoUser::Exhausted(2)));
        drop(first);
        forget(&vms[0]);
        assert_eq!(take(2).map(|user| user.number()), Ok(500));
        forget(&vms[2]);
        second.keep();
        drop(second);
        let first = take(0).expect("free");
        assert_eq!(first.number(), 500);
        assert!(take(2).is_err(), "processes of the other user are still running");
    }

    #[test]
    fn vm_keeps_its_user_in_the_next_daemon() {
        let (_all, vms) = folders(&["a", "b", "new"]);
        let before = Users::new(Some([500, 502]));
        let numbers = [0, 1].map(|vm| taken(&before, &vms[vm]).expect("free").number());
        assert_eq!(numbers, [500, 501]);
        let next = Users::new(Some([500, 502]));
        let take = |vm: usize| taken(&next, &vms[vm]);
        let taken = [2, 1, 0].map(|vm| take(vm).expect("free"));
        assert_eq!(taken.map(|user| user.number()), [502, 501, 500]);
    }

    #[test]
    fn daemon_without_rights_names_them() {
        let (_all, vms) = folders(&["a"]);
        let users = Users::new(Some([500, 501]));
        let error = users.reserve_with(CapabilitySet::KILL, &vms[0]).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("lacks CAP_SETUID, CAP_SETGID; grant"), "{error}");
        assert!(matches!(Users::new(None).reserve_with(CapabilitySet::empty(), &vms[0]), Ok(None)));
    }

    #[test]
    fn user_on_another_card_is_recorded_when_the_vm_has_moved() {
        let (_all, vms) = folders(&["a", "b"]);
        let (first, second) = (Users::new(Some([500, 501])), Users::new(Some([600, 601])));
        let here = taken(&first, &vms[0]).expect("free");
        let there = second.reserve_with(all(), &vms[0]).expect("free").expect("a range");
        assert_eq!((here.number(), there.number(), recorded(&vms[0])), (500, 600, Some(500)));
        assert_eq!(taken(&second, &vms[1]).map(|user| user.number()), Ok(601), "the other one is reserved");
        there.record(&vms[0]).expect("written");
        assert_eq!(recorded(&vms[0]), Some(600));
    }
}
