//! The daemon: owns the cards of a host and serves a virtual GPU to each virtual machine.
//!
//! It stays in the foreground, tells its service manager when it is ready (`Type=notify`), takes sockets from it, and ends
//! cleanly on SIGTERM and SIGINT.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use mediator::config::Config;
use mediator::daemon::arguments::Arguments;
use mediator::daemon::sockets::{Listening, Sockets};
use mediator::daemon::state::Keeper;
use mediator::daemon::{Daemon, account, activation, cards::Cards};
use mediator::{admin, logging};
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let sockets = activation::take().map(Sockets::new);
    let config = match Config::load(&arguments.config) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("mediatord: {:#}", anyhow::Error::new(error));
            return ExitCode::from(2);
        }
    };
    if arguments.check {
        println!("{}: good: cards {}, VMs {}", arguments.config.display(), config.cards.len(), config.vms.len());
        return ExitCode::SUCCESS;
    }
    match sockets.map_err(Into::into).and_then(|sockets| run(config, sockets, arguments.ignore_state)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mediatord: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(config: Config, sockets: Sockets, ignore_state: bool) -> anyhow::Result<()> {
    logging::init(&config.daemon.log, config.daemon.log_format)?;
    let spec = config.daemon.clone();
    // The admin socket first: a second daemon ends here, before it touches a card.
    let rights = account::socket_options(spec.admin_mode, spec.admin_owner.as_deref(), spec.admin_group.as_deref())
        .context("the admin socket")?;
    let Listening { listener, path: _path } = sockets.admin(&spec.admin_socket, &rights).context("the admin socket")?;
    let (config, keeper) = Keeper::open(config, ignore_state)?;
    for name in sockets.units().filter(|name| config.vms.iter().all(|vm| vm.name != **name)) {
        tracing::warn!(socket = name, "socket from the service manager fits no VM yet; a VM of that name gets it");
    }
    let daemon = Daemon::start(config, &Cards, sockets, keeper)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_name("admin-work")
        .build()
        .context("the admin API cannot be started")?;
    runtime.block_on(serve(&daemon, listener))?;
    // Requests that still run are not waited for; the daemon refuses changes from here on.
    runtime.shutdown_background();
    daemon.shut_down();
    tracing::info!("ended");
    Ok(())
}

async fn serve(daemon: &Arc<Daemon>, listener: std::os::unix::net::UnixListener) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be awaited")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT cannot be awaited")?;
    let stop = async move {
        let name = tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        };
        tracing::info!(signal = name, "ending");
        notify(NotifyState::Stopping);
    };
    tracing::info!("ready");
    notify(NotifyState::Ready);
    if let Some(limit) = sd_notify::watchdog_enabled() {
        tokio::spawn(watch(Arc::clone(daemon), limit));
    }
    admin::serve(Arc::clone(daemon), listener, stop).await.context("the admin API cannot be served")
}

/// Tells the service manager at least twice in `limit` that the daemon goes on: that requests are served, and that none holds
/// the others up.
async fn watch(daemon: Arc<Daemon>, limit: Duration) {
    let mut turns = tokio::time::interval((limit / 3).max(Duration::from_millis(1)));
    loop {
        turns.tick().await;
        let daemon = Arc::clone(&daemon);
        if tokio::task::spawn_blocking(move || daemon.revision()).await.is_ok() {
            notify(NotifyState::Watchdog);
        }
    }
}

fn notify(state: NotifyState) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "the service manager cannot be told");
    }
}
