//! Messages queued for a client.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use zerocopy::{Immutable, IntoBytes};

use crate::protocol::{FLAG_ERROR, FLAG_TYPE_REPLY, HEADER_SIZE, Header};
use vmm_memory::descriptors::{Given, Giving, ParkError};

/// Queued bytes and their descriptors.
#[derive(Debug, Default)]
pub struct Outbox {
    bytes: Vec<u8>,
    /// Number of leading bytes that have been sent.
    sent: usize,
    /// Descriptors, each with the index in `bytes` of the byte that carries it.
    fds: VecDeque<(usize, Arc<OwnedFd>)>,
}

/// Saved form of the queued messages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedOutbox {
    /// Unsent bytes.
    bytes: Vec<u8>,
    /// Position of the byte that carries each descriptor, and the descriptor's name.
    fds: Vec<(u32, u32)>,
}

impl Outbox {
    /// Saves the queued messages.
    pub(super) fn save(&self, giving: &mut Giving<'_>) -> Result<SavedOutbox, ParkError> {
        let Self { bytes, sent, fds } = self;
        let mut places = Vec::new();
        for (place, fd) in fds {
            let place = u32::try_from(place.saturating_sub(*sent)).unwrap_or(u32::MAX);
            places.push((place, giving.give(fd)?));
        }
        Ok(SavedOutbox { bytes: bytes.get(*sent..).unwrap_or_default().to_vec(), fds: places })
    }

    /// Restores queued messages. Rejects more than four times `most` bytes.
    pub(super) fn restored(saved: SavedOutbox, given: &Given, most: usize) -> Result<Self, ParkError> {
        let SavedOutbox { bytes, fds } = saved;
        let within = |place: u32| usize::try_from(place).is_ok_and(|place| place < bytes.len());
        let ordered = fds.iter().map(|(place, _)| place).is_sorted() && fds.iter().all(|(place, _)| within(*place));
        Invalid::unless(ordered && bytes.len() <= most.saturating_mul(4), || {
            format!("{} bytes are queued, or a descriptor belongs to none of them", bytes.len())
        })?;
        let mut places = VecDeque::new();
        for (place, fd) in fds {
            places.push_back((usize::try_from(place).unwrap_or(usize::MAX), Arc::new(given.take(fd)?)));
        }
        Ok(Self { bytes, sent: 0, fds: places })
    }

    /// Returns the number of queued bytes.
    pub fn len(&self) -> usize {
        self.bytes.len().saturating_sub(self.sent)
    }

    /// Returns true if no message is queued.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes to send in the next call, and the descriptor to send with the first byte.
    pub fn next(&self) -> (&[u8], Option<Arc<OwnedFd>>) {
        let mut places = self.fds.iter().map(|(place, _)| *place);
        let (fd, end) = match places.next() {
            Some(place) if place == self.sent => (self.fds.front(), places.next()),
            other => (None, other),
        };
        let bytes = self.bytes.get(self.sent..end.unwrap_or(self.bytes.len())).unwrap_or_default();
        (bytes, fd.map(|(_, fd)| Arc::clone(fd)))
    }

    /// Records that `len` bytes of [`Self::next`] were sent, together with its descriptor.
    pub fn advance(&mut self, len: usize) {
        if len == 0 {
            return;
        }
        let sent = self.sent;
        self.fds.pop_front_if(|(place, _)| *place == sent);
        self.sent = self.sent.saturating_add(len).min(self.bytes.len());
        if self.sent == self.bytes.len() {
            self.bytes.clear();
            self.sent = 0;
        } else if self.sent > self.bytes.len() / 2 {
            for (place, _) in &mut self.fds {
                *place = place.saturating_sub(self.sent);
            }
            self.bytes.drain(..self.sent);
            self.sent = 0;
        }
    }

    /// Takes all queued bytes and drops their descriptors.
    pub fn take(&mut self) -> Vec<u8> {
        let bytes = self.bytes.get(self.sent..).unwrap_or_default().to_vec();
        self.bytes.clear();
        self.fds.clear();
        self.sent = 0;
        bytes
    }

    /// Returns the byte buffer, to which whole messages can be appended.
    pub(super) fn raw(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Attaches a descriptor to the next appended message.
    pub(super) fn attach(&mut self, fd: Arc<OwnedFd>) {
        self.fds.push_back((self.bytes.len(), fd));
    }

    /// Appends a successful reply with `body`, followed by `data`.
    pub(super) fn reply(&mut self, request: &Header, body: &(impl IntoBytes + Immutable), data: &[u8]) {
        let body = body.as_bytes();
        self.header(request, body.len().saturating_add(data.len()), 0, 0);
        self.bytes.extend_from_slice(body);
        self.bytes.extend_from_slice(data);
    }

    /// Appends a successful reply whose last `len` bytes are written by `fill`. Appends nothing if `fill` fails.
    pub(super) fn reply_with<E>(
        &mut self,
        request: &Header,
        body: &(impl IntoBytes + Immutable),
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let start = self.bytes.len();
        self.reply(request, body, &[]);
        let data = self.bytes.len();
        self.bytes.resize(data.saturating_add(len), 0);
        let size = u32::try_from(self.bytes.len().saturating_sub(start)).unwrap_or(u32::MAX);
        let place = start.saturating_add(std::mem::offset_of!(Header, size));
        if let Some(field) = self.bytes.get_mut(place..place.saturating_add(size_of_val(&size))) {
            field.copy_from_slice(&size.to_ne_bytes());
        }
        let result = fill(self.bytes.get_mut(data..).unwrap_or_default());
        if result.is_err() {
            self.bytes.truncate(start);
        }
        result
    }

    /// Appends an error reply. `body` is empty unless the client expects a body even in an error reply.
    pub(super) fn error(&mut self, request: &Header, errno: u32, body: &[u8]) {
        self.header(request, body.len(), FLAG_ERROR, errno);
        self.bytes.extend_from_slice(body);
    }

    fn header(&mut self, request: &Header, body: usize, flags: u32, error: u32) {
        let size = u32::try_from(HEADER_SIZE.saturating_add(body)).unwrap_or(u32::MAX);
        let reply = Header { size, flags: FLAG_TYPE_REPLY | flags, error, ..*request };
        self.bytes.extend_from_slice(reply.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptor_goes_with_the_first_byte_of_its_message() {
        let fd = Arc::new(std::fs::File::open("/dev/null").unwrap().into());
        let mut out = Outbox::default();
        out.raw().extend_from_slice(b"first");
        out.attach(fd);
        out.raw().extend_from_slice(b"second");
        assert!(matches!(out.next(), (b"first", None)));
        out.advance(2);
        assert!(matches!(out.next(), (b"rst", None)));
        out.advance(3);
        assert!(matches!(out.next(), (b"second", Some(_))));
        out.advance(1);
        assert!(matches!(out.next(), (b"econd", None)));
        out.advance(5);
        assert!(out.is_empty());
    }

    #[test]
    fn failed_fill_leaves_no_reply() {
        let mut out = Outbox::default();
        out.raw().extend_from_slice(b"x");
        out.reply_with(&Header::default(), &0u64, 4, |_| Err::<(), _>(())).unwrap_err();
        assert_eq!(out.take(), b"x");
    }
}
