//! GPUvm's CREDIT policy. Each vGPU has a budget that is filled in each period and debited for use. The first vGPU with
//! work runs, and overdrawn vGPUs come after all others. This is the behaviour of GPUvm's code. However, the paper
//! (section 5.3) says that the vGPU with the most credit runs.
//!
//! In GPUvm, all virtual machines compete, including idle ones. Here, only vGPUs that have or recently had work get
//! budgets. Otherwise, the budgets of idle vGPUs would be unused, and the other vGPUs would always be overdrawn.
//! Overdrawn vGPUs would then run in rotation, regardless of their use.

use super::{Policy, Room, Standing, View};
use crate::checks::{is_order_of, of_members};
use crate::member::Member;
use crate::params::VgpuParams;
use crate::shares::{Claim, divide, scale};
use crate::types::{Nanos, TenantId};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// Remaining time of a vGPU, in ns.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Budget {
    /// Remaining time. Negative if the budget is overdrawn.
    left: i64,
    /// Total time debited since the budgets were last filled.
    used: u64,
    /// True if the vGPU runs on an overdrawn budget because no vGPU with a remaining budget has work.
    spare: bool,
}

impl Budget {
    /// Updates the budget of a vGPU that does not compete. Its unused budget goes to the other vGPUs, and its debt
    /// decreases by `melts`, which is its share of the time that has passed.
    fn rest(&mut self, melts: u64) {
        self.left = self.left.saturating_add_unsigned(melts).min(0);
    }
}

/// State of a competing vGPU when budgets are filled. Times are in ns.
#[derive(Clone, Copy, Debug)]
struct Competitor {
    vgpu: TenantId,
    params: VgpuParams,
    /// Remaining budget.
    left: i64,
    /// Upper bound of the budget.
    most: i64,
    /// Time debited since the budgets were last filled.
    used: i64,
}

/// Budgets and order of the vGPUs. Also used by BAND.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Budgets {
    budgets: BTreeMap<TenantId, Budget>,
    order: VecDeque<TenantId>,
    filled: Nanos,
    /// Time used by overdrawn vGPUs without competition since the budgets were last filled, in ns.
    spare: u64,
}

impl Budgets {
    pub(super) fn new(now: Nanos) -> Self {
        Self { budgets: BTreeMap::new(), order: VecDeque::new(), filled: now, spare: 0 }
    }

    pub(super) fn join(&mut self, vgpu: TenantId) {
        if self.budgets.insert(vgpu, Budget::default()).is_none() {
            self.order.push_back(vgpu);
        }
    }

    /// Checks that deserialized budgets match `members` and that the order contains all members.
    pub(super) fn check(&self, members: &[&TenantId]) -> Result<(), Invalid> {
        of_members(self.budgets.keys(), members.iter().copied())?;
        Invalid::unless(is_order_of(&self.order, members.iter().copied()), || {
            "the order of vGPUs differs from the existing vGPUs".into()
        })
    }

    pub(super) fn leave(&mut self, vgpu: TenantId) {
        self.budgets.remove(&vgpu);
        self.order.retain(|known| *known != vgpu);
    }

    /// Fills the budgets if a period has passed. Returns the vGPUs that compete from now on, or `None` if no period has
    /// passed.
    ///
    /// Adds time to the competitors' budgets in proportion to their shares, up to a total of one period. One vGPU's
    /// overdraft is therefore credit for the others.
    pub(super) fn fill(&mut self, view: &View<'_>) -> Option<Vec<TenantId>> {
        let period = view.config.band.period_ns;
        let passed = view.now.since(self.filled) / period * period;
        if passed == 0 {
            return None;
        }
        self.filled = self.filled.after(passed);
        let competing = self.competitors(view, passed);
        let vgpus = competing.iter().map(|of| of.vgpu).collect();
        for (vgpu, left) in filled(signed(period), passed, competing) {
            if let Some(budget) = self.budgets.get_mut(&vgpu) {
                budget.left = left;
            }
        }
        Some(vgpus)
    }

    /// Returns the vGPUs that have work, had work within BAND's wait, or were debited since the budgets were last
    /// filled. Other vGPUs do not compete.
    ///
    /// The budgets of two kinds of competitors are bounded. A vGPU without work keeps at most its share or its recent
    /// use. A vGPU that has more than its share left gets no new budget if overdrawn vGPUs ran without competition, and
    /// loses as much of its surplus as they used. A lone competitor loses its whole surplus. Budgets and debts are also
    /// limited to one period per competitor: a greater debt could only accumulate if other vGPUs saved the same amount.
    fn competitors(&mut self, view: &View<'_>, passed: u64) -> Vec<Competitor> {
        let period = view.config.band.period_ns;
        let weights = view.members.values().map(|member| u64::from(member.params.weight)).sum();
        let wants = |vgpu, member: &Member| {
            let used = self.budgets.get(vgpu).is_some_and(|budget| budget.used > 0);
            used || member.active(view.now, view.config.band.wait_ns)
        };
        // A lone competitor loses its whole surplus, because no other vGPU needed the engine.
        let alone = view.members.iter().filter(|(vgpu, member)| wants(vgpu, member)).count() == 1;
        let spare = if alone { i64::MAX } else { signed(self.spare) };
        self.spare = 0;
        let mut competing = Vec::new();
        for (vgpu, member) in view.members {
            let Some(budget) = self.budgets.get_mut(vgpu) else { continue };
            let Budget { left, used, .. } = std::mem::take(budget);
            budget.left = left;
            let used = signed(used.min(period));
            let wants = member.active(view.now, view.config.band.wait_ns);
            if !wants && used == 0 {
                budget.rest(scale(passed, member.params.weight.into(), weights));
                continue;
            }
            // The bound is raised to the vGPU's share below.
            let most = if wants { i64::MAX } else { used };
            competing.push(Competitor { vgpu: *vgpu, params: member.params, left, most, used });
        }
        let claims: Vec<_> = competing.iter().map(|of| Claim::from_params(&of.params, period)).collect();
        let deepest = signed(period.saturating_mul(competing.len() as u64));
        for (of, share) in competing.iter_mut().zip(divide(period, &claims)) {
            let share = signed(share);
            of.most = of.most.max(share);
            if spare > 0 && of.left > share {
                of.most = of.most.min(share.max(of.left.saturating_sub(spare)));
            }
            of.left = of.left.min(deepest).min(of.most).max(-deepest);
        }
        competing
    }

    pub(super) fn debit(&mut self, vgpu: TenantId, ns: u64) {
        if let Some(budget) = self.budgets.get_mut(&vgpu) {
            budget.left = budget.left.saturating_sub_unsigned(ns);
            budget.used = budget.used.saturating_add(ns);
        }
    }

    /// Records that a vGPU's submission starts now.
    pub(super) fn start(&mut self, vgpu: TenantId, view: &View<'_>) {
        let spare = self.left_ns(vgpu) < 0 && !self.ready(view).any(|other| self.left_ns(other) > 0);
        if let Some(budget) = self.budgets.get_mut(&vgpu) {
            budget.spare = spare;
        }
    }

    /// Debits a vGPU for using the engine.
    pub(super) fn use_up(&mut self, vgpu: TenantId, ns: u64) {
        self.debit(vgpu, ns);
        if self.budgets.get(&vgpu).is_some_and(|budget| budget.spare) {
            self.spare = self.spare.saturating_add(ns);
        }
    }

    pub(super) fn left_ns(&self, vgpu: TenantId) -> i64 {
        self.budgets.get(&vgpu).map_or(0, |budget| budget.left)
    }

    pub(super) fn demote(&mut self, vgpu: TenantId) {
        if let Some(at) = self.order.iter().position(|known| *known == vgpu) {
            self.order.remove(at);
            self.order.push_back(vgpu);
        }
    }

    /// Returns the vGPUs that have a submission ready to start, in order.
    pub(super) fn ready<'a>(&'a self, view: &'a View<'_>) -> impl Iterator<Item = TenantId> + 'a {
        self.order.iter().copied().filter(|vgpu| view.is_ready(*vgpu))
    }
}

fn signed(ns: u64) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX)
}

/// Returns the competitors' budgets after a refill, `passed` ns after the previous one. A vGPU that would exceed its
/// bound gets a budget equal to the bound, and the other vGPUs share the rest of the period.
fn filled(period: i64, passed: u64, mut loose: Vec<Competitor>) -> Vec<(TenantId, i64)> {
    let mut filled = Vec::with_capacity(loose.len());
    let mut rest = period;
    // Each round removes at least one vGPU, which bounds the number of rounds.
    loop {
        let pot = loose.iter().fold(rest, |pot, of| pot.saturating_sub(of.left));
        let pot = u64::try_from(pot).unwrap_or(0);
        let claims: Vec<_> = loose.iter().map(|of| Claim::from_params(&of.params, pot.max(passed))).collect();
        let parts = divide(pot, &claims);
        let fits = |(of, part): (&Competitor, &u64)| *part <= of.most.abs_diff(of.left);
        if loose.iter().zip(&parts).all(fits) {
            filled.extend(loose.iter().zip(parts).map(|(of, part)| (of.vgpu, of.left.saturating_add_unsigned(part))));
            return filled;
        }
        let mut parts = parts.iter();
        loose.retain(|of| {
            let stays = parts.next().is_some_and(|part| fits((of, part)));
            if !stays {
                filled.push((of.vgpu, of.most));
                rest = rest.saturating_sub(of.used);
            }
            stays
        });
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Credit {
    budgets: Budgets,
}

impl Credit {
    pub(crate) fn new(now: Nanos) -> Self {
        Self { budgets: Budgets::new(now) }
    }
}

impl Policy for Credit {
    fn joined(&mut self, vgpu: TenantId) {
        self.budgets.join(vgpu);
    }

    fn left(&mut self, vgpu: TenantId) {
        self.budgets.leave(vgpu);
    }

    fn started(&mut self, vgpu: TenantId, gap: u64, view: &View<'_>) {
        self.budgets.start(vgpu, view);
        if view.config.band.own_time {
            self.budgets.debit(vgpu, gap);
        }
    }

    fn idled(&mut self, vgpu: TenantId, ns: u64, view: &View<'_>) {
        if view.config.band.own_time {
            self.budgets.debit(vgpu, ns);
        }
    }

    fn ended(&mut self, vgpu: TenantId, used: u64, late: u64, view: &View<'_>) {
        self.charged(vgpu, if view.config.band.own_time { used.saturating_add(late) } else { used }, view);
    }

    fn charged(&mut self, vgpu: TenantId, used: u64, view: &View<'_>) {
        self.budgets.fill(view);
        self.budgets.use_up(vgpu, used);
        if self.budgets.left_ns(vgpu) < 0 {
            self.budgets.demote(vgpu);
        }
    }

    fn pick(&mut self, view: &View<'_>) -> Option<TenantId> {
        self.budgets.fill(view);
        let first = self.budgets.ready(view).next()?;
        match view.room {
            Room::Free => Some(first),
            Room::Behind { vgpu, ahead } => {
                let left = self.budgets.left_ns(vgpu).saturating_sub_unsigned(ahead);
                (vgpu == first && (left >= 0 || !view.others_ready(vgpu))).then_some(first)
            }
            Room::Full => None,
        }
    }

    fn standing(&self, vgpu: TenantId) -> Standing {
        Standing { credit: self.budgets.left_ns(vgpu), beyond: 0 }
    }

    fn check(&self, members: &[&TenantId]) -> Result<(), Invalid> {
        self.budgets.check(members)
    }
}
