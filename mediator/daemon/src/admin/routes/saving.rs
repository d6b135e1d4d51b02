//! Requests that save virtual machines to a byte stream, or restore them from one.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::{Answer, Failure, beside};
use crate::{Daemon, DaemonError};

/// Saves a virtual machine to the response body. If saving fails after the first bytes, the stream is truncated.
pub(super) async fn save(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>) -> Result<Response, Failure> {
    let body = admin_socket::given(|to| {
        beside(move || {
            let saved = daemon.save_vm(&name, |bytes| to.give(bytes));
            saved.inspect_err(|error| to.fail(error.to_string()))
        })
    });
    match body.await {
        Ok(body) => Ok(([(header::CONTENT_TYPE, "application/octet-stream")], body).into_response()),
        Err(Some(Err(error))) => Err(error.into()),
        Err(_) => Err(panicked().into()),
    }
}

/// Restores a virtual machine from the stream in the request body.
pub(super) async fn restore(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    body: Body,
) -> Answer<api::Restored> {
    let restored = admin_socket::taken(body, |mut from| beside(move || daemon.restore_vm(&name, || from.take())));
    Ok(Json(restored.await.unwrap_or_else(|| Err(panicked()))?))
}

fn panicked() -> DaemonError {
    DaemonError::Failed("internal error".to_owned())
}
