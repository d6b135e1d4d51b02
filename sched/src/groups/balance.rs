//! Accounts of a group's members, and the decision which member gets the card alone.
//!
//! Work is measured in ns: the time that it would take on an otherwise idle card. Concurrent kernels take longer, and
//! the time in flight includes this delay: two programs that always have work have the same time in flight, even if
//! they make different progress. Therefore, the length of a member's submissions is measured while the member has the
//! card alone. If other members ran at the same time, each reported submission counts with this length. The total for a
//! report is limited to its time in flight.
//!
//! Each charge is subtracted from the charged member's balance and divided among all competing members by their shares,
//! so that the sum stays the same. An idle member keeps at most half of the lag at which it would get the card alone.

use super::{Alone, ENGINE, Gate, Group, GroupConfig, GroupId, GroupTurns, Member, party};
use crate::config::PERMILLE;
use crate::shares::{Claim, divide, scale};
use crate::{Nanos, TenantId, VgpuParams, WHOLE_SHARE_PPM};

/// Time over which a cap is enforced, in ns.
const CAP_WINDOW_NS: u64 = 30_000_000;
/// Time in flight, in ns, after which a member's previous measurement is replaced.
const MEASURED_NS: u64 = 50_000_000;
/// Minimum time in flight, in ns, that a measurement needs to replace the previous measurement.
const MIN_MEASURED_NS: u64 = 4_000_000;
/// Minimum time in ns between two samples if the second is taken because the program's work has changed.
const CHANGED_INTERVAL_NS: u64 = 1_000_000_000;
/// Number of submissions in a sample. A report may be off by one submission, which hardly changes a sample of this
/// size.
const SAMPLED_LAUNCHES: u64 = 32;
/// Maximum length of a sample, as a multiple of [`GroupConfig::sample_ns`].
const LONGEST_SAMPLE: u64 = 10;
/// Maximum absolute lag of a member, as a multiple of [`GroupConfig::lag_ns`].
const MAX_LAGS: i64 = 40;

/// Accounts of one member.
#[derive(Debug)]
pub(super) struct Balance {
    /// Lag of the member: its share minus its work, in ns.
    lack: i64,
    /// Last measurement in which the member had the card alone: the time in flight in ns, and the number of
    /// submissions.
    alone: (u64, u64),
    /// Time in flight and number of submissions of the measurement in progress.
    measuring: (u64, u64),
    /// Time in flight and number of submissions while other members also had work, since the last comparison with
    /// `usual`.
    beside: (u64, u64),
    /// Time in flight of a submission while other members also had work, in ns, as first determined after the last
    /// measurement.
    usual: Option<u64>,
    /// True if the measurement no longer fits the submissions, because the program's work has changed.
    changed: bool,
    /// True if the last two measurements had the same result.
    confirmed: bool,
    /// Time of the last measurement or attempted measurement.
    sampled: Option<Nanos>,
    /// Time of the last report of use.
    reported: Nanos,
    /// Work that the cap permits now, in ns.
    allowance: i64,
    refilled: Nanos,
    capped: bool,
}

impl Balance {
    pub(super) fn new(now: Nanos) -> Self {
        Self {
            lack: 0,
            alone: (0, 0),
            measuring: (0, 0),
            beside: (0, 0),
            usual: None,
            changed: false,
            confirmed: false,
            sampled: None,
            reported: now,
            allowance: 0,
            refilled: now,
            capped: false,
        }
    }

    /// Starts the accounts of a member that joins the group.
    pub(super) fn begin(&mut self, now: Nanos) {
        (self.lack, self.reported) = (0, now);
    }

    /// Records that an idle member has work again.
    pub(super) fn returns(&mut self, lag_ns: u64) {
        self.lack = self.lack.min(signed(lag_ns) / 2);
    }

    /// Records that the member's gate has opened. The member's next report covers the time after this call.
    pub(super) fn opened(&mut self, now: Nanos) {
        self.reported = now;
    }

    pub(super) const fn lack(&self) -> i64 {
        self.lack
    }

    /// Returns the work in a report, and measures the length of submissions if the member was alone for the whole time.
    /// `members` is the number of members that have work in flight.
    pub(super) fn work(
        &mut self,
        busy_ns: u64,
        launches: u64,
        single_since: Option<Nanos>,
        members: u64,
        now: Nanos,
    ) -> u64 {
        let is_single = single_since.is_some_and(|since| since <= self.reported);
        self.reported = now;
        if launches == 0 {
            return busy_ns;
        }
        if is_single {
            self.measuring = (self.measuring.0.saturating_add(busy_ns), self.measuring.1.saturating_add(launches));
            self.sampled = Some(now);
            if self.measuring.0 >= MEASURED_NS {
                self.end_measurement();
            }
            return busy_ns;
        }
        self.end_measurement();
        self.compare(busy_ns, launches, members);
        let (alone_ns, count) = self.alone;
        if count == 0 { busy_ns } else { busy_ns.min(scale(launches, alone_ns, count)) }
    }

    /// Replaces the last measurement with the current one. If the current measurement is too short, adds it to the last
    /// one instead. Programs have phases: thousands of short submissions at the start must not determine the length of
    /// later submissions.
    fn end_measurement(&mut self) {
        let (ns, launches) = std::mem::take(&mut self.measuring);
        if launches == 0 {
            return;
        }
        let is_enough = ns >= MEASURED_NS || ns >= MIN_MEASURED_NS && launches >= SAMPLED_LAUNCHES;
        let before = self.length();
        self.alone = match self.alone {
            _ if is_enough => (ns, launches),
            (before, count) => (before.saturating_add(ns), count.saturating_add(launches)),
        };
        let length = self.length();
        self.confirmed = length <= before.saturating_mul(3) / 2 && before <= length.saturating_mul(3) / 2;
        (self.beside, self.usual, self.changed) = ((0, 0), None, false);
    }

    /// Returns the measured length of a submission in ns, or 0 if it is unknown.
    fn length(&self) -> u64 {
        self.alone.0.checked_div(self.alone.1).unwrap_or(0)
    }

    /// Compares the time in flight of submissions that ran concurrently with other members' work with the measurement
    /// and with the usual time.
    fn compare(&mut self, busy_ns: u64, launches: u64, members: u64) {
        self.beside = (self.beside.0.saturating_add(busy_ns), self.beside.1.saturating_add(launches));
        if self.beside.1 < SAMPLED_LAUNCHES {
            return;
        }
        let (ns, count) = std::mem::take(&mut self.beside);
        let (length, alone) = (ns / count, self.length());
        let usual = *self.usual.get_or_insert(length);
        // Members that share the card slow each other down at most by a factor equal to their number, and never speed
        // each other up.
        let fits = length <= alone.saturating_mul(2 * members.max(1)) && length >= alone / 2;
        self.changed |= !fits && !self.confirmed || length >= usual.saturating_mul(2) || length <= usual / 2;
    }

    /// Returns true if the length of the member's submissions should be measured again.
    fn is_sample_due(&self, config: &GroupConfig, now: Nanos) -> bool {
        let interval = if self.changed { CHANGED_INTERVAL_NS } else { config.sample_interval_ns };
        self.sampled.is_none_or(|at| now.since(at) >= interval)
    }

    /// Refills the allowance of the member's cap. A sample does not end when the allowance is used up.
    pub(super) fn refill(&mut self, settings: &VgpuParams, is_sampled: bool, now: Nanos) {
        let elapsed = now.since(std::mem::replace(&mut self.refilled, now));
        let full = window(settings);
        let more = signed(scale(elapsed.min(2 * CAP_WINDOW_NS), settings.cap_permille.into(), PERMILLE.into()));
        self.allowance = self.allowance.saturating_add(more).min(full);
        let is_capped = settings.cap_permille < PERMILLE && !is_sampled;
        self.capped = is_capped && (self.allowance <= 0 || self.capped && self.allowance < full / 4);
    }

    pub(super) const fn is_capped(&self) -> bool {
        self.capped
    }

    /// Returns the time at which the cap permits the member to run again.
    pub(super) fn cap_ends(&self, settings: &VgpuParams) -> Option<Nanos> {
        let lacks = u64::try_from(window(settings) / 4 - self.allowance).ok().filter(|_| self.capped)?;
        Some(self.refilled.after(scale(lacks, PERMILLE.into(), settings.cap_permille.max(1).into()) + 1))
    }
}

/// Returns the maximum allowance that a cap accumulates, in ns.
fn window(settings: &VgpuParams) -> i64 {
    signed(scale(CAP_WINDOW_NS, settings.cap_permille.into(), PERMILLE.into()))
}

fn signed(ns: u64) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX)
}

impl GroupTurns {
    /// Charges a joined member for work, and credits the work to all competing members by their shares.
    pub(super) fn charge(&mut self, tenant: TenantId, work: u64) {
        let Some(id) = self.members.get(&tenant).and_then(|member| member.joined) else { return };
        let bound = signed(self.config.lag_ns).saturating_mul(MAX_LAGS);
        let whole = self.part_of_card(id);
        let competes = |(of, member): &(TenantId, &Member)| {
            *of == tenant || member.has_work() && (member.gate != Gate::Closed || self.is_free(*of, member))
        };
        let competing: Vec<(TenantId, Claim)> = self
            .members_of(id)
            .filter(competes)
            .map(|(of, member)| {
                // A guarantee is a fraction of the card's time, but the group has only a part of this time.
                let Claim { weight, least, .. } = Claim::from_params(&member.settings(), WHOLE_SHARE_PPM);
                (of, Claim { weight, least: scale(least, WHOLE_SHARE_PPM, whole.max(1)), most: WHOLE_SHARE_PPM })
            })
            .collect();
        let claims: Vec<Claim> = competing.iter().map(|(_, claim)| *claim).collect();
        for ((of, _), part) in competing.iter().zip(divide(WHOLE_SHARE_PPM, &claims)) {
            let Some(member) = self.members.get_mut(of) else { continue };
            let loss = if *of == tenant { signed(work) } else { 0 };
            let gain = signed(scale(work, part, WHOLE_SHARE_PPM));
            member.balance.lack = (member.balance.lack + gain - loss).clamp(-bound, bound);
            member.balance.allowance = member.balance.allowance.saturating_sub(loss);
        }
    }

    /// Returns the share of the card's time that a group gets while it competes with all parties that have work.
    fn part_of_card(&self, id: GroupId) -> u64 {
        let own = self.members.iter().filter(|(_, member)| member.joined.is_none()).map(|(&tenant, _)| tenant);
        let others = self.groups.keys().copied().filter(|other| *other != id).map(party);
        let busy = own.chain(others).filter(|of| self.turns.is_busy(*of));
        let all: Vec<VgpuParams> =
            std::iter::once(party(id)).chain(busy).filter_map(|of| self.turns.params(of).copied()).collect();
        crate::shares(&all).first().copied().unwrap_or(WHOLE_SHARE_PPM)
    }

    /// Decides which member of a group gets the card alone.
    pub(super) fn choose_alone(&mut self, id: GroupId, runs: bool, now: Nanos) {
        let Some(group) = self.groups.get(&id) else { return };
        let before = group.alone;
        let contenders: Vec<(TenantId, &Member)> =
            self.members_of(id).filter(|(tenant, member)| member.has_work() && self.is_free(*tenant, member)).collect();
        let continues = |alone: &Alone| {
            let found = contenders.iter().find(|(tenant, _)| *tenant == alone.tenant);
            found.is_some_and(|(_, member)| self.continues_alone(alone, &member.balance, now))
        };
        let may_choose = runs && contenders.len() > 1;
        let alone = before.filter(|alone| may_choose && continues(alone));
        let alone = alone.or_else(|| if may_choose { self.next_alone(&contenders, before, now) } else { None });
        let failed = before.filter(|before| alone.is_none_or(|alone| alone.tenant != before.tenant));
        if let Some(failed) = failed
            && let Some(member) = self.members.get_mut(&failed.tenant)
        {
            // Do not immediately repeat a sample that got no report, or time alone in which the member did no work.
            member.balance.sampled = Some(member.balance.sampled.map_or(now, |at| at.max(failed.since)));
            if failed.work == 0 && now.since(failed.since) >= self.config.alone_ns {
                member.balance.lack = member.balance.lack.min(0);
            }
        }
        if let Some(group) = self.groups.get_mut(&id) {
            group.alone = alone;
        }
    }

    fn continues_alone(&self, alone: &Alone, balance: &Balance, now: Nanos) -> bool {
        let lasted = now.since(alone.since);
        if alone.sample {
            let is_enough = alone.work >= self.config.sample_ns && alone.launches >= SAMPLED_LAUNCHES;
            return lasted < LONGEST_SAMPLE * self.config.sample_ns && !is_enough;
        }
        balance.lack > 0 && lasted < self.config.alone_ns
    }

    /// Returns the member that lags most in the best class, or a member whose submissions must be measured.
    fn next_alone(&self, contenders: &[(TenantId, &Member)], before: Option<Alone>, now: Nanos) -> Option<Alone> {
        // A closing gate can open again only after the tenant's answer.
        let able = || contenders.iter().filter(|(_, member)| !matches!(member.gate, Gate::Closing { .. }));
        // A member that did no work while it had the card alone must wait for the next charge.
        let fruitless = before.filter(|alone| alone.work == 0).map(|alone| alone.tenant);
        let lags = |(tenant, member): &&(TenantId, &Member)| {
            member.balance.lack >= signed(self.config.lag_ns) && fruitless != Some(*tenant)
        };
        let order = |(_, member): &&(TenantId, &Member)| (member.settings().class, -member.balance.lack);
        if let Some((tenant, _)) = able().filter(lags).min_by_key(order) {
            return Some(Alone { tenant: *tenant, since: now, sample: false, work: 0, launches: 0 });
        }
        let due = |(_, member): &&(TenantId, &Member)| member.balance.is_sample_due(&self.config, now);
        let is_new = |(tenant, _): &&(TenantId, &Member)| before.is_none_or(|alone| alone.tenant != *tenant);
        let (tenant, _) = able().filter(due).filter(is_new).min_by_key(|(_, member)| member.balance.sampled)?;
        Some(Alone { tenant: *tenant, since: now, sample: true, work: 0, launches: 0 })
    }

    /// Returns the times at which the group's decision may change without another event.
    pub(super) fn group_wakeups(&self, id: GroupId, group: &Group) -> impl Iterator<Item = Nanos> + use<> {
        let GroupConfig { alone_ns, sample_ns, .. } = self.config;
        let alone = group
            .alone
            .map(|alone| alone.since.after(if alone.sample { LONGEST_SAMPLE * sample_ns } else { alone_ns }));
        let samples = || {
            let sampled = self.members_of(id).filter(|(_, member)| member.has_work());
            sampled.map(|(_, member)| member.balance.sampled.unwrap_or_default().after(self.config.sample_interval_ns))
        };
        let is_waiting = group.alone.is_none() && self.turns.has_turn(party(id)) && samples().count() > 1;
        let sample = if is_waiting { samples().min() } else { None };
        let trial = group.trial.wakeup(&self.config, group.sharing);
        alone.into_iter().chain(sample).chain(trial)
    }

    /// Returns a member's account within its group, merged with the account of its separate turns.
    pub(super) fn merged_account(&self, tenant: TenantId) -> Option<crate::Account> {
        let mut account = self.turns.scheduler().account(tenant, ENGINE)?.clone();
        if let Some(member) = self.members.get(&tenant) {
            account.add(&member.account);
        }
        Some(account)
    }
}
