//! Views of a card and its tenants.

use super::{Core, GivenUp, TenantSpec, Unaccounted, Wait};
use owner_driver::Memory;
use sched::groups::Membership;
use sched::{Account, Engine, Nanos, Quarantine};
use std::collections::BTreeMap;
use vram::balance::Entitlement;
use vram::{Summary, TenantId, VmSummary};

/// The engine that turns are accounted on.
const ENGINE: Engine = Engine::Compute;

/// The present state of a tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantView {
    /// Number of the tenant.
    pub id: TenantId,
    /// Settings by the operator.
    pub spec: TenantSpec,
    /// The tenant's programs: process and name.
    pub programs: Vec<(u32, String)>,
    /// The tenant's memory, in chunks.
    pub memory: VmSummary,
    /// Card time that was charged to it, in ns.
    pub charged_ns: u64,
    /// Part of its turns in which its work was in flight, according to its own events, in ns.
    pub busy_ns: u64,
    /// Part of `busy_ns` in which only copies were in flight, in ns.
    pub copy_ns: u64,
    /// Number of counted submissions. A lone tenant's submissions are not counted.
    pub launches: u64,
    /// Set if the tenant has the turn.
    pub runs: bool,
    /// 99th percentile of its waits for turns, in ns.
    pub wait_p99_ns: u64,
    /// Reason for which it waits now.
    pub waits_for: Option<Wait>,
    /// Total time that the tenant has waited for its memory quanta, in ns.
    pub quantum_wait_ns: u64,
    /// Number of its programs that were killed because they did not answer.
    pub killed: u64,
    /// Number of its programs that could not be killed: they run without a connection, turns and accounted memory.
    pub kill_failures: u64,
    /// Number of its programs that were suspended because they did not answer.
    pub suspended: u64,
    /// The tenant's last programs that were given up, oldest first.
    pub given_up: Vec<GivenUp>,
    /// Time for which its turn has overrun, in ns.
    pub overrun_ns: u64,
    /// The tenant's processes with memory of the card beyond its account.
    pub unaccounted: Vec<Unaccounted>,
    /// Number of bytes of the card that the tenant released and that are still in use.
    pub kept_bytes: u64,
    /// Total of this memory beyond the tenant's limits, in bytes.
    pub over_quota_bytes: u64,
    /// Number of turns that exceeded their limit, and whether the tenant is quarantined.
    pub strikes: (u32, bool),
    /// State of the tenant within its group.
    pub membership: Option<Membership>,
    /// Programs of a group's member that cannot run at the same time as other members' programs: process and name.
    pub not_concurrent: Vec<(u32, String)>,
}

/// The present state of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardView {
    /// The card's memory, in chunks.
    pub memory: Summary,
    /// Number of pieces that exist on the card, and in host memory.
    pub pieces: (usize, usize),
    /// Total duration of turns, in ns.
    pub turns_ns: u64,
    /// Number of granted turns.
    pub turns: u64,
    /// Number of moved chunks.
    pub relocations: u64,
    /// Number of orders that processes declined.
    pub declined: u64,
    /// Number of polls of NVML and the driver.
    pub looks: u64,
    /// Number of bytes in use that cannot be charged to a process or a tenant.
    pub unexplained_bytes: u64,
    /// The card's tenants.
    pub tenants: Vec<TenantView>,
}

impl Core {
    /// Returns the present state of the card.
    #[must_use]
    pub fn view(&self) -> CardView {
        CardView {
            memory: self.table.summary(),
            pieces: (self.pieces.count(Memory::Device), self.pieces.count(Memory::Host)),
            turns_ns: self.turns.scheduler().busy(ENGINE),
            turns: self.turns.switches(),
            relocations: self.relocations.moved(),
            declined: self.relocations.declined_orders(),
            looks: self.looks(),
            unexplained_bytes: self.unexplained(),
            tenants: self.tenants.keys().filter_map(|&id| self.tenant_view(id)).collect(),
        }
    }

    /// Returns the account of a tenant's turns.
    #[must_use]
    pub fn turns_account(&self, id: TenantId) -> Option<Account> {
        self.turns.account(id)
    }

    /// Returns the time charged to a tenant in each interval that begins at `since_ns` or later: start and time, in ns.
    #[must_use]
    pub fn used_since(&self, id: TenantId, since_ns: u64) -> Vec<(u64, u64)> {
        self.turns.used_since(sched::TenantId(id.0), Nanos(since_ns))
    }

    /// Returns the time of the machine's own clock, in ns.
    #[must_use]
    pub fn clock_ns(&self) -> u64 {
        self.clock
    }

    /// Returns the memory on the card that each tenant is entitled to now, in chunks.
    #[must_use]
    pub fn entitlements(&self) -> BTreeMap<TenantId, Entitlement> {
        self.residency.balancer().entitlements(&self.table, self.clock)
    }

    /// Returns the holder of the card's memory quantum, while tenants take turns.
    #[must_use]
    pub fn memory_turn(&self) -> Option<&vram::Turn> {
        self.residency.turn()
    }

    fn tenant_view(&self, id: TenantId) -> Option<TenantView> {
        let tenant = self.tenants.get(&id)?;
        let sessions = self.sessions.values().filter(|session| session.tenant == Some(id));
        let account = self.turns.account(id);
        Some(TenantView {
            id,
            spec: tenant.spec.clone(),
            programs: sessions.map(|session| (session.pid, session.program.clone())).collect(),
            memory: self.table.vms().find(|(vm, _)| *vm == id).map(|(_, account)| account).unwrap_or_default(),
            charged_ns: account.as_ref().map_or(0, |account| account.used),
            busy_ns: tenant.busy_ns,
            copy_ns: tenant.copy_ns,
            launches: tenant.launches,
            runs: self.turns.has_turn(id),
            wait_p99_ns: account.as_ref().map_or(0, |account| account.waits.quantile(990)),
            waits_for: self.wait(id),
            quantum_wait_ns: self.residency.held_ns(id, self.clock),
            killed: tenant.killed,
            kill_failures: tenant.kill_failures,
            suspended: tenant.suspended,
            given_up: tenant.given_up.iter().cloned().collect(),
            overrun_ns: self.turns.overrun_ns(id, self.now()),
            unaccounted: self.unaccounted(id),
            kept_bytes: tenant.past.kept,
            over_quota_bytes: tenant.past.over,
            membership: self.turns.membership(id),
            not_concurrent: self.not_concurrent(id),
            strikes: self
                .turns
                .scheduler()
                .strikes(sched::TenantId(id.0))
                .map_or((0, false), |(strikes, quarantine)| (strikes, quarantine != Quarantine::Free)),
        })
    }
}
