//! Profiles: expands tables that use a profile, and computes how many more instances of each profile fit on the cards.

use serde_json::{Map, Value};

use super::{Daemon, DaemonError};
use config::profile::{Of, expanded};
use config::{CardKind, CardSpec, ProfileSpec, TenantSpec, VmSpec};

impl Daemon {
    /// Returns a table with the keys of its profile added. Returns an error if the profile does not exist.
    pub(super) fn expanded(&self, table: &Map<String, Value>, of: Of) -> Result<Map<String, Value>, String> {
        expanded(table, &self.profiles, of)
    }

    /// Returns the virtual machine described in a request body. Returns an error that names the key if a key is
    /// invalid.
    pub(super) fn described_vm(&self, table: &Map<String, Value>) -> Result<VmSpec, String> {
        VmSpec::from_table(&self.expanded(table, Of::Vm)?)
    }

    /// Returns the tenant described in a request body. Returns an error that names the key if a key is invalid.
    pub(super) fn described_tenant(&self, table: &Map<String, Value>) -> Result<TenantSpec, String> {
        TenantSpec::from_table(&self.expanded(table, Of::Tenant)?)
    }

    /// Returns all profiles, each with the number of further instances that fit on each card.
    #[must_use]
    pub fn profiles(&self) -> Vec<api::Profile> {
        let (cards, vms, tenants): (Vec<CardSpec>, Vec<VmSpec>, Vec<TenantSpec>) = {
            let state = self.state.lock();
            let vms = state.vms.values().map(|entry| entry.spec.clone()).collect();
            (state.marked(&self.specs), vms, state.tenants.values().cloned().collect())
        };
        let profile_of = |profile: &ProfileSpec| {
            let cards = cards.iter().map(|card| self.capacity(profile, card, &vms, &tenants)).collect();
            api::Profile { spec: profile.clone(), cards }
        };
        let mut profiles: Vec<_> = self.profiles.iter().map(profile_of).collect();
        profiles.sort_by(|one, other| one.spec.name.cmp(&other.spec.name));
        profiles
    }

    /// Returns a profile, with the number of further instances that fit on each card.
    ///
    /// # Errors
    /// Returns an error if the profile does not exist.
    pub fn profile(&self, name: &str) -> Result<api::Profile, DaemonError> {
        let mut all = self.profiles().into_iter();
        all.find(|profile| profile.spec.name == name).ok_or_else(|| DaemonError::NoProfile(name.to_owned()))
    }

    /// Returns the names of a profile's users on a card, and the number of further users that fit.
    fn capacity(
        &self,
        profile: &ProfileSpec,
        card: &CardSpec,
        vms: &[VmSpec],
        tenants: &[TenantSpec],
    ) -> api::Capacity {
        let is_of = |uses_card: bool, of: Option<&String>| uses_card && of == Some(&profile.name);
        let of_vms = vms.iter().filter(|vm| is_of(vm.card == card.name, vm.profile.as_ref())).map(|vm| &vm.name);
        let of_tenants = tenants.iter().filter(|tenant| is_of(tenant.uses(&card.name), tenant.profile.as_ref()));
        let of_tenants = of_tenants.map(|tenant| &tenant.name);
        let users = of_vms.chain(of_tenants).cloned().collect();
        let (left, lacks) = profile.room(&self.spec, card, vms, tenants);
        let of = if card.kind == CardKind::Cuda { "tenant" } else { "vm" };
        api::Capacity { card: card.name.clone(), of: of.to_owned(), users, left, lacks }
    }
}
