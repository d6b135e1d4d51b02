//! The input buffer: splits the stream into messages and assigns file descriptors to them.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;

use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use zerocopy::FromBytes;

use super::{Fatal, MAX_SKIP, Message};
use crate::journal::{Marks, Room};
use crate::protocol::{Command, HEADER_SIZE, Header, IRQ_DATA_EVENTFD, IrqSet};
use vmm_memory::descriptors::{Given, Giving, ParkError};

/// Buffer space in addition to one message, in bytes. It lets one call receive many small messages.
pub(crate) const EXTRA_RECEIVE_BYTES: usize = 64 << 10;
/// Maximum number of sets of descriptors whose messages have not been handled.
pub(super) const MAX_SETS: usize = 8;

/// Descriptors received by one call.
#[derive(Debug)]
struct FdSet {
    /// Stream position after the last byte that the call received.
    end: u64,
    fds: Vec<OwnedFd>,
    truncated: bool,
}

/// A receive buffer, in this process's memory or in a journal.
#[derive(Debug)]
enum Buffer {
    Own(Box<[u8]>),
    Journal(Room),
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Journal(room) => room,
        }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Journal(room) => room,
        }
    }
}

#[derive(Debug)]
pub(super) struct Receive {
    buffer: Buffer,
    /// Start of the unhandled bytes, which are `start..end` of the buffer.
    start: usize,
    end: usize,
    /// Stream position of `start`.
    position: u64,
    /// Remaining number of bytes of an oversized message to discard.
    skip: u64,
    max_message: usize,
    sets: VecDeque<FdSet>,
    /// Set if a message carried descriptors since the last [`Self::take_gave`].
    gave: bool,
}

impl Receive {
    pub fn new(max_message: usize) -> Self {
        let buffer = Buffer::Own(vec![0; max_message.saturating_add(EXTRA_RECEIVE_BYTES)].into_boxed_slice());
        Self { buffer, start: 0, end: 0, position: 0, skip: 0, max_message, sets: VecDeque::new(), gave: false }
    }

    /// Returns the maximum size in bytes of a message that is received in full.
    pub fn max_message(&self) -> usize {
        self.max_message
    }

    /// Switches to a journal's buffer and moves the unhandled bytes into it.
    pub fn move_into(&mut self, mut room: Room) {
        let waiting = self.buffer.get(self.start..self.end).unwrap_or_default();
        if let Some(place) = room.get_mut(..waiting.len()) {
            place.copy_from_slice(waiting);
        }
        (self.start, self.end) = (0, waiting.len());
        self.buffer = Buffer::Journal(room);
        self.mark(true);
    }

    /// Switches back to this process's memory because the journal has ended.
    pub fn move_out(&mut self) {
        self.buffer = Buffer::Own(self.buffer.to_vec().into_boxed_slice());
    }

    /// Returns the stream position after the last message taken.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Returns true if a message carried descriptors since the last call.
    pub fn take_gave(&mut self) -> bool {
        std::mem::take(&mut self.gave)
    }

    /// Records the ends of the received bytes and of the handled messages in the journal, if any.
    pub fn mark(&mut self, clean: bool) {
        if let Buffer::Journal(room) = &mut self.buffer {
            let Marks { sent, next_id, .. } = room.marks();
            let (start, end) = (length(self.start), length(self.end));
            room.mark(Marks { start, end, position: self.position, skip: self.skip, sent, next_id, clean });
        }
    }

    /// Records the same positions as [`Self::mark`], just before the replies to all handled messages are sent. `sent`
    /// is the commit number.
    pub fn mark_sent(&mut self, sent: u64, next_id: u64) {
        if let Buffer::Journal(room) = &mut self.buffer {
            let (start, end) = (length(self.start), length(self.end));
            room.mark(Marks { start, end, position: self.position, skip: self.skip, sent, next_id, clean: true });
        }
    }

    /// Returns the buffer for received bytes. In a journal, this buffer is zeroed, so that the next process can find
    /// bytes that were received but not marked.
    pub fn space(&mut self) -> &mut [u8] {
        let before = self.end;
        if self.start == self.end {
            self.wipe(0, before);
            (self.start, self.end) = (0, 0);
            self.mark(true);
        } else if self.buffer.len().saturating_sub(self.end) < EXTRA_RECEIVE_BYTES / 2 && self.start != 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end.saturating_sub(self.start));
            self.mark(false);
            self.wipe(self.end, before);
            self.mark(true);
        }
        self.buffer.get_mut(self.end..).unwrap_or_default()
    }

    fn wipe(&mut self, from: usize, to: usize) {
        if let Buffer::Journal(room) = &mut self.buffer {
            room.get_mut(from..to).unwrap_or_default().fill(0);
        }
    }

    /// Adds received bytes. Returns the number of descriptors closed because too many sets are already waiting.
    pub fn commit(&mut self, len: usize, fds: Vec<OwnedFd>, truncated: bool) -> usize {
        self.end = self.end.saturating_add(len).min(self.buffer.len());
        if fds.is_empty() && !truncated {
            return 0;
        }
        if self.sets.len() >= MAX_SETS {
            return fds.len();
        }
        // A call returns no bytes beyond the part of the stream that carried descriptors, and a sender attaches
        // descriptors to the first byte of a message. The descriptors therefore belong to the last message that starts
        // before `end`.
        let end = self.position.saturating_add(length(self.end.saturating_sub(self.start)));
        self.sets.push_back(FdSet { end, fds, truncated });
        0
    }

    /// Removes the next complete message from the buffer and returns it. Returns only the header of an oversized
    /// message, and skips its body.
    pub fn next(&mut self) -> Result<Option<Message<'_>>, Fatal> {
        self.drop_skipped();
        let waiting = self.buffer.get(self.start..self.end).unwrap_or_default();
        let Ok((header, _)) = Header::read_from_prefix(waiting) else { return Ok(None) };
        let size = usize::try_from(header.size).unwrap_or(usize::MAX);
        if size < HEADER_SIZE {
            return Err(Fatal::Undersized(header.size));
        }
        if header.size > MAX_SKIP {
            return Err(Fatal::Oversized(header.size));
        }
        let oversized = size > self.max_message;
        if !oversized && waiting.len() < size {
            return Ok(None);
        }
        let message_end = self.position.saturating_add(u64::from(header.size));
        let mut fds = Vec::new();
        let mut truncated = false;
        while let Some(set) = self.sets.pop_front_if(|set| set.end <= message_end) {
            truncated |= set.truncated;
            self.gave = true;
            if fds.is_empty() {
                fds = set.fds;
            } else {
                fds.extend(set.fds);
            }
        }
        let body_start = self.start.saturating_add(HEADER_SIZE);
        let body_end = if oversized { body_start } else { self.start.saturating_add(size) };
        if oversized {
            self.skip = u64::from(header.size);
            self.drop_skipped();
        } else {
            self.start = body_end;
            self.position = message_end;
        }
        let body = self.buffer.get(body_start..body_end).unwrap_or_default();
        Ok(Some(Message { header, body, fds, truncated, oversized }))
    }

    fn drop_skipped(&mut self) {
        let waiting = self.end.saturating_sub(self.start);
        let now = usize::try_from(self.skip).unwrap_or(usize::MAX).min(waiting);
        self.start = self.start.saturating_add(now);
        self.position = self.position.saturating_add(length(now));
        self.skip = self.skip.saturating_sub(length(now));
    }
}

/// Saved form of the input buffer. Positions are relative to the first unhandled byte.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedReceive {
    /// Bytes that were received but not handled.
    pub(super) bytes: Vec<u8>,
    pub(super) skip: u64,
    pub(super) sets: Vec<SavedSet>,
}

/// Descriptors whose message has not been handled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedSet {
    pub(super) end: u64,
    fds: Vec<u32>,
    truncated: bool,
}

impl Receive {
    /// Saves the buffer.
    pub(super) fn save(&self, giving: &mut Giving<'_>) -> Result<SavedReceive, ParkError> {
        let Self { buffer, start, end, position, skip, max_message: _, sets, gave: _ } = self;
        let mut saved = Vec::new();
        for FdSet { end, fds, truncated } in sets {
            let fds = fds.iter().map(|fd| giving.give(fd)).collect::<std::io::Result<_>>()?;
            saved.push(SavedSet { end: end.saturating_sub(*position), fds, truncated: *truncated });
        }
        let bytes = buffer.get(*start..*end).unwrap_or_default().to_vec();
        Ok(SavedReceive { bytes, skip: *skip, sets: saved })
    }

    /// Restores the buffer.
    pub(super) fn restored(saved: SavedReceive, given: &Given, max_message: usize) -> Result<Self, ParkError> {
        let mut receive = Self::new(max_message);
        saved.check(receive.buffer.len())?;
        let SavedReceive { bytes, skip, sets } = saved;
        let room = receive.buffer.get_mut(..bytes.len()).ok_or_else(|| Invalid::new("a message is too long"))?;
        room.copy_from_slice(&bytes);
        receive.end = bytes.len();
        receive.skip = skip;
        for set in sets {
            receive.sets.push_back(set.given(0, given)?);
        }
        Ok(receive)
    }

    /// Restores the buffer of a killed process. `saved` was committed at stream position `position`.
    pub(super) fn revived(
        saved: SavedReceive,
        given: &Given,
        max_message: usize,
        room: Room,
        position: u64,
    ) -> Result<Self, ParkError> {
        saved.check(room.len())?;
        let Marks { start, end, position: answered, skip, clean, .. } = room.marks();
        // Messages before the commit have been handled, and their replies may be in the output.
        let ahead = position.saturating_sub(answered);
        let start = place(start.saturating_add(ahead));
        let end = place(end);
        let skip = if ahead == 0 { skip } else { saved.skip };
        Invalid::unless(start <= end && end <= room.len() && skip <= u64::from(MAX_SKIP), || {
            format!("unhandled bytes are {start} to {end}, and {skip} bytes must be skipped")
        })?;
        let now = answered.max(position);
        let until = if clean { received_until(&room, start, end, skip)? } else { end };
        let mut sets = VecDeque::new();
        for set in saved.sets {
            let set = set.given(position, given)?;
            if set.end > now {
                sets.push_back(set);
            }
        }
        let last = now.saturating_add(length(until.saturating_sub(start)));
        if until > end && sets.back().is_none_or(|set| set.end != last) {
            Invalid::unless(!wants_descriptors(room.get(start..until).unwrap_or_default()), || {
                "the daemon was killed just after receiving descriptors".into()
            })?;
        }
        let mut receive = Self {
            buffer: Buffer::Journal(room),
            start,
            end: until,
            position: now,
            skip,
            max_message,
            sets,
            gave: false,
        };
        receive.mark(true);
        Ok(receive)
    }
}

impl SavedSet {
    /// Restores the set. Positions are relative to `position`.
    fn given(self, position: u64, given: &Given) -> Result<FdSet, ParkError> {
        let Self { end, fds, truncated } = self;
        Invalid::unless(fds.len() <= super::MAX_FDS, || "a message has too many descriptors".into())?;
        let fds = fds.into_iter().map(|fd| given.take(fd)).collect::<Result<_, _>>()?;
        Ok(FdSet { end: position.saturating_add(end), fds, truncated })
    }
}

/// Returns the end of the received bytes, after which the buffer contains only zeros. The end is beyond the mark at
/// `end` if the process was killed before it could update the mark. The messages after the mark are then assumed to be
/// complete, because a single call receives a whole message.
fn received_until(room: &[u8], start: usize, end: usize, skip: u64) -> Result<usize, Invalid> {
    let Some(last) = room.get(end..).and_then(|rest| rest.iter().rposition(|byte| *byte != 0)) else { return Ok(end) };
    let last = end.saturating_add(last);
    let mut at = start;
    while at <= last {
        let header = room.get(at..).and_then(|rest| Header::read_from_prefix(rest).ok());
        let size = header.map_or(0, |(header, _)| usize::try_from(header.size).unwrap_or(usize::MAX));
        let whole = skip == 0 && size >= HEADER_SIZE && at.saturating_add(size) <= room.len();
        Invalid::unless(whole, || "the daemon was killed just after receiving part of a message".into())?;
        at = at.saturating_add(size);
    }
    Ok(at)
}

/// Returns true if any of these messages may carry descriptors.
fn wants_descriptors(mut messages: &[u8]) -> bool {
    while let Ok((header, body)) = Header::read_from_prefix(messages) {
        let events = || IrqSet::read_from_prefix(body).is_ok_and(|(set, _)| set.flags & IRQ_DATA_EVENTFD != 0);
        match header.command() {
            Command::DMA_MAP => return true,
            Command::DEVICE_SET_IRQS if events() => return true,
            _ => {}
        }
        let size = usize::try_from(header.size).unwrap_or(usize::MAX).max(HEADER_SIZE);
        messages = messages.get(size..).unwrap_or_default();
    }
    false
}

fn place(at: u64) -> usize {
    usize::try_from(at).unwrap_or(usize::MAX)
}

fn length(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};
    use zerocopy::IntoBytes;

    use super::*;
    use crate::protocol::Command;

    fn message(id: u16, body: &[u8]) -> Vec<u8> {
        let size = u32::try_from(HEADER_SIZE + body.len()).unwrap();
        [Header::request(id, Command::DMA_MAP, size, 0).as_bytes(), body].concat()
    }

    fn feed(receive: &mut Receive, bytes: &[u8], fds: usize) {
        receive.space()[..bytes.len()].copy_from_slice(bytes);
        let fds = (0..fds).map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap()).collect();
        assert_eq!(receive.commit(bytes.len(), fds, false), 0);
    }

    #[test]
    fn descriptors_belong_to_last_message_starting_in_their_call() {
        let mut receive = Receive::new(4096);
        let bytes = [message(1, &[]), message(2, &[0; 8]), message(3, &[0; 32])].concat();
        feed(&mut receive, &bytes, 1);
        feed(&mut receive, &message(4, &[]), 0);
        let ids_and_fds: Vec<_> =
            std::iter::from_fn(|| receive.next().unwrap().map(|message| (message.header.id, message.fds.len())))
                .collect();
        assert_eq!(ids_and_fds, [(1, 0), (2, 0), (3, 1), (4, 0)]);
    }

    #[test]
    fn descriptors_of_a_message_that_comes_in_two_calls_are_kept() {
        let mut receive = Receive::new(4096);
        let (first, second) = (message(1, &[]), message(2, &[7; 32]));
        let cut = 20;
        feed(&mut receive, &[&first[..], &second[..cut]].concat(), 2);
        assert_eq!(receive.next().unwrap().unwrap().fds.len(), 0);
        assert!(receive.next().unwrap().is_none());
        feed(&mut receive, &second[cut..], 0);
        let whole = receive.next().unwrap().unwrap();
        assert_eq!((whole.fds.len(), whole.body), (2, &[7; 32][..]));
    }

    #[test]
    fn oversized_message_is_skipped_and_the_next_one_is_whole() {
        let mut receive = Receive::new(64);
        let bytes = [message(1, &[1; 500]), message(2, &[2; 4])].concat();
        for chunk in bytes.chunks(100) {
            feed(&mut receive, chunk, 0);
        }
        let first = receive.next().unwrap().unwrap();
        assert!(first.oversized && first.body.is_empty());
        let second = receive.next().unwrap().unwrap();
        assert_eq!((second.header.id, second.body, second.oversized), (2, &[2; 4][..], false));
        assert!(receive.next().unwrap().is_none());
    }

    #[test]
    fn message_smaller_than_its_header_is_fatal() {
        let mut receive = Receive::new(64);
        feed(&mut receive, Header::request(1, Command::VERSION, 15, 0).as_bytes(), 0);
        assert!(matches!(receive.next(), Err(Fatal::Undersized(15))));
    }

    #[test]
    fn stream_of_any_chunks_is_framed_the_same() {
        let bytes: Vec<u8> = (0..200u16).flat_map(|id| message(id, &vec![3; usize::from(id)])).collect();
        for chunk_size in [1, 7, 16, 333, 4096] {
            let mut receive = Receive::new(4096);
            let mut next_id = 0;
            for chunk in bytes.chunks(chunk_size) {
                feed(&mut receive, chunk, 0);
                while let Some(message) = receive.next().unwrap() {
                    assert_eq!((message.header.id, message.body.len()), (next_id, usize::from(next_id)));
                    next_id += 1;
                }
            }
            assert_eq!(next_id, 200);
        }
    }
}
