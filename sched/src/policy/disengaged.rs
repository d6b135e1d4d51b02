//! Disengaged scheduling: the policy measures each submission during a short interval, and does not intervene during
//! the longer interval that follows.
//!
//! The method is from Menychtas, Shen and Scott ("Disengaged Scheduling for Fair, Protected Access to Fast
//! Computational Accelerators", ASPLOS 2014; GPUvm's reference 29). In the engaged interval, one vGPU runs at a time,
//! so that the length of its submissions is measured exactly. In the free interval, all vGPUs' work starts when it
//! arrives, and each vGPU's use is estimated from its number of submissions. At the end of each free interval, the
//! policy throttles the vGPUs that have used too much time. They do not run in the next free interval, unless no other
//! vGPU has work.
//!
//! A vGPU without competitors is not measured.

use super::lag::Lags;
use super::{Policy, Room, Standing, View};
use crate::checks::{COUNT_MAX, of_members};
use crate::member::Member;
use crate::types::{Nanos, TenantId};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Phase {
    /// Work starts when it arrives, except that of throttled vGPUs.
    Free {
        /// Time at which the phase ends if several vGPUs compete, or starts again otherwise.
        until: Nanos,
    },
    /// No work starts until the card has drained, so that long submissions do not extend into the next interval. This
    /// phase follows both the free and the engaged interval.
    Drain {
        /// True if the next phase is engaged.
        engage: bool,
    },
    /// One vGPU runs at a time.
    Engaged {
        /// End of the phase.
        until: Nanos,
    },
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Use {
    /// Mean measured length of the vGPU's submissions, in ns.
    length: u64,
    /// Sum of the measurements in this engaged interval, in ns.
    sum: u64,
    /// Number of measurements in `sum`.
    count: u64,
    /// Number of submissions started in the free interval.
    started: u64,
    /// Engine time of the submissions that ended in the free interval, in ns.
    charged: u64,
    throttled: bool,
    /// Sequence number of the vGPU's last start in an engaged interval. The vGPU with the lowest number runs next.
    turn: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Disengaged {
    phase: Phase,
    uses: BTreeMap<TenantId, Use>,
    lags: Lags,
    turns: u64,
    /// Time at which throttled vGPUs may run if no other vGPU has work.
    unthrottle: Option<Nanos>,
}

impl Disengaged {
    pub(crate) fn new() -> Self {
        let phase = Phase::Free { until: Nanos(0) };
        Self { phase, uses: BTreeMap::new(), lags: Lags::default(), turns: 0, unthrottle: None }
    }

    /// Ends the phase if it is over.
    fn advance(&mut self, view: &View<'_>) {
        let params = &view.config.disengaged;
        match self.phase {
            Phase::Free { until } if view.now >= until => {
                let cycle = params.engaged_ns.saturating_add(params.free_ns);
                if view.members.values().filter(|member| member.active(view.now, cycle)).count() > 1 {
                    self.phase = Phase::Drain { engage: true };
                    self.advance(view);
                } else {
                    self.release(view);
                }
            }
            Phase::Drain { engage: true } if view.room == Room::Free => {
                self.phase = Phase::Engaged { until: view.now.after(params.engaged_ns) };
            }
            Phase::Drain { engage: false } if view.room == Room::Free => self.release(view),
            Phase::Engaged { until } if view.now >= until => {
                self.phase = Phase::Drain { engage: false };
                self.advance(view);
            }
            Phase::Free { .. } | Phase::Drain { .. } | Phase::Engaged { .. } => {}
        }
    }

    /// Charges the use of the previous intervals, and starts a free interval.
    fn release(&mut self, view: &View<'_>) {
        self.charge_round(view);
        self.phase = Phase::Free { until: view.now.after(view.config.disengaged.free_ns) };
    }

    /// Charges the use since the last call, and throttles the vGPUs that have used too much.
    fn charge_round(&mut self, view: &View<'_>) {
        let params = &view.config.disengaged;
        let cycle = params.engaged_ns.saturating_add(params.free_ns);
        for (vgpu, of) in &mut self.uses {
            of.length = of.sum.checked_div(of.count).unwrap_or(of.length);
            // Use the actual durations if the submissions in the free interval were longer than the measured ones.
            let free = of.started.saturating_mul(of.length).max(of.charged);
            self.lags.charge(*vgpu, of.sum.saturating_add(free), cycle, cycle, view);
            *of = Use { length: of.length, turn: of.turn, ..Use::default() };
        }
        let allowed = i64::try_from(params.engaged_ns).unwrap_or(i64::MAX);
        for (vgpu, of) in &mut self.uses {
            of.throttled = self.lags.beyond(*vgpu) > allowed;
        }
    }
}

impl Policy for Disengaged {
    fn joined(&mut self, vgpu: TenantId) {
        self.uses.insert(vgpu, Use::default());
        self.lags.join(vgpu);
    }

    fn left(&mut self, vgpu: TenantId) {
        self.uses.remove(&vgpu);
        self.lags.leave(vgpu);
    }

    fn started(&mut self, vgpu: TenantId, _gap: u64, _view: &View<'_>) {
        let Some(of) = self.uses.get_mut(&vgpu) else { return };
        match self.phase {
            Phase::Free { .. } => of.started += 1,
            Phase::Drain { .. } | Phase::Engaged { .. } => {
                self.turns += 1;
                of.turn = self.turns;
            }
        }
    }

    fn ended(&mut self, vgpu: TenantId, used: u64, _late: u64, _view: &View<'_>) {
        let Some(of) = self.uses.get_mut(&vgpu) else { return };
        match self.phase {
            Phase::Engaged { .. } | Phase::Drain { engage: false } => {
                (of.sum, of.count) = (of.sum.saturating_add(used), of.count + 1);
            }
            Phase::Free { .. } | Phase::Drain { engage: true } => of.charged = of.charged.saturating_add(used),
        }
    }

    fn charged(&mut self, vgpu: TenantId, used: u64, _view: &View<'_>) {
        if let Some(of) = self.uses.get_mut(&vgpu) {
            of.charged = of.charged.saturating_add(used);
        }
    }

    fn pick(&mut self, view: &View<'_>) -> Option<TenantId> {
        self.advance(view);
        match self.phase {
            Phase::Free { .. } => {
                let throttled = |vgpu| self.uses.get(&vgpu).is_some_and(|of: &Use| of.throttled);
                self.unthrottle = None;
                let free = view.oldest(|vgpu| !throttled(vgpu));
                if free.is_some() || view.room != Room::Free {
                    return free;
                }
                // Do not throttle vGPUs in favour of vGPUs without work. However, a vGPU may submit again if its
                // submission has just ended, so wait for as long as its next submission is expected to take, but not
                // longer than BAND would wait.
                let near = |member: &Member| member.expected.min(view.config.band.wait_ns);
                let others = view.members.iter().filter(|(vgpu, member)| !throttled(**vgpu) && !member.held);
                let until = others.filter_map(|(_, member)| Some(member.last_seen?.after(near(member)))).max();
                if until.is_some_and(|until| view.now < until) {
                    self.unthrottle = until;
                    return None;
                }
                view.oldest(|_| true)
            }
            Phase::Drain { .. } => None,
            Phase::Engaged { .. } => {
                let ready = view.ready().filter(|_| view.room == Room::Free);
                ready.map(|(vgpu, _)| vgpu).min_by_key(|vgpu| self.uses.get(vgpu).map(|of| of.turn))
            }
        }
    }

    fn wakeup(&self) -> Option<Nanos> {
        match self.phase {
            Phase::Free { until } => Some(self.unthrottle.map_or(until, |at| at.min(until))),
            Phase::Engaged { until } => Some(until),
            Phase::Drain { .. } => None,
        }
    }

    fn standing(&self, vgpu: TenantId) -> Standing {
        Standing { credit: 0, beyond: self.lags.beyond(vgpu) }
    }

    fn check(&self, members: &[&TenantId]) -> Result<(), Invalid> {
        of_members(self.uses.keys(), members.iter().copied())?;
        let counts = self.uses.values().flat_map(|of| [of.count, of.started, of.turn]).chain([self.turns]);
        Invalid::unless(counts.into_iter().all(|count| count <= COUNT_MAX), || {
            "the counts of the policy are too large".into()
        })?;
        self.lags.check(members)
    }
}
