//! Offers and reservations of turns for tenants with several cards. Such a tenant is not in a group.

use super::{GroupTurns, Nanos, TenantId};

impl GroupTurns {
    /// Sets whether a tenant's turns are offered. See [`super::Turns::set_offered`]. Returns false if the tenant is
    /// unknown or in a group.
    pub fn set_offered(&mut self, tenant: TenantId, offered: bool) -> bool {
        let is_single = self.members.get(&tenant).is_some_and(|member| member.group.is_none());
        if is_single {
            self.turns.set_offered(tenant, offered);
        }
        is_single
    }

    /// Returns and clears the tenants that have become due since the last call, in the order in which they became due.
    pub fn take_offers(&mut self) -> Vec<TenantId> {
        self.turns.take_offers()
    }

    /// Reserves the next turn for a tenant. See [`super::Turns::reserve`].
    pub fn reserve(&mut self, tenant: TenantId, now: Nanos) -> bool {
        let reserved = self.turns.reserve(tenant, now);
        self.update(now);
        reserved
    }

    /// Cancels a reservation if its turn has not started.
    pub fn unreserve(&mut self, tenant: TenantId) {
        self.turns.unreserve(tenant);
    }

    /// Starts a reserved turn that was granted. See [`super::Turns::open`].
    pub fn open(&mut self, tenant: TenantId, now: Nanos) {
        self.turns.open(tenant, now);
    }

    /// Recalls a tenant's turn if it has one.
    pub fn give_back(&mut self, tenant: TenantId, now: Nanos) {
        self.turns.give_back(tenant, now);
        self.update(now);
    }
}
