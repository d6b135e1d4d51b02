//! Streamed bodies. Only a few chunks are in flight. A stalled client is disconnected, because other clients may wait
//! for a connection.

use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use http_body_util::BodyExt;
use tokio::sync::mpsc::{self, Receiver, Sender, error::TrySendError};
use tokio_stream::wrappers::ReceiverStream;

/// Maximum number of chunks in flight. A chunk is at most 256 KiB of a response, or one frame of a request's body.
const MAX_PIECES_IN_FLIGHT: usize = 4;
/// Maximum time without a byte from or to the client.
// TIMEOUT: a disk may have to spin up.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum transfer time of a whole body.
// TIMEOUT: 40 GiB at 50 MB/s take about 860 s.
const BODY_TIMEOUT: Duration = Duration::from_secs(900);
/// Polling interval for a client's readiness.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

type Piece = Result<Bytes, String>;

/// Sending end of a response body.
#[derive(Debug)]
pub struct Given {
    to: Sender<Piece>,
    began: Instant,
}

impl Given {
    /// Sends a chunk.
    ///
    /// # Errors
    /// Returns an error if the client no longer accepts chunks.
    pub fn give(&self, piece: Vec<u8>) -> Result<(), String> {
        self.send(Ok(piece.into()))
    }

    /// Aborts the response, so that the client detects that it is incomplete.
    pub fn fail(&self, why: String) {
        let _gone = self.send(Err(why));
    }

    fn send(&self, mut piece: Piece) -> Result<(), String> {
        let stalls = Instant::now();
        loop {
            piece = match self.to.try_send(piece) {
                Ok(()) => return Ok(()),
                Err(TrySendError::Closed(_)) => return Err("the client has disconnected".to_owned()),
                Err(TrySendError::Full(piece)) => piece,
            };
            if stalls.elapsed() > STALL_TIMEOUT || self.began.elapsed() > BODY_TIMEOUT {
                return Err(format!(
                    "the client is too slow: {} seconds for a chunk, {} in total",
                    STALL_TIMEOUT.as_secs(),
                    BODY_TIMEOUT.as_secs()
                ));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Spawns `work`, which sends the chunks of a response body from a thread that may block. Returns this body once its
/// first chunk exists, or the result of `work` if it fails or ends before its first chunk.
pub async fn given<T, W: Future<Output = T> + Send + 'static>(work: impl FnOnce(Given) -> W) -> Result<Body, Option<T>>
where
    T: Send + 'static,
{
    let (to, mut from) = mpsc::channel::<Piece>(MAX_PIECES_IN_FLIGHT);
    let done = tokio::spawn(work(Given { to, began: Instant::now() }));
    match from.recv().await {
        Some(Ok(first)) => {
            let first = tokio_stream::once(Ok::<_, String>(first));
            Ok(Body::from_stream(tokio_stream::StreamExt::chain(first, ReceiverStream::new(from))))
        }
        Some(Err(_)) | None => Err(done.await.ok()),
    }
}

/// Receiving end of a request body.
#[derive(Debug)]
pub struct Taken(Receiver<Piece>);

impl Taken {
    /// Returns the next chunk, or an empty chunk at the end of the body. Blocks until a chunk arrives.
    ///
    /// # Errors
    /// Returns an error if the rest of the body cannot be received.
    pub fn take(&mut self) -> Result<Vec<u8>, String> {
        self.0.blocking_recv().unwrap_or_else(|| Ok(Bytes::new())).map(Vec::from)
    }
}

/// Spawns `work`, which receives the chunks of a request body on a thread that may block. Returns the result of `work`,
/// or `None` if it panicked.
pub async fn taken<T, W: Future<Output = T> + Send + 'static>(
    mut body: Body,
    work: impl FnOnce(Taken) -> W,
) -> Option<T>
where
    T: Send + 'static,
{
    let (to, from) = mpsc::channel::<Piece>(MAX_PIECES_IN_FLIGHT);
    let done = tokio::spawn(work(Taken(from)));
    let began = Instant::now();
    // Read the whole body even after a rejection, because a client whose connection is closed early does not see the
    // response.
    while began.elapsed() < BODY_TIMEOUT {
        let piece = match tokio::time::timeout(STALL_TIMEOUT, body.frame()).await {
            Ok(None) => {
                drop(to);
                return done.await.ok();
            }
            Ok(Some(Ok(frame))) => Ok(frame.into_data().unwrap_or_default()),
            Ok(Some(Err(error))) => Err(format!("the client stopped sending: {error}")),
            Err(_) => Err(format!("the client sent nothing for {} seconds", STALL_TIMEOUT.as_secs())),
        };
        let over = piece.is_err();
        if !matches!(&piece, Ok(bytes) if bytes.is_empty()) {
            let _refused = to.send(piece).await;
        }
        if over {
            return done.await.ok();
        }
    }
    let _refused = to.send(Err(format!("it takes longer than {} seconds", BODY_TIMEOUT.as_secs()))).await;
    done.await.ok()
}
