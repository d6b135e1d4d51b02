//! Runs workers without a virtual machine: listens on a socket, and starts a worker for each program that connects. The
//! program's library (`cuda-guest`) finds the socket through `GPU_MEDIATOR_CUDA_LOOPBACK`.
//!
//! The workers inherit this program's environment: the owner's socket, the tenant's name, and the driver's location.
//!
//! With `--control`, this program also listens on a second socket for lines `restart PID`, which make the guest program
//! of the worker with this process ID continue in a new worker. The reply is `worker PID` with the new worker's process
//! ID, or `refused` with the reason.

mod control;
mod programs;

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use clap::Parser;
use cuda_ring::{ADDRESSES, PINNED_ADDRESSES};
use cuda_worker::SandboxArgs;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use worker_link::{Restrictions, WorkerOptions};

use programs::Programs;

#[derive(Parser)]
struct Args {
    /// Path of the socket. Must not exist.
    #[arg(long)]
    socket: PathBuf,
    /// Path of `cuda-worker`. Defaults to the one in this program's folder.
    #[arg(long)]
    worker: Option<PathBuf>,
    /// Driver library that the workers load.
    #[arg(long)]
    library: Option<PathBuf>,
    /// Size of each program's window for pinned memory, in GiB. Only its used pages cost memory.
    #[arg(long, default_value_t = 64)]
    window_gib: u64,
    /// Path of the socket for worker restarts. Must not exist.
    #[arg(long)]
    control: Option<PathBuf>,
    /// Maximum total size of a program's card memory and code for a restart, in MiB. The host holds a copy of both
    /// during the restart.
    #[arg(long, default_value_t = 8192)]
    restart_mib: u64,
    #[command(flatten)]
    sandbox: SandboxArgs,
}

/// Sends the window's descriptor to the program.
fn send_window(socket: &OwnedFd, window: &OwnedFd) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = [window.as_fd()];
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    rustix::net::sendmsg(socket, &[IoSlice::new(&[0; 8])], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Starts a worker for a program, and a thread that supervises it.
fn serve(programs: &Arc<Programs>, guest: OwnedFd, bytes: u64) -> Result<()> {
    let window = rustix::fs::memfd_create("cuda-window", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&window, bytes)?;
    // If a program could shrink the file, its worker would be killed by SIGBUS.
    rustix::fs::fcntl_add_seals(&window, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    send_window(&guest, &window)?;
    programs.start(window, guest)
}

fn options(args: &Args) -> Result<WorkerOptions> {
    let own = std::env::current_exe().context("this program's path")?;
    let program = args.worker.clone().unwrap_or_else(|| own.with_file_name("cuda-worker"));
    let range = format!("{:#x}-{:#x}", ADDRESSES.start, PINNED_ADDRESSES);
    let environment = std::env::vars_os().chain([("GPU_MEDIATOR_CUDA_ADDRESSES".into(), range.into())]).collect();
    let library = args.library.clone();
    let SandboxArgs { user, group, readable, writable, no_sandbox } = args.sandbox.clone();
    let restrictions = Restrictions { is_off: no_sandbox, user: user.zip(group), readable, writable };
    Ok(WorkerOptions { program, environment, library, restrictions, rejoin: None })
}

fn listen(path: &Path) -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?).with_context(|| format!("bind {}", path.display()))?;
    rustix::net::listen(&socket, 64)?;
    Ok(socket)
}

fn main() -> Result<()> {
    let args = Args::parse();
    let socket = listen(&args.socket)?;
    let programs = Arc::new(Programs::new(options(&args)?, args.restart_mib << 20));
    if let Some(path) = &args.control {
        control::listen(path, Arc::clone(&programs))?;
    }
    println!("ready");
    loop {
        let program = rustix::io::retry_on_intr(|| rustix::net::accept_with(&socket, SocketFlags::CLOEXEC))?;
        if let Err(error) = serve(&programs, program, args.window_gib << 30) {
            eprintln!("cuda-loopback: cannot start a worker for a program: {error:#}");
        }
    }
}
