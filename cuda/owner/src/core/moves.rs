//! Tenants that move to or from another card.
//!
//! The owner of the first card evicts the tenant's chunks. Then each program closes its gate and unmaps its chunks, and
//! connects to the owner of the other card, which makes the driver restore the program there. The program then reports
//! its chunks to the new owner, as after a restart of an owner. The daemon drives the move by sending requests to both
//! owners in turn. If its requests to the first owner stop, that owner keeps the tenant.

use super::types::{Action, SessionId};
use super::{Body, Core, TenantError};
use cuda_protocol::{End, FixedKind, FromOwner, Obstacle, VERSION_MOVES};
use owner_driver::Memory;
use tenancy::Deadline;
use vram::{Limits, OnFull, TenantId};

/// Time limit for a program's work to complete, in microseconds. The daemon repeats the request.
// TIMEOUT: as for relocations; the program waits at its gate meanwhile.
const LEAVE_TIMEOUT_US: u32 = 2_000_000;
/// Time in ns without a request from the daemon, after which a tenant stays on its card.
// TIMEOUT: the daemon repeats its request every few milliseconds, so it has exited or cancelled the move.
const FORGOTTEN_NS: u64 = 10_000_000_000;

/// Progress of a process that moves to another card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Departure {
    /// The process uses this card.
    Stays,
    /// The process was requested to leave.
    Asked,
    /// The process has unmapped its chunks.
    Left,
}

/// Progress of a tenant that moves to another card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leaving {
    /// The request must be repeated, for the given reason.
    Waits(String),
    /// All programs of the tenant have unmapped their chunks. Contains their process IDs.
    Left(Vec<u32>),
}

impl Core {
    /// Prepares a tenant's move to another card: evicts its memory, and makes its programs unmap it. New programs of
    /// the tenant wait. The caller repeats the request until all programs have left, and then removes the tenant, or
    /// calls [`Self::stay`].
    ///
    /// # Errors
    /// Returns the reason why a program cannot leave. The caller then calls [`Self::stay`].
    pub fn leave(&mut self, id: TenantId) -> Result<Leaving, String> {
        let sessions: Vec<SessionId> = self.sessions_of(id).collect();
        for session in &sessions {
            self.check_leaves(*session)?;
        }
        let chunk_mib = self.table.chunk_bytes() >> 20;
        let tenant = self.tenants.get_mut(&id).ok_or_else(|| TenantError::Unknown(id).to_string())?;
        if let Some(obstacle) = tenant.obstacle.take() {
            return Err(obstacle);
        }
        if !self.deadlines.is_set(Deadline::Departure(id)) {
            let memory_bytes = tenant.spec.memory_bytes;
            let (quota, guarantee, swap_cap, on_full) = (0, 0, u32::MAX, OnFull::Swap);
            let limits = Limits { quota, guarantee, swap_cap, on_full, ..tenant.spec.limits };
            self.table.resize_vm(id, memory_bytes, limits).map_err(|error| error.to_string())?;
            self.needs_plan = true;
        }
        self.deadlines.set(Deadline::Departure(id), self.clock + FORGOTTEN_NS);
        self.follow_up();
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

    /// Cancels the preparation of a move. Programs that have left reconnect to this owner.
    pub fn stay(&mut self, id: TenantId) {
        if !self.deadlines.cancel(Deadline::Departure(id)) {
            return;
        }
        self.end_departure(id);
        self.follow_up();
    }

    fn end_departure(&mut self, id: TenantId) {
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

    /// Returns a tenant's processes that are on this card and have reported their memory, and the most recent reason
    /// why a process could not move here.
    pub fn arrivals(&mut self, id: TenantId) -> (Vec<u32>, Option<String>) {
        let of_it = self.sessions.iter().filter(|(_, session)| session.tenant == Some(id));
        let here = of_it.filter(|(id, session)| !session.fetching && !self.adopts(**id));
        let here = here.map(|(_, session)| session.pid).collect();
        (here, self.tenants.get_mut(&id).and_then(|tenant| tenant.obstacle.take()))
    }

    /// Returns an error if a process cannot leave.
    fn check_leaves(&self, id: SessionId) -> Result<(), String> {
        let Some(session) = self.sessions.get(&id) else { return Ok(()) };
        let fixed = |kind| session.fixed.get(&kind).copied().unwrap_or(0) > 0;
        let tenant = session.tenant.and_then(|tenant| self.tenants.get(&tenant));
        let is_pinned = |index: &u32| tenant.and_then(|known| known.bodies.get(index)).is_some_and(Body::is_fixed);
        let why = match () {
            () if session.stuck => "it does not reply",
            () if session.version < VERSION_MOVES => "it has a library of an earlier version: start it again",
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

    /// Handles a process's reply to a request to leave.
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

    /// Lets a tenant stay if the daemon has ended during its move.
    pub(super) fn end_forgotten_move(&mut self, id: TenantId) {
        if self.tenants.get(&id).is_some_and(|tenant| !tenant.retired) {
            tracing::warn!(tenant = id.0, "the daemon does not continue a move: the tenant stays");
            self.end_departure(id);
        }
    }

    /// Handles a process that arrives from another card.
    pub(super) fn elsewhere(&mut self, id: SessionId, from: [u8; 16]) {
        match self.sessions.get_mut(&id) {
            Some(session) if session.adopts && !session.fetching && session.version >= VERSION_MOVES => {
                session.fetching = true;
                self.deadlines.cancel(Deadline::Report(id));
                self.actions.push(Action::Fetch { session: id, from });
            }
            _ => self.end(id, End::Violation),
        }
    }

    /// Records that the driver has moved a process to this card, or has failed to.
    pub(super) fn fetched(&mut self, id: SessionId, error: Option<String>) {
        let Some(session) = self.sessions.get_mut(&id).filter(|session| session.fetching) else { return };
        session.fetching = false;
        self.deadlines.set(Deadline::Report(id), self.clock + self.config.patience_ns);
        let Some(error) = error else { return self.send(id, FromOwner::Fetched) };
        let why = named(session.pid, &session.program, &format!("the driver cannot move it: {error}"));
        tracing::warn!(session = ?id, why, "a program stays on another card");
        if let Some(tenant) = session.tenant.and_then(|tenant| self.tenants.get_mut(&tenant)) {
            tenant.obstacle = Some(why);
        }
        self.end(id, End::Moved);
    }
}

fn named(pid: u32, program: &str, why: &str) -> String {
    format!("program `{program}` (process {pid}): {why}")
}
