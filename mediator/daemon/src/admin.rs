//! The admin API: HTTP with JSON over a UNIX socket, and Prometheus metrics.
//!
//! Parts: [`routes`] (the request handlers) and [`metrics`]. The crate [`admin_socket`] limits connections and streams
//! bodies, and the crate [`api`] defines the messages.
//!
//! The API runs on its own thread, outside the guests' data path. Slow requests (adding or removing a virtual machine)
//! run concurrently, so that read-only requests never wait for them.
//!
//! Only the sockets' file permissions control access: a client of the admin socket may send any request, and a client
//! of the read-only socket may only read.

use std::future::{Future, IntoFuture};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use crate::Daemon;
use admin_socket::{Bounded, Peer};

pub mod routes;

#[cfg(test)]
mod tests;

/// Grace period for requests in flight at shutdown, so that a stalled client does not delay the daemon's exit.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);

/// Listening sockets of the API.
#[derive(Debug)]
pub(crate) struct Listeners {
    /// Accepts requests of all kinds.
    pub admin: UnixListener,
    /// Accepts only read requests.
    pub read_only: Option<UnixListener>,
    /// Accepts only read requests, from browsers on the host.
    pub page: Option<TcpListener>,
}

/// Serves the API until `stop` is set. Requests in flight then have [`SHUTDOWN_GRACE`] to complete. Returns an error if
/// setting up or serving a socket fails.
pub(crate) async fn serve(
    daemon: Arc<Daemon>,
    listeners: Listeners,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let (stopping, stopped) = tokio::sync::watch::channel(false);
    let until_stopped = || {
        let mut stopped = stopped.clone();
        async move {
            // An error means that the sender was dropped, which also stops the server.
            let _ = stopped.wait_for(|stopped| *stopped).await;
        }
    };
    let served = |listener: UnixListener, router: axum::Router| -> std::io::Result<_> {
        let listener = Bounded::new(listener)?;
        let service = router.into_make_service_with_connect_info::<Peer>();
        Ok(axum::serve(listener, service).with_graceful_shutdown(until_stopped()).into_future())
    };
    let Listeners { admin, read_only, page } = listeners;
    let events = Arc::clone(&daemon.events);
    let admin = served(admin, routes::router(Arc::clone(&daemon)))?;
    let for_readers = status_page::with_page(routes::read_only(daemon));
    let page = page
        .map(|listener| -> std::io::Result<_> {
            let router = status_page::guard(for_readers.clone());
            let service = router.into_make_service_with_connect_info::<Peer>();
            let served = axum::serve(Bounded::tcp(listener)?, service);
            Ok(served.with_graceful_shutdown(until_stopped()).into_future())
        })
        .transpose()?;
    let read_only = read_only.map(|listener| served(listener, for_readers)).transpose()?;
    let all = async move {
        let read_only = async move { if let Some(served) = read_only { served.await } else { Ok(()) } };
        let page = async move { if let Some(served) = page { served.await } else { Ok(()) } };
        tokio::try_join!(admin, read_only, page).map(drop)
    };
    let end_of_grace = async move {
        stop.await;
        let _ = stopping.send(true);
        // Close the event log. Otherwise, clients that follow it would keep the server running until the grace period
        // ends.
        events.close();
        tokio::time::sleep(SHUTDOWN_GRACE).await;
    };
    tokio::select! {
        result = all => result,
        () = end_of_grace => Ok(()),
    }
}
