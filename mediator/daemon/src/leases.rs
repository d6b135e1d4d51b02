//! Leases: limits of tenants that last until a process exits (`POST /v1/tenants/NAME/lease`).
//!
//! A lease sets keys of a tenant until the client's process exits. The daemon then restores each key that still has its
//! leased value. Leased values are not stored in `state_dir`: the next daemon reads them from `leases.json` in
//! `socket_dir`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use api::{Author, TenantPatch};
use config::TenantSpec;
use config::patch::{self, patched, table};
use overrides::lease::{self, Lease, Process};

use super::{Daemon, DaemonError};

/// Name of the lease file.
const FILE: &str = "leases.json";
/// Polling interval for the exit of a process.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Delay before a failed restore is retried.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

impl Daemon {
    /// Writes the lease file for the next daemon.
    pub(super) fn keep_leases(&self) -> Result<(), DaemonError> {
        // Prevent another thread from overwriting the file with an older state.
        let _one_at_a_time = self.override_store.lock();
        let saved = {
            let state = self.state.lock();
            state.leases.iter().map(|(tenant, lease)| (tenant.clone(), lease.saved())).collect()
        };
        let path = self.spec.socket_dir.join(FILE);
        lease::write(&path, &saved).map_err(|error| DaemonError::NotKept(format!("{}: {error}", path.display())))
    }

    /// Sets a tenant's keys until the requesting client's process exits.
    pub(crate) fn lease_tenant(
        &self,
        name: &str,
        wanted: &TenantPatch,
        author: &Author,
    ) -> Result<api::Tenant, DaemonError> {
        let wrong = |what| DaemonError::Setting { of: format!("tenant `{name}`"), what };
        let pid = author.pid.ok_or_else(|| {
            DaemonError::Unwatched("the process is not visible in the daemon's PID namespace".to_owned())
        })?;
        let process = Process::open(pid).map_err(|error| DaemonError::Unwatched(error.to_string()))?;
        let mut keys = table(wanted).map_err(wrong)?;
        // Drop tables without keys, which change nothing.
        keys.retain(|_, value| value.as_object().is_none_or(|table| !table.is_empty()));
        {
            let mut state = self.state.lock();
            if let Some(lease) = state.leases.get(name) {
                return Err(DaemonError::Leased(name.to_owned(), lease.pid()));
            }
            let before = state.tenants.get(name).ok_or_else(|| DaemonError::NoTenant(name.to_owned()))?;
            let leased = patched(before, &keys).map_err(wrong)?;
            let lease = Lease::new(process, before, &leased).map_err(wrong)?;
            state.leases.insert(name.to_owned(), lease);
        }
        let why = format!(", until process {pid} exits");
        let set = self.keep_leases().and_then(|()| self.tune_tenant(name, &keys, None, &why));
        if let Err(error) = set {
            self.state.lock().leases.remove(name);
            self.keep_leases()?;
            return Err(error);
        }
        self.tenant(name)
    }

    /// Restores a tenant's keys if its lease has ended. Returns the delay until the next check, if any.
    fn end_lease(&self, name: &str, watched: &mut Option<i32>) -> Option<Duration> {
        let (pid, values) = {
            let state = self.state.lock();
            let (lease, tenant) = (state.leases.get(name)?, state.tenants.get(name)?);
            let pid = lease.pid();
            if state.closing || *watched.get_or_insert(pid) != pid {
                return None;
            }
            if !lease.has_ended() {
                return Some(POLL_INTERVAL);
            }
            (pid, lease.values_before(tenant))
        };
        let why = format!(", because process {pid} has exited");
        let keys = patch::tables(&values);
        let restored = if keys.is_empty() { Ok(()) } else { self.tune_tenant(name, &keys, None, &why) };
        match restored {
            Ok(()) | Err(DaemonError::NoTenant(_)) => {}
            Err(error) => {
                tracing::warn!(tenant = name, pid, %error, "limits of an exited process are still in effect");
                return Some(RETRY_INTERVAL);
            }
        }
        self.state.lock().leases.remove(name);
        let kept = self.keep_leases().and_then(|()| self.keep());
        kept.unwrap_or_else(|error| tracing::warn!(%error, "the end of a lease is not stored"));
        None
    }

    /// Reads the previous daemon's leases. Returns the tenants, with the limits that running processes have leased.
    pub(super) fn resume_leases(&self, tenants: Vec<TenantSpec>) -> Vec<TenantSpec> {
        let mut saved = lease::read(&self.spec.socket_dir.join(FILE)).unwrap_or_else(|error| {
            tracing::warn!(%error, "leased limits cannot be read");
            BTreeMap::new()
        });
        if saved.is_empty() {
            return tenants;
        }
        let mut state = self.state.lock();
        let resumed =
            tenants.into_iter().map(|spec| match saved.remove(&spec.name).and_then(|saved| saved.resumed(&spec)) {
                Some((lease, leased)) => {
                    state.leases.insert(spec.name, lease);
                    leased
                }
                None => spec,
            });
        let resumed: Vec<TenantSpec> = resumed.collect();
        drop(state);
        let kept = self.keep_leases();
        kept.unwrap_or_else(|error| tracing::warn!(%error, "leased limits cannot be stored"));
        resumed
    }
}

/// Restores the keys of a tenant's lease once its process has exited. The task ends with the lease or the runtime.
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
    tenants.into_iter().for_each(|tenant| drop(tokio::spawn(watch(Arc::clone(daemon), tenant))));
}
