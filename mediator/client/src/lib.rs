//! HTTP over the admin socket, with one connection per request. Used by `mediatorctl`, and by programs that place
//! virtual machines and tenants automatically.
//!
//! Modules: [`Admin`] (requests), [`sockets`] (lets a privileged program transfer a daemon's socket to a user),
//! [`terminal`] (untrusted text on a terminal).
//!
//! The crate does not retry requests or cache responses.

pub mod sockets;
pub mod terminal;

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

pub use hyper::Method;

/// Default time limit for a request. A request to add a virtual machine waits until the memory has been scrubbed.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(120);
/// Chunk size of chunked request bodies, in bytes.
const BODY_PIECE_BYTES: usize = 256 << 10;
/// Maximum response size, in bytes.
const MAX_ANSWER: usize = 64 << 20;

/// Reason why a request failed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages document the variants")]
pub enum AskError {
    #[error("no daemon responds at {}", socket.display())]
    Unreachable {
        socket: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("this user has no access to {}", socket.display())]
    Forbidden {
        socket: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{}", .0.error)]
    Refused(api::Error),
    #[error("the response does not conform to the API: {0}")]
    Protocol(String),
    #[error("the daemon did not respond within {} seconds", .0.as_secs())]
    TimedOut(Duration),
}

/// A client of one daemon, which opens a connection for each request.
#[derive(Clone, Debug)]
pub struct Admin {
    socket: PathBuf,
    limit: Duration,
}

impl Admin {
    /// Creates a client of the daemon at `socket`.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        Self { socket, limit: DEFAULT_TIMEOUT }
    }

    /// Returns the path of the daemon's socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sets the time limit for each response.
    #[must_use]
    pub fn waiting(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// Sends a GET request.
    ///
    /// # Errors
    /// Returns an [`AskError`] if the request fails.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, AskError> {
        parse(&self.request(Method::GET, path, Bytes::new(), None).await?)
    }

    /// Sends a POST request with a JSON body.
    ///
    /// # Errors
    /// Returns an [`AskError`] if the request fails.
    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, AskError> {
        parse(&self.request(Method::POST, path, json(body)?, None).await?)
    }

    /// Sends a DELETE request.
    ///
    /// # Errors
    /// Returns an [`AskError`] if the request fails.
    pub async fn delete(&self, path: &str) -> Result<(), AskError> {
        self.request(Method::DELETE, path, Bytes::new(), None).await.map(drop)
    }

    /// Sends one request. The daemon rejects the request if `expected` is given and is not the current revision.
    /// Returns the body of a successful response.
    ///
    /// # Errors
    /// Returns an [`AskError`] if the request fails.
    pub async fn request(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        expected: Option<&str>,
    ) -> Result<Bytes, AskError> {
        let exchange = self.exchange(method, path, body, expected);
        tokio::time::timeout(self.limit, exchange).await.unwrap_or(Err(AskError::TimedOut(self.limit)))
    }

    /// Sends a POST request whose response is a byte stream, and passes the bytes to `sink` in order. Succeeds only if
    /// the stream is complete.
    ///
    /// # Errors
    /// Returns an [`AskError`] if the request fails, or an error from `sink`.
    pub async fn stream_out<E: From<AskError>>(
        &self,
        path: &str,
        mut sink: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let protocol = |error: &dyn std::fmt::Display| AskError::Protocol(error.to_string());
        let timed_out = |_| AskError::TimedOut(self.limit);
        let sent = self.send(Method::POST, path, Full::new(Bytes::new()), None);
        let (answer, _connection) = tokio::time::timeout(self.limit, sent).await.map_err(timed_out)??;
        let (status, mut body) = (answer.status(), answer.into_body());
        if !status.is_success() {
            return Err(refused(status, &whole(body).await?).into());
        }
        while let Some(frame) = tokio::time::timeout(self.limit, body.frame()).await.map_err(timed_out)? {
            let frame =
                frame.map_err(|error| protocol(&format_args!("it ended early: {error}; see the daemon's log")))?;
            if let Some(data) = frame.data_ref() {
                sink(data)?;
            }
        }
        Ok(())
    }

    /// Sends a GET request with an endless response, and passes its bytes to `sink` in order, without a time limit
    /// between them. Returns when the daemon ends the stream.
    ///
    /// # Errors
    /// Returns an [`AskError`] if the request fails, or an error from `sink`.
    pub async fn follow<E: From<AskError>>(
        &self,
        path: &str,
        mut sink: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let timed_out = |_| AskError::TimedOut(self.limit);
        let sent = self.send(Method::GET, path, Full::new(Bytes::new()), None);
        let (answer, _connection) = tokio::time::timeout(self.limit, sent).await.map_err(timed_out)??;
        let (status, mut body) = (answer.status(), answer.into_body());
        if !status.is_success() {
            return Err(refused(status, &whole(body).await?).into());
        }
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| AskError::Protocol(format!("it ended early: {error}")))?;
            if let Some(data) = frame.data_ref() {
                sink(data)?;
            }
        }
        Ok(())
    }

    /// Sends a POST request whose body is the contents of `source`. Returns the body of a successful response.
    ///
    /// # Errors
    /// Returns an [`AskError`] if the request fails.
    pub async fn stream_in(&self, path: &str, source: impl Read + Send + Unpin + 'static) -> Result<Bytes, AskError> {
        let answered = async {
            let (answer, _connection) = self.send(Method::POST, path, Source(source), None).await?;
            let (status, body) = (answer.status(), whole(answer.into_body()).await?);
            if status.is_success() { Ok(body) } else { Err(refused(status, &body)) }
        };
        tokio::time::timeout(self.limit, answered).await.unwrap_or(Err(AskError::TimedOut(self.limit)))
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        expected: Option<&str>,
    ) -> Result<Bytes, AskError> {
        let (answer, _connection) = self.send(method, path, Full::new(body), expected).await?;
        let (status, body) = (answer.status(), whole(answer.into_body()).await?);
        if status.is_success() { Ok(body) } else { Err(refused(status, &body)) }
    }

    /// Sends a request. Returns its response and the connection, which must outlive the response.
    async fn send<B>(
        &self,
        method: Method,
        path: &str,
        body: B,
        expected: Option<&str>,
    ) -> Result<(Response<Incoming>, Connected), AskError>
    where
        B: Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let protocol = |error: &dyn std::fmt::Display| AskError::Protocol(error.to_string());
        let stream = UnixStream::connect(&self.socket).await.map_err(|source| unreachable(&self.socket, source))?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| protocol(&error))?;
        let connection = Connected(tokio::spawn(async {
            // The request reports any connection error.
            let _ended = connection.await;
        }));
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "mediatord")
            .header("content-type", "application/json");
        if let Some(revision) = expected {
            request = request.header("if-match", format!("\"{revision}\""));
        }
        let request = request.body(body).map_err(|error| protocol(&error))?;
        let answer = sender.send_request(request).await.map_err(|error| protocol(&error))?;
        Ok((answer, connection))
    }
}

/// A connection that is closed on drop.
struct Connected(tokio::task::JoinHandle<()>);

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Returns the complete body of a response.
async fn whole(body: Incoming) -> Result<Bytes, AskError> {
    let body = Limited::new(body, MAX_ANSWER).collect().await;
    Ok(body.map_err(|error| AskError::Protocol(error.to_string()))?.to_bytes())
}

/// The contents of a file as a request body, in chunks. Reads block the thread, which is acceptable because the program
/// has no other work.
struct Source<R>(R);

impl<R: Read + Unpin> Body for Source<R> {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let mut piece = vec![0; BODY_PIECE_BYTES];
        Poll::Ready(match self.0.read(&mut piece) {
            Ok(0) => None,
            Ok(bytes) => {
                piece.truncate(bytes);
                Some(Ok(Frame::data(piece.into())))
            }
            Err(error) => Some(Err(error)),
        })
    }
}

/// Returns the error for a failed connection attempt.
fn unreachable(socket: &Path, source: io::Error) -> AskError {
    let socket = socket.to_owned();
    match source.kind() {
        io::ErrorKind::PermissionDenied => AskError::Forbidden { socket, source },
        _ => AskError::Unreachable { socket, source },
    }
}

fn refused(status: StatusCode, body: &[u8]) -> AskError {
    match serde_json::from_slice(body) {
        Ok(error) => AskError::Refused(error),
        Err(_) => AskError::Protocol(format!("status {status} without an error description")),
    }
}

/// Parses the body of a response.
///
/// # Errors
/// Returns an error if the body is not of the expected type.
pub fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, AskError> {
    serde_json::from_slice(body).map_err(|error| AskError::Protocol(error.to_string()))
}

/// Serializes a request body.
///
/// # Errors
/// Returns an error if the body cannot be represented as JSON.
pub fn json(body: &impl Serialize) -> Result<Bytes, AskError> {
    serde_json::to_vec(body).map(Bytes::from).map_err(|error| AskError::Protocol(error.to_string()))
}

/// Escapes a name for use as a URL path segment.
#[must_use]
pub fn segment(name: &str) -> String {
    let mut text = String::new();
    for byte in name.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'~' => text.push(char::from(byte)),
            // URL parsers would interpret a segment of only dots as `.` or `..`.
            b'.' if name.bytes().any(|byte| byte != b'.') => text.push('.'),
            _ => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connect_error_distinguishes_permission_from_missing_daemon() {
        let error = |kind: io::ErrorKind| unreachable(Path::new("/s"), kind.into()).to_string();
        assert_eq!(error(io::ErrorKind::PermissionDenied), "this user has no access to /s");
        assert_eq!(error(io::ErrorKind::NotFound), "no daemon responds at /s");
        assert_eq!(error(io::ErrorKind::ConnectionRefused), "no daemon responds at /s");
    }
}
