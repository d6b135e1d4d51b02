//! Executes the CUDA calls of one guest program. The daemon or `cuda-loopback` starts it.
//!
//! UNSAFETY: takes ownership of the descriptors given as arguments, and terminates the process.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use cuda_worker::sandbox::{Options, Sandbox, SandboxError};
use cuda_worker::{DeviceLink, Driver, Output, SandboxArgs, Start, serve};
use rustix::event::{PollFd, PollFlags, poll};
use worker_link::{FromWorker, Link, Reason, Rejoin};

#[derive(Parser)]
struct Args {
    /// Descriptor of the window, which is a memfd.
    #[arg(long)]
    window_fd: i32,
    /// Descriptor of the connection to the device.
    #[arg(long)]
    link_fd: i32,
    /// Descriptor of the connection to the process that started the worker, if this is not the device.
    #[arg(long)]
    starter_fd: Option<i32>,
    /// Descriptor of the file with the state saved by the program's previous worker.
    #[arg(long)]
    restore_fd: Option<i32>,
    /// Waits before the worker executes its program, because the previous worker still has the program.
    #[arg(long, requires = "restore_fd")]
    held: bool,
    /// The driver's library.
    #[arg(long, default_value = "libcuda.so.1")]
    library: PathBuf,
    #[command(flatten)]
    sandbox: SandboxArgs,
    /// Socket of the device in the next daemon. If given, the worker survives its daemon.
    #[arg(long, requires = "rejoin_ms")]
    rejoin: Option<PathBuf>,
    /// Time after which a worker without a daemon exits, in milliseconds.
    #[arg(long, requires = "rejoin")]
    rejoin_ms: Option<u64>,
}

impl Args {
    /// Returns the restrictions. The worker may read its libraries at any location.
    fn restrictions(&self) -> Options {
        let variable = |name| std::env::var_os(name).map(PathBuf::from);
        let libraries = [Some(self.library.clone()), variable("GPU_MEDIATOR_CUDA_DRIVER")].into_iter().flatten();
        // The loader searches for libraries given by name only.
        let libraries = libraries.filter(|path| path.components().count() > 1);
        let files = libraries.flat_map(|path| [path.canonicalize().ok(), Some(path)]).flatten();
        let folders = files.filter_map(|path| Some(path.parent()?.to_owned()));
        let search = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let search: Vec<_> = std::env::split_paths(&search).filter(|path| path.is_absolute()).collect();
        let owner = variable("GPU_MEDIATOR_CUDA_SOCKET").filter(|path| !path.as_os_str().is_empty());
        Options {
            user: self.sandbox.user.zip(self.sandbox.group),
            readable: folders.chain(search).chain(self.sandbox.readable.iter().cloned()).collect(),
            writable: self.sandbox.writable.clone(),
            sockets: owner.into_iter().chain(self.rejoin.clone()).collect(),
        }
    }
}

/// Reason for a failed start, as reported to the device, and the error.
type Failure = (Reason, anyhow::Error);

/// Loads the driver. With a sandbox, also initializes the driver, between the two steps of the sandbox.
fn load(args: &Args, link: &Link) -> Result<Driver, Failure> {
    let refused = |error: SandboxError| (Reason::Sandbox, error.into());
    if args.sandbox.no_sandbox {
        return load_driver(&args.library);
    }
    let sandbox = Sandbox::enter(&args.restrictions()).map_err(refused)?;
    // Initializing a driver may take a long time, and no other thread reads the link meanwhile. A worker that survives
    // its daemon handles a closed link afterwards.
    if args.rejoin.is_none() {
        let watched = link.try_clone().map_err(|error| (Reason::Sandbox, error.into()))?;
        std::thread::spawn(move || end_with(&watched));
    }
    let driver = load_driver(&args.library)?;
    // If the initialization fails, the program's own `cuInit` fails with the same error.
    driver.start();
    sandbox.close(link.as_fd()).map_err(refused)?;
    Ok(driver)
}

fn load_driver(library: &Path) -> Result<Driver, Failure> {
    let failed = |error| (Reason::Driver, anyhow::Error::from(error).context("the worker cannot use the CUDA driver"));
    Driver::load(library).map_err(failed)
}

/// Exits when the device closes the link.
fn end_with(link: &Link) {
    let mut descriptors = [PollFd::new(link, PollFlags::empty())];
    while poll(&mut descriptors, None).is_err() {}
    // SAFETY: exits without running any more code of this process.
    unsafe { libc::_exit(0) }
}

fn main() -> Result<()> {
    let args = Args::parse();
    // SAFETY: the parent passes the descriptors to this process only.
    let own = |number| unsafe { OwnedFd::from_raw_fd(number) };
    let (window, link) = (own(args.window_fd), Link::new(own(args.link_fd)));
    let (starter, restore) = (args.starter_fd.map(own).map(Link::new), args.restore_fd.map(own));
    // Collect output before the driver is loaded, because its C library's stream must not be in use.
    let output = Output::redirect()?;
    let start = Start { starter, restore, output, is_held: args.held };
    let more = start.starter.iter().map(Link::as_fd).chain(start.restore.iter().map(OwnedFd::as_fd));
    for descriptor in [window.as_fd(), link.as_fd()].into_iter().chain(more) {
        rustix::io::fcntl_setfd(descriptor, rustix::io::FdFlags::CLOEXEC)?;
    }
    let driver = match load(&args, &link) {
        Ok(driver) => driver,
        Err((reason, error)) => {
            let _ = link.send_from_worker(FromWorker::Failed { reason });
            return Err(error);
        }
    };
    let rejoin = args.rejoin.zip(args.rejoin_ms);
    let rejoin = rejoin.map(|(socket, limit_ms)| Rejoin { socket, limit: Duration::from_millis(limit_ms) });
    Ok(serve(driver, window, DeviceLink::new(link, rejoin), start)?)
}
