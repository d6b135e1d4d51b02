//! The daemon: owns the cards of a host and serves a virtual GPU to each virtual machine.
//!
//! It stays in the foreground, tells its service manager when it is ready (`Type=notify`), takes sockets from it, and ends
//! cleanly on SIGTERM and SIGINT.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use clap::Parser;
use mediator::config::{Config, DEFAULT_PATH};
use mediator::daemon::activation::{self, ADMIN};
use mediator::daemon::{Daemon, account, cards::Cards};
use mediator::{admin, logging};
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};

/// Shares NVIDIA cards between virtual machines
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The configuration file
    #[arg(long, value_name = "PATH", default_value = DEFAULT_PATH)]
    config: PathBuf,
    /// Only checks the configuration file
    #[arg(long)]
    check: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
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
    match run(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mediatord: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(config: Config) -> anyhow::Result<()> {
    let mut listeners = activation::take()?.listeners;
    logging::init(&config.daemon.log, config.daemon.log_format)?;
    let spec = config.daemon.clone();
    // The admin socket first: a second daemon ends here, before it touches a card.
    let (listener, _bound) = match listeners.remove(ADMIN) {
        Some(listener) => (listener, None),
        None => {
            let rights =
                account::socket_options(spec.admin_mode, spec.admin_owner.as_deref(), spec.admin_group.as_deref())
                    .context("the admin socket")?;
            let (listener, bound) = vmm_glue::socket::bind(&spec.admin_socket, &rights).context("the admin socket")?;
            (listener, Some(bound))
        }
    };
    for name in listeners.keys().filter(|name| config.vms.iter().all(|vm| vm.name != **name)) {
        tracing::warn!(
            socket = name.as_str(),
            "socket from the service manager fits no VM yet; a VM of that name gets it"
        );
    }
    let daemon = Daemon::start(config, &Cards, listeners)?;

    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_name("admin-work")
        .build()
        .context("the admin API cannot be started")?;
    runtime.block_on(serve(&daemon, listener))?;
    // Requests that still run are not waited for; the daemon refuses new VMs from here on.
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
    admin::serve(Arc::clone(daemon), listener, stop).await.context("the admin API cannot be served")
}

fn notify(state: NotifyState) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "the service manager cannot be told");
    }
}
