//! Handles and mappings of programs that manage their own virtual memory.
//!
//! This library assigns the handle numbers. A handle is backed by the owner's chunks and, if its size is not a multiple
//! of the chunk size, by a driver allocation for the remainder. When the program maps the handle, each of these pieces
//! is mapped separately. As with the driver, the program sets the access permissions of each mapping.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;
use std::os::fd::BorrowedFd;

use cuda_protocol::{Adopted, Chunk, ChunkId, Place};

use crate::descriptors::ChunkDescriptor;
use crate::driver::{Access, Address, Handle, INVALID_VALUE, NOT_SUPPORTED, SUCCESS};

/// `CUmemAllocationProp`.
pub type Property = [c_int; 8];

/// First handle number of this library, outside the addresses that the driver uses as handles. The bits starting at
/// [`CARD`] contain the card's number.
const FIRST: Handle = 0x6d65_6400_0000_0000;
/// Bit position of the card number in a handle.
const CARD: u32 = 32;
/// Mask of the card number.
const CARDS: Handle = 0xff;

/// Driver functions that [`Handles`] calls.
pub trait Pages {
    /// Imports memory from a file descriptor.
    fn import(&mut self, descriptor: BorrowedFd<'_>) -> Option<Handle>;
    /// Maps a driver handle's entire memory.
    fn map(&mut self, at: Address, bytes: u64, handle: Handle) -> c_int;
    /// Unmaps whole mappings.
    fn unmap(&mut self, at: Address, bytes: u64) -> c_int;
    /// Sets the access permissions of whole mappings.
    fn allow(&mut self, at: Address, bytes: u64, access: &[Access]) -> c_int;
    /// Releases a driver handle.
    fn release(&mut self, handle: Handle);
}

/// A chunk, with its location.
#[derive(Debug)]
pub struct Backing {
    /// ID of the chunk.
    pub id: ChunkId,
    /// Current location of the chunk.
    pub place: Place,
    /// Descriptor for the next owner.
    pub descriptor: Option<ChunkDescriptor>,
    /// Set if other processes may also use the chunk.
    pub shared: bool,
}

/// A unit of driver memory, which is always mapped as a whole.
#[derive(Debug)]
pub struct Piece {
    pub handle: Handle,
    pub bytes: u64,
    /// The chunk, or `None` for memory allocated by the driver.
    pub chunk: Option<Backing>,
}

/// Memory freed with a handle.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Freed {
    pub card: u8,
    pub chunks: Vec<ChunkId>,
    /// Size of the driver allocations that were not exported, in bytes.
    pub fixed: u64,
    /// Size of the driver allocations that may have been exported, in bytes.
    pub exported: u64,
}

/// Data needed to export a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Described {
    pub card: u8,
    /// Properties passed at the creation of the handle.
    pub property: Property,
    pub bytes: u64,
    /// Driver handle for the whole memory, if the handle is already exportable.
    pub whole: Option<Handle>,
}

#[derive(Debug)]
struct Made {
    card: u8,
    property: Property,
    bytes: u64,
    /// Number of the program's references, from `cuMemCreate` and `cuMemRetainAllocationHandle`.
    references: u32,
    /// Addresses of the mappings.
    mapped: Vec<Address>,
    pieces: Vec<Piece>,
    /// Set if the handle is a single driver allocation that may have been exported.
    exported: bool,
}

#[derive(Debug)]
struct Mapping {
    /// ID of the mapping.
    id: u64,
    handle: Handle,
    bytes: u64,
    /// Last access permission set for each location.
    access: Vec<Access>,
}

/// Relation of an address range to this library's mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cover {
    /// The range contains no mapping.
    None,
    /// The range contains only complete mappings.
    Whole,
    /// The range contains a part of a mapping.
    Part,
}

/// The mapping that contains a given address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    pub start: Address,
    pub bytes: u64,
    /// This library's handle number.
    pub handle: Handle,
    /// This library's mapping ID.
    pub id: u64,
    /// Driver device of the memory.
    pub device: c_int,
}

/// The program's handles and their mappings.
#[derive(Debug, Default)]
pub struct Handles {
    made: BTreeMap<Handle, Made>,
    mappings: BTreeMap<Address, Mapping>,
    places: HashMap<ChunkId, (Handle, usize)>,
    next: u64,
}

impl Handles {
    /// Creates an empty set of handles for the program's card number `card`.
    pub fn of_card(card: usize) -> Self {
        Self { next: (card as Handle & CARDS) << CARD, ..Self::default() }
    }

    /// Returns the card number in a handle of this library.
    pub fn card(handle: Handle) -> usize {
        (handle >> CARD & CARDS) as usize
    }

    /// Creates a handle from pieces, with one reference.
    pub fn add(&mut self, card: u8, property: Property, pieces: Vec<Piece>) -> Handle {
        self.next += 1;
        let handle = FIRST + self.next;
        for (at, chunk) in pieces.iter().enumerate().filter_map(|(at, piece)| Some((at, piece.chunk.as_ref()?))) {
            self.places.insert(chunk.id, (handle, at));
        }
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        let (mapped, exported) = (Vec::new(), false);
        self.made.insert(handle, Made { card, property, bytes, references: 1, mapped, pieces, exported });
        handle
    }

    /// Returns true if a number may be a handle of this library. Such a handle must not be passed to the driver.
    pub fn is_ours(handle: Handle) -> bool {
        handle & !(CARDS << CARD | 0xffff_ffff) == FIRST
    }

    /// Returns the properties of a handle, if the program still has a reference to it.
    pub fn property(&self, handle: Handle) -> Option<Property> {
        self.made.get(&handle).filter(|made| made.references > 0).map(|made| made.property)
    }

    /// Maps a handle's entire memory, without access rights for any device.
    pub fn map(&mut self, pages: &mut impl Pages, at: Address, bytes: u64, offset: u64, handle: Handle) -> c_int {
        let Some(made) = self.made.get_mut(&handle).filter(|made| made.references > 0) else { return INVALID_VALUE };
        if bytes == 0 {
            return INVALID_VALUE;
        }
        if offset != 0 || bytes != made.bytes {
            return NOT_SUPPORTED;
        }
        let mut end = at;
        for piece in &made.pieces {
            let result = pages.map(end, piece.bytes, piece.handle);
            if result != SUCCESS {
                if end > at {
                    pages.unmap(at, end - at);
                }
                return result;
            }
            end += piece.bytes;
        }
        made.mapped.push(at);
        self.next += 1;
        self.mappings.insert(at, Mapping { id: FIRST + self.next, handle, bytes, access: Vec::new() });
        SUCCESS
    }

    fn within(&self, at: Address, bytes: u64) -> impl Iterator<Item = (Address, u64)> {
        let end = at.saturating_add(bytes);
        let before = self.mappings.range(..at).next_back().filter(move |(start, mapping)| *start + mapping.bytes > at);
        before.into_iter().chain(self.mappings.range(at..end)).map(|(start, mapping)| (*start, mapping.bytes))
    }

    /// Returns the relation of a range to this library's mappings.
    pub fn cover(&self, at: Address, bytes: u64) -> Cover {
        let mut cover = Cover::None;
        for (start, length) in self.within(at, bytes) {
            if start < at || start + length > at.saturating_add(bytes) {
                return Cover::Part;
            }
            cover = Cover::Whole;
        }
        cover
    }

    /// Unmaps all mappings in a range, including the program's driver mappings. Returns the freed memory.
    pub fn unmap(&mut self, pages: &mut impl Pages, at: Address, bytes: u64) -> Result<Vec<Freed>, c_int> {
        if self.cover(at, bytes) == Cover::Part {
            return Err(INVALID_VALUE);
        }
        match pages.unmap(at, bytes) {
            SUCCESS => Ok(self.unmapped(pages, at, bytes)),
            error => Err(error),
        }
    }

    /// Records that the driver has unmapped a range. Returns the freed memory.
    pub fn unmapped(&mut self, pages: &mut impl Pages, at: Address, bytes: u64) -> Vec<Freed> {
        let starts: Vec<_> = self.within(at, bytes).map(|(start, _)| start).collect();
        let mut freed = Vec::new();
        for start in starts {
            let Some(mapping) = self.mappings.remove(&start) else { continue };
            if let Some(made) = self.made.get_mut(&mapping.handle) {
                made.mapped.retain(|at| *at != start);
            }
            freed.extend(self.end(pages, mapping.handle));
        }
        freed
    }

    /// Sets the access permissions of a range, including the program's driver mappings.
    pub fn allow(&mut self, pages: &mut impl Pages, at: Address, bytes: u64, access: &[Access]) -> c_int {
        if let Some(error) = self.refuses(at, bytes, access) {
            return error;
        }
        let result = pages.allow(at, bytes, access);
        if result == SUCCESS {
            self.allowed(at, bytes, access);
        }
        result
    }

    /// Returns the error if these access permissions cannot be set on a range, or `None` if the driver must decide.
    pub fn refuses(&self, at: Address, bytes: u64, access: &[Access]) -> Option<c_int> {
        match self.cover(at, bytes) {
            Cover::Part => Some(INVALID_VALUE),
            // Pieces in host memory would permit host access, and lose it when they move.
            Cover::Whole if access.iter().any(|access| !access.is_device()) => Some(NOT_SUPPORTED),
            Cover::Whole | Cover::None => None,
        }
    }

    /// Records access permissions that the driver has set on a range.
    pub fn allowed(&mut self, at: Address, bytes: u64, access: &[Access]) {
        let starts: Vec<_> = self.within(at, bytes).map(|(start, _)| start).collect();
        for start in starts {
            let Some(mapping) = self.mappings.get_mut(&start) else { continue };
            for new in access {
                mapping.access.retain(|known| !known.same_location(new));
                mapping.access.push(*new);
            }
        }
    }

    /// Returns a location's access permissions for this library's mapping at an address.
    pub fn access(&self, at: Address, location: Access) -> Option<c_int> {
        let mapping = self.mappings.get(&self.find(at)?.start)?;
        Some(mapping.access.iter().find(|known| known.same_location(&location)).map_or(0, Access::flags))
    }

    /// Drops a reference. Returns the freed memory.
    pub fn release(&mut self, pages: &mut impl Pages, handle: Handle) -> Result<Option<Freed>, c_int> {
        let made = self.made.get_mut(&handle).filter(|made| made.references > 0).ok_or(INVALID_VALUE)?;
        made.references -= 1;
        Ok(self.end(pages, handle))
    }

    /// Adds a reference to the handle mapped at an address, and returns the handle.
    pub fn retain(&mut self, at: Address) -> Option<Handle> {
        let found = self.find(at)?;
        self.made.get_mut(&found.handle)?.references += 1;
        Some(found.handle)
    }

    /// Returns the mapping that contains an address.
    pub fn find(&self, at: Address) -> Option<Found> {
        let (&start, mapping) = self.mappings.range(..=at).next_back()?;
        let made = self.made.get(&mapping.handle)?;
        let (bytes, handle, id) = (mapping.bytes, mapping.handle, mapping.id);
        let found = Found { start, bytes, handle, id, device: made.property[3] };
        (at - start < mapping.bytes).then_some(found)
    }

    /// Destroys a handle if it has neither references nor mappings.
    fn end(&mut self, pages: &mut impl Pages, handle: Handle) -> Option<Freed> {
        self.made.get(&handle).filter(|made| made.references == 0 && made.mapped.is_empty())?;
        let made = self.made.remove(&handle)?;
        Some(self.ended(pages, made.card, made.pieces, made.exported))
    }

    /// Releases pieces that no handle or mapping refers to.
    fn ended(&mut self, pages: &mut impl Pages, card: u8, pieces: Vec<Piece>, exported: bool) -> Freed {
        let mut freed = Freed { card, ..Freed::default() };
        for piece in pieces {
            pages.release(piece.handle);
            match piece.chunk {
                Some(chunk) => {
                    self.places.remove(&chunk.id);
                    freed.chunks.push(chunk.id);
                }
                None if exported => freed.exported += piece.bytes,
                None => freed.fixed += piece.bytes,
            }
        }
        freed
    }

    /// Returns the data needed to export a handle, if the program still has a reference to it.
    pub fn described(&self, handle: Handle) -> Option<Described> {
        let made = self.made.get(&handle).filter(|made| made.references > 0)?;
        let whole = made.pieces.first().filter(|_| made.exported).map(|piece| piece.handle);
        Some(Described { card: made.card, property: made.property, bytes: made.bytes, whole })
    }

    /// Returns the driver handle, and the length in bytes, of each piece of a handle.
    pub fn pieces(&self, handle: Handle) -> Vec<(Handle, u64)> {
        let made = self.made.get(&handle);
        made.into_iter().flat_map(|made| &made.pieces).map(|piece| (piece.handle, piece.bytes)).collect()
    }

    /// Replaces a handle's pieces in all mappings with `whole`, an exportable driver allocation with the same contents.
    /// Returns the replaced pieces. On failure, returns `None`, changes nothing, and leaves `whole` unused.
    pub fn unite(&mut self, pages: &mut impl Pages, handle: Handle, whole: Handle) -> Option<Freed> {
        let made = self.made.get_mut(&handle)?;
        let (bytes, mapped) = (made.bytes, made.mapped.clone());
        let split: Vec<_> = made.pieces.iter().map(|piece| (piece.handle, piece.bytes)).collect();
        for (done, &at) in mapped.iter().enumerate() {
            pages.unmap(at, bytes);
            if pages.map(at, bytes, whole) == SUCCESS {
                continue;
            }
            for (number, &at) in mapped.iter().take(done + 1).enumerate() {
                if number < done {
                    pages.unmap(at, bytes);
                }
                let mut end = at;
                for &(handle, bytes) in &split {
                    pages.map(end, bytes, handle);
                    end += bytes;
                }
            }
            self.permit(pages, mapped.iter().take(done + 1).copied(), bytes);
            return None;
        }
        let piece = Piece { handle: whole, bytes, chunk: None };
        let (card, pieces) = (made.card, std::mem::replace(&mut made.pieces, vec![piece]));
        made.exported = true;
        self.permit(pages, mapped.into_iter(), bytes);
        Some(self.ended(pages, card, pieces, false))
    }

    /// Restores the access permissions of mappings that were replaced as a whole.
    fn permit(&self, pages: &mut impl Pages, starts: impl Iterator<Item = Address>, bytes: u64) {
        for start in starts {
            let access = self.mappings.get(&start).map(|mapping| mapping.access.as_slice()).unwrap_or_default();
            if !access.is_empty() {
                pages.allow(start, bytes, access);
            }
        }
    }

    /// Returns the handle that contains a chunk, and the index of its piece.
    pub fn place(&self, chunk: ChunkId) -> Option<(Handle, usize)> {
        self.places.get(&chunk).copied()
    }

    /// Replaces a chunk's piece with the driver handle `new` in all mappings. The memory is inaccessible until
    /// [`Handles::restore`]. On failure, returns false, changes nothing, and leaves `new` unused.
    pub fn replace(
        &mut self,
        pages: &mut impl Pages,
        place: (Handle, usize),
        new: Handle,
        chunk: Chunk,
        descriptor: Option<ChunkDescriptor>,
    ) -> bool {
        let (handle, number) = place;
        let Some(made) = self.made.get_mut(&handle) else { return false };
        let before: u64 = made.pieces.iter().take(number).map(|piece| piece.bytes).sum();
        let Some(piece) = made.pieces.get_mut(number) else { return false };
        for (done, start) in made.mapped.iter().enumerate() {
            let at = start + before;
            pages.unmap(at, piece.bytes);
            if pages.map(at, piece.bytes, new) == SUCCESS {
                continue;
            }
            for (number, start) in made.mapped.iter().take(done + 1).enumerate() {
                let at = start + before;
                if number < done {
                    pages.unmap(at, piece.bytes);
                }
                pages.map(at, piece.bytes, piece.handle);
                if let Some(access) = self.mappings.get(start).map(|mapping| mapping.access.as_slice())
                    && !access.is_empty()
                {
                    pages.allow(at, piece.bytes, access);
                }
            }
            return false;
        }
        pages.release(piece.handle);
        piece.handle = new;
        piece.chunk = Some(Backing::new(chunk, descriptor));
        true
    }

    /// Restores the access permissions of replaced pieces. Returns true on success.
    pub fn restore(&self, pages: &mut impl Pages, mut replaced: Vec<(Handle, usize)>) -> bool {
        replaced.sort_unstable();
        replaced.dedup();
        let mut good = true;
        for run in replaced.chunk_by(|a, b| a.0 == b.0 && a.1 + 1 == b.1) {
            let Some((&(handle, first), made)) = run.first().and_then(|f| Some((f, self.made.get(&f.0)?))) else {
                continue;
            };
            debug_assert!(run.iter().all(|(other, _)| *other == handle));
            let length = |pieces: &[Piece]| pieces.iter().map(|piece| piece.bytes).sum::<u64>();
            let before = length(made.pieces.get(..first).unwrap_or_default());
            let bytes = length(made.pieces.get(first..first + run.len()).unwrap_or_default());
            for start in &made.mapped {
                if let Some(mapping) = self.mappings.get(start).filter(|mapping| !mapping.access.is_empty()) {
                    good &= pages.allow(start + before, bytes, &mapping.access) == SUCCESS;
                }
            }
        }
        good
    }

    /// Returns all chunks, each with its card.
    pub fn chunks(&self) -> impl Iterator<Item = (u8, &Backing)> {
        self.made
            .values()
            .flat_map(|made| made.pieces.iter().filter_map(|piece| Some((made.card, piece.chunk.as_ref()?))))
    }
}

impl Backing {
    /// Creates an entry for an unshared chunk.
    pub fn new(chunk: Chunk, descriptor: Option<ChunkDescriptor>) -> Self {
        Self { id: chunk.id, place: chunk.place, descriptor, shared: false }
    }

    /// Returns a description of the chunk for the next owner.
    pub fn adopted(&self, card: u8, descriptor: bool) -> Adopted {
        Adopted { card, id: self.id, place: self.place, descriptor }
    }
}

#[cfg(test)]
mod tests;
