//! Requests that move virtual machines and tenants between cards.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{Path, State};

use super::{Answer, Failure, IfMatch, beside};
use crate::Daemon;

/// Remedy for an invalid move request.
const MOVE_ADVICE: &str = "send a JSON object with `card`, or without `card` to let the daemon choose";

pub(super) async fn move_vm(
    State(daemon): State<Arc<Daemon>>,
    IfMatch(expected): IfMatch,
    Path(name): Path<String>,
    body: Result<Json<api::MoveTo>, JsonRejection>,
) -> Answer<api::Moved> {
    let Json(api::MoveTo { card }) =
        body.map_err(|error| Failure::invalid(error.status(), error.body_text(), MOVE_ADVICE))?;
    Ok(Json(beside(move || daemon.move_if(&name, card.as_deref(), expected.as_deref())).await?))
}

pub(super) async fn move_tenant(
    State(daemon): State<Arc<Daemon>>,
    IfMatch(expected): IfMatch,
    Path(name): Path<String>,
    body: Result<Json<api::MoveTo>, JsonRejection>,
) -> Answer<api::TenantMoved> {
    let Json(api::MoveTo { card }) =
        body.map_err(|error| Failure::invalid(error.status(), error.body_text(), MOVE_ADVICE))?;
    let reason = "requested by an operator";
    let moved = beside(move || daemon.move_tenant(&name, card.as_deref(), expected.as_deref(), reason));
    Ok(Json(moved.await?))
}

pub(super) async fn restart_workers(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    body: Result<Json<api::RestartWorkers>, JsonRejection>,
) -> Answer<api::WorkerRestarts> {
    let advice = "send a JSON object with `pid`, or without `pid` for all programs";
    let Json(api::RestartWorkers { pid }) =
        body.map_err(|error| Failure::invalid(error.status(), error.body_text(), advice))?;
    Ok(Json(beside(move || daemon.restart_workers(&name, pid)).await?))
}

pub(super) async fn drain(
    State(daemon): State<Arc<Daemon>>,
    IfMatch(expected): IfMatch,
    Path(name): Path<String>,
) -> Answer<api::DrainReport> {
    Ok(Json(beside(move || daemon.drain_if(&name, expected.as_deref())).await?))
}

pub(super) async fn undrain(
    State(daemon): State<Arc<Daemon>>,
    IfMatch(expected): IfMatch,
    Path(name): Path<String>,
) -> Answer<api::Card> {
    Ok(Json(beside(move || daemon.undrain_if(&name, expected.as_deref())).await?))
}
