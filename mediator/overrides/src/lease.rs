//! Leases: values of a tenant's keys that apply until a process exits, and the file that stores these values for the
//! next daemon.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use config::TenantSpec;
use config::patch::{self, table};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A process whose exit the kernel reports.
#[derive(Debug)]
pub struct Process {
    pid: i32,
    /// Inode number of the process's pidfd. It is unique to the process if the kernel supports this (Linux 6.9), and
    /// otherwise the same for all processes.
    number: u64,
    handle: OwnedFd,
}

impl Process {
    /// Opens a process by its ID.
    ///
    /// # Errors
    /// Returns an error if no process has this ID, or if no file descriptors are available.
    pub fn open(pid: i32) -> io::Result<Self> {
        let known = Pid::from_raw(pid).ok_or(io::ErrorKind::NotFound)?;
        let handle = pidfd_open(known, PidfdFlags::empty())?;
        let number = rustix::fs::fstat(&handle)?.st_ino;
        Ok(Self { pid, number, handle })
    }

    fn has_ended(&self) -> bool {
        let mut ready = [PollFd::new(&self.handle, PollFlags::IN)];
        !matches!(poll(&mut ready, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0))
    }
}

/// A key's values before and during a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Values {
    before: Value,
    leased: Value,
}

/// Keys that a lease sets, by path.
type Keys = BTreeMap<String, Values>;

/// Values of a tenant's keys that apply until a process exits.
#[derive(Debug)]
pub struct Lease {
    process: Process,
    keys: Keys,
}

/// Stored form of a lease.
#[derive(Debug, Serialize, Deserialize)]
pub struct SavedLease {
    pid: i32,
    number: u64,
    keys: Keys,
}

impl Lease {
    /// Creates a lease for a process that changes a tenant.
    ///
    /// # Errors
    /// Returns an error if a value cannot be represented as JSON.
    pub fn new(process: Process, before: &TenantSpec, leased: &TenantSpec) -> Result<Self, String> {
        let differences = patch::differences(&table(before)?, &table(leased)?);
        let keys = differences.into_iter().map(|one| (one.key, Values { before: one.from, leased: one.to })).collect();
        Ok(Self { process, keys })
    }

    /// Returns the process ID.
    pub fn pid(&self) -> i32 {
        self.process.pid
    }

    /// Returns true if the process has exited.
    pub fn has_ended(&self) -> bool {
        self.process.has_ended()
    }

    /// Returns the values to restore: the earlier values of the keys that still have their leased values.
    pub fn values_before(&self, now: &TenantSpec) -> BTreeMap<String, Value> {
        let now = table(now).unwrap_or_default();
        let leased = self.keys.iter().filter(|(key, values)| patch::value(&now, key) == values.leased);
        leased.map(|(key, values)| (key.clone(), values.before.clone())).collect()
    }

    /// Returns the tenant with the earlier values in place of the leased ones.
    pub fn without(&self, now: &TenantSpec) -> TenantSpec {
        patch::with(now, &self.values_before(now)).unwrap_or_else(|_| now.clone())
    }

    /// Returns the lease in its stored form.
    pub fn saved(&self) -> SavedLease {
        SavedLease { pid: self.process.pid, number: self.process.number, keys: self.keys.clone() }
    }
}

impl SavedLease {
    /// Returns the lease, and the tenant with the leased values, if the process is still running.
    pub fn resumed(self, tenant: &TenantSpec) -> Option<(Lease, TenantSpec)> {
        let Self { pid, number, keys } = self;
        let process = Process::open(pid).ok().filter(|found| found.number == number && !found.has_ended())?;
        let values = keys.iter().map(|(key, values)| (key.clone(), values.leased.clone())).collect();
        let leased = patch::with(tenant, &values).ok()?;
        Some((Lease { process, keys }, leased))
    }
}

/// Reads the leases in a file, by tenant. A missing file is treated as empty.
///
/// # Errors
/// Returns an error if the file is not a valid lease file.
pub fn read(path: &Path) -> io::Result<BTreeMap<String, SavedLease>> {
    match fs::read(path) {
        Ok(text) => Ok(serde_json::from_slice(&text)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(error),
    }
}

/// Replaces the lease file.
///
/// # Errors
/// Returns an error, and keeps the earlier file, if the file cannot be written.
pub fn write(path: &Path, leases: &BTreeMap<String, SavedLease>) -> io::Result<()> {
    let new = path.with_extension("json.new");
    fs::write(&new, serde_json::to_vec(leases)?)?;
    fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::patch::patched;
    use serde_json::Map;

    fn keys(text: &str) -> Map<String, Value> {
        serde_json::from_str(text).unwrap()
    }

    fn own() -> Process {
        Process::open(std::process::id().try_into().unwrap()).unwrap()
    }

    fn tenants() -> (TenantSpec, TenantSpec) {
        let before = TenantSpec::from_table(&keys(r#"{ "name": "a", "card": "fake", "vram_mib": 64 }"#)).unwrap();
        let leased = patched(&before, &keys(r#"{ "memory": { "quota_mib": 32, "weight": 70 } }"#)).unwrap();
        (before, leased)
    }

    #[test]
    fn lease_restores_keys_that_still_have_its_value() {
        let (before, leased) = tenants();
        let lease = Lease::new(own(), &before, &leased).unwrap();
        assert!(!lease.has_ended());
        assert_eq!(lease.without(&leased), before);
        let set = patched(&leased, &keys(r#"{ "memory": { "quota_mib": 40 } }"#)).unwrap();
        let expected = patched(&before, &keys(r#"{ "memory": { "quota_mib": 40 } }"#)).unwrap();
        assert_eq!(lease.without(&set), expected);
    }

    #[test]
    fn saved_lease_resumes_only_with_its_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("leases.json");
        assert!(read(&path).unwrap().is_empty());
        let (before, leased) = tenants();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let process = Process::open(child.id().try_into().unwrap()).unwrap();
        child.wait().unwrap();
        let ended = Lease::new(process, &before, &leased).unwrap();
        assert!(ended.has_ended() && Process::open(0).is_err());
        let running = Lease::new(own(), &before, &leased).unwrap();
        let all = [("a", &running), ("b", &ended)];
        write(&path, &all.map(|(name, lease)| (name.to_owned(), lease.saved())).into()).unwrap();
        let mut found = read(&path).unwrap();
        let (lease, tenant) = found.remove("a").unwrap().resumed(&before).unwrap();
        assert_eq!((lease.pid(), &tenant), (running.pid(), &leased));
        assert!(found.remove("b").unwrap().resumed(&before).is_none());
        fs::write(&path, "{").unwrap();
        assert!(read(&path).is_err());
    }
}
