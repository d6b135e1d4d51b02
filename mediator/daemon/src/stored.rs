//! Names of the descriptors that the service manager keeps for the daemon. No name of a unit's socket has a slash.

/// Begin of the names of virtual machines' sockets.
pub(crate) const OF_VM: &str = "vm/";
/// Begin of the names of their VMMs' connections.
pub(crate) const OF_VMM: &str = "vmm/";
/// The admin socket.
pub(crate) const STORED_ADMIN: &str = "daemon/admin";
/// The read-only socket.
pub(crate) const STORED_READ_ONLY: &str = "daemon/admin-read";

/// Returns whether a socket of this name comes from the store.
pub(crate) fn is_stored(name: &str) -> bool {
    name.contains('/')
}

/// Returns whether a socket of this name in the store is a connection.
pub(crate) fn is_connection(name: &str) -> bool {
    name.starts_with(OF_VMM)
}
