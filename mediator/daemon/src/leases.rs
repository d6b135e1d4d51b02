//! Limits of tenants that end with a process: `POST /v1/tenants/NAME/lease`.
//!
//! A lease sets keys of a tenant until the client's process ends, however it ends. The daemon watches the process
//! through a pidfd, and restores each key that still has the leased value. `state_dir` never has leased values. The
//! file `leases.json` in `socket_dir`, which does not outlive the host's boot, has the leases for the next daemon.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::{Author, TenantPatch};
use config::TenantSpec;
use config::patch::{self, patched, table};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Daemon, DaemonError, State};

/// Name of the file.
const FILE: &str = "leases.json";
/// Interval at which a process is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Delay before a failed restoration is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// A process that the kernel reports the end of.
pub(super) struct Process {
    pid: i32,
    /// Number that differs for each process, if the kernel has it (Linux 6.9); otherwise one for all.
    number: u64,
    handle: OwnedFd,
}

impl Process {
    fn open(pid: i32) -> io::Result<Self> {
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

/// Values of a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Values {
    before: Value,
    leased: Value,
}

/// The keys that a lease sets, by path.
type Keys = BTreeMap<String, Values>;

/// A lease.
pub(super) struct Lease {
    process: Process,
    keys: Keys,
}

/// A lease in the file.
#[derive(Serialize, Deserialize)]
struct SavedLease {
    pid: i32,
    number: u64,
    keys: Keys,
}

impl Lease {
    /// Returns the values to restore: those of keys that still have the leased value.
    fn values_before(&self, now: &TenantSpec) -> BTreeMap<String, Value> {
        let now = table(now).unwrap_or_default();
        let leased = self.keys.iter().filter(|(key, values)| patch::value(&now, key) == values.leased);
        leased.map(|(key, values)| (key.clone(), values.before.clone())).collect()
    }

    /// Returns the tenant without the leased values.
    fn without(&self, now: &TenantSpec) -> TenantSpec {
        patch::with(now, &self.values_before(now)).unwrap_or_else(|_| now.clone())
    }
}

impl State {
    /// Returns a tenant as it will be after its lease.
    pub(super) fn unleased(&self, spec: &TenantSpec) -> TenantSpec {
        self.leases.get(&spec.name).map_or_else(|| spec.clone(), |lease| lease.without(spec))
    }
}

impl Daemon {
    fn leases_file(&self) -> PathBuf {
        self.spec.socket_dir.join(FILE)
    }

    /// Writes the leases for the next daemon.
    pub(super) fn keep_leases(&self) -> Result<(), DaemonError> {
        // Another thread must not replace the file with an earlier state.
        let _one_at_a_time = self.override_store.lock();
        let saved: BTreeMap<String, SavedLease> = {
            let state = self.state.lock();
            let saved = |Lease { process, keys }: &Lease| SavedLease {
                pid: process.pid,
                number: process.number,
                keys: keys.clone(),
            };
            state.leases.iter().map(|(tenant, lease)| (tenant.clone(), saved(lease))).collect()
        };
        let path = self.leases_file();
        write(&path, &saved).map_err(|error| DaemonError::NotKept(format!("{}: {error}", path.display())))
    }

    /// Sets keys of a tenant until the process of the request's author ends.
    ///
    /// # Errors
    /// If the daemon cannot watch the process, another process holds limits of the tenant, or the keys are refused.
    pub(crate) fn lease_tenant(
        &self,
        name: &str,
        wanted: &TenantPatch,
        author: &Author,
    ) -> Result<api::Tenant, DaemonError> {
        let wrong = |what| DaemonError::Setting { of: format!("tenant `{name}`"), what };
        let pid = author.pid.ok_or_else(|| DaemonError::Unwatched("it is in no visible PID namespace".to_owned()))?;
        let process = Process::open(pid).map_err(|error| DaemonError::Unwatched(error.to_string()))?;
        let mut keys = table(wanted).map_err(wrong)?;
        // A table without keys changes nothing.
        keys.retain(|_, value| value.as_object().is_none_or(|table| !table.is_empty()));
        {
            let mut state = self.state.lock();
            if let Some(lease) = state.leases.get(name) {
                return Err(DaemonError::Leased { tenant: name.to_owned(), pid: lease.process.pid });
            }
            let before = state.tenants.get(name).ok_or_else(|| DaemonError::NoTenant(name.to_owned()))?;
            let leased = patched(before, &keys).map_err(wrong)?;
            let keys = changes(before, &leased).map_err(wrong)?;
            state.leases.insert(name.to_owned(), Lease { process, keys });
        }
        let why = format!(", until process {pid} ends");
        let set = self.keep_leases().and_then(|()| self.tune_tenant(name, &keys, None, &why));
        if let Err(error) = set {
            self.state.lock().leases.remove(name);
            self.keep_leases()?;
            return Err(error);
        }
        self.tenant(name)
    }

    /// Restores the keys of a tenant whose lease has ended. Returns the delay until the next look; `None` if the lease
    /// does not exist any more. `watched` is the process of the lease, once known.
    fn end_lease(&self, name: &str, watched: &mut Option<i32>) -> Option<Duration> {
        let (pid, values) = {
            let state = self.state.lock();
            let (lease, tenant) = (state.leases.get(name)?, state.tenants.get(name)?);
            let pid = lease.process.pid;
            if state.closing || *watched.get_or_insert(pid) != pid {
                return None;
            }
            if !lease.process.has_ended() {
                return Some(POLL_INTERVAL);
            }
            (pid, lease.values_before(tenant))
        };
        let why = format!(", because process {pid} has ended");
        let keys = patch::tables(&values);
        let restored = if keys.is_empty() { Ok(()) } else { self.tune_tenant(name, &keys, None, &why) };
        match restored {
            Ok(()) | Err(DaemonError::NoTenant(_)) => {}
            Err(error) => {
                tracing::warn!(tenant = name, pid, %error, "limits of an ended process are still in force");
                return Some(RETRY_INTERVAL);
            }
        }
        self.state.lock().leases.remove(name);
        if let Err(error) = self.keep_leases().and_then(|()| self.keep()) {
            tracing::warn!(%error, "the end of a lease is not stored");
        }
        None
    }

    /// Reads the leases of an earlier daemon. Returns the tenants with the limits of processes that still run.
    pub(super) fn resume_leases(&self, tenants: Vec<TenantSpec>) -> Vec<TenantSpec> {
        let saved: BTreeMap<String, SavedLease> = match std::fs::read(self.leases_file()) {
            Ok(text) => serde_json::from_slice(&text).unwrap_or_else(|error| {
                tracing::warn!(%error, "limits that end with a process are not read");
                BTreeMap::new()
            }),
            Err(_) => return tenants,
        };
        let mut state = self.state.lock();
        let resumed: Vec<TenantSpec> = tenants
            .into_iter()
            .map(|spec| {
                let Some(SavedLease { pid, number, keys }) = saved.get(&spec.name) else { return spec };
                let same = Process::open(*pid).ok().filter(|found| found.number == *number && !found.has_ended());
                let Some(process) = same else { return spec };
                let values = keys.iter().map(|(key, values)| (key.clone(), values.leased.clone())).collect();
                let Ok(leased) = patch::with(&spec, &values) else { return spec };
                state.leases.insert(spec.name.clone(), Lease { process, keys: keys.clone() });
                leased
            })
            .collect();
        drop(state);
        if let Err(error) = self.keep_leases() {
            tracing::warn!(%error, "limits that end with a process are not stored");
        }
        resumed
    }
}

/// Restores the keys of a tenant's lease once its process has ended. Ends with the lease or the runtime.
pub(crate) async fn watch(daemon: Arc<Daemon>, tenant: String) {
    let mut lease = None;
    loop {
        let (daemon, tenant) = (Arc::clone(&daemon), tenant.clone());
        let looked =
            tokio::task::spawn_blocking(move || daemon.end_lease(&tenant, &mut lease).map(|delay| (delay, lease)));
        match looked.await {
            Ok(Some((delay, seen))) => {
                lease = seen;
                tokio::time::sleep(delay).await;
            }
            Ok(None) | Err(_) => return,
        }
    }
}

/// Watches the processes of all leases.
pub(crate) fn watch_all(daemon: &Arc<Daemon>) {
    let tenants: Vec<String> = daemon.state.lock().leases.keys().cloned().collect();
    for tenant in tenants {
        tokio::spawn(watch(Arc::clone(daemon), tenant));
    }
}

/// Returns the keys that differ.
fn changes(before: &TenantSpec, leased: &TenantSpec) -> Result<Keys, String> {
    let differences = patch::differences(&table(before)?, &table(leased)?);
    Ok(differences.into_iter().map(|one| (one.key, Values { before: one.from, leased: one.to })).collect())
}

/// Replaces a file.
fn write(path: &Path, content: &impl Serialize) -> io::Result<()> {
    let mut file = tempfile::NamedTempFile::new_in(path.parent().unwrap_or(Path::new("/")))?;
    serde_json::to_writer(&mut file, content)?;
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Map;

    #[test]
    fn lease_restores_keys_that_still_have_its_value() {
        let before = TenantSpec::from_table(&keys(r#"{ "name": "a", "card": "fake", "vram_mib": 64 }"#)).unwrap();
        let leased = patched(&before, &keys(r#"{ "memory": { "quota_mib": 32, "weight": 70 } }"#)).unwrap();
        let process = Process::open(std::process::id().try_into().unwrap()).unwrap();
        assert!(!process.has_ended());
        let lease = Lease { process, keys: changes(&before, &leased).unwrap() };
        assert_eq!(lease.without(&leased), before);
        let set = patched(&leased, &keys(r#"{ "memory": { "quota_mib": 40 } }"#)).unwrap();
        let expected = patched(&before, &keys(r#"{ "memory": { "quota_mib": 40 } }"#)).unwrap();
        assert_eq!(lease.without(&set), expected);
    }

    #[test]
    fn process_that_was_reaped_has_ended() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let process = Process::open(child.id().try_into().unwrap()).unwrap();
        child.wait().unwrap();
        assert!(process.has_ended());
        assert!(Process::open(0).is_err());
    }

    fn keys(text: &str) -> Map<String, Value> {
        serde_json::from_str(text).unwrap()
    }
}
