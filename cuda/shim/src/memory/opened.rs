//! Chunk-backed memory that processes of one tenant share through `cuIpcGetMemHandle` and `cuIpcOpenMemHandle`.
//!
//! The owner does not move such chunks, and passes them to the other process. This library's handles contain the
//! owner's token (32 bytes), [`MARK`], the offset and the length of the allocation in bytes, the number of chunks, and
//! the card. Driver handles are passed to the driver unchanged.
//!
//! UNSAFETY: maps and unmaps card memory.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::{BTreeMap, HashSet};
use std::ffi::c_int;
use std::os::fd::AsFd as _;

use cuda_protocol::{Chunk, ChunkId, Share};

use super::handles::{Backing, Pages as _};
use super::pages::Driver;
use crate::descriptors::ChunkDescriptor;
use crate::driver::{self, Access, Address, Handle, Ipc, SUCCESS};

/// Magic number of this library's handles.
const MARK: u64 = u64::from_le_bytes(*b"mediated");

/// Mapped memory of another process.
#[derive(Debug)]
struct Foreign {
    share: Share,
    device: c_int,
    card: u8,
    /// Start address of the reservation.
    base: Address,
    chunk_bytes: u64,
    /// Size of the other process's allocation in bytes.
    bytes: u64,
    /// Number of times that the memory was opened and not closed again.
    count: u32,
    pieces: Vec<(Handle, Backing)>,
}

/// Other processes' memory, keyed by its address in this program.
#[derive(Debug, Default)]
pub struct Opened {
    foreign: BTreeMap<Address, Foreign>,
    /// Tokens of this process's own memory.
    own: HashSet<Share>,
}

/// A decoded handle of this library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    pub share: Share,
    /// Offset of the allocation in its first chunk, in bytes.
    pub offset: u64,
    pub bytes: u64,
    pub chunks: u32,
    pub card: u8,
}

impl Token {
    /// Encodes a handle.
    pub fn write(self) -> Ipc {
        let mut all = [0; 64];
        all[..32].copy_from_slice(&self.share.0);
        all[32..40].copy_from_slice(&MARK.to_le_bytes());
        all[40..48].copy_from_slice(&self.offset.to_le_bytes());
        all[48..56].copy_from_slice(&self.bytes.to_le_bytes());
        all[56..60].copy_from_slice(&self.chunks.to_le_bytes());
        all[60] = self.card;
        Ipc(all)
    }

    /// Decodes a handle. Returns `None` for a driver handle.
    pub fn read(handle: &Ipc) -> Option<Self> {
        let word = |at: usize| Some(u64::from_le_bytes(handle.0.get(at..at + 8)?.try_into().ok()?));
        (word(32)? == MARK).then_some(())?;
        let share = Share(handle.0.get(..32)?.try_into().ok()?);
        let [chunks @ .., card, _, _, _] = word(56)?.to_le_bytes();
        Some(Self { share, offset: word(40)?, bytes: word(48)?, chunks: u32::from_le_bytes(chunks), card })
    }

    /// Returns true if the allocation is within its chunks. Handles come from other processes, so this must be checked.
    pub fn fits(&self, chunk_bytes: u64) -> bool {
        let all = u64::from(self.chunks).saturating_mul(chunk_bytes);
        self.bytes > 0 && self.offset < chunk_bytes && self.offset.saturating_add(self.bytes) <= all
    }
}

impl Opened {
    /// Returns the start address, size in bytes, and device of the allocation that contains an address.
    pub fn find(&self, address: Address) -> Option<(Address, u64, c_int)> {
        let (&start, foreign) = self.foreign.range(..=address).next_back()?;
        (address - start < foreign.bytes).then_some((start, foreign.bytes, foreign.device))
    }

    /// Returns true if memory of another process starts at an address.
    pub fn starts_at(&self, address: Address) -> bool {
        self.foreign.contains_key(&address)
    }

    /// Records a token of this process's own memory.
    pub fn add_own(&mut self, share: Share) {
        self.own.insert(share);
    }

    /// Returns true if a token belongs to this process's own memory.
    pub fn is_own(&self, share: &Share) -> bool {
        self.own.contains(share)
    }

    /// Returns all chunks, each with its card.
    pub fn chunks(&self) -> impl Iterator<Item = (u8, &Backing)> {
        self.foreign.values().flat_map(|f| f.pieces.iter().map(|(_, chunk)| (f.card, chunk)))
    }

    /// Returns true if a range contains addresses of opened memory.
    pub fn reserved(&self, at: Address, bytes: u64) -> bool {
        let end = at.saturating_add(bytes);
        self.foreign.values().any(|f| at < f.base + f.pieces.len() as u64 * f.chunk_bytes && end > f.base)
    }

    /// Increments the open count of memory that is already open. Returns its address.
    pub fn again(&mut self, share: Share) -> Option<Address> {
        let (start, foreign) = self.foreign.iter_mut().find(|(_, foreign)| foreign.share == share)?;
        foreign.count += 1;
        Some(*start)
    }

    /// Maps chunks that were granted for a token. Returns their IDs on failure.
    pub fn map(
        &mut self,
        token: Token,
        device: c_int,
        chunk_bytes: u64,
        granted: Vec<(Chunk, ChunkDescriptor)>,
    ) -> Result<Address, Vec<ChunkId>> {
        let ids: Vec<_> = granted.iter().map(|part| part.0.id).collect();
        let length = u64::from(token.chunks) * chunk_bytes;
        let mut base = 0;
        if driver::reserve_addresses(&mut base, length as usize, chunk_bytes as usize) != SUCCESS {
            return Err(ids);
        }
        let mut pieces = Vec::new();
        for (chunk, descriptor) in granted {
            let Some(handle) = Driver.import(descriptor.as_fd()) else { break };
            if Driver.map(base + pieces.len() as u64 * chunk_bytes, chunk_bytes, handle) != SUCCESS {
                Driver.release(handle);
                break;
            }
            pieces.push((handle, Backing { shared: true, ..Backing::new(chunk, None) }));
        }
        let (share, bytes, card) = (token.share, token.bytes, token.card);
        let foreign = Foreign { share, device, card, base, chunk_bytes, bytes, count: 1, pieces };
        if foreign.pieces.len() != ids.len() || Driver.allow(base, length, &[Access::all(device)]) != SUCCESS {
            foreign.end(length);
            return Err(ids);
        }
        self.foreign.insert(base + token.offset, foreign);
        Ok(base + token.offset)
    }

    /// Decrements the open count of the memory at an address. Returns the chunks to return to the owner, or `None` if
    /// no opened memory starts at the address.
    pub fn close(&mut self, address: Address) -> Option<Vec<ChunkId>> {
        let foreign = self.foreign.get_mut(&address)?;
        foreign.count -= 1;
        if foreign.count > 0 {
            return Some(Vec::new());
        }
        let foreign = self.foreign.remove(&address)?;
        let length = foreign.pieces.len() as u64 * foreign.chunk_bytes;
        Some(foreign.end(length))
    }
}

impl Foreign {
    /// Unmaps the chunks, and frees the address reservation of `length` bytes. Returns the chunks' IDs.
    fn end(self, length: u64) -> Vec<ChunkId> {
        if !self.pieces.is_empty() {
            Driver.unmap(self.base, self.pieces.len() as u64 * self.chunk_bytes);
        }
        // SAFETY: the reservation belongs to this library, and has no mappings.
        unsafe { driver::mem_address_free(self.base, length as usize) };
        self.pieces.iter().for_each(|(handle, _)| Driver.release(*handle));
        self.pieces.into_iter().map(|(_, chunk)| chunk.id).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u64 = 2 << 20;

    #[test]
    fn handle_token_round_trips_and_driver_handle_is_rejected() {
        let token = Token { share: Share([7; 32]), offset: 4096, bytes: 3 * CHUNK, chunks: 4, card: 1 };
        assert_eq!(Token::read(&token.write()), Some(token));
        assert_eq!(Token::read(&Ipc([0; 64])), None);
    }

    #[test]
    fn a_handle_that_was_changed_does_not_reach_beyond_its_chunks() {
        let token = Token { share: Share([7; 32]), offset: 0, bytes: CHUNK, chunks: 1, card: 0 };
        assert!(token.fits(CHUNK));
        assert!(!Token { bytes: CHUNK + 1, ..token }.fits(CHUNK));
        assert!(!Token { offset: 1, ..token }.fits(CHUNK));
        assert!(!Token { offset: CHUNK, bytes: 1, chunks: 2, ..token }.fits(CHUNK));
        assert!(!Token { bytes: u64::MAX, offset: 5, ..token }.fits(CHUNK));
        assert!(!Token { bytes: 0, ..token }.fits(CHUNK));
        assert!(!Token { chunks: 0, ..token }.fits(CHUNK));
    }
}
