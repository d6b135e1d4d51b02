//! A client of the admin API that sends one request at a time, and the errors of a command.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use admin_client::{Admin, Method, json, parse};
use hyper::body::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use admin_client::{AskError, segment};

/// Reason why a request failed, or why its response cannot be shown.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages document the variants")]
pub enum ClientError {
    #[error(transparent)]
    Ask(#[from] AskError),
    #[error("the host lacks the resources for a request")]
    Runtime(#[source] io::Error),
    #[error("{} cannot be written", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} cannot be read", path.display())]
    Unreadable {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} already exists; name another file, or use `--force`", path.display())]
    Exists { path: PathBuf },
    #[error("{} is not a recording", path.display())]
    Record {
        path: PathBuf,
        #[source]
        source: sched::trace::TraceError,
    },
    #[error("{other} of {events} events lead to decisions that differ from the recording, first in line {first}")]
    Differs { other: usize, events: usize, first: usize },
    #[error("{} does not describe a valid state: {what}", path.display())]
    Desired { path: PathBuf, what: String },
    #[error("tenant `{tenant}` is not served: card `{card}`: {reason}")]
    NotServed { tenant: String, card: String, reason: String },
    #[error("no report is available: {0}")]
    Report(String),
    #[error("the terminal cannot be used")]
    Terminal(#[source] io::Error),
}

impl ClientError {
    /// Creates an error for a response that violates the API.
    #[must_use]
    pub fn protocol(what: String) -> Self {
        AskError::Protocol(what).into()
    }
}

/// A client of one daemon.
#[derive(Debug)]
pub struct Client {
    admin: Admin,
    runtime: tokio::runtime::Runtime,
    /// The revision that changes require.
    revision: Option<String>,
}

impl Client {
    /// Creates a client of the daemon at `socket`. The client connects for each request.
    ///
    /// # Errors
    /// Returns an error if the host lacks the resources for the client.
    pub fn new(socket: PathBuf) -> Result<Self, ClientError> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(ClientError::Runtime)?;
        Ok(Self { admin: Admin::new(socket), runtime, revision: None })
    }

    /// Returns the path of the daemon's socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        self.admin.socket()
    }

    /// Makes the daemon reject changes if its revision is not `revision`.
    #[must_use]
    pub fn expecting(self, revision: Option<String>) -> Self {
        Self { revision, ..self }
    }

    /// Sets the time limit for each response.
    #[must_use]
    pub fn waiting(self, limit: Duration) -> Self {
        Self { admin: self.admin.waiting(limit), ..self }
    }

    /// Sends a GET request.
    ///
    /// # Errors
    /// Returns a [`ClientError`] if the request fails.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        Ok(parse(&self.request(Method::GET, path, Bytes::new())?)?)
    }

    /// Sends a POST request with a JSON body.
    ///
    /// # Errors
    /// Returns a [`ClientError`] if the request fails.
    pub fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, ClientError> {
        Ok(parse(&self.request(Method::POST, path, json(body)?)?)?)
    }

    /// Sends a PATCH request with a JSON body.
    ///
    /// # Errors
    /// Returns a [`ClientError`] if the request fails.
    pub fn patch<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, ClientError> {
        Ok(parse(&self.request(Method::PATCH, path, json(body)?)?)?)
    }

    /// Sends a DELETE request.
    ///
    /// # Errors
    /// Returns a [`ClientError`] if the request fails.
    pub fn delete(&self, path: &str) -> Result<(), ClientError> {
        self.request(Method::DELETE, path, Bytes::new()).map(drop)
    }

    /// Sends a POST request whose response is a byte stream, and passes the bytes to `sink` in order.
    ///
    /// # Errors
    /// Returns a [`ClientError`], or an error from `sink`.
    pub fn stream_out(
        &self,
        path: &str,
        sink: impl FnMut(&[u8]) -> Result<(), ClientError>,
    ) -> Result<(), ClientError> {
        self.runtime.block_on(self.admin.stream_out(path, sink))
    }

    /// Sends a GET request with an endless response, and passes the bytes to `sink` in order.
    ///
    /// # Errors
    /// Returns an [`AskError`], or an error from `sink`.
    pub fn follow<E: From<AskError>>(&self, path: &str, sink: impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        self.runtime.block_on(self.admin.follow(path, sink))
    }

    /// Sends a POST request whose body is the contents of `source`.
    ///
    /// # Errors
    /// Returns a [`ClientError`] if the request fails.
    pub fn stream_in<T: DeserializeOwned>(
        &self,
        path: &str,
        source: impl Read + Send + Unpin + 'static,
    ) -> Result<T, ClientError> {
        Ok(parse(&self.runtime.block_on(self.admin.stream_in(path, source))?)?)
    }

    /// Sends one request. Returns the body of a successful response.
    ///
    /// # Errors
    /// Returns a [`ClientError`] if the request fails.
    pub fn request(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes, ClientError> {
        Ok(self.runtime.block_on(self.admin.request(method, path, body, self.revision.as_deref()))?)
    }
}
