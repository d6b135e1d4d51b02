//! The thread that evicts memory when the card runs short of it, and returns memory when the card has enough.
//!
//! The thread sleeps until it is woken or the balancer's next plan is due. While memory suffices, it uses no CPU time.

use super::{CardState, ManagedCard};
use crate::tenants::GuestEvent;
use card_memory::{FIRST_BYTES, Plan, Planned, Relocated, SCAN_INTERVAL, Wakeup};
use sched::trace::MemoryMove;
use std::collections::BTreeSet;
use std::sync::Weak;
use std::time::{Duration, Instant};
use vram::{Step, TenantId, To};

/// Maximum number of plans executed per wake-up before VMs that wait for memory are notified.
const MAX_PLANS_PER_WAKEUP: u32 = 16;

/// Runs the thread, which serves `host` until the card is closed or dropped.
pub(crate) fn serve(host: &Weak<ManagedCard>, wakeup: &Wakeup) {
    let (mut limit, mut told) = (None, WaiterNotifications::default());
    loop {
        wakeup.wait(limit);
        let Some(host) = host.upgrade() else { return };
        if host.over() {
            return;
        }
        limit = host.balance(&mut told);
    }
}

/// State at the last notification of the VMs that wait for memory. Each notified VM retries, and wakes the mover if it
/// still cannot obtain memory. This record prevents waiting VMs and the mover from waking each other endlessly.
#[derive(Debug, Default)]
struct WaiterNotifications {
    at: Option<Instant>,
    waiting: BTreeSet<TenantId>,
    /// Number of card chunks available to any VM.
    spare: u32,
}

impl WaiterNotifications {
    /// Returns true if waiting VMs should be notified now: memory has moved, more memory is available, another VM has
    /// started to wait, or the last notification is old.
    fn tells(&mut self, waiting: &BTreeSet<TenantId>, moved: bool, spare: u32, now: Instant) -> bool {
        let long_ago = self.at.is_none_or(|at| now.saturating_duration_since(at) >= SCAN_INTERVAL);
        let tells = moved || spare > self.spare || long_ago || !waiting.is_subset(&self.waiting);
        if tells {
            (self.at, self.waiting) = (Some(now), waiting.clone());
        }
        // Record a decrease as well, so that the allocated chunks count as newly available when they are freed again.
        self.spare = spare;
        tells
    }
}

impl ManagedCard {
    /// Executes the balancer's moves, and zeroes free memory until the thread is woken again. Returns the time until
    /// the next plan or retry, if any.
    fn balance(&self, told: &mut WaiterNotifications) -> Option<Duration> {
        let waiting = self.lock().vram().waiting();
        let stirred = self.lock().inject_random_moves();
        let mut moved = self.carry_out(stirred);
        let mut served = BTreeSet::new();
        for _ in 0..MAX_PLANS_PER_WAKEUP {
            if self.over() {
                break;
            }
            let Planned { plan, served: for_them } = self.lock().plan();
            if plan.is_empty() {
                break;
            }
            if self.carry_out(plan) {
                moved = true;
                served.extend(for_them);
            }
        }
        if self.over() {
            return None;
        }
        self.lock().round_ended();
        let (wait, next, spare) = {
            let mut state = self.lock();
            (state.looked(&waiting, &served), state.next_plan(), state.vram().chunks.spare())
        };
        let retry = (!wait.is_empty()).then_some(SCAN_INTERVAL);
        if told.tells(&wait, moved, spare, Instant::now()) {
            wait.into_iter().for_each(|vm| self.deliver(vm, GuestEvent::Memory));
        }
        // Stop zeroing as soon as the thread is woken again.
        while !self.wakeup.is_rung() && self.zero_by_engines(false) {}
        while !self.wakeup.is_rung() && self.lock().vram_mut().scrub_ahead().unwrap_or(false) {}
        next.into_iter().chain(retry).min()
    }

    /// Reserves memory for the mediator's first structures for a new VM, and moves chunks out of it. If no chunk can
    /// move, the structures are allocated on demand, which may fail.
    pub(crate) fn admit(&self, vm: TenantId) {
        {
            let mut state = self.lock();
            let chunks = state.vram().count(FIRST_BYTES);
            state.vram_mut().wants.admit(vm, chunks);
        }
        for _ in 0..MAX_PLANS_PER_WAKEUP {
            if !self.make_own_room() {
                break;
            }
        }
    }

    /// Runs `attempt`, which tries to guarantee card memory. If VMs above their guarantees occupy this memory, moves
    /// their chunks and retries.
    ///
    /// # Errors
    /// Returns the last error from `attempt`.
    pub fn make_room(&self, attempt: impl FnMut(&mut CardState) -> Result<(), vram::Error>) -> Result<(), vram::Error> {
        self.lock().memory.promise(true);
        let done = self.promise(attempt);
        self.lock().memory.promise(false);
        self.look_again();
        done
    }

    fn promise(&self, mut attempt: impl FnMut(&mut CardState) -> Result<(), vram::Error>) -> Result<(), vram::Error> {
        for _ in 0..MAX_PLANS_PER_WAKEUP {
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

    /// Executes a plan. Returns true if any step had an effect. Executes the mediator's own moves between the steps,
    /// because the work of all VMs may wait for them.
    fn carry_out(&self, plan: Plan) -> bool {
        let mut any = false;
        for (vm, steps) in plan {
            any |= self.relocate_counted(vm, &steps).has_effect();
            if self.over() {
                break;
            }
            self.scrub();
            self.make_own_room();
        }
        any
    }

    /// Moves chunks that occupy memory needed for the mediator's own structures. Returns true if any chunk moved.
    fn make_own_room(&self) -> bool {
        let plan = self.lock().plan_own();
        let mut any = false;
        for (vm, steps) in plan {
            any |= self.relocate_counted(vm, &steps).has_effect();
            self.scrub();
        }
        if any {
            let waiting: Vec<TenantId> = self.lock().vram().wants.of_tables().collect();
            waiting.into_iter().for_each(|vm| self.deliver(vm, GuestEvent::Memory));
        }
        any
    }

    /// Same as [`Self::relocate`], but also counts the moves.
    pub fn relocate_counted(&self, vm: TenantId, steps: &[Step]) -> Relocated {
        let from = self.lock().card_time();
        let done = self.relocate(vm, steps);
        if done.moved != 0 {
            let mut state = self.lock();
            state.has_moved(vm, &done);
            let (until, to_card) = (state.card_time(), steps.first().is_some_and(|step| step.to == To::Card));
            state.note_move(MemoryMove { from, until, vgpu: vm, bytes: done.bytes, to_card });
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiters_are_notified_on_change_and_periodically() {
        let (one, two) = (BTreeSet::from([TenantId(1)]), BTreeSet::from([TenantId(1), TenantId(2)]));
        let (mut told, now) = (WaiterNotifications::default(), Instant::now());
        assert!(told.tells(&one, false, 0, now), "the first notification is sent");
        for _ in 0..1000 {
            assert!(!told.tells(&one, false, 0, now), "the VM has just retried unsuccessfully and woken the mover");
        }
        assert!(told.tells(&one, true, 0, now) && told.tells(&two, false, 0, now) && told.tells(&one, false, 1, now));
        assert!(
            !told.tells(&one, false, 1, now) && !told.tells(&one, false, 0, now) && told.tells(&one, false, 1, now)
        );
        assert!(
            !told.tells(&one, false, 1, now + SCAN_INTERVAL / 2) && told.tells(&one, false, 1, now + SCAN_INTERVAL)
        );
    }
}
