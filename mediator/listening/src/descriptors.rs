//! Limits on this process's descriptors, which are shared by all virtual machines and the operator.
//!
//! For each memory file that a VMM lends, the daemon keeps a descriptor. Therefore, each VM has a fixed share of the
//! process's descriptors, computed for the maximum number of VMs. The rest is for cards, sockets and the admin API.

use config::check::MAX_VMS;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Number of descriptors for cards, listening sockets, admin API connections, and briefly opened files.
const RESERVED_DESCRIPTORS: u64 = 1024;
/// Number of descriptors per VM in addition to its memory files: its socket and connections, events, mappings, journal,
/// and 8 sets of 16 descriptors that are waiting for their messages.
const OF_VM: u64 = 160;
/// Maximum number of memory files per VM. QEMU uses one per memory backend.
const FILES_MAX: u64 = 512;
/// Minimum number of memory files per VM, even if few descriptors are available. Suffices for a VMM to boot.
const FILES_MIN: u64 = 16;
/// Number of copies of each descriptor during an upgrade: one in this daemon, and one in the next.
const COPIES: u64 = 2;

/// Raises this process's limit on open descriptors to the maximum, and warns if even that is too low for the maximum
/// number of virtual machines.
pub fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!(%error, "the limit on open files (RLIMIT_NOFILE) could not be raised");
    }
    let open_files = open_files();
    if part(open_files) < OF_VM + FILES_MIN {
        tracing::warn!(
            open_files,
            "RLIMIT_NOFILE is too low for {MAX_VMS} VMs with the maximum number of descriptors; raise it (LimitNOFILE= of the unit) to {}",
            (OF_VM + FILES_MIN) * COPIES * vms() + RESERVED_DESCRIPTORS
        );
    }
}

/// Returns the maximum number of distinct memory files per virtual machine.
pub fn files_of_vm() -> usize {
    usize::try_from(files(open_files())).unwrap_or(usize::MAX)
}

fn open_files() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

fn vms() -> u64 {
    u64::try_from(MAX_VMS).unwrap_or(u64::MAX)
}

/// Returns one VM's share of `open_files` descriptors.
fn part(open_files: u64) -> u64 {
    open_files.saturating_sub(RESERVED_DESCRIPTORS) / (COPIES * vms())
}

fn files(open_files: u64) -> u64 {
    part(open_files).saturating_sub(OF_VM).clamp(FILES_MIN, FILES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_vms_together_leave_the_reserve_whatever_they_lend() {
        // Check the unit's limit, and higher limits.
        for open_files in [65_536, 131_072, 1 << 20, u64::MAX] {
            let all = (files(open_files) + OF_VM) * COPIES * vms();
            assert!(all <= open_files - RESERVED_DESCRIPTORS, "{open_files}: {all}");
            assert!(files(open_files) > 256, "{open_files}: a VMM with 256 memory devices");
        }
        assert_eq!((files(1024), files(u64::MAX)), (FILES_MIN, FILES_MAX));
    }
}
