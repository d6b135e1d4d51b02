//! A lane consists of one policy and the queues of all vGPUs, for one engine or for all engines.

use crate::config::{Config, PERMILLE};
use crate::flight::Flight;
use crate::member::{Bucket, Member, Queued};
use crate::params::VgpuParams;
use crate::policy::{self, AnyPolicy, Room, View};
use crate::types::{Engine, Nanos, TenantId, Ticket};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Maximum absolute level of a bucket, in thousandths of a nanosecond. It ensures that sums with any time fit in 128
/// bits.
const LEVEL_MAX: u128 = 1 << 100;

/// Queues of one engine or of all engines.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Lane {
    members: BTreeMap<TenantId, Member>,
    policy: AnyPolicy,
    /// Number of submissions in all queues.
    queued: usize,
    /// Number of submissions in flight on the card.
    in_flight: u32,
    /// True if an event has occurred since the last attempt to start work.
    changed: bool,
    /// The vGPU whose submission was started last.
    last: Option<TenantId>,
    /// Time since which the lane has been idle although it could start work.
    waiting: Option<Nanos>,
    /// Time at which a cap next permits work to start.
    opens: Option<Nanos>,
}

impl Lane {
    pub(crate) fn new(config: &Config, now: Nanos) -> Self {
        let policy = AnyPolicy::new(config, now);
        Self {
            members: BTreeMap::new(),
            policy,
            queued: 0,
            in_flight: 0,
            changed: false,
            last: None,
            waiting: None,
            opens: None,
        }
    }

    pub(crate) fn join(&mut self, vgpu: TenantId, params: VgpuParams, held: bool, now: Nanos) {
        self.members.insert(vgpu, Member::new(params, held, now));
        self.policy.joined(vgpu);
    }

    /// Removes a vGPU and returns its queued submissions. Its work in flight is still counted until it ends.
    pub(crate) fn leave(&mut self, vgpu: TenantId) -> Vec<Queued> {
        self.policy.left(vgpu);
        self.changed = true;
        let queued: Vec<_> = self.members.remove(&vgpu).map(|member| member.queue.into()).unwrap_or_default();
        self.queued -= queued.len();
        queued
    }

    pub(crate) fn change(&mut self, vgpu: TenantId, params: VgpuParams, now: Nanos) {
        self.changed = true;
        if let Some(member) = self.members.get_mut(&vgpu) {
            if member.params.cap_permille != params.cap_permille {
                // Do not charge earlier use against the new cap.
                member.bucket = Bucket { level: 0, at: now };
            }
            member.params = params;
        }
    }

    pub(crate) fn hold(&mut self, vgpu: TenantId, held: bool) {
        self.changed = true;
        if let Some(member) = self.members.get_mut(&vgpu) {
            member.held = held;
        }
    }

    pub(crate) fn enqueue(&mut self, config: &Config, vgpu: TenantId, queued: Queued, now: Nanos) {
        let Some(member) = self.members.get_mut(&vgpu) else { return };
        member.queue.push_back(queued);
        (self.queued, self.changed) = (self.queued + 1, true);
        let view = View { now, config, members: &self.members, room: self.room(config, now) };
        self.policy.arrived(vgpu, &view);
    }

    /// Requeues a deferred submission ahead of the vGPU's other submissions, because they may depend on it.
    pub(crate) fn requeue(&mut self, config: &Config, vgpu: TenantId, queued: Queued, now: Nanos) {
        let Some(member) = self.members.get_mut(&vgpu) else { return };
        member.queue.push_front(queued);
        (self.queued, self.changed) = (self.queued + 1, true);
        let view = View { now, config, members: &self.members, room: self.room(config, now) };
        self.policy.arrived(vgpu, &view);
    }

    /// Charges a vGPU `used` ns in addition to the use reported to [`Self::ended`].
    pub(crate) fn charged(&mut self, config: &Config, vgpu: TenantId, used: u64, now: Nanos) {
        self.changed = true;
        let Some(member) = self.members.get_mut(&vgpu) else { return };
        member.bucket.fill(member.params.cap_permille, now);
        member.bucket.take(used);
        let view = View { now, config, members: &self.members, room: self.room(config, now) };
        self.policy.charged(vgpu, used, &view);
    }

    /// Adopts a submission from another lane's queue.
    pub(crate) fn adopt(&mut self, vgpu: TenantId, queued: Queued) {
        if let Some(member) = self.members.get_mut(&vgpu) {
            member.queue.push_back(queued);
            (self.queued, self.changed) = (self.queued + 1, true);
        }
    }

    /// Counts a submission as in flight without starting it, for example when the lanes are recreated.
    pub(crate) fn adopt_flight(&mut self, vgpu: TenantId) {
        self.in_flight += 1;
        if let Some(member) = self.members.get_mut(&vgpu) {
            member.in_flight += 1;
            self.last = Some(vgpu);
        }
    }

    /// Removes the queued submissions that satisfy `gone`, and returns them.
    pub(crate) fn drop_queued(&mut self, vgpu: TenantId, gone: impl Fn(&Queued) -> bool) -> Vec<Queued> {
        let Some(member) = self.members.get_mut(&vgpu) else { return Vec::new() };
        let (dropped, kept): (Vec<_>, Vec<_>) = member.queue.drain(..).partition(&gone);
        member.queue = kept.into();
        (self.queued, self.changed) = (self.queued - dropped.len(), true);
        dropped
    }

    /// Checks a deserialized lane. Its vGPUs, their settings, and their quarantines must match `known`. Its queued
    /// submissions must be for `engines`. Its counters must match the queued submissions and `flights`.
    pub(crate) fn check(
        &self,
        config: &Config,
        known: impl Iterator<Item = (TenantId, VgpuParams, bool)>,
        engines: &[Engine],
        flights: &[&Flight],
        order: u64,
    ) -> Result<(), Invalid> {
        let Self { members, policy, queued, in_flight, changed: _, last: _, waiting: _, opens: _ } = self;
        Invalid::unless(self.is_of(config), || "the policy of a lane differs from the settings".into())?;
        let own = members.iter().map(|(vgpu, member)| (*vgpu, member.params, member.held));
        Invalid::unless(own.eq(known), || "a vGPU of a lane differs from that of the scheduler".into())?;
        Invalid::unless(*queued == self.queued(), || format!("a lane counts {queued} queued submissions"))?;
        Invalid::unless(*in_flight as usize == flights.len(), || {
            format!("a lane counts {in_flight} submissions in flight")
        })?;
        for (vgpu, member) in members {
            let count = flights.iter().filter(|flight| flight.vgpu == *vgpu).count();
            Invalid::unless(member.in_flight as usize == count, || {
                format!("vGPU {vgpu} counts {} submissions in flight, but has {count}", member.in_flight)
            })?;
            let mut waiting = member.queue.iter();
            Invalid::unless(waiting.all(|queued| queued.order < order && engines.contains(&queued.engine)), || {
                format!("a submission of vGPU {vgpu} is not in order, or is for another engine")
            })?;
            Invalid::unless(member.bucket.level.unsigned_abs() <= LEVEL_MAX, || {
                format!("the allowance of the cap of vGPU {vgpu} is too large")
            })?;
        }
        policy.check(members.keys())
    }

    /// Returns true if the lane's policy is the configured policy.
    pub(crate) fn is_of(&self, config: &Config) -> bool {
        self.policy.kind() == config.policy
    }

    /// Returns the queued submissions by vGPU.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = (TenantId, &Queued)> {
        self.members.iter().flat_map(|(vgpu, member)| member.queue.iter().map(|queued| (*vgpu, queued)))
    }

    /// Returns the number of queued submissions.
    pub(crate) fn queued(&self) -> usize {
        self.members.values().map(|member| member.queue.len()).sum()
    }

    /// Returns the vGPU whose queue contains the ticket.
    pub(crate) fn holder(&self, ticket: Ticket) -> Option<TenantId> {
        let holds = |member: &Member| member.queue.iter().any(|queued| queued.ticket == ticket);
        self.members.iter().find(|(_, member)| holds(member)).map(|(vgpu, _)| *vgpu)
    }

    /// Records the end of a submission in flight that used the engine for `used` ns. The engine has been idle for
    /// `late` ns since then.
    pub(crate) fn ended(&mut self, config: &Config, vgpu: TenantId, used: u64, late: u64, now: Nanos) {
        (self.in_flight, self.changed) = (self.in_flight.saturating_sub(1), true);
        let Some(member) = self.members.get_mut(&vgpu) else { return };
        member.in_flight = member.in_flight.saturating_sub(1);
        member.last_seen = Some(now);
        // Use the recent maximum, because after a long submission among many short ones, another long one is likely.
        member.expected = used.max(member.expected - member.expected / 8);
        member.bucket.fill(member.params.cap_permille, now);
        member.bucket.take(used);
        let view = View { now, config, members: &self.members, room: self.room(config, now) };
        self.policy.ended(vgpu, used, late, &view);
    }

    /// Records that the engine was idle for `ns` ns because a vGPU's work had not reached the card yet.
    pub(crate) fn idled(&mut self, config: &Config, vgpu: TenantId, ns: u64, now: Nanos) {
        let view = View { now, config, members: &self.members, room: self.room(config, now) };
        self.policy.idled(vgpu, ns, &view);
    }

    /// Returns true if a vGPU has been the lane's only user for `ns` ns, has no queued submissions, and is expected to
    /// send submissions of at most `most` ns.
    pub(crate) fn is_brief_and_alone(&self, vgpu: TenantId, now: Nanos, ns: u64, most: u64) -> bool {
        let own = |member: &Member| member.queue.is_empty() && member.expected <= most;
        self.members.iter().all(|(id, member)| if *id == vgpu { own(member) } else { !member.active(now, ns) })
    }

    /// Marks the lane as changed because time has passed or settings have changed.
    pub(crate) fn touch(&mut self) {
        self.changed = true;
    }

    /// Removes and returns the next submission that may start now, and counts it as in flight.
    pub(crate) fn next(&mut self, config: &Config, now: Nanos) -> Option<(TenantId, Queued)> {
        if !self.changed {
            return None;
        }
        for member in self.members.values_mut().filter(|member| member.params.cap_permille < PERMILLE) {
            member.bucket.fill(member.params.cap_permille, now);
        }
        let idle = self.in_flight == 0;
        if !idle || !self.members.values().any(Member::ready) {
            self.waiting = None;
        } else if self.waiting.is_none() {
            self.waiting = Some(now);
        }
        let view = View { now, config, members: &self.members, room: self.room(config, now) };
        let Some(vgpu) = self.policy.pick(&view) else {
            (self.opens, self.changed) = (self.next_open(), false);
            return None;
        };
        let gap = self.waiting.take().map_or(0, |since| now.since(since));
        let view = View { now, config, members: &self.members, room: view.room };
        self.policy.started(vgpu, gap, &view);
        let member = self.members.get_mut(&vgpu)?;
        let queued = member.queue.pop_front()?;
        self.queued -= 1;
        member.in_flight += 1;
        self.in_flight += 1;
        self.last = Some(vgpu);
        Some((vgpu, queued))
    }

    fn next_open(&self) -> Option<Nanos> {
        // A vGPU with work in flight needs no wakeup, because it is woken by the end of that work.
        let capped = self.members.values().filter(|m| !m.queue.is_empty() && !m.held && m.in_flight == 0 && !m.ready());
        capped.map(|member| member.bucket.opens(member.params.cap_permille)).min()
    }

    pub(crate) fn wakeup(&self) -> Option<Nanos> {
        if self.in_flight == 0 && self.queued == 0 {
            return None;
        }
        [self.policy.wakeup(), self.opens].into_iter().flatten().min()
    }

    /// Returns a vGPU's account in the policy.
    pub(crate) fn standing(&self, vgpu: TenantId) -> policy::Standing {
        self.policy.standing(vgpu)
    }

    fn room(&self, config: &Config, now: Nanos) -> Room {
        let Some(last) = self.last.filter(|_| self.in_flight > 0) else { return Room::Free };
        let Some(member) = self.members.get(&last).filter(|member| member.in_flight == self.in_flight) else {
            return Room::Full;
        };
        let pipeline = &config.pipeline;
        let idle = config.band.period_ns;
        let contended = self.members.iter().any(|(vgpu, other)| *vgpu != last && other.active(now, idle));
        let ahead = member.expected.saturating_mul(self.in_flight.into());
        let full = if contended {
            // Another vGPU may start only after all work in flight has ended.
            self.in_flight >= pipeline.contended || ahead > pipeline.ahead_ns
        } else {
            let much = ahead.saturating_add(member.expected) > pipeline.ahead_ns;
            self.in_flight >= pipeline.alone || self.in_flight >= 2 && much
        };
        if full {
            return Room::Full;
        }
        Room::Behind { vgpu: last, ahead }
    }
}
