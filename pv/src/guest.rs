//! The guest driver's side of the interface: finds the capability, builds batches of operations, and parses their
//! answers.

use crate::abi::{
    Answer, AnswerHeader, BatchHeader, BufferPriority, CAPABILITY_ID, Capability, DirectorySet, Entries, EntriesRun,
    Instance, MemoryCopy, MemoryFill, OpHeader, Runlist, SIGNATURE, ShareAttach, ShareControl, ShareGet, TableCreate,
    UNIT, op,
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Configuration space offset of the pointer to the first capability. Source: PCI Local Bus 3.0, 6.7.
const CAPABILITIES: usize = 0x34;
/// Minimum offset of a capability.
const FIRST_CAPABILITY: usize = 0x40;
/// Maximum number of capabilities.
const MOST_CAPABILITIES: usize = 48;

/// Finds the interface's capability in configuration space.
#[must_use]
pub fn capability(config: &[u8]) -> Option<Capability> {
    let mut at = usize::from(*config.get(CAPABILITIES)?);
    for _ in 0..MOST_CAPABILITIES {
        // The two lowest bits are reserved.
        at &= !3;
        if at < FIRST_CAPABILITY {
            return None;
        }
        let here = config.get(at..)?;
        match Capability::read_from_prefix(here) {
            Ok((found, _)) if found.id == CAPABILITY_ID && found.signature == SIGNATURE => return Some(found),
            _ => at = usize::from(*here.get(1)?),
        }
    }
    None
}

/// Builder for a batch of operations.
#[derive(Clone, Debug, Default)]
pub struct Ops {
    count: u32,
    bytes: Vec<u8>,
}

impl Ops {
    /// Creates an empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an operation with an arbitrary code and body.
    #[must_use]
    pub fn raw(mut self, code: u16, handle: u32, body: &[u8]) -> Self {
        let units = body.len().div_ceil(UNIT as usize).saturating_add(size_of::<OpHeader>().div_ceil(UNIT as usize));
        let units = u16::try_from(units).unwrap_or(u16::MAX);
        self.bytes.extend_from_slice(OpHeader { code, units, handle }.as_bytes());
        self.bytes.extend_from_slice(body);
        self.bytes.resize(self.bytes.len().next_multiple_of(UNIT as usize), 0);
        self.count = self.count.saturating_add(1);
        self
    }

    fn with<T: IntoBytes + Immutable>(self, code: u16, handle: u32, body: &T) -> Self {
        self.raw(code, handle, body.as_bytes())
    }

    /// Adds an operation that creates a table of a type in [`crate::abi::kind`].
    #[must_use]
    pub fn create(self, table: u32, kind: u32) -> Self {
        self.with(op::TABLE_CREATE, table, &TableCreate { kind, reserved: 0 })
    }

    /// Adds an operation that frees a table's handle.
    #[must_use]
    pub fn destroy(self, table: u32) -> Self {
        self.raw(op::TABLE_DESTROY, table, &[])
    }

    /// Adds an operation that sets an entry of a directory.
    #[must_use]
    pub fn set(self, directory: u32, index: u32, small: u32, large: u32) -> Self {
        self.with(op::DIRECTORY_SET, directory, &DirectorySet { index, small, large, reserved: 0 })
    }

    /// Adds an operation that writes `count` consecutive entries.
    #[must_use]
    pub fn run(self, table: u32, first: u32, count: u32, entry: u64, step: u64) -> Self {
        self.with(op::ENTRIES_RUN, table, &EntriesRun { first, count, entry, step })
    }

    /// Adds an operation that writes a list of entries.
    #[must_use]
    pub fn list(self, table: u32, first: u32, entries: &[u64]) -> Self {
        let mut body = Entries { first, count: count(entries) }.as_bytes().to_vec();
        body.extend(entries.iter().flat_map(|entry| entry.to_le_bytes()));
        self.raw(op::ENTRIES_LIST, table, &body)
    }

    /// Adds an operation that clears entries.
    #[must_use]
    pub fn zero(self, table: u32, first: u32, count: u32) -> Self {
        self.with(op::ENTRIES_ZERO, table, &Entries { first, count })
    }

    /// Adds an operation that binds an instance block to a directory, or removes the binding if `directory` is 0.
    #[must_use]
    pub fn bind(self, directory: u32, instance: u64) -> Self {
        self.with(op::DIRECTORY_BIND, directory, &Instance { instance })
    }

    /// Adds a TLB flush of a directory, or of all directories if `directory` is 0.
    #[must_use]
    pub fn flush(self, directory: u32) -> Self {
        self.raw(op::FLUSH, directory, &[])
    }

    /// Adds a channel operation without arguments.
    #[must_use]
    pub fn channel(self, code: u16, channel: u32) -> Self {
        self.raw(code, channel, &[])
    }

    /// Adds an operation that binds a channel to an instance block.
    #[must_use]
    pub fn bind_channel(self, channel: u32, instance: u64) -> Self {
        self.with(op::CHANNEL_BIND, channel, &Instance { instance })
    }

    /// Adds an operation that sets the runnable channels.
    #[must_use]
    pub fn runlist(self, channels: &[u32]) -> Self {
        let mut body = Runlist { count: count(channels), reserved: 0 }.as_bytes().to_vec();
        body.extend(channels.iter().flat_map(|channel| channel.to_le_bytes()));
        self.raw(op::RUNLIST, 0, &body)
    }

    /// Adds an operation that fills guest VRAM.
    #[must_use]
    pub fn fill(self, address: u64, bytes: u64, value: u32) -> Self {
        self.with(op::MEMORY_FILL, 0, &MemoryFill { address, bytes, value, reserved: 0 })
    }

    /// Adds an operation that copies guest VRAM.
    #[must_use]
    pub fn copy(self, to: u64, from: u64, bytes: u64) -> Self {
        self.with(op::MEMORY_COPY, 0, &MemoryCopy { to, from, bytes })
    }

    /// Adds an operation that sets the eviction priority of a guest VRAM range.
    #[must_use]
    pub fn priority(self, address: u64, bytes: u64, priority: i32) -> Self {
        self.with(op::BUFFER_PRIORITY, 0, &BufferPriority { address, bytes, priority, reserved: 0 })
    }

    /// Adds an operation that finds or creates a segment.
    #[must_use]
    pub fn share_get(self, key: u64, bytes: u64, flags: u32, mode: u32) -> Self {
        self.with(op::SHARE_GET, 0, &ShareGet { key, bytes, flags, mode })
    }

    /// Adds an operation that maps a segment for a channel.
    #[must_use]
    pub fn attach(self, segment: u32, channel: u32, flags: u32) -> Self {
        self.with(op::SHARE_ATTACH, segment, &ShareAttach { channel, flags })
    }

    /// Adds an operation that unmaps a segment for a channel.
    #[must_use]
    pub fn detach(self, segment: u32, channel: u32) -> Self {
        self.with(op::SHARE_DETACH, segment, &ShareAttach { channel, flags: 0 })
    }

    /// Adds an operation that queries or modifies a segment.
    #[must_use]
    pub fn control(self, segment: u32, command: u32, argument: u32) -> Self {
        self.with(op::SHARE_CONTROL, segment, &ShareControl { command, argument })
    }

    /// Adds an operation that executes a query of [`crate::abi::query`].
    #[must_use]
    pub fn query(self, question: u32) -> Self {
        self.raw(op::QUERY, question, &[])
    }

    /// Returns the encoded batch.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = BatchHeader { ops: self.count, bytes: count(&self.bytes) }.as_bytes().to_vec();
        bytes.extend_from_slice(&self.bytes);
        bytes
    }
}

/// Returns the length of a list. A length that does not fit in 32 bits becomes the maximum, which makes the batch
/// malformed.
fn count<T>(list: &[T]) -> u32 {
    u32::try_from(list.len()).unwrap_or(u32::MAX)
}

/// Answers to a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Status of the batch, or all ones if there is no answer.
    pub status: u32,
    /// Number of completed operations.
    pub done: u32,
    /// Status and value of each operation.
    pub answers: Vec<(u32, u64)>,
}

impl Reply {
    /// Parses the answers that the device has written.
    #[must_use]
    pub fn read(bytes: &[u8]) -> Self {
        let Ok((header, mut rest)) = AnswerHeader::read_from_prefix(bytes) else {
            return Self { status: u32::MAX, done: 0, answers: Vec::new() };
        };
        let mut answers = Vec::new();
        while let Ok((answer, behind)) = Answer::read_from_prefix(rest) {
            answers.push((answer.status, answer.value));
            rest = behind;
        }
        Self { status: header.status, done: header.done, answers }
    }

    /// Returns the value of the last answer.
    ///
    /// # Panics
    /// Panics unless all operations were completed.
    #[must_use]
    pub fn value(&self) -> u64 {
        assert_eq!(self.status, 0, "{self:?}");
        self.answers.last().expect("there are no answers").1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a configuration space with two capabilities of other types, at 0x40 and 0x48, followed by the capability
    /// at `last`.
    fn config(last: u8) -> Vec<u8> {
        let mut config = vec![0; 256];
        config[CAPABILITIES] = 0x41;
        config[0x40..0x42].copy_from_slice(&[1, 0x48]);
        config[0x48..0x4b].copy_from_slice(&[CAPABILITY_ID, last, 20]);
        config
    }

    #[test]
    fn capability_is_found_by_its_signature() {
        let mut config = config(0xec);
        assert_eq!(capability(&config), None);
        config[0xec..0xf0].copy_from_slice(&[CAPABILITY_ID, 0, 20, 3]);
        config[0xf0..0xf4].copy_from_slice(&SIGNATURE.to_le_bytes());
        config[0xf8..0xfc].copy_from_slice(&0x1000u32.to_le_bytes());
        let found = capability(&config).expect("there is no capability");
        assert_eq!((found.bar, found.offset), (3, 0x1000));
        // Configuration space may be truncated if it is read without privileges.
        assert_eq!((capability(&config[..0xf8]), capability(&config[..64]), capability(&[])), (None, None, None));
    }

    #[test]
    fn cyclic_or_dangling_list_ends() {
        for last in [0x40, 0x48, 0, 0x3c, 0xff] {
            assert_eq!(capability(&config(last)), None, "{last:#x}");
        }
    }

    #[test]
    fn reply_contains_only_complete_answers() {
        let none = Reply::read(&[0; 7]);
        assert_eq!((none.status, none.done, none.answers.len()), (u32::MAX, 0, 0));
        let mut bytes = AnswerHeader { status: 7, done: 1 }.as_bytes().to_vec();
        bytes.extend_from_slice(Answer { status: 0, reserved: 0, value: 5 }.as_bytes());
        bytes.extend_from_slice(&Answer { status: 7, reserved: 0, value: 0 }.as_bytes()[..15]);
        assert_eq!(Reply::read(&bytes), Reply { status: 7, done: 1, answers: vec![(0, 5)] });
    }
}
