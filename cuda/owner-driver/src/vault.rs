//! The physical allocations of a card: their handles, descriptors, and mappings in the owner's address space.

use crate::{Address, Driver, DriverError, Handle, Memory, Queue};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum amount of card memory, in bytes, that is zeroed with copies. The copies take 1.2 ms, and a kernel takes 2 ms
/// if other processes use the card, and delays them as long.
const MAX_COPIED_ZEROS: u64 = 64 << 20;

/// Number of a piece, which is a physical allocation of a chunk's size. Numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PieceId(pub u64);

/// A piece to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct New {
    /// Number of the piece.
    pub piece: PieceId,
    /// Kind of memory.
    pub memory: Memory,
    /// Set if the piece must be zeroed.
    pub zeroed: bool,
}

impl New {
    /// Returns true if the piece is card memory that must be zeroed. Zeroing it takes less time than the wait for the
    /// card, so one wait should cover several pieces.
    pub fn is_quick(&self) -> bool {
        self.memory == Memory::Device && self.zeroed
    }

    /// Returns the queue that zeroes the piece, or `None` if it need not be zeroed. `card_bytes` is the amount of card
    /// memory that is zeroed with one wait.
    fn queue(&self, card_bytes: u64) -> Option<Queue> {
        self.zeroed.then_some(match self.memory {
            Memory::Device if card_bytes <= MAX_COPIED_ZEROS => Queue::ZeroByCopy,
            Memory::Device => Queue::Zero,
            Memory::Host => Queue::ZeroHost,
        })
    }
}

/// A piece that exists.
#[derive(Clone, Debug)]
struct Physical {
    handle: Handle,
    at: Address,
    memory: Memory,
    descriptor: Arc<OwnedFd>,
}

#[derive(Debug)]
struct State {
    pieces: BTreeMap<PieceId, Physical>,
    /// Descriptors of received pieces that are not mapped yet.
    received: BTreeMap<PieceId, OwnedFd>,
    /// Unmapped address ranges of a chunk's size.
    free: Vec<Address>,
    /// Pieces with a pending order that has not been cancelled.
    ordered: BTreeSet<PieceId>,
}

impl State {
    /// Returns the number of open descriptors of pieces.
    fn descriptors(&self) -> usize {
        self.pieces.len() + self.received.len()
    }
}

/// All pieces of a card. The threads that call the driver share this value. The lock is never held during a driver
/// call.
pub struct Vault {
    driver: Arc<dyn Driver>,
    bytes: u64,
    /// Maximum number of descriptors of pieces.
    descriptors_most: usize,
    state: Mutex<State>,
}

impl Vault {
    /// Creates a vault for at most `most` pieces of `bytes` bytes, with at most `descriptors_most` descriptors.
    pub fn new(driver: Arc<dyn Driver>, bytes: u64, most: u64, descriptors_most: usize) -> Result<Self, DriverError> {
        let start = driver.reserve(bytes * most)?;
        // Use the lowest addresses first.
        let free = (0..most).rev().map(|at| start.plus(at * bytes)).collect();
        let (pieces, received, ordered) = Default::default();
        Ok(Self { driver, bytes, descriptors_most, state: Mutex::new(State { pieces, received, free, ordered }) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // PANIC: none; no operation under the lock can panic halfway through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the driver.
    #[must_use]
    pub fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// Stores a received descriptor, if the limit permits. Otherwise, the piece cannot be imported.
    pub fn receive(&self, piece: PieceId, descriptor: OwnedFd) {
        let mut state = self.lock();
        if state.descriptors() < self.descriptors_most {
            state.received.insert(piece, descriptor);
        }
    }

    /// Orders a piece. [`Self::cancel`] can cancel the order until a worker starts to create the piece.
    pub fn order(&self, piece: PieceId) {
        self.lock().ordered.insert(piece);
    }

    /// Cancels the order of a piece, unless a worker is already creating it.
    pub fn cancel(&self, piece: PieceId) {
        self.lock().ordered.remove(&piece);
    }

    /// Removes the order of a piece that is about to be created. Returns false if the order was cancelled. Afterwards,
    /// the piece can only be released with [`Self::drop_piece`].
    pub fn begins(&self, piece: PieceId) -> bool {
        self.lock().ordered.remove(&piece)
    }

    /// Returns the descriptor of an existing piece.
    #[must_use]
    pub fn descriptor(&self, piece: PieceId) -> Option<Arc<OwnedFd>> {
        self.lock().pieces.get(&piece).map(|physical| Arc::clone(&physical.descriptor))
    }

    /// Returns the kind of memory of an existing piece.
    #[must_use]
    pub fn memory(&self, piece: PieceId) -> Option<Memory> {
        self.lock().pieces.get(&piece).map(|physical| physical.memory)
    }

    /// Creates pieces. Waits once per queue for the pieces that must be zeroed.
    pub fn make(&self, pieces: Vec<New>) -> Vec<(New, Result<(), DriverError>)> {
        let card_bytes = pieces.iter().filter(|new| new.is_quick()).count() as u64 * self.bytes;
        let begun: Vec<_> = pieces.into_iter().map(|new| (new, self.begin(new, card_bytes))).collect();
        let queues: BTreeSet<Queue> = begun.iter().filter_map(|(new, _)| new.queue(card_bytes)).collect();
        let zeroed = queues.into_iter().try_for_each(|queue| self.driver.finish(queue));
        let end = |(new, begun): (New, Result<_, DriverError>)| {
            let (handle, at) = match begun {
                Ok(begun) => begun,
                Err(error) => return (new, Err(error)),
            };
            match zeroed.clone().and_then(|()| self.driver.export(handle)) {
                Ok(descriptor) => {
                    let physical = Physical { handle, at, memory: new.memory, descriptor: Arc::new(descriptor) };
                    self.lock().pieces.insert(new.piece, physical);
                    (new, Ok(()))
                }
                Err(error) => {
                    self.destroy(handle, at);
                    (new, Err(error))
                }
            }
        };
        begun.into_iter().map(end).collect()
    }

    /// Creates the memory of a piece, and starts to zero it if requested.
    fn begin(&self, new: New, card_bytes: u64) -> Result<(Handle, Address), DriverError> {
        if self.lock().descriptors() >= self.descriptors_most {
            return Err(DriverError::Missing("descriptor for one more chunk: raise the limit on open files"));
        }
        let handle = self.driver.create(new.memory, self.bytes)?;
        let at = match self.map(handle) {
            Ok(at) => at,
            Err(error) => {
                let _ = self.driver.release(handle);
                return Err(error);
            }
        };
        match new.queue(card_bytes).map_or(Ok(()), |queue| self.driver.zero(queue, at, self.bytes)) {
            Ok(()) => Ok((handle, at)),
            Err(error) => {
                self.destroy(handle, at);
                Err(error)
            }
        }
    }

    /// Imports and maps a piece that a program has sent.
    pub fn import(&self, piece: PieceId) -> Result<Memory, DriverError> {
        let descriptor = self.lock().received.remove(&piece).ok_or(DriverError::Missing("descriptor of a chunk"))?;
        let handle = self.driver.import(descriptor.as_fd())?;
        let at = match self.map(handle) {
            Ok(at) => at,
            Err(error) => {
                let _ = self.driver.release(handle);
                return Err(error);
            }
        };
        match self.driver.memory_at(at) {
            Ok(memory) => {
                let physical = Physical { handle, at, memory, descriptor: Arc::new(descriptor) };
                self.lock().pieces.insert(piece, physical);
                Ok(memory)
            }
            Err(error) => {
                self.destroy(handle, at);
                Err(error)
            }
        }
    }

    /// Releases pieces in card memory. Returns the number of released bytes that are not free on the card afterwards:
    /// this memory is still in use elsewhere, or another process has allocated as much since.
    pub fn give_up(&self, pieces: &[PieceId]) -> u64 {
        let before = self.driver.free_bytes();
        pieces.iter().for_each(|piece| self.drop_piece(*piece));
        let (Ok(before), Ok(after)) = (before, self.driver.free_bytes()) else { return 0 };
        (pieces.len() as u64 * self.bytes).saturating_sub(after.saturating_sub(before))
    }

    /// Releases a piece.
    pub fn drop_piece(&self, piece: PieceId) {
        let (physical, _descriptor) = {
            let mut state = self.lock();
            (state.pieces.remove(&piece), state.received.remove(&piece))
        };
        if let Some(Physical { handle, at, descriptor, .. }) = physical {
            drop(descriptor);
            self.destroy(handle, at);
        }
    }

    /// Copies the first piece of each pair to the second piece, and waits for the copies to complete.
    pub fn copy(&self, queue: Queue, pieces: &[(PieceId, PieceId)]) -> Result<(), DriverError> {
        let places: Vec<(Address, Address)> = {
            let state = self.lock();
            let at = |piece| state.pieces.get(piece).map(|physical: &Physical| physical.at);
            pieces.iter().filter_map(|(from, to)| Some((at(from)?, at(to)?))).collect()
        };
        if places.len() != pieces.len() {
            return Err(DriverError::Missing("the piece to copy"));
        }
        for (from, to) in places {
            self.driver.copy(queue, to, from, self.bytes)?;
        }
        self.driver.finish(queue)
    }

    fn map(&self, handle: Handle) -> Result<Address, DriverError> {
        let at = self.lock().free.pop().ok_or(DriverError::Missing("address for one more chunk"))?;
        if let Err(error) = self.driver.map(at, self.bytes, handle) {
            self.lock().free.push(at);
            return Err(error);
        }
        Ok(at)
    }

    fn destroy(&self, handle: Handle, at: Address) {
        let done = self.driver.unmap(at, self.bytes).and_then(|()| self.driver.release(handle));
        match done {
            Ok(()) => self.lock().free.push(at),
            Err(error) => tracing::error!(%error, "the memory of a chunk cannot be released"),
        }
    }
}

impl Drop for Vault {
    /// Releases the owner's references to all pieces. Programs keep their own references, and send the pieces to the
    /// next owner.
    fn drop(&mut self) {
        let pieces = std::mem::take(&mut self.lock().pieces);
        for Physical { handle, at, descriptor, .. } in pieces.into_values() {
            drop(descriptor);
            self.destroy(handle, at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_amounts_of_card_memory_are_zeroed_with_copies() {
        let new = |memory, zeroed| New { piece: PieceId(1), memory, zeroed };
        let queue = |memory, bytes| new(memory, true).queue(bytes);
        assert_eq!(queue(Memory::Device, 64 << 20), Some(Queue::ZeroByCopy));
        assert_eq!(queue(Memory::Device, 65 << 20), Some(Queue::Zero));
        assert_eq!(queue(Memory::Host, 1 << 30), Some(Queue::ZeroHost));
        assert_eq!(new(Memory::Device, false).queue(0), None);
    }
}
