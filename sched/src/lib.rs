//! GPU scheduling policies as pure state machines: an event and the time in, decisions out.
//!
//! A policy knows no hardware, no threads and no clock; whoever feeds it events carries its decisions out. So a test
//! runs hours of many vGPUs in milliseconds.
//!
//! Parts: [`Policy`], its [`Event`]s and [`Decision`]s; [`Direct`], which starts every submission when it arrives and
//! only keeps accounts.
//!
//! Not here yet: policies that wait. They fit the same trait: an arrival need not be answered by a start, and
//! [`Policy::next_wakeup`] says when a policy wants [`Event::Tick`].

#![forbid(unsafe_code)]

use std::collections::BTreeMap;

/// A vGPU, as the mediator numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VgpuId(pub u32);

/// One submission: a number that the feeder chooses and the policy gives back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Time in nanoseconds of a clock that never goes back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A vGPU came into being.
    Added(VgpuId),
    /// A vGPU is gone, with all that it had submitted.
    Removed(VgpuId),
    /// A vGPU wants to run something.
    Arrival {
        /// Whose.
        vgpu: VgpuId,
        /// Which.
        ticket: Ticket,
    },
    /// Something that was started has ended.
    Completion {
        /// Whose.
        vgpu: VgpuId,
        /// Which.
        ticket: Ticket,
        /// Engine time that it used, in nanoseconds.
        used: u64,
    },
    /// The time that [`Policy::next_wakeup`] named has come.
    Tick,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Give the submission to the card now.
    Start(Ticket),
}

/// A scheduling policy.
pub trait Policy {
    /// Takes in one event and appends what is to be done, in order.
    fn event(&mut self, now: Nanos, event: Event, decisions: &mut Vec<Decision>);

    /// When the policy wants an [`Event::Tick`], if no other event comes before.
    fn next_wakeup(&self) -> Option<Nanos>;

    /// The account of a vGPU.
    fn account(&self, vgpu: VgpuId) -> Option<Account>;
}

/// What a vGPU has submitted and used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Submissions that arrived.
    pub arrived: u64,
    /// Submissions that were started.
    pub started: u64,
    /// Submissions that ended.
    pub completed: u64,
    /// Engine time used by those that ended, in nanoseconds.
    pub used: u64,
}

/// No mediation: every arrival starts at once. Needs no completions; counts them if they are given.
#[derive(Debug, Default)]
pub struct Direct {
    accounts: BTreeMap<VgpuId, Account>,
}

impl Direct {
    /// No vGPUs yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

impl Policy for Direct {
    fn event(&mut self, _now: Nanos, event: Event, decisions: &mut Vec<Decision>) {
        match event {
            Event::Added(vgpu) => {
                self.accounts.insert(vgpu, Account::default());
            }
            Event::Removed(vgpu) => {
                self.accounts.remove(&vgpu);
            }
            Event::Arrival { vgpu, ticket } => {
                // What a vGPU that is gone still wanted is not started.
                let Some(account) = self.accounts.get_mut(&vgpu) else { return };
                account.arrived += 1;
                account.started += 1;
                decisions.push(Decision::Start(ticket));
            }
            Event::Completion { vgpu, used, .. } => {
                let Some(account) = self.accounts.get_mut(&vgpu) else { return };
                account.completed += 1;
                account.used = account.used.saturating_add(used);
            }
            Event::Tick => {}
        }
    }

    fn next_wakeup(&self) -> Option<Nanos> {
        None
    }

    fn account(&self, vgpu: VgpuId) -> Option<Account> {
        self.accounts.get(&vgpu).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(policy: &mut Direct, event: Event) -> Vec<Decision> {
        let mut decisions = Vec::new();
        policy.event(Nanos(0), event, &mut decisions);
        decisions
    }

    #[test]
    fn direct_starts_each_arrival_at_once_and_in_order() {
        let mut policy = Direct::new();
        let mut decisions = Vec::new();
        policy.event(Nanos(0), Event::Added(VgpuId(1)), &mut decisions);
        for ticket in [7, 3, 5] {
            policy.event(Nanos(1), Event::Arrival { vgpu: VgpuId(1), ticket: Ticket(ticket) }, &mut decisions);
        }
        assert_eq!(decisions, [7, 3, 5].map(|ticket| Decision::Start(Ticket(ticket))));
        assert_eq!(policy.next_wakeup(), None);
    }

    #[test]
    fn direct_keeps_accounts_apart() {
        let mut policy = Direct::new();
        for vgpu in [1, 2] {
            feed(&mut policy, Event::Added(VgpuId(vgpu)));
        }
        feed(&mut policy, Event::Arrival { vgpu: VgpuId(2), ticket: Ticket(0) });
        feed(&mut policy, Event::Completion { vgpu: VgpuId(2), ticket: Ticket(0), used: 500 });
        assert_eq!(policy.account(VgpuId(1)), Some(Account::default()));
        assert_eq!(policy.account(VgpuId(2)), Some(Account { arrived: 1, started: 1, completed: 1, used: 500 }));
    }

    #[test]
    fn nothing_of_a_removed_vgpu_starts() {
        let mut policy = Direct::new();
        feed(&mut policy, Event::Added(VgpuId(1)));
        feed(&mut policy, Event::Removed(VgpuId(1)));
        assert_eq!(feed(&mut policy, Event::Arrival { vgpu: VgpuId(1), ticket: Ticket(1) }), []);
        assert_eq!(policy.account(VgpuId(1)), None);
    }
}
