//! The admin API: HTTP and JSON over a UNIX socket, and Prometheus metrics.
//!
//! Parts: [`routes`] (what is done), and the crate [`admin_socket`] (so many connections at a time, bodies that are streams). What goes over the wire is the crate [`api`]'s, but for
//! [`metrics`].
//!
//! It runs on a thread of its own and never on the path of a guest's data. Requests that take long (a virtual machine is added
//! or removed) run beside it, so that looking never waits.
//!
//! There is no authentication beyond the rights of the sockets: who may connect to the admin socket may do everything, who may
//! connect to the read-only one may look.

use std::future::{Future, IntoFuture};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use crate::Daemon;
use admin_socket::Bounded;

pub mod routes;

#[cfg(test)]
mod tests;

/// Time that clients have to finish when the daemon ends: one that stops in the middle of a request must not hold it up.
const GRACE: Duration = Duration::from_secs(2);

/// The sockets of the API.
#[derive(Debug)]
pub(crate) struct Listeners {
    /// Takes all requests.
    pub admin: UnixListener,
    /// Takes requests that only look.
    pub read_only: Option<UnixListener>,
}

/// Serves the API on listening sockets until `stop` is done; requests under way are
/// answered first, as far as they end within two seconds.
///
/// # Errors
/// When a socket cannot be used.
pub(crate) async fn serve(
    daemon: Arc<Daemon>,
    listeners: Listeners,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let (stopping, stopped) = tokio::sync::watch::channel(false);
    let until_stopped = || {
        let mut stopped = stopped.clone();
        async move {
            // An error: nobody will say so any more.
            let _ = stopped.wait_for(|stopped| *stopped).await;
        }
    };
    let served = |listener: UnixListener, router: axum::Router| -> std::io::Result<_> {
        let listener = Bounded::new(listener)?;
        Ok(axum::serve(listener, router).with_graceful_shutdown(until_stopped()).into_future())
    };
    let Listeners { admin, read_only } = listeners;
    let admin = served(admin, routes::router(Arc::clone(&daemon)))?;
    let read_only = read_only.map(|listener| served(listener, routes::read_only(daemon))).transpose()?;
    let both = async move {
        match read_only {
            None => admin.await,
            Some(read_only) => tokio::try_join!(admin, read_only).map(drop),
        }
    };
    let end_of_grace = async move {
        stop.await;
        let _ = stopping.send(true);
        tokio::time::sleep(GRACE).await;
    };
    tokio::select! {
        result = both => result,
        () = end_of_grace => Ok(()),
    }
}
