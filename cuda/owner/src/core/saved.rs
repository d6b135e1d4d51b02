//! Tenants' accounts for the card's next owner: used card time, scheduling credits, strikes and quarantines.
//!
//! Programs continue to run without an owner, and report their chunks to the next one (`adopt`). Names identify the
//! tenants in the accounts.

use super::Core;
use std::collections::BTreeMap;
use tenancy::{Deadline, ReadError, RestoredAccounts, SavedAccounts, WriteError};
use vram::TenantId;

/// Time in ns for which an earlier owner's accounts are kept for tenants that have not been added yet.
// TIMEOUT: the daemon adds its tenants immediately after the owner has started.
const UNCLAIMED_NS: u64 = 60_000_000_000;

impl Core {
    /// Returns the accounts as a file with a unique `identity`, for the next owner.
    pub(crate) fn save(&self, identity: [u8; 16]) -> Result<Vec<u8>, WriteError> {
        let present = self.tenants.iter().map(|(&id, tenant)| (id, &tenant.spec.name));
        let all = present.chain(self.unclaimed.iter().map(|(name, &id)| (id, name)));
        let names: BTreeMap<TenantId, String> = all.map(|(id, name)| (id, name.clone())).collect();
        let scheduler = self.turns.turns().at_rest(self.now());
        let saved = SavedAccounts::new(self.clock, names.into_iter(), &scheduler, &self.machine.residency);
        saved.to_file(identity)
    }

    /// Restores the accounts and the clock of an earlier owner. Must be called before tenants are added. Changes
    /// nothing if the file is damaged, or has an unsupported version.
    pub(crate) fn restore(&mut self, file: &[u8]) -> Result<(), ReadError> {
        let RestoredAccounts { clock_ns, names, scheduler, quanta, begun } = RestoredAccounts::from_file(file)?;
        self.clock = clock_ns;
        let now = self.now();
        self.turns.with_turns(now, |turns| turns.continue_from(scheduler, now));
        self.machine.residency.continue_from(quanta, begun);
        self.next_tenant = names.values().map(|id| id.0 + 1).max().unwrap_or(self.next_tenant);
        self.unclaimed = names;
        self.deadlines.set(Deadline::Accounts, self.clock + UNCLAIMED_NS);
        Ok(())
    }

    /// Returns the total number of strikes and the total used time in ns. If neither has changed, the accounts need not
    /// be saved again.
    pub(crate) fn strikes_and_use(&self) -> (u64, u64) {
        self.turns.turns().scheduler().strikes_and_use()
    }

    /// Forgets the earlier owner's accounts of tenants that have not been added.
    pub(super) fn forget_unclaimed(&mut self) {
        let now = self.now();
        for tenant in std::mem::take(&mut self.unclaimed).into_values() {
            self.turns.with_turns(now, |turns| turns.forget(tenant, now));
        }
    }
}
