//! The seam of a policy: it is told what happened in its lane, and picks who goes next.
//!
//! A policy keeps what it needs to choose; queues, what is in flight, caps, quarantines, limits and the accounts are the
//! lane's and the scheduler's, and the same for all.

mod band;
mod credit;
mod direct;
mod disengaged;
mod fifo;
mod lag;

use crate::config::{Config, PolicyKind};
use crate::lane::Member;
use crate::types::{Nanos, VgpuId};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::{Deref, DerefMut};

/// Room for a start beside what is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// Anything: nothing is in flight.
    Free,
    /// More of the same vGPU, of which work of about `ahead` ns is in flight.
    Behind {
        /// The vGPU.
        vgpu: VgpuId,
        /// In ns.
        ahead: u64,
    },
    /// Nothing.
    Full,
}

/// A lane as a policy sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    pub(crate) now: Nanos,
    pub(crate) config: &'a Config,
    pub(crate) members: &'a BTreeMap<VgpuId, Member>,
    pub(crate) room: Room,
}

impl<'a> View<'a> {
    /// vGPUs of which something may start.
    pub(crate) fn ready(&self) -> impl Iterator<Item = (VgpuId, &'a Member)> + use<'a> {
        self.members.iter().filter(|(_, member)| member.ready()).map(|(vgpu, member)| (*vgpu, member))
    }

    /// Returns whether something of a vGPU may start.
    pub(crate) fn is_ready(&self, vgpu: VgpuId) -> bool {
        self.members.get(&vgpu).is_some_and(Member::ready)
    }

    /// Returns whether something of another vGPU may start.
    pub(crate) fn others_ready(&self, than: VgpuId) -> bool {
        self.ready().any(|(vgpu, _)| vgpu != than)
    }

    /// The vGPU whose first submission has waited longest, of those that `among` says of.
    pub(crate) fn oldest(&self, among: impl Fn(VgpuId) -> bool) -> Option<VgpuId> {
        let ready = self.ready().filter(|(vgpu, _)| among(*vgpu));
        ready.min_by_key(|(_, member)| member.queue.front().map(|first| first.order)).map(|(vgpu, _)| vgpu)
    }
}

/// Standing of a vGPU with a policy, in ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Budget that is left; below zero when it is overdrawn. 0 with policies that have none.
    pub credit: i64,
    /// Use beyond its share; below zero when it has had less. 0 with policies that do not measure it.
    pub beyond: i64,
}

/// A way of choosing who goes next. What has no effect on it has an empty body.
pub(crate) trait Policy: Debug + Send {
    /// A vGPU takes part.
    fn joined(&mut self, vgpu: VgpuId);

    /// A vGPU takes part no more.
    fn left(&mut self, vgpu: VgpuId);

    /// Something of a vGPU has been queued.
    fn arrived(&mut self, _vgpu: VgpuId, _view: &View<'_>) {}

    /// Something of a vGPU starts now, after the engine could have run something for `gap` ns.
    fn started(&mut self, _vgpu: VgpuId, _gap: u64, _view: &View<'_>) {}

    /// A vGPU has used `used` ns of the engine beside what [ends](Self::ended).
    fn charged(&mut self, _vgpu: VgpuId, _used: u64, _view: &View<'_>) {}

    /// The engine has done nothing for `ns`, which is how long the card took to get what a vGPU was given it for.
    fn idled(&mut self, _vgpu: VgpuId, _ns: u64, _view: &View<'_>) {}

    /// Something of a vGPU has ended `late` ns ago, and had used `used` ns of the engine; or less than that ago if the engine went on
    /// meanwhile: `late` is the time in which it could have run something else.
    fn ended(&mut self, _vgpu: VgpuId, _used: u64, _late: u64, _view: &View<'_>) {}

    /// The vGPU whose first submission is to start now. It must be [ready](View::ready). Called after each event, and again
    /// after each start.
    fn pick(&mut self, view: &View<'_>) -> Option<VgpuId>;

    /// Returns when [`Self::pick`] is to be called again if nothing happens before.
    fn wakeup(&self) -> Option<Nanos> {
        None
    }

    /// Returns what it thinks of a vGPU.
    fn standing(&self, _vgpu: VgpuId) -> Standing {
        Standing::default()
    }

    /// Checks what was read of it: that it is of those vGPUs, which ascend.
    fn check(&self, _members: &[&VgpuId]) -> Result<(), Invalid> {
        Ok(())
    }
}

/// A policy of any kind, with what it keeps: so that it can be copied and written down.
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

    /// Checks what was read of a policy: that it is of those vGPUs, which ascend.
    pub(crate) fn check<'a>(&self, members: impl Iterator<Item = &'a VgpuId>) -> Result<(), Invalid> {
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
