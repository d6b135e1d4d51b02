//! Accounts of a group's members, and the selection of members that must wait or that get the card to themselves.
//!
//! Work is measured as the time that it would take on an otherwise idle card, in ns. Concurrent kernels take longer,
//! and the time in flight includes this delay. For example, two programs that always have work have the same time in
//! flight, even if they make different progress. Instead, the length of a member's submissions is measured while the
//! member has the card to itself. If other members run at the same time, each reported submission counts as work of
//! this length. The total work of a report is limited to its time in flight.
//!
//! Each charge is subtracted from the charged member's lag and divided among all competing members by their shares.
//! Members that are ahead wait, as do members of worse latency classes (`GroupTurns::waiting`). An idle member keeps at
//! most half of the lag for which others would wait. An idle member that is ahead competes until it no longer is.
//!
//! Lengths are not measured exactly, and members of equal weight do not progress at exactly the same speed. A part of
//! each lag is therefore forgiven ([`FORGIVEN_PERMILLE`]). Otherwise, one of these members would soon have to wait
//! repeatedly.

use super::{ENGINE, Gate, Group, GroupConfig, GroupId, GroupTurns, Member, Sample, party};
use crate::config::PERMILLE;
use crate::shares::{Claim, divide, scale};
use crate::{Nanos, TenantId, VgpuParams, WHOLE_SHARE_PPM};

/// Time over which a cap is enforced, in ns.
const CAP_WINDOW_NS: u64 = 30_000_000;
/// Time in flight, in ns, after which a measurement is complete.
const MEASURED_NS: u64 = 50_000_000;
/// Minimum time in flight of a measurement that is completed by the end of a sample, in ns.
const MIN_MEASURED_NS: u64 = 15_000_000;
/// Number of reports, after the first one, with the same mean submission length that complete a measurement. Most
/// programs then repeat the same work.
const STEADY_REPORTS: u32 = 3;
/// Like `STEADY_REPORTS`, for a measurement that differs from the previous one. More reports are needed, because a
/// phase of the program may be short.
const STEADY_DIFFERENT_REPORTS: u32 = 7;
/// Maximum time in ns between two reports of a measurement.
const MAX_REPORT_GAP_NS: u64 = 200_000_000;
/// Maximum difference between two measurements of unsteady work that are averaged, in permille.
const NEAR_PERMILLE: u64 = 150;
/// Measured time in flight that suffices for unsteady work, in ns. With less, the work is measured again soon.
const ENOUGH_NS: u64 = 140_000_000;
/// Maximum time in flight over which a length is averaged, in ns. The limit lets the length follow slow changes.
const MAX_TOTAL_NS: u64 = 400_000_000;
/// Maximum difference between lengths that are considered equal, in permille.
const EQUAL_PERMILLE: u64 = 40;
/// Minimum time between two samples if the second one is taken because the program's work has changed, in ns.
const CHANGED_INTERVAL_NS: u64 = 1_000_000_000;
/// Minimum time between two parts of a sample if the program paused after the first part, in ns.
const RETRY_NS: u64 = 20_000_000;
/// Maximum time between two samples, as a multiple of [`GroupConfig::sample_interval_ns`].
const LONGEST_INTERVAL: u64 = 8;
/// Number of concurrent submissions after which their mean length is compared with the measurement.
const COMPARED_LAUNCHES: u64 = 32;
/// Maximum lag of a member, as a multiple of [`GroupConfig::lag_ns`].
const MAX_LAGS: i64 = 10;
/// Maximum lead of a member that is ahead, as a multiple of [`GroupConfig::lag_ns`].
const MAX_LEADS: i64 = 40;
/// Part of each credited share by which the lag moves towards zero, in permille.
const FORGIVEN_PERMILLE: u64 = 10;

/// Accounts of one member.
#[derive(Debug)]
pub(super) struct Balance {
    /// Lag of the member, which is its share minus its work, in ns.
    lack: i64,
    /// Last complete measurement for which the member had the card to itself: the time in flight in ns, and the number
    /// of submissions.
    alone: (u64, u64),
    /// Time in flight in ns, and number of submissions, of the measurement in progress.
    measuring: (u64, u64),
    /// The same values for the latest reports with the same mean length. `steady` is the number of these reports after
    /// the first one.
    repeated: (u64, u64),
    steady: u32,
    /// True if the reports of the last complete measurement had the same mean length.
    is_steady: bool,
    /// Start of the period without concurrent work in which the member has already reported once. The first report may
    /// include work from before the period, but later reports do not.
    clean_since: Option<Nanos>,
    /// Time in flight in ns, and number of submissions, while other members also had work, since the last comparison
    /// with `usual`.
    beside: (u64, u64),
    /// Mean time in flight of a submission while other members also had work, in ns, as first computed after the last
    /// measurement.
    usual: Option<u64>,
    /// True if the measurement no longer matches the submissions, because the program's work has changed.
    changed: bool,
    /// True if a repeated measurement had the same result although the submissions did not match it. The submissions
    /// are then slower than usual because of other members' work.
    confirmed: bool,
    /// True during a sample of the member. Otherwise, the member is measured while others happen to wait.
    in_sample: bool,
    /// True if the length has changed by a measurement outside a sample, and no sample has been taken since.
    by_chance: bool,
    /// Interval between samples, as a multiple of [`GroupConfig::sample_interval_ns`].
    interval: u64,
    /// Start of the last sample, or time of the last complete measurement.
    sampled: Option<Nanos>,
    /// Time of the last sample that was taken because the program's work had changed.
    corrected: Option<Nanos>,
    /// Time of the last report in a measurement.
    measured: Option<Nanos>,
    /// Time of the last report, or of a later opening of the gate.
    reported: Nanos,
    /// Time at which the gate last opened.
    opened: Nanos,
    /// Amount of work that the cap permits now, in ns.
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
            repeated: (0, 0),
            steady: 0,
            is_steady: false,
            clean_since: None,
            beside: (0, 0),
            usual: None,
            changed: false,
            confirmed: false,
            in_sample: false,
            by_chance: false,
            interval: 1,
            sampled: None,
            corrected: None,
            measured: None,
            reported: now,
            opened: now,
            allowance: 0,
            refilled: now,
            capped: false,
        }
    }

    /// Starts the accounts of a member that has just joined the group.
    pub(super) fn begin(&mut self, now: Nanos) {
        (self.lack, self.reported) = (0, now);
    }

    /// Records that the member's gate has opened. The next report covers the time after this call.
    pub(super) fn opened(&mut self, now: Nanos) {
        (self.reported, self.opened) = (now, now);
    }

    pub(super) const fn lack(&self) -> i64 {
        self.lack
    }

    /// Returns the work in a report, in ns, and measures the length of submissions if the member had the card to itself
    /// for the whole time. `members` is the number of members with work in flight.
    pub(super) fn work(
        &mut self,
        busy_ns: u64,
        launches: u64,
        single_since: Option<Nanos>,
        members: u64,
        now: Nanos,
    ) -> u64 {
        let single_since = single_since.filter(|since| *since <= self.reported);
        self.reported = now;
        if launches == 0 {
            return busy_ns;
        }
        if let Some(since) = single_since {
            if self.opened >= since || self.clean_since == single_since {
                self.measure(busy_ns, launches, now);
                return busy_ns;
            }
        } else {
            self.compare(busy_ns, launches, members);
        }
        self.clean_since = single_since;
        let (alone_ns, count) = if self.alone.1 > 0 { self.alone } else { self.measuring };
        if count == 0 { busy_ns } else { busy_ns.min(scale(launches, alone_ns, count)) }
    }

    /// Adds a report to the measurement. A measurement is complete when the mean is steady, or after 50 ms. A
    /// measurement that differs from the previous one takes longer, because programs have phases, and thousands of
    /// short submissions at the start must not determine the length of later submissions.
    fn measure(&mut self, busy_ns: u64, launches: u64, now: Nanos) {
        if self.measured.is_some_and(|at| now.since(at) > MAX_REPORT_GAP_NS) {
            self.restart();
        }
        self.measured = Some(now);
        let sum = |before: (u64, u64)| (before.0.saturating_add(busy_ns), before.1.saturating_add(launches));
        let repeats = is_equal(busy_ns / launches, mean(self.repeated));
        self.measuring = sum(self.measuring);
        (self.repeated, self.steady) =
            if repeats { (sum(self.repeated), self.steady + 1) } else { ((busy_ns, launches), 0) };
        let repeats = self.alone.1 == 0 || self.changed || is_equal(mean(self.repeated), self.length());
        let enough = if repeats { STEADY_REPORTS } else { STEADY_DIFFERENT_REPORTS };
        if self.measuring.0 >= MEASURED_NS || self.steady >= enough {
            self.complete(now);
        }
    }

    /// Restarts the measurement.
    fn restart(&mut self) {
        (self.measuring, self.repeated, self.steady) = ((0, 0), (0, 0), 0);
    }

    /// Completes a measurement. Unsteady work, such as the kernels of a training step, is measured again soon, and the
    /// mean of the measurements is used.
    fn complete(&mut self, now: Nanos) {
        self.is_steady = self.steady >= STEADY_REPORTS;
        let (ns, count) = if self.is_steady { self.repeated } else { self.measuring };
        let is_same = is_equal(mean((ns, count)), self.length());
        self.confirmed = is_same && (self.confirmed || self.changed);
        // Measurements outside samples can follow each other within milliseconds, so they confirm nothing.
        self.interval = match (is_same, self.in_sample) {
            (true, true) => (2 * self.interval).min(LONGEST_INTERVAL),
            (true, false) => self.interval,
            (false, _) => 1,
        };
        self.by_chance = !self.in_sample && (self.by_chance || !is_same);
        if self.changed {
            self.corrected = Some(now);
        }
        let tolerance = if self.is_steady { EQUAL_PERMILLE } else { NEAR_PERMILLE };
        let is_near = !self.changed && is_within(mean((ns, count)), self.length(), tolerance);
        let before = if is_near { self.alone } else { (0, 0) };
        let (ns, count) = (before.0.saturating_add(ns), before.1.saturating_add(count));
        self.alone = if ns > MAX_TOTAL_NS { (ns / 2, count.div_ceil(2)) } else { (ns, count) };
        self.sampled = Some(now);
        (self.beside, self.usual, self.changed) = ((0, 0), None, false);
        self.restart();
    }

    /// Returns the measured length of a submission in ns, or 0 if it is unknown.
    fn length(&self) -> u64 {
        mean(self.alone)
    }

    /// Compares the time in flight of submissions that overlapped other members' work with the measurement and with the
    /// usual time.
    fn compare(&mut self, busy_ns: u64, launches: u64, members: u64) {
        self.beside = (self.beside.0.saturating_add(busy_ns), self.beside.1.saturating_add(launches));
        if self.beside.1 < COMPARED_LAUNCHES {
            return;
        }
        let (ns, count) = std::mem::take(&mut self.beside);
        let (length, alone) = (ns / count, self.length());
        let usual = *self.usual.get_or_insert(length);
        // Concurrent members slow each other down by at most a factor of their number, and never speed each other up.
        // Both limits allow for an error by a factor of two.
        let fits = length <= alone.saturating_mul(2 * members.max(1)) && length >= alone / 2;
        let changes = !fits && !self.confirmed || length >= usual.saturating_mul(2) || length <= usual / 2;
        if changes && !std::mem::replace(&mut self.changed, true) {
            self.restart();
        }
    }

    /// Returns true if the length of the member's submissions should be measured again.
    fn is_sample_due(&self, config: &GroupConfig, now: Nanos) -> bool {
        let is_past = |at: Option<Nanos>, interval| at.is_none_or(|at| now.since(at) >= interval);
        let is_old = is_past(self.sampled, self.interval * config.sample_interval_ns);
        let is_inexact = !self.is_steady && self.alone.1 > 0 && self.alone.0 < ENOUGH_NS;
        let is_past_soon = |at| is_past(at, CHANGED_INTERVAL_NS);
        // While others wait for the member, its work may take another time than while they work.
        let is_doubtful = is_inexact || self.by_chance;
        is_old || self.changed && is_past_soon(self.corrected) || is_doubtful && is_past_soon(self.sampled)
    }

    /// Records the end of a sample. A sample that was too short is not repeated immediately. If the length is still
    /// unknown but has been partly measured, the sample soon continues.
    fn sample_ended(&mut self, since: Nanos, now: Nanos) {
        let has_part = self.measured.is_some_and(|at| at >= since);
        if has_part && self.measuring.0 >= MIN_MEASURED_NS {
            self.complete(now);
        }
        (self.in_sample, self.by_chance) = (false, false);
        self.sampled = Some(self.sampled.map_or(since, |at| at.max(since)));
        self.changed |= self.alone.1 == 0;
        if self.changed {
            let soon = Nanos((now.0 + RETRY_NS).saturating_sub(CHANGED_INTERVAL_NS));
            self.corrected = Some(if has_part { soon } else { now });
        }
    }

    /// Refills the allowance of the member's cap. A sample continues even if the allowance is used up.
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

    /// Returns the time at which the cap next permits the member to run.
    pub(super) fn cap_ends(&self, settings: &VgpuParams) -> Option<Nanos> {
        let lacks = u64::try_from(window(settings) / 4 - self.allowance).ok().filter(|_| self.capped)?;
        Some(self.refilled.after(scale(lacks, PERMILLE.into(), settings.cap_permille.max(1).into()) + 1))
    }
}

/// Returns the maximum allowance that accumulates under a cap, in ns.
fn window(settings: &VgpuParams) -> i64 {
    signed(scale(CAP_WINDOW_NS, settings.cap_permille.into(), PERMILLE.into()))
}

pub(super) fn signed(ns: u64) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX)
}

/// Returns the mean length of submissions in ns, or 0 if there are none.
fn mean((ns, launches): (u64, u64)) -> u64 {
    ns.checked_div(launches).unwrap_or(0)
}

/// Returns true if two lengths are equal within the accuracy of the measurement.
fn is_equal(one: u64, other: u64) -> bool {
    is_within(one, other, EQUAL_PERMILLE)
}

/// Returns true if two lengths differ by at most `permille` of the longer one.
fn is_within(one: u64, other: u64, permille: u64) -> bool {
    one.abs_diff(other) <= scale(one.max(other), permille, PERMILLE.into())
}

impl GroupTurns {
    /// Charges a joined member for work, and credits all competing members with their shares of it.
    pub(super) fn charge(&mut self, tenant: TenantId, work: u64) {
        let Some(id) = self.members.get(&tenant).and_then(|member| member.joined) else { return };
        let lag = signed(self.config.lag_ns);
        let whole = self.part_of_card(id);
        let behind = self.most_behind(id, None).unwrap_or(0);
        let competes = |(of, member): &(TenantId, &Member)| {
            let has_work = member.has_work() && (member.gate != Gate::Closed || self.is_free(*of, member));
            *of == tenant || has_work || !member.has_work() && member.balance.lack < behind
        };
        let competing: Vec<(TenantId, Claim)> = self
            .members_of(id)
            .filter(competes)
            .map(|(of, member)| {
                // A guarantee is a fraction of the card's time, but the group gets only part of this time.
                let Claim { weight, least, .. } = Claim::from_params(&member.settings(), WHOLE_SHARE_PPM);
                (of, Claim { weight, least: scale(least, WHOLE_SHARE_PPM, whole.max(1)), most: WHOLE_SHARE_PPM })
            })
            .collect();
        let claims: Vec<Claim> = competing.iter().map(|(_, claim)| *claim).collect();
        for ((of, _), part) in competing.iter().zip(divide(WHOLE_SHARE_PPM, &claims)) {
            let Some(member) = self.members.get_mut(of) else { continue };
            let loss = if *of == tenant { signed(work) } else { 0 };
            let gain = scale(work, part, WHOLE_SHARE_PPM);
            let forgiven = signed(scale(gain, FORGIVEN_PERMILLE, PERMILLE.into()));
            let most = if *of == tenant || member.has_work() { MAX_LAGS * lag } else { behind };
            let lack = member.balance.lack + signed(gain) - loss;
            let lack = lack - lack.clamp(-forgiven, forgiven);
            member.balance.lack = lack.min(most).clamp(-MAX_LEADS * lag, MAX_LAGS * lag);
            member.balance.allowance = member.balance.allowance.saturating_sub(loss);
        }
    }

    /// Returns the share of the card's time, in ppm, that a group gets while it competes with all parties that have
    /// work.
    fn part_of_card(&self, id: GroupId) -> u64 {
        let own = self.members.iter().filter(|(_, member)| member.joined.is_none()).map(|(&tenant, _)| tenant);
        let others = self.groups.keys().copied().filter(|other| *other != id).map(party);
        let busy = own.chain(others).filter(|of| self.turns.is_busy(*of));
        let all: Vec<VgpuParams> =
            std::iter::once(party(id)).chain(busy).filter_map(|of| self.turns.params(of).copied()).collect();
        crate::shares(&all).first().copied().unwrap_or(WHOLE_SHARE_PPM)
    }

    /// Returns the largest lag, in ns, among the members of a group that have work and are not paused, quarantined, or
    /// capped. If `now` is given, excludes members that stall at this time.
    pub(super) fn most_behind(&self, id: GroupId, now: Option<Nanos>) -> Option<i64> {
        let holds =
            |(tenant, member): &(TenantId, &Member)| self.contends(*tenant, member) && !self.stalls(member, now);
        self.members_of(id).filter(holds).map(|(_, member)| member.balance.lack).max()
    }

    fn contends(&self, tenant: TenantId, member: &Member) -> bool {
        member.has_work() && self.is_free(tenant, member)
    }

    /// Returns true if a member's gate is not closed, but the member has completed no work for
    /// [`GroupConfig::stall_ns`]. Other members do not wait for it.
    fn stalls(&self, member: &Member, now: Option<Nanos>) -> bool {
        let lasted = now.map_or(0, |now| now.since(member.progressed));
        member.gate != Gate::Closed && lasted >= self.config.stall_ns
    }

    /// Limits the lag of an idle member that has work again.
    pub(super) fn returns(&mut self, tenant: TenantId, now: Nanos) {
        let Some(id) = self.members.get(&tenant).and_then(|member| member.joined) else { return };
        let most = self.most_behind(id, Some(now)).unwrap_or(0) + signed(self.config.lag_ns) / 2;
        if let Some(member) = self.members.get_mut(&tenant) {
            member.balance.lack = member.balance.lack.min(most);
        }
    }

    /// Returns the members that must wait. A member waits if it is ahead of another member, or if a member of a better
    /// latency class has at least the same lag.
    pub(super) fn waiting(&self, id: GroupId, now: Nanos) -> Vec<TenantId> {
        let Some(behind) = self.most_behind(id, Some(now)) else { return Vec::new() };
        let contenders: Vec<(TenantId, &Member)> =
            self.members_of(id).filter(|(tenant, member)| self.contends(*tenant, member)).collect();
        let is_ahead = |member: &Member| behind - member.balance.lack >= signed(self.config.lag_ns);
        let defers = |member: &Member, other: &Member| {
            let is_better = other.settings().class < member.settings().class;
            is_better && other.balance.lack >= member.balance.lack && !self.stalls(other, Some(now))
        };
        let waits = |member: &Member| is_ahead(member) || contenders.iter().any(|(_, other)| defers(member, other));
        contenders.iter().filter(|(_, member)| waits(member)).map(|(tenant, _)| *tenant).collect()
    }

    /// Selects the member of a group that gets the card to itself for a measurement.
    pub(super) fn choose_sample(&mut self, id: GroupId, runs: bool, now: Nanos) {
        let Some(group) = self.groups.get(&id) else { return };
        let before = group.sample;
        let contenders: Vec<(TenantId, &Member)> =
            self.members_of(id).filter(|(tenant, member)| self.contends(*tenant, member)).collect();
        // Allow the other members some time to notice that their work has ended, and to close their gates.
        let continues = |sample: &Sample| {
            let lasted = now.since(sample.since);
            let member = self.members_of(id).find(|(tenant, _)| *tenant == sample.tenant).map(|(_, member)| member);
            let is_disturbed = lasted >= self.config.stall_ns && !self.is_only_open(id, sample.tenant);
            let is_measured = |member: &Member| member.balance.sampled.is_some_and(|at| at > sample.since);
            let goes_on = member.is_some_and(|one| self.contends(sample.tenant, one) && !is_measured(one));
            goes_on && !is_disturbed && lasted < self.config.sample_ns
        };
        let sample = before.filter(|sample| runs && continues(sample));
        // A closing gate may belong to a suspended program.
        let is_closing = self.members_of(id).any(|(_, member)| matches!(member.gate, Gate::Closing { .. }));
        let may_choose = runs && contenders.len() > 1 && !is_closing;
        let sample = sample.or_else(|| if may_choose { self.next_sample(&contenders, before, now) } else { None });
        let ended = before.filter(|before| sample.is_none_or(|sample| sample.tenant != before.tenant));
        if let Some(ended) = ended
            && let Some(member) = self.members.get_mut(&ended.tenant)
        {
            member.balance.sample_ended(ended.since, now);
        }
        if let Some(Sample { tenant, .. }) = sample
            && let Some(member) = self.members.get_mut(&tenant)
        {
            member.balance.in_sample = true;
        }
        if let Some(group) = self.groups.get_mut(&id) {
            group.sample = sample;
        }
    }

    /// Returns true if the gates of all other members are closed.
    pub(super) fn is_only_open(&self, id: GroupId, tenant: TenantId) -> bool {
        self.members_of(id).all(|(of, member)| of == tenant || member.gate == Gate::Closed)
    }

    /// Returns a sample of the member that must be measured first, or `None` if no measurement is due.
    fn next_sample(&self, contenders: &[(TenantId, &Member)], before: Option<Sample>, now: Nanos) -> Option<Sample> {
        let due = contenders.iter().filter(|(_, member)| member.balance.is_sample_due(&self.config, now));
        let new = due.filter(|(tenant, _)| before.is_none_or(|sample| sample.tenant != *tenant));
        let (tenant, _) = new.min_by_key(|(_, member)| member.balance.sampled)?;
        Some(Sample { tenant: *tenant, since: now })
    }

    /// Returns the times at which a group's members must be compared again if there is no earlier event.
    pub(super) fn group_wakeups(&self, id: GroupId, group: &Group) -> impl Iterator<Item = Nanos> + use<> {
        let GroupConfig { stall_ns, sample_ns, sample_interval_ns, .. } = self.config;
        let has_turn = self.turns.has_turn(party(id));
        let working: Vec<&Member> =
            self.members_of(id).map(|(_, member)| member).filter(|member| member.has_work()).collect();
        let sample = group.sample.map(|Sample { since, .. }| [since.after(sample_ns), since.after(stall_ns)]);
        let next = |member: &&Member| {
            let Balance { sampled, interval, .. } = member.balance;
            sampled.unwrap_or_default().after(interval * sample_interval_ns)
        };
        let is_comparing = has_turn && group.sample.is_none() && working.len() > 1;
        let next = if is_comparing { working.iter().map(next).min() } else { None };
        // A waiting member waits for others only until they stall.
        let waits = has_turn && working.iter().any(|member| member.gate == Gate::Closed);
        let stalls = working.iter().filter(|member| waits && member.gate != Gate::Closed);
        let stalls = stalls.map(|member| member.progressed.after(stall_ns));
        let trial = group.trial.wakeup(&self.config, group.sharing);
        let updated = group.updated;
        let times = sample.into_iter().flatten().chain(next).chain(stalls).filter(move |at| *at > updated);
        times.collect::<Vec<_>>().into_iter().chain(trial)
    }

    /// Returns a member's account within its group, combined with the account of its separate turns.
    pub(super) fn merged_account(&self, tenant: TenantId) -> Option<crate::Account> {
        let mut account = self.turns.scheduler().account(tenant, ENGINE)?.clone();
        if let Some(member) = self.members.get(&tenant) {
            account.add(&member.account);
        }
        Some(account)
    }
}
