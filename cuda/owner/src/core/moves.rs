//! Tenants that move to or from another card.
//!
//! The owner of the first card allocates host memory for the tenant's chunks while the programs run, because allocating
//! it takes longer than the copies. Then it evicts the chunks. Each program closes its gate, unmaps its chunks, and
//! connects to the owner of the other card. That owner makes the driver restore the program on its card. The program
//! then reports its chunks to the new owner, as after a restart of an owner. The daemon drives the move by sending
//! requests to both owners in turn. If the daemon stops sending requests to the first owner, that owner keeps the
//! tenant.

use super::sessions::Session;
use super::types::{Action, SessionId, TenantSpec};
use super::{Body, Core, TenantError};
use cuda_control::ArrivalTimes;
use cuda_protocol::{End, FixedKind, FromOwner, MAX_SEEN, Obstacle, VERSION_VISIBLE_CARDS};
use owner_driver::{FetchTimes, Memory};
use owner_host::{Arrival, Departure, Leaving};
use tenancy::Deadline;
use vram::{Limits, OnFull, TenantId};

/// Time limit for a program's work to complete, in microseconds. The daemon repeats the request.
// TIMEOUT: the limit is the same as for relocations, because the program waits at its gate meanwhile.
const LEAVE_TIMEOUT_US: u32 = 2_000_000;
/// Time in ns without a request from the daemon after which a tenant stays on its card.
// TIMEOUT: the daemon repeats its request every few milliseconds until it exits or cancels the move.
const FORGOTTEN_NS: u64 = 10_000_000_000;

impl Session {
    /// Records that a process that has moved is on this card, and that its chunks are mapped.
    pub(super) fn has_arrived(&mut self, clock: u64) {
        let (pid, chunks) = (self.pid, self.chunks.len() as u64);
        self.arrival.iter_mut().for_each(|arrival| arrival.complete(pid, chunks, clock));
    }
}

impl Core {
    /// Returns the cards to which a tenant's programs could move if their library has protocol version `version`.
    pub(super) fn others_for(&self, id: TenantId, version: u16) -> Vec<[u8; 16]> {
        let moves = |TenantSpec { gang, share_group, window_bytes, .. }: &TenantSpec| {
            version >= VERSION_VISIBLE_CARDS && gang.is_none() && share_group.is_none() && *window_bytes == 0
        };
        let may = self.tenants.get(&id).is_some_and(|tenant| moves(&tenant.spec));
        self.config.others.iter().filter(|_| may).take(MAX_SEEN).copied().collect()
    }

    /// Checks that all programs of a tenant can move to the card with the UUID `to`. Returns a reason to repeat the
    /// request later if this is not known yet.
    ///
    /// # Errors
    /// Returns the program that cannot move, and the reason.
    pub fn may_leave(&self, id: TenantId, to: [u8; 16]) -> Result<Option<String>, String> {
        if let Some(why) = self.reconnecting(id) {
            return Ok(Some(why));
        }
        for session in self.sessions_of(id) {
            self.check_leaves(session)?;
            if let Some(session) = self.sessions.get(&session).filter(|session| !session.sees.contains(&to)) {
                let why = "NVIDIA's driver does not show it that card: start it again, in a container with the card's \
                           device file";
                return Err(named(session.pid, &session.program, why));
            }
        }
        Ok(None)
    }

    /// If the tenant may have programs that have not reported their memory to this owner yet, returns a description of
    /// them.
    fn reconnecting(&self, id: TenantId) -> Option<String> {
        let session = self.sessions_of(id).find(|session| self.adopts(*session));
        let why = "it has not reported its memory to the card's new owner yet";
        let reports = session.and_then(|session| self.sessions.get(&session));
        let reports = reports.map(|session| named(session.pid, &session.program, why));
        let absent = || format!("{} processes have not reconnected to the card's new owner yet", self.expected.len());
        reports.or_else(|| (!self.expected.is_empty()).then(absent))
    }

    /// Prepares a tenant's move to another card: allocates host memory, evicts the tenant's memory, and makes its
    /// programs unmap it. New programs of the tenant wait. The caller repeats the request until all programs have left,
    /// and then removes the tenant, or calls [`Self::stay`].
    ///
    /// # Errors
    /// Returns the reason why a program cannot leave. The caller then calls [`Self::stay`].
    pub fn leave(&mut self, id: TenantId) -> Result<Leaving, String> {
        // If a program reconnected after the departure, it would use this card without an owner.
        if let Some(why) = self.reconnecting(id).filter(|_| !self.expected.is_empty()) {
            return Ok(Leaving::Waits(why));
        }
        let sessions: Vec<SessionId> = self.sessions_of(id).collect();
        for session in &sessions {
            self.check_leaves(*session)?;
        }
        let chunk_mib = self.table.chunk_bytes() >> 20;
        let tenant = self.tenants.get_mut(&id).ok_or_else(|| TenantError::Unknown(id).to_string())?;
        // Ignore an obstacle from before the departure, which was reported for a program that could not move here.
        if let Some(obstacle) = tenant.obstacle.take().filter(|_| self.deadlines.is_set(Deadline::Departure(id))) {
            return Err(obstacle);
        }
        if !self.deadlines.is_set(Deadline::Departure(id)) {
            self.pieces.prepare(id, self.chunks_on_card(id), &sessions);
        }
        self.deadlines.set(Deadline::Departure(id), self.clock + FORGOTTEN_NS);
        self.follow_up();
        if self.pieces.is_preparing(id) {
            return Ok(Leaving::Waits("host memory for its memory is still being allocated".to_owned()));
        }
        if self.pieces.end_preparation(id) {
            self.evict_all(id)?;
        }
        let on_card = self.chunks_on_card(id);
        if on_card > 0 || self.is_moving(&sessions) {
            self.needs_plan = true;
            self.follow_up();
            return Ok(Leaving::Waits(format!("{} MiB of its memory are still on the card", on_card * chunk_mib)));
        }
        for session in sessions {
            self.ask_to_leave(session);
        }
        let of_it = || self.sessions.values().filter(|session| session.tenant == Some(id));
        Ok(match of_it().all(|session| session.departure == Departure::Left) {
            true => Leaving::Left(of_it().map(|session| session.pid).collect()),
            false => Leaving::Waits("a program's work or one of its requests has not completed".to_owned()),
        })
    }

    /// Starts to evict all chunks of a tenant.
    fn evict_all(&mut self, id: TenantId) -> Result<(), String> {
        let tenant = self.tenants.get(&id).ok_or_else(|| TenantError::Unknown(id).to_string())?;
        let memory_bytes = tenant.spec.memory_bytes;
        let (quota, guarantee, swap_cap, on_full) = (0, 0, u32::MAX, OnFull::Swap);
        let limits = Limits { quota, guarantee, swap_cap, on_full, ..tenant.spec.limits };
        self.table.resize_vm(id, memory_bytes, limits).map_err(|error| error.to_string())?;
        self.needs_plan = true;
        self.follow_up();
        Ok(())
    }

    /// Cancels the preparation of a move. Programs that have left reconnect to this owner.
    pub fn stay(&mut self, id: TenantId) {
        if !self.deadlines.cancel(Deadline::Departure(id)) {
            return;
        }
        self.end_departure(id);
        self.follow_up();
    }

    fn end_departure(&mut self, id: TenantId) {
        self.pieces.end_preparation(id);
        self.pieces.trim_stock(&mut self.actions);
        let Some(tenant) = self.tenants.get_mut(&id) else { return };
        tenant.obstacle = None;
        let spec = tenant.spec.clone();
        if let Err(error) = self.resize(id, &spec) {
            tracing::error!(tenant = spec.name, %error, "the limits of a tenant that stays are not restored");
        }
        for session in self.sessions_of(id).collect::<Vec<_>>() {
            self.end_moved(session);
        }
        self.needs_plan = true;
    }

    /// Returns the progress of a tenant's move to this card: the process IDs of its processes that are on this card and
    /// have reported their memory, the times of their completed moves, and the last reason why a process could not move
    /// here.
    pub fn arrivals(&mut self, id: TenantId) -> (Vec<u32>, Vec<ArrivalTimes>, Option<String>) {
        let of_it = self.sessions.iter().filter(|(_, session)| session.tenant == Some(id));
        let here: Vec<&Session> = of_it.filter(|(id, _)| !self.adopts(**id)).map(|(_, session)| session).collect();
        let moved = here.iter().filter_map(|session| session.arrival?.times()).collect();
        let here = here.iter().map(|session| session.pid).collect();
        (here, moved, self.tenants.get_mut(&id).and_then(|tenant| tenant.obstacle.take()))
    }

    /// Returns an error if a process cannot leave.
    fn check_leaves(&self, id: SessionId) -> Result<(), String> {
        let Some(session) = self.sessions.get(&id) else { return Ok(()) };
        let fixed = |kind| session.fixed.get(&kind).copied().unwrap_or(0) > 0;
        let tenant = session.tenant.and_then(|tenant| self.tenants.get(&tenant));
        let is_pinned = |index: &u32| tenant.and_then(|known| known.bodies.get(index)).is_some_and(Body::is_fixed);
        let why = match () {
            () if session.stuck => "it does not answer",
            () if session.version < VERSION_VISIBLE_CARDS => "it has a library of an earlier version: start it again",
            // A process that reconnects has not reported the cards yet, and does not leave before it has.
            () if session.sees.is_empty() && !self.adopts(id) => {
                "NVIDIA's driver shows it only its own card: start it again"
            }
            () if session.reported_client || session.concurrent => "it is a client of an MPS server",
            () if fixed(FixedKind::Shared) => "it shares memory with other processes",
            () if fixed(FixedKind::Managed) => "it has managed memory",
            () if session.chunks.values().any(is_pinned) => "it has chunks that cannot move",
            () => return Ok(()),
        };
        Err(named(session.pid, &session.program, why))
    }

    /// Returns the number of a tenant's chunks on the card, excluding its fixed memory.
    fn chunks_on_card(&self, id: TenantId) -> u64 {
        let bodies = self.tenants.get(&id).into_iter().flat_map(|tenant| tenant.bodies.values());
        let on_card = |body: &&Body| match body {
            Body::Chunk { piece, .. } => self.pieces.memory(*piece) != Some(Memory::Host),
            Body::Fixed => false,
        };
        bodies.filter(on_card).count() as u64
    }

    /// Returns true if memory is being moved for any of the processes.
    fn is_moving(&self, sessions: &[SessionId]) -> bool {
        sessions.iter().any(|session| self.machine.relocations.has_order(*session))
    }

    fn ask_to_leave(&mut self, id: SessionId) {
        let is_reporting = self.adopts(id);
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let is_idle = session.pending.is_empty() && session.fixing.is_empty() && !is_reporting && !session.fetching;
        if session.departure == Departure::Stays && is_idle {
            session.departure = Departure::Asked;
            self.send(id, FromOwner::Leave { patience_us: LEAVE_TIMEOUT_US });
        }
    }

    /// Records a process's reply to a request to leave.
    pub(super) fn has_left(&mut self, id: SessionId, tenant: TenantId, obstacle: Option<Obstacle>) {
        let Some(known) = self.tenants.get_mut(&tenant) else { return };
        let Some(session) = self.sessions.get_mut(&id).filter(|session| session.departure == Departure::Asked) else {
            return self.end(id, End::Violation);
        };
        session.departure = if obstacle.is_none() { Departure::Left } else { Departure::Stays };
        let why = match obstacle {
            None if !self.deadlines.is_set(Deadline::Departure(tenant)) => {
                self.end_moved(id);
                return;
            }
            None | Some(Obstacle::Busy | Obstacle::NotEvicted) => return,
            Some(Obstacle::Cards) => "it uses several cards",
            Some(Obstacle::Mappings) => "it maps its memory itself, or has no descriptor left for its memory",
            Some(Obstacle::Shared) => "it shares memory with other processes",
        };
        known.obstacle = Some(named(session.pid, &session.program, why));
    }

    /// Ends the connection of a process that has left. Returns false if the process has not left.
    pub(super) fn end_moved(&mut self, id: SessionId) -> bool {
        let left = self.sessions.get(&id).filter(|session| session.departure == Departure::Left);
        let Some(pid) = left.map(|session| session.pid) else { return false };
        self.moved.insert(pid);
        self.end(id, End::Moved);
        true
    }

    /// Lets a tenant stay on this card if the daemon has stopped repeating its request to move the tenant.
    pub(super) fn end_forgotten_move(&mut self, id: TenantId) {
        if self.tenants.get(&id).is_some_and(|tenant| !tenant.retired) {
            tracing::warn!(tenant = id.0, "the daemon does not continue a move: the tenant stays");
            self.end_departure(id);
        }
    }

    /// Starts to move a process that has connected from another card.
    pub(super) fn elsewhere(&mut self, id: SessionId, from: [u8; 16]) {
        match self.sessions.get_mut(&id) {
            Some(session) if session.adopts && !session.fetching && session.version >= VERSION_VISIBLE_CARDS => {
                session.fetching = true;
                self.deadlines.cancel(Deadline::Report(id));
                session.arrival = Some(Arrival::new(self.clock));
                let sees = session.sees.clone();
                self.actions.push(Action::Fetch { session: id, from, sees });
            }
            _ => self.end(id, End::Violation),
        }
    }

    /// Records that the driver has moved a process to this card, or has failed to.
    pub(super) fn fetched(&mut self, id: SessionId, done: Result<FetchTimes, String>) {
        let Some(session) = self.sessions.get_mut(&id).filter(|session| session.fetching) else { return };
        session.fetching = false;
        if session.adopts {
            self.deadlines.set(Deadline::Report(id), self.clock + self.config.patience_ns);
        }
        match done {
            Ok(FetchTimes { checkpoint_us, restore_us }) => {
                session.arrival.iter_mut().for_each(|arrival| arrival.set_driver_times(checkpoint_us, restore_us));
                let waits = session.tenant.filter(|_| session.waiting);
                self.send(id, FromOwner::Fetched);
                self.look_whether_adopted(id);
                waits.into_iter().for_each(|tenant| self.waiting(id, tenant));
                self.needs_plan = true;
            }
            Err(error) => self.cannot_come(id, &format!("the driver cannot move it: {error}")),
        }
    }

    /// Records that a process cannot import its chunks on this card, and ends its connection.
    pub(super) fn unusable(&mut self, id: SessionId, code: i32) {
        if self.sessions.get(&id).is_none_or(|session| session.arrival.is_none()) {
            return self.end(id, End::Violation);
        }
        self.cannot_come(id, &format!("the driver cannot import its memory on that card: CUDA error {code}"));
    }

    /// Records the reason why a process cannot use this card, and ends its connection.
    fn cannot_come(&mut self, id: SessionId, why: &str) {
        let Some(session) = self.sessions.get(&id) else { return };
        let why = named(session.pid, &session.program, why);
        tracing::warn!(session = ?id, why, "a program stays on another card");
        let stays = session.tenant.filter(|id| !self.deadlines.is_set(Deadline::Departure(*id)));
        if let Some(tenant) = stays.and_then(|id| self.tenants.get_mut(&id)) {
            tenant.obstacle = Some(why);
        }
        let is_on_card = |tenant, index| self.where_is(tenant, index).is_some_and(|(_, of)| of != Memory::Host);
        let known = self.sessions.get(&id).and_then(|session| Some((session.tenant?, &session.chunks)));
        if known.is_none_or(|(tenant, chunks)| chunks.values().any(|index| is_on_card(tenant, *index))) {
            // The process has not unmapped its memory.
            return self.end(id, End::Violation);
        }
        // None of the process's chunks is on this card. The process keeps them, and connects to another owner.
        self.sessions.get_mut(&id).into_iter().for_each(|session| session.departure = Departure::Left);
        self.end_moved(id);
    }
}

fn named(pid: u32, program: &str, why: &str) -> String {
    format!("program `{program}` (process {pid}): {why}")
}
