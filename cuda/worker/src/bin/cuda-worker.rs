//! Executes the CUDA calls of one guest program. Started by the daemon, or by `cuda-loopback`.
//!
//! UNSAFETY: takes over the descriptors that the arguments name.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd};
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::Parser;
use cuda_worker::{Driver, serve};
use worker_link::{FromWorker, Link, Reason};

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
    let reply = link.try_clone()?;
    let result = serve(driver, window, link);
    if let Err(error) = &result {
        let _ = reply.send_from_worker(FromWorker::Failed { reason: error.reason() });
    }
    Ok(result?)
}
