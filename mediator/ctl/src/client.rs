//! HTTP over the admin socket, one connection for each request.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

/// Longest time for one request; adding a virtual machine waits until its memory has been scrubbed.
const LIMIT: Duration = Duration::from_secs(120);
/// Largest answer, in bytes.
const MAX_ANSWER: usize = 64 << 20;

/// Why a request brought no good answer, or the answer cannot be shown.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ClientError {
    #[error("no daemon answers at {}", socket.display())]
    Unreachable {
        socket: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("this user may not use {}", socket.display())]
    Forbidden {
        socket: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{}", .0.error)]
    Refused(api::Error),
    #[error("the answer is not what the API promises: {0}")]
    Protocol(String),
    #[error("the daemon did not answer within {} seconds", LIMIT.as_secs())]
    TimedOut,
    #[error("the host has no room for a request")]
    Runtime(#[source] io::Error),
    #[error("{} cannot be written", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is no record", path.display())]
    Record {
        path: PathBuf,
        #[source]
        source: sched::trace::TraceError,
    },
    #[error("{other} of {events} events bring other decisions than recorded, the first in line {first}")]
    Differs { other: usize, events: usize, first: usize },
    #[error("{} describes no state: {what}", path.display())]
    Desired { path: PathBuf, what: String },
    #[error("there is no report: {0}")]
    Report(String),
    #[error("the terminal cannot be used")]
    Terminal(#[source] io::Error),
}

/// A client of one daemon.
#[derive(Debug)]
pub struct Client {
    socket: PathBuf,
    runtime: tokio::runtime::Runtime,
    /// The revision on which changes depend.
    revision: Option<String>,
}

impl Client {
    /// A client of the daemon behind `socket`; it connects with each request.
    ///
    /// # Errors
    /// When the host has no resources for it.
    pub fn new(socket: PathBuf) -> Result<Self, ClientError> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(ClientError::Runtime)?;
        Ok(Self { socket, runtime, revision: None })
    }

    /// Has changes refused if the revision is another one.
    #[must_use]
    pub fn expecting(self, revision: Option<String>) -> Self {
        Self { revision, ..self }
    }

    /// Asks for something.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        parse(&self.request(Method::GET, path, Bytes::new())?)
    }

    /// Sends something to be added.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, ClientError> {
        let body = serde_json::to_vec(body).map_err(|error| ClientError::Protocol(error.to_string()))?;
        parse(&self.request(Method::POST, path, body.into())?)
    }

    /// Asks for some keys of something to be changed.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn patch<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, ClientError> {
        let body = serde_json::to_vec(body).map_err(|error| ClientError::Protocol(error.to_string()))?;
        parse(&self.request(Method::PATCH, path, body.into())?)
    }

    /// Asks for something to be removed.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn delete(&self, path: &str) -> Result<(), ClientError> {
        self.request(Method::DELETE, path, Bytes::new()).map(drop)
    }

    /// One request; the body of its answer, if it is good.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn request(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes, ClientError> {
        self.runtime.block_on(async {
            let exchange = self.exchange(method, path, body);
            tokio::time::timeout(LIMIT, exchange).await.unwrap_or(Err(ClientError::TimedOut))
        })
    }

    async fn exchange(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes, ClientError> {
        let protocol = |error: &dyn std::fmt::Display| ClientError::Protocol(error.to_string());
        let stream = UnixStream::connect(&self.socket).await.map_err(|source| unreachable(&self.socket, source))?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| protocol(&error))?;
        let connection = tokio::spawn(connection);
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "mediatord")
            .header("content-type", "application/json");
        if let Some(revision) = &self.revision {
            request = request.header("if-match", format!("\"{revision}\""));
        }
        let request = request.body(Full::new(body)).map_err(|error| protocol(&error))?;
        let answer = sender.send_request(request).await.map_err(|error| protocol(&error))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await.map_err(|error| protocol(&error))?;
        connection.abort();
        let body = body.to_bytes();
        if status.is_success() {
            return Ok(body);
        }
        Err(refused(status, &body))
    }
}

/// Why there is no connection.
fn unreachable(socket: &Path, source: io::Error) -> ClientError {
    let socket = socket.to_owned();
    match source.kind() {
        io::ErrorKind::PermissionDenied => ClientError::Forbidden { socket, source },
        _ => ClientError::Unreachable { socket, source },
    }
}

fn refused(status: StatusCode, body: &[u8]) -> ClientError {
    match serde_json::from_slice(body) {
        Ok(error) => ClientError::Refused(error),
        Err(_) => ClientError::Protocol(format!("status {status} without an explanation")),
    }
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ClientError> {
    serde_json::from_slice(body).map_err(|error| ClientError::Protocol(error.to_string()))
}

/// A name as a segment of a path: what could change the path's meaning is escaped.
#[must_use]
pub fn segment(name: &str) -> String {
    let mut text = String::new();
    for byte in name.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'~' => text.push(char::from(byte)),
            // A segment of dots only would be taken for a step in the path.
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
    fn who_may_not_connect_is_told_so() {
        let error = |kind: io::ErrorKind| unreachable(Path::new("/s"), kind.into()).to_string();
        assert_eq!(error(io::ErrorKind::PermissionDenied), "this user may not use /s");
        assert_eq!(error(io::ErrorKind::NotFound), "no daemon answers at /s");
        assert_eq!(error(io::ErrorKind::ConnectionRefused), "no daemon answers at /s");
    }
}
