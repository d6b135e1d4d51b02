//! A connection over which a process and an owner exchange messages.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::message::{Message, decode, encode};
use crate::{FromOwner, FromTenant, MAX_DESCRIPTORS, MAX_PACKET, Malformed};

/// One end of a connection. Any thread can send, but only one thread can receive.
#[derive(Debug)]
pub struct Link(OwnedFd);

/// A message and its descriptors, in the order in which the message refers to them.
#[derive(Debug)]
pub struct Received<M> {
    /// The decoded message.
    pub message: M,
    /// The message's descriptors, with the close-on-exec flag set.
    pub descriptors: Vec<OwnedFd>,
}

/// A failed connection, or a rejected packet.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The socket failed.
    #[error("the connection failed: {0}")]
    Socket(#[from] io::Error),
    /// The other side has closed the connection.
    #[error("the other side closed the connection")]
    Closed,
    /// The send queue is full, or no message has arrived.
    #[error("the connection would block")]
    WouldBlock,
    /// The user has reached the system's limit on descriptors in flight (`ETOOMANYREFS`). Sending can be retried.
    #[error("too many descriptors of this user are in flight to processes that do not read")]
    Crowded,
    /// The packet is not a valid message.
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

impl Link {
    /// Wraps a connected `SOCK_SEQPACKET` socket.
    pub fn new(socket: OwnedFd) -> Self {
        Self(socket)
    }

    /// Connects to the owner's socket at `path`.
    pub fn connect(path: &Path) -> Result<Self, LinkError> {
        let socket = socket()?;
        rustix::net::connect(&socket, &address(path)?).map_err(io::Error::from)?;
        Ok(Self(socket))
    }

    /// Listens at `path`, which must not exist. Use `rustix::net::accept` to accept connections.
    pub fn listen(path: &Path) -> Result<OwnedFd, LinkError> {
        let socket = socket()?;
        rustix::net::bind(&socket, &address(path)?).map_err(io::Error::from)?;
        rustix::net::listen(&socket, 64).map_err(io::Error::from)?;
        Ok(socket)
    }

    /// Returns the two ends of a new connection.
    pub fn pair() -> Result<(Self, Self), LinkError> {
        let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(io::Error::from)?;
        Ok((Self(a), Self(b)))
    }

    /// Sends a tenant's message. Blocks while the queue is full.
    pub fn send(&self, message: &FromTenant, descriptors: &[BorrowedFd<'_>]) -> Result<(), LinkError> {
        self.transmit(message, descriptors, SendFlags::NOSIGNAL)
    }

    /// Sends a tenant's message, or fails with [`LinkError::WouldBlock`] if the queue is full.
    pub fn send_now(&self, message: &FromTenant, descriptors: &[BorrowedFd<'_>]) -> Result<(), LinkError> {
        self.transmit(message, descriptors, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    /// Sends an owner's message, or fails with [`LinkError::WouldBlock`] if the queue is full.
    pub fn try_send(&self, message: &FromOwner, descriptors: &[BorrowedFd<'_>]) -> Result<(), LinkError> {
        self.transmit(message, descriptors, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    /// Waits for an owner's message.
    pub fn receive(&self) -> Result<Received<FromOwner>, LinkError> {
        self.accept(RecvFlags::CMSG_CLOEXEC)
    }

    /// Receives an owner's message, or fails with [`LinkError::WouldBlock`] if none has arrived.
    pub fn try_receive_from_owner(&self) -> Result<Received<FromOwner>, LinkError> {
        self.accept(RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT)
    }

    /// Receives a tenant's message, or fails with [`LinkError::WouldBlock`] if none has arrived.
    pub fn try_receive(&self) -> Result<Received<FromTenant>, LinkError> {
        self.accept(RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT)
    }

    fn transmit<M: Message>(
        &self,
        message: &M,
        descriptors: &[BorrowedFd<'_>],
        flags: SendFlags,
    ) -> Result<(), LinkError> {
        let (found, wanted) = (descriptors.len(), message.descriptors());
        if found != wanted {
            return Err(Malformed::Descriptors { found, wanted }.into());
        }
        let mut buffer = [0; MAX_PACKET];
        let bytes = encode(message, &mut buffer)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(Malformed::TooMany { item: "descriptors", count: found, most: MAX_DESCRIPTORS }.into());
        }
        loop {
            match rustix::net::sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, flags) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOBUFS | rustix::io::Errno::NOMEM) => {
                    return Err(LinkError::WouldBlock);
                }
                Err(rustix::io::Errno::TOOMANYREFS) => return Err(LinkError::Crowded),
                Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => return Err(LinkError::Closed),
                Err(error) => return Err(LinkError::Socket(error.into())),
            }
        }
    }

    fn accept<M: Message>(&self, flags: RecvFlags) -> Result<Received<M>, LinkError> {
        let mut buffer = [0; MAX_PACKET];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            match rustix::net::recvmsg(&self.0, &mut [IoSliceMut::new(&mut buffer)], &mut control, flags) {
                Ok(received) => break received,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Err(LinkError::WouldBlock),
                Err(rustix::io::Errno::CONNRESET) => return Err(LinkError::Closed),
                Err(error) => return Err(LinkError::Socket(error.into())),
            }
        };
        let mut descriptors = Vec::new();
        for ancillary in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = ancillary {
                descriptors.extend(rights);
            }
        }
        if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(Malformed::TooMany { item: "bytes or more", count: MAX_PACKET + 1, most: MAX_PACKET }.into());
        }
        // Every message has at least a kind byte, so an empty packet indicates that the connection was closed.
        let Some(packet) = buffer.get(..received.bytes).filter(|p| !p.is_empty()) else {
            return Err(LinkError::Closed);
        };
        Ok(Received { message: decode(packet, descriptors.len())?, descriptors })
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Link> for OwnedFd {
    fn from(link: Link) -> Self {
        link.0
    }
}

fn socket() -> Result<OwnedFd, LinkError> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(|error| LinkError::Socket(error.into()))
}

fn address(path: &Path) -> Result<SocketAddrUnix, LinkError> {
    SocketAddrUnix::new(path).map_err(|error| LinkError::Socket(error.into()))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;
    use crate::{Chunk, ChunkId, Place};

    #[test]
    fn descriptors_travel_in_order() {
        let (owner, tenant) = Link::pair().expect("pair");
        let (reader, writer) = rustix::pipe::pipe().expect("pipe");
        let chunks = [1, 2].map(|id| Chunk { id: ChunkId(id), place: Place::Device }).to_vec();
        let message = FromOwner::Granted { request: 1, chunks, more: false };
        owner.try_send(&message, &[reader.as_fd(), writer.as_fd()]).expect("sent");
        let received = tenant.receive().expect("received");
        assert_eq!(received.message, message);
        rustix::io::write(&received.descriptors[1], b"x").expect("the second is the pipe's write end");
        let mut byte = [0];
        rustix::io::read(&received.descriptors[0], &mut byte).expect("the first is its read end");
        assert_eq!(&byte, b"x");
    }

    #[test]
    fn a_message_without_its_descriptors_is_not_sent() {
        let (owner, _tenant) = Link::pair().expect("pair");
        let chunks = vec![Chunk { id: ChunkId(1), place: Place::Device }];
        let sent = owner.try_send(&FromOwner::Granted { request: 1, chunks, more: false }, &[]);
        assert!(matches!(sent, Err(LinkError::Malformed(Malformed::Descriptors { found: 0, wanted: 1 }))), "{sent:?}");
    }

    #[test]
    fn a_full_queue_does_not_block_the_owner() {
        let (owner, _tenant) = Link::pair().expect("pair");
        let end = (0..100_000).find_map(|order| owner.try_send(&FromOwner::Resume { order }, &[]).err());
        assert!(matches!(end, Some(LinkError::WouldBlock)), "{end:?}");
    }

    #[test]
    fn an_end_that_is_gone_is_closed() {
        let (owner, tenant) = Link::pair().expect("pair");
        assert!(matches!(owner.try_receive(), Err(LinkError::WouldBlock)));
        drop(tenant);
        assert!(matches!(owner.try_receive(), Err(LinkError::Closed)));
        assert!(matches!(owner.try_send(&FromOwner::Resume { order: 1 }, &[]), Err(LinkError::Closed)));
    }

    #[test]
    fn a_foreign_packet_is_refused_and_its_descriptors_are_closed() {
        let (owner, tenant) = Link::pair().expect("pair");
        rustix::net::send(&tenant, &[0xff; 3], SendFlags::empty()).expect("sent");
        assert!(matches!(owner.try_receive(), Err(LinkError::Malformed(Malformed::Encoding { bytes: 3 }))));
    }
}
