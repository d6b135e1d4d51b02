//! The program, which either starts a new daemon, or takes over from another daemon.

use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use config::arguments::Arguments;
use config::{Config, DaemonSpec};
use fdstore::names::{STORED_ADMIN, STORED_READ_ONLY};
use listening::{Listening, SocketPath, Sockets, descriptors, folders};
use overrides::OverrideStore;
use rustix::io::Errno;

use crate::admin::Listeners;
use crate::cards::Cards;
use crate::upgrade::UpgradeChain;
use crate::upgrade::receiver::Successor;
use crate::{Daemon, serving};
use listening::account;

/// Runs the program until it exits.
#[must_use]
pub fn run(arguments: Arguments) -> ExitCode {
    // Read the path at startup. After a package upgrade, it refers to the next version.
    let program = std::env::current_exe();
    let sockets = if arguments.takeover { Ok(Sockets::default()) } else { listening::take().map(Sockets::new) };
    let config = match Config::load(&arguments.config) {
        Ok(config) => config,
        Err(error) => {
            let why = format!("{:#}", anyhow::Error::new(error));
            if arguments.takeover {
                Successor::decline(&why);
            }
            eprintln!("mediatord: {why}");
            return ExitCode::from(2);
        }
    };
    if arguments.check {
        let Config { cards, vms, tenants, profiles, .. } = &config;
        let (cards, vms, tenants, profiles) = (cards.len(), vms.len(), tenants.len(), profiles.len());
        let path = arguments.config.display();
        println!("{path}: good: cards {cards}, VMs {vms}, tenants {tenants}, profiles {profiles}");
        return ExitCode::SUCCESS;
    }
    let done = match sockets {
        Err(error) => Err(error.into()),
        Ok(_) if arguments.takeover => go_on(config, program, arguments.config),
        Ok(sockets) => begin(config, sockets, arguments.ignore_state, program, arguments.config),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mediatord: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Starts a daemon without taking over from another daemon.
fn begin(
    config: Config,
    sockets: Sockets,
    ignore_state: bool,
    program: std::io::Result<PathBuf>,
    path: PathBuf,
) -> anyhow::Result<()> {
    logging::init(&config.daemon.log, config.daemon.log_format)?;
    folders::check(&config.daemon.socket_dir).map_err(anyhow::Error::msg)?;
    descriptors::raise_limit();
    // Open the admin socket first, so that a second daemon fails here, before accessing a card.
    let admin = Admin::open(&config.daemon, &sockets)?;
    let (config, override_store) = OverrideStore::open(config, ignore_state)?;
    for name in sockets.units().filter(|name| config.vms.iter().all(|vm| vm.name != **name)) {
        tracing::warn!(
            socket = name,
            "socket from the service manager matches no VM yet; a later VM with this name will use it"
        );
    }
    sockets.tell();
    let cards = Cards::new(config.daemon.state_dir.as_deref());
    let daemon = Daemon::start(config, &cards, sockets, override_store)?;
    serve(&daemon, admin, program, path)
}

/// Starts a daemon that takes over from another daemon.
fn go_on(config: Config, program: std::io::Result<PathBuf>, path: PathBuf) -> anyhow::Result<()> {
    // Perform steps that can fail before the VMs are paused.
    if let Err(error) = logging::init(&config.daemon.log, config.daemon.log_format) {
        Successor::decline(&error.to_string());
        return Err(error.into());
    }
    descriptors::raise_limit();
    let mut successor = Successor::meet().map_err(anyhow::Error::msg)?;
    let mut prepared = || {
        let sockets = successor.sockets().map_err(anyhow::Error::msg)?;
        let admin = Admin::open(&config.daemon, &sockets)?;
        let (config, override_store) = successor.override_store(config.clone()).map_err(anyhow::Error::msg)?;
        anyhow::Ok((sockets, admin, config, override_store))
    };
    let (sockets, admin, config, override_store) = match prepared() {
        Ok(prepared) => prepared,
        Err(error) => {
            successor.refuse(&format!("{error:#}"));
            return Err(error);
        }
    };
    let cards = Cards::new(config.daemon.state_dir.as_deref());
    let daemon = Daemon::take_over(config, &cards, sockets, override_store, successor)?;
    serve(&daemon, admin, program, path)
}

/// Sockets of the admin API, with their paths.
struct Admin {
    listeners: Listeners,
    paths: [Option<SocketPath>; 2],
}

impl Admin {
    fn open(spec: &DaemonSpec, sockets: &Sockets) -> anyhow::Result<Self> {
        let rights = account::socket_options(spec.admin_mode, spec.admin_owner.as_deref(), spec.admin_group.as_deref())
            .context("the admin socket")?;
        let Listening { listener: admin, path } =
            sockets.admin(&spec.admin_socket, &rights).context("the admin socket")?;
        let read_only = spec.read_socket.as_ref().map(|path| {
            let (owner, group) = (spec.read_owner.as_deref(), spec.read_group.as_deref());
            let rights = account::socket_options(spec.read_mode, owner, group)?;
            anyhow::Ok(sockets.read_only(path, &rights)?)
        });
        let read_only = read_only.transpose().context("the read-only socket")?;
        let (read_only, read_path) = read_only.map(|Listening { listener, path }| (listener, path)).unzip();
        let page = spec.page.map(page_at).transpose()?;
        Ok(Self { listeners: Listeners { admin, read_only, page }, paths: [path, read_path.flatten()] })
    }

    /// Duplicates each socket whose path belongs to this daemon, and returns it with its name for the next daemon.
    fn copies(&self) -> std::io::Result<Vec<(&'static str, UnixListener)>> {
        let all = [Some(&self.listeners.admin), self.listeners.read_only.as_ref()];
        let names = [STORED_ADMIN, STORED_READ_ONLY];
        let ours = all.into_iter().zip(names).zip(&self.paths).filter(|(_, path)| path.is_some());
        ours.filter_map(|((listener, name), _)| Some((name, listener?)))
            .map(|(name, it)| Ok((name, it.try_clone()?)))
            .collect()
    }
}

/// Listens on the address of the web page.
fn page_at(address: SocketAddr) -> anyhow::Result<TcpListener> {
    status_page::listen(address).map_err(|error| {
        // The packaged systemd unit permits only UNIX sockets.
        let refused = error.raw_os_error() == Some(Errno::AFNOSUPPORT.raw_os_error());
        let advice = "; the service needs the drop-in page.conf, which the package includes as an example";
        anyhow::Error::new(error)
            .context(format!("the web page's address {address}{}", if refused { advice } else { "" }))
    })
}

/// Serves until the daemon exits.
fn serve(daemon: &Arc<Daemon>, admin: Admin, program: std::io::Result<PathBuf>, config: PathBuf) -> anyhow::Result<()> {
    let copies = admin.copies().context("the admin socket")?;
    let Admin { listeners, paths: _paths } = admin;
    match program {
        Ok(program) => daemon.continues_by(UpgradeChain { program, config, admin: copies }),
        Err(error) => {
            tracing::warn!(%error, "the path of this program is unknown: it cannot be upgraded while running")
        }
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_name("admin-work")
        .build()
        .context("the admin API cannot be started")?;
    runtime.block_on(serving::serve(daemon, listeners))?;
    // Do not wait for running requests, because the daemon now rejects changes.
    runtime.shutdown_background();
    daemon.shut_down();
    logging::tell_suppressed();
    tracing::info!("ended");
    Ok(())
}
