//! Speaks the owner's protocol as a client that a test controls through commands; see [`cuda_rig::raw`].

use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;

#[derive(Parser)]
struct Args {
    /// Path of the owner's socket.
    #[arg(long)]
    socket: PathBuf,
    /// User ID that the process switches to first.
    #[arg(long)]
    uid: Option<u32>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    args.uid.map_or(Ok(()), cuda_rig::raw::become_user)?;
    cuda_rig::raw::serve(&args.socket)
}
