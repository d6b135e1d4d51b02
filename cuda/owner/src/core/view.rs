//! Views of a card and its tenants.

use super::{Core, TenantSpec, Unaccounted, Wait};
use crate::driver::Memory;
use sched::{Account, Engine, Nanos, Quarantine};
use vram::{Summary, TenantId, VmSummary};

/// The engine that turns are accounted on.
const ENGINE: Engine = Engine::Compute;

/// A tenant, as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantView {
    /// Its number.
    pub id: TenantId,
    /// Settings by the operator.
    pub spec: TenantSpec,
    /// Its programs: process and name.
    pub programs: Vec<(u32, String)>,
    /// Its memory, in chunks.
    pub memory: VmSummary,
    /// Time of the card that it was charged, in ns.
    pub charged_ns: u64,
    /// Part of its turns in which its work was in flight, by its own events, in ns.
    pub busy_ns: u64,
    /// Part of that in which only copies were in flight, in ns.
    pub copy_ns: u64,
    /// Submissions that were counted. While it is alone they are not counted.
    pub launches: u64,
    /// It has the turn.
    pub runs: bool,
    /// 99 of 100 turns were waited for no longer than this, in ns.
    pub wait_p99_ns: u64,
    /// Reason for which it waits now.
    pub waits_for: Option<Wait>,
    /// Time that it has waited for its memory quanta, in ns.
    pub quantum_wait_ns: u64,
    /// Programs of it that were killed since they did not answer.
    pub killed: u64,
    /// Programs of it that could not be killed: they still run without connection, turns and memory in the accounts.
    pub kill_failures: u64,
    /// Programs of it that were suspended since they did not answer.
    pub suspended: u64,
    /// Its processes with memory of the card past its account.
    pub unaccounted: Vec<Unaccounted>,
    /// Bytes of the card that it gave back and that something keeps, for as long as that does.
    pub kept_bytes: u64,
    /// Bytes of both beyond its limits.
    pub over_quota_bytes: u64,
    /// Turns beyond their limit, and whether it is quarantined.
    pub strikes: (u32, bool),
}

/// A card, as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardView {
    /// Its memory, in chunks.
    pub memory: Summary,
    /// Pieces that exist, on the card and in host memory.
    pub pieces: (usize, usize),
    /// Time for which a turn lasted, in ns.
    pub turns_ns: u64,
    /// Turns that were granted.
    pub turns: u64,
    /// Chunks that were moved.
    pub relocations: u64,
    /// Orders that processes declined.
    pub declined: u64,
    /// Number of polls of NVML and the driver.
    pub looks: u64,
    /// Bytes in use for which neither a process nor a tenant can be charged.
    pub unexplained_bytes: u64,
    /// Its tenants.
    pub tenants: Vec<TenantView>,
}

impl Core {
    /// The card as it is now.
    #[must_use]
    pub fn view(&self) -> CardView {
        CardView {
            memory: self.table.summary(),
            pieces: (self.pieces.count(Memory::Device), self.pieces.count(Memory::Host)),
            turns_ns: self.turns.scheduler().busy(ENGINE),
            turns: self.turns.switches(),
            relocations: self.relocations_done,
            declined: self.declined,
            looks: self.looks(),
            unexplained_bytes: self.unexplained(),
            tenants: self.tenants.keys().filter_map(|&id| self.tenant_view(id)).collect(),
        }
    }

    /// The account of a tenant's turns.
    #[must_use]
    pub fn turns_account(&self, id: TenantId) -> Option<&Account> {
        self.turns.account(id)
    }

    /// Returns the time charged to a tenant in each interval that begins at `since_ns` or later: begin and time, in ns.
    #[must_use]
    pub fn used_since(&self, id: TenantId, since_ns: u64) -> Vec<(u64, u64)> {
        let history = self.turns.scheduler().history(sched::TenantId(id.0));
        let samples = history.into_iter().flat_map(|history| history.since(Nanos(since_ns)));
        samples.map(|sample| (sample.from.0, sample.used[ENGINE.index()])).collect()
    }

    /// Time by the machine's own clock, in ns.
    #[must_use]
    pub fn clock_ns(&self) -> u64 {
        self.clock
    }

    /// The turn with the card's memory, while tenants take turns.
    #[must_use]
    pub fn memory_turn(&self) -> Option<&vram::Turn> {
        self.quanta.turn()
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
            charged_ns: account.map_or(0, |account| account.used),
            busy_ns: tenant.busy_ns,
            copy_ns: tenant.copy_ns,
            launches: tenant.launches,
            runs: self.turns.has_turn(id),
            wait_p99_ns: account.map_or(0, |account| account.waits.quantile(990)),
            waits_for: self.wait(id),
            quantum_wait_ns: self.quantum_wait_ns(id),
            killed: tenant.killed,
            kill_failures: tenant.kill_failures,
            suspended: tenant.suspended,
            unaccounted: self.unaccounted(id),
            kept_bytes: tenant.past.kept,
            over_quota_bytes: tenant.past.over,
            strikes: self
                .turns
                .scheduler()
                .strikes(sched::TenantId(id.0))
                .map_or((0, false), |(strikes, quarantine)| (strikes, quarantine != Quarantine::Free)),
        })
    }
}
