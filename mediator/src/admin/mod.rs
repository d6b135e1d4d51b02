//! The admin API: HTTP and JSON over a UNIX socket, and Prometheus metrics.
//!
//! Parts: [`api`] (what goes over the wire), [`routes`] (what is done), [`schema`] (both as an OpenAPI document),
//! [`launch`] (command lines of VMMs), [`metrics`].
//!
//! It runs on a thread of its own and never on the path of a guest's data. Requests that take long (a virtual machine is added
//! or removed) run beside it, so that looking never waits.
//!
//! There is no authentication beyond the rights of the socket: who may connect may do everything.

use std::future::Future;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use crate::daemon::Daemon;

pub mod api;
pub mod launch;
pub mod metrics;
pub mod routes;
pub mod schema;

#[cfg(test)]
pub(crate) mod tests;

/// How long clients have to finish when the daemon ends: one that stops in the middle of a request must not hold it up.
const GRACE: Duration = Duration::from_secs(2);

/// Serves the API on a listening socket until `stop` is done; requests under way are
/// answered first, as far as they end within two seconds.
///
/// # Errors
/// When the socket cannot be used.
pub async fn serve(
    daemon: Arc<Daemon>,
    listener: UnixListener,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::UnixListener::from_std(listener)?;
    let (stopped, grace) = tokio::sync::oneshot::channel();
    let stop = async move {
        stop.await;
        let _ = stopped.send(());
    };
    let end_of_grace = async move {
        match grace.await {
            Ok(()) => tokio::time::sleep(GRACE).await,
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        result = axum::serve(listener, routes::router(daemon)).with_graceful_shutdown(stop) => result,
        () = end_of_grace => Ok(()),
    }
}
