//! The service manager's file descriptor store. It keeps descriptors of VMMs, so that VMMs keep their devices if the
//! daemon is killed.
//!
//! The store keeps each VMM's connection. Otherwise, if the daemon were killed, the kernel would reset connections with
//! unread data, which QEMU does not survive ([`vmm_glue::socket::end`]). If the store has enough capacity, it also
//! keeps the VMM's journal and the descriptors to which the journal refers (`vmm_glue::journal`), so that the next
//! daemon can resume the connection. A connection that cannot be resumed is closed, so that the VMM notices the loss.
//!
//! Modules: [`Store`] and its keepers (add descriptors), `pace` (limits the rate of messages to the service manager),
//! [`Left`] (descriptors from an earlier run), [`names`].
//!
//! The crate does not take descriptors from the environment, and does not send other messages to the service manager;
//! the daemon does both.

#![forbid(unsafe_code)]

pub mod names;
mod pace;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use config::check::MAX_VMS;
use sd_notify::NotifyState;
use vmm_glue::journal::{DESCRIPTORS, Kept, Remains, SLOTS};
use vmm_glue::server::Keeper;
use vmm_glue::socket;

use names::{OF_VMM, name_of};
use pace::Pace;

/// Environment variable for the number of descriptors that the service manager (systemd 254 or newer) can store.
const CAPACITY: &str = "FDSTORE";
/// Number of descriptors that journals must leave free: two for the daemon's sockets, and two for each virtual machine
/// (its socket and its connection).
const RESERVED_DESCRIPTORS: usize = 2 + 2 * MAX_VMS;
/// Mask of all slots and the journal; see [`bit`].
const ALL: u32 = (1 << (SLOTS + 1)) - 1;

/// The service manager's store, if it has one.
#[derive(Debug, Default)]
pub struct Store {
    there: bool,
    /// Number of descriptors that journals may still add.
    room: Arc<AtomicUsize>,
    /// True if this process took over descriptors that another process stored.
    followed: bool,
}

impl Store {
    /// Returns the store described by the environment. `followed` is true if this process takes over from another one.
    #[must_use]
    pub fn found(followed: bool) -> Self {
        let capacity = std::env::var(CAPACITY).ok().and_then(|count| count.parse::<usize>().ok()).unwrap_or(0);
        let there = capacity > 0 && std::env::var_os("NOTIFY_SOCKET").is_some();
        Self { there, room: Arc::new(AtomicUsize::new(capacity.saturating_sub(RESERVED_DESCRIPTORS))), followed }
    }

    /// Returns true if the service manager has a store.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.there
    }

    /// Logs a message if VMMs would lose their devices when the daemon is killed.
    pub fn tell(&self) {
        let room = self.room.load(Ordering::Relaxed);
        if !self.there || room < DESCRIPTORS {
            let needed = RESERVED_DESCRIPTORS + MAX_VMS * DESCRIPTORS;
            tracing::info!(
                "VMMs lose their devices if this daemon is killed: no service manager stores enough descriptors for it; run it as a \
                 service with FileDescriptorStoreMax={needed} (and FDSTORE={needed} in its environment before systemd 254)"
            );
        }
    }

    /// Returns the keeper for a virtual machine's VMM. `before` is the mask of the descriptors that an earlier run has
    /// stored for this VMM ([`Left::held`]).
    #[must_use]
    pub fn keeper(&self, vm: &str, before: Option<u32>) -> Option<Arc<dyn Keeper>> {
        if !self.there {
            return None;
        }
        let held = if self.followed { ALL } else { before.unwrap_or(0) };
        // Count descriptors from an earlier run only if they are known to be in the store.
        let counted = if self.followed { 0 } else { held };
        let keeper = InStore {
            vm: vm.to_owned(),
            held: held.into(),
            counted: counted.into(),
            room: Arc::clone(&self.room),
            pace: Pace::new(),
        };
        let count = usize::try_from(counted.count_ones()).unwrap_or(0);
        let _enough =
            self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |room| Some(room.saturating_sub(count)));
        Some(Arc::new(keeper))
    }
}

/// Stores copies of a VMM's descriptors.
#[derive(Debug)]
struct InStore {
    vm: String,
    /// Mask of the descriptors that are, or may be, stored.
    held: AtomicU32,
    /// Mask of the descriptors that count towards the limit.
    counted: AtomicU32,
    room: Arc<AtomicUsize>,
    pace: Pace,
}

impl InStore {
    fn connection(&self) -> String {
        format!("{OF_VMM}{}", self.vm)
    }
}

impl Keeper for InStore {
    fn keep(&self, connection: BorrowedFd<'_>) {
        // Wait until the two messages that `store` sends are permitted, because a VMM may reconnect repeatedly.
        self.pace.wait();
        self.pace.wait();
        store(&self.connection(), connection);
    }

    fn release(&self) {
        // Without a journal, the next daemon cannot use the other descriptors.
        self.give_up_more();
        self.pace.wait();
        give_up(&self.connection());
    }

    fn keeps_more(&self) -> bool {
        self.room.load(Ordering::Relaxed) >= DESCRIPTORS
    }

    fn keep_more(&self, what: Kept, fd: BorrowedFd<'_>) -> bool {
        self.give_up(what);
        let taken = self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |room| room.checked_sub(1));
        if taken.is_err() {
            return false;
        }
        self.counted.fetch_or(bit(what), Ordering::Relaxed);
        self.held.fetch_or(bit(what), Ordering::Relaxed);
        self.pace.wait();
        push(&name_of(&self.vm, what), fd)
    }

    fn give_up(&self, what: Kept) {
        if self.held.fetch_and(!bit(what), Ordering::Relaxed) & bit(what) != 0 {
            self.pace.wait();
            give_up(&name_of(&self.vm, what));
        }
        if self.counted.fetch_and(!bit(what), Ordering::Relaxed) & bit(what) != 0 {
            self.room.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn is_busy(&self) -> bool {
        self.pace.is_busy()
    }

    fn give_up_more(&self) {
        self.give_up(Kept::Journal);
        (0..SLOTS).for_each(|slot| self.give_up(Kept::Slot(slot)));
    }
}

impl Drop for InStore {
    fn drop(&mut self) {
        // Another process may keep using the stored descriptors, so release only this process's share of the capacity.
        let counted = usize::try_from(self.counted.load(Ordering::Relaxed).count_ones()).unwrap_or(0);
        self.room.fetch_add(counted, Ordering::Relaxed);
    }
}

/// Returns the mask bit of a slot or of the journal.
fn bit(what: Kept) -> u32 {
    match what {
        Kept::Slot(slot) => 1u32.checked_shl(slot.min(SLOTS).into()).unwrap_or(0),
        Kept::Journal => 1 << SLOTS,
    }
}

/// Descriptors that an earlier run left for a virtual machine's VMM. Unless another owner takes them, dropping this
/// value closes the connection and removes them from the store.
#[derive(Debug)]
pub struct Left {
    vm: String,
    connection: Option<UnixStream>,
    kept: Vec<(Kept, OwnedFd)>,
}

impl Left {
    /// Creates an empty set for a virtual machine.
    #[must_use]
    pub fn new(vm: &str) -> Self {
        Self { vm: vm.to_owned(), connection: None, kept: Vec::new() }
    }

    /// Adds the VMM's connection.
    pub fn connection(&mut self, connection: UnixStream) {
        self.connection = Some(connection);
    }

    /// Adds the journal's descriptor, or the descriptor of a slot.
    pub fn add(&mut self, what: Kept, fd: OwnedFd) {
        if matches!(what, Kept::Slot(slot) if slot >= SLOTS) {
            give_up(&name_of(&self.vm, what));
            return;
        }
        self.kept.retain(|(of, _)| *of != what);
        self.kept.push((what, fd));
    }

    /// Returns a bit mask of the stored descriptors other than the connection, for [`Store::keeper`].
    #[must_use]
    pub fn held(&self) -> u32 {
        self.kept.iter().fold(0, |held, (what, _)| held | bit(*what))
    }

    /// Duplicates all descriptors, if they include a connection and its journal.
    ///
    /// # Errors
    /// Returns an error if this process has reached its limit on open descriptors.
    pub fn remains(&self) -> Option<std::io::Result<Remains>> {
        let connection = self.connection.as_ref()?;
        self.kept.iter().any(|(what, _)| *what == Kept::Journal).then(|| {
            let kept = self.kept.iter().map(|(what, fd)| Ok((*what, fd.try_clone()?)));
            Ok(Remains { connection: connection.try_clone()?, kept: kept.collect::<std::io::Result<_>>()? })
        })
    }

    /// Records that another owner has taken the descriptors.
    pub fn taken(mut self) {
        self.connection = None;
        self.kept.clear();
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        for (what, _) in self.kept.drain(..) {
            give_up(&name_of(&self.vm, what));
        }
        if let Some(connection) = self.connection.take() {
            socket::end(&connection);
            give_up(&format!("{OF_VMM}{}", self.vm));
        }
    }
}

/// Stores a copy of a descriptor in the service manager, and replaces any copy with the same name.
pub fn store(name: &str, fd: BorrowedFd<'_>) {
    give_up(name);
    push(name, fd);
}

/// Stores a copy of a descriptor in the service manager under an unused name.
fn push(name: &str, fd: BorrowedFd<'_>) -> bool {
    let state = [NotifyState::FdStore, NotifyState::FdName(name)];
    let pushed = sd_notify::notify_with_fds(&state, &[fd]);
    if let Err(error) = &pushed {
        tracing::warn!(name, %error, "the service manager did not store a descriptor");
    }
    pushed.is_ok()
}

/// Removes the copy with this name from the service manager.
pub fn give_up(name: &str) {
    if let Err(error) = sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)]) {
        tracing::warn!(%error, "the service manager cannot be notified");
    }
}
