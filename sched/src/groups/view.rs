//! Queries of [`GroupTurns`].

use super::{Account, Engine, MemoryMove, VgpuParams};
use super::{Gate, GroupTurns, Membership, Nanos, Scheduler, TenantId, party};
use crate::Sample;
use std::collections::BTreeMap;

impl GroupTurns {
    /// Returns the parties' scheduler, for queries of its settings, strikes and total use.
    #[must_use]
    pub fn scheduler(&self) -> &Scheduler {
        self.turns.scheduler()
    }

    /// Returns the number of turns granted to parties.
    #[must_use]
    pub fn switches(&self) -> u64 {
        self.turns.switches()
    }

    /// Returns a tenant's own settings.
    #[must_use]
    pub fn params(&self, tenant: TenantId) -> Option<&VgpuParams> {
        self.turns.params(tenant)
    }

    /// Returns the account of a tenant's separate turns and its work within its group.
    #[must_use]
    pub fn account(&self, tenant: TenantId) -> Option<Account> {
        self.merged_account(tenant)
    }

    /// Returns the time charged to a tenant in each interval that starts at or after `since`.
    #[must_use]
    pub fn used_since(&self, tenant: TenantId, since: Nanos) -> Vec<Sample> {
        let own = self.turns.scheduler().history(tenant);
        let joined = self.members.get(&tenant).map(|member| &member.history);
        let mut used = BTreeMap::<Nanos, [u64; Engine::COUNT]>::new();
        for sample in own.into_iter().chain(joined).flat_map(|history| history.since(since)) {
            let sum = used.entry(sample.from).or_default();
            sum.iter_mut().zip(sample.used).for_each(|(sum, used)| *sum += used);
        }
        used.into_iter().map(|(from, used)| Sample { from, used }).collect()
    }

    /// Returns a tenant's state within its group, or `None` if it has no group.
    #[must_use]
    pub fn membership(&self, tenant: TenantId) -> Option<Membership> {
        let member = self.members.get(&tenant)?;
        let (id, _) = member.group?;
        let group = self.groups.get(&id)?;
        Some(Membership {
            group: id,
            sharing: group.sharing,
            together: group.together,
            joined: member.joined == Some(id),
            lack_ns: member.balance.lack(),
        })
    }

    /// Returns the tenants whose gates are open or still closing.
    pub fn holders(&self) -> impl Iterator<Item = TenantId> + '_ {
        self.members.keys().copied().filter(|&tenant| self.has_turn(tenant))
    }

    /// Returns true if a tenant's gate is open or still closing.
    #[must_use]
    pub fn has_turn(&self, tenant: TenantId) -> bool {
        self.members.get(&tenant).is_some_and(|member| match member.joined {
            Some(_) => member.gate != Gate::Closed,
            None => self.turns.has_turn(tenant),
        })
    }

    /// Returns true if a tenant must return the card.
    #[must_use]
    pub fn is_recalled(&self, tenant: TenantId) -> bool {
        self.members.get(&tenant).is_some_and(|member| match member.joined {
            Some(_) => matches!(member.gate, Gate::Closing { .. }),
            None => self.turns.is_recalled(tenant),
        })
    }

    /// Returns true if a tenant has the card and may open further gates. It must not open any if it was asked to return
    /// the card, either immediately or when its program waits.
    #[must_use]
    pub fn continues(&self, tenant: TenantId) -> bool {
        let yields = self.members.get(&tenant).is_some_and(|member| match member.joined {
            Some(id) => self.groups.get(&id).is_some_and(|group| group.yields),
            None => self.turns.yields(tenant),
        });
        self.has_turn(tenant) && !self.is_recalled(tenant) && !yields
    }

    /// Returns true if a tenant's turn overruns or the tenant makes its group's turn overrun.
    #[must_use]
    pub fn overruns(&self, tenant: TenantId) -> bool {
        self.members.get(&tenant).is_some_and(|member| match member.joined {
            Some(id) => member.gate != Gate::Closed && self.turns.overruns(party(id)),
            None => self.turns.overruns(tenant),
        })
    }

    /// Returns the time in ns by which a tenant's turn has overrun, or 0 if it does not overrun.
    #[must_use]
    pub fn overrun_ns(&self, tenant: TenantId, now: Nanos) -> u64 {
        let joined = self.members.get(&tenant).and_then(|member| member.joined);
        if self.overruns(tenant) { self.turns.overrun_ns(joined.map_or(tenant, party), now) } else { 0 }
    }

    /// Returns true if a tenant has queued or running work.
    #[must_use]
    pub fn is_busy(&self, tenant: TenantId) -> bool {
        self.members.get(&tenant).is_some_and(|member| match member.joined {
            Some(_) => member.has_work(),
            None => self.turns.is_busy(tenant),
        })
    }

    /// Returns true if a tenant should reduce its work in flight, because it is ahead of another member by at least
    /// half the difference at which it must wait.
    #[must_use]
    pub fn is_ahead(&self, tenant: TenantId) -> bool {
        self.members.get(&tenant).is_some_and(|member| {
            let behind = member.joined.and_then(|id| self.most_behind(id, None));
            behind.is_some_and(|lack| lack - member.balance.lack() >= super::balance::signed(self.config.lag_ns / 2))
        })
    }

    /// Returns true if a tenant shares the turns of its group.
    #[must_use]
    pub fn is_joined(&self, tenant: TenantId) -> bool {
        self.members.get(&tenant).is_some_and(|member| member.joined.is_some())
    }

    /// Returns the tenants that would get the card if a recalled tenant returned it now.
    #[must_use]
    pub fn next_after(&self, tenant: TenantId, now: Nanos) -> Vec<TenantId> {
        let joined = self.members.get(&tenant).and_then(|member| member.joined);
        let open = joined.into_iter().flat_map(|id| self.members_of(id));
        if open.filter(|(_, member)| member.gate != Gate::Closed).count() > 1 {
            return Vec::new();
        }
        let Some(next) = self.turns.next_after(joined.map_or(tenant, party), now) else { return Vec::new() };
        match super::group_of(next) {
            Some(id) => self.members_of(id).filter(|(_, member)| member.wants).map(|(tenant, _)| tenant).collect(),
            None => vec![next],
        }
    }

    /// Starts a record of the parties' turns. See [`super::Turns::start_record`].
    pub fn start_record(&mut self, names: &BTreeMap<TenantId, String>, limit: usize, now: Nanos) -> bool {
        let groups = self.groups.iter().map(|(&id, group)| (party(id), format!("group {}", group.name)));
        let names = names.iter().map(|(&tenant, name)| (tenant, name.clone())).chain(groups).collect();
        self.turns.start_record(&names, limit, now)
    }

    /// Ends the record and returns it, or `None` if no record is in progress.
    pub fn end_record(&mut self) -> Option<Vec<u8>> {
        self.turns.end_record()
    }

    /// Adds a memory move of a tenant to the record.
    pub fn note_move(&mut self, moved: MemoryMove) {
        self.turns.note_move(moved);
    }
}
