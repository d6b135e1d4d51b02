//! Schedules groups of tenants. The tenants of a group use the card at the same time, and the group takes turns with
//! other parties.
//!
//! [`GroupTurns`] is built on [`Turns`]. A party that takes turns is either a single tenant or a *group*, which
//! consists of those members of a share group whose programs can run concurrently. A group's weight and guarantee are
//! the sums over its active members. While the group has the turn, the gates of several members can be open at the same
//! time. Three kinds of tenants take turns separately: tenants without a group, members whose programs cannot all run
//! concurrently, and all members of a group in `turns` mode.
//!
//! Within a group, the accounts in `balance` determine which members may run. Each member is charged for its own work,
//! so the charges of concurrent members can exceed the elapsed time. [`Turns`] charges the group for the elapsed time.
//! A member that is *ahead* waits. It is ahead if its lag is at least [`GroupConfig::lag_ns`] smaller than another
//! member's lag. Only its gate closes, and the gate reopens as soon as the member is no longer ahead. A member whose
//! work does not end delays the others for at most [`GroupConfig::stall_ns`]. The tenant's run time limit also applies
//! to this work.
//!
//! With [`Sharing::Auto`], `trial` compares the members' progress in both modes.
//!
//! Like [`Turns`], this module performs no I/O. Its inputs are events and the time, and its outputs are [`Order`]s.

mod balance;
mod trial;

use crate::config::PERMILLE;
use crate::trace::MemoryMove;
use crate::turns::{Order, Turns, TurnsConfig};
use crate::{Account, Config, ConfigError, Engine, History, Nanos, Quarantine, Scheduler, TenantId, VgpuParams};
use balance::Balance;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use trial::Trial;

/// Engine whose accounts are used for turns.
const ENGINE: Engine = Engine::Compute;
/// Bit in a party number that marks the party as a group.
const GROUP_PARTY_BIT: u32 = 1 << 31;
/// Time after a member's last work during which the weight of its group still includes the member's weight, in ns. This
/// is longer than typical pauses between submissions.
const ACTIVE_NS: u64 = 30_000_000;

/// Number of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(u32);

/// Mode in which the members of a group share the card, strictest first. The strictest mode selected by a member
/// applies to the group.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Sharing {
    /// Members take exclusive turns.
    Turns,
    /// The group uses the mode in which its members' programs make more progress, as measured in trials.
    #[default]
    Auto,
    /// Members with programs that can run concurrently use the card at the same time.
    Together,
}

impl Sharing {
    /// Returns the mode's name in the configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Turns => "turns",
            Self::Together => "together",
            Self::Auto => "auto",
        }
    }
}

/// Time limits and intervals for groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupConfig {
    /// Difference between the lags of two members at which the member that is ahead waits, in ns of work. A member's
    /// lag is its share minus its work.
    pub lag_ns: u64,
    /// Time without completed work after which other members stop waiting for a member, in ns.
    pub stall_ns: u64,
    /// Initial age at which the measured length of a member's submissions expires, in ns. The age increases while
    /// successive measurements agree.
    pub sample_interval_ns: u64,
    /// Maximum duration of such a measurement, during which the member has the card to itself, in ns.
    pub sample_ns: u64,
    /// Length of each part of a trial of the two modes, in ns.
    pub trial_ns: u64,
    /// Time between two trials, in ns.
    pub trial_interval_ns: u64,
}

impl Default for GroupConfig {
    /// Returns a lag of 5 ms, a stall of 10 ms, a sample of at most 60 ms every 10 s, and a trial with two parts of 0.6
    /// s every 30 s.
    fn default() -> Self {
        Self {
            lag_ns: 5_000_000,
            stall_ns: 10_000_000,
            sample_interval_ns: 10_000_000_000,
            sample_ns: 60_000_000,
            trial_ns: 600_000_000,
            trial_interval_ns: 30_000_000_000,
        }
    }
}

/// State of a member's gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    Closed,
    Open,
    /// The member was asked to return the card, but has not returned it yet.
    Closing {
        since: Nanos,
        /// True if the member was reported for exceeding its run time limit.
        overdue: bool,
    },
}

#[derive(Debug)]
struct Member {
    params: VgpuParams,
    competes: Option<VgpuParams>,
    group: Option<(GroupId, Sharing)>,
    /// True if all programs of the tenant can run concurrently with the programs of other members.
    concurrent: bool,
    /// The group whose turns the tenant shares, or `None` if the tenant is a separate party.
    joined: Option<GroupId>,
    paused: bool,
    /// True if the member has work that waits for its gate to open. This field and the following ones are used only
    /// while the member shares the turns of a group.
    wants: bool,
    gate: Gate,
    /// Time at which the member started to wait for the card.
    asked: Option<Nanos>,
    last_work: Option<Nanos>,
    /// Time at which the member last completed work or its gate opened.
    progressed: Nanos,
    balance: Balance,
    account: Account,
    history: History,
}

impl Member {
    fn new(params: VgpuParams, now: Nanos) -> Self {
        Self {
            params,
            competes: None,
            group: None,
            concurrent: false,
            joined: None,
            paused: false,
            wants: false,
            gate: Gate::Closed,
            asked: None,
            last_work: None,
            progressed: now,
            balance: Balance::new(now),
            account: Account::default(),
            history: History::default(),
        }
    }

    /// Returns the settings that determine the member's share.
    fn settings(&self) -> VgpuParams {
        self.competes.unwrap_or(self.params)
    }

    fn has_work(&self) -> bool {
        self.wants || self.gate != Gate::Closed
    }

    fn is_active(&self, now: Nanos) -> bool {
        self.has_work() || self.last_work.is_some_and(|at| now.since(at) < ACTIVE_NS)
    }
}

/// Interval in which a member has the card to itself, so that the length of its submissions can be measured.
#[derive(Clone, Copy, Debug)]
struct Sample {
    tenant: TenantId,
    since: Nanos,
}

#[derive(Debug)]
struct Group {
    name: String,
    sharing: Sharing,
    /// True if members run concurrently in the current mode.
    together: bool,
    sample: Option<Sample>,
    /// Time of the last decision about the members' gates.
    updated: Nanos,
    /// Start of the current period during which at most one gate has been open.
    single_since: Option<Nanos>,
    /// True if the turn must end when its only working member waits for a result. No other gate opens until the turn
    /// ends.
    yields: bool,
    trial: Trial,
}

impl Group {
    fn new(name: String, sharing: Sharing, now: Nanos) -> Self {
        let together = sharing != Sharing::Turns;
        let trial = Trial::new(now);
        Self { name, sharing, together, sample: None, updated: now, single_since: None, yields: false, trial }
    }
}

/// A tenant's state within its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Membership {
    /// Number of the group.
    pub group: GroupId,
    /// Sharing mode that is configured for the group.
    pub sharing: Sharing,
    /// True if those members of the group whose programs can run concurrently use the card at the same time.
    pub together: bool,
    /// True if this tenant is one of the members that use the card at the same time.
    pub joined: bool,
    /// Lag of the tenant in ns, which is its share minus its work. Negative if its work exceeds its share. About one
    /// percent of the share is forgiven.
    pub lack_ns: i64,
}

/// Turns of a card's groups, and the division of the card within each group.
#[derive(Debug)]
pub struct GroupTurns {
    turns: Turns,
    config: GroupConfig,
    members: BTreeMap<TenantId, Member>,
    groups: BTreeMap<GroupId, Group>,
    next_group: u32,
    orders: Vec<Order>,
}

fn party(group: GroupId) -> TenantId {
    TenantId(GROUP_PARTY_BIT | group.0)
}

fn group_of(party: TenantId) -> Option<GroupId> {
    (party.0 & GROUP_PARTY_BIT != 0).then_some(GroupId(party.0 & !GROUP_PARTY_BIT))
}

impl GroupTurns {
    /// Creates the turns of a card without tenants.
    ///
    /// # Errors
    /// Returns an error if a scheduler setting is out of bounds.
    pub fn new(scheduler: Config, turns: TurnsConfig, config: GroupConfig, now: Nanos) -> Result<Self, ConfigError> {
        let turns = Turns::new(scheduler, turns, now)?;
        Ok(Self { turns, config, members: BTreeMap::new(), groups: BTreeMap::new(), next_group: 0, orders: Vec::new() })
    }

    /// Returns a copy of the scheduler in which all turns have ended at `now`, for the next owner of the card. The copy
    /// contains neither groups nor their members' balances.
    #[must_use]
    pub fn at_rest(&self, now: Nanos) -> Scheduler {
        self.turns.at_rest(now, |tenant| group_of(tenant).is_none())
    }

    /// Continues with the accounts of an earlier owner. See [`Turns::continue_from`].
    pub fn continue_from(&mut self, scheduler: Scheduler, now: Nanos) {
        self.turns.continue_from(scheduler, now);
    }

    /// Discards the accounts that an earlier owner kept for a tenant, unless the tenant has been added since.
    pub fn forget(&mut self, tenant: TenantId, now: Nanos) {
        self.turns.forget(tenant, now);
    }

    /// Adds a tenant without a group. An existing tenant keeps its state.
    pub fn add(&mut self, tenant: TenantId, params: VgpuParams, now: Nanos) {
        if self.members.contains_key(&tenant) || group_of(tenant).is_some() {
            return;
        }
        self.members.insert(tenant, Member::new(params, now));
        self.turns.add(tenant, params, now);
        self.update(now);
    }

    /// Removes a tenant and its work.
    pub fn remove(&mut self, tenant: TenantId, now: Nanos) {
        self.members.remove(&tenant);
        self.turns.remove(tenant, now);
        self.update(now);
    }

    /// Changes a tenant's parameters.
    pub fn change(&mut self, tenant: TenantId, params: VgpuParams, now: Nanos) {
        if let Some(member) = self.members.get_mut(&tenant) {
            member.params = params;
        }
        self.turns.change(tenant, params, now);
        self.update(now);
    }

    /// Replaces the parameters that determine a tenant's share of the card with `params`, or restores the tenant's own
    /// parameters if `params` is `None`.
    pub fn compete(&mut self, tenant: TenantId, params: Option<VgpuParams>, now: Nanos) {
        if let Some(member) = self.members.get_mut(&tenant) {
            member.competes = params;
        }
        self.turns.compete(tenant, params, now);
        self.update(now);
    }

    /// Puts a tenant into the group with the given name, and records the sharing mode that the tenant accepts. With
    /// `None`, removes the tenant from its group.
    pub fn set_group(&mut self, tenant: TenantId, group: Option<(&str, Sharing)>, now: Nanos) {
        let Some(member) = self.members.get_mut(&tenant) else { return };
        let Some((name, sharing)) = group else {
            member.group = None;
            return self.update(now);
        };
        let known = self.groups.iter().find(|(_, group)| group.name == name).map(|(&id, _)| id);
        let id = known.unwrap_or_else(|| {
            // Numbers repeat after 2^31 groups, when the first groups no longer exist.
            self.next_group = (self.next_group + 1) & !GROUP_PARTY_BIT;
            let id = GroupId(self.next_group);
            self.groups.insert(id, Group::new(name.to_owned(), sharing, now));
            self.turns.add(party(id), VgpuParams::default(), now);
            id
        });
        member.group = Some((id, sharing));
        self.update(now);
    }

    /// Sets each group's mode to the strictest mode of its members. Removes groups without members.
    fn renew_groups(&mut self, now: Nanos) {
        let Self { groups, members, turns, .. } = self;
        groups.retain(|&id, group| {
            let modes = members.values().filter_map(|member| member.group).filter(|(of, _)| *of == id);
            let strictest = modes.map(|(_, sharing)| sharing).min();
            let is_used = strictest.is_some() || members.values().any(|member| member.joined == Some(id));
            if !is_used {
                turns.remove(party(id), now);
            }
            if let Some(sharing) = strictest.filter(|sharing| *sharing != group.sharing) {
                (group.sharing, group.together) = (sharing, sharing != Sharing::Turns);
                group.trial = Trial::new(now);
            }
            is_used
        });
    }

    /// Records whether all programs of a tenant can run concurrently with the programs of other members of its group.
    pub fn set_concurrent(&mut self, tenant: TenantId, concurrent: bool, now: Nanos) {
        if let Some(member) = self.members.get_mut(&tenant)
            && std::mem::replace(&mut member.concurrent, concurrent) != concurrent
        {
            self.update(now);
        }
    }

    /// Removes a tenant from the group with which it takes turns, as soon as its gate has closed.
    fn leave(&mut self, tenant: TenantId, now: Nanos) {
        let Some(member) = self.members.get_mut(&tenant) else { return };
        match member.gate {
            Gate::Open => {
                member.gate = Gate::Closing { since: now, overdue: false };
                self.orders.push(Order::Recall(tenant));
            }
            Gate::Closing { .. } => {}
            Gate::Closed => {
                (member.joined, member.asked) = (None, None);
                let (paused, wants) = (member.paused, std::mem::take(&mut member.wants));
                self.turns.pause(tenant, paused, now);
                if wants {
                    self.turns.wants(tenant, now);
                }
            }
        }
    }

    /// Makes a member share the turns of its group, as soon as its own turn has ended.
    fn join(&mut self, tenant: TenantId, group: GroupId, now: Nanos) {
        self.turns.pause(tenant, true, now);
        if self.turns.has_turn(tenant) {
            return;
        }
        let wants = self.turns.is_busy(tenant);
        self.turns.ended(tenant, now, false, now);
        let Some(member) = self.members.get_mut(&tenant) else { return };
        (member.joined, member.wants, member.gate) = (Some(group), wants, Gate::Closed);
        member.asked = wants.then_some(now);
        member.balance.begin(now);
    }

    /// Returns the group whose turns the member must share, if any.
    fn group_to_join(&self, member: &Member) -> Option<GroupId> {
        let (id, _) = member.group.filter(|_| member.concurrent)?;
        self.groups.get(&id).filter(|group| group.together).map(|_| id)
    }

    /// Applies changed card settings.
    ///
    /// # Errors
    /// Returns an error if a setting is out of bounds. No setting is then changed.
    pub fn configure(&mut self, scheduler: Config, turns: TurnsConfig, now: Nanos) -> Result<(), ConfigError> {
        self.turns.configure(scheduler, turns, now)?;
        self.update(now);
        Ok(())
    }

    /// Records that a tenant has work.
    pub fn wants(&mut self, tenant: TenantId, now: Nanos) {
        let Some(member) = self.members.get_mut(&tenant) else { return };
        if member.joined.is_none() {
            self.turns.wants(tenant, now);
        } else if member.gate != Gate::Open {
            if !member.has_work() {
                self.returns(tenant, now);
            }
            let Some(member) = self.members.get_mut(&tenant) else { return };
            member.wants = true;
            member.asked.get_or_insert(now);
            member.account.arrived += 1;
        }
        self.update(now);
    }

    /// Records that a tenant has returned the card. See [`Turns::ended`].
    pub fn ended(&mut self, tenant: TenantId, ended: Nanos, more: bool, now: Nanos) {
        let Some(member) = self.members.get_mut(&tenant) else { return };
        member.last_work = Some(now);
        if member.joined.is_none() {
            self.turns.ended(tenant, ended, more, now);
            return self.update(now);
        }
        if member.gate != Gate::Closed {
            member.account.completed += 1;
        }
        (member.gate, member.wants) = (Gate::Closed, more);
        member.asked = more.then_some(now);
        member.account.arrived += u64::from(more);
        self.update(now);
    }

    /// Charges a tenant for its own work. Since its last report, it had work in flight for `busy_ns`, in `launches`
    /// submissions. A separate party is not charged, and its submissions count only towards a trial.
    pub fn used(&mut self, tenant: TenantId, busy_ns: u64, launches: u64, now: Nanos) {
        let joined = self.members.get(&tenant).and_then(|member| member.joined);
        let open = joined.map_or(0, |id| self.members_of(id).filter(|(_, member)| member.gate != Gate::Closed).count());
        let Some(member) = self.members.get_mut(&tenant) else { return };
        let Some(group) = member.group.and_then(|(id, _)| self.groups.get_mut(&id)) else { return };
        group.trial.submitted(tenant, launches);
        if member.joined.is_none() {
            return;
        }
        let work = member.balance.work(busy_ns, launches, group.single_since, open as u64, now);
        member.account.used += work;
        member.history.add(now, ENGINE, work);
        if work > 0 {
            member.progressed = now;
        }
        self.charge(tenant, work);
        self.update(now);
    }

    /// Pauses or resumes a tenant. Other members of its group are not affected.
    pub fn pause(&mut self, tenant: TenantId, paused: bool, now: Nanos) {
        let Some(member) = self.members.get_mut(&tenant) else { return };
        member.paused = paused;
        self.update(now);
    }

    /// Counts a strike against the tenant (see [`Turns::strike`]), but not against the group.
    pub fn strike(&mut self, tenant: TenantId, now: Nanos) {
        self.turns.strike(tenant, now);
        self.update(now);
    }

    /// Releases a tenant from quarantine.
    pub fn release(&mut self, tenant: TenantId, now: Nanos) {
        self.turns.release(tenant, now);
        self.update(now);
    }

    /// Advances time to `now`. The caller must call this at [`Self::next_wakeup`].
    pub fn tick(&mut self, now: Nanos) {
        self.turns.tick(now);
        self.report_overdue(now);
        self.take_trials(now);
        self.update(now);
    }

    /// Reports the members that have not returned the card to their group within their run time limits.
    fn report_overdue(&mut self, now: Nanos) {
        for (&tenant, member) in &mut self.members {
            let Gate::Closing { since, overdue: false } = member.gate else { continue };
            if member.params.max_run_ns.is_some_and(|limit| now.since(since) >= limit) {
                member.gate = Gate::Closing { since, overdue: true };
                self.orders.push(Order::Overdue { tenant, ran_ns: now.since(since) });
            }
        }
    }

    /// Advances the trials of groups in automatic mode.
    fn take_trials(&mut self, now: Nanos) {
        for (&id, group) in &mut self.groups {
            if group.sharing != Sharing::Auto {
                continue;
            }
            let works = |&(&tenant, member): &(&TenantId, &Member)| {
                let can_join = member.group.is_some_and(|(of, _)| of == id) && member.concurrent;
                can_join && (member.is_active(now) || member.joined.is_none() && self.turns.is_busy(tenant))
            };
            let working = self.members.iter().filter(works).count();
            if let Some(together) = group.trial.tick(&self.config, group.together, working, now) {
                group.together = together;
            }
        }
    }

    /// Returns the time at which [`Self::tick`] is due if no event occurs earlier.
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Nanos> {
        let closing = self.members.values().filter_map(|member| match member.gate {
            Gate::Closing { since, overdue: false } => Some(since.after(member.params.max_run_ns?)),
            Gate::Closed | Gate::Open | Gate::Closing { .. } => None,
        });
        let capped = self.members.values().filter(|member| member.joined.is_some() && member.has_work());
        let capped = capped.filter_map(|member| member.balance.cap_ends(&member.settings()));
        let groups = self.groups.iter().flat_map(|(&id, group)| self.group_wakeups(id, group));
        closing.chain(capped).chain(groups).chain(self.turns.next_wakeup()).min()
    }

    /// Opens and closes gates to match the state of all members.
    fn update(&mut self, now: Nanos) {
        self.renew_groups(now);
        let tenants: Vec<TenantId> = self.members.keys().copied().collect();
        for tenant in tenants {
            let Some(member) = self.members.get(&tenant) else { continue };
            match (member.joined, self.group_to_join(member)) {
                (None, None) => self.turns.pause(tenant, member.paused, now),
                (None, Some(group)) => self.join(tenant, group, now),
                (Some(before), group) if group != Some(before) => self.leave(tenant, now),
                (Some(_), _) => {}
            }
        }
        let ids: Vec<GroupId> = self.groups.keys().copied().collect();
        for id in ids {
            self.update_group(id, now);
        }
        self.pass_orders_on(now);
    }

    /// Processes orders from the underlying turns, which may begin or end a group's turn.
    fn pass_orders_on(&mut self, now: Nanos) {
        loop {
            let orders = self.turns.take_orders();
            if orders.is_empty() {
                return;
            }
            for order in orders {
                let (Order::Grant(of)
                | Order::Recall(of)
                | Order::Yield(of)
                | Order::Quarantined(of)
                | Order::Overdue { tenant: of, .. }) = order;
                let Some(id) = group_of(of) else {
                    self.orders.push(order);
                    continue;
                };
                match order {
                    Order::Overdue { ran_ns, .. } => self.overdue(id, ran_ns),
                    Order::Yield(of) => self.ask_member_to_yield(id, of),
                    Order::Grant(_) => {
                        if let Some(group) = self.groups.get_mut(&id) {
                            group.yields = false;
                        }
                    }
                    Order::Recall(_) | Order::Quarantined(_) => {}
                }
                self.update_group(id, now);
            }
        }
    }

    /// If only one member's gate is open, asks the member to return the card as soon as its program waits for a result.
    /// If several gates are open, the members use the whole card together, so the group keeps its slices.
    fn ask_member_to_yield(&mut self, id: GroupId, of: TenantId) {
        let open: Vec<TenantId> =
            self.members_of(id).filter(|(_, member)| member.gate == Gate::Open).map(|(tenant, _)| tenant).collect();
        if let ([tenant], Some(group)) = (open.as_slice(), self.groups.get_mut(&id)) {
            group.yields = true;
            self.orders.push(Order::Yield(*tenant));
        } else {
            self.turns.has_several_members(of);
        }
    }

    /// Reports the members that prevent the end of their group's turn.
    fn overdue(&mut self, id: GroupId, ran_ns: u64) {
        for (&tenant, member) in self.members.iter_mut().filter(|(_, member)| member.joined == Some(id)) {
            if let Gate::Closing { since, overdue: false } = member.gate {
                member.gate = Gate::Closing { since, overdue: true };
                self.orders.push(Order::Overdue { tenant, ran_ns });
            }
        }
    }

    fn members_of(&self, id: GroupId) -> impl Iterator<Item = (TenantId, &Member)> + '_ {
        let joined = move |(_, member): &(&TenantId, &Member)| member.joined == Some(id);
        self.members.iter().filter(joined).map(|(&tenant, member)| (tenant, member))
    }

    /// Returns true if a member may use the card during its group's turn, unless it must wait for other members.
    fn is_free(&self, tenant: TenantId, member: &Member) -> bool {
        let quarantined =
            self.turns.scheduler().strikes(tenant).is_some_and(|(_, quarantine)| quarantine != Quarantine::Free);
        !member.paused && !quarantined && !member.balance.is_capped() && self.group_to_join(member) == member.joined
    }

    /// Opens and closes the gates of a group's members, and requests or ends the group's turn, to match the members'
    /// states.
    fn update_group(&mut self, id: GroupId, now: Nanos) {
        let sampled = self.groups.get(&id).and_then(|group| group.sample);
        for (&tenant, member) in self.members.iter_mut().filter(|(_, member)| member.joined == Some(id)) {
            let settings = member.settings();
            member.balance.refill(&settings, sampled.is_some_and(|sample| sample.tenant == tenant), now);
        }
        self.set_party_params(id, now);
        let of = party(id);
        let runs = self.turns.has_turn(of) && !self.turns.is_recalled(of);
        self.choose_sample(id, runs, now);
        let yields = self.groups.get_mut(&id).is_some_and(|group| {
            group.updated = now;
            group.yields &= runs;
            group.yields
        });
        let sampled = self.groups.get(&id).and_then(|group| group.sample).map(|sample| sample.tenant);
        let waiting = self.waiting(id, now);
        let may_run = |(tenant, member): (TenantId, &Member)| {
            let is_next = sampled.map_or_else(|| !waiting.contains(&tenant), |chosen| chosen == tenant);
            (tenant, runs && is_next && self.is_free(tenant, member))
        };
        let gates: Vec<(TenantId, bool)> = self.members_of(id).map(may_run).collect();
        // A sample starts only after all concurrent work has ended.
        let may_open = sampled.is_none_or(|tenant| self.is_only_open(id, tenant));
        let mut open = 0;
        for (tenant, may_run) in gates {
            let Some(member) = self.members.get_mut(&tenant) else { continue };
            match member.gate {
                Gate::Closed if may_run && may_open && !yields && member.wants => {
                    (member.gate, member.wants) = (Gate::Open, false);
                    member.account.started += 1;
                    let asked = member.asked.take().unwrap_or(now);
                    member.account.waits.add(now.since(asked));
                    member.balance.opened(now);
                    member.progressed = now;
                    self.orders.push(Order::Grant(tenant));
                }
                Gate::Open if !may_run => {
                    member.gate = Gate::Closing { since: now, overdue: false };
                    self.orders.push(Order::Recall(tenant));
                }
                Gate::Closed | Gate::Open | Gate::Closing { .. } => {}
            }
            open += usize::from(member.gate != Gate::Closed);
        }
        if let Some(group) = self.groups.get_mut(&id) {
            group.single_since = if open > 1 { None } else { group.single_since.or(Some(now)) };
        }
        if open > 0 {
            return;
        }
        let more = self.members_of(id).any(|(tenant, member)| member.wants && self.is_free(tenant, member));
        if self.turns.has_turn(of) || !more && self.turns.is_busy(of) {
            self.turns.ended(of, now, more, now);
        } else if more {
            self.turns.wants(of, now);
        }
    }

    /// Sets a group's weight and guarantee to the sums over its active members, its latency class to the best of
    /// theirs, and its run time limit to the longest.
    fn set_party_params(&mut self, id: GroupId, now: Nanos) {
        let active = self.members_of(id).filter(|(_, member)| member.is_active(now)).map(|(_, member)| member);
        let mut sum: Option<VgpuParams> = None;
        for settings in active.map(Member::settings) {
            sum = Some(sum.map_or(settings, |sum| sum.together_with(&settings)));
        }
        let uncapped = sum.map(|sum| VgpuParams { cap_permille: PERMILLE, ..sum });
        if let Some(params) = uncapped.filter(|params| self.turns.params(party(id)) != Some(params)) {
            self.turns.change(party(id), params, now);
        }
    }

    /// Returns and clears the pending orders, in the order of their creation.
    pub fn take_orders(&mut self) -> Vec<Order> {
        std::mem::take(&mut self.orders)
    }
}

mod offered;
mod view;

#[cfg(test)]
mod tests;
