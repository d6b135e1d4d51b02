//! The journal: the state that lets the next process continue the function after this process was killed.
//!
//! The journal is a memory file whose descriptor the service manager stores. A killed process stops between two
//! instructions, so the file contains all of its earlier stores. Each change is first written to unused space. Then, a
//! store to a single word makes the change valid.
//!
//! | bytes | content |
//! |---|---|
//! | 4 KiB | the words [`word`] |
//! | 2 × 2 KiB | the registers; [`word::REGISTERS`] selects the valid copy |
//! | 1024 × 256 | a slot for each descriptor of the control queue, which contains the descriptor's command until the
//! command has a response |
//! | 2 × 2 MiB | the structure; [`word::STRUCTURE`] selects the valid copy |
//!
//! A command that changes contexts, blobs or workers is stored in its slot, with its response, before the structure
//! that includes the command's effect becomes valid. The response is sent afterwards. Other commands are counted
//! together with their response, after it was sent. The guest's ring shows the next process whether the last command
//! has a response.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::SealFlags;
use saved_state::{Invalid, Known, SavedState, Writer};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};
use vmm_glue::mappable::region_memory;

use crate::core::SavedWait;
use crate::registers::SavedRegisters;
use crate::saved::{MAX_OUTSTANDING, MAX_WRITABLE, Progress, ReadyAnswer, Reply, SavedCommand, SavedStructure};

/// Magic number at the start of the file. The last byte is the version of the file's layout.
const MAGIC: u64 = u64::from_le_bytes(*b"gmvcuda\x01");
/// Size of a copy of the registers in bytes, including their length at the start.
const REGISTERS_BYTES: u64 = 2 << 10;
const REGISTERS_AT: u64 = 4 << 10;
const SLOTS_AT: u64 = 8 << 10;
const SLOT_BYTES: u64 = 256;
/// Size of a copy of the structure in bytes, including its length at the start.
const STRUCTURE_BYTES: u64 = 2 << 20;
const STRUCTURE_AT: u64 = SLOTS_AT + MAX_OUTSTANDING as u64 * SLOT_BYTES;
const FILE_BYTES: u64 = STRUCTURE_AT + 2 * STRUCTURE_BYTES;
/// Owner number of the only part in a copy of the structure.
const FUNCTION: u32 = 0;

/// Byte offsets of the words at the start of the file.
mod word {
    pub(super) const MAGIC: u64 = 0;
    pub(super) const REGISTERS: u64 = 8;
    pub(super) const STRUCTURE: u64 = 16;
    /// Number of popped commands in the upper half, and number of sent responses in the lower half.
    pub(super) const PROGRESS: u64 = 24;
}

/// Byte offsets of words in a slot.
mod slot {
    /// 1 if the slot is in use. This word is written last.
    pub(super) const STATE: u64 = 0;
    pub(super) const INDEX: u64 = 8;
    /// Number of earlier responses plus 1, or 0 if the response is not being sent.
    pub(super) const ANSWERING: u64 = 16;
    pub(super) const TICKET: u64 = 24;
    pub(super) const HEADER: u64 = 32;
    /// Kind of [`Reply`]: 0 for a removal, 1 for a word, and 2 or more for a known response.
    pub(super) const REPLY: u64 = 56;
    pub(super) const BLOB: u64 = 64;
    pub(super) const WORD: u64 = 72;
    pub(super) const VALUE: u64 = 80;
    pub(super) const PARTS: u64 = 88;
    pub(super) const WRITABLE: u64 = 96;
}

/// A mapped journal file.
#[derive(Debug)]
pub(crate) struct Journal {
    file: Arc<OwnedFd>,
    region: MmapRegion,
}

/// The contents of a journal.
#[derive(Debug)]
pub(crate) struct Contents {
    pub registers: SavedRegisters,
    pub progress: Progress,
    pub outstanding: Vec<SavedCommand>,
    pub structure: SavedStructure,
}

impl Journal {
    /// Creates an empty journal.
    pub(crate) fn new() -> io::Result<Self> {
        let journal = Self::map(Arc::new(region_memory("cuda-journal", FILE_BYTES)?))?;
        journal.store(word::MAGIC, MAGIC);
        Ok(journal)
    }

    fn map(file: Arc<OwnedFd>) -> io::Result<Self> {
        let size = usize::try_from(FILE_BYTES).map_err(io::Error::other)?;
        let own = File::from(file.try_clone()?);
        let region = MmapRegion::from_file(FileOffset::new(own, 0), size).map_err(io::Error::other)?;
        Ok(Self { file, region })
    }

    /// Takes over the journal of a killed process.
    ///
    /// # Errors
    /// Returns an error if the file is not a journal of this version.
    pub(crate) fn adopt(file: Arc<OwnedFd>) -> Result<Self, Invalid> {
        let seals = rustix::fs::fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
        let size = rustix::fs::fstat(&file).map_or(0, |stat| stat.st_size);
        let is_whole = seals.contains(SealFlags::SHRINK) && u64::try_from(size) == Ok(FILE_BYTES);
        Invalid::unless(is_whole, || "the journal of the CUDA function has an invalid size".into())?;
        let journal = Self::map(file).map_err(Invalid::new)?;
        Invalid::unless(journal.load(word::MAGIC) == MAGIC, || {
            "the journal of the CUDA function is from another version of the daemon".into()
        })?;
        Ok(journal)
    }

    /// Returns the journal's file.
    pub(crate) fn file(&self) -> &Arc<OwnedFd> {
        &self.file
    }

    fn store(&self, at: u64, value: u64) {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        if let Err(error) = self.region.as_volatile_slice().store(value, at, Ordering::Release) {
            tracing::error!(%error, at, "cannot write a word of a journal");
        }
    }

    fn load(&self, at: u64) -> u64 {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        self.region.as_volatile_slice().load(at, Ordering::Acquire).unwrap_or(0)
    }

    /// Writes bytes, preceded by their length, into a copy of `space` bytes. Returns false if the bytes do not fit.
    fn write(&self, at: u64, space: u64, bytes: &[u8]) -> bool {
        let length = bytes.len() as u64;
        let to = usize::try_from(at.saturating_add(8)).unwrap_or(usize::MAX);
        if length.saturating_add(8) > space || self.region.as_volatile_slice().write_slice(bytes, to).is_err() {
            return false;
        }
        self.store(at, length);
        true
    }

    fn read(&self, at: u64, space: u64) -> Option<Vec<u8>> {
        let length = Some(self.load(at)).filter(|length| length.saturating_add(8) <= space)?;
        let mut bytes = vec![0; usize::try_from(length).ok()?];
        let from = usize::try_from(at.saturating_add(8)).ok()?;
        self.region.as_volatile_slice().read_slice(&mut bytes, from).ok()?;
        Some(bytes)
    }

    /// Writes bytes to the unused one of two copies, and makes this copy valid.
    fn replace(&self, selector: u64, at: u64, space: u64, bytes: &[u8]) -> bool {
        let next = self.load(selector) & 1 ^ 1;
        let written = self.write(at.saturating_add(next.saturating_mul(space)), space, bytes);
        if written {
            // Bit 1 is set once a valid copy exists.
            self.store(selector, next | 2);
        }
        written
    }

    fn valid(&self, selector: u64, at: u64, space: u64) -> Option<Vec<u8>> {
        let selected = Some(self.load(selector)).filter(|selected| selected & 2 != 0)?;
        self.read(at.saturating_add((selected & 1).saturating_mul(space)), space)
    }

    /// Records the registers.
    pub(crate) fn put_registers(&self, registers: &SavedRegisters) {
        let bytes = postcard::to_allocvec(registers).unwrap_or_default();
        if !self.replace(word::REGISTERS, REGISTERS_AT, REGISTERS_BYTES, &bytes) {
            tracing::error!("the registers of a CUDA function do not fit in its journal");
        }
    }

    /// Records the structure.
    ///
    /// # Errors
    /// Returns an error if the journal can no longer be used. The error contains the reason.
    pub(crate) fn put_structure(&self, structure: &SavedStructure) -> Result<(), String> {
        let mut writer = Writer::new([0; 16]);
        writer.put(FUNCTION, structure).map_err(|error| error.to_string())?;
        let written = self.replace(word::STRUCTURE, STRUCTURE_AT, STRUCTURE_BYTES, &writer.finish());
        if written { Ok(()) } else { Err("the programs' state does not fit in the journal".to_owned()) }
    }

    /// Records the command counts.
    pub(crate) fn put_progress(&self, Progress { popped, answered }: Progress) {
        self.store(word::PROGRESS, u64::from(popped) << 32 | u64::from(answered));
    }

    /// Records a command without a response. The record becomes valid when the command is counted.
    pub(crate) fn put_command(&self, command: &SavedCommand) {
        let at = slot_at(command.head);
        let put = |offset: u64, value: u64| self.store(at.saturating_add(offset), value);
        put(slot::STATE, 0);
        put(slot::INDEX, command.index.into());
        put(slot::ANSWERING, command.answering.map_or(0, |number| u64::from(number).wrapping_add(1)));
        put(slot::TICKET, command.ticket);
        let (words, _) = command.header.as_chunks::<8>();
        for (offset, bytes) in (slot::HEADER..).step_by(8).zip(words) {
            put(offset, u64::from_le_bytes(*bytes));
        }
        let (reply, wait) = match command.reply {
            Reply::Removal => (0, SavedWait { blob: 0, word: 0, value: 0 }),
            Reply::Word(wait) => (1, wait),
            Reply::Ready(answer) => {
                let number = ReadyAnswer::ALL.iter().position(|one| *one == answer).unwrap_or(0);
                (2u64.saturating_add(number as u64), SavedWait { blob: 0, word: 0, value: 0 })
            }
        };
        put(slot::REPLY, reply);
        put(slot::BLOB, wait.blob.into());
        put(slot::WORD, wait.word);
        put(slot::VALUE, wait.value);
        put(slot::PARTS, command.writable.len() as u64);
        for (offset, &(address, len)) in (slot::WRITABLE..).step_by(16).zip(&command.writable) {
            put(offset, address);
            put(offset.saturating_add(8), len);
        }
        put(slot::STATE, 1);
    }

    /// Records that a command's response is about to be sent, after `answered` other responses. `None` removes this
    /// record.
    pub(crate) fn put_answering(&self, head: u16, answered: Option<u32>) {
        let number = answered.map_or(0, |answered| u64::from(answered).saturating_add(1));
        self.store(slot_at(head).saturating_add(slot::ANSWERING), number);
    }

    /// Removes a command that has a response.
    pub(crate) fn remove_command(&self, head: u16) {
        self.store(slot_at(head).saturating_add(slot::STATE), 0);
    }

    fn command(&self, head: u16) -> Option<SavedCommand> {
        let at = slot_at(head);
        let get = |offset: u64| self.load(at.saturating_add(offset));
        if get(slot::STATE) != 1 {
            return None;
        }
        let mut header = [0; 24];
        let (words, _) = header.as_chunks_mut::<8>();
        for (offset, bytes) in (slot::HEADER..).step_by(8).zip(words) {
            *bytes = get(offset).to_le_bytes();
        }
        let wait = || SavedWait {
            blob: u32::try_from(get(slot::BLOB)).unwrap_or(u32::MAX),
            word: get(slot::WORD),
            value: get(slot::VALUE),
        };
        let reply = match get(slot::REPLY) {
            0 => Reply::Removal,
            1 => Reply::Word(wait()),
            number => {
                let number = usize::try_from(number.wrapping_sub(2)).unwrap_or(usize::MAX);
                Reply::Ready(*ReadyAnswer::ALL.get(number)?)
            }
        };
        let parts = usize::try_from(get(slot::PARTS)).unwrap_or(usize::MAX).min(MAX_WRITABLE);
        let writable = (slot::WRITABLE..).step_by(16).take(parts);
        Some(SavedCommand {
            head,
            index: u32::try_from(get(slot::INDEX)).ok()?,
            answering: get(slot::ANSWERING).checked_sub(1).and_then(|number| u32::try_from(number).ok()),
            ticket: get(slot::TICKET),
            header,
            reply,
            writable: writable.map(|offset| (get(offset), get(offset.saturating_add(8)))).collect(),
        })
    }

    /// Removes all commands, and resets the command counts.
    pub(crate) fn clear(&self) {
        for head in 0..MAX_OUTSTANDING as u64 {
            // Skip slots that are not in use.
            let state = SLOTS_AT.saturating_add(head.saturating_mul(SLOT_BYTES));
            if self.load(state) != 0 {
                self.store(state, 0);
            }
        }
        self.put_progress(Progress::default());
    }

    /// Invalidates the journal, because it is incomplete.
    pub(crate) fn void(&self) {
        self.store(word::MAGIC, 0);
    }

    /// Reverts [`Self::void`] once the incomplete state no longer exists.
    pub(crate) fn revalidate(&self) {
        self.store(word::MAGIC, MAGIC);
    }

    /// Reads the journal.
    ///
    /// # Errors
    /// Returns an error if the journal is empty or its state is invalid.
    pub(crate) fn contents(&self) -> Result<Contents, Invalid> {
        let nothing = || Invalid::new("the journal of the CUDA function is empty");
        let bytes = self.valid(word::REGISTERS, REGISTERS_AT, REGISTERS_BYTES).ok_or_else(nothing)?;
        let registers = postcard::from_bytes(&bytes).map_err(Invalid::new)?;
        let bytes = self.valid(word::STRUCTURE, STRUCTURE_AT, STRUCTURE_BYTES).ok_or_else(nothing)?;
        let read = SavedState::parse(&bytes, &[Known::for_part::<SavedStructure>()]).and_then(|mut file| {
            let structure: SavedStructure = file.take(FUNCTION)?;
            file.finish().map(|()| structure)
        });
        let structure = read.map_err(Invalid::new)?;
        let [a0, a1, a2, a3, p0, p1, p2, p3] = self.load(word::PROGRESS).to_le_bytes();
        let (popped, answered) = (u32::from_le_bytes([p0, p1, p2, p3]), u32::from_le_bytes([a0, a1, a2, a3]));
        // The structure includes a command before the command is counted.
        let popped = if is_before(popped, structure.popped) { structure.popped } else { popped };
        let heads = 0..u16::try_from(MAX_OUTSTANDING).unwrap_or(u16::MAX);
        let commands = heads.filter_map(|head| self.command(head));
        let outstanding = commands.filter(|command| is_before(command.index, popped)).collect();
        Ok(Contents { registers, progress: Progress { popped, answered }, outstanding, structure })
    }
}

fn slot_at(head: u16) -> u64 {
    SLOTS_AT.saturating_add(u64::from(head).saturating_mul(SLOT_BYTES))
}

/// Returns true if the wrapping count `one` precedes `other`.
pub(crate) fn is_before(one: u32, other: u32) -> bool {
    one.wrapping_sub(other) > u32::MAX / 2
}
