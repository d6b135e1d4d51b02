//! The thread that moves memory when the card has too little, and back when it has more.
//!
//! It sleeps until it is woken or the balancer has something to do at a later time, so that it costs nothing while
//! memory suffices.

use super::{HostCard, HostState};
use crate::memory::{FIRST_BYTES, LOOK, Plan, Planned, Relocated, Wakeup};
use crate::tenants::GuestEvent;
use std::collections::BTreeSet;
use std::sync::Weak;
use std::time::Duration;
use vram::{Step, VmId};

/// Plans that are carried out for one wake-up before VMs that wait for memory are told.
const ROUNDS: u32 = 16;

/// Body of the thread: serves `host` until it is closed or gone.
pub(crate) fn serve(host: &Weak<HostCard>, wakeup: &Wakeup) {
    let mut limit = None;
    loop {
        wakeup.wait(limit);
        let Some(host) = host.upgrade() else { return };
        if host.over() {
            return;
        }
        limit = host.balance();
    }
}

impl HostCard {
    /// Moves what the balancer wants moved. Returns when it wants to be asked again, if at any time.
    fn balance(&self) -> Option<Duration> {
        let waiting = self.lock().vram().waiting();
        let stirred = self.lock().stir();
        self.carry_out(stirred);
        let mut served = BTreeSet::new();
        for _ in 0..ROUNDS {
            let Planned { plan, served: for_them, .. } = self.lock().plan();
            if plan.is_empty() || self.over() {
                break;
            }
            if self.carry_out(plan) {
                served.extend(for_them);
            }
        }
        self.lock().begin_turn();
        let (wait, next) = {
            let mut state = self.lock();
            (state.looked(&waiting, &served), state.next_plan())
        };
        let retry = (!wait.is_empty()).then_some(LOOK);
        wait.into_iter().for_each(|vm| self.deliver(vm, GuestEvent::Memory));
        next.into_iter().chain(retry).min()
    }

    /// Has the mediator's first structures for a VM that is admitted be kept for it, and moves what is in the way. Where
    /// nothing can move they are found when they are needed, or not.
    pub(crate) fn admit(&self, vm: VmId) {
        {
            let mut state = self.lock();
            let chunks = state.vram().count(FIRST_BYTES);
            state.vram_mut().wants.admit(vm, chunks);
        }
        for _ in 0..ROUNDS {
            if !self.make_own_room() {
                break;
            }
        }
    }

    /// Does what promises memory of the card, and when others are in the way that have more than they are guaranteed, moves
    /// theirs and does it again.
    ///
    /// # Errors
    /// What `attempt` says in the end.
    pub fn make_room(&self, attempt: impl FnMut(&mut HostState) -> Result<(), vram::Error>) -> Result<(), vram::Error> {
        self.lock().memory.promise(true);
        let done = self.promise(attempt);
        self.lock().memory.promise(false);
        self.look_again();
        done
    }

    fn promise(&self, mut attempt: impl FnMut(&mut HostState) -> Result<(), vram::Error>) -> Result<(), vram::Error> {
        for _ in 0..ROUNDS {
            let plan = {
                let mut state = self.lock();
                match attempt(&mut state) {
                    Err(vram::Error::Promise { wanted, now, left, .. }) if wanted <= left => {
                        state.plan_promise(wanted.saturating_sub(now))
                    }
                    done => return done,
                }
            };
            if plan.is_empty() {
                break;
            }
            self.carry_out(plan);
        }
        attempt(&mut self.lock())
    }

    /// Does what a plan says; whether any of it could be done. What the mediator itself needs by then is not behind what is
    /// left of the plan: everybody's work may wait for it.
    fn carry_out(&self, plan: Plan) -> bool {
        let mut any = false;
        for (vm, steps) in plan {
            any |= self.relocate_counted(vm, &steps).has_effect();
            self.scrub();
            self.make_own_room();
        }
        any
    }

    /// Moves what is in the way of the mediator's own structures; whether anything was.
    fn make_own_room(&self) -> bool {
        let plan = self.lock().plan_own();
        let mut any = false;
        for (vm, steps) in plan {
            any |= self.relocate_counted(vm, &steps).has_effect();
            self.scrub();
        }
        if any {
            let waiting: Vec<VmId> = self.lock().vram().wants.of_tables().collect();
            waiting.into_iter().for_each(|vm| self.deliver(vm, GuestEvent::Memory));
        }
        any
    }

    /// As [`Self::relocate`], and keeps the account.
    pub fn relocate_counted(&self, vm: VmId, steps: &[Step]) -> Relocated {
        let done = self.relocate(vm, steps);
        if done.moved != 0 {
            self.lock().has_moved(vm, &done);
        }
        done
    }
}
