//! The requests of the admin API.

use std::sync::Arc;

use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::Deserialize;

use super::api::{self, ErrorCode};
use super::launch::{self, MemorySize, Vmm};
use super::metrics;
use crate::config::VmSpec;
use crate::daemon::{Daemon, DaemonError};

/// Largest body of a request, in bytes.
const MAX_BODY: usize = 64 << 10;

/// All requests.
pub fn router(daemon: Arc<Daemon>) -> Router {
    Router::new()
        .route("/v1/vms", get(vms).post(add))
        .route("/v1/vms/{name}", get(vm).delete(remove))
        .route("/v1/vms/{name}/launch-args", get(launch_args))
        .route("/v1/cards", get(cards))
        .route("/v1/cards/{name}", get(card))
        .route("/metrics", get(metrics))
        .fallback(unknown)
        .method_not_allowed_fallback(not_allowed)
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(daemon)
}

/// A failure as an answer.
struct Failure {
    status: StatusCode,
    body: api::Error,
}

impl Failure {
    fn invalid(status: StatusCode, error: String, what_to_do: &str) -> Self {
        Self { status, body: api::Error { code: ErrorCode::Invalid, error, what_to_do: what_to_do.to_owned() } }
    }
}

impl From<DaemonError> for Failure {
    fn from(error: DaemonError) -> Self {
        let status = match error.code() {
            ErrorCode::Invalid => StatusCode::BAD_REQUEST,
            ErrorCode::NotFound => StatusCode::NOT_FOUND,
            ErrorCode::Conflict => StatusCode::CONFLICT,
            ErrorCode::Quota => StatusCode::INSUFFICIENT_STORAGE,
            ErrorCode::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self { status, body: error.to_api() }
    }
}

impl From<JsonRejection> for Failure {
    fn from(error: JsonRejection) -> Self {
        Self::invalid(error.status(), error.body_text(), "send a JSON object with the keys of a [[vm]] table")
    }
}

impl From<QueryRejection> for Failure {
    fn from(error: QueryRejection) -> Self {
        Self::invalid(error.status(), error.body_text(), "see the API's description for the query's keys")
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (self.status, Json(self.body)).into_response()
    }
}

type Answer<T> = Result<Json<T>, Failure>;

async fn vms(State(daemon): State<Arc<Daemon>>) -> Json<api::VmList> {
    Json(api::VmList { vms: daemon.vms() })
}

async fn vm(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>) -> Answer<api::Vm> {
    Ok(Json(daemon.vm(&name)?))
}

async fn add(
    State(daemon): State<Arc<Daemon>>,
    body: Result<Json<VmSpec>, JsonRejection>,
) -> Result<(StatusCode, Json<api::Vm>), Failure> {
    let Json(spec) = body?;
    let vm = beside(move || daemon.add(spec)).await?;
    Ok((StatusCode::CREATED, Json(vm)))
}

async fn remove(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>) -> Result<StatusCode, Failure> {
    beside(move || daemon.remove(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Runs what takes long where it does not hold up other requests.
async fn beside<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, DaemonError> + Send + 'static,
) -> Result<T, DaemonError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(DaemonError::Failed(format!("internal error: {error}"))))
}

/// The query of `launch-args`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LaunchQuery {
    #[serde(default)]
    vmm: Vmm,
    #[serde(default)]
    memory: MemorySize,
}

async fn launch_args(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    query: Result<Query<LaunchQuery>, QueryRejection>,
) -> Answer<api::LaunchArgs> {
    let Query(LaunchQuery { vmm, memory }) = query?;
    let vm = daemon.vm(&name)?;
    let socket = vm.socket.unwrap_or_else(|| daemon.spec().socket_dir.join(format!("{name}.sock")));
    Ok(Json(launch::args(vmm, &socket, &memory)))
}

async fn cards(State(daemon): State<Arc<Daemon>>) -> Json<api::CardList> {
    Json(api::CardList { cards: daemon.cards() })
}

async fn card(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>) -> Answer<api::Card> {
    Ok(Json(daemon.card(&name)?))
}

async fn metrics(State(daemon): State<Arc<Daemon>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], metrics::text(&daemon.cards(), &daemon.vms()))
}

async fn unknown(uri: axum::http::Uri) -> Failure {
    let body = api::Error {
        code: ErrorCode::NotFound,
        error: format!("there is no `{}`", uri.path()),
        what_to_do: "the API has /v1/vms, /v1/cards and /metrics".to_owned(),
    };
    Failure { status: StatusCode::NOT_FOUND, body }
}

async fn not_allowed(method: axum::http::Method, uri: axum::http::Uri) -> Failure {
    let error = format!("`{}` does not take {method}", uri.path());
    Failure::invalid(StatusCode::METHOD_NOT_ALLOWED, error, "see the API's description")
}
