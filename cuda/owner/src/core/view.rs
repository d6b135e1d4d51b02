//! Views of the state of a card and its tenants.

use super::{Core, GivenUp, TenantSpec, Unaccounted};
use gang::GangView;
use owner_driver::Memory;
use sched::groups::Membership;
use sched::{Engine, Nanos};
use tenancy::{MemoryView, TimeView};
use vram::TenantId;

/// The engine whose time is accounted.
const ENGINE: Engine = Engine::Compute;

/// Current state of a tenant, except its memory and time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantView {
    /// Number of the tenant.
    pub id: TenantId,
    /// The operator's settings for the tenant.
    pub spec: TenantSpec,
    /// Process ID and name of each program of the tenant.
    pub programs: Vec<(u32, String)>,
    /// Part of the tenant's turns during which it had work in flight, as measured by the card's events, in ns.
    pub busy_ns: u64,
    /// Part of `busy_ns` during which only copies were in flight, in ns.
    pub copy_ns: u64,
    /// Number of submissions, excluding those made while the tenant was alone.
    pub launches: u64,
    /// Number of the tenant's programs that were killed, mostly because they did not reply.
    pub killed: u64,
    /// Number of the tenant's programs that could not be killed. They run without a connection, turns, or accounted
    /// memory.
    pub kill_failures: u64,
    /// Number of the tenant's programs that were suspended because they did not reply.
    pub suspended: u64,
    /// The tenant's most recently abandoned programs, oldest first.
    pub given_up: Vec<GivenUp>,
    /// Time by which the tenant's turn has overrun, in ns.
    pub overrun_ns: u64,
    /// The tenant's processes that use card memory beyond their accounts.
    pub unaccounted: Vec<Unaccounted>,
    /// Card memory that the tenant has released but that is still in use, in bytes.
    pub kept_bytes: u64,
    /// Part of the unaccounted and kept memory that exceeds the tenant's limits, in bytes.
    pub over_quota_bytes: u64,
    /// State of the tenant within its share group, if it has one.
    pub membership: Option<Membership>,
    /// State of the tenant's gang on this card, if the tenant has several cards.
    pub gang: Option<GangView>,
    /// Process ID and name of each program that prevents the tenant from running concurrently with other members of its
    /// group.
    pub not_concurrent: Vec<(u32, String)>,
    /// State of the MPS server of the tenant's group.
    pub server: cuda_control::ServerState,
}

/// Current state of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardView {
    /// Distribution of the card's memory.
    pub memory: MemoryView,
    /// Distribution of the card's time.
    pub time: TimeView,
    /// Number of pieces on the card and in host memory.
    pub pieces: (usize, usize),
    /// Number of turns granted so far.
    pub turns: u64,
    /// Number of chunks moved so far.
    pub relocations: u64,
    /// Number of orders that processes have declined.
    pub declined: u64,
    /// Number of polls of NVML and the driver so far.
    pub looks: u64,
    /// Used card memory that cannot be charged to any process or tenant, in bytes.
    pub unexplained_bytes: u64,
    /// The card's tenants.
    pub tenants: Vec<TenantView>,
}

impl Core {
    /// Returns the current state of the card. Includes the time accounts of intervals starting at or after `since_ns`.
    #[must_use]
    pub fn view(&self, since_ns: u64) -> CardView {
        let turns = self.turns.turns();
        let mut time = TimeView::new(turns.scheduler(), &[ENGINE], self.now(), Nanos(since_ns));
        let settings = |id| self.tenants.get(&id).map(|tenant| tenant.spec.time);
        time.divide_among(settings, turns.scheduler().config().queues);
        // For a group member, show the account of its own work.
        for (&id, of_it) in &mut time.tenants {
            if turns.membership(id).is_some() {
                if let Some(engine) = of_it.engines.get_mut(&ENGINE) {
                    engine.account = turns.account(id).unwrap_or_default();
                }
                of_it.recent = turns.used_since(id, Nanos(since_ns));
            }
            let runs = self.runs(id);
            of_it.has_work = self.turns.is_busy(id);
            (of_it.queued, of_it.in_flight) = (usize::from(of_it.has_work && !runs), usize::from(runs));
            of_it.wait = self.wait(id);
        }
        CardView {
            memory: self.machine.residency.view(&self.table, self.clock),
            time,
            pieces: (self.pieces.count(Memory::Device), self.pieces.count(Memory::Host)),
            turns: turns.switches(),
            relocations: self.machine.relocations.moved(),
            declined: self.machine.relocations.declined_orders(),
            looks: self.looks(),
            unexplained_bytes: self.unexplained(),
            tenants: self.tenants.keys().filter_map(|&id| self.tenant_view(id)).collect(),
        }
    }

    /// Returns the time of the state machine's own clock, in ns.
    #[must_use]
    pub fn clock_ns(&self) -> u64 {
        self.clock
    }

    /// Returns the current memory quantum, or `None` if no quanta are in use.
    #[must_use]
    pub fn memory_turn(&self) -> Option<&vram::Turn> {
        self.machine.residency.turn()
    }

    fn tenant_view(&self, id: TenantId) -> Option<TenantView> {
        let tenant = self.tenants.get(&id)?;
        let sessions = self.sessions.values().filter(|session| session.tenant == Some(id));
        Some(TenantView {
            id,
            spec: tenant.spec.clone(),
            programs: sessions.map(|session| (session.pid, session.program.clone())).collect(),
            busy_ns: tenant.busy_ns,
            copy_ns: tenant.copy_ns,
            launches: tenant.launches,
            killed: tenant.killed,
            kill_failures: tenant.kill_failures,
            suspended: tenant.suspended,
            given_up: tenant.given_up.iter().cloned().collect(),
            overrun_ns: self.turns.turns().overrun_ns(id, self.now()),
            unaccounted: self.unaccounted(id),
            kept_bytes: tenant.past.kept,
            over_quota_bytes: tenant.past.over,
            membership: self.turns.turns().membership(id),
            gang: self.turns.gang_of(id).and_then(|gang| self.turns.view(gang)),
            not_concurrent: self.not_concurrent(id),
            server: self.server_state(id),
        })
    }
}
