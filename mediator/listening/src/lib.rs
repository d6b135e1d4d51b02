//! The listening sockets: of units of the service manager, of an earlier run, or made anew.
//!
//! With a service manager that keeps file descriptors (`FileDescriptorStoreMax=`), a copy of each socket that the daemon makes
//! lies there. It outlives the daemon, so that who connects while the daemon is started again waits, and is served then. The
//! daemon leaves the paths of such sockets when it ends; they go when a virtual machine is removed.
//!
//! So do copies of the connections of VMMs, and the files that it takes to continue with them (crate `fdstore`).
//!
//! Parts: [`Sockets`], [`folders`] (folders that are one tenant's or VM's), [`descriptors`] (the limit of open files),
//! `activation` (descriptors of the service manager).
//!
//! What it does not do: accept connections; the daemon and its VMs' threads do.

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

/// A listening socket, and the path that is ours.
#[derive(Debug)]
pub struct Listening {
    /// The socket.
    pub listener: UnixListener,
    /// Its path, unless it is the service manager's.
    pub path: Option<SocketPath>,
}

/// The path of a socket that the daemon made; it is removed with this, unless the service manager keeps the socket.
#[derive(Debug)]
pub struct SocketPath {
    path: PathBuf,
    bound: Option<BoundPath>,
    /// Name in the store, if a copy is there.
    stored: Option<String>,
    /// Set while it is this process's to remove.
    ours: Arc<AtomicBool>,
}

impl SocketPath {
    /// Returns where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the socket also from the store: nobody will serve it any more.
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
    /// Of units. They are the service manager's, and come back when their virtual machine is removed.
    units: HashMap<String, UnixListener>,
    /// From an earlier run, that nobody has taken yet.
    stored: Mutex<rank::Sockets, HashMap<String, UnixListener>>,
    /// Remains of the VMMs of an earlier run that was killed, by virtual machine, that nobody has taken yet.
    left: Mutex<rank::Sockets, HashMap<String, Left>>,
    /// The service manager's, which keeps copies.
    store: Store,
    /// Set while the paths are this process's: while two daemons have the sockets, they are one's.
    ours: Arc<AtomicBool>,
}

impl Sockets {
    /// Those that the service manager handed over, and its store if it has one. VMMs that an earlier run served and this one does
    /// not are told that their device has gone, so that they learn it whatever becomes of this run.
    #[must_use]
    pub fn new(activated: Activated) -> Self {
        Self { ours: Arc::new(AtomicBool::new(true)), store: Store::found(false), ..Self::handed(activated) }
    }

    /// Those of another daemon, which goes on with them unless they become [ours](Self::own).
    #[must_use]
    pub fn handed(Activated { listeners, stored, left }: Activated) -> Self {
        let (stored, left) = (Mutex::new(stored), Mutex::new(left));
        Self { units: listeners, stored, left, store: Store::found(true), ours: Arc::default() }
    }

    /// Says whether VMMs outlive this daemon if it is killed.
    pub fn tell(&self) {
        self.store.tell();
    }

    /// Takes the remains of a virtual machine's VMM of an earlier run.
    pub fn left(&self, vm: &str) -> Option<Left> {
        self.left.lock().remove(vm)
    }

    /// The sockets and their paths are this process's from now on.
    pub fn own(&self) {
        self.ours.store(true, Ordering::Release);
    }

    /// The sockets and their paths are another process's from now on.
    pub fn leave(&self) {
        self.ours.store(false, Ordering::Release);
    }

    /// The sockets of the service manager's units, by name.
    pub fn of_units(&self) -> impl Iterator<Item = (&str, &UnixListener)> {
        self.units.iter().map(|(name, listener)| (name.as_str(), listener))
    }

    /// Returns what keeps the connection of a virtual machine's VMM, if the service manager does.
    #[must_use]
    pub fn keeper(&self, vm: &str) -> Option<Arc<dyn Keeper>> {
        let before = self.left.lock().get(vm).map(Left::held);
        self.store.keeper(vm, before)
    }

    /// Names of units' sockets, but for those of the admin API.
    pub fn units(&self) -> impl Iterator<Item = &str> {
        self.units.keys().map(String::as_str).filter(|name| ![ADMIN, READ_ONLY].contains(name))
    }

    /// The admin socket.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn admin(&self, path: &Path, rights: &SocketOptions) -> Result<Listening, BindError> {
        self.listen(ADMIN, STORED_ADMIN.to_owned(), path, rights)
    }

    /// The read-only socket of the admin API.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn read_only(&self, path: &Path, rights: &SocketOptions) -> Result<Listening, BindError> {
        self.listen(READ_ONLY, STORED_READ_ONLY.to_owned(), path, rights)
    }

    /// The socket of a virtual machine.
    ///
    /// # Errors
    /// When it cannot be made.
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
        // One of another path ends here, and its path with it.
        let earlier = self.stored.lock().remove(&stored);
        let adopted = earlier.and_then(|listener| Some((socket::adopt(&listener)?, listener)));
        let adopted = match adopted {
            Some((bound, _)) if !self.ours.load(Ordering::Acquire) && bound.path() != path => {
                // It is the other daemon's, which goes on with it.
                bound.leave();
                let source = std::io::Error::other("an upgrade keeps the paths of sockets; put the old one back");
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

    /// Ends the sockets of an earlier run that nobody has taken: what they were for is not there any more.
    pub fn end_unused(&self) {
        let left = std::mem::take(&mut *self.left.lock());
        drop(left);
        for (name, listener) in self.stored.lock().drain() {
            tracing::info!(name, "a socket of an earlier run is removed");
            // The path goes with this.
            drop(socket::adopt(&listener));
            give_up(&name);
        }
    }
}
