//! The owner as a state machine: its inputs are messages from processes and results of actions, and its outputs are
//! actions.
//!
//! [`Core::handle`] handles one [`Event`] at a given time and appends [`Action`]s. The core does not perform I/O or
//! call the driver. The caller executes the actions and reports some of the results as events. Modules: connections
//! (`sessions`), chunks (`memory`), relocation (`relocate`), turns and quanta (`time`), work without a turn
//! (`occupation`), processes that outlived an owner (`adopt`), processes that are stopped during a turn (`stopped`),
//! memory shared between processes (`exports`), fixed memory and releases (`fixed`), moves of tenants to other cards
//! (`moves`), accounts compared with NVML and the driver (`accounts`), tenants that use the card at the same time
//! (`share_groups`) and their servers (`mps`), tenants with several cards (`gangs`), and accounts for the next owner
//! (`saved`). Timers are in [`tenancy::Deadlines`].
//!
//! For each event, the core performs at most `WORK_AT_ONCE` units of deferrable work, such as placing and releasing
//! chunks. It performs the rest during later events, and [`Core::next_wakeup`] requests the next one immediately. All
//! other work is bounded by the size of the message; see the table in `cuda-protocol`.

mod accounts;
mod adopt;
#[cfg(any(test, feature = "fuzz"))]
mod audit;
mod exports;
mod fixed;
mod gangs;
mod given_up;
mod memory;
mod moves;
mod mps;
mod occupation;
mod reclaim;
mod recording;
mod relocate;
mod saved;
mod sessions;
mod share_groups;
mod size;
mod stopped;
mod time;
mod types;
mod unmanaged;
mod view;
mod waits;

pub use given_up::{GivenUp, Reason};
pub use owner_host::Leaving;
pub use tenancy::Wait;
pub use types::{
    Action, BatchId, Event, OnStranger, OnStuck, PieceId, SessionId, ShareGroup, TenantError, TenantSpec, Unaccounted,
    UnmanagedProcess, User,
};
pub use view::{CardView, TenantView};

use cuda_protocol::{ChunkId, End, FixedKind, FromOwner};
use gang::{CardId, GangConfig, GangTurns};
use owner_host::Shares;
use relocate::Machine;
use sched::groups::{GroupConfig, GroupTurns};
use sched::turns::TurnsConfig;
use sched::{Config as TimeConfig, Nanos};
use sessions::Session;
use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use tenancy::{Deadline, Deadlines};
use vram::balance::Config as BalanceConfig;
use vram::{ChunkTable, Contents, Place, QuantaConfig, TenantId};

/// The card's pieces, with connections as their users.
type Pieces = cuda_pieces::Pieces<SessionId>;

/// Maximum clock step between two events, in ns. The clock ignores the rest of a longer gap, because the owner cannot
/// tell whether processes were late while the host did not schedule the owner.
const STEP_MOST: u64 = 100_000_000;

/// Time in ns after the last request for a guarantee during which memory is still evicted for it.
// TIMEOUT: the daemon repeats the request every 50 ms.
const PROMISE_NS: u64 = 2_000_000_000;

/// Minimum time between a move and the next pinning of memory for the stock, in ns. A move in several batches has gaps
/// of a few milliseconds, and pinning holds the driver's locks for about that time.
const RESTOCK_NS: u64 = 200_000_000;

/// Maximum units of deferrable work per event. A unit is one or two searches in an ordered map, about a microsecond.
const WORK_AT_ONCE: usize = 1024;

/// Size of the range of numbers that one owner can assign.
const OWN_NUMBERS: u64 = 1 << 40;

/// Settings of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardConfig {
    /// Card memory that tenants share, in bytes.
    pub card_bytes: u64,
    /// Size of pinned host memory for chunks that do not fit on the card, in bytes.
    pub host_bytes: u64,
    /// Size of a chunk in bytes: a power of two from 2 to 64 MiB.
    pub chunk_bytes: u64,
    /// Size of the host memory that is pinned in advance, in bytes.
    pub host_ready_bytes: u64,
    /// UUID of the card, from `cuDeviceGetUuid`.
    pub uuid: [u8; 16],
    /// UUIDs of the cards to which programs could move, from `cuDeviceGetUuid`.
    pub others: Vec<[u8; 16]>,
    /// Settings of the balancer, which distributes memory between tenants.
    pub balance: BalanceConfig,
    /// Settings of memory quanta, for tenants whose working sets do not fit together.
    pub quanta: QuantaConfig,
    /// Settings of the scheduler.
    pub time: TimeConfig,
    /// Settings of turns.
    pub turns: TurnsConfig,
    /// Settings of share groups, whose tenants may use the card concurrently.
    pub groups: GroupConfig,
    /// Number that identifies the card to the owners of other cards.
    pub number: CardId,
    /// Limit on a tenant's work in flight while other tenants use the card, in microseconds.
    pub run_ahead_us: u32,
    /// Limit on a tenant's work in flight while a tenant of a better latency class exists, in microseconds. That
    /// tenant's work may have to wait for the work in flight.
    pub run_ahead_urgent_us: u32,
    /// Idle time after which a turn ends while other tenants use the card, in microseconds. Also the advance notice to
    /// the next tenant before the last work of an ending turn completes.
    pub idle_us: u32,
    /// Time limit for a process to reply to an order about its memory, in ns.
    pub patience_ns: u64,
    /// Action on processes that use the card without the owner.
    pub on_stranger: OnStranger,
    /// Maximum number of connections of one tenant.
    pub connections_most: usize,
    /// Amount in bytes by which the values from NVML and the driver may exceed the account of a process or of the card.
    /// Covers modules and the driver's own memory.
    pub margin_bytes: u64,
}

impl CardConfig {
    /// Creates the settings of a card that shares `card_bytes` bytes, with defaults for all other settings.
    #[must_use]
    pub fn new(card_bytes: u64) -> Self {
        Self {
            card_bytes,
            host_bytes: card_bytes,
            chunk_bytes: 16 << 20,
            host_ready_bytes: 256 << 20,
            uuid: [0; 16],
            others: Vec::new(),
            balance: BalanceConfig::default(),
            // Copies take one eightieth of a quantum, and interrupt programs for equally long. Sharing memory in quanta
            // therefore costs at most 3 %.
            quanta: QuantaConfig { factor: 80, ..QuantaConfig::default() },
            time: sched::turns::scheduler_defaults(),
            turns: TurnsConfig::default(),
            groups: GroupConfig::default(),
            number: CardId(0),
            run_ahead_us: 4000,
            run_ahead_urgent_us: 750,
            idle_us: 300,
            patience_ns: 10_000_000_000,
            on_stranger: OnStranger::Report,
            connections_most: 1024,
            margin_bytes: 128 << 20,
        }
    }
}

/// Reason why a card cannot be set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetupError {
    /// The memory settings are invalid.
    #[error(transparent)]
    Memory(#[from] vram::Error),
    /// The time settings are invalid.
    #[error(transparent)]
    Time(#[from] sched::ConfigError),
}

/// Memory that a tenant has at one index.
#[derive(Debug)]
enum Body {
    /// A chunk that the tenant's processes use.
    Chunk {
        piece: PieceId,
        /// A number that distinguishes the chunk from later chunks at the same index.
        number: u64,
        /// Processes that use the chunk, each with its own number for it.
        users: BTreeSet<(SessionId, ChunkId)>,
        /// Set if the chunk must not move.
        pinned: bool,
    },
    /// Memory of a chunk's size that the driver allocated for the tenant's processes, and that cannot move.
    Fixed,
}

impl Body {
    /// Creates a chunk with one user.
    fn for_user(piece: PieceId, user: (SessionId, ChunkId)) -> Self {
        Self::Chunk { piece, number: user.1.0, users: BTreeSet::from([user]), pinned: false }
    }

    /// Returns true if the memory never moves.
    fn is_fixed(&self) -> bool {
        matches!(self, Self::Fixed | Self::Chunk { pinned: true, .. })
    }

    /// Returns the chunk's user if the chunk has exactly one.
    fn only_user(&self) -> Option<(SessionId, ChunkId)> {
        let Self::Chunk { users, .. } = self else { return None };
        users.first().copied().filter(|_| users.len() == 1)
    }
}

/// State of a tenant.
#[derive(Debug)]
struct Tenant {
    spec: TenantSpec,
    bodies: BTreeMap<u32, Body>,
    /// Unused indices.
    indices: tenancy::Indices,
    /// Number of chunks that never move: fixed memory, and exported chunks.
    fixed: u32,
    /// Total number of users of the tenant's chunks, where each user is a process and its number for the chunk.
    users: u64,
    /// Number of requested chunks that have not been placed yet.
    wanted: u64,
    /// Number of pieces that are being allocated for requests.
    making: u32,
    busy_ns: u64,
    copy_ns: u64,
    launches: u64,
    killed: u64,
    kill_failures: u64,
    suspended: u64,
    /// The tenant's most recently abandoned programs.
    given_up: VecDeque<GivenUp>,
    /// Set if the tenant is to be removed once its connections are closed and its memory is released.
    retired: bool,
    /// Reason why the last program could not move to or from this card.
    obstacle: Option<String>,
    past: accounts::Past,
}

/// The state machine of a card.
#[derive(Debug)]
pub struct Core {
    config: CardConfig,
    /// Size of the host memory for chunks and windows, in bytes; at most the size in `config`.
    host_bytes: u64,
    table: ChunkTable,
    /// Decides which memory is on the card, and moves the chunks of processes.
    machine: Machine,
    turns: GangTurns,
    pieces: Pieces,
    tenants: BTreeMap<TenantId, Tenant>,
    sessions: BTreeMap<SessionId, Session>,
    shares: Shares,
    /// Pieces that are being allocated for requests, each with its process and tenant.
    making: BTreeMap<PieceId, (SessionId, TenantId)>,
    /// Processes with requests that wait until fewer pieces are being allocated for their tenant.
    hungry: BTreeSet<(TenantId, SessionId)>,
    /// Processes with requests (`unserved`) or fixed memory (`uncounted`) that must be handled in a later event.
    unserved: BTreeSet<SessionId>,
    uncounted: BTreeSet<SessionId>,
    /// Process whose requests were last retried.
    retried: SessionId,
    releases: fixed::Releases,
    /// Pieces being mapped that processes of a previous owner have reported.
    adopters: BTreeMap<PieceId, (SessionId, ChunkId)>,
    /// Units of work performed for the current event.
    spent: usize,
    steps: u64,
    /// Chunks whose piece is not in the memory assigned to them. The value is true while the chunk is being moved.
    misplaced: BTreeMap<(TenantId, u32), bool>,
    /// Number of card chunks denied since the last plan, keyed by tenant.
    unmet: BTreeMap<TenantId, u32>,
    deadlines: Deadlines<SessionId>,
    probes: owner_host::Probes,
    gang_quanta: owner_host::GangQuanta,
    /// Set if a plan is due.
    needs_plan: bool,
    strangers: unmanaged::UnmanagedProcesses,
    accounts: accounts::Accounts,
    occupations: owner_host::Occupations,
    /// Processes that occupied the card at the last poll.
    occupants: BTreeSet<u32>,
    /// Connections with an overrunning turn, if their process had no work on the card at the last poll.
    idle_overruns: BTreeSet<SessionId>,
    /// Number of chunks that must become spare before a rejected guarantee can be granted. Set while memory is freed
    /// for it.
    promise: Option<u32>,
    actions: Vec<Action>,
    /// The machine's clock and the time of the last event, in ns.
    clock: u64,
    last_event_at: Option<u64>,
    next: u64,
    first_number: u64,
    /// Secret keys that tokens are derived from.
    token_keys: [RandomState; 2],
    next_tenant: u32,
    /// Tenants of a previous owner that were not added yet, keyed by name.
    unclaimed: BTreeMap<String, TenantId>,
    /// Processes of a previous owner that have not reconnected yet.
    expected: BTreeSet<u32>,
    /// Abandoned processes that have not exited, each with the name of its tenant.
    given_up: BTreeMap<u32, String>,
    /// Processes that have moved to another card and that NVML still lists here.
    moved: BTreeSet<u32>,
    incidents: given_up::Incidents,
    servers: mps::Servers,
}

impl Core {
    /// Creates a card without tenants. `seed` keeps its numbers distinct from those of other owners.
    ///
    /// # Errors
    /// Returns an error if a setting is out of bounds.
    pub fn new(config: CardConfig, seed: u32) -> Result<Self, SetupError> {
        let number = config.number;
        let mut table = ChunkTable::new(config.card_bytes, config.chunk_bytes, Contents::Zeroed)?;
        let slots = u32::try_from(config.host_bytes / config.chunk_bytes).unwrap_or(u32::MAX);
        table.set_host_budget(slots);
        let ready = u32::try_from(config.host_ready_bytes / config.chunk_bytes).unwrap_or(u32::MAX).min(slots);
        let turns = GroupTurns::new(config.time, config.turns, config.groups, Nanos(0))?;
        let turns = GangTurns::new(config.number, turns, GangConfig::default());
        let mut core = Self {
            table,
            turns,
            pieces: Pieces::new(slots.saturating_add(ready), ready),
            tenants: BTreeMap::new(),
            sessions: BTreeMap::new(),
            machine: relocate::machine(&config),
            host_bytes: config.host_bytes,
            config,
            shares: Shares::default(),
            making: BTreeMap::new(),
            hungry: BTreeSet::new(),
            unserved: BTreeSet::new(),
            uncounted: BTreeSet::new(),
            retried: SessionId(0),
            releases: fixed::Releases::new(),
            adopters: BTreeMap::new(),
            spent: 0,
            steps: 0,
            misplaced: BTreeMap::new(),
            unmet: BTreeMap::new(),
            deadlines: Deadlines::default(),
            probes: owner_host::Probes::default(),
            gang_quanta: owner_host::GangQuanta::new(number),
            needs_plan: false,
            strangers: unmanaged::UnmanagedProcesses::default(),
            accounts: accounts::Accounts::default(),
            occupations: owner_host::Occupations::default(),
            occupants: BTreeSet::new(),
            idle_overruns: BTreeSet::new(),
            promise: None,
            actions: Vec::new(),
            clock: 0,
            last_event_at: None,
            next: u64::from(seed) << 32,
            token_keys: [RandomState::new(), RandomState::new()],
            first_number: u64::from(seed) << 32,
            next_tenant: 1,
            unclaimed: BTreeMap::new(),
            expected: BTreeSet::new(),
            given_up: BTreeMap::new(),
            moved: BTreeSet::new(),
            incidents: given_up::Incidents::default(),
            servers: mps::Servers::default(),
        };
        core.pieces.refill(&mut core.actions);
        Ok(core)
    }

    /// Returns the card's settings.
    #[must_use]
    pub fn config(&self) -> &CardConfig {
        &self.config
    }

    #[cfg(test)]
    fn set_margin(&mut self, bytes: u64) {
        self.config.margin_bytes = bytes;
    }

    #[cfg(test)]
    fn set_on_stranger(&mut self, treatment: OnStranger) {
        self.config.on_stranger = treatment;
    }

    /// Assigns a number to a piece received in a message.
    pub fn piece_number(&mut self) -> PieceId {
        self.pieces.number()
    }

    /// Handles one event at `now`, in ns of a monotonic clock. [`Self::take_actions`] returns the actions.
    pub fn handle(&mut self, now: u64, event: Event) {
        let step = now.saturating_sub(self.last_event_at.unwrap_or(now)).min(STEP_MOST);
        (self.clock, self.last_event_at) = (self.clock + step, Some(now));
        self.spent = 0;
        match event {
            Event::Connected { session, pid, uid, tenant } => self.connected(session, pid, uid, tenant),
            Event::Said { session, message, pieces } => self.said(session, message, pieces),
            Event::Gone { session } => self.gone(session),
            Event::Made { piece, memory } => self.made(piece, memory),
            Event::Copied { batch, done, ns } => self.copied(batch, done, ns),
            Event::Suspended { session, done } => self.suspended(session, done),
            Event::Fetched { session, done } => self.fetched(session, done),
            Event::Signalled { tenant, done } => self.signalled(tenant, done),
            Event::Looked { session, stopped, is_overdue } => self.looked_at(session, stopped, is_overdue),
            Event::Ended { pid } => drop(self.given_up.remove(&pid)),
            Event::Users { users, own } => {
                self.compare(&users, own);
                self.occupied(&users);
                self.look_at_idle_overruns(&users);
                self.users(users);
            }
            Event::Blind => self.blind(),
            Event::InUseForNobody(bytes) => self.in_use_for_nobody(bytes),
            Event::Missing { tenant, sure, bytes } => self.missing(tenant, sure, bytes),
            Event::Mps { group, report } => self.server_changed(&group, report),
            Event::Link(news) => self.link_changed(news),
            Event::Tick => self.tick(),
        }
        self.follow_up();
    }

    /// Adds to the units of work performed.
    fn work(&mut self, units: usize) {
        self.spent += units;
        self.steps += units as u64;
    }

    /// Returns true if this event may perform more deferrable work.
    fn may_work(&self) -> bool {
        self.spent < WORK_AT_ONCE
    }

    /// Returns the total units of work performed so far, for bounding each tenant's share of the owner's time.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns the number assigned last.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn last_number(&self) -> u64 {
        self.next
    }

    /// Returns true if deferred work remains.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn is_working(&self) -> bool {
        self.has_work()
    }

    /// Returns the numbers that this owner has not assigned yet. A reconnecting program may present numbers that were
    /// assigned earlier.
    fn unused_numbers(&self) -> std::ops::Range<u64> {
        self.next.saturating_add(1)..self.first_number.saturating_add(OWN_NUMBERS)
    }

    /// Removes and returns the actions added since the last call, in order.
    pub fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// Returns the time in ns until the next [`Event::Tick`], unless another event occurs first.
    #[must_use]
    pub fn next_wakeup(&self) -> Option<u64> {
        let turns = self.turns.next_wakeup().map(|at| at.0.saturating_sub(self.clock));
        let interval_ns = self.machine.residency.balancer().config().return_interval_ns;
        let memory = (!self.misplaced.is_empty()).then_some(interval_ns);
        let memory = memory.or_else(|| self.machine.next_round_ns(&self.table));
        let work = self.has_work().then_some(0);
        let deadline = self.deadlines.next(self.clock);
        let soonest = turns.into_iter().chain(memory).chain(deadline).chain(work).min();
        // Wake at least every `STEP_MOST`, because the clock ignores the rest of a longer gap.
        soonest.map(|ns| ns.clamp(50_000, STEP_MOST))
    }

    /// Adds a tenant.
    ///
    /// # Errors
    /// Returns an error, and changes nothing, if the name is already in use or the limits cannot be met.
    pub fn add_tenant(&mut self, spec: TenantSpec) -> Result<TenantId, TenantError> {
        if self.tenants.values().any(|tenant| tenant.spec.name == spec.name) {
            return Err(TenantError::Exists(spec.name));
        }
        spec.time.check()?;
        self.check_gang(&spec)?;
        let id = self.unclaimed.get(&spec.name).copied().unwrap_or(vram::TenantId(self.next_tenant));
        self.check_windows(id.0, spec.window_bytes)?;
        self.table.create_vm(id, spec.memory_bytes, spec.limits)?;
        self.unclaimed.remove(&spec.name);
        self.next_tenant = self.next_tenant.max(id.0 + 1);
        let (now, time) = (Nanos(self.clock), spec.time);
        self.turns.with_turns(now, |turns| turns.add(id, time, now));
        let (bodies, indices) = Default::default();
        let tenant = Tenant {
            spec,
            bodies,
            indices,
            fixed: 0,
            users: 0,
            wanted: 0,
            making: 0,
            busy_ns: 0,
            copy_ns: 0,
            launches: 0,
            killed: 0,
            kill_failures: 0,
            suspended: 0,
            given_up: VecDeque::new(),
            retired: false,
            obstacle: None,
            past: accounts::Past::default(),
        };
        self.tenants.insert(id, tenant);
        self.renew_host_budget();
        self.renew_share_group(id);
        self.join_gang(id);
        Ok(id)
    }

    /// Removes a tenant as soon as its connections are closed. If `kills` is set, its programs are killed immediately.
    /// Otherwise, they only lose their connections. Returns the tenant's processes.
    ///
    /// # Errors
    /// Returns an error if the tenant does not exist.
    pub fn retire_tenant(&mut self, id: TenantId, kills: bool) -> Result<Vec<u32>, TenantError> {
        self.tenants.get_mut(&id).ok_or(TenantError::Unknown(id))?.retired = true;
        self.renew_servers();
        let sessions: Vec<SessionId> = self.sessions_of(id).collect();
        let pids =
            sessions.iter().filter_map(|session| self.sessions.get(session)).map(|session| session.pid).collect();
        for session in sessions {
            if kills {
                self.give_up(session, Reason::Removed);
            } else if !self.end_moved(session) {
                self.end(session, End::Evicted);
            }
        }
        self.follow_up();
        Ok(pids)
    }

    /// Changes the rules for sharing the card with immediate effect. Host memory stays limited to its size at startup.
    ///
    /// # Errors
    /// Returns an error, and changes nothing, if a setting of the scheduler is out of bounds.
    pub fn tune(
        &mut self,
        time: TimeConfig,
        balance: BalanceConfig,
        quanta: QuantaConfig,
        host_bytes: u64,
    ) -> Result<(), sched::ConfigError> {
        let (now, lengths) = (Nanos(self.clock), self.config.turns);
        self.turns.with_turns(now, |turns| turns.configure(time, lengths, now))?;
        self.host_bytes = host_bytes.min(self.config.host_bytes);
        self.renew_host_budget();
        self.machine.residency.configure(balance, quanta);
        (self.config.time, self.config.balance, self.config.quanta) = (time, balance, quanta);
        self.renew_terms();
        self.needs_plan = true;
        self.follow_up();
        Ok(())
    }

    /// Releases a tenant from quarantine and clears its strikes.
    pub fn release(&mut self, id: TenantId) {
        let now = Nanos(self.clock);
        self.turns.with_turns(now, |turns| turns.release(id, now));
        self.follow_up();
    }

    /// Removes a tenant that has no programs.
    ///
    /// # Errors
    /// Returns an error if the tenant has programs or does not exist.
    pub fn remove_tenant(&mut self, id: TenantId) -> Result<(), TenantError> {
        let tenant = self.tenants.get(&id).ok_or(TenantError::Unknown(id))?;
        let sessions = self.sessions_of(id).count();
        if sessions > 0 || self.releases_of(id) {
            return Err(TenantError::Busy { name: tenant.spec.name.clone(), sessions });
        }
        self.forget_tenant(id);
        self.follow_up();
        Ok(())
    }

    /// Frees memory for a rejected guarantee during the next `PROMISE_NS`. Returns false if `refused` is another error,
    /// or if freeing memory would not help.
    pub fn make_room(&mut self, refused: &TenantError) -> bool {
        let TenantError::Memory(vram::Error::Promise { wanted, now, left, .. }) = *refused else { return false };
        if wanted > left {
            return false;
        }
        self.promise = Some(self.table.spare().saturating_add(wanted.saturating_sub(now)));
        self.deadlines.set(Deadline::Guarantee, self.clock + PROMISE_NS);
        self.needs_plan = true;
        self.follow_up();
        true
    }

    /// Stops freeing memory, because the guarantee was granted or is no longer requested.
    pub fn promised(&mut self) {
        self.promise = None;
    }

    /// Changes a tenant's limits with immediate effect. The tenant's name and user do not change. A tenant that uses
    /// more than a reduced memory size keeps its memory, but gets no more.
    ///
    /// # Errors
    /// Returns an error, and changes nothing, if the limits cannot be met.
    pub fn change_tenant(&mut self, id: TenantId, spec: &TenantSpec) -> Result<(), TenantError> {
        spec.time.check()?;
        self.check_windows(id.0, spec.window_bytes)?;
        self.resize(id, spec)?;
        let tenant = self.tenants.get_mut(&id).ok_or(TenantError::Unknown(id))?;
        let (name, uid) = (std::mem::take(&mut tenant.spec.name), tenant.spec.uid);
        tenant.spec = TenantSpec { name, uid, ..spec.clone() };
        self.renew_host_budget();
        self.renew_share_group(id);
        let now = self.now();
        if self.turns.turns().params(id) != Some(&spec.time) {
            self.turns.with_turns(now, |turns| turns.change(id, spec.time, now));
        }
        self.carry_out_changes();
        self.renew_terms();
        self.needs_plan = true;
        self.follow_up();
        Ok(())
    }

    /// Returns the abandoned processes of a tenant with this name that are still running, because they cannot be killed
    /// or have not exited yet.
    #[must_use]
    pub fn lingering(&self, name: &str) -> Vec<u32> {
        self.given_up.iter().filter(|(_, tenant)| *tenant == name).map(|(&pid, _)| pid).collect()
    }

    /// Returns the tenant with the given name.
    #[must_use]
    pub fn tenant(&self, name: &str) -> Option<TenantId> {
        self.tenants.iter().find(|(_, tenant)| tenant.spec.name == name).map(|(&id, _)| id)
    }

    /// Returns the operator's settings for a tenant.
    #[must_use]
    pub fn spec(&self, id: TenantId) -> Option<&TenantSpec> {
        self.tenants.get(&id).map(|tenant| &tenant.spec)
    }

    /// Performs the work that follows from an event, up to the work limit.
    fn follow_up(&mut self) {
        self.expire();
        self.go_on_working();
        self.take_retired_away();
        self.scrub();
        self.carry_out_orders();
        if std::mem::take(&mut self.needs_plan) {
            self.retry_queued();
            self.balance();
            self.carry_out_orders();
        }
        // A preparation does not wait until no memory is moving, because other tenants' moves may never pause.
        self.pieces.continue_preparing(&mut self.actions);
        if !self.machine.relocations.is_idle() {
            self.deadlines.set(Deadline::Restock, self.clock + RESTOCK_NS);
        } else {
            // Pinning host memory holds the driver's locks for milliseconds, so it must wait until no memory is moving.
            if self.restocks_in() == 0 {
                self.pieces.refill(&mut self.actions);
            }
            // Unpinning takes half a millisecond per piece.
            for session in self.pieces.parked_for() {
                if self.sessions.get(&session).is_none_or(|session| session.stuck) {
                    self.pieces.abandon(session, &mut self.actions);
                }
            }
        }
    }

    /// Performs the actions of the deadlines that have passed.
    fn expire(&mut self) {
        for deadline in self.deadlines.take_passed(self.clock) {
            match deadline {
                Deadline::Reconnection => self.end_reconnection(),
                Deadline::Reclaims => self.needs_plan = true,
                Deadline::SecondLimit(tenant) => self.overdue(tenant),
                Deadline::Departure(tenant) => self.end_forgotten_move(tenant),
                Deadline::Report(session) => self.end_report(session),
                Deadline::Suspension(session) => self.end_suspension(session),
                Deadline::Accounts => self.forget_unclaimed(),
                Deadline::Guarantee | Deadline::EvictionWait | Deadline::Restock => {}
            }
        }
    }

    /// Returns the time until memory may be pinned for the stock, in ns.
    fn restocks_in(&self) -> u64 {
        self.deadlines.remaining(Deadline::Restock, self.clock)
    }

    fn take_retired_away(&mut self) {
        let retired = self.tenants.iter().filter(|(_, tenant)| tenant.retired).map(|(&id, _)| id);
        let ended = |id: &TenantId| self.sessions_of(*id).next().is_none() && !self.releases_of(*id);
        let gone: Vec<TenantId> = retired.filter(ended).collect();
        for id in gone {
            self.forget_tenant(id);
            self.needs_plan = true;
        }
    }

    fn forget_tenant(&mut self, id: TenantId) {
        let now = Nanos(self.clock);
        self.turns.gang_of(id).into_iter().for_each(|gang| self.turns.leave(gang, now));
        self.turns.with_turns(now, |turns| turns.remove(id, now));
        let _ = self.table.destroy_vm(id);
        self.machine.residency.forget(id);
        self.tenants.remove(&id);
        self.renew_host_budget();
        self.renew_servers();
        self.shares.forget(id);
        self.deadlines.forget_tenant(id);
        self.probes.forget(id);
        self.gang_quanta.leave(id);
        self.pieces.end_preparation(id);
        self.pieces.trim_stock(&mut self.actions);
    }

    fn sessions_of(&self, tenant: TenantId) -> impl Iterator<Item = SessionId> + '_ {
        let of_it = move |(_, session): &(&SessionId, &Session)| session.tenant == Some(tenant);
        self.sessions.iter().filter(of_it).map(|(&id, _)| id)
    }

    fn send(&mut self, session: SessionId, message: FromOwner) {
        self.actions.push(Action::Send { session, message, pieces: Vec::new() });
    }

    fn now(&self) -> Nanos {
        Nanos(self.clock)
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

/// Returns true if this kind of fixed memory is on the card.
fn on_card(kind: FixedKind) -> bool {
    !matches!(kind, FixedKind::Host)
}

fn memory_of(place: Place) -> owner_driver::Memory {
    match place {
        Place::Card(_) => owner_driver::Memory::Device,
        Place::Host(_) => owner_driver::Memory::Host,
    }
}

fn said_place(memory: owner_driver::Memory) -> cuda_protocol::Place {
    match memory {
        owner_driver::Memory::Device => cuda_protocol::Place::Device,
        owner_driver::Memory::Host => cuda_protocol::Place::Host,
    }
}

#[cfg(test)]
mod tests;
