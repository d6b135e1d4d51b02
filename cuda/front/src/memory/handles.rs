//! Handles and mappings of a program that manages its virtual memory itself.
//!
//! A handle is a number of ours. It stands for whole chunks of the owner's and, where its length is no whole number of
//! them, an allocation of the driver's for the rest. Each of these pieces is mapped by itself within a mapping of the
//! program's; what the program may do is decided by its own mappings, as the driver decides it.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;

use cuda_protocol::{Adopted, Chunk, ChunkId, Place};

use super::kept::Kept;
use crate::driver::{Access, Address, Handle, INVALID_VALUE, NOT_SUPPORTED, SUCCESS};

/// `CUmemAllocationProp`.
pub type Property = [c_int; 8];

/// First of our numbers: no address that the driver could have as a handle.
const FIRST: Handle = 0x6d65_6469_0000_0000;

/// The driver's functions that handles need.
pub trait Pages {
    /// Maps all of a driver's handle.
    fn map(&mut self, at: Address, bytes: u64, handle: Handle) -> c_int;
    /// Unmaps whole mappings.
    fn unmap(&mut self, at: Address, bytes: u64) -> c_int;
    /// Sets who may access whole mappings.
    fn allow(&mut self, at: Address, bytes: u64, access: &[Access]) -> c_int;
    /// Gives a driver's handle up.
    fn release(&mut self, handle: Handle);
}

/// A chunk, as the owner knows it.
#[derive(Debug)]
pub struct Backing {
    /// Identity.
    pub id: ChunkId,
    /// Memory that it lies in.
    pub place: Place,
    /// For the next owner.
    pub kept: Option<Kept>,
}

/// Memory of the driver's that is mapped whole.
#[derive(Debug)]
pub struct Piece {
    /// The driver's handle.
    pub handle: Handle,
    /// Bytes.
    pub bytes: u64,
    /// The chunk; none for what the driver has allocated.
    pub chunk: Option<Backing>,
}

/// Remains of a handle that nothing needs any more.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Freed {
    /// Card.
    pub card: u8,
    /// Chunks.
    pub chunks: Vec<ChunkId>,
    /// Bytes that the driver had allocated.
    pub fixed: u64,
}

#[derive(Debug)]
struct Made {
    card: u8,
    property: Property,
    bytes: u64,
    /// References of the program: by creation and by `cuMemRetainAllocationHandle`.
    references: u32,
    /// Mappings by their addresses.
    mapped: Vec<Address>,
    pieces: Vec<Piece>,
}

#[derive(Debug)]
struct Mapping {
    /// Number of its own.
    id: u64,
    handle: Handle,
    bytes: u64,
    /// The last word about each location.
    access: Vec<Access>,
}

/// Relation of a range of addresses to our mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cover {
    /// None lies in it.
    None,
    /// All that lie in it lie in it whole.
    Whole,
    /// One lies in it in part.
    Part,
}

/// A mapping that an address lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// First address.
    pub start: Address,
    /// Bytes.
    pub bytes: u64,
    /// Our number of the handle.
    pub handle: Handle,
    /// Our number of the mapping.
    pub id: u64,
    /// The driver's device that the memory is of.
    pub device: c_int,
}

/// Handles of the program and their mappings.
#[derive(Debug, Default)]
pub struct Handles {
    made: BTreeMap<Handle, Made>,
    mappings: BTreeMap<Address, Mapping>,
    places: HashMap<ChunkId, (Handle, usize)>,
    next: u64,
}

impl Handles {
    /// Makes a handle of these pieces, with one reference.
    pub fn add(&mut self, card: u8, property: Property, pieces: Vec<Piece>) -> Handle {
        self.next += 1;
        let handle = FIRST + self.next;
        for (at, chunk) in pieces.iter().enumerate().filter_map(|(at, piece)| Some((at, piece.chunk.as_ref()?))) {
            self.places.insert(chunk.id, (handle, at));
        }
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        self.made.insert(handle, Made { card, property, bytes, references: 1, mapped: Vec::new(), pieces });
        handle
    }

    /// Says if a number may be one of ours: the driver must not see it.
    pub fn is_ours(handle: Handle) -> bool {
        handle & !0xffff_ffff == FIRST
    }

    /// Returns the description that a handle was made by, while the program has a reference.
    pub fn property(&self, handle: Handle) -> Option<Property> {
        self.made.get(&handle).filter(|made| made.references > 0).map(|made| made.property)
    }

    /// Maps all of a handle. Nothing may access it yet.
    pub fn map(&mut self, pages: &mut impl Pages, at: Address, (bytes, offset): (u64, u64), handle: Handle) -> c_int {
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

    /// Returns how a range lies to our mappings.
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

    /// Unmaps all that lies in a range, other mappings of the program included; what nothing needs any more.
    pub fn unmap(&mut self, pages: &mut impl Pages, at: Address, bytes: u64) -> Result<Vec<Freed>, c_int> {
        if self.cover(at, bytes) == Cover::Part {
            return Err(INVALID_VALUE);
        }
        match pages.unmap(at, bytes) {
            SUCCESS => {}
            error => return Err(error),
        }
        let starts: Vec<_> = self.within(at, bytes).map(|(start, _)| start).collect();
        let mut freed = Vec::new();
        for start in starts {
            let Some(mapping) = self.mappings.remove(&start) else { continue };
            if let Some(made) = self.made.get_mut(&mapping.handle) {
                made.mapped.retain(|at| *at != start);
            }
            freed.extend(self.end(pages, mapping.handle));
        }
        Ok(freed)
    }

    /// Says who may access a range, other mappings of the program included.
    pub fn allow(&mut self, pages: &mut impl Pages, at: Address, bytes: u64, access: &[Access]) -> c_int {
        match self.cover(at, bytes) {
            Cover::Part => return INVALID_VALUE,
            // A piece in host memory would let the host access it, and take that back when it moves.
            Cover::Whole if access.iter().any(|access| !access.is_device()) => return NOT_SUPPORTED,
            Cover::Whole | Cover::None => {}
        }
        let result = pages.allow(at, bytes, access);
        if result != SUCCESS {
            return result;
        }
        let starts: Vec<_> = self.within(at, bytes).map(|(start, _)| start).collect();
        for start in starts {
            let Some(mapping) = self.mappings.get_mut(&start) else { continue };
            for new in access {
                mapping.access.retain(|known| !known.same_location(new));
                mapping.access.push(*new);
            }
        }
        SUCCESS
    }

    /// Returns the access to the mapping at an address of one of ours that a location has.
    pub fn access(&self, at: Address, location: Access) -> Option<c_int> {
        let mapping = self.mappings.get(&self.find(at)?.start)?;
        Some(mapping.access.iter().find(|known| known.same_location(&location)).map_or(0, Access::flags))
    }

    /// Gives a reference up; what is left if nothing needs it any more.
    pub fn release(&mut self, pages: &mut impl Pages, handle: Handle) -> Result<Option<Freed>, c_int> {
        let made = self.made.get_mut(&handle).filter(|made| made.references > 0).ok_or(INVALID_VALUE)?;
        made.references -= 1;
        Ok(self.end(pages, handle))
    }

    /// Returns the handle that is mapped at an address, with one reference more.
    pub fn retain(&mut self, at: Address) -> Option<Handle> {
        let found = self.find(at)?;
        self.made.get_mut(&found.handle)?.references += 1;
        Some(found.handle)
    }

    /// Returns the mapping that an address lies in.
    pub fn find(&self, at: Address) -> Option<Found> {
        let (&start, mapping) = self.mappings.range(..=at).next_back()?;
        let made = self.made.get(&mapping.handle)?;
        let (bytes, handle, id) = (mapping.bytes, mapping.handle, mapping.id);
        let found = Found { start, bytes, handle, id, device: made.property[3] };
        (at - start < mapping.bytes).then_some(found)
    }

    /// Ends a handle that has neither references nor mappings.
    fn end(&mut self, pages: &mut impl Pages, handle: Handle) -> Option<Freed> {
        self.made.get(&handle).filter(|made| made.references == 0 && made.mapped.is_empty())?;
        let made = self.made.remove(&handle)?;
        let mut freed = Freed { card: made.card, ..Freed::default() };
        for piece in made.pieces {
            pages.release(piece.handle);
            match piece.chunk {
                Some(chunk) => {
                    self.places.remove(&chunk.id);
                    freed.chunks.push(chunk.id);
                }
                None => freed.fixed += piece.bytes,
            }
        }
        Some(freed)
    }

    /// Returns the handle and the piece of a chunk.
    pub fn place(&self, chunk: ChunkId) -> Option<(Handle, usize)> {
        self.places.get(&chunk).copied()
    }

    /// Puts the driver's handle `new` in the place of a chunk's piece wherever it is mapped; it cannot be accessed before
    /// [`Handles::restore`]. False: all is as before, and `new` is not used.
    pub fn replace(
        &mut self,
        pages: &mut impl Pages,
        (handle, number): (Handle, usize),
        (new, chunk): (Handle, Chunk),
        kept: Option<Kept>,
    ) -> bool {
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
        piece.chunk = Some(Backing { id: chunk.id, place: chunk.place, kept });
        true
    }

    /// Gives pieces that were replaced the access that their mappings had; whether all could be given.
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

    /// Returns each chunk with its card and the driver's handle of it.
    pub fn chunks(&self) -> impl Iterator<Item = (u8, Handle, &Backing)> {
        self.made.values().flat_map(|made| {
            made.pieces.iter().filter_map(|piece| Some((made.card, piece.handle, piece.chunk.as_ref()?)))
        })
    }
}

impl Backing {
    /// Returns what the next owner is told of the chunk.
    pub fn adopted(&self, card: u8, descriptor: bool) -> Adopted {
        Adopted { card, id: self.id, place: self.place, descriptor }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u64 = 2 << 20;
    const AT: Address = 0x3_0000_0000;
    const PROPERTY: Property = [1, 0, 1, 0, 0, 0, 0, 0];

    /// A driver that knows what is mapped where, and refuses to map when told so.
    #[derive(Debug, Default)]
    struct Model {
        mapped: BTreeMap<Address, (u64, Handle, Vec<Access>)>,
        released: Vec<Handle>,
        /// Calls of `map` that still succeed.
        left: Option<usize>,
    }

    impl Pages for Model {
        fn map(&mut self, at: Address, bytes: u64, handle: Handle) -> c_int {
            assert!(!self.released.contains(&handle), "mapped after it was given up");
            if let Some(left) = &mut self.left {
                match left.checked_sub(1) {
                    Some(fewer) => *left = fewer,
                    None => {
                        self.left = None;
                        return 2;
                    }
                }
            }
            if self.mapped.range(..at + bytes).next_back().is_some_and(|(start, m)| start + m.0 > at) {
                return INVALID_VALUE;
            }
            self.mapped.insert(at, (bytes, handle, Vec::new()));
            SUCCESS
        }

        fn unmap(&mut self, at: Address, bytes: u64) -> c_int {
            self.mapped.retain(|start, _| *start < at || *start >= at + bytes);
            SUCCESS
        }

        fn allow(&mut self, at: Address, bytes: u64, access: &[Access]) -> c_int {
            self.mapped.range_mut(at..at + bytes).for_each(|(_, mapping)| mapping.2 = access.to_vec());
            SUCCESS
        }

        fn release(&mut self, handle: Handle) {
            assert!(!self.released.contains(&handle), "released twice");
            self.released.push(handle);
        }
    }

    fn chunk(id: u64) -> Piece {
        let chunk = Backing { id: ChunkId(id), place: Place::Device, kept: None };
        Piece { handle: 100 + id, bytes: CHUNK, chunk: Some(chunk) }
    }

    /// Two chunks and a piece of the driver's of half a chunk.
    fn three(handles: &mut Handles, first: u64) -> Handle {
        let rest = Piece { handle: 100 + first + 2, bytes: CHUNK / 2, chunk: None };
        handles.add(0, PROPERTY, vec![chunk(first), chunk(first + 1), rest])
    }

    const ALL: u64 = 2 * CHUNK + CHUNK / 2;

    fn move_of(id: u64) -> Chunk {
        Chunk { id: ChunkId(id), place: Place::Host }
    }

    #[test]
    fn a_handle_lives_as_long_as_a_reference_or_a_mapping() {
        let (mut handles, mut pages) = (Handles::default(), Model::default());
        let handle = three(&mut handles, 0);
        assert_eq!(handles.map(&mut pages, AT, (ALL, 0), handle), SUCCESS);
        assert_eq!(handles.release(&mut pages, handle), Ok(None), "it is mapped");
        assert_eq!(handles.release(&mut pages, handle), Err(INVALID_VALUE), "the program has no reference");
        assert_eq!(handles.map(&mut pages, AT + 8 * CHUNK, (ALL, 0), handle), INVALID_VALUE);
        assert_eq!(handles.property(handle), None);
        assert_eq!(handles.retain(AT + ALL - 1), Some(handle));
        assert_eq!(handles.map(&mut pages, AT + 8 * CHUNK, (ALL, 0), handle), SUCCESS, "it has one again");
        assert_eq!(handles.unmap(&mut pages, AT, 32 * CHUNK), Ok(Vec::new()), "both mappings and the gap between them");
        assert!(pages.released.is_empty() && pages.mapped.is_empty());
        let freed = Freed { card: 0, chunks: vec![ChunkId(0), ChunkId(1)], fixed: CHUNK / 2 };
        assert_eq!(handles.release(&mut pages, handle), Ok(Some(freed)));
        assert_eq!(pages.released, [100, 101, 102]);
        assert_eq!(handles.place(ChunkId(0)), None);
    }

    #[test]
    fn only_whole_handles_and_whole_mappings_will_do() {
        let (mut handles, mut pages) = (Handles::default(), Model::default());
        let handle = three(&mut handles, 0);
        assert_eq!(handles.map(&mut pages, AT, (0, 0), handle), INVALID_VALUE);
        assert_eq!(handles.map(&mut pages, AT, (CHUNK, 0), handle), NOT_SUPPORTED);
        assert_eq!(handles.map(&mut pages, AT, (CHUNK, CHUNK), handle), NOT_SUPPORTED);
        assert_eq!(handles.map(&mut pages, AT, (ALL, 0), handle + 1), INVALID_VALUE);
        assert_eq!(handles.map(&mut pages, AT, (ALL, 0), handle), SUCCESS);
        assert_eq!(handles.cover(AT - CHUNK, CHUNK), Cover::None);
        assert_eq!(handles.cover(AT - CHUNK, ALL + CHUNK), Cover::Whole);
        for (at, bytes) in [(AT, CHUNK), (AT + CHUNK, ALL), (AT - CHUNK, 2 * CHUNK), (AT + CHUNK, CHUNK)] {
            assert_eq!(handles.unmap(&mut pages, at, bytes), Err(INVALID_VALUE));
            assert_eq!(handles.allow(&mut pages, at, bytes, &[Access::all(0)]), INVALID_VALUE);
        }
        assert_eq!(handles.allow(&mut pages, AT, ALL, &[Access::none(2, 0)]), NOT_SUPPORTED, "the host");
        assert_eq!(pages.mapped.len(), 3);
        assert_eq!(pages.map(AT + ALL, CHUNK, 7), SUCCESS, "a handle of the driver's");
        assert_eq!(handles.allow(&mut pages, AT + ALL, CHUNK, &[Access::none(2, 0)]), SUCCESS, "its own affair");
        assert_eq!(handles.find(AT + ALL), None);
    }

    #[test]
    fn a_handle_that_cannot_be_mapped_whole_is_not_mapped() {
        let (mut handles, mut pages) = (Handles::default(), Model { left: Some(2), ..Model::default() });
        let handle = three(&mut handles, 0);
        assert_eq!(handles.map(&mut pages, AT, (ALL, 0), handle), 2);
        assert!(pages.mapped.is_empty() && handles.find(AT).is_none());
    }

    #[test]
    fn a_piece_moves_at_all_its_addresses_and_each_keeps_its_access() {
        let (mut handles, mut pages) = (Handles::default(), Model::default());
        let handle = three(&mut handles, 0);
        let (rw, ro) = ([Access::all(0)], [Access::none(1, 0)]);
        let other = AT + 8 * CHUNK;
        for (at, access) in [(AT, Some(&rw)), (other, Some(&ro)), (AT + 16 * CHUNK, None)] {
            assert_eq!(handles.map(&mut pages, at, (ALL, 0), handle), SUCCESS);
            if let Some(access) = access {
                assert_eq!(handles.allow(&mut pages, at, ALL, access), SUCCESS);
            }
        }
        let places: Vec<_> = [0, 1].map(|id| handles.place(ChunkId(id)).expect("a place")).to_vec();
        for (place, id) in places.iter().zip([0, 1]) {
            assert!(handles.replace(&mut pages, *place, (200 + id, move_of(id)), None));
        }
        assert!(handles.restore(&mut pages, places));
        for (at, access) in [(AT, &rw[..]), (other, &ro[..]), (AT + 16 * CHUNK, &[])] {
            let mapped: Vec<_> = pages.mapped.range(at..at + ALL).map(|(_, m)| (m.1, m.2.as_slice())).collect();
            assert_eq!(mapped, [(200, access), (201, access), (102, access)]);
        }
        assert_eq!(pages.released, [100, 101]);
        assert_eq!(handles.access(AT + CHUNK, Access::none(1, 0)), Some(3));
        assert_eq!(handles.access(other, Access::none(1, 0)), Some(0));
        assert_eq!(handles.access(AT + 4 * CHUNK, Access::none(1, 0)), None, "nothing is mapped there");
        assert!(handles.chunks().all(|(_, _, chunk)| chunk.place == Place::Host));
    }

    #[test]
    fn a_copy_that_cannot_be_mapped_everywhere_is_mapped_nowhere() {
        let (mut handles, mut pages) = (Handles::default(), Model::default());
        let handle = three(&mut handles, 0);
        for at in [AT, AT + 8 * CHUNK, AT + 16 * CHUNK] {
            assert_eq!(handles.map(&mut pages, at, (ALL, 0), handle), SUCCESS);
            assert_eq!(handles.allow(&mut pages, at, ALL, &[Access::all(0)]), SUCCESS);
        }
        let before = pages.mapped.clone();
        pages.left = Some(1);
        let place = handles.place(ChunkId(1)).expect("a place");
        assert!(!handles.replace(&mut pages, place, (201, move_of(1)), None));
        assert_eq!(pages.mapped, before);
        assert!(pages.released.is_empty());
        assert!(handles.replace(&mut pages, place, (202, move_of(1)), None), "later it can");
        assert!(handles.restore(&mut pages, vec![place]));
    }

    #[test]
    fn a_handle_that_is_mapped_nowhere_moves_and_is_mapped_at_its_new_place() {
        let (mut handles, mut pages) = (Handles::default(), Model::default());
        let handle = three(&mut handles, 0);
        let place = handles.place(ChunkId(0)).expect("a place");
        assert!(handles.replace(&mut pages, place, (200, move_of(0)), None));
        assert_eq!(pages.released, [100]);
        assert_eq!(handles.map(&mut pages, AT, (ALL, 0), handle), SUCCESS);
        assert_eq!(pages.mapped[&AT].1, 200);
    }
}
