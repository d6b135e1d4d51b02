//! The daemon: owns the cards of a host and serves a virtual GPU to each virtual machine.
//!
//! It stays in the foreground, tells its service manager when it is ready (`Type=notify`), takes sockets from it, and ends
//! cleanly on SIGTERM and SIGINT.

use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use config::Config;
use config::arguments::Arguments;
use mediatord::admin::Listeners;
use mediatord::sockets::{Listening, Sockets};
use mediatord::state::Keeper;
use mediatord::{Daemon, account, activation, cards::Cards, logging, serving};

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
    let Listening { listener: admin, path: _path } =
        sockets.admin(&spec.admin_socket, &rights).context("the admin socket")?;
    let read_only = spec.read_socket.as_ref().map(|path| {
        let (owner, group) = (spec.read_owner.as_deref(), spec.read_group.as_deref());
        let rights = account::socket_options(spec.read_mode, owner, group)?;
        anyhow::Ok(sockets.read_only(path, &rights)?)
    });
    let read_only = read_only.transpose().context("the read-only socket")?;
    let (read_only, _read_path) = read_only.map(|Listening { listener, path }| (listener, path)).unzip();
    let listeners = Listeners { admin, read_only };
    let (config, keeper) = Keeper::open(config, ignore_state)?;
    for name in sockets.units().filter(|name| config.vms.iter().all(|vm| vm.name != **name)) {
        tracing::warn!(socket = name, "socket from the service manager fits no VM yet; a VM of that name gets it");
    }
    let cards = Cards::of(config.daemon.state_dir.as_deref());
    let daemon = Daemon::start(config, &cards, sockets, keeper)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_name("admin-work")
        .build()
        .context("the admin API cannot be started")?;
    runtime.block_on(serving::serve(&daemon, listeners))?;
    // Requests that still run are not waited for; the daemon refuses changes from here on.
    runtime.shutdown_background();
    daemon.shut_down();
    logging::tell_suppressed();
    tracing::info!("ended");
    Ok(())
}
