//! Executes the CUDA calls of one guest program. Started by the daemon, or by `cuda-loopback`.
//!
//! UNSAFETY: takes over the descriptors that the arguments name.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Parser;
use cuda_worker::{DeviceLink, Driver, serve};
use worker_link::{FromWorker, Link, Reason, Rejoin};

#[derive(Parser)]
struct Args {
    /// Descriptor of the window, a memfd.
    #[arg(long)]
    window_fd: i32,
    /// Descriptor of the connection to the device.
    #[arg(long)]
    link_fd: i32,
    /// The driver's library.
    #[arg(long, default_value = "libcuda.so.1")]
    library: PathBuf,
    /// Socket of the next daemon, if this worker survives the end of its daemon.
    #[arg(long, requires = "rejoin_ms")]
    rejoin: Option<PathBuf>,
    /// Time without a daemon after which this worker ends, in milliseconds.
    #[arg(long)]
    rejoin_ms: Option<u64>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    // SAFETY: the parent passes both descriptors to this process alone.
    let (window, link) = unsafe { (OwnedFd::from_raw_fd(args.window_fd), OwnedFd::from_raw_fd(args.link_fd)) };
    let link = Link::new(link);
    for descriptor in [window.as_fd(), link.as_fd()] {
        rustix::io::fcntl_setfd(descriptor, rustix::io::FdFlags::CLOEXEC)?;
    }
    let fail = |reason| link.send_from_worker(FromWorker::Failed { reason });
    if let Err(error) = worker_link::enter_sandbox() {
        let _ = fail(Reason::Sandbox);
        return Err(error.into());
    }
    let driver = match Driver::load(&args.library) {
        Ok(driver) => driver,
        Err(error) => {
            let _ = fail(Reason::Driver);
            return Err(error).context("the worker has no CUDA driver");
        }
    };
    let rejoin = args.rejoin.zip(args.rejoin_ms);
    let rejoin = rejoin.map(|(socket, limit_ms)| Rejoin { socket, limit: Duration::from_millis(limit_ms) });
    Ok(serve(driver, window, DeviceLink::new(link, rejoin))?)
}
