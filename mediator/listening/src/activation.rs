//! Sockets passed by the service manager (`LISTEN_FDS`): sockets of its units, and stored sockets and connections from
//! an earlier run of the daemon. The unit socket of the admin API is named `admin`; other unit sockets are named after
//! their virtual machines.
#![expect(unsafe_code, reason = "takes file descriptors by number")]
// UNSAFETY: the service manager passes descriptors as numbers, and each number is converted to an owned descriptor
// once. No other code in this module is unsafe.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};

use rustix::net::{AddressFamily, SocketType, sockopt};

use fdstore::{Left, give_up, names as stored};

/// Name of the admin socket's descriptor.
pub(crate) const ADMIN: &str = "admin";
/// Name of the read-only socket's descriptor.
pub(crate) const READ_ONLY: &str = "admin-read";

/// Sockets and connections passed by the service manager.
#[derive(Debug, Default)]
pub struct Activated {
    /// Listening sockets of units, by name.
    pub listeners: HashMap<String, UnixListener>,
    /// Sockets from the store, by their names in the store.
    pub stored: HashMap<String, UnixListener>,
    /// Descriptors of VMMs from an earlier run, by virtual machine.
    pub left: HashMap<String, Left>,
}

/// Reason why a passed descriptor is unusable.
#[derive(Debug, thiserror::Error)]
pub enum ActivationError {
    /// The environment does not follow the service manager's protocol.
    #[error("the environment variables LISTEN_PID, LISTEN_FDS, LISTEN_FDNAMES do not follow systemd's protocol")]
    Environment(#[source] std::io::Error),
    /// The descriptor with this name is not a listening socket.
    #[error("socket `{name}` from the service manager is not a listening UNIX stream socket")]
    NotListening {
        /// Name of the descriptor.
        name: String,
    },
    /// Two descriptors have the same name.
    #[error("the service manager handed over two sockets named `{name}`; set FileDescriptorName= in their units")]
    Twice {
        /// Name of both descriptors.
        name: String,
    },
}

/// Takes the descriptors that the service manager passed. Must be called early and only once, because a second call
/// would use the same numbers.
///
/// # Errors
/// Returns an [`ActivationError`] if a descriptor is unusable.
pub fn take() -> Result<Activated, ActivationError> {
    let fds = sd_notify::listen_fds_with_names().map_err(ActivationError::Environment)?;
    collect(fds.map(|(fd, name)| {
        // SAFETY: according to the protocol, the numbers in LISTEN_FDS are open descriptors that belong only to this
        // process. `take` is called once, before any other code opens or closes descriptors, and `listen_fds` has
        // checked the process.
        let fd = unsafe { take_number(fd) };
        (fd, name)
    }))
}

/// Takes ownership of a descriptor, given its number.
///
/// # Safety
/// The descriptor must be open and must not have another owner.
unsafe fn take_number(fd: RawFd) -> OwnedFd {
    // SAFETY: the caller upholds the same requirement.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn collect(fds: impl Iterator<Item = (OwnedFd, String)>) -> Result<Activated, ActivationError> {
    let mut activated = Activated::default();
    for (fd, name) in fds {
        // If two stored descriptors have the same name, the later one is newer.
        if let Some((vm, what)) = stored::of_vmm(&name) {
            let left = activated.left.entry(vm.to_owned()).or_insert_with(|| Left::new(vm));
            match what {
                Ok(None) if is_stream(fd.as_fd()) => left.connection(UnixStream::from(fd)),
                Ok(Some(what)) => left.add(what, fd),
                _ => {
                    eprintln!("mediatord: `{name}` in the service manager's store is unknown and is removed");
                    give_up(&name);
                }
            }
            continue;
        }
        if !is_stream(fd.as_fd()) || sockopt::socket_acceptconn(&fd) != Ok(true) {
            if stored::is_stored(&name) {
                eprintln!(
                    "mediatord: `{name}` in the service manager's store is not a listening socket and is removed"
                );
                give_up(&name);
                continue;
            }
            return Err(ActivationError::NotListening { name });
        }
        if stored::is_stored(&name) {
            activated.stored.insert(name, UnixListener::from(fd));
            continue;
        }
        if activated.listeners.insert(name.clone(), UnixListener::from(fd)).is_some() {
            return Err(ActivationError::Twice { name });
        }
    }
    Ok(activated)
}

impl Activated {
    /// Checks that all unit sockets and stored sockets are listening UNIX stream sockets.
    ///
    /// # Errors
    /// Returns an error with the name of the first socket that is not.
    pub fn check(&self) -> Result<(), ActivationError> {
        let mut all = self.listeners.iter().chain(&self.stored);
        let other =
            all.find(|(_, socket)| !is_stream(socket.as_fd()) || sockopt::socket_acceptconn(socket) != Ok(true));
        other.map_or(Ok(()), |(name, _)| Err(ActivationError::NotListening { name: name.clone() }))
    }
}

fn is_stream(fd: BorrowedFd<'_>) -> bool {
    sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX) && sockopt::socket_type(fd) == Ok(SocketType::STREAM)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_are_taken_by_name_and_others_refused() {
        let folder = tempfile::tempdir().unwrap();
        let listener = |name: &str| OwnedFd::from(UnixListener::bind(folder.path().join(name)).unwrap());
        let pair = [(listener("1"), "admin".to_owned()), (listener("2"), "a".to_owned())];
        let activated = collect(pair.into_iter()).unwrap();
        assert!(activated.listeners.contains_key(ADMIN) && activated.listeners.contains_key("a"));

        let twice = [(listener("3"), "a".to_owned()), (listener("4"), "a".to_owned())];
        assert!(matches!(collect(twice.into_iter()), Err(ActivationError::Twice { .. })));

        let kept =
            [(listener("5"), "vm/a".to_owned()), (listener("6"), "vm/a".to_owned()), (listener("7"), "a".to_owned())];
        let activated = collect(kept.into_iter()).unwrap();
        assert_eq!((activated.listeners.len(), activated.stored.len()), (1, 1));
        let address = activated.stored["vm/a"].local_addr().unwrap();
        assert_eq!(address.as_pathname(), Some(&*folder.path().join("6")));

        let (stream, other) = UnixStream::pair().unwrap();
        let activated = collect([(OwnedFd::from(stream), "vmm/a".to_owned())].into_iter()).unwrap();
        assert!(activated.left.contains_key("a") && activated.stored.is_empty());
        let error = collect([(OwnedFd::from(other), "b".to_owned())].into_iter()).unwrap_err();
        assert!(error.to_string().contains("socket `b`"), "{error}");
    }
}
