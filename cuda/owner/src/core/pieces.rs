//! Physical pieces of memory, and the processes that may use each piece. A process can keep a piece that it has
//! imported, regardless of its reports. Therefore, a piece that was given to a process is never reused for another
//! process, not even one of the same tenant, because programs of a tenant may belong to several users. On the card, a
//! piece is released and a new one is allocated, which takes 15 us. In host memory, this takes milliseconds, so the
//! piece is kept for the same process's next use, unless another process needs the memory. A piece that several
//! processes have used is always released.

use super::types::{Action, PieceId, SessionId};
use owner_driver::Memory;
use std::collections::{BTreeMap, BTreeSet};
use vram::TenantId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// The piece is being allocated for the stock.
    Stocking,
    /// The piece is in the stock, and no tenant has used it.
    Stocked,
    /// The piece was given to a tenant, or is being allocated for one. `count` is the number of chunks and moves that
    /// refer to it. If `only` is unset, several of the tenant's processes have used the piece.
    Held { by: TenantId, only: Option<SessionId>, count: u32 },
    /// The piece is kept for its process's next use.
    Parked,
}

/// The process that gets a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Receiver {
    pub(super) tenant: TenantId,
    pub(super) session: SessionId,
}

impl Receiver {
    fn holds(self) -> Use {
        Use::Held { by: self.tenant, only: Some(self.session), count: 1 }
    }
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    memory: Memory,
    used: Use,
    ready: bool,
}

/// Maximum number of concurrent allocations for the stock, because an urgent request must wait for them.
const STOCKING_MOST: usize = 2;

/// All pieces of a card.
#[derive(Debug)]
pub(super) struct Pieces {
    pieces: BTreeMap<PieceId, Piece>,
    stock: BTreeSet<PieceId>,
    /// Number of pieces being allocated for the stock.
    stocking: usize,
    parked: BTreeMap<SessionId, Vec<PieceId>>,
    next: u64,
    /// Maximum number of host pieces.
    host_most: u32,
    /// Current number of host pieces.
    host: u32,
    /// Number of host pieces to allocate in advance.
    ready_host: u32,
    /// Tenants' card pieces that are being released, each with its tenant, and false if the piece belonged to a program
    /// whose connection is closed.
    given_up: BTreeMap<PieceId, (TenantId, bool)>,
    /// Set if the pieces released now belong to a program whose connection is closed.
    pub(super) ends: bool,
}

impl Pieces {
    pub(super) fn new(host_most: u32, ready_host: u32) -> Self {
        let (pieces, stock, parked, given_up) = Default::default();
        let ready_host = ready_host.min(host_most);
        Self { pieces, stock, stocking: 0, parked, next: 0, host_most, host: 0, ready_host, given_up, ends: false }
    }

    /// Returns an unused number for a new or an adopted piece.
    pub(super) fn number(&mut self) -> PieceId {
        self.next += 1;
        PieceId(self.next)
    }

    /// Returns a piece for a process, with one reference: a piece kept for the process, a piece from the stock, or a
    /// new piece.
    pub(super) fn take(&mut self, memory: Memory, by: Receiver, actions: &mut Vec<Action>) -> PieceId {
        self.take_some(memory, by, true, actions)
    }

    /// Returns a piece for the target of a copy, like [`Self::take`]. A card piece is not zeroed, because zeroing would
    /// wait for the card. If the copy is not performed, the piece is released.
    pub(super) fn take_to_copy(&mut self, memory: Memory, by: Receiver, actions: &mut Vec<Action>) -> PieceId {
        self.take_some(memory, by, memory == Memory::Host, actions)
    }

    fn take_some(&mut self, memory: Memory, by: Receiver, zeroed: bool, actions: &mut Vec<Action>) -> PieceId {
        let held = by.holds();
        if memory == Memory::Host {
            let own = self.parked.get_mut(&by.session).and_then(Vec::pop);
            let stocked = || self.stock.iter().copied().find(|id| self.pieces[id].ready);
            if let Some(id) = own.or_else(stocked) {
                self.stock.remove(&id);
                if let Some(piece) = self.pieces.get_mut(&id) {
                    piece.used = held;
                }
                return id;
            }
            self.make_room(actions);
        }
        self.make(memory, held, zeroed, actions)
    }

    /// Adopts a piece that a process had before the owner started. The piece counts as given to that process.
    pub(super) fn adopt(&mut self, piece: PieceId, memory: Memory, by: Receiver) {
        self.host += u32::from(memory == Memory::Host);
        self.pieces.insert(piece, Piece { memory, used: by.holds(), ready: true });
    }

    /// Records that a second process gets a piece.
    pub(super) fn share(&mut self, id: PieceId) {
        if let Some(Piece { used: Use::Held { only, .. }, .. }) = self.pieces.get_mut(&id) {
            *only = None;
        }
    }

    /// Adds a chunk's or a move's reference to a piece.
    pub(super) fn hold(&mut self, id: PieceId) {
        if let Some(Piece { used: Use::Held { count, .. }, .. }) = self.pieces.get_mut(&id) {
            *count += 1;
        }
    }

    /// Removes a chunk's or a move's reference to a piece.
    pub(super) fn let_go(&mut self, id: PieceId, actions: &mut Vec<Action>) {
        let Some(piece) = self.pieces.get_mut(&id) else { return };
        let Use::Held { only, count, .. } = &mut piece.used else { return };
        *count -= 1;
        if *count > 0 {
            return;
        }
        match only.filter(|_| piece.memory == Memory::Host && piece.ready) {
            Some(session) => {
                piece.used = Use::Parked;
                self.parked.entry(session).or_default().push(id);
            }
            None => self.forget(id, actions),
        }
    }

    /// Records the result of allocating a piece. Returns the tenant that holds the piece, if any still does.
    pub(super) fn made(&mut self, id: PieceId, done: bool, actions: &mut Vec<Action>) -> Option<TenantId> {
        let piece = self.pieces.get_mut(&id)?;
        piece.ready = done;
        self.stocking -= usize::from(piece.used == Use::Stocking);
        match piece.used {
            Use::Held { by, .. } => return Some(by),
            Use::Stocking if done => {
                piece.used = Use::Stocked;
                self.stock.insert(id);
            }
            Use::Stocking | Use::Stocked | Use::Parked => {
                self.forget(id, actions);
                // Do not request unavailable memory repeatedly.
                self.ready_host = self.ready_host.saturating_sub(1);
            }
        }
        None
    }

    /// Returns true if a piece has been allocated.
    pub(super) fn is_ready(&self, id: PieceId) -> bool {
        self.pieces.get(&id).is_some_and(|piece| piece.ready)
    }

    /// Returns the tenant that uses a piece, or for which the piece is being allocated.
    pub(super) fn holder(&self, id: PieceId) -> Option<TenantId> {
        match self.pieces.get(&id)?.used {
            Use::Held { by, .. } => Some(by),
            Use::Stocking | Use::Stocked | Use::Parked => None,
        }
    }

    /// Returns the kind of a piece's memory (card or host).
    pub(super) fn memory(&self, id: PieceId) -> Option<Memory> {
        self.pieces.get(&id).map(|piece| piece.memory)
    }

    /// Starts to allocate host pieces for the stock, at most [`STOCKING_MOST`] at a time.
    pub(super) fn refill(&mut self, actions: &mut Vec<Action>) {
        while self.is_short() {
            self.stocking += 1;
            self.make(Memory::Host, Use::Stocking, true, actions);
        }
    }

    /// Returns true if another piece should be allocated for the stock now.
    pub(super) fn is_short(&self) -> bool {
        self.stock.len() + self.stocking < self.ready_host as usize
            && self.stocking < STOCKING_MOST
            && self.host < self.host_most
    }

    /// Returns the number of pieces being allocated for the stock.
    #[cfg(test)]
    pub(super) fn stocking(&self) -> usize {
        self.stocking
    }

    /// Releases the pieces kept for a process whose connection is closed.
    pub(super) fn abandon(&mut self, session: SessionId, actions: &mut Vec<Action>) {
        for id in self.parked.remove(&session).unwrap_or_default() {
            self.forget(id, actions);
        }
    }

    /// Returns the processes that pieces are kept for.
    pub(super) fn parked_for(&self) -> Vec<SessionId> {
        self.parked.keys().copied().collect()
    }

    /// Returns the number of card or host pieces.
    pub(super) fn count(&self, memory: Memory) -> usize {
        self.pieces.values().filter(|piece| piece.memory == memory).count()
    }

    fn make(&mut self, memory: Memory, used: Use, zeroed: bool, actions: &mut Vec<Action>) -> PieceId {
        let id = self.number();
        self.host += u32::from(memory == Memory::Host);
        self.pieces.insert(id, Piece { memory, used, ready: false });
        actions.push(Action::Make { piece: id, memory, zeroed });
        id
    }

    /// Releases kept pieces while the maximum number of host pieces is reached.
    fn make_room(&mut self, actions: &mut Vec<Action>) {
        while self.host >= self.host_most {
            let Some(kept) = self.parked.values_mut().find_map(Vec::pop) else { return };
            self.forget(kept, actions);
        }
    }

    /// Removes and returns the tenant of a released card piece, and false if the piece belonged to a program whose
    /// connection is closed.
    pub(super) fn given_up(&mut self, id: PieceId) -> Option<(TenantId, bool)> {
        self.given_up.remove(&id)
    }

    fn forget(&mut self, id: PieceId, actions: &mut Vec<Action>) {
        self.stock.remove(&id);
        if let Some(piece) = self.pieces.remove(&id) {
            if let (Use::Held { by, .. }, Memory::Device, true) = (piece.used, piece.memory, piece.ready) {
                self.given_up.insert(id, (by, !self.ends));
            }
            self.host -= u32::from(piece.memory == Memory::Host);
            actions.push(Action::Drop { piece: id });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Receiver = Receiver { tenant: vram::TenantId(1), session: SessionId(10) };
    const OTHER: Receiver = Receiver { session: SessionId(11), ..ONE };
    const TWO: Receiver = Receiver { tenant: vram::TenantId(2), session: SessionId(20) };

    #[test]
    fn a_piece_that_a_process_had_never_goes_to_another() {
        for memory in [Memory::Device, Memory::Host] {
            for other in [OTHER, TWO] {
                let (mut pieces, mut actions) = (Pieces::new(8, 0), Vec::new());
                let first = pieces.take(memory, ONE, &mut actions);
                pieces.made(first, true, &mut actions);
                pieces.let_go(first, &mut actions);
                assert_ne!(pieces.take(memory, other, &mut actions), first);
            }
        }
    }

    #[test]
    fn a_piece_that_several_processes_had_is_given_up() {
        let (mut pieces, mut actions) = (Pieces::new(8, 0), Vec::new());
        let first = pieces.take(Memory::Host, ONE, &mut actions);
        pieces.made(first, true, &mut actions);
        pieces.share(first);
        actions.clear();
        pieces.let_go(first, &mut actions);
        assert_eq!(actions, [Action::Drop { piece: first }], "the other process may have kept it");
    }

    #[test]
    fn host_backing_is_kept_for_its_process_until_room_is_needed() {
        let (mut pieces, mut actions) = (Pieces::new(1, 0), Vec::new());
        let first = pieces.take(Memory::Host, ONE, &mut actions);
        pieces.made(first, true, &mut actions);
        pieces.let_go(first, &mut actions);
        assert_eq!(pieces.take(Memory::Host, ONE, &mut actions), first);
        pieces.let_go(first, &mut actions);
        actions.clear();
        let second = pieces.take(Memory::Host, TWO, &mut actions);
        assert_eq!(
            actions,
            [Action::Drop { piece: first }, Action::Make { piece: second, memory: Memory::Host, zeroed: true }]
        );
    }

    #[test]
    fn a_piece_of_the_card_is_given_up_when_the_last_holder_lets_go() {
        let (mut pieces, mut actions) = (Pieces::new(0, 0), Vec::new());
        let piece = pieces.take(Memory::Device, ONE, &mut actions);
        pieces.made(piece, true, &mut actions);
        pieces.hold(piece);
        actions.clear();
        pieces.let_go(piece, &mut actions);
        assert_eq!(actions, []);
        pieces.let_go(piece, &mut actions);
        assert_eq!(actions, [Action::Drop { piece }]);
    }

    #[test]
    fn a_piece_to_copy_to_is_not_zeroed_unless_it_may_be_kept() {
        let (mut pieces, mut actions) = (Pieces::new(8, 0), Vec::new());
        for memory in [Memory::Device, Memory::Host] {
            pieces.take_to_copy(memory, ONE, &mut actions);
        }
        pieces.take(Memory::Device, ONE, &mut actions);
        let zeroed = |action: &Action| matches!(action, Action::Make { zeroed: true, .. });
        assert_eq!(actions.iter().map(zeroed).collect::<Vec<_>>(), [false, true, true]);
    }

    #[test]
    fn stock_refill_is_split_into_bounded_steps() {
        let (mut pieces, mut actions) = (Pieces::new(64, 40), Vec::new());
        let mut made = 0;
        loop {
            pieces.refill(&mut actions);
            if actions.is_empty() {
                break;
            }
            assert!(actions.len() <= STOCKING_MOST, "{} at a time", actions.len());
            for action in std::mem::take(&mut actions) {
                let Action::Make { piece, .. } = action else { panic!("{action:?}") };
                pieces.made(piece, true, &mut actions);
                made += 1;
            }
        }
        assert_eq!(made, 40);
    }

    #[test]
    fn host_pieces_are_ready_before_they_are_needed() {
        let (mut pieces, mut actions) = (Pieces::new(8, 2), Vec::new());
        pieces.refill(&mut actions);
        assert_eq!(actions.len(), 2);
        for id in [1, 2] {
            pieces.made(PieceId(id), true, &mut actions);
        }
        actions.clear();
        pieces.take(Memory::Host, ONE, &mut actions);
        assert_eq!(actions, [], "one of the stock");
        pieces.refill(&mut actions);
        assert_eq!(actions.len(), 1, "its successor");
    }
}
