//! BAND: Gdev's bandwidth-aware non-preemptive device scheduler (Gdev, figure 2), with GPUvm's accounting (GPUvm,
//! section 3.5).
//!
//! When a submission ends, its vGPU is moved to the end of the order if its budget is overdrawn *and* it has used more
//! than its bandwidth. The first vGPU with work runs next. However, if this vGPU is above its bandwidth and is not the
//! one that ran last, the policy first waits briefly for work of vGPUs below their bandwidth, and runs the first one
//! that submits.
//!
//! The published policy measures bandwidth only within a period. With `correct`, the bandwidth is measured by [`Lags`]
//! instead. Overuse caused by non-preemptible work is then repaid later, and an idle vGPU's share is assigned to vGPUs
//! with work. The engine idles only to wait for a vGPU that is due, and this vGPU is charged for long waits. A vGPU
//! keeps the engine for a short slice.

use super::credit::Budgets;
use super::lag::Lags;
use super::{Policy, Room, Standing, View};
use crate::config::PERMILLE;
use crate::shares::{WHOLE_SHARE_PPM, scale, shares};
use crate::types::{Nanos, TenantId};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Number of slices in a period with `correct`. A vGPU keeps the engine until it is one slice ahead of the next vGPU.
/// Without slices, the engine would switch after each short submission. Each switch is costly, because the engine idles
/// until the end of the submission is observed, and a VM's residue is cleared. With the default slice of 1.5 ms, the
/// error of shares over 100 ms does not exceed 1 %.
const SLICES_PER_PERIOD: u64 = 20;

/// A wait, with the engine idle, for work of a vGPU other than the next one.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Wait {
    until: Nanos,
    next: TenantId,
    /// First vGPU that submitted during the wait. With `correct`, excludes vGPUs above their bandwidth.
    came: Option<TenantId>,
}

/// The vGPU whose submission ended last. Cleared when another vGPU's work starts.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Last {
    vgpu: TenantId,
    /// Remaining time for which the engine may idle free of charge, in ns.
    free: u64,
    /// True until the next vGPU is selected.
    undecided: bool,
}

/// A period with its competing vGPUs and their use of the engine.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Period {
    /// Shares of the competing vGPUs, in parts of [`WHOLE_SHARE_PPM`].
    shares: BTreeMap<TenantId, u64>,
    used: BTreeMap<TenantId, u64>,
    total: u64,
}

impl Period {
    fn new(competing: impl IntoIterator<Item = TenantId>, view: &View<'_>) -> Self {
        let mut period = Self::default();
        period.divide(competing, view);
        period
    }

    /// Makes the given vGPUs the competitors, and computes their shares.
    fn divide(&mut self, competing: impl IntoIterator<Item = TenantId>, view: &View<'_>) {
        let params = |vgpu: TenantId| Some((vgpu, view.members.get(&vgpu)?.params));
        let (competing, params): (Vec<_>, Vec<_>) = competing.into_iter().filter_map(params).unzip();
        self.shares = competing.into_iter().zip(shares(&params)).collect();
    }

    /// Adds a vGPU to the competitors unless it already competes.
    fn enter(&mut self, vgpu: TenantId, view: &View<'_>) {
        if !self.shares.contains_key(&vgpu) {
            let competing: Vec<_> = self.shares.keys().copied().chain([vgpu]).collect();
            self.divide(competing, view);
        }
    }

    fn leave(&mut self, vgpu: TenantId) {
        self.shares.remove(&vgpu);
        self.used.remove(&vgpu);
    }

    /// Returns a vGPU's use in excess of its bandwidth, in ns.
    fn beyond(&self, vgpu: TenantId) -> i64 {
        let of = |map: &BTreeMap<TenantId, u64>| map.get(&vgpu).copied().unwrap_or(0);
        let entitled = scale(self.total, of(&self.shares), WHOLE_SHARE_PPM);
        i64::try_from(i128::from(of(&self.used)) - i128::from(entitled)).unwrap_or(i64::MAX)
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Band {
    budgets: Budgets,
    period: Period,
    lags: Lags,
    last: Option<Last>,
    wait: Option<Wait>,
}

impl Band {
    pub(crate) fn new(now: Nanos) -> Self {
        let (period, lags) = (Period::default(), Lags::default());
        Self { budgets: Budgets::new(now), period, lags, last: None, wait: None }
    }

    fn fill(&mut self, view: &View<'_>) {
        if let Some(competing) = self.budgets.fill(view) {
            self.period = Period::new(competing, view);
        }
    }

    /// Returns a vGPU's use in excess of its bandwidth or, with `correct`, of its share, in ns.
    fn beyond(&self, vgpu: TenantId, view: &View<'_>) -> i64 {
        if view.config.band.correct { self.lags.beyond(vgpu) } else { self.period.beyond(vgpu) }
    }

    fn over(&self, vgpu: TenantId, view: &View<'_>) -> bool {
        self.beyond(vgpu, view) > 0
    }

    /// Charges a vGPU for using the engine.
    fn use_up(&mut self, vgpu: TenantId, used: u64, view: &View<'_>) {
        self.fill(view);
        self.budgets.use_up(vgpu, used);
        self.period.total = self.period.total.saturating_add(used);
        let of = self.period.used.entry(vgpu).or_default();
        *of = of.saturating_add(used);
        let band = &view.config.band;
        if band.correct {
            self.lags.charge(vgpu, used, band.wait_ns, band.period_ns, view);
        }
    }

    fn demote_if_over(&mut self, vgpu: TenantId, view: &View<'_>) {
        if self.budgets.left_ns(vgpu) < 0 && self.over(vgpu, view) {
            self.budgets.demote(vgpu);
        }
    }

    /// Charges a vGPU for time during which other work could have run.
    fn pay(&mut self, vgpu: TenantId, ns: u64, view: &View<'_>) {
        let band = &view.config.band;
        if !band.own_time || ns == 0 {
            return;
        }
        self.budgets.debit(vgpu, ns);
        if band.correct {
            self.lags.charge(vgpu, ns, band.wait_ns, band.period_ns, view);
        }
    }

    /// Returns the vGPU that would run next if the engine did not wait. `ahead` is a vGPU, and the additional time in
    /// ns that it is assumed to have used.
    fn first(&self, view: &View<'_>, ahead: Option<(TenantId, u64)>) -> Option<TenantId> {
        if !view.config.band.correct {
            let first = self.budgets.ready(view).next()?;
            let spent =
                ahead.is_some_and(|(_, ns)| self.budgets.left_ns(first) < i64::try_from(ns).unwrap_or(i64::MAX));
            return (!spent || !view.others_ready(first)).then_some(first);
        }
        // A vGPU that is due runs first, regardless of its position in the order. Due vGPUs are ordered by class. The
        // vGPU that has the engine is credited one slice minus one submission, so that vGPUs with long submissions
        // alternate after each one.
        let has_it = ahead.map(|(vgpu, _)| vgpu).or(self.last.map(|last| last.vgpu));
        let turn = view.config.band.period_ns / SLICES_PER_PERIOD;
        let rank = |vgpu: &TenantId| {
            let member = view.members.get(vgpu);
            let class = member.map(|member| member.params.class);
            let ahead = ahead.filter(|(ahead, _)| ahead == vgpu).map_or(0, |(_, ns)| ns);
            let turn =
                member.filter(|_| has_it == Some(*vgpu)).map_or(0, |member| turn.saturating_sub(member.expected));
            let beyond = self.beyond(*vgpu, view).saturating_add_unsigned(ahead).saturating_sub_unsigned(turn);
            (beyond > 0, class, beyond)
        };
        self.budgets.ready(view).min_by_key(rank)
    }

    /// Returns true if the engine must wait before it runs `next`.
    fn waits(&self, last: TenantId, next: TenantId, view: &View<'_>) -> bool {
        let band = &view.config.band;
        let due = || !band.correct || !self.over(last, view);
        band.wait_ns > 0 && next != last && self.over(next, view) && due()
    }
}

impl Policy for Band {
    fn joined(&mut self, vgpu: TenantId) {
        self.budgets.join(vgpu);
        self.lags.join(vgpu);
    }

    fn left(&mut self, vgpu: TenantId) {
        self.budgets.leave(vgpu);
        self.lags.leave(vgpu);
        self.period.leave(vgpu);
        self.last = self.last.filter(|last| last.vgpu != vgpu);
        self.wait = self.wait.filter(|wait| wait.next != vgpu);
    }

    fn arrived(&mut self, vgpu: TenantId, view: &View<'_>) {
        self.period.enter(vgpu, view);
        let welcome = !view.config.band.correct || !self.over(vgpu, view);
        if let Some(wait) = &mut self.wait
            && welcome
        {
            wait.came.get_or_insert(vgpu);
        }
    }

    fn started(&mut self, vgpu: TenantId, gap: u64, view: &View<'_>) {
        self.budgets.start(vgpu, view);
        // If the engine idled, it waited for the vGPU that ran last.
        let last = self.last.take().filter(|_| view.config.band.correct);
        let (payer, free) = last.map_or((vgpu, 0), |last| (last.vgpu, last.free));
        self.wait = None;
        // The vGPU keeps its unused free wait while it has the engine.
        self.last = last.filter(|_| payer == vgpu).map(|last| Last {
            free: free.saturating_sub(gap),
            undecided: false,
            ..last
        });
        self.pay(payer, gap.saturating_sub(free), view);
    }

    fn charged(&mut self, vgpu: TenantId, used: u64, view: &View<'_>) {
        self.use_up(vgpu, used, view);
        self.demote_if_over(vgpu, view);
    }

    fn idled(&mut self, vgpu: TenantId, ns: u64, view: &View<'_>) {
        if view.others_ready(vgpu) {
            self.pay(vgpu, ns, view);
        }
    }

    fn ended(&mut self, vgpu: TenantId, used: u64, late: u64, view: &View<'_>) {
        self.use_up(vgpu, used, view);
        let band = &view.config.band;
        let free = if band.correct {
            // Drivers send short submissions after long ones, so the free wait is based on the vGPU's total use since
            // it got the engine.
            let left = self.last.filter(|last| last.vgpu == vgpu).map_or(0, |last| last.free);
            let earned = used.saturating_mul(band.free_wait_permille.into()) / u64::from(PERMILLE);
            left.saturating_add(earned).min(band.wait_ns.max(earned))
        } else {
            0
        };
        if view.others_ready(vgpu) {
            self.pay(vgpu, late.saturating_sub(free), view);
        }
        self.demote_if_over(vgpu, view);
        self.last = Some(Last { vgpu, free: free.saturating_sub(late), undecided: true });
        self.wait = None;
    }

    fn pick(&mut self, view: &View<'_>) -> Option<TenantId> {
        self.fill(view);
        if !matches!(view.room, Room::Free) {
            // The engine is busy with the resumed work, so it does not need to wait.
            self.wait = None;
        }
        match view.room {
            Room::Full => return None,
            Room::Behind { vgpu, ahead } => {
                // Start the work only if the vGPU would still be next after being charged for its work in flight.
                let goes = view.is_ready(vgpu) && self.first(view, Some((vgpu, ahead))) == Some(vgpu);
                return goes.then_some(vgpu);
            }
            Room::Free => {}
        }
        if let Some(wait) = self.wait {
            if let Some(came) = wait.came.filter(|came| view.is_ready(*came)) {
                return Some(came);
            }
            if view.now < wait.until {
                return None;
            }
            self.wait = None;
            return if view.is_ready(wait.next) { Some(wait.next) } else { self.first(view, None) };
        }
        // Wait at most once after the end of each submission. Work that arrives later while the engine is idle starts
        // immediately.
        let ended = self.last.as_mut().and_then(|last| std::mem::take(&mut last.undecided).then_some(last.vgpu));
        let next = self.first(view, None)?;
        if ended.is_some_and(|last| self.waits(last, next, view)) {
            let until = view.now.after(view.config.band.wait_ns);
            self.wait = Some(Wait { until, next, came: None });
            return None;
        }
        Some(next)
    }

    fn wakeup(&self) -> Option<Nanos> {
        self.wait.map(|wait| wait.until)
    }

    fn standing(&self, vgpu: TenantId) -> Standing {
        Standing { credit: self.budgets.left_ns(vgpu), beyond: self.lags.beyond(vgpu) }
    }

    fn check(&self, members: &[&TenantId]) -> Result<(), Invalid> {
        self.budgets.check(members)?;
        self.lags.check(members)
    }
}
