//! The accounts of turns for the next owner of a card. Turns themselves are not saved, because the next owner grants
//! new ones.

use super::{CHANNEL, Turns};
use crate::{Event, Nanos, Scheduler, TenantId};

impl Turns {
    /// Returns a copy of the scheduler in which all turns have ended at `now` and no tenant waits. Omits the tenants
    /// for which `is_kept` returns false.
    #[must_use]
    pub fn at_rest(&self, now: Nanos, is_kept: impl Fn(TenantId) -> bool) -> Scheduler {
        let mut scheduler = self.scheduler.clone();
        for vgpu in self.scheduler.vgpus() {
            let ended = Event::ChannelEnded { vgpu, channel: CHANNEL };
            let event = if is_kept(vgpu) { ended } else { Event::Removed { vgpu } };
            scheduler.event(now, event, &mut Vec::new());
        }
        scheduler
    }

    /// Continues with the accounts of an earlier owner, and with the current settings. No tenant may exist. Each tenant
    /// of the earlier owner must be [added](Self::add) to continue, or [forgotten](Self::forget).
    pub fn continue_from(&mut self, scheduler: Scheduler, now: Nanos) {
        let config = *self.scheduler.config();
        (self.scheduler, self.charged_until) = (scheduler, now);
        self.event(now, Event::Configured(config));
    }

    /// Discards the accounts that an earlier owner kept for a tenant, unless the tenant has been added since.
    pub fn forget(&mut self, tenant: TenantId, now: Nanos) {
        if !self.members.contains_key(&tenant) {
            self.event(now, Event::Removed { vgpu: tenant });
        }
    }
}
