//! Tenants of CUDA cards: seen, and changed while their programs run.

use std::collections::BTreeMap;

use cuda_control::{Card, Request};
use serde_json::{Map, Value};

use super::cuda::{self, CudaCard, show};
use super::{Daemon, DaemonError};
use config::patch::patched;
use config::{CardSpec, TenantSpec};

/// Time over which received parts are taken, in ns.
const WINDOW_NS: u64 = 1_000_000_000;

impl Daemon {
    /// Tells the owners of cards which tenants there are.
    ///
    /// # Errors
    /// When one of them cannot be had.
    pub(super) fn start_tenants(&self) -> Result<(), DaemonError> {
        for spec in self.tenant_specs(None) {
            let card = self.cuda(&spec.card)?;
            let tenant = cuda::tenant(&spec, card.spec(), &self.spec.socket_dir)?;
            card.ask(Request::Add(tenant))
                .map_err(|what| DaemonError::Failed(format!("tenant `{}` cannot be added: {what}", spec.name)))?;
            tracing::info!(tenant = spec.name, card = spec.card, "tenant added");
        }
        Ok(())
    }

    fn cuda(&self, card: &str) -> Result<&CudaCard, DaemonError> {
        self.known(card)?.cuda.as_deref().ok_or_else(|| DaemonError::NoCard(card.to_owned()))
    }

    /// Says whether there is a tenant of a name.
    pub(super) fn is_tenant(&self, name: &str) -> bool {
        self.state.lock().tenants.contains_key(name)
    }

    fn tenant_specs(&self, card: Option<&str>) -> Vec<TenantSpec> {
        let state = self.state.lock();
        state.tenants.values().filter(|spec| card.is_none_or(|card| spec.card == card)).cloned().collect()
    }

    /// All tenants, by name.
    #[must_use]
    pub fn tenants(&self) -> Vec<api::Tenant> {
        let specs = self.tenant_specs(None);
        let mut views: BTreeMap<String, Option<Card>> = BTreeMap::new();
        for spec in &specs {
            if !views.contains_key(&spec.card) {
                let view = self.cuda(&spec.card).ok().and_then(|card| card.view(WINDOW_NS).ok());
                views.insert(spec.card.clone(), view);
            }
        }
        let shown = specs.iter().map(|spec| {
            let card = views.get(&spec.card).and_then(Option::as_ref);
            let view = card.and_then(|card| card.tenants.iter().find(|view| view.name == spec.name));
            show::tenant(spec, spec.socket_path(&self.spec.socket_dir), view)
        });
        shown.collect()
    }

    /// One tenant.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn tenant(&self, name: &str) -> Result<api::Tenant, DaemonError> {
        self.tenants()
            .into_iter()
            .find(|tenant| tenant.name == name)
            .ok_or_else(|| DaemonError::NoTenant(name.to_owned()))
    }

    /// Changes what a tenant may have of its card, from now on; keys that the patches leave out stay.
    ///
    /// # Errors
    /// When there is none of that name, the revision is not `expected`, or a setting cannot be so; nothing is changed then.
    pub(crate) fn set_tenant_if(
        &self,
        name: &str,
        memory: &Map<String, Value>,
        time: &Map<String, Value>,
        expected: Option<&str>,
    ) -> Result<api::Tenant, DaemonError> {
        let wrong = |what| DaemonError::Setting { of: format!("tenant `{name}`"), what };
        let _one_at_a_time = self.changing.lock();
        let (spec, others) = {
            let state = self.state.lock();
            state.expect(expected)?;
            let mut spec = state.tenants.get(name).cloned().ok_or_else(|| DaemonError::NoTenant(name.to_owned()))?;
            spec.memory = patched(&spec.memory, memory).map_err(wrong)?;
            spec.time = patched(&spec.time, time).map_err(wrong)?;
            let others: Vec<TenantSpec> = state.tenants.values().filter(|other| other.name != name).cloned().collect();
            (spec, others)
        };
        if let Some((key, what)) = config::cuda::tenant(&spec, &self.specs, &[], &others).into_iter().next() {
            return Err(wrong(format!("{key}: {what}")));
        }
        let card = self.cuda(&spec.card)?;
        let told = cuda::tenant(&spec, card.spec(), &self.spec.socket_dir)?;
        card.ask(Request::Change(told)).map_err(wrong)?;
        tracing::info!(tenant = name, memory = ?spec.memory, time = ?spec.time, "the tenant's part of the card is set");
        {
            let mut state = self.state.lock();
            state.tenants.insert(name.to_owned(), spec);
            state.revision.next();
        }
        self.tenant(name)
    }

    /// The tenants' view of a CUDA card's time.
    pub(super) fn cuda_scheduler(&self, card: &CudaCard, window_ms: u64) -> Result<api::CardScheduler, DaemonError> {
        let view = card.view(window_ms * 1_000_000).map_err(DaemonError::Failed)?;
        Ok(show::scheduler(card.spec(), &self.tenant_specs(Some(&card.spec().name)), &view, window_ms))
    }

    /// The tenants' view of a CUDA card's memory.
    pub(super) fn cuda_memory(&self, card: &CudaCard) -> Result<api::CardMemory, DaemonError> {
        let spec: &CardSpec = card.spec();
        let view = card.view(0).map_err(DaemonError::Failed)?;
        Ok(show::memory(spec, &self.tenant_specs(Some(&spec.name)), &view))
    }
}
