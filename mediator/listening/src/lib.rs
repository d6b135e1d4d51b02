//! Listening sockets: sockets of the service manager's units, sockets from an earlier run, and new sockets.
//!
//! If the service manager stores file descriptors (`FileDescriptorStoreMax=`), it keeps a copy of each socket that the
//! daemon creates. The copy outlives the daemon, so a client that connects during a restart waits and is served
//! afterwards. The paths of such sockets remain when the daemon exits; a path is removed with its virtual machine.
//!
//! The store also keeps copies of the VMMs' connections, and of the files needed to resume them (crate `fdstore`).
//!
//! Modules: [`Sockets`], [`account`] (users and groups by name), [`folders`] (folders of one tenant or VM),
//! [`descriptors`] (the limit on open files), `activation` (descriptors from the service manager).
//!
//! The crate does not accept connections; the daemon and its VMs' threads do.

pub mod account;
mod activation;
pub mod descriptors;
pub mod folders;

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fdstore::names::{OF_VM, STORED_ADMIN, STORED_READ_ONLY};
use fdstore::{Left, Store, give_up, store};
use locks::{Mutex, rank};
use vmm_glue::server::Keeper;
use vmm_glue::socket::{self, BindError, BoundPath, SocketOptions};

use activation::{ADMIN, READ_ONLY};
pub use activation::{Activated, ActivationError, take};

/// A listening socket, and its path if this process created it.
#[derive(Debug)]
pub struct Listening {
    /// The listening socket.
    pub listener: UnixListener,
    /// Path of the socket, unless it belongs to the service manager.
    pub path: Option<SocketPath>,
}

/// Path of a socket that the daemon created. Dropping this value removes the path, unless the service manager has
/// stored the socket or another process owns the path.
#[derive(Debug)]
pub struct SocketPath {
    path: PathBuf,
    bound: Option<BoundPath>,
    /// Name in the store, if the socket is stored.
    stored: Option<String>,
    /// True while this process is responsible for removing the path.
    ours: Arc<AtomicBool>,
}

impl SocketPath {
    /// Returns the path of the socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the path and the stored copy of the socket, because the socket is no longer served.
    pub fn forget(mut self) {
        if let Some(name) = self.stored.take() {
            give_up(&name);
        }
    }
}

impl Drop for SocketPath {
    fn drop(&mut self) {
        let stays = self.stored.is_some() || !self.ours.load(Ordering::Acquire);
        if let Some(bound) = self.bound.take().filter(|_| stays) {
            bound.leave();
        }
    }
}

/// Sources of listening sockets.
#[derive(Debug, Default)]
pub struct Sockets {
    /// Sockets of units. They belong to the service manager. When a virtual machine is removed, its socket becomes
    /// available again.
    units: HashMap<String, UnixListener>,
    /// Unclaimed sockets from an earlier run.
    stored: Mutex<rank::Sockets, HashMap<String, UnixListener>>,
    /// Unclaimed VMM descriptors from a killed run, by virtual machine.
    left: Mutex<rank::Sockets, HashMap<String, Left>>,
    /// The service manager's store for copies.
    store: Store,
    /// True while the paths belong to this process. If two daemons have the same sockets, only one owns the paths.
    ours: Arc<AtomicBool>,
}

impl Sockets {
    /// Creates the sources from the service manager's sockets, and from its store if it has one. Dropping this value
    /// closes the connections that an earlier run served and this run has not claimed, so that their VMMs notice even
    /// if this run fails.
    #[must_use]
    pub fn new(activated: Activated) -> Self {
        Self { ours: Arc::new(AtomicBool::new(true)), store: Store::found(false), ..Self::handed(activated) }
    }

    /// Creates the sources from the sockets of another daemon, which keeps using them until [`Self::own`] is called.
    #[must_use]
    pub fn handed(Activated { listeners, stored, left }: Activated) -> Self {
        let (stored, left) = (Mutex::new(stored), Mutex::new(left));
        Self { units: listeners, stored, left, store: Store::found(true), ours: Arc::default() }
    }

    /// Logs a message if VMMs would lose their devices when this daemon is killed.
    pub fn tell(&self) {
        self.store.tell();
    }

    /// Takes the descriptors that an earlier run left for a virtual machine's VMM.
    pub fn left(&self, vm: &str) -> Option<Left> {
        self.left.lock().remove(vm)
    }

    /// Records that the sockets and their paths belong to this process from now on.
    pub fn own(&self) {
        self.ours.store(true, Ordering::Release);
    }

    /// Records that the sockets and their paths belong to another process from now on.
    pub fn leave(&self) {
        self.ours.store(false, Ordering::Release);
    }

    /// Returns the sockets of the service manager's units, by name.
    pub fn of_units(&self) -> impl Iterator<Item = (&str, &UnixListener)> {
        self.units.iter().map(|(name, listener)| (name.as_str(), listener))
    }

    /// Returns the keeper for the connection of a virtual machine's VMM, if the service manager stores connections.
    #[must_use]
    pub fn keeper(&self, vm: &str) -> Option<Arc<dyn Keeper>> {
        let before = self.left.lock().get(vm).map(Left::held);
        self.store.keeper(vm, before)
    }

    /// Returns the names of units' sockets, except those of the admin API.
    pub fn units(&self) -> impl Iterator<Item = &str> {
        self.units.keys().map(String::as_str).filter(|name| ![ADMIN, READ_ONLY].contains(name))
    }

    /// Returns the admin socket.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be created.
    pub fn admin(&self, path: &Path, rights: &SocketOptions) -> Result<Listening, BindError> {
        self.listen(ADMIN, STORED_ADMIN.to_owned(), path, rights)
    }

    /// Returns the read-only socket of the admin API.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be created.
    pub fn read_only(&self, path: &Path, rights: &SocketOptions) -> Result<Listening, BindError> {
        self.listen(READ_ONLY, STORED_READ_ONLY.to_owned(), path, rights)
    }

    /// Returns the socket of a virtual machine.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be created.
    pub fn of_vm(&self, name: &str, path: &Path, rights: &SocketOptions) -> Result<Listening, BindError> {
        self.listen(name, format!("{OF_VM}{name}"), path, rights)
    }

    fn listen(&self, unit: &str, stored: String, path: &Path, rights: &SocketOptions) -> Result<Listening, BindError> {
        if let Some(listener) = self.units.get(unit) {
            let copy = listener.try_clone().map_err(|source| BindError::System {
                action: "copy the service manager's socket for",
                path: path.to_owned(),
                source,
            })?;
            return Ok(Listening { listener: copy, path: None });
        }
        // Close a stored socket with a different path, and remove its path.
        let earlier = self.stored.lock().remove(&stored);
        let adopted = earlier.and_then(|listener| Some((socket::adopt(&listener)?, listener)));
        let adopted = match adopted {
            Some((bound, _)) if !self.ours.load(Ordering::Acquire) && bound.path() != path => {
                // The path belongs to the other daemon, which still uses it.
                bound.leave();
                let source = std::io::Error::other("an upgrade keeps the paths of sockets; restore the old path");
                return Err(BindError::System { action: "move a socket to", path: path.to_owned(), source });
            }
            adopted => adopted.filter(|(bound, _)| bound.path() == path),
        };
        let (bound, listener) = match adopted {
            Some((bound, listener)) => match bound.set_rights(rights) {
                Ok(()) => (bound, listener),
                Err(error) => {
                    if !self.ours.load(Ordering::Acquire) {
                        bound.leave();
                    }
                    return Err(error);
                }
            },
            None => {
                let (listener, bound) = socket::bind(path, rights)?;
                if self.store.is_there() {
                    store(&stored, listener.as_fd());
                }
                (bound, listener)
            }
        };
        let stored = self.store.is_there().then_some(stored);
        let ours = Arc::clone(&self.ours);
        Ok(Listening { listener, path: Some(SocketPath { path: path.to_owned(), bound: Some(bound), stored, ours }) })
    }

    /// Closes the unclaimed sockets and VMM connections from an earlier run, whose virtual machines no longer exist.
    pub fn end_unused(&self) {
        let left = std::mem::take(&mut *self.left.lock());
        drop(left);
        for (name, listener) in self.stored.lock().drain() {
            tracing::info!(name, "removed a socket from an earlier run");
            // Dropping the socket removes its path.
            drop(socket::adopt(&listener));
            give_up(&name);
        }
    }
}
