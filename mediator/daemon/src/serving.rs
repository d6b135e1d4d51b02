//! Main loop of a ready daemon: serves the admin API, and notifies the service manager.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use api::EventKind;
use events::NewEvent;
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::MissedTickBehavior;

use crate::admin::{self, Listeners};
use crate::{Daemon, leases, rebalancing};

/// Serves the admin API until a signal arrives, another daemon has taken over, or all cards have failed.
///
/// # Errors
/// Returns an error if the API cannot be served, or if all cards have failed. In the latter case, a restarted daemon
/// initializes the cards again.
pub async fn serve(daemon: &Arc<Daemon>, listeners: Listeners) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot handle SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot handle SIGINT")?;
    let (nothing_left, failed) = (Arc::new(AtomicBool::new(false)), Arc::clone(daemon));
    let (found, leaving) = (Arc::clone(&nothing_left), Arc::clone(daemon));
    let stop = async move {
        let reason = tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
            () = leaving.line.left() => "another daemon continues with all cards and VMs",
            () = look_around(failed) => {
                found.store(true, Ordering::Relaxed);
                "all cards have failed"
            }
        };
        tracing::info!(reason, "ending");
        if !leaving.line.is_gone() {
            leaving.events.add(NewEvent::daemon(EventKind::Ended, format!("mediatord exits: {reason}")));
            notify(NotifyState::Stopping);
        }
    };
    tracing::info!("ready");
    notify(NotifyState::Ready);
    if let Some(limit) = sd_notify::watchdog_enabled() {
        tokio::spawn(watch(Arc::clone(daemon), limit, || notify(NotifyState::Watchdog)));
    }
    if let Some(spec) = daemon.spec().rebalance {
        tracing::info!(?spec, "VMs are moved automatically from busy cards to idle ones");
        tokio::spawn(rebalancing::run(Arc::clone(daemon), spec));
    }
    tokio::spawn(observe(Arc::clone(daemon)));
    leases::watch_all(daemon);
    admin::serve(Arc::clone(daemon), listeners, stop).await.context("cannot serve the admin API")?;
    anyhow::ensure!(
        !nothing_left.load(Ordering::Relaxed),
        "all cards have failed: see the log, and start the daemon again"
    );
    Ok(())
}

/// Interval between comparisons of the daemon's state with its previous state.
const OBSERVE_INTERVAL: Duration = Duration::from_secs(1);

/// Detects events by comparing the daemon's state with its previous state, until the runtime ends.
pub(crate) async fn observe(daemon: Arc<Daemon>) {
    let mut turns = tokio::time::interval(OBSERVE_INTERVAL);
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        turns.tick().await;
        let daemon = Arc::clone(&daemon);
        let round = tokio::task::spawn_blocking(move || {
            // After the handover, this daemon no longer has the cards' state.
            if !daemon.line.is_gone() {
                daemon.observe();
                daemon.events.tick();
            }
        });
        let _panicked = round.await;
    }
}

/// Periodically reports suppressed log messages. Returns when all cards have failed.
async fn look_around(daemon: Arc<Daemon>) {
    let mut turns = tokio::time::interval(logging::REFILL_INTERVAL);
    loop {
        turns.tick().await;
        logging::tell_suppressed();
        let daemon = Arc::clone(&daemon);
        if tokio::task::spawn_blocking(move || daemon.has_failed()).await.is_ok_and(|failed| failed) {
            return;
        }
    }
}

/// Calls `tell` at least twice per `limit` while the daemon is responsive, even if requests are blocked.
pub(crate) async fn watch(daemon: Arc<Daemon>, limit: Duration, mut tell: impl FnMut()) {
    let mut turns = tokio::time::interval((limit / 3).max(Duration::from_millis(1)));
    loop {
        turns.tick().await;
        let daemon = Arc::clone(&daemon);
        if tokio::task::spawn_blocking(move || daemon.revision()).await.is_ok() {
            tell();
        }
    }
}

fn notify(state: NotifyState) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}
