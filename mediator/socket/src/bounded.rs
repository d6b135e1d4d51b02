//! A listening socket that limits its connections, so that read-only clients cannot exhaust the daemon's file
//! descriptors.

use std::io;
use std::net::{SocketAddr as InetAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::unix::SocketAddr;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum number of concurrent connections to a socket. Further connections wait in the backlog.
const CONNECTIONS: usize = 64;

/// A listening socket with a connection limit.
#[derive(Debug)]
pub struct Bounded<L = tokio::net::UnixListener> {
    listener: L,
    places: Arc<Semaphore>,
}

impl Bounded {
    /// Creates the socket. Must be called in the context of a Tokio runtime.
    ///
    /// # Errors
    /// Returns an error if the runtime cannot register the socket.
    pub fn new(listener: UnixListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::UnixListener::from_std(listener)?;
        Ok(Self { listener, places: Arc::new(Semaphore::new(CONNECTIONS)) })
    }
}

impl Bounded<tokio::net::TcpListener> {
    /// Like [`Bounded::new`], for a TCP socket.
    ///
    /// # Errors
    /// Returns an error if the runtime cannot register the socket.
    pub fn tcp(listener: TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        Ok(Self { listener, places: Arc::new(Semaphore::new(CONNECTIONS)) })
    }
}

impl Listener for Bounded<tokio::net::TcpListener> {
    type Io = Connection<TcpStream>;
    type Addr = InetAddr;

    async fn accept(&mut self) -> (Connection<TcpStream>, InetAddr) {
        // Never `None`, because the semaphore is never closed.
        let place = Arc::clone(&self.places).acquire_owned().await.ok();
        let (stream, address) = Listener::accept(&mut self.listener).await;
        (Connection { stream, _place: place }, address)
    }

    fn local_addr(&self) -> io::Result<InetAddr> {
        self.listener.local_addr()
    }
}

impl Listener for Bounded {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        // Never `None`, because the semaphore is never closed.
        let place = Arc::clone(&self.places).acquire_owned().await.ok();
        let (stream, address) = Listener::accept(&mut self.listener).await;
        (Connection { stream, _place: place }, address)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that releases its permit when closed.
#[derive(Debug)]
pub struct Connection<S = UnixStream> {
    stream: S,
    _place: Option<OwnedSemaphorePermit>,
}

/// The process at the other end of a connection, as recorded by the kernel during `connect`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// User ID of the process; `None` if the kernel does not report it.
    pub uid: Option<u32>,
    /// Process ID in the daemon's PID namespace; `None` if the process is not visible there.
    pub pid: Option<i32>,
}

impl Connected<IncomingStream<'_, Bounded>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Bounded>) -> Self {
        match stream.io().stream.peer_cred() {
            Ok(peer) => Self { uid: Some(peer.uid()), pid: peer.pid().filter(|pid| *pid > 0) },
            Err(_) => Self { uid: None, pid: None },
        }
    }
}

impl Connected<IncomingStream<'_, Bounded<tokio::net::TcpListener>>> for Peer {
    fn connect_info(_: IncomingStream<'_, Bounded<tokio::net::TcpListener>>) -> Self {
        // The kernel does not report the peer process of a TCP connection.
        Self { uid: None, pid: None }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
