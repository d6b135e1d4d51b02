//! The thread that moves memory when the card has too little, and back when it has more.
//!
//! It sleeps until the bell rings or the balancer has something to do at a later time, so that it costs nothing while
//! memory suffices.

use super::bell::Bell;
use super::interrupts::GuestEvent;
use super::registry::{HostCard, HostState};
use super::relocate::Relocated;
use sched::Histogram;
use std::sync::Weak;
use std::time::Duration;
use vram::{Step, VmId};

/// Plans that are carried out for one ring of the bell before VMs that wait for memory are told.
const ROUNDS: u32 = 16;
/// Time between two tries of work that waits for memory.
const RETRY: Duration = Duration::from_millis(50);

/// Body of the thread: serves `host` until it is closed or gone.
pub(super) fn serve(host: &Weak<HostCard>, bell: &Bell) {
    let mut limit = None;
    loop {
        bell.wait(limit);
        let Some(host) = host.upgrade() else { return };
        if host.stopping() {
            return;
        }
        limit = host.balance();
    }
}

/// What was moved of a VM's memory since it was added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// The sum of it all.
    pub sum: Relocated,
    /// How long its channels did not run, each time.
    pub suspensions: Histogram,
}

impl Moved {
    pub(super) fn add(&mut self, one: &Relocated) {
        self.sum.moved = self.sum.moved.saturating_add(one.moved);
        self.sum.stayed = self.sum.stayed.saturating_add(one.stayed);
        self.sum.bytes += one.bytes;
        self.sum.suspended_ns += one.suspended_ns;
        self.sum.copied_ns += one.copied_ns;
        self.suspensions.add(one.suspended_ns);
    }
}

impl HostCard {
    /// Moves what the balancer wants moved. Returns when it wants to be asked again, if at any time.
    fn balance(&self) -> Option<Duration> {
        let stirred = self.lock().stir();
        self.carry_out(stirred);
        for _ in 0..ROUNDS {
            let plan = self.lock().plan();
            if plan.is_empty() || self.stopping() {
                break;
            }
            self.carry_out(plan);
        }
        self.lock().settle();
        let (short, next) = {
            let state = self.lock();
            (state.vram.short.iter().copied().collect::<Vec<_>>(), state.next_plan())
        };
        let retry = (!short.is_empty()).then_some(RETRY);
        short.into_iter().for_each(|vm| self.deliver(vm, GuestEvent::Memory));
        next.into_iter().chain(retry).min()
    }

    /// Does what promises memory of the card, and when others are in the way that have more than they are guaranteed, moves
    /// theirs and does it again.
    ///
    /// # Errors
    /// What `attempt` says in the end.
    pub fn make_room(&self, attempt: impl FnMut(&mut HostState) -> Result<(), vram::Error>) -> Result<(), vram::Error> {
        self.lock().promising += 1;
        let done = self.promise(attempt);
        self.lock().promising -= 1;
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

    fn carry_out(&self, plan: Plan) {
        for (vm, steps) in plan {
            self.relocate_counted(vm, &steps);
            self.scrub();
        }
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

/// Steps in the order in which they are to be done, those of one VM together that follow one another.
pub(super) type Plan = Vec<(VmId, Vec<Step>)>;
