//! Names of descriptors in the service manager's store. They contain a slash, unlike the names of sockets from systemd
//! units.

use vmm_glue::journal::Kept;

/// Name prefix of virtual machines' sockets.
pub const OF_VM: &str = "vm/";
/// Name prefix of VMMs' connections.
pub(crate) const OF_VMM: &str = "vmm/";
/// Name suffix of a VMM's journal.
const JOURNAL: &str = "journal";
/// Name of the admin socket in the store.
pub const STORED_ADMIN: &str = "daemon/admin";
/// Name of the read-only socket in the store.
pub const STORED_READ_ONLY: &str = "daemon/admin-read";

/// Returns true if this is a name in the store, as opposed to the name of a socket from a systemd unit.
pub fn is_stored(name: &str) -> bool {
    name.contains('/')
}

/// Parses the name of a VMM's descriptor. Returns its virtual machine and its kind: `Ok(None)` for the connection
/// itself, and an error for an unknown kind. Returns `None` for any other name.
pub fn of_vmm(name: &str) -> Option<(&str, Result<Option<Kept>, ()>)> {
    let name = name.strip_prefix(OF_VMM)?;
    Some(match name.split_once('/') {
        None => (name, Ok(None)),
        Some((vm, JOURNAL)) => (vm, Ok(Some(Kept::Journal))),
        Some((vm, slot)) => (vm, slot.parse().map(|slot| Some(Kept::Slot(slot))).map_err(drop)),
    })
}

/// Returns the name of a descriptor of a virtual machine's VMM.
pub fn name_of(vm: &str, what: Kept) -> String {
    match what {
        Kept::Journal => format!("{OF_VMM}{vm}/{JOURNAL}"),
        Kept::Slot(slot) => format!("{OF_VMM}{vm}/{slot}"),
    }
}
