//! Request handlers of the admin API.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, FromRequestParts, Path, Query, Request, State};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use tokio::sync::Semaphore;
use vram::To;

use crate::{Daemon, DaemonError, HISTORY_MS, WINDOW_MS, leases};
use api::ErrorCode;
use api::launch::{self, MemorySize, SocketVmm, Vmm};
use events::author;

mod moving;
mod saving;

/// Maximum request body size, in bytes.
const MAX_BODY: usize = 64 << 10;
/// Maximum duration of a scheduler recording, in ms.
const RECORD_MS: u64 = 60_000;

/// Returns the router for read-only requests, which use GET or HEAD.
pub fn read_only(daemon: Arc<Daemon>) -> Router {
    router(daemon).layer(axum::middleware::from_fn(async |request: Request, next: Next| {
        if matches!(*request.method(), Method::GET | Method::HEAD) {
            return next.run(request).await;
        }
        let error = format!("{} `{}`: this socket is read-only", request.method(), request.uri().path());
        let what_to_do = "use the admin socket, `admin_socket` in the daemon's configuration".to_owned();
        let body = api::Error { code: ErrorCode::Forbidden, error, what_to_do };
        Failure { status: StatusCode::FORBIDDEN, body }.into_response()
    }))
}

/// Returns the router for all requests.
pub fn router(daemon: Arc<Daemon>) -> Router {
    Router::new()
        .route("/v1/vms", get(vms).post(add))
        .route("/v1/vms/{name}", get(vm).delete(remove))
        .route("/v1/vms/{name}/launch-args", get(launch_args))
        .route("/v1/vms/{name}/time", get(vm_time).patch(set_vm_time))
        .route("/v1/vms/{name}/release", post(release_vm))
        .route("/v1/vms/{name}/move", post(moving::move_vm))
        .route("/v1/vms/{name}/save", post(saving::save))
        .route("/v1/vms/{name}/restore", post(saving::restore))
        .route("/v1/vms/{name}/workers/restart", post(moving::restart_workers))
        .route("/v1/cards", get(cards))
        .route("/v1/cards/{name}", get(card))
        .route("/v1/cards/{name}/drain", post(moving::drain))
        .route("/v1/cards/{name}/undrain", post(moving::undrain))
        .route("/v1/schedulers", get(schedulers))
        .route("/v1/cards/{name}/scheduler", get(scheduler).patch(set_scheduler))
        .route("/v1/cards/{name}/scheduler/history", get(scheduler_history))
        .route("/v1/cards/{name}/scheduler/record", post(record_scheduler))
        .route("/v1/memory", get(memories))
        .route("/v1/cards/{name}/memory", get(card_memory).patch(set_card_memory))
        .route("/v1/vms/{name}/memory", get(vm_memory).patch(set_vm_memory))
        .route("/v1/vms/{name}/memory/evict", post(evict))
        .route("/v1/vms/{name}/memory/return", post(bring_back))
        .route("/v1/vms/{name}/memory/accesses", post(record_accesses))
        .route("/v1/vms/{name}/memory/hints", post(hints))
        .route("/v1/tenants", get(tenants).post(add_tenant))
        .route("/v1/tenants/{name}", get(tenant).patch(set_tenant).delete(remove_tenant))
        .route("/v1/tenants/{name}/lease", post(lease_tenant))
        .route("/v1/tenants/{name}/move", post(moving::move_tenant))
        .route("/v1/profiles", get(profiles))
        .route("/v1/profiles/{name}", get(profile))
        .route("/v1/desired", get(export).patch(apply))
        .route("/v1/desired/compare", post(compare))
        .route("/v1/daemon", get(about))
        .route("/v1/daemon/upgrade", post(upgrade))
        .route("/v1/schema", get(schema))
        .route("/metrics", get(all_metrics))
        .merge(events::http::router(Arc::clone(&daemon.events)))
        .fallback(unknown)
        .method_not_allowed_fallback(not_allowed)
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(axum::middleware::from_fn(events::http::with_author))
        .with_state(daemon)
}

/// An error to send as a response.
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
            ErrorCode::Forbidden => StatusCode::FORBIDDEN,
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
        Self::invalid(error.status(), error.body_text(), "see the API description for the keys of the query")
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (self.status, Json(self.body)).into_response()
    }
}

/// Expected revision in a request's `If-Match` header; `None` if the header is `*` or missing.
struct IfMatch(Option<String>);

impl<S: Send + Sync> FromRequestParts<S> for IfMatch {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        let Some(value) = parts.headers.get(header::IF_MATCH) else { return Ok(Self(None)) };
        let value = value.to_str().unwrap_or_default().trim();
        if value == "*" {
            return Ok(Self(None));
        }
        let quoted = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
        match quoted.filter(|revision| !revision.is_empty() && !revision.contains('"')) {
            Some(revision) => Ok(Self(Some(revision.to_owned()))),
            None => {
                let error = format!("If-Match: `{value}` is not a revision, expected a revision in double quotes");
                let advice = "send the ETag of `GET /v1/desired`, or omit the header";
                Err(Failure::invalid(StatusCode::BAD_REQUEST, error, advice))
            }
        }
    }
}

type Answer<T> = Result<Json<T>, Failure>;

async fn vms(State(daemon): State<Arc<Daemon>>) -> Answer<api::VmList> {
    Ok(Json(api::VmList { vms: look(move || Ok(daemon.vms())).await? }))
}

async fn vm(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>) -> Answer<api::Vm> {
    Ok(Json(look(move || daemon.vm(&name)).await?))
}

async fn add(
    State(daemon): State<Arc<Daemon>>,
    IfMatch(expected): IfMatch,
    body: Patch,
) -> Result<(StatusCode, Json<api::Vm>), Failure> {
    let Json(table) = body?;
    let spec = daemon.described_vm(&table).map_err(|what| misdescribed(&what, "vm"))?;
    let vm = beside(move || daemon.add_if(spec, expected.as_deref())).await?;
    Ok((StatusCode::CREATED, Json(vm)))
}

async fn remove(
    State(daemon): State<Arc<Daemon>>,
    IfMatch(expected): IfMatch,
    Path(name): Path<String>,
) -> Result<StatusCode, Failure> {
    beside(move || daemon.remove_if(&name, expected.as_deref())).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Returns the error for an invalid `[[table]]` in a request body.
fn misdescribed(what: &str, table: &str) -> Failure {
    let advice = format!("send a JSON object with the keys of a [[{table}]] table");
    Failure::invalid(StatusCode::UNPROCESSABLE_ENTITY, what.to_owned(), &advice)
}

async fn profiles(State(daemon): State<Arc<Daemon>>) -> Answer<api::ProfileList> {
    Ok(Json(api::ProfileList { profiles: look(move || Ok(daemon.profiles())).await? }))
}

async fn profile(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>) -> Answer<api::Profile> {
    Ok(Json(look(move || daemon.profile(&name)).await?))
}

/// Permits for concurrent changes. Changes to virtual machines are serialized regardless of the permits. The number of
/// changes that wait for one CUDA card's owner is limited, so that changes to other cards still obtain a permit.
static CHANGES: Semaphore = Semaphore::const_new(128);
/// Permits for concurrent read-only requests, which do not wait for changes.
static LOOKS: Semaphore = Semaphore::const_new(16);

/// Runs a change on another thread, because it can take a long time. Attributes the change's events to the client that
/// the calling task serves.
fn beside<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, DaemonError> + Send + 'static,
) -> impl Future<Output = Result<T, DaemonError>> + Send {
    let author = author::of_request();
    off_thread(&CHANGES, move || author::acting(author, work))
}

/// Runs a read-only request on another thread, because it acquires locks, which must not block the runtime.
async fn look<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, DaemonError> + Send + 'static,
) -> Result<T, DaemonError> {
    off_thread(&LOOKS, work).await
}

/// Runs blocking work on a separate thread once `places` grants a permit. Handlers that call the daemon must use this
/// function, because a blocked runtime would not notify the service manager's watchdog.
async fn off_thread<T: Send + 'static>(
    places: &'static Semaphore,
    work: impl FnOnce() -> Result<T, DaemonError> + Send + 'static,
) -> Result<T, DaemonError> {
    // The permit is released when the work completes, even if the client disconnects earlier.
    let place = places.acquire().await;
    let done = tokio::task::spawn_blocking(move || {
        let _place = place;
        work()
    });
    done.await.unwrap_or_else(|error| Err(DaemonError::Failed(format!("internal error: {error}"))))
}

/// Query parameters of `launch-args`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LaunchQuery {
    vmm: Option<Vmm>,
    #[serde(default)]
    memory: MemorySize,
}

async fn launch_args(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    query: Result<Query<LaunchQuery>, QueryRejection>,
) -> Answer<api::LaunchArgs> {
    let Query(LaunchQuery { vmm, memory }) = query?;
    let args = look(move || {
        let vm = daemon.vm(&name)?;
        let vmm = vmm.unwrap_or(if vm.xen_domain.is_some() { Vmm::Xen } else { Vmm::Qemu });
        let vmm = match (vmm, &vm.xen_domain) {
            (Vmm::Xen, Some(domain)) => {
                // The size of each card's BAR0 is 16 MiB.
                let bars = daemon.card(&vm.card).map_or(0, |card| card.bar1_mib.saturating_add(card.bar3_mib));
                return Ok(launch::xl(domain, bars.saturating_add(16), &memory));
            }
            (Vmm::Xen, None) => return Err(DaemonError::NoDomain(name)),
            (_, Some(domain)) => return Err(DaemonError::IsDomain(name, domain.clone())),
            (Vmm::Qemu, None) => SocketVmm::Qemu,
            (Vmm::CloudHypervisor, None) => SocketVmm::CloudHypervisor,
            (Vmm::Libvirt, None) => SocketVmm::Libvirt,
        };
        let socket = vm.socket.unwrap_or_else(|| daemon.spec().socket_dir.join(format!("{name}.sock")));
        let is_cuda = vm.mode == api::VmMode::Cuda;
        Ok(launch::args(vmm, launch::Named { name: &name, socket: &socket, profile: None, is_cuda }, &memory))
    });
    Ok(Json(args.await?))
}

async fn cards(State(daemon): State<Arc<Daemon>>) -> Answer<api::CardList> {
    Ok(Json(api::CardList { cards: look(move || Ok(daemon.cards())).await? }))
}

async fn card(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>) -> Answer<api::Card> {
    Ok(Json(look(move || daemon.card(&name)).await?))
}

/// Request body with keys of a table: those of a new object, or those to change.
type Patch = Result<Json<serde_json::Map<String, serde_json::Value>>, JsonRejection>;

fn patch(body: Patch) -> Result<serde_json::Map<String, serde_json::Value>, Failure> {
    let advice = "send a JSON object with the keys to change";
    let Json(patch) = body.map_err(|error| Failure::invalid(error.status(), error.body_text(), advice))?;
    Ok(patch)
}

async fn vm_time(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>) -> Answer<api::VmTime> {
    Ok(Json(look(move || daemon.vm_time(&name)).await?))
}

async fn set_vm_time(
    State(daemon): State<Arc<Daemon>>,
    IfMatch(expected): IfMatch,
    Path(name): Path<String>,
    body: Patch,
) -> Answer<api::VmTime> {
    let patch = patch(body)?;
    Ok(Json(beside(move || daemon.set_vm_time_if(&name, &patch, expected.as_deref())).await?))
}

async fn about(State(daemon): State<Arc<Daemon>>) -> Json<api::DaemonInfo> {
    Json(daemon.about())
}

async fn upgrade(State(daemon): State<Arc<Daemon>>) -> Result<Json<api::Upgraded>, Failure> {
    let pid = beside(move || daemon.hand_over()).await?;
    Ok(Json(api::Upgraded { pid }))
}

async fn release_vm(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>) -> Result<StatusCode, Failure> {
    beside(move || daemon.release_vm(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Query parameters of `scheduler` and `schedulers`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct WindowQuery {
    window_ms: u64,
}

impl Default for WindowQuery {
    fn default() -> Self {
        Self { window_ms: WINDOW_MS }
    }
}

async fn schedulers(
    State(daemon): State<Arc<Daemon>>,
    query: Result<Query<WindowQuery>, QueryRejection>,
) -> Answer<api::SchedulerList> {
    let Query(WindowQuery { window_ms }) = query?;
    Ok(Json(api::SchedulerList { schedulers: look(move || daemon.schedulers(window_ms)).await? }))
}

async fn scheduler(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    query: Result<Query<WindowQuery>, QueryRejection>,
) -> Answer<api::CardScheduler> {
    let Query(WindowQuery { window_ms }) = query?;
    Ok(Json(look(move || daemon.scheduler(&name, window_ms)).await?))
}

async fn set_scheduler(
    State(daemon): State<Arc<Daemon>>,
    IfMatch(expected): IfMatch,
    Path(name): Path<String>,
    body: Patch,
) -> Answer<api::CardScheduler> {
    let patch = patch(body)?;
    Ok(Json(beside(move || daemon.set_scheduler_if(&name, &patch, expected.as_deref())).await?))
}

/// Query parameters of `scheduler/history`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct HistoryQuery {
    since_ms: u64,
}

impl Default for HistoryQuery {
    fn default() -> Self {
        Self { since_ms: HISTORY_MS }
    }
}

async fn scheduler_history(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    query: Result<Query<HistoryQuery>, QueryRejection>,
) -> Answer<api::SchedulerHistory> {
    let Query(HistoryQuery { since_ms }) = query?;
    Ok(Json(look(move || daemon.scheduler_history(&name, since_ms)).await?))
}

/// Query parameters of `scheduler/record` and `memory/accesses`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RecordQuery {
    for_ms: u64,
}

/// Responds when the recording is complete. Discards the recording if the client disconnects earlier.
async fn record_scheduler(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    query: Result<Query<RecordQuery>, QueryRejection>,
) -> Result<impl IntoResponse, Failure> {
    let length = record_length(query)?;
    let record = beside(move || daemon.record_scheduler(&name)).await?;
    tokio::time::sleep(length).await;
    Ok(([(header::CONTENT_TYPE, "application/jsonl")], beside(move || record.end()).await?))
}

/// Responds when counting is complete. Discards the counts if the client disconnects earlier.
async fn record_accesses(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    query: Result<Query<RecordQuery>, QueryRejection>,
) -> Answer<api::AccessProfile> {
    let length = record_length(query)?;
    let record = beside(move || daemon.record_vm_accesses(&name)).await?;
    tokio::time::sleep(length).await;
    Ok(Json(beside(move || record.end()).await?))
}

fn record_length(query: Result<Query<RecordQuery>, QueryRejection>) -> Result<Duration, Failure> {
    let Query(RecordQuery { for_ms }) = query?;
    match (1..=RECORD_MS).contains(&for_ms) {
        true => Ok(Duration::from_millis(for_ms)),
        false => Err(DaemonError::Query(format!("for_ms = {for_ms} is not between 1 and {RECORD_MS}")).into()),
    }
}

async fn memories(State(daemon): State<Arc<Daemon>>) -> Answer<api::MemoryList> {
    Ok(Json(api::MemoryList { memories: look(move || Ok(daemon.memories())).await? }))
}

async fn card_memory(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>) -> Answer<api::CardMemory> {
    Ok(Json(look(move || daemon.memory(&name)).await?))
}

async fn set_card_memory(
    State(daemon): State<Arc<Daemon>>,
    IfMatch(expected): IfMatch,
    Path(name): Path<String>,
    body: Patch,
) -> Answer<api::CardMemory> {
    let patch = patch(body)?;
    Ok(Json(beside(move || daemon.set_memory_if(&name, &patch, expected.as_deref())).await?))
}

async fn vm_memory(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>) -> Answer<api::VmMemorySettings> {
    Ok(Json(look(move || daemon.vm_memory(&name)).await?))
}

async fn set_vm_memory(
    State(daemon): State<Arc<Daemon>>,
    IfMatch(expected): IfMatch,
    Path(name): Path<String>,
    body: Patch,
) -> Answer<api::VmMemorySettings> {
    let patch = patch(body)?;
    Ok(Json(beside(move || daemon.set_vm_memory_if(&name, &patch, expected.as_deref())).await?))
}

/// Request body that selects the memory to move.
type MoveBody = Result<Json<api::MoveRequest>, JsonRejection>;

async fn evict(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>, body: MoveBody) -> Answer<api::MoveReport> {
    let request = moves(body)?;
    Ok(Json(beside(move || daemon.move_vm_memory(&name, &request, To::Host)).await?))
}

async fn bring_back(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    body: MoveBody,
) -> Answer<api::MoveReport> {
    let request = moves(body)?;
    Ok(Json(beside(move || daemon.move_vm_memory(&name, &request, To::Card)).await?))
}

fn moves(body: MoveBody) -> Result<api::MoveRequest, Failure> {
    let advice = "send a JSON object with `mib`, `range`, both, or neither";
    let Json(request) = body.map_err(|error| Failure::invalid(error.status(), error.body_text(), advice))?;
    Ok(request)
}

async fn hints(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    body: Result<Json<api::Hints>, JsonRejection>,
) -> Result<StatusCode, Failure> {
    let advice = "send a JSON object with `hints`, each with a `range`";
    let Json(hints) = body.map_err(|error| Failure::invalid(error.status(), error.body_text(), advice))?;
    beside(move || daemon.hint_vm_memory(&name, &hints)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn export(State(daemon): State<Arc<Daemon>>) -> Result<impl IntoResponse, Failure> {
    let exported = look(move || Ok(daemon.export())).await?;
    Ok(([(header::ETAG, format!("\"{}\"", exported.revision))], Json(exported)))
}

/// Returns the desired state from a request's body.
fn desired(body: Result<Json<api::Desired>, JsonRejection>) -> Result<api::Desired, Failure> {
    let advice = "send a JSON object like the response to `GET /v1/desired`, with the keys to compare or change";
    let Json(desired) = body.map_err(|error| Failure::invalid(error.status(), error.body_text(), advice))?;
    Ok(desired)
}

/// Query parameters of `desired`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ApplyQuery {
    prune: bool,
    dry_run: bool,
}

async fn apply(
    State(daemon): State<Arc<Daemon>>,
    IfMatch(expected): IfMatch,
    query: Result<Query<ApplyQuery>, QueryRejection>,
    body: Result<Json<api::Desired>, JsonRejection>,
) -> Answer<api::Applied> {
    let (Query(ApplyQuery { prune, dry_run }), desired) = (query?, desired(body)?);
    Ok(Json(beside(move || daemon.apply(&desired, prune, dry_run, expected.as_deref())).await?))
}

/// Query parameters of `desired/compare`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct CompareQuery {
    exact: bool,
}

async fn compare(
    State(daemon): State<Arc<Daemon>>,
    query: Result<Query<CompareQuery>, QueryRejection>,
    body: Result<Json<api::Desired>, JsonRejection>,
) -> Answer<api::Comparison> {
    let (Query(CompareQuery { exact }), desired) = (query?, desired(body)?);
    Ok(Json(look(move || daemon.compare(&desired, exact)).await?))
}

async fn tenants(State(daemon): State<Arc<Daemon>>) -> Answer<api::TenantList> {
    Ok(Json(api::TenantList { tenants: look(move || Ok(daemon.tenants())).await? }))
}

async fn tenant(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>) -> Answer<api::Tenant> {
    Ok(Json(look(move || daemon.tenant(&name)).await?))
}

async fn add_tenant(
    State(daemon): State<Arc<Daemon>>,
    IfMatch(expected): IfMatch,
    body: Patch,
) -> Result<(StatusCode, Json<api::Tenant>), Failure> {
    let advice = "send a JSON object with the keys of a [[tenant]] table";
    let Json(table) = body.map_err(|error| Failure::invalid(error.status(), error.body_text(), advice))?;
    let spec = daemon.described_tenant(&table).map_err(|what| misdescribed(&what, "tenant"))?;
    let tenant = beside(move || daemon.add_tenant_if(spec, expected.as_deref())).await?;
    Ok((StatusCode::CREATED, Json(tenant)))
}

async fn remove_tenant(
    State(daemon): State<Arc<Daemon>>,
    IfMatch(expected): IfMatch,
    Path(name): Path<String>,
) -> Result<StatusCode, Failure> {
    beside(move || daemon.remove_tenant_if(&name, expected.as_deref())).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn set_tenant(
    State(daemon): State<Arc<Daemon>>,
    IfMatch(expected): IfMatch,
    Path(name): Path<String>,
    body: Result<Json<api::TenantPatch>, JsonRejection>,
) -> Answer<api::Tenant> {
    let advice = "send a JSON object with the keys to change, such as `memory`, `time`, `sharing` and `on_stuck`";
    let Json(patch) = body.map_err(|error| Failure::invalid(error.status(), error.body_text(), advice))?;
    Ok(Json(beside(move || daemon.set_tenant_if(&name, &patch, expected.as_deref())).await?))
}

/// Sets a tenant's limits until the client's process exits.
async fn lease_tenant(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    body: Result<Json<api::TenantPatch>, JsonRejection>,
) -> Answer<api::Tenant> {
    let advice = "send a JSON object with the keys of `memory` and `time` to change";
    let Json(patch) = body.map_err(|error| Failure::invalid(error.status(), error.body_text(), advice))?;
    let (author, leasing, tenant) = (author::of_request(), Arc::clone(&daemon), name.clone());
    let shown = beside(move || leasing.lease_tenant(&name, &patch, &author)).await?;
    tokio::spawn(leases::watch(daemon, tenant));
    Ok(Json(shown))
}

async fn schema() -> Json<serde_json::Value> {
    Json(api::schema::document())
}

async fn all_metrics(State(daemon): State<Arc<Daemon>>) -> Result<impl IntoResponse, Failure> {
    let text = look(move || {
        let cards = daemon.cards();
        let text = metrics::text(&cards, &daemon.vms(), &daemon.schedulers(WINDOW_MS)?, &daemon.memories());
        let itself = metrics::daemon(&daemon.about(), logging::suppressed());
        Ok(text + &metrics::tenants::text(&daemon.tenants()) + &itself + &daemon.moves.text())
    });
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text.await?))
}

async fn unknown(uri: axum::http::Uri) -> Failure {
    let body = api::Error {
        code: ErrorCode::NotFound,
        error: format!("there is no `{}`", uri.path()),
        what_to_do: "see /v1/schema for the paths of the API".to_owned(),
    };
    Failure { status: StatusCode::NOT_FOUND, body }
}

async fn not_allowed(method: axum::http::Method, uri: axum::http::Uri) -> Failure {
    let error = format!("`{}` does not accept {method}", uri.path());
    Failure::invalid(StatusCode::METHOD_NOT_ALLOWED, error, "see the API description")
}
