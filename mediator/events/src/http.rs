//! Serves `GET /v1/events`: one page, one page after a wait, or a stream of pages. Also determines the author of each
//! request.
//!
//! A follower has a cursor and at most one page in flight. If it reads too slowly, the log drops unread events, and the
//! follower's next page contains the number of lost events.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use admin_socket::Peer;
use api::{ErrorCode, EventPage};
use axum::body::{Body, Bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{ConnectInfo, Query, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::Deserialize;
use tokio::sync::mpsc::{self, Sender};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_stream::wrappers::ReceiverStream;

use crate::cursor::BadCursor;
use crate::{Log, author};

/// Maximum number of followers per socket, including requests that wait for events.
pub const MAX_FOLLOWERS: usize = 16;
/// Default limit on the number of events in a page.
const DEFAULT_LIMIT: usize = 256;
/// Maximum number of events in a page.
const MAX_LIMIT: usize = 1024;
/// Maximum time that a request waits for an event, in seconds.
const MAX_WAIT_S: u64 = 60;
/// Time limit for a follower to receive a page.
// TIMEOUT: the follower's terminal may have suspended its output. The follower can send a new request with its cursor
// later.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// State of the route.
#[derive(Clone)]
struct Served {
    log: Arc<Log>,
    followers: Arc<Semaphore>,
}

/// Returns a router with the route `GET /v1/events`. Each route has its own limit on followers, so that readers cannot
/// exhaust the operator's limit.
pub fn router<S: Clone + Send + Sync + 'static>(log: Arc<Log>) -> Router<S> {
    let served = Served { log, followers: Arc::new(Semaphore::new(MAX_FOLLOWERS)) };
    Router::new().route("/v1/events", get(events)).with_state(served)
}

/// Serves a request with its client as the author for [`author::of_request`].
pub async fn with_author(request: Request, next: Next) -> Response {
    let peer = request.extensions().get::<ConnectInfo<Peer>>();
    let author = peer.map_or_else(author::daemon, |ConnectInfo(Peer { uid, pid })| author::client(*uid, *pid));
    author::requesting(author, next.run(request)).await
}

/// Query parameters of `GET /v1/events`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Asked {
    after: Option<String>,
    limit: Option<usize>,
    follow: bool,
    wait_s: u64,
}

/// A rejected request.
struct Refused(StatusCode, api::Error);

impl Refused {
    fn invalid(error: impl ToString, what_to_do: &str) -> Self {
        let body = api::Error { code: ErrorCode::Invalid, error: error.to_string(), what_to_do: what_to_do.to_owned() };
        Self(StatusCode::BAD_REQUEST, body)
    }
}

impl From<BadCursor> for Refused {
    fn from(error: BadCursor) -> Self {
        Self::invalid(error, BadCursor::ADVICE)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        (self.0, Json(self.1)).into_response()
    }
}

async fn events(
    State(Served { log, followers }): State<Served>,
    query: Result<Query<Asked>, QueryRejection>,
) -> Result<Response, Refused> {
    let wrong = |error: QueryRejection| Refused::invalid(error.body_text(), "see the API description for the keys");
    let Query(Asked { after, limit, follow, wait_s }) = query.map_err(wrong)?;
    let limit = limit.unwrap_or(DEFAULT_LIMIT);
    if !(1..=MAX_LIMIT).contains(&limit) {
        let error = format!("limit = {limit} is not between 1 and {MAX_LIMIT}");
        return Err(Refused::invalid(error, "request fewer, and continue with `next`"));
    }
    if wait_s > MAX_WAIT_S {
        let error = format!("wait_s = {wait_s} is not between 0 and {MAX_WAIT_S}");
        return Err(Refused::invalid(error, "repeat the request after the wait, or set `follow`"));
    }
    let page = log.page(after.as_deref(), limit)?;
    if !follow && (wait_s == 0 || !page.events.is_empty() || page.note.is_some()) {
        return Ok(Json(page).into_response());
    }
    let Ok(place) = followers.try_acquire_owned() else {
        let error = format!("{MAX_FOLLOWERS} clients of this socket already wait for events");
        let what_to_do = "end one of them (`mediatorctl events -f`), or omit `follow` and `wait_s`".to_owned();
        return Err(Refused(StatusCode::CONFLICT, api::Error { code: ErrorCode::Conflict, error, what_to_do }));
    };
    if follow {
        let (to, from) = mpsc::channel(1);
        tokio::spawn(send_pages(log, page, limit, to, place));
        let body = Body::from_stream(ReceiverStream::new(from));
        return Ok(([(header::CONTENT_TYPE, "application/jsonl")], body).into_response());
    }
    let mut news = log.news();
    // Check for events that were added after the first page was read.
    let seen = log.page(Some(&page.next), limit)?;
    if seen.events.is_empty() && !news.borrow_and_update().closed {
        let _timeout = tokio::time::timeout(Duration::from_secs(wait_s), news.changed()).await;
    }
    Ok(Json(log.page(Some(&page.next), limit)?).into_response())
}

/// Sends pages to a follower, one JSON object per line, until the follower disconnects or stalls, or the daemon exits.
async fn send_pages(
    log: Arc<Log>,
    first: EventPage,
    limit: usize,
    to: Sender<Result<Bytes, Infallible>>,
    _place: OwnedSemaphorePermit,
) {
    let mut news = log.news();
    let mut page = first;
    loop {
        let Ok(mut line) = serde_json::to_vec(&page) else { return };
        line.push(b'\n');
        let sent = tokio::time::timeout(STALL_TIMEOUT, to.send(Ok(line.into()))).await;
        if !matches!(sent, Ok(Ok(()))) {
            return;
        }
        loop {
            let closed = news.borrow_and_update().closed;
            let Ok(next) = log.page(Some(&page.next), limit) else { return };
            page = next;
            if !page.events.is_empty() || page.note.is_some() {
                break;
            }
            if closed {
                return;
            }
            tokio::select! {
                changed = news.changed() => if changed.is_err() { return },
                () = to.closed() => return,
            }
        }
    }
}
