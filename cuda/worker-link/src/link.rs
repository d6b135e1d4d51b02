//! The connection between a device and a worker.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::message::{FromWorker, Malformed, PACKET, ToWorker};

/// One end of a worker's connection. Any thread may send; one thread receives.
#[derive(Debug)]
pub struct Link(OwnedFd);

/// A failed connection, or a rejected packet.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The socket failed.
    #[error("the worker's connection failed: {0}")]
    Socket(#[from] io::Error),
    /// The other side has closed the connection.
    #[error("the other side closed the worker's connection")]
    Closed,
    /// No message has arrived, or the other side does not read its messages.
    #[error("the worker's connection would block")]
    WouldBlock,
    /// The packet is not a message.
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

impl From<Errno> for LinkError {
    fn from(error: Errno) -> Self {
        match error {
            Errno::AGAIN => Self::WouldBlock,
            Errno::PIPE | Errno::CONNRESET => Self::Closed,
            other => Self::Socket(other.into()),
        }
    }
}

impl Link {
    /// Wraps a connected `SOCK_SEQPACKET` socket.
    pub fn new(socket: OwnedFd) -> Self {
        Self(socket)
    }

    /// Returns the two ends of a new connection.
    ///
    /// # Errors
    /// Returns an error if the process or the host has run out of descriptors.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self(a), Self(b)))
    }

    /// Connects to the device that listens at a socket, without blocking.
    ///
    /// # Errors
    /// Returns an error if no device listens there, or [`io::ErrorKind::WouldBlock`] if the listener's queue is full.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        // The worker's sandbox does not allow the flag `NONBLOCK` above.
        rustix::io::ioctl_fionbio(&socket, true)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        rustix::io::ioctl_fionbio(&socket, false)?;
        Ok(Self(socket))
    }

    /// Duplicates this end's descriptor.
    ///
    /// # Errors
    /// Returns an error if the process has run out of descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Converts this end into its descriptor, for the worker's arguments.
    pub fn into_fd(self) -> OwnedFd {
        self.0
    }

    /// Sends a message to the worker without blocking.
    ///
    /// # Errors
    /// Returns [`LinkError::WouldBlock`] if the queue is full, or [`LinkError::Closed`] if the worker has exited.
    pub fn send_to_worker(&self, message: ToWorker) -> Result<(), LinkError> {
        self.send(&message.encode(), SendFlags::DONTWAIT)
    }

    /// Sends [`ToWorker::Save`] or [`ToWorker::Hold`] with its file.
    ///
    /// # Errors
    /// Returns [`LinkError::WouldBlock`] if the queue is full, or [`LinkError::Closed`] if the worker has exited.
    pub fn send_save(&self, message: ToWorker, file: BorrowedFd<'_>) -> Result<(), LinkError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let files = [file];
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
        let packet = message.encode();
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = rustix::net::sendmsg(&self.0, &[IoSlice::new(&packet)], &mut ancillary, flags)?;
        if sent == PACKET { Ok(()) } else { Err(LinkError::Malformed(Malformed)) }
    }

    /// Sends a message to the device. Blocks while the queue is full.
    ///
    /// # Errors
    /// Returns [`LinkError::Closed`] if the device has closed the connection.
    pub fn send_from_worker(&self, message: FromWorker) -> Result<(), LinkError> {
        self.send(&message.encode(), SendFlags::empty())
    }

    /// Waits for a message from the device.
    ///
    /// # Errors
    /// Returns [`LinkError::Closed`] if the device has closed the connection.
    pub fn receive_in_worker(&self) -> Result<ToWorker, LinkError> {
        let mut packet = [0; PACKET];
        let length = self.receive(&mut packet, RecvFlags::empty())?;
        Ok(ToWorker::decode(packet.get(..length).unwrap_or_default())?)
    }

    /// Receives a message from the device without blocking, and the file of [`ToWorker::Save`] or [`ToWorker::Hold`],
    /// if any.
    ///
    /// # Errors
    /// Returns [`LinkError::WouldBlock`] if no message has arrived, or [`LinkError::Closed`] if the device has closed
    /// the connection.
    pub fn try_receive_in_worker(&self) -> Result<(ToWorker, Option<OwnedFd>), LinkError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut packet = [0; PACKET];
        let mut parts = [IoSliceMut::new(&mut packet)];
        let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC | RecvFlags::CMSG_CLOEXEC;
        let received = rustix::io::retry_on_intr(|| rustix::net::recvmsg(&self.0, &mut parts, &mut ancillary, flags))?;
        let file = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        // Packets are never empty, so a length of 0 means that the connection was closed.
        if received.bytes == 0 {
            return Err(LinkError::Closed);
        }
        Ok((ToWorker::decode(packet.get(..received.bytes).unwrap_or_default())?, file))
    }

    /// Receives a message from the worker without blocking.
    ///
    /// # Errors
    /// Returns [`LinkError::WouldBlock`] if no message has arrived, or [`LinkError::Closed`] if the worker has exited.
    pub fn receive_from_worker(&self) -> Result<FromWorker, LinkError> {
        let mut packet = [0; PACKET];
        let length = self.receive(&mut packet, RecvFlags::DONTWAIT)?;
        Ok(FromWorker::decode(packet.get(..length).unwrap_or_default())?)
    }

    fn send(&self, packet: &[u8; PACKET], flags: SendFlags) -> Result<(), LinkError> {
        let sent = rustix::io::retry_on_intr(|| rustix::net::send(&self.0, packet, flags | SendFlags::NOSIGNAL))?;
        if sent == PACKET { Ok(()) } else { Err(LinkError::Malformed(Malformed)) }
    }

    fn receive(&self, packet: &mut [u8; PACKET], flags: RecvFlags) -> Result<usize, LinkError> {
        // With `TRUNC`, the call returns the full length of a truncated packet, whose decoding then fails.
        let (_, length) =
            rustix::io::retry_on_intr(|| rustix::net::recv(&self.0, &mut packet[..], flags | RecvFlags::TRUNC))?;
        if length == 0 { Err(LinkError::Closed) } else { Ok(length) }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_to_full_queue_fails_without_blocking() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&socket, 1).unwrap();
        let connected: Vec<_> = (0..8).map(|_| Link::connect(&path)).collect();
        assert!(connected.first().unwrap().is_ok());
        assert_eq!(connected.last().unwrap().as_ref().map(|_| ()).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn messages_cross_and_end_is_noticed() {
        let (device, worker) = Link::pair().expect("a pair");
        device.send_to_worker(ToWorker::Doorbell).expect("sent");
        assert_eq!(worker.receive_in_worker().expect("received"), ToWorker::Doorbell);
        assert!(matches!(device.receive_from_worker(), Err(LinkError::WouldBlock)));
        worker.send_from_worker(FromWorker::Check).expect("sent");
        assert_eq!(device.receive_from_worker().expect("received"), FromWorker::Check);
        drop(worker);
        assert!(matches!(device.receive_from_worker(), Err(LinkError::Closed)));
        assert!(matches!(device.send_to_worker(ToWorker::Doorbell), Err(LinkError::Closed)));
    }

    #[test]
    fn longer_packet_is_malformed() {
        let (device, worker) = Link::pair().expect("a pair");
        rustix::net::send(&device, &[1; PACKET + 1], SendFlags::empty()).expect("sent");
        assert!(matches!(worker.receive_in_worker(), Err(LinkError::Malformed(_))));
    }

    #[test]
    fn file_of_a_save_arrives_with_it() {
        let (device, worker) = Link::pair().expect("a pair");
        let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
        device.send_save(ToWorker::Save, writer.as_fd()).expect("sent");
        device.send_to_worker(ToWorker::Doorbell).expect("sent");
        drop(writer);
        let (message, file) = worker.try_receive_in_worker().expect("received");
        assert_eq!(message, ToWorker::Save);
        rustix::io::write(file.expect("a file"), b"x").expect("written");
        let mut byte = [0];
        assert_eq!(rustix::io::read(&reader, &mut byte).expect("read"), 1);
        assert!(matches!(worker.try_receive_in_worker(), Ok((ToWorker::Doorbell, None))));
        assert!(matches!(worker.try_receive_in_worker(), Err(LinkError::WouldBlock)));
        rustix::net::send(&device, &[1; PACKET + 1], SendFlags::empty()).expect("sent");
        assert!(matches!(worker.try_receive_in_worker(), Err(LinkError::Malformed(_))));
        drop(device);
        assert!(matches!(worker.try_receive_in_worker(), Err(LinkError::Closed)));
    }
}
