//! The guest's side of the paravirtual interface, as small as can be: a queue in RAM, and batches made word by word.

use super::Machine;
use crate::vgpu::pv::OFFSET;
use pv::abi::{
    AnswerHeader, BatchHeader, BufferPriority, DirectorySet, Entries, EntriesRun, Instance, MemoryCopy, MemoryFill,
    OpHeader, Runlist, ShareAttach, ShareControl, ShareGet, TableCreate, UNIT, op, register, status,
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Entries of the queue.
pub const ENTRIES: u16 = 64;
/// Bytes of RAM that an interface takes.
pub const RAM_BYTES: u64 = 0x2_0000;
const AVAILABLE: u64 = 0x800;
const USED: u64 = 0x1000;
const REQUEST: u64 = 0x2000;
const REPLY: u64 = 0x1_8000;
const REPLY_BYTES: u32 = 0x8000;

/// Operations of a batch.
#[derive(Clone, Debug, Default)]
pub struct Ops {
    count: u32,
    bytes: Vec<u8>,
}

impl Ops {
    /// None yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds any operation.
    #[must_use]
    pub fn raw(mut self, code: u16, handle: u32, body: &[u8]) -> Self {
        let units = (size_of::<OpHeader>() + body.len()).div_ceil(UNIT as usize);
        self.bytes.extend_from_slice(OpHeader { code, units: units as u16, handle }.as_bytes());
        self.bytes.extend_from_slice(body);
        self.bytes.resize(self.bytes.len().next_multiple_of(UNIT as usize), 0);
        self.count += 1;
        self
    }

    fn with<T: IntoBytes + Immutable>(self, code: u16, handle: u32, body: &T) -> Self {
        self.raw(code, handle, body.as_bytes())
    }

    /// Makes a table of one of [`pv::abi::kind`].
    #[must_use]
    pub fn create(self, table: u32, kind: u32) -> Self {
        self.with(op::TABLE_CREATE, table, &TableCreate { kind, reserved: 0 })
    }

    /// Frees its handle.
    #[must_use]
    pub fn destroy(self, table: u32) -> Self {
        self.raw(op::TABLE_DESTROY, table, &[])
    }

    /// Sets an entry of a directory.
    #[must_use]
    pub fn set(self, directory: u32, index: u32, small: u32, large: u32) -> Self {
        self.with(op::DIRECTORY_SET, directory, &DirectorySet { index, small, large, reserved: 0 })
    }

    /// Writes entries in a row.
    #[must_use]
    pub fn run(self, table: u32, first: u32, count: u32, entry: u64, step: u64) -> Self {
        self.with(op::ENTRIES_RUN, table, &EntriesRun { first, count, entry, step })
    }

    /// Writes a list of entries.
    #[must_use]
    pub fn list(self, table: u32, first: u32, entries: &[u64]) -> Self {
        let mut body = Entries { first, count: entries.len() as u32 }.as_bytes().to_vec();
        body.extend(entries.iter().flat_map(|entry| entry.to_le_bytes()));
        self.raw(op::ENTRIES_LIST, table, &body)
    }

    /// Empties entries.
    #[must_use]
    pub fn zero(self, table: u32, first: u32, count: u32) -> Self {
        self.with(op::ENTRIES_ZERO, table, &Entries { first, count })
    }

    /// Binds a directory (or none, 0) to an instance block.
    #[must_use]
    pub fn bind(self, directory: u32, instance: u64) -> Self {
        self.with(op::DIRECTORY_BIND, directory, &Instance { instance })
    }

    /// Flushes a directory's translations, or all (0).
    #[must_use]
    pub fn flush(self, directory: u32) -> Self {
        self.raw(op::FLUSH, directory, &[])
    }

    /// Any of the operations on a channel that have no arguments.
    #[must_use]
    pub fn channel(self, code: u16, channel: u32) -> Self {
        self.raw(code, channel, &[])
    }

    /// Binds a channel to an instance block.
    #[must_use]
    pub fn bind_channel(self, channel: u32, instance: u64) -> Self {
        self.with(op::CHANNEL_BIND, channel, &Instance { instance })
    }

    /// Says which channels may run.
    #[must_use]
    pub fn runlist(self, channels: &[u32]) -> Self {
        let mut body = Runlist { count: channels.len() as u32, reserved: 0 }.as_bytes().to_vec();
        body.extend(channels.iter().flat_map(|channel| channel.to_le_bytes()));
        self.raw(op::RUNLIST, 0, &body)
    }

    /// Fills guest VRAM.
    #[must_use]
    pub fn fill(self, address: u64, bytes: u64, value: u32) -> Self {
        self.with(op::MEMORY_FILL, 0, &MemoryFill { address, bytes, value, reserved: 0 })
    }

    /// Copies guest VRAM.
    #[must_use]
    pub fn copy(self, to: u64, from: u64, bytes: u64) -> Self {
        self.with(op::MEMORY_COPY, 0, &MemoryCopy { to, from, bytes })
    }

    /// Says how important a range of guest VRAM is.
    #[must_use]
    pub fn priority(self, address: u64, bytes: u64, priority: i32) -> Self {
        self.with(op::BUFFER_PRIORITY, 0, &BufferPriority { address, bytes, priority, reserved: 0 })
    }

    /// Finds or makes a segment.
    #[must_use]
    pub fn share_get(self, key: u64, bytes: u64, flags: u32, mode: u32) -> Self {
        self.with(op::SHARE_GET, 0, &ShareGet { key, bytes, flags, mode })
    }

    /// Attaches a segment to a channel.
    #[must_use]
    pub fn attach(self, segment: u32, channel: u32, flags: u32) -> Self {
        self.with(op::SHARE_ATTACH, segment, &ShareAttach { channel, flags })
    }

    /// Detaches a segment from a channel.
    #[must_use]
    pub fn detach(self, segment: u32, channel: u32) -> Self {
        self.with(op::SHARE_DETACH, segment, &ShareAttach { channel, flags: 0 })
    }

    /// Asks about a segment, or changes it.
    #[must_use]
    pub fn control(self, segment: u32, command: u32, argument: u32) -> Self {
        self.with(op::SHARE_CONTROL, segment, &ShareControl { command, argument })
    }

    /// Asks one of [`pv::abi::query`].
    #[must_use]
    pub fn query(self, question: u32) -> Self {
        self.raw(op::QUERY, question, &[])
    }

    /// The batch as it lies in memory.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = BatchHeader { ops: self.count, bytes: self.bytes.len() as u32 }.as_bytes().to_vec();
        bytes.extend_from_slice(&self.bytes);
        bytes
    }
}

/// What a batch came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Of the batch.
    pub status: u32,
    /// Operations that are done.
    pub done: u32,
    /// Status and value of each operation.
    pub answers: Vec<(u32, u64)>,
}

impl Reply {
    /// The value of the last operation, all being done.
    ///
    /// # Panics
    /// When not all are done.
    #[must_use]
    pub fn value(&self) -> u64 {
        assert_eq!(self.status, 0, "{self:?}");
        self.answers.last().expect("an answer").1
    }
}

/// An interface that is set up, with its queue in RAM.
#[derive(Clone, Copy, Debug)]
pub struct Interface {
    /// First guest-physical address of the RAM that it has.
    pub base: u64,
    next: u16,
}

impl Interface {
    /// Sets an interface up in the [`RAM_BYTES`] bytes of RAM at `base`. All features that are offered are accepted.
    pub fn open(machine: &mut impl Machine, base: u64) -> Self {
        Self::open_with(machine, base, u32::MAX)
    }

    /// As [`Self::open`], with some of the features.
    pub fn open_with(machine: &mut impl Machine, base: u64, features: u32) -> Self {
        machine.ram_write(base, &vec![0; RAM_BYTES as usize]);
        machine.wr(OFFSET + register::STATUS, status::RESET);
        Self::describe(machine, base, features);
        machine.wr(OFFSET + register::STATUS, status::READY);
        Self { base, next: 0 }
    }

    /// Says where the queue is, and does not have it used yet.
    pub fn describe(machine: &mut impl Machine, base: u64, features: u32) {
        machine.wr(OFFSET + register::FEATURES, features);
        machine.wr(OFFSET + register::QUEUE_SIZE, ENTRIES.into());
        for (register, at) in [
            (register::QUEUE_DESCRIPTORS, base),
            (register::QUEUE_AVAILABLE, base + AVAILABLE),
            (register::QUEUE_USED, base + USED),
        ] {
            machine.wr(OFFSET + register, at as u32);
            machine.wr(OFFSET + register + 4, (at >> 32) as u32);
        }
    }

    /// What the device says of the interface.
    pub fn status(machine: &mut impl Machine) -> u32 {
        machine.rd(OFFSET + register::STATUS)
    }

    /// Makes a batch available, and rings; its answer.
    pub fn call(&mut self, machine: &mut impl Machine, ops: &Ops) -> Reply {
        self.send(machine, &ops.bytes())
    }

    /// As [`Self::call`], with any bytes.
    pub fn send(&mut self, machine: &mut impl Machine, batch: &[u8]) -> Reply {
        self.post(machine, batch);
        let ended = machine.rd(OFFSET + register::ENDED);
        assert!(ended == u32::from(self.next) || Self::status(machine) != status::READY, "{ended} batches have ended");
        self.reply(machine)
    }

    /// Makes any bytes available as a batch, and rings.
    pub fn post(&mut self, machine: &mut impl Machine, batch: &[u8]) {
        let head = (self.next % (ENTRIES / 2)) * 2;
        machine.ram_write(self.base + REQUEST, batch);
        machine.ram_write(self.base + REPLY, &vec![0xff; REPLY_BYTES as usize]);
        self.descriptor(machine, head, self.base + REQUEST, batch.len() as u32, 1, head + 1);
        self.descriptor(machine, head + 1, self.base + REPLY, REPLY_BYTES, 2, 0);
        self.publish(machine, head);
    }

    /// Writes a descriptor: where, how many bytes, flags (1 chained, 2 device-writable), the next one.
    pub fn descriptor(&self, machine: &impl Machine, index: u16, at: u64, bytes: u32, flags: u16, next: u16) {
        let mut raw = at.to_le_bytes().to_vec();
        raw.extend(bytes.to_le_bytes());
        raw.extend(flags.to_le_bytes());
        raw.extend(next.to_le_bytes());
        machine.ram_write(self.base + u64::from(index) * 16, &raw);
    }

    /// Makes the chain that begins with `head` available, and rings.
    pub fn publish(&mut self, machine: &mut impl Machine, head: u16) {
        let slot = self.base + AVAILABLE + 4 + 2 * u64::from(self.next % ENTRIES);
        machine.ram_write(slot, &head.to_le_bytes());
        self.next = self.next.wrapping_add(1);
        machine.ram_write(self.base + AVAILABLE + 2, &self.next.to_le_bytes());
        machine.wr(OFFSET + register::DOORBELL, 0);
    }

    /// Chains that the device has used.
    #[must_use]
    pub fn used(&self, machine: &impl Machine) -> u16 {
        let mut index = [0; 2];
        machine.ram_read(self.base + USED + 2, &mut index);
        u16::from_le_bytes(index)
    }

    fn reply(self, machine: &impl Machine) -> Reply {
        let slot = self.base + USED + 4 + 8 * u64::from(self.next.wrapping_sub(1) % ENTRIES);
        let mut used = [0; 8];
        machine.ram_read(slot, &mut used);
        let written = u32::from_le_bytes(used[4..].try_into().expect("four bytes")).min(REPLY_BYTES);
        let mut bytes = vec![0; written as usize];
        machine.ram_read(self.base + REPLY, &mut bytes);
        let Ok((header, rest)) = AnswerHeader::read_from_prefix(&bytes) else {
            return Reply { status: u32::MAX, done: 0, answers: Vec::new() };
        };
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        let answers = rest.chunks_exact(16).map(|raw| (word(&raw[..8]) as u32, word(&raw[8..]))).collect();
        Reply { status: header.status, done: header.done, answers }
    }
}
