//! Worker side: decodes and checks the arguments of calls, and encodes their results.
//!
//! The decoder works on a private copy of the words. Each length and count is checked against the number of available
//! words and against the free space of the [`Arena`]. Handles are replaced with the driver's handles. Addresses must
//! not be in the worker's memory. The driver checks card addresses.

use crate::boxes::{ARRAY, BoxCopy, End, WORDS_2D, WORDS_3D};
use crate::describe::{Arg, Call, Kind, MAX_ARGUMENTS, Numbered, RESOURCE_WORDS};
use crate::encode::MAX_RESULT_WORDS;
use crate::own::PLAIN_ATTRIBUTES;

/// Size of an arena in words: the longest message plus the longest results.
const ARENA_WORDS: usize = cuda_ring::MAX_WORDS + MAX_RESULT_WORDS + 64;

/// Memory for the data that a call's pointer arguments refer to. Its address is stable.
#[derive(Debug)]
pub struct Arena {
    words: Box<[u64]>,
    used: usize,
}

impl Default for Arena {
    fn default() -> Self {
        Self { words: vec![0; ARENA_WORDS].into_boxed_slice(), used: 0 }
    }
}

impl Arena {
    /// Allocates zeroed space for `bytes` bytes and a terminating NUL. Returns the index of its first word.
    fn take(&mut self, bytes: usize) -> Result<usize, Fault> {
        let first = self.used;
        let end = first + bytes / 8 + 1;
        self.words.get_mut(first..end).ok_or(Fault::Malformed)?.fill(0);
        self.used = end;
        Ok(first)
    }

    fn fill(&mut self, words: &[u64], bytes: usize) -> Result<usize, Fault> {
        let first = self.take(bytes)?;
        let room = self.words.get_mut(first..first + words.len()).ok_or(Fault::Malformed)?;
        room.copy_from_slice(words);
        Ok(first)
    }

    fn address(&self, first: usize) -> u64 {
        self.words.as_ptr().addr() as u64 + 8 * first as u64
    }

    /// Returns `count` words from index `first`.
    fn words(&self, first: usize, count: usize) -> &[u64] {
        self.words.get(first..first + count).unwrap_or_default()
    }
}

/// `CUDA_ERROR_INVALID_VALUE`.
const INVALID_VALUE: i32 = 1;
/// `CUDA_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: i32 = 801;

/// A message that cannot be executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The message is invalid. The program loses its context.
    Malformed,
    /// The call fails with this result code, for example because an object does not exist.
    Refused(i32),
}

/// Looks up the objects that handles refer to.
pub trait Handles {
    /// Returns the driver's handle for a guest's handle.
    ///
    /// # Errors
    /// Returns an error if the object does not exist.
    fn find(&self, kind: Kind, handle: u64) -> Result<u64, Fault>;

    /// Returns true if the handle is of this kind and unused.
    fn is_free(&self, kind: Kind, handle: u64) -> bool;

    /// Returns true if the range is in card or guest memory, not in the worker's memory.
    fn has_range(&self, address: u64, bytes: u64) -> bool;

    /// Returns the address of the last received image, which the next call with an image argument consumes.
    fn image(&self) -> u64;

    /// Returns the size of the last received image in bytes.
    fn image_bytes(&self) -> u64;

    /// Returns true if an object of this kind has this number.
    fn has_number(&self, kind: Numbered, number: u64) -> bool;
}

/// A call that can be executed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Prepared {
    /// Arguments for the driver.
    pub values: [u64; MAX_ARGUMENTS],
    /// Kind and handle of a new object, and the arena index of the word where the driver stores its own handle.
    pub new: Option<(Kind, u64, usize)>,
    /// Handle of an object that the call destroys.
    pub dropped: Option<(Kind, u64)>,
    /// Handle of the object whose destruction also destroys the new object.
    pub owner: Option<u64>,
    /// Kind of a new object whose number the driver assigns.
    pub new_number: Option<Numbered>,
    /// Kind and number of an object that the call destroys.
    pub dropped_number: Option<(Numbered, u64)>,
    /// Arena index and size in bytes of each result.
    results: [Option<(usize, u16)>; 4],
    result_count: usize,
}

impl Prepared {
    /// Returns the driver's handle for the new object.
    pub fn made(&self, arena: &Arena) -> u64 {
        self.new.map_or(0, |(_, _, word)| arena.words(word, 1).first().copied().unwrap_or_default())
    }

    /// Returns the words of all results, in order.
    pub fn results<'a>(&'a self, arena: &'a Arena) -> impl Iterator<Item = u64> + 'a {
        let all = self.results.iter().take(self.result_count).flatten();
        all.flat_map(|(first, bytes)| arena.words(*first, usize::from(*bytes).div_ceil(8)).iter().copied())
    }

    fn result(&mut self, first: usize, bytes: usize) -> Result<(), Fault> {
        let bytes = u16::try_from(bytes).map_err(|_| Fault::Malformed)?;
        *self.results.get_mut(self.result_count).ok_or(Fault::Malformed)? = Some((first, bytes));
        self.result_count += 1;
        Ok(())
    }
}

struct Reader<'a>(&'a [u64]);

impl<'a> Reader<'a> {
    fn word(&mut self) -> Result<u64, Fault> {
        Ok(self.take(1)?.first().copied().unwrap_or_default())
    }

    fn take(&mut self, count: usize) -> Result<&'a [u64], Fault> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(Fault::Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    fn bytes(&mut self, bytes: usize) -> Result<&'a [u64], Fault> {
        self.take(bytes.div_ceil(8))
    }
}

/// Returns true if objects of this kind are destroyed together with their owner, for example functions with their
/// module or library, mipmap levels with their array, and nodes with their graph.
fn ends_with(kind: Kind, owner: Kind) -> bool {
    matches!(
        (kind, owner),
        (Kind::Function, Kind::Module | Kind::Library | Kind::Function)
            | (Kind::Module, Kind::Library)
            | (Kind::Array, Kind::Array | Kind::Mipmap)
            | (Kind::Node, Kind::Graph)
    )
}

/// Checks one end of a copy with explicit pitches, and replaces its array handle with the driver's handle.
///
/// # Errors
/// Returns an error if the end is neither an array nor in card or guest memory.
pub fn checked_end(copy: &BoxCopy, mut end: End, handles: &dyn Handles) -> Result<End, Fault> {
    if end.kind == ARRAY {
        end.array = handles.find(Kind::Array, end.array)?;
        return Ok(end);
    }
    match copy.touched(end) {
        Some(bytes) if handles.has_range(bytes.start, bytes.count) => Ok(end),
        _ => Err(Fault::Refused(INVALID_VALUE)),
    }
}

/// Checks a copy, and replaces its array handles with the driver's handles.
fn checked(copy: BoxCopy, handles: &dyn Handles, refused: &mut Option<i32>) -> Result<BoxCopy, Fault> {
    let mut copy = copy.spread().unwrap_or_default();
    let ends =
        checked_end(&copy, copy.from, handles).and_then(|from| Ok((from, checked_end(&copy, copy.to, handles)?)));
    match ends {
        Ok(ends) => (copy.from, copy.to) = ends,
        Err(Fault::Refused(code)) => {
            refused.get_or_insert(code);
        }
        Err(fault) => return Err(fault),
    }
    Ok(copy)
}

/// Checks the resource description of a texture or surface, and replaces an array handle with the driver's handle.
fn checked_resource(
    words: &[u64],
    handles: &dyn Handles,
    refused: &mut Option<i32>,
) -> Result<[u64; RESOURCE_WORDS], Fault> {
    let mut resource: [u64; RESOURCE_WORDS] = words.try_into().map_err(|_| Fault::Malformed)?;
    let [kind, object, _, bytes, rows, pitch, ..] = &mut resource;
    let bytes = match *kind & 0xffff_ffff {
        // `CU_RESOURCE_TYPE_ARRAY`, `.._MIPMAPPED_ARRAY`, `.._LINEAR`, `.._PITCH2D`.
        0 => {
            *object = found(handles, Kind::Array, *object, refused)?;
            return Ok(resource);
        }
        1 => {
            *object = found(handles, Kind::Mipmap, *object, refused)?;
            return Ok(resource);
        }
        2 => Some(*bytes),
        3 => pitch.checked_mul(*rows),
        _ => None,
    };
    if !bytes.is_some_and(|bytes| handles.has_range(*object, bytes)) {
        refused.get_or_insert(INVALID_VALUE);
    }
    Ok(resource)
}

/// Looks up a handle. If the object does not exist, sets `refused`, so that the call fails.
fn found(handles: &dyn Handles, kind: Kind, handle: u64, refused: &mut Option<i32>) -> Result<u64, Fault> {
    match handles.find(kind, handle) {
        Err(Fault::Refused(code)) => {
            refused.get_or_insert(code);
            Ok(0)
        }
        other => other,
    }
}

/// Reads an array's element count, and records it with the index of the argument that must have the same value.
fn count_of(reader: &mut Reader<'_>, index: u8, counts: &mut [Option<(u8, u64)>]) -> Result<usize, Fault> {
    let count = reader.word()?;
    *counts.iter_mut().find(|place| place.is_none()).ok_or(Fault::Malformed)? = Some((index, count));
    if count > cuda_ring::MAX_WORDS as u64 * 8 { Err(Fault::Malformed) } else { Ok(count as usize) }
}

/// Decodes a call's arguments from its message.
///
/// # Errors
/// Returns an error if the message is malformed, or if the call must fail, for example because an object does not
/// exist.
pub fn decode(call: &Call, words: &[u64], handles: &dyn Handles, arena: &mut Arena) -> Result<Prepared, Fault> {
    arena.used = 0;
    let mut reader = Reader(words);
    let mut prepared = Prepared::default();
    let mut refused = None;
    let mut counts = [None; 4];
    for (index, arg) in call.args.iter().enumerate() {
        let mut find = |kind, handle| found(handles, kind, handle, &mut refused);
        let value = match *arg {
            Arg::Word | Arg::Range(_) => reader.word()?,
            Arg::Address => {
                let address = reader.word()?;
                if !handles.has_range(address, 0) {
                    refused.get_or_insert(INVALID_VALUE);
                }
                address
            }
            Arg::Image => {
                if reader.word()? == 0 {
                    0
                } else {
                    handles.image()
                }
            }
            Arg::Handle(kind) => {
                let handle = reader.word()?;
                if prepared.owner.is_none() && prepared.new.is_some_and(|(made, ..)| ends_with(made, kind)) {
                    prepared.owner = Some(handle);
                }
                find(kind, handle)?
            }
            Arg::Optional(kind) => match reader.word()? {
                0 => 0,
                handle => find(kind, handle)?,
            },
            Arg::Drop(kind) => {
                let handle = reader.word()?;
                prepared.dropped = Some((kind, handle));
                find(kind, handle)?
            }
            Arg::New(kind) => {
                let handle = reader.word()?;
                if !handles.is_free(kind, handle) {
                    return Err(Fault::Malformed);
                }
                let first = arena.take(8)?;
                prepared.new = Some((kind, handle, first));
                arena.address(first)
            }
            Arg::Null => 0,
            Arg::ImageBytes => handles.image_bytes(),
            Arg::Copy2d => {
                let words = reader.take(WORDS_2D)?.try_into().map_err(|_| Fault::Malformed)?;
                let copy = checked(BoxCopy::from_2d(words), handles, &mut refused)?.to_2d();
                let first = arena.fill(&copy, 8 * copy.len())?;
                arena.address(first)
            }
            Arg::Copy3d => {
                let words = reader.take(WORDS_3D)?.try_into().map_err(|_| Fault::Malformed)?;
                let copy = checked(BoxCopy::from_3d(words), handles, &mut refused)?.to_3d();
                let first = arena.fill(&copy, 8 * copy.len())?;
                arena.address(first)
            }
            Arg::Resource => {
                let resource = checked_resource(reader.take(RESOURCE_WORDS)?, handles, &mut refused)?;
                let first = arena.fill(&resource, 8 * resource.len())?;
                arena.address(first)
            }
            Arg::PlainAttribute => {
                let attribute = reader.word()? & 0xffff_ffff;
                if !PLAIN_ATTRIBUTES.contains(&attribute) {
                    refused.get_or_insert(NOT_SUPPORTED);
                }
                attribute
            }
            Arg::NewNumber(kind) => {
                prepared.new_number = Some(kind);
                room(&mut prepared, arena, 8, 8)?
            }
            Arg::DropNumber(kind) => {
                let number = reader.word()?;
                if !handles.has_number(kind, number) {
                    refused.get_or_insert(INVALID_VALUE);
                }
                prepared.dropped_number = Some((kind, number));
                number
            }
            Arg::Out(bytes) => room(&mut prepared, arena, usize::from(bytes), usize::from(bytes))?,
            Arg::OutPart(all, bytes) => room(&mut prepared, arena, usize::from(all), usize::from(bytes))?,
            Arg::OutOptional(bytes) => match reader.word()? {
                0 => 0,
                _ => room(&mut prepared, arena, usize::from(bytes), usize::from(bytes))?,
            },
            Arg::OutBytes(of) => {
                let bytes = count_of(&mut reader, of, &mut counts)?;
                if bytes > MAX_RESULT_WORDS * 8 - 8 {
                    return Err(Fault::Malformed);
                }
                room(&mut prepared, arena, bytes, bytes)?
            }
            Arg::In(bytes) => copy(arena, &mut reader, usize::from(bytes))?,
            Arg::InAddressed(bytes) => {
                let words = reader.bytes(usize::from(bytes))?;
                if !words.first().is_some_and(|address| handles.has_range(*address, 0)) {
                    refused.get_or_insert(INVALID_VALUE);
                }
                let first = arena.fill(words, usize::from(bytes))?;
                arena.address(first)
            }
            Arg::InOptional(bytes) => match reader.word()? {
                0 => 0,
                _ => copy(arena, &mut reader, usize::from(bytes))?,
            },
            Arg::InOut(bytes) => {
                let first = arena.fill(reader.bytes(usize::from(bytes))?, usize::from(bytes))?;
                prepared.result(first, usize::from(bytes))?;
                arena.address(first)
            }
            Arg::Text => {
                let length = usize::try_from(reader.word()?).map_err(|_| Fault::Malformed)?;
                if length > words.len() * 8 {
                    return Err(Fault::Malformed);
                }
                copy(arena, &mut reader, length)?
            }
            Arg::Array(bytes, of) => {
                let bytes = count_of(&mut reader, of, &mut counts)? * usize::from(bytes);
                copy(arena, &mut reader, bytes)?
            }
            Arg::ArrayButOne(bytes, of) => {
                let elements = count_of(&mut reader, of, &mut counts)?.saturating_sub(1);
                copy(arena, &mut reader, elements * usize::from(bytes))?
            }
            Arg::Handles(kind, of) => {
                let count = count_of(&mut reader, of, &mut counts)?;
                let first = arena.take(count.checked_mul(8).ok_or(Fault::Malformed)?)?;
                for (at, handle) in reader.take(count)?.iter().enumerate() {
                    let found = find(kind, *handle)?;
                    *arena.words.get_mut(first + at).ok_or(Fault::Malformed)? = found;
                }
                arena.address(first)
            }
        };
        *prepared.values.get_mut(index).ok_or(Fault::Malformed)? = value;
    }
    if !reader.0.is_empty() {
        return Err(Fault::Malformed);
    }
    for (index, arg) in call.args.iter().enumerate() {
        let value = |at: usize| prepared.values.get(at).copied().unwrap_or_default();
        if let Arg::Range(of) = *arg
            && !handles.has_range(value(index), value(usize::from(of)))
        {
            refused.get_or_insert(INVALID_VALUE);
        }
    }
    // The driver reads the count from a separate argument, which must match.
    let repeats = |(of, count): &(u8, u64)| {
        prepared.values.get(usize::from(*of)).is_some_and(|value| value & 0xffff_ffff == *count)
    };
    if !counts.iter().flatten().all(repeats) {
        return Err(Fault::Malformed);
    }
    refused.map_or(Ok(prepared), |code| Err(Fault::Refused(code)))
}

fn room(prepared: &mut Prepared, arena: &mut Arena, bytes: usize, returned: usize) -> Result<u64, Fault> {
    let first = arena.take(bytes)?;
    prepared.result(first, returned)?;
    Ok(arena.address(first))
}

fn copy(arena: &mut Arena, reader: &mut Reader<'_>, bytes: usize) -> Result<u64, Fault> {
    let first = arena.fill(reader.bytes(bytes)?, bytes)?;
    Ok(arena.address(first))
}
