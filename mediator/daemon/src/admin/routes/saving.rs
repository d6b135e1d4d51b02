//! Requests by which virtual machines go out as bytes, and come in. Bytes are never there as a whole.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use tokio::sync::mpsc::{self, Sender, error::TrySendError};
use tokio_stream::wrappers::ReceiverStream;

use super::{Answer, Failure, beside};
use crate::{Daemon, DaemonError};

/// Pieces that are under way, each of 256 KiB or what a client sends at once.
const PIECES: usize = 4;
/// Longest time without a byte from, or for, the client: the virtual machine waits meanwhile.
// TIMEOUT: a disk that spins up.
const STALL: Duration = Duration::from_secs(30);
/// Time between two looks whether the client takes more.
const LOOK: Duration = Duration::from_millis(1);

type Piece = Result<Bytes, String>;

/// Saves one: the answer's body is the stream. A failure behind its beginning ends it early.
pub(super) async fn save(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>) -> Result<Response, Failure> {
    let (sender, mut receiver) = mpsc::channel::<Piece>(PIECES);
    let (begun, mut begins) = mpsc::channel::<()>(1);
    let saved = tokio::spawn(beside(move || {
        let done = daemon.save_vm(&name, |bytes| {
            let _known = begun.try_send(());
            send(&sender, Ok(bytes.into()))
        });
        if let Err(error) = &done {
            tracing::warn!(vm = name, %error, "a VM is not saved");
            let _gone = send(&sender, Err(error.to_string()));
        }
        done
    }));
    if begins.recv().await.is_none() {
        receiver.close();
        let done = saved.await.unwrap_or_else(|error| Err(DaemonError::Failed(format!("internal error: {error}"))));
        done?;
    }
    let body = Body::from_stream(ReceiverStream::new(receiver));
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], body).into_response())
}

/// Gives a client a piece, who is not waited for without end.
fn send(to: &Sender<Piece>, piece: Piece) -> Result<(), String> {
    let began = Instant::now();
    let mut piece = piece;
    loop {
        piece = match to.try_send(piece) {
            Ok(()) => return Ok(()),
            Err(TrySendError::Closed(_)) => return Err("the client has gone".to_owned()),
            Err(TrySendError::Full(piece)) => piece,
        };
        if began.elapsed() > STALL {
            return Err(format!("the client has taken nothing for {} seconds", STALL.as_secs()));
        }
        std::thread::sleep(LOOK);
    }
}

/// Restores one from the stream that is the request's body.
pub(super) async fn restore(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    mut body: Body,
) -> Answer<api::Restored> {
    let (sender, mut receiver) = mpsc::channel::<Piece>(PIECES);
    let restored = tokio::spawn(beside(move || {
        daemon.restore_vm(&name, || receiver.blocking_recv().unwrap_or_else(|| Ok(Bytes::new())).map(Vec::from))
    }));
    // To the end also of what is refused: a client that is cut off sees no answer.
    loop {
        let frame = match tokio::time::timeout(STALL, body.frame()).await {
            Ok(Some(Ok(frame))) => frame.into_data().unwrap_or_default(),
            Ok(None) => break,
            Ok(Some(Err(error))) => {
                let _over = sender.send(Err(format!("the client has sent no more: {error}"))).await;
                break;
            }
            Err(_) => {
                let why = format!("the client has sent nothing for {} seconds", STALL.as_secs());
                let _over = sender.send(Err(why)).await;
                break;
            }
        };
        if !frame.is_empty() {
            let _refused = sender.send(Ok(frame)).await;
        }
    }
    drop(sender);
    let restored = restored.await.unwrap_or_else(|error| Err(DaemonError::Failed(format!("internal error: {error}"))));
    Ok(Json(restored?))
}
