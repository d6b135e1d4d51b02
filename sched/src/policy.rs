//! Interface of scheduling policies. A policy processes the events of its lane, and selects the next vGPU.
//!
//! A policy contains only the state that it needs for its selection. Queues, work in flight, caps, quarantines, limits,
//! and accounts do not depend on the policy. They are in the lane and the scheduler.

mod band;
mod credit;
mod direct;
mod disengaged;
mod fifo;
mod lag;

use crate::config::{Config, PolicyKind};
use crate::member::Member;
use crate::types::{Nanos, TenantId};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::{Deref, DerefMut};

/// Permission to start more work, given the work in flight. A policy that starts each submission immediately ignores
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// Any vGPU may start work, because no work is in flight.
    Free,
    /// Only the vGPU with work in flight may start more work.
    Behind {
        /// The vGPU with work in flight.
        vgpu: TenantId,
        /// Expected length of the vGPU's work in flight, in ns.
        ahead: u64,
    },
    /// No work may start.
    Full,
}

/// State of a lane, as seen by its policy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    pub(crate) now: Nanos,
    pub(crate) config: &'a Config,
    pub(crate) members: &'a BTreeMap<TenantId, Member>,
    pub(crate) room: Room,
}

impl<'a> View<'a> {
    /// Returns the vGPUs that have a submission ready to start.
    pub(crate) fn ready(&self) -> impl Iterator<Item = (TenantId, &'a Member)> + use<'a> {
        self.members.iter().filter(|(_, member)| member.ready()).map(|(vgpu, member)| (*vgpu, member))
    }

    /// Returns true if a vGPU has a submission ready to start.
    pub(crate) fn is_ready(&self, vgpu: TenantId) -> bool {
        self.members.get(&vgpu).is_some_and(Member::ready)
    }

    /// Returns true if another vGPU has a submission ready to start.
    pub(crate) fn others_ready(&self, than: TenantId) -> bool {
        self.ready().any(|(vgpu, _)| vgpu != than)
    }

    /// Returns the vGPU with the oldest first submission, among the ready vGPUs for which `among` returns true.
    pub(crate) fn oldest(&self, among: impl Fn(TenantId) -> bool) -> Option<TenantId> {
        let ready = self.ready().filter(|(vgpu, _)| among(*vgpu));
        ready.min_by_key(|(_, member)| member.queue.front().map(|first| first.order)).map(|(vgpu, _)| vgpu)
    }
}

/// A vGPU's account in a policy, in ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    /// Remaining budget. Negative if the budget is overdrawn, and 0 for policies without budgets.
    pub credit: i64,
    /// Use in excess of the vGPU's share. Negative if the use is below the share, and 0 for policies without this
    /// value.
    pub beyond: i64,
}

/// A scheduling policy. It implements only the handlers of the events that it uses.
pub(crate) trait Policy: Debug + Send {
    /// Adds a vGPU.
    fn joined(&mut self, vgpu: TenantId);

    /// Removes a vGPU.
    fn left(&mut self, vgpu: TenantId);

    /// Records that a submission of a vGPU was queued.
    fn arrived(&mut self, _vgpu: TenantId, _view: &View<'_>) {}

    /// Records that a submission of a vGPU starts now. Before that, the engine was idle for `gap` ns although work was
    /// available.
    fn started(&mut self, _vgpu: TenantId, _gap: u64, _view: &View<'_>) {}

    /// Charges a vGPU `used` ns in addition to the use reported to [`Self::ended`].
    fn charged(&mut self, _vgpu: TenantId, _used: u64, _view: &View<'_>) {}

    /// Records that the engine was idle for `ns` ns between the selection of a vGPU and the arrival of its work on the
    /// card.
    fn idled(&mut self, _vgpu: TenantId, _ns: u64, _view: &View<'_>) {}

    /// Records the end of a vGPU's submission that used the engine for `used` ns. `late` is the time since this end in
    /// ns, excluding the time for which the engine has been busy since then.
    fn ended(&mut self, _vgpu: TenantId, _used: u64, _late: u64, _view: &View<'_>) {}

    /// Returns the vGPU whose first submission starts now, if any. It must be [ready](View::ready). The lane calls this
    /// function after each event and each start.
    fn pick(&mut self, view: &View<'_>) -> Option<TenantId>;

    /// Returns the time at which [`Self::pick`] must be called if there is no earlier event.
    fn wakeup(&self) -> Option<Nanos> {
        None
    }

    /// Returns a vGPU's account in this policy.
    fn standing(&self, _vgpu: TenantId) -> Standing {
        Standing::default()
    }

    /// Checks that the vGPUs of a deserialized policy are exactly `members`, which are in ascending order.
    fn check(&self, _members: &[&TenantId]) -> Result<(), Invalid> {
        Ok(())
    }
}

/// State of a policy of any kind, in a form that can be copied and serialized.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum AnyPolicy {
    Direct(direct::Direct),
    Fifo(fifo::Fifo),
    Credit(credit::Credit),
    Band(band::Band),
    Disengaged(disengaged::Disengaged),
}

impl AnyPolicy {
    pub(crate) fn new(config: &Config, now: Nanos) -> Self {
        match config.policy {
            PolicyKind::Direct => Self::Direct(direct::Direct),
            PolicyKind::Fifo => Self::Fifo(fifo::Fifo),
            PolicyKind::Credit => Self::Credit(credit::Credit::new(now)),
            PolicyKind::Band => Self::Band(band::Band::new(now)),
            PolicyKind::Disengaged => Self::Disengaged(disengaged::Disengaged::new()),
        }
    }

    /// Checks that the vGPUs of a deserialized policy are exactly `members`, which are in ascending order.
    pub(crate) fn check<'a>(&self, members: impl Iterator<Item = &'a TenantId>) -> Result<(), Invalid> {
        (**self).check(&members.collect::<Vec<_>>())
    }

    pub(crate) fn kind(&self) -> PolicyKind {
        match self {
            Self::Direct(_) => PolicyKind::Direct,
            Self::Fifo(_) => PolicyKind::Fifo,
            Self::Credit(_) => PolicyKind::Credit,
            Self::Band(_) => PolicyKind::Band,
            Self::Disengaged(_) => PolicyKind::Disengaged,
        }
    }
}

impl Deref for AnyPolicy {
    type Target = dyn Policy;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Direct(policy) => policy,
            Self::Fifo(policy) => policy,
            Self::Credit(policy) => policy,
            Self::Band(policy) => policy,
            Self::Disengaged(policy) => policy,
        }
    }
}

impl DerefMut for AnyPolicy {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self {
            Self::Direct(policy) => policy,
            Self::Fifo(policy) => policy,
            Self::Credit(policy) => policy,
            Self::Band(policy) => policy,
            Self::Disengaged(policy) => policy,
        }
    }
}
