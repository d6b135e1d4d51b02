//! A journal's file: memory that outlives this process because the service manager holds its descriptor.
//!
//! | bytes | content |
//! |---|---|
//! | 4096 | the head: [`MAGIC`], the number of the valid copy of the marks, and two copies of [`Marks`] |
//! | 2 × [`HALF_BYTES`] | the last two commits: the newer complete one is valid |
//! | the rest | the buffer into which the connection's data is received |
//!
//! A killed process stops between two instructions or after its current system call, so the file contains its earlier
//! stores, in program order. Each change is therefore first written to the unused copy, and then made valid by storing
//! a single word.
#![expect(unsafe_code, reason = "maps memory of its own file")]
// UNSAFETY: maps two parts of a sealed memfd that only the daemon uses. The rest of this module is safe.

use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// Magic number at the start of the file. Its last byte is the layout version.
const MAGIC: u64 = u64::from_le_bytes(*b"gmjrnl\0\x01");
/// Size of the header in bytes.
const HEAD: usize = 4096;
/// Number of 64-bit words in the header.
const HEAD_WORDS: usize = HEAD / size_of::<AtomicU64>();
/// Size of each of the two commit halves in bytes, including the leading length.
pub(super) const HALF_BYTES: usize = 256 << 10;
/// Size of a half's length field in bytes.
const LENGTH_BYTES: usize = 8;
/// File offset of the buffer.
const ROOM_AT: usize = HEAD + 2 * HALF_BYTES;
/// Maximum size of the mapped buffer in bytes, for messages of 1 MiB.
const ROOM_MAX: usize = 4 << 20;
/// Seals that prevent truncation of the file while it is mapped.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Word indices in the header.
mod word {
    pub const MAGIC: usize = 0;
    pub const CURRENT: usize = 1;
    /// Returns the index of the first word of a copy of the marks. A copy has space for more words than it uses.
    pub const fn place(current: u64) -> usize {
        if current & 1 == 1 { 24 } else { 8 }
    }
}

/// Positions in a connection, which change with each message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Marks {
    /// Start of the unhandled bytes, which are `start..end` of the buffer.
    pub start: u64,
    pub end: u64,
    /// Stream position of `start`.
    pub position: u64,
    /// Remaining number of bytes of an oversized message to discard.
    pub skip: u64,
    /// Number of the latest commit whose output was passed to the client's socket.
    pub sent: u64,
    /// ID of the next request to the client.
    pub next_id: u64,
    /// Set if any nonzero bytes after `end` were received after these marks were written. Otherwise, they may be
    /// remains of moved bytes.
    pub clean: bool,
}

impl Marks {
    const COUNT: usize = 7;

    fn words(self) -> [u64; Self::COUNT] {
        let Self { start, end, position, skip, sent, next_id, clean } = self;
        [start, end, position, skip, sent, next_id, u64::from(clean)]
    }

    fn from_words([start, end, position, skip, sent, next_id, clean]: [u64; Self::COUNT]) -> Self {
        Self { start, end, position, skip, sent, next_id, clean: clean == 1 }
    }
}

/// A mapping of part of the file.
#[derive(Debug)]
struct Mapped {
    base: *mut u8,
    len: usize,
}

// SAFETY: this value owns the mapping until it is dropped, and accesses it only through its own references.
unsafe impl Send for Mapped {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn new(file: &OwnedFd, at: usize, len: usize) -> io::Result<Self> {
        let at = u64::try_from(at).map_err(io::Error::other)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address of the new mapping, and no other code uses this memory.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, file, at) }?;
        Ok(Self { base: base.cast(), len })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are from `mmap`. Slices borrow `self`, so none are left.
        if let Err(errno) = unsafe { rustix::mm::munmap(self.base.cast(), self.len) } {
            tracing::error!(%errno, "cannot unmap a journal");
        }
    }
}

/// A journal's buffer and its marks.
#[derive(Debug)]
pub(crate) struct Room {
    head: Mapped,
    room: Mapped,
    marks: Marks,
}

impl Deref for Room {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the file is sealed against shrinking, and no other process writes to it: the service manager only
        // holds its descriptor, and the previous process has exited.
        unsafe { std::slice::from_raw_parts(self.room.base, self.room.len) }
    }
}

impl DerefMut for Room {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`. This process has no other mapping of the buffer.
        unsafe { std::slice::from_raw_parts_mut(self.room.base, self.room.len) }
    }
}

impl Room {
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page-aligned, contains this many words, and is accessed only as words of this type.
        unsafe { std::slice::from_raw_parts(self.head.base.cast(), HEAD_WORDS) }
    }

    fn word(&self, at: usize) -> u64 {
        self.words().get(at).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    fn set(&self, at: usize, value: u64, order: Ordering) {
        if let Some(word) = self.words().get(at) {
            word.store(value, order);
        }
    }

    /// Returns the last written marks.
    pub fn marks(&self) -> Marks {
        self.marks
    }

    /// Writes the marks. After a kill, a reader finds either the old or the new marks.
    pub fn mark(&mut self, marks: Marks) {
        if marks == self.marks {
            return;
        }
        let next = self.word(word::CURRENT) & 1 ^ 1;
        let place = word::place(next);
        for (at, value) in (place..).zip(marks.words()) {
            self.set(at, value, Ordering::Relaxed);
        }
        self.set(word::CURRENT, next, Ordering::Release);
        // The compiler must not move later buffer writes before this point.
        compiler_fence(Ordering::SeqCst);
        self.marks = marks;
    }

    fn read_marks(&self) -> Marks {
        let place = word::place(self.word(word::CURRENT));
        let mut words = [0; Marks::COUNT];
        for (at, word) in (place..).zip(&mut words) {
            *word = self.word(at);
        }
        Marks::from_words(words)
    }
}

/// Returns the buffer size for messages of this length. The buffer is twice as large as a message, so that moving a
/// message to the front never overwrites it. A complete copy therefore always exists.
fn room_for(message: usize, extra: usize) -> usize {
    message.saturating_mul(2).saturating_add(extra).next_multiple_of(HEAD).min(ROOM_MAX)
}

/// Creates a file whose buffer has space for messages of `message` bytes, and for `extra` more bytes.
pub(super) fn create(message: usize, extra: usize) -> io::Result<(OwnedFd, Room)> {
    let file = rustix::fs::memfd_create("vmm-journal", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let room = room_for(message, extra);
    rustix::fs::ftruncate(&file, u64::try_from(ROOM_AT.saturating_add(room)).map_err(io::Error::other)?)?;
    rustix::fs::fcntl_add_seals(&file, SEALS)?;
    let room = map(&file, room)?;
    room.set(word::MAGIC, MAGIC, Ordering::Release);
    Ok((file, room))
}

fn map(file: &OwnedFd, room: usize) -> io::Result<Room> {
    let (head, room) = (Mapped::new(file, 0, HEAD)?, Mapped::new(file, ROOM_AT, room)?);
    Ok(Room { head, room, marks: Marks::default() })
}

/// Takes over the file of an earlier process. Its buffer must have the right size for these messages.
pub(super) fn adopt(file: &OwnedFd, message: usize, extra: usize) -> io::Result<Room> {
    let other = |what: &str| io::Error::other(what.to_owned());
    if !rustix::fs::fcntl_get_seals(file)?.contains(SEALS) {
        return Err(other("the journal is not a sealed memory file"));
    }
    let room = room_for(message, extra);
    let size = usize::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(usize::MAX);
    if size != ROOM_AT.saturating_add(room) {
        return Err(other("the journal has the wrong size"));
    }
    let mut room = map(file, room)?;
    if room.word(word::MAGIC) != MAGIC {
        return Err(other("the journal's version is not supported"));
    }
    room.marks = room.read_marks();
    Ok(room)
}

/// Writes a commit to one of the two halves. Returns `false` if the commit is too long.
pub(super) fn write_half(file: BorrowedFd<'_>, half: u64, bytes: &[u8]) -> io::Result<bool> {
    if bytes.len() > HALF_BYTES.saturating_sub(LENGTH_BYTES) {
        return Ok(false);
    }
    let at = half_at(half);
    write_all(file, &0u64.to_le_bytes(), at)?;
    write_all(file, bytes, at.saturating_add(LENGTH_BYTES as u64))?;
    // Writing the length makes the commit valid.
    write_all(file, &u64::try_from(bytes.len()).unwrap_or(0).to_le_bytes(), at)?;
    Ok(true)
}

/// Reads one of the two halves. Returns `None` if the half is incomplete.
pub(super) fn read_half(file: BorrowedFd<'_>, half: u64) -> Option<Vec<u8>> {
    let at = half_at(half);
    let mut length = [0; LENGTH_BYTES];
    read_all(file, &mut length, at)?;
    let length = usize::try_from(u64::from_le_bytes(length)).ok()?;
    if length == 0 || length > HALF_BYTES.saturating_sub(LENGTH_BYTES) {
        return None;
    }
    let mut bytes = vec![0; length];
    read_all(file, &mut bytes, at.saturating_add(LENGTH_BYTES as u64))?;
    Some(bytes)
}

fn half_at(half: u64) -> u64 {
    let at = if half & 1 == 1 { HEAD + HALF_BYTES } else { HEAD };
    u64::try_from(at).unwrap_or(u64::MAX)
}

fn write_all(file: BorrowedFd<'_>, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let len = rustix::io::pwrite(file, bytes, at)?;
        if len == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        bytes = bytes.get(len..).unwrap_or_default();
        at = at.saturating_add(u64::try_from(len).unwrap_or(0));
    }
    Ok(())
}

fn read_all(file: BorrowedFd<'_>, bytes: &mut [u8], at: u64) -> Option<()> {
    let mut done = 0;
    while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
        let len = rustix::io::pread(file.as_fd(), rest, at.saturating_add(u64::try_from(done).ok()?)).ok()?;
        if len == 0 {
            return None;
        }
        done = done.saturating_add(len);
    }
    Some(())
}
