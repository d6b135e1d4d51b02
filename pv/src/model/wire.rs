//! The binary format, byte by byte. This module does not depend on the types under test, and its numbers are taken from
//! the documentation.

use crate::abi::Status;
use crate::operation::{Control, Kind, Op};

/// An operation in binary form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Raw {
    pub(crate) code: u16,
    pub(crate) handle: u32,
    pub(crate) body: Vec<u8>,
}

impl Raw {
    pub(crate) fn new(code: u16, handle: u32, words: &[u32]) -> Self {
        Self { code, handle, body: words.iter().flat_map(|word| word.to_le_bytes()).collect() }
    }

    pub(crate) fn word(&self, nth: usize) -> u32 {
        u32::from_le_bytes(self.body[nth * 4..nth * 4 + 4].try_into().unwrap())
    }

    pub(crate) fn wide(&self, nth: usize) -> u64 {
        u64::from(self.word(nth * 2)) | u64::from(self.word(nth * 2 + 1)) << 32
    }

    /// Encodes the operation.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let units = (8 + self.body.len()) / 8;
        let header = u64::from(self.code) | (units as u64) << 16 | u64::from(self.handle) << 32;
        [&header.to_le_bytes()[..], &self.body].concat()
    }
}

/// Encodes a batch.
pub(crate) fn batch(ops: &[Raw]) -> Vec<u8> {
    let body: Vec<u8> = ops.iter().flat_map(Raw::bytes).collect();
    let header = ops.len() as u64 | (body.len() as u64) << 32;
    [&header.to_le_bytes()[..], &body].concat()
}

/// Parses a batch. Returns `None` if it is malformed.
pub(crate) fn parse(data: &[u8]) -> Option<Vec<Raw>> {
    let word = |at: usize| Some(u32::from_le_bytes(data.get(at..at + 4)?.try_into().ok()?) as usize);
    let (ops, bytes) = (word(0)?, word(4)?);
    if ops == 0 || ops > 1024 || bytes > 65536 - 8 || bytes + 8 > data.len() {
        return None;
    }
    let mut at = 8;
    let mut raws = Vec::new();
    for _ in 0..ops {
        if bytes + 8 - at < 8 {
            return None;
        }
        let (first, handle) = (word(at)?, word(at + 4)?);
        let (code, size) = (first as u16, (first >> 16) * 8);
        if size < 8 || size > bytes + 8 - at {
            return None;
        }
        let raw = Raw { code, handle: handle as u32, body: data[at + 8..at + size].to_vec() };
        if body_bytes(&raw)? != raw.body.len() {
            return None;
        }
        raws.push(raw);
        at += size;
    }
    (at == bytes + 8).then_some(raws)
}

/// Returns the required size of an operation's body in bytes, or `None` if the code is undefined.
fn body_bytes(raw: &Raw) -> Option<usize> {
    let listed = |nth: usize| (raw.body.len() >= 8).then(|| raw.word(nth) as usize);
    Some(match raw.code {
        0x02 | 0x08 | 0x10 | 0x12 | 0x13 | 0x14 | 0x40 => 0,
        0x01 | 0x06 | 0x07 | 0x11 | 0x31 | 0x32 | 0x33 => 8,
        0x03 => 16,
        0x04 | 0x20 | 0x21 | 0x22 | 0x30 => 24,
        0x05 => 8 + 8 * listed(1)?,
        0x15 => 8 + (4 * listed(0)?).next_multiple_of(8),
        _ => return None,
    })
}

/// Returns the features that an operation requires, as a bit mask.
pub(crate) fn features(raw: &Raw) -> u32 {
    match raw.code {
        0x01..=0x08 => 0x01,
        0x10..=0x15 => 0x02,
        0x20 | 0x21 => 0x04,
        0x22 => 0x08,
        0x30 if raw.word(4) & 4 != 0 => 0x10 | 0x20,
        0x30..=0x33 => 0x10,
        _ => 0x40,
    }
}

/// Returns all reasons to reject an operation that depend only on the operation.
pub(crate) fn refusals(raw: &Raw) -> Vec<Status> {
    let mut all = Vec::new();
    let mut refuse = |wrong: bool, status| {
        if wrong {
            all.push(status);
        }
    };
    match raw.code {
        0x01 => {
            refuse(raw.handle == 0 || raw.word(1) != 0, Status::Invalid);
            refuse(!(1..=3).contains(&raw.word(0)), Status::Invalid);
        }
        0x02 | 0x04 | 0x05 | 0x06 => refuse(raw.handle == 0, Status::NoObject),
        0x03 => {
            refuse(raw.handle == 0, Status::NoObject);
            refuse(raw.word(3) != 0, Status::Invalid);
        }
        0x07 | 0x11 => refuse(raw.wide(0) & 4095 != 0, Status::Invalid),
        0x15 => {
            let padding = if raw.word(0) % 2 == 1 { raw.word(2 + raw.word(0) as usize) } else { 0 };
            refuse(raw.handle != 0 || raw.word(1) != 0 || padding != 0, Status::Invalid);
        }
        0x20 => {
            refuse(raw.handle != 0 || raw.word(5) != 0, Status::Invalid);
            refuse((raw.wide(0) | raw.wide(1)) & 3 != 0, Status::Invalid);
            refuse(raw.wide(1) > 16 << 20, Status::Range);
        }
        0x21 => {
            let [to, from, bytes] = [0, 1, 2].map(|nth| u128::from(raw.wide(nth)));
            refuse(raw.handle != 0 || (to | from | bytes) & 3 != 0, Status::Invalid);
            refuse(to < from + bytes && from < to + bytes, Status::Invalid);
            refuse(bytes > 16 << 20, Status::Range);
        }
        0x22 => refuse(raw.handle != 0 || raw.word(5) != 0, Status::Invalid),
        0x30 => {
            refuse(raw.handle != 0 || raw.word(4) > 7 || raw.word(5) > 3, Status::Invalid);
            refuse(raw.word(4) & 3 == 2, Status::Invalid);
        }
        0x31 => refuse(raw.word(1) & !8 != 0, Status::Invalid),
        0x32 => refuse(raw.word(1) != 0, Status::Invalid),
        0x33 => {
            refuse(!(1..=5).contains(&raw.word(0)), Status::Invalid);
            refuse(raw.word(1) > if raw.word(0) == 4 { 3 } else { 0 }, Status::Invalid);
        }
        0x40 => refuse(!(1..=10).contains(&raw.handle), Status::Invalid),
        _ => {}
    }
    all
}

/// Encodes an operation.
pub(crate) fn encode(op: &Op<'_>) -> Raw {
    let handle = |table: crate::TableId| table.0.get();
    let named = |table: Option<crate::TableId>| table.map_or(0, handle);
    let halves = |wide: &[u64]| wide.iter().flat_map(|w| [*w as u32, (*w >> 32) as u32]).collect::<Vec<_>>();
    match *op {
        Op::TableCreate { table, kind } => {
            let kind = match kind {
                Kind::Directory => 1,
                Kind::Small => 2,
                Kind::Large => 3,
            };
            Raw::new(0x01, handle(table), &[kind, 0])
        }
        Op::TableDestroy { table } => Raw::new(0x02, handle(table), &[]),
        Op::DirectorySet { directory, index, small, large } => {
            Raw::new(0x03, handle(directory), &[index, named(small), named(large), 0])
        }
        Op::EntriesRun { table, first, count, entry, step } => {
            Raw::new(0x04, handle(table), &[&[first, count][..], &halves(&[entry, step])].concat())
        }
        Op::EntriesList { table, first, entries } => {
            let entries: Vec<_> = entries.iter().map(|entry| entry.get()).collect();
            Raw::new(0x05, handle(table), &[&[first, entries.len() as u32][..], &halves(&entries)].concat())
        }
        Op::EntriesZero { table, first, count } => Raw::new(0x06, handle(table), &[first, count]),
        Op::DirectoryBind { directory, instance } => Raw::new(0x07, named(directory), &halves(&[instance.0])),
        Op::Flush { directory } => Raw::new(0x08, named(directory), &[]),
        Op::ChannelCreate { channel } => Raw::new(0x10, channel, &[]),
        Op::ChannelBind { channel, instance } => Raw::new(0x11, channel, &halves(&[instance.0])),
        Op::ChannelEnable { channel } => Raw::new(0x12, channel, &[]),
        Op::ChannelDisable { channel } => Raw::new(0x13, channel, &[]),
        Op::ChannelDestroy { channel } => Raw::new(0x14, channel, &[]),
        Op::Runlist { channels } => {
            let mut words = vec![channels.len() as u32, 0];
            words.extend(channels.iter().map(|channel| channel.get()));
            words.resize(words.len().next_multiple_of(2), 0);
            Raw::new(0x15, 0, &words)
        }
        Op::MemoryFill { address, bytes, value } => {
            Raw::new(0x20, 0, &[&halves(&[address.0, bytes])[..], &[value, 0]].concat())
        }
        Op::MemoryCopy { to, from, bytes } => Raw::new(0x21, 0, &halves(&[to.0, from.0, bytes])),
        Op::BufferPriority { address, bytes, priority } => {
            Raw::new(0x22, 0, &[&halves(&[address.0, bytes])[..], &[priority as u32, 0]].concat())
        }
        Op::ShareGet { key, bytes, create, exclusive, abroad, mode } => {
            let flags = u32::from(create) | u32::from(exclusive) << 1 | u32::from(abroad) << 2;
            Raw::new(0x30, 0, &[&halves(&[key, bytes])[..], &[flags, mode]].concat())
        }
        Op::ShareAttach { segment, channel, read_only } => {
            Raw::new(0x31, segment, &[channel, u32::from(read_only) << 3])
        }
        Op::ShareDetach { segment, channel } => Raw::new(0x32, segment, &[channel, 0]),
        Op::ShareControl { segment, control } => {
            let words = match control {
                Control::Size => [1, 0],
                Control::Attached => [2, 0],
                Control::Mode => [3, 0],
                Control::SetMode(mode) => [4, mode],
                Control::Remove => [5, 0],
            };
            Raw::new(0x33, segment, &words)
        }
        Op::Query { question } => Raw::new(0x40, question as u32, &[]),
    }
}
