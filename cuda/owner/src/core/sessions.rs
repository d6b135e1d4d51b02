//! Connections of processes, from the first message to the disconnect.

use super::fixed::Fixing;
use super::given_up::Reason;
use super::reclaim::Reclaims;
use super::types::{Action, SessionId};
use super::{Core, OnStuck, PieceId};
use cuda_protocol::{
    CardInfo, ChunkId, End, FixedKind, FromOwner, FromTenant, Hello, MAX_PENDING, MAX_PROCESSES, Refusal, VERSION,
    VERSION_CROWDED, VERSION_MOVES, VERSION_OLDEST, Welcome,
};
use owner_host::{Arrival, Departure};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use tenancy::Deadline;
use vram::TenantId;

/// Maximum number of pending requests per process. Further requests are rejected. The shim keeps at most
/// [`MAX_PENDING`] requests pending.
const PENDING_MOST: usize = MAX_PENDING;

/// A pending request for chunks.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) request: u32,
    /// Number of requested chunks that have not been placed yet.
    pub(super) wanted: u32,
    /// The request's chunks: number and index of each.
    pub(super) items: Vec<(ChunkId, u32)>,
    /// Number of leading chunks that were delivered to the process. They do not move until the request is complete.
    pub(super) delivered: usize,
    /// Pieces of the request that are still being allocated.
    pub(super) missing: BTreeSet<PieceId>,
    /// Arrival time of the request, in ns.
    pub(super) since: u64,
}

impl Pending {
    /// Returns true if a chunk belongs to the request. The items are sorted by chunk number.
    pub(super) fn holds(&self, chunk: ChunkId) -> bool {
        self.items.binary_search_by_key(&chunk, |(id, _)| *id).is_ok()
    }
}

/// A connection of a process, and the state of that process.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) pid: u32,
    pub(super) uid: u32,
    /// Tenant whose socket the process connected to. The socket's permissions control access to that tenant.
    pub(super) bound: Option<TenantId>,
    /// Version of the protocol.
    pub(super) version: u16,
    pub(super) program: String,
    /// Tenant of the connection, or `None` until the first message determines it.
    pub(super) tenant: Option<TenantId>,
    pub(super) chunks: BTreeMap<ChunkId, u32>,
    pub(super) fixed: HashMap<FixedKind, u64>,
    /// Indices reserved for memory that is fixed on the card.
    pub(super) fixed_indices: Vec<u32>,
    /// The process's unanswered requests for fixed memory.
    pub(super) fixing: VecDeque<Fixing>,
    pub(super) pending: VecDeque<Pending>,
    /// Adopted chunks whose pieces are being mapped.
    pub(super) adopting: BTreeMap<ChunkId, PieceId>,
    /// Chunks that an earlier owner granted to the process.
    pub(super) adopted: BTreeSet<ChunkId>,
    /// Set while the process has more chunks from an earlier owner to report.
    pub(super) adopts: bool,
    /// Number of the turn for which the process's gate is open, or `None` while the gate is closed.
    pub(super) run: Option<u32>,
    pub(super) run_since: u64,
    /// Time during which the gate was open before `run_since` without reported use, in ns.
    pub(super) unused_ns: u64,
    /// Time in ns when the gate opened, or when an earlier turn ended after new terms had been sent.
    pub(super) opened_at: u64,
    /// Limit on work in flight, idle time and report interval last sent to the process, in microseconds.
    pub(super) told: (u32, u32, u32),
    /// Set if the process's work can run concurrently with other processes' work.
    pub(super) concurrent: bool,
    /// Set once the process has reported that it is an MPS client.
    pub(super) reported_client: bool,
    /// Set once the process has requested a turn or memory.
    pub(super) has_asked: bool,
    /// Set while a thread of the process waits at a closed gate.
    pub(super) waiting: bool,
    /// Number of the turn whose end the process announced last.
    pub(super) announced: Option<u32>,
    /// Time in ns at which the process's last turn ended, if it had no more work.
    pub(super) idle_since: Option<u64>,
    /// Set if the process paused before its current or next turn, so it probably pauses after each result.
    pub(super) pauses: bool,
    /// Number of the turn that ended without a reply, because the process is stopped. The process gets no turn until it
    /// replies.
    pub(super) stopped_in: Option<u32>,
    /// Time in ns at which the owner last checked whether this process, which delays its share group, is stopped.
    pub(super) checked_at: u64,
    pub(super) turn: u32,
    pub(super) reclaims: Reclaims,
    /// Progress of the process's move to another card.
    pub(super) departure: Departure,
    /// Set while the driver moves the process to this card. The process gets no orders in the meantime.
    pub(super) fetching: bool,
    /// Progress of the process's move to this card, if the process comes from another one.
    pub(super) arrival: Option<Arrival>,
    /// UUIDs of the cards that the process's driver sees.
    pub(super) sees: Vec<[u8; 16]>,
    /// Set if the owner has abandoned the process: the process has no turn and no memory, and its messages are ignored.
    pub(super) stuck: bool,
}

impl Session {
    /// Returns true if the process can be sent orders about its memory and its turns.
    pub(super) fn takes_orders(&self) -> bool {
        !self.stuck && !self.fetching
    }

    /// Returns true if the process's gate can open in a turn.
    pub(super) fn can_run(&self) -> bool {
        self.takes_orders() && self.stopped_in.is_none()
    }

    /// Returns true if the process has mapped a chunk. The owner assumes this once the chunk's request is complete.
    pub(super) fn has_settled(&self, chunk: ChunkId) -> bool {
        self.chunks.contains_key(&chunk) && !self.pending.iter().any(|pending| pending.holds(chunk))
    }
}

impl Core {
    /// Registers processes that a previous owner served. Other processes do not get memory until these processes have
    /// reconnected, or until `within_ns` has passed.
    pub fn expect(&mut self, pids: impl IntoIterator<Item = u32>, within_ns: u64) {
        self.expected.extend(pids);
        self.deadlines.set(Deadline::Reconnection, self.clock + within_ns);
    }

    /// Returns the IDs of the processes whose first message was accepted, for the journal.
    pub fn pids(&self) -> impl Iterator<Item = u32> + '_ {
        self.sessions.values().filter(|session| session.tenant.is_some()).map(|session| session.pid)
    }

    /// Returns the user ID and the tenant of a connection.
    #[must_use]
    pub fn user_and_tenant(&self, id: SessionId) -> Option<(u32, Option<TenantId>)> {
        self.sessions.get(&id).map(|session| (session.uid, session.tenant.or(session.bound)))
    }

    /// Returns the tenant for which a piece is being allocated, or the tenant whose program has reported the piece.
    #[must_use]
    pub fn tenant_of(&self, piece: PieceId) -> Option<TenantId> {
        let brought = || self.sessions.get(&self.adopters.get(&piece)?.0);
        self.pieces.holder(piece).or_else(|| brought()?.tenant)
    }

    /// Returns true if a process is reporting its memory from an earlier owner, or if the driver is moving it to this
    /// card.
    #[must_use]
    pub fn adopts(&self, id: SessionId) -> bool {
        let reports = |session: &Session| session.adopts || session.fetching || !session.adopting.is_empty();
        self.sessions.get(&id).is_some_and(reports)
    }

    /// Returns true if a connection's first message was accepted.
    #[must_use]
    pub fn has_greeted(&self, id: SessionId) -> bool {
        self.sessions.get(&id).is_some_and(|session| session.tenant.is_some())
    }

    /// Returns the number of tenants.
    #[must_use]
    pub fn tenant_count(&self) -> usize {
        self.tenants.len()
    }

    /// Returns true if a process has chunks on this card.
    #[must_use]
    pub fn holds_chunks(&self, id: SessionId) -> bool {
        // A process that has left reports its chunks to its new card's owner.
        self.sessions.get(&id).is_some_and(|session| !session.chunks.is_empty() && session.departure != Departure::Left)
    }

    pub(super) fn connected(&mut self, id: SessionId, pid: u32, uid: u32, bound: Option<TenantId>) {
        let session = Session {
            pid,
            uid,
            bound,
            version: VERSION_OLDEST,
            program: String::new(),
            tenant: None,
            chunks: BTreeMap::new(),
            fixed: HashMap::new(),
            fixed_indices: Vec::new(),
            fixing: VecDeque::new(),
            pending: VecDeque::new(),
            adopting: BTreeMap::new(),
            adopted: BTreeSet::new(),
            adopts: false,
            run: None,
            run_since: 0,
            unused_ns: 0,
            opened_at: 0,
            told: (0, 0, 0),
            concurrent: false,
            reported_client: false,
            has_asked: false,
            waiting: false,
            announced: None,
            idle_since: None,
            pauses: false,
            turn: 0,
            reclaims: Reclaims::default(),
            stuck: false,
            departure: Departure::Stays,
            fetching: false,
            arrival: None,
            sees: Vec::new(),
            stopped_in: None,
            checked_at: 0,
        };
        self.sessions.insert(id, session);
    }

    pub(super) fn said(&mut self, id: SessionId, message: FromTenant, pieces: Vec<PieceId>) {
        let Some(session) = self.sessions.get(&id) else { return self.drop_all(pieces) };
        if session.stuck {
            // The process has lost its memory, and does not get more.
            return self.drop_all(pieces);
        }
        let Some(tenant) = session.tenant else {
            self.drop_all(pieces);
            return match message {
                FromTenant::Hello(hello) => self.hello(id, hello),
                _ => self.end(id, End::Violation),
            };
        };
        let crowded = session.pending.len() + session.fixing.len() >= PENDING_MOST;
        match message {
            FromTenant::Hello(_) => self.end(id, End::Violation),
            FromTenant::Adopt { chunks, more } => return self.adopt(id, tenant, &chunks, more, pieces),
            FromTenant::Allocate { request, .. } | FromTenant::Fix { request, .. } if crowded => {
                let reason = if session.version >= VERSION_CROWDED { Refusal::Crowded } else { Refusal::Failed };
                self.send(id, FromOwner::Refused { request, reason });
            }
            FromTenant::Allocate { request, card, chunks } => self.allocate(id, tenant, request, card, chunks),
            FromTenant::Free { chunks } => self.free(id, tenant, &chunks),
            FromTenant::Fix { request, card, kind, bytes } => self.fix(id, tenant, request, (card, kind, bytes)),
            FromTenant::Unfix { card: _, kind, bytes } => self.unfix(id, tenant, kind, bytes),
            FromTenant::AskMemory { request, card: _ } => self.ask_memory(id, tenant, request),
            FromTenant::AskProcesses { request, card: _ } => {
                let sessions = self.sessions.values().filter(|session| session.tenant == Some(tenant));
                let pids = sessions.map(|session| session.pid).take(MAX_PROCESSES).collect();
                self.send(id, FromOwner::Processes { request, pids });
            }
            FromTenant::Quiet { order } => self.quiet(id, order),
            FromTenant::Busy { order } => self.busy(id, order),
            FromTenant::Redirected { order, moved } => self.redirected(id, order, moved),
            FromTenant::Waiting { .. } => self.waiting(id, tenant),
            FromTenant::Stopped { turn, usage, waiting, .. } => self.stopped(id, tenant, turn, usage, waiting),
            FromTenant::Ending { turn, in_us, .. } => self.ending(id, tenant, turn, in_us),
            FromTenant::Used { usage, .. } => self.reports(id, tenant, usage),
            FromTenant::Concurrent { .. } => self.reports_client(id, tenant),
            FromTenant::Export { request, chunks } => self.export(id, tenant, request, &chunks),
            FromTenant::Open { request, share } => self.open(id, tenant, request, share),
            FromTenant::Reclaimed { order } => self.reclaimed(id, order),
            FromTenant::Left { obstacle } => self.has_left(id, tenant, obstacle),
            FromTenant::Elsewhere { uuid } => self.elsewhere(id, uuid),
            FromTenant::Sees { uuids } => {
                self.sessions.get_mut(&id).into_iter().for_each(|session| session.sees.clone_from(&uuids));
            }
            FromTenant::Unusable { code } => self.unusable(id, code),
            FromTenant::Goodbye(_) => self.actions.push(Action::Close { session: id }),
        }
        self.drop_all(pieces);
    }

    /// Closes a connection and reports the reason to the process.
    pub(super) fn end(&mut self, session: SessionId, why: End) {
        self.send(session, FromOwner::Goodbye(why));
        self.actions.push(Action::Close { session });
    }

    fn hello(&mut self, id: SessionId, hello: Hello) {
        if hello.version < VERSION_OLDEST {
            return self.end(id, End::Version);
        }
        let Some(session) = self.sessions.get(&id) else { return };
        let (uid, pid, bound) = (session.uid, session.pid, session.bound);
        if self.given_up.contains_key(&pid) || self.sessions.values().any(|other| other.stuck && other.pid == pid) {
            tracing::warn!(pid, "refusing a program that was given up and connects again");
            return self.end(id, End::Denied);
        }
        let by_user = |tenant: &super::Tenant| uid == 0 || tenant.spec.uid.is_none_or(|allowed| allowed == uid);
        let own = |id: &TenantId, tenant: &super::Tenant| bound.map_or_else(|| by_user(tenant), |own| own == *id);
        let allowed = |id: &TenantId, tenant: &super::Tenant| !tenant.retired && own(id, tenant);
        let asked = |tenant: &super::Tenant| hello.tenant.is_empty() || tenant.spec.name == hello.tenant;
        let found = self.tenants.iter().find(|(id, tenant)| asked(tenant) && allowed(id, tenant));
        let Some((&tenant, known)) = found else { return self.end(id, End::Denied) };
        if self.deadlines.is_set(Deadline::Departure(tenant)) {
            return self.end(id, if hello.version >= VERSION_MOVES { End::Moved } else { End::Leaving });
        }
        if self.sessions_of(tenant).count() >= self.config.connections_most {
            return self.end(id, if hello.version >= VERSION_CROWDED { End::Crowded } else { End::Denied });
        }
        let card = CardInfo { uuid: self.config.uuid, total_bytes: known.spec.memory_bytes };
        let version = VERSION.min(hello.version);
        let welcome = Welcome { version, tenant: tenant.0, chunk_bytes: self.config.chunk_bytes, cards: vec![card] };
        if let Some(session) = self.sessions.get_mut(&id) {
            session.tenant = Some(tenant);
            session.version = version;
            session.program = hello.program.replace(char::is_control, "\u{fffd}");
            session.adopts = hello.adopts;
            if hello.adopts {
                self.deadlines.set(Deadline::Report(id), self.clock + self.config.patience_ns);
            } else {
                self.expected.remove(&pid);
            }
        }
        self.renew_clients_of(tenant);
        let others = self.others_for(tenant, version);
        self.send(
            id,
            if others.is_empty() { FromOwner::Welcome(welcome) } else { FromOwner::WelcomeAmong { welcome, others } },
        );
        self.renew_terms();
    }

    /// Handles a closed connection: releases all resources of its process.
    pub(super) fn gone(&mut self, id: SessionId) {
        let Some(tenant) = self.sessions.get(&id).map(|session| session.tenant) else { return };
        self.give_up_memory(id, tenant);
        let Some(session) = self.sessions.remove(&id) else { return };
        self.deadlines.forget_user(id);
        self.machine.relocations.forget(id);
        self.expected.remove(&session.pid);
        let Some(tenant) = tenant else { return };
        self.client_gone(tenant, session.pid);
        self.renew_concurrency(tenant);
        if session.run.is_some() || session.waiting {
            self.look_whether_ended(tenant);
        }
        self.renew_terms();
        self.needs_plan = true;
    }

    /// Releases a process's memory, and cancels its requests for memory.
    fn give_up_memory(&mut self, id: SessionId, tenant: Option<TenantId>) {
        self.abandon_relocation(id);
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let chunks = std::mem::take(&mut session.chunks);
        let pending = std::mem::take(&mut session.pending);
        let fixed = std::mem::take(&mut session.fixed_indices);
        let adopting = std::mem::take(&mut session.adopting);
        let counted = std::mem::take(&mut session.fixed);
        session.fixing.clear();
        for piece in adopting.into_values() {
            self.adopters.remove(&piece);
            self.actions.push(Action::Drop { piece });
        }
        let Some(tenant) = tenant else { return };
        counted.into_iter().for_each(|(kind, bytes)| self.gave_back(tenant, kind, bytes));
        self.hungry.remove(&(tenant, id));
        for pending in pending {
            self.withdraw(id, tenant, pending);
        }
        self.release_later(id, tenant, chunks.into_iter().collect(), fixed);
        self.needs_plan = true;
    }

    /// Revokes the turn and the memory of an unresponsive process, and suspends or kills it.
    pub(super) fn stuck(&mut self, id: SessionId, reason: Reason) {
        let Some(session) = self.sessions.get(&id).filter(|session| !session.stuck) else { return };
        let (pid, Some(tenant)) = (session.pid, session.tenant) else { return };
        let on_stuck = self.tenants.get(&tenant).map(|tenant| tenant.spec.on_stuck);
        if on_stuck != Some(OnStuck::Suspend) {
            return self.give_up(id, reason);
        }
        self.record_given_up(id, reason);
        // The process's connection remains open, so that its gate stays closed until the driver has suspended the
        // process.
        for other in self.connections_of(pid) {
            let Some(session) = self.sessions.get_mut(&other) else { continue };
            (session.stuck, session.run, session.waiting) = (true, None, false);
            let tenant = session.tenant;
            self.give_up_memory(other, tenant);
            tenant.into_iter().for_each(|tenant| self.look_whether_ended(tenant));
        }
        self.deadlines.set(Deadline::Suspension(id), self.clock + self.config.patience_ns);
        self.actions.push(Action::Suspend { session: id });
    }

    /// Kills a process, closes its connections, and immediately revokes its turn and its memory, even if the kill
    /// fails.
    pub(super) fn give_up(&mut self, id: SessionId, reason: Reason) {
        self.record_given_up(id, reason);
        self.record_kill(id, reason);
        let Some(session) = self.sessions.get(&id) else { return };
        let (pid, is_client) = (session.pid, session.concurrent);
        let Some(tenant) = session.tenant else { return self.end(id, End::Evicted) };
        if let Some(known) = self.tenants.get(&tenant) {
            self.given_up.insert(pid, known.spec.name.clone());
        }
        self.actions.push(Action::Kill { session: id, tenant, is_client });
        for other in self.connections_of(pid) {
            self.end(other, End::Evicted);
            self.gone(other);
        }
    }

    /// Returns the connections of a process.
    fn connections_of(&self, pid: u32) -> Vec<SessionId> {
        self.sessions.iter().filter(|(_, session)| session.pid == pid).map(|(&id, _)| id).collect()
    }

    /// Handles the result of suspending a process. If the driver failed, kills the process. Does not keep the process's
    /// memory, because driver 580 does not resume a process that has imported memory from another process.
    pub(super) fn suspended(&mut self, id: SessionId, done: bool) {
        if !self.deadlines.cancel(Deadline::Suspension(id)) {
            return;
        }
        if !done {
            return self.give_up(id, Reason::Unsuspended);
        }
        let Some(session) = self.sessions.get(&id) else { return };
        let (pid, Some(tenant)) = (session.pid, session.tenant) else { return };
        self.tenants.get_mut(&tenant).into_iter().for_each(|known| known.suspended += 1);
        self.record_suspension(tenant, pid);
    }

    /// Kills a process that the driver does not suspend in time: the driver waits for a stopped process forever.
    pub(super) fn end_suspension(&mut self, id: SessionId) {
        tracing::warn!(session = ?id, "the driver does not suspend a program");
        self.give_up(id, Reason::Unsuspended);
    }

    /// Abandons a process that has begun to report its memory but has not finished in time.
    pub(super) fn end_report(&mut self, id: SessionId) {
        tracing::warn!(session = ?id, "program does not continue to report its memory from the previous owner");
        self.stuck(id, Reason::Adoption);
    }

    /// Stops waiting for processes of a previous owner.
    pub(super) fn end_reconnection(&mut self) {
        if !self.expected.is_empty() {
            tracing::warn!(processes = ?self.expected, "programs of an earlier daemon have not reconnected");
            self.expected.clear();
            self.needs_plan = true;
        }
    }

    pub(super) fn drop_all(&mut self, pieces: Vec<PieceId>) {
        self.actions.extend(pieces.into_iter().map(|piece| Action::Drop { piece }));
    }
}
