//! GPUvm's CREDIT: each vGPU has a budget that is filled each period and debited by what it uses. The vGPU that has
//! overdrawn it goes behind the others; the first that has work runs. So does GPUvm's code; its paper (section 5.3) says that
//! the one with most credit runs.

use super::{Policy, Room, Standing, View};
use crate::shares::{WHOLE, shares};
use crate::types::{Nanos, VgpuId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// Budgets and the order of vGPUs; BAND has them too.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Budgets {
    budgets: BTreeMap<VgpuId, i64>,
    order: VecDeque<VgpuId>,
    filled: Nanos,
}

impl Budgets {
    pub(super) fn new(now: Nanos) -> Self {
        Self { budgets: BTreeMap::new(), order: VecDeque::new(), filled: now }
    }

    pub(super) fn join(&mut self, vgpu: VgpuId) {
        if self.budgets.insert(vgpu, 0).is_none() {
            self.order.push_back(vgpu);
        }
    }

    pub(super) fn leave(&mut self, vgpu: VgpuId) {
        self.budgets.remove(&vgpu);
        self.order.retain(|known| *known != vgpu);
    }

    /// Fills the budgets for the periods that have passed; says whether any has. After a period in which little was
    /// used a budget is not more than one period's share, and a debt of more than a period is forgiven (GPUvm).
    pub(super) fn fill(&mut self, view: &View<'_>) -> bool {
        let period = view.config.band.period_ns;
        let periods = view.now.since(self.filled) / period;
        if periods == 0 {
            return false;
        }
        self.filled = self.filled.after(periods * period);
        let params: Vec<_> = view.members.values().map(|member| member.params).collect();
        for (vgpu, share) in view.members.keys().zip(shares(&params)) {
            let Some(budget) = self.budgets.get_mut(vgpu) else { continue };
            let part =
                |ns: u64| i64::try_from(u128::from(ns) * u128::from(share) / u128::from(WHOLE)).unwrap_or(i64::MAX);
            let bound = i64::try_from(period).unwrap_or(i64::MAX);
            let filled = budget.saturating_add(part(periods.saturating_mul(period)));
            *budget = match filled {
                over if over > bound => part(period),
                under if under < -bound => 0,
                filled => filled,
            };
        }
        true
    }

    pub(super) fn debit(&mut self, vgpu: VgpuId, ns: u64) {
        if let Some(budget) = self.budgets.get_mut(&vgpu) {
            *budget = budget.saturating_sub(i64::try_from(ns).unwrap_or(i64::MAX));
        }
    }

    pub(super) fn of(&self, vgpu: VgpuId) -> i64 {
        self.budgets.get(&vgpu).copied().unwrap_or(0)
    }

    pub(super) fn demote(&mut self, vgpu: VgpuId) {
        if let Some(at) = self.order.iter().position(|known| *known == vgpu) {
            self.order.remove(at);
            self.order.push_back(vgpu);
        }
    }

    /// vGPUs of which something may start, in order.
    pub(super) fn ready<'a>(&'a self, view: &'a View<'_>) -> impl Iterator<Item = VgpuId> + 'a {
        self.order.iter().copied().filter(|vgpu| view.is_ready(*vgpu))
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
    fn joined(&mut self, vgpu: VgpuId) {
        self.budgets.join(vgpu);
    }

    fn left(&mut self, vgpu: VgpuId) {
        self.budgets.leave(vgpu);
    }

    fn started(&mut self, vgpu: VgpuId, gap: u64, view: &View<'_>) {
        if view.config.band.own_time {
            self.budgets.debit(vgpu, gap);
        }
    }

    fn ended(&mut self, vgpu: VgpuId, used: u64, late: u64, view: &View<'_>) {
        self.budgets.fill(view);
        self.budgets.debit(vgpu, if view.config.band.own_time { used.saturating_add(late) } else { used });
        if self.budgets.of(vgpu) < 0 {
            self.budgets.demote(vgpu);
        }
    }

    fn pick(&mut self, view: &View<'_>) -> Option<VgpuId> {
        self.budgets.fill(view);
        let first = self.budgets.ready(view).next()?;
        match view.room {
            Room::Free => Some(first),
            Room::Behind { vgpu, ahead } => {
                let left = self.budgets.of(vgpu).saturating_sub_unsigned(ahead);
                (vgpu == first && (left >= 0 || !view.others_ready(vgpu))).then_some(first)
            }
            Room::Full => None,
        }
    }

    fn standing(&self, vgpu: VgpuId) -> Standing {
        Standing { credit: self.budgets.of(vgpu), beyond: 0 }
    }
}
