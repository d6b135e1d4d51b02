//! The service manager's store of descriptors: what is kept there of VMMs, so that a daemon that is killed does not take their
//! devices along.
//!
//! Of each VMM there is its connection, which a daemon that is killed would reset if something unread is in it, and QEMU does not
//! survive that ([`vmm_glue::socket::end`]); and, where the store has room for it, its journal with what that names (`vmm_glue::journal`), by
//! which the next daemon goes on with the connection. What the next one cannot go on with it ends, so that the VMM learns it.
//!
//! Parts: [`Store`] and its keepers (descriptors put there), `pace` (bounds the messages for that), [`Left`] (descriptors of an
//! earlier run), [`names`].
//!
//! What it does not do: take descriptors from the environment, or say what else goes to the service manager; the daemon does both.

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

/// Set by the service manager to the number of descriptors that it keeps (systemd 254 and newer).
const CAPACITY: &str = "FDSTORE";
/// Descriptors that journals leave to others: two sockets of the daemon, the socket and the connection of each virtual machine.
const OTHERS: usize = 2 + 2 * MAX_VMS;
/// All that a journal can have in the store, by bits as [`bit`] says.
const ALL: u32 = (1 << (SLOTS + 1)) - 1;

/// The store, if there is one.
#[derive(Debug, Default)]
pub struct Store {
    there: bool,
    /// Descriptors that journals may have still.
    room: Arc<AtomicUsize>,
    /// Another process has put there what this one goes on with.
    followed: bool,
}

impl Store {
    /// The one that the environment names; `followed`: this process goes on where another one is.
    #[must_use]
    pub fn found(followed: bool) -> Self {
        let capacity = std::env::var(CAPACITY).ok().and_then(|count| count.parse::<usize>().ok()).unwrap_or(0);
        let there = capacity > 0 && std::env::var_os("NOTIFY_SOCKET").is_some();
        Self { there, room: Arc::new(AtomicUsize::new(capacity.saturating_sub(OTHERS))), followed }
    }

    /// Returns whether there is one.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.there
    }

    /// Says whether VMMs outlive the daemon if it is killed.
    pub fn tell(&self) {
        let room = self.room.load(Ordering::Relaxed);
        if !self.there || room < DESCRIPTORS {
            let needed = OTHERS + MAX_VMS * DESCRIPTORS;
            tracing::info!(
                "VMMs lose their devices if this daemon is killed: no service manager keeps enough descriptors for it; run it as a \
                 service with FileDescriptorStoreMax={needed} (and FDSTORE={needed} in its environment before systemd 254)"
            );
        }
    }

    /// The keeper of a virtual machine's VMM; `before`: what an earlier run has there of it ([`Left::held`]).
    #[must_use]
    pub fn keeper(&self, vm: &str, before: Option<u32>) -> Option<Arc<dyn Keeper>> {
        if !self.there {
            return None;
        }
        let held = if self.followed { ALL } else { before.unwrap_or(0) };
        // Those of an earlier run count as long as they are there; those that may be there do not.
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

/// Keeps copies of a VMM's descriptors in the store.
#[derive(Debug)]
struct InStore {
    vm: String,
    /// Those that are there, or may be.
    held: AtomicU32,
    /// Those of them that were taken out of the room.
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
        // Two messages: a VMM may connect again and again, too.
        self.pace.wait();
        self.pace.wait();
        store(&self.connection(), connection);
    }

    fn release(&self) {
        // Without a journal, nobody goes on with what is left.
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
        // What is there another process may go on with; the room is this one's.
        let counted = usize::try_from(self.counted.load(Ordering::Relaxed).count_ones()).unwrap_or(0);
        self.room.fetch_add(counted, Ordering::Relaxed);
    }
}

/// The place of a descriptor among a journal's.
fn bit(what: Kept) -> u32 {
    match what {
        Kept::Slot(slot) => 1u32.checked_shl(slot.min(SLOTS).into()).unwrap_or(0),
        Kept::Journal => 1 << SLOTS,
    }
}

/// Remains of an earlier run: those of a virtual machine's VMM. Unless it is taken, the VMM is told the end, and nothing stays in the store.
#[derive(Debug)]
pub struct Left {
    vm: String,
    connection: Option<UnixStream>,
    kept: Vec<(Kept, OwnedFd)>,
}

impl Left {
    /// Of this virtual machine, nothing yet.
    #[must_use]
    pub fn new(vm: &str) -> Self {
        Self { vm: vm.to_owned(), connection: None, kept: Vec::new() }
    }

    /// Adds its connection.
    pub fn connection(&mut self, connection: UnixStream) {
        self.connection = Some(connection);
    }

    /// Adds a descriptor.
    pub fn add(&mut self, what: Kept, fd: OwnedFd) {
        if matches!(what, Kept::Slot(slot) if slot >= SLOTS) {
            give_up(&name_of(&self.vm, what));
            return;
        }
        self.kept.retain(|(of, _)| *of != what);
        self.kept.push((what, fd));
    }

    /// Says what there is beside the connection, for [`Store::keeper`].
    #[must_use]
    pub fn held(&self) -> u32 {
        self.kept.iter().fold(0, |held, (what, _)| held | bit(*what))
    }

    /// Another descriptor of all, if a VMM is there, and a journal of it.
    ///
    /// # Errors
    /// If this process may have no more descriptors.
    pub fn remains(&self) -> Option<std::io::Result<Remains>> {
        let connection = self.connection.as_ref()?;
        self.kept.iter().any(|(what, _)| *what == Kept::Journal).then(|| {
            let kept = self.kept.iter().map(|(what, fd)| Ok((*what, fd.try_clone()?)));
            Ok(Remains { connection: connection.try_clone()?, kept: kept.collect::<std::io::Result<_>>()? })
        })
    }

    /// Another goes on with it.
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

/// Gives the service manager a copy, in the place of one of that name.
pub fn store(name: &str, fd: BorrowedFd<'_>) {
    give_up(name);
    push(name, fd);
}

/// Gives the service manager a copy under a name that nothing has there.
fn push(name: &str, fd: BorrowedFd<'_>) -> bool {
    let state = [NotifyState::FdStore, NotifyState::FdName(name)];
    let pushed = sd_notify::notify_with_fds(&state, &[fd]);
    if let Err(error) = &pushed {
        tracing::warn!(name, %error, "the service manager does not keep a descriptor");
    }
    pushed.is_ok()
}

/// Takes the service manager's copy away.
pub fn give_up(name: &str) {
    if let Err(error) = sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)]) {
        tracing::warn!(%error, "the service manager cannot be told");
    }
}
