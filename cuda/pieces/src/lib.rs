//! Physical pieces of a CUDA card's memory, and the processes that may use each piece.
//!
//!  A process can keep a piece that it has
//! imported, regardless of its reports. Therefore, a piece that was given to a process is never reused for another
//! process, not even one of the same tenant, because programs of a tenant may belong to several users. On the card, a
//! piece is released and a new one is allocated, which takes 15 us. In host memory, this takes milliseconds, so the
//! piece is kept for the same process's next use, unless another process needs the memory. A piece that several
//! processes have used is always released.

use owner_driver::{Memory, New, PieceId};
use std::collections::{BTreeMap, BTreeSet};
use vram::TenantId;

/// An order to the threads that call the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Allocate and map a piece.
    Make(New),
    /// Release a piece. Later orders do not refer to it.
    Drop(PieceId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use<S> {
    /// The piece is being allocated for the stock.
    Stocking,
    /// The piece is in the stock, and no tenant has used it.
    Stocked,
    /// The piece was given to a tenant, or is being allocated for one. `count` is the number of chunks and moves that
    /// refer to it. If `only` is unset, several of the tenant's processes have used the piece.
    Held { by: TenantId, only: Option<S>, count: u32 },
    /// The piece is kept for its process's next use.
    Parked,
}

/// The process that gets a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receiver<S> {
    /// Tenant of the process.
    pub tenant: TenantId,
    /// Connection of the process.
    pub session: S,
}

impl<S> Receiver<S> {
    fn holds(self) -> Use<S> {
        Use::Held { by: self.tenant, only: Some(self.session), count: 1 }
    }
}

#[derive(Clone, Copy, Debug)]
struct Piece<S> {
    memory: Memory,
    used: Use<S>,
    ready: bool,
}

/// Maximum number of concurrent allocations for the stock, because an urgent request must wait for them.
const STOCKING_MOST: usize = 2;

/// All pieces of a card.
#[derive(Debug)]
pub struct Pieces<S> {
    pieces: BTreeMap<PieceId, Piece<S>>,
    stock: BTreeSet<PieceId>,
    /// Number of pieces being allocated for the stock.
    stocking: usize,
    parked: BTreeMap<S, Vec<PieceId>>,
    next: u64,
    /// Maximum number of host pieces.
    host_most: u32,
    /// Current number of host pieces.
    host: u32,
    /// Number of host pieces to allocate in advance.
    ready_host: u32,
    /// Number of further host pieces to allocate for each tenant whose memory will be evicted, or 0 if no more can be
    /// allocated.
    prepared: BTreeMap<TenantId, u32>,
    /// Tenants' card pieces that are being released, each with its tenant, and false if the piece belonged to a program
    /// whose connection is closed.
    given_up: BTreeMap<PieceId, (TenantId, bool)>,
    /// Set if the pieces released now belong to a program whose connection is closed.
    pub ends: bool,
}

impl<S: Copy + Ord> Pieces<S> {
    /// Creates the pieces of a card that has none: with at most `host_most` host pieces, of which `ready_host` are
    /// allocated in advance.
    #[must_use]
    pub fn new(host_most: u32, ready_host: u32) -> Self {
        let (pieces, stock, parked, prepared, given_up) = Default::default();
        let ready_host = ready_host.min(host_most);
        let (stocking, next, host) = (0, 0, 0);
        Self { pieces, stock, stocking, parked, next, host_most, host, ready_host, prepared, given_up, ends: false }
    }

    /// Returns an unused number for a new or an adopted piece.
    pub fn number(&mut self) -> PieceId {
        self.next += 1;
        PieceId(self.next)
    }

    /// Returns a piece for a process, with one reference: a piece kept for the process, a piece from the stock, or a
    /// new piece.
    pub fn take(&mut self, memory: Memory, by: Receiver<S>, orders: &mut Vec<impl From<Order>>) -> PieceId {
        self.take_some(memory, by, true, orders)
    }

    /// Returns a piece for the target of a copy, like [`Self::take`]. A card piece is not zeroed, because zeroing would
    /// wait for the card. If the copy is not performed, the piece is released.
    pub fn take_to_copy(&mut self, memory: Memory, by: Receiver<S>, orders: &mut Vec<impl From<Order>>) -> PieceId {
        self.take_some(memory, by, memory == Memory::Host, orders)
    }

    fn take_some(
        &mut self,
        memory: Memory,
        by: Receiver<S>,
        zeroed: bool,
        orders: &mut Vec<impl From<Order>>,
    ) -> PieceId {
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
            self.make_room(orders);
        }
        self.make(memory, held, zeroed, orders)
    }

    /// Adopts a piece that a process had before the owner started. The piece counts as given to that process.
    pub fn adopt(&mut self, piece: PieceId, memory: Memory, by: Receiver<S>) {
        self.host += u32::from(memory == Memory::Host);
        self.pieces.insert(piece, Piece { memory, used: by.holds(), ready: true });
    }

    /// Records that a second process gets a piece.
    pub fn share(&mut self, id: PieceId) {
        if let Some(Piece { used: Use::Held { only, .. }, .. }) = self.pieces.get_mut(&id) {
            *only = None;
        }
    }

    /// Adds a chunk's or a move's reference to a piece.
    pub fn hold(&mut self, id: PieceId) {
        if let Some(Piece { used: Use::Held { count, .. }, .. }) = self.pieces.get_mut(&id) {
            *count += 1;
        }
    }

    /// Removes a chunk's or a move's reference to a piece.
    pub fn let_go(&mut self, id: PieceId, orders: &mut Vec<impl From<Order>>) {
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
            None => self.forget(id, orders),
        }
    }

    /// Records the result of allocating a piece. Returns the tenant that holds the piece, if any still does.
    pub fn made(&mut self, id: PieceId, done: bool, orders: &mut Vec<impl From<Order>>) -> Option<TenantId> {
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
                self.forget(id, orders);
                // Do not request unavailable memory repeatedly.
                match self.prepared.values().any(|count| *count > 0) {
                    true => self.prepared.values_mut().for_each(|count| *count = 0),
                    false => self.ready_host = self.ready_host.saturating_sub(1),
                }
            }
        }
        None
    }

    /// Returns true if a piece has been allocated.
    pub fn is_ready(&self, id: PieceId) -> bool {
        self.pieces.get(&id).is_some_and(|piece| piece.ready)
    }

    /// Returns the tenant that uses a piece, or for which the piece is being allocated.
    pub fn holder(&self, id: PieceId) -> Option<TenantId> {
        match self.pieces.get(&id)?.used {
            Use::Held { by, .. } => Some(by),
            Use::Stocking | Use::Stocked | Use::Parked => None,
        }
    }

    /// Returns the kind of a piece's memory (card or host).
    pub fn memory(&self, id: PieceId) -> Option<Memory> {
        self.pieces.get(&id).map(|piece| piece.memory)
    }

    /// Starts to allocate host pieces for the stock, at most two at a time.
    pub fn refill(&mut self, orders: &mut Vec<impl From<Order>>) {
        while self.is_short() {
            self.stock_another(orders);
        }
    }

    /// Returns true if another piece should be allocated for the stock now.
    pub fn is_short(&self) -> bool {
        self.stock.len() + self.stocking < self.ready_host as usize
            && self.stocking < STOCKING_MOST
            && self.host < self.host_most
    }

    /// Starts a preparation: host pieces are allocated in advance, because `on_card` of a tenant's pieces will be
    /// evicted. Pieces that are kept for the tenant's processes `sessions` are not allocated again.
    pub fn prepare(&mut self, tenant: TenantId, on_card: u64, sessions: &[S]) {
        let kept = |session| self.parked.get(session).map_or(0, Vec::len);
        let missing = on_card.saturating_sub(sessions.iter().map(kept).sum::<usize>() as u64);
        self.prepared.insert(tenant, u32::try_from(missing).unwrap_or(u32::MAX));
    }

    /// Continues the preparations: starts to allocate host pieces, at most two at a time.
    pub fn continue_preparing(&mut self, orders: &mut Vec<impl From<Order>>) {
        while self.stocking < STOCKING_MOST && self.lacks_prepared() {
            self.stock_another(orders);
        }
    }

    /// Returns true if a preparation for a tenant is in progress and not complete.
    pub fn is_preparing(&self, tenant: TenantId) -> bool {
        self.prepared.get(&tenant).is_some_and(|count| *count > 0) && (self.stocking > 0 || self.lacks_prepared())
    }

    /// Ends a preparation. Returns false if there was none. The stock keeps the pieces.
    pub fn end_preparation(&mut self, tenant: TenantId) -> bool {
        self.prepared.remove(&tenant).is_some()
    }

    /// Releases the pieces that the stock needs no more.
    pub fn trim_stock(&mut self, orders: &mut Vec<impl From<Order>>) {
        while self.stock.len() > self.stock_most()
            && let Some(&id) = self.stock.last()
        {
            self.forget(id, orders);
        }
    }

    /// Returns true if a preparation needs another piece, and the maximum number of host pieces is not reached.
    fn lacks_prepared(&self) -> bool {
        !self.prepared.is_empty() && self.stock.len() + self.stocking < self.stock_most() && self.host < self.host_most
    }

    /// Returns the size of the full stock in pieces, including all preparations.
    fn stock_most(&self) -> usize {
        self.prepared.values().fold(self.ready_host as usize, |sum, count| sum.saturating_add(*count as usize))
    }

    /// Returns the number of pieces being allocated for the stock.
    #[must_use]
    pub fn stocking(&self) -> usize {
        self.stocking
    }

    /// Releases the pieces kept for a process whose connection is closed.
    pub fn abandon(&mut self, session: S, orders: &mut Vec<impl From<Order>>) {
        for id in self.parked.remove(&session).unwrap_or_default() {
            self.forget(id, orders);
        }
    }

    /// Returns the processes that pieces are kept for.
    pub fn parked_for(&self) -> Vec<S> {
        self.parked.keys().copied().collect()
    }

    /// Returns the number of card or host pieces.
    pub fn count(&self, memory: Memory) -> usize {
        self.pieces.values().filter(|piece| piece.memory == memory).count()
    }

    /// Starts to allocate a host piece for the stock.
    fn stock_another(&mut self, orders: &mut Vec<impl From<Order>>) {
        self.stocking += 1;
        self.make(Memory::Host, Use::Stocking, true, orders);
    }

    fn make(&mut self, memory: Memory, used: Use<S>, zeroed: bool, orders: &mut Vec<impl From<Order>>) -> PieceId {
        let id = self.number();
        self.host += u32::from(memory == Memory::Host);
        self.pieces.insert(id, Piece { memory, used, ready: false });
        orders.push(Order::Make(New { piece: id, memory, zeroed }).into());
        id
    }

    /// Releases kept pieces while the maximum number of host pieces is reached.
    fn make_room(&mut self, orders: &mut Vec<impl From<Order>>) {
        while self.host >= self.host_most {
            let Some(kept) = self.parked.values_mut().find_map(Vec::pop) else { return };
            self.forget(kept, orders);
        }
    }

    /// Removes and returns the tenant of a released card piece, and false if the piece belonged to a program whose
    /// connection is closed.
    pub fn given_up(&mut self, id: PieceId) -> Option<(TenantId, bool)> {
        self.given_up.remove(&id)
    }

    fn forget(&mut self, id: PieceId, orders: &mut Vec<impl From<Order>>) {
        self.stock.remove(&id);
        if let Some(piece) = self.pieces.remove(&id) {
            if let (Use::Held { by, .. }, Memory::Device, true) = (piece.used, piece.memory, piece.ready) {
                self.given_up.insert(id, (by, !self.ends));
            }
            self.host -= u32::from(piece.memory == Memory::Host);
            orders.push(Order::Drop(id).into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Receiver<u64> = Receiver { tenant: vram::TenantId(1), session: 10 };
    const OTHER: Receiver<u64> = Receiver { session: 11, ..ONE };
    const TWO: Receiver<u64> = Receiver { tenant: vram::TenantId(2), session: 20 };

    #[test]
    fn a_piece_that_a_process_had_never_goes_to_another() {
        for memory in [Memory::Device, Memory::Host] {
            for other in [OTHER, TWO] {
                let (mut pieces, mut orders) = (Pieces::new(8, 0), Vec::<Order>::new());
                let first = pieces.take(memory, ONE, &mut orders);
                pieces.made(first, true, &mut orders);
                pieces.let_go(first, &mut orders);
                assert_ne!(pieces.take(memory, other, &mut orders), first);
            }
        }
    }

    #[test]
    fn a_piece_that_several_processes_had_is_given_up() {
        let (mut pieces, mut orders) = (Pieces::new(8, 0), Vec::<Order>::new());
        let first = pieces.take(Memory::Host, ONE, &mut orders);
        pieces.made(first, true, &mut orders);
        pieces.share(first);
        orders.clear();
        pieces.let_go(first, &mut orders);
        assert_eq!(orders, [Order::Drop(first)], "the other process may have kept it");
    }

    #[test]
    fn host_backing_is_kept_for_its_process_until_room_is_needed() {
        let (mut pieces, mut orders) = (Pieces::new(1, 0), Vec::<Order>::new());
        let first = pieces.take(Memory::Host, ONE, &mut orders);
        pieces.made(first, true, &mut orders);
        pieces.let_go(first, &mut orders);
        assert_eq!(pieces.take(Memory::Host, ONE, &mut orders), first);
        pieces.let_go(first, &mut orders);
        orders.clear();
        let second = pieces.take(Memory::Host, TWO, &mut orders);
        assert_eq!(
            orders,
            [Order::Drop(first), Order::Make(New { piece: second, memory: Memory::Host, zeroed: true })]
        );
    }

    #[test]
    fn a_piece_of_the_card_is_given_up_when_the_last_holder_lets_go() {
        let (mut pieces, mut orders) = (Pieces::new(0, 0), Vec::<Order>::new());
        let piece = pieces.take(Memory::Device, ONE, &mut orders);
        pieces.made(piece, true, &mut orders);
        pieces.hold(piece);
        orders.clear();
        pieces.let_go(piece, &mut orders);
        assert_eq!(orders, []);
        pieces.let_go(piece, &mut orders);
        assert_eq!(orders, [Order::Drop(piece)]);
    }

    #[test]
    fn a_piece_to_copy_to_is_not_zeroed_unless_it_may_be_kept() {
        let (mut pieces, mut orders) = (Pieces::new(8, 0), Vec::<Order>::new());
        for memory in [Memory::Device, Memory::Host] {
            pieces.take_to_copy(memory, ONE, &mut orders);
        }
        pieces.take(Memory::Device, ONE, &mut orders);
        let zeroed = |order: &Order| matches!(order, Order::Make(New { zeroed: true, .. }));
        assert_eq!(orders.iter().map(zeroed).collect::<Vec<_>>(), [false, true, true]);
    }

    #[test]
    fn stock_refill_is_split_into_bounded_steps() {
        let (mut pieces, mut orders) = (Pieces::<u64>::new(64, 40), Vec::<Order>::new());
        let mut made = 0;
        loop {
            pieces.refill(&mut orders);
            if orders.is_empty() {
                break;
            }
            assert!(orders.len() <= STOCKING_MOST, "{} at a time", orders.len());
            for order in std::mem::take(&mut orders) {
                let Order::Make(New { piece, .. }) = order else { panic!("{order:?}") };
                pieces.made(piece, true, &mut orders);
                made += 1;
            }
        }
        assert_eq!(made, 40);
    }

    #[test]
    fn preparation_allocates_few_pieces_at_a_time_until_a_failure() {
        let (mut pieces, mut orders) = (Pieces::new(64, 0), Vec::<Order>::new());
        let kept = pieces.take(Memory::Host, ONE, &mut orders);
        pieces.made(kept, true, &mut orders);
        pieces.let_go(kept, &mut orders);
        orders.clear();
        assert!(!pieces.is_preparing(ONE.tenant) && !pieces.end_preparation(ONE.tenant));
        pieces.prepare(ONE.tenant, 6, &[ONE.session]);
        let mut made = 0;
        while pieces.is_preparing(ONE.tenant) {
            pieces.continue_preparing(&mut orders);
            assert!((1..=STOCKING_MOST).contains(&orders.len()), "{} at a time", orders.len());
            for order in std::mem::take(&mut orders) {
                let Order::Make(New { piece, memory: Memory::Host, .. }) = order else { panic!("{order:?}") };
                pieces.made(piece, true, &mut orders);
                made += 1;
            }
        }
        assert_eq!(made, 5, "one piece is kept for the process");
        assert!(pieces.end_preparation(ONE.tenant));
        for _ in 0..6 {
            pieces.take_to_copy(Memory::Host, ONE, &mut orders);
        }
        assert_eq!(orders, [], "all were allocated");
        pieces.prepare(TWO.tenant, 4, &[]);
        pieces.continue_preparing(&mut orders);
        let Some(Order::Make(New { piece, .. })) = orders.pop() else { panic!("{orders:?}") };
        pieces.made(piece, true, &mut orders);
        let Some(Order::Make(New { piece, .. })) = orders.pop() else { panic!("{orders:?}") };
        pieces.made(piece, false, &mut orders);
        assert!(!pieces.is_preparing(TWO.tenant), "host memory is full");
        assert!(pieces.end_preparation(TWO.tenant));
        orders.clear();
        pieces.trim_stock(&mut orders);
        assert_eq!(orders.len(), 1, "the stock needs no pieces");
    }

    #[test]
    fn preparation_stops_at_the_maximum_number_of_pieces() {
        let (mut pieces, mut orders) = (Pieces::<u64>::new(3, 0), Vec::<Order>::new());
        pieces.prepare(ONE.tenant, 8, &[]);
        pieces.continue_preparing(&mut orders);
        while let Some(Order::Make(New { piece, .. })) = orders.pop() {
            pieces.made(piece, true, &mut orders);
            pieces.continue_preparing(&mut orders);
        }
        assert!(!pieces.is_preparing(ONE.tenant));
        assert_eq!(pieces.count(Memory::Host), 3);
    }

    #[test]
    fn host_pieces_are_ready_before_they_are_needed() {
        let (mut pieces, mut orders) = (Pieces::new(8, 2), Vec::<Order>::new());
        pieces.refill(&mut orders);
        assert_eq!(orders.len(), 2);
        for id in [1, 2] {
            pieces.made(PieceId(id), true, &mut orders);
        }
        orders.clear();
        pieces.take(Memory::Host, ONE, &mut orders);
        assert_eq!(orders, [], "one of the stock");
        pieces.refill(&mut orders);
        assert_eq!(orders.len(), 1, "its successor");
    }
}
