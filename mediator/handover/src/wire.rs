//! Messages between the two processes, with attached file descriptors.

use crate::{Error, Introduction};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Magic number at the start of each message.
const MAGIC: [u8; 4] = *b"GPUH";
/// Protocol version.
pub(crate) const PROTOCOL: u32 = 1;
/// Maximum number of file descriptors per message. The kernel permits 253.
pub(crate) const MAX_DESCRIPTORS: usize = 128;
/// Maximum length of a message in bytes, determined by the names in one batch of file descriptors.
const MESSAGE_MAX: usize = 64 << 10;
/// Time within which the other process must receive a message.
// TIMEOUT: receiving a message takes less time even on a busy host.
const SEND_LIMIT: Duration = Duration::from_secs(10);

/// A message between the two processes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Message {
    /// First message of the receiver: its introduction.
    Hello(Introduction),
    /// From the sender: size of the attached file in bytes, and number of file descriptors in the subsequent messages.
    Offer { bytes: u64, descriptors: u32 },
    /// From the sender: names of the attached file descriptors.
    Descriptors(Vec<String>),
    /// From the receiver: everything has been rebuilt.
    Ready,
    /// From the receiver, instead of any other message: the reason why it rejects the handover.
    Refused(String),
    /// Last message of the sender: the receiver now owns everything.
    Yours,
}

/// A `SOCK_SEQPACKET` socket to the other process.
#[derive(Debug)]
pub(crate) struct Wire(OwnedFd);

impl Wire {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self(socket)
    }

    /// Sends a message with these file descriptors.
    pub(crate) fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(PROTOCOL.to_le_bytes());
        let body =
            postcard::to_allocvec(message).map_err(|_| Error::Protocol("a message that cannot be encoded".into()))?;
        bytes.extend(body);
        if bytes.len() > MESSAGE_MAX {
            return Err(Error::TooMuch("bytes in a message", bytes.len() as u64, MESSAGE_MAX as u64));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Error::TooMuch("file descriptors in a message", fds.len() as u64, MAX_DESCRIPTORS as u64));
        }
        set_socket_timeout(&self.0, Timeout::Send, Some(SEND_LIMIT)).map_err(Error::io("cannot configure a socket"))?;
        match sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => Ok(()),
            Err(Errno::PIPE | Errno::CONNRESET) => Err(Error::Ended("before it received a message")),
            Err(Errno::AGAIN) => Err(Error::Silent(SEND_LIMIT, "and no longer reads messages")),
            Err(errno) => Err(Error::Io("cannot send a message", errno.into())),
        }
    }

    /// Receives a message and its file descriptors. The message must arrive within `limit`. `awaits` describes the
    /// expected message in errors.
    pub(crate) fn receive(&self, limit: Duration, awaits: &'static str) -> Result<(Message, Vec<OwnedFd>), Error> {
        let failed = || Error::io("cannot receive a message");
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout =
                Timespec::try_from(left).map_err(|_| Error::Protocol("a time limit that is too long".into()))?;
            match poll(&mut [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN)], Some(&timeout)) {
                Ok(0) => return Err(Error::Silent(limit, awaits)),
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(failed()(errno)),
            }
        }
        let mut bytes = vec![0; MESSAGE_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = match recvmsg(&self.0, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Err(Errno::CONNRESET) => return Err(Error::Ended(awaits)),
            other => other.map_err(failed())?,
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if received.bytes == 0 {
            return Err(Error::Ended(awaits));
        }
        if received.flags.intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC) {
            return Err(Error::Protocol(
                "a message that is too long, or more file descriptors than this process may open (RLIMIT_NOFILE)"
                    .into(),
            ));
        }
        bytes.truncate(received.bytes);
        Ok((decoded(&bytes)?, fds))
    }
}

fn decoded(bytes: &[u8]) -> Result<Message, Error> {
    let other = || Error::Protocol("a message from another program".into());
    let rest = bytes.strip_prefix(&MAGIC).ok_or_else(other)?;
    let (version, body) = rest.split_first_chunk::<4>().ok_or_else(other)?;
    let version = u32::from_le_bytes(*version);
    if version != PROTOCOL {
        return Err(Error::Version(version, PROTOCOL));
    }
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        _ => Err(Error::Protocol("a message that cannot be decoded".into())),
    }
}
