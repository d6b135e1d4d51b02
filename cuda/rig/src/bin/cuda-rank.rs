//! A process of a program that uses several cards with one process per card, like NCCL programs.
//!
//! All processes submit the same kernels, and each kernel spins until its peers on the other cards run. The kernels
//! announce their rounds in a file that all processes map, with one word per process. Runs until end of file on
//! standard input, and then prints the number of rounds.
//!
//! UNSAFETY: maps the file.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::fs::OpenOptions;
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::sync::mpsc::{TryRecvError, channel};

use anyhow::{Result, ensure};
use clap::Parser;
use cuda_rig::Cuda;

#[derive(Parser)]
struct Args {
    /// File with the words.
    #[arg(long)]
    words: PathBuf,
    /// Index of this process.
    #[arg(long)]
    rank: u64,
    /// Number of processes.
    #[arg(long)]
    ranks: u64,
    /// Card time of one kernel, in microseconds.
    #[arg(long)]
    kernel_us: u64,
    /// Number of kernels to submit before waiting for the first of them.
    #[arg(long, default_value_t = 2)]
    ahead: u64,
    /// Card memory to allocate, in MiB.
    #[arg(long, default_value_t = 0)]
    mib: u64,
}

/// Maps the words of all processes. The mapping exists until the process exits.
fn map(args: &Args) -> Result<u64> {
    let bytes = 8 * args.ranks;
    let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&args.words)?;
    file.set_len(bytes)?;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: creates a new mapping of a file of this size.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes as usize, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    ensure!(at != libc::MAP_FAILED, "the words cannot be mapped");
    Ok(at as u64)
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(args.rank < args.ranks && args.ahead > 0, "the rank is one of the ranks, and submits kernels");
    let words = map(&args)?;
    let cuda = Cuda::open("libcuda.so.1")?;
    for _ in 0..args.mib / 4 {
        cuda.alloc(4 << 20)?;
    }
    let (meet, stream) = (cuda.kernel("meet")?, cuda.stream()?);
    let (close, closed) = channel::<()>();
    std::thread::spawn(move || {
        std::io::stdin().lines().map_while(Result::ok).for_each(drop);
        drop(close);
    });
    println!("ready");
    let mut round = 0;
    while closed.try_recv() != Err(TryRecvError::Disconnected) {
        for _ in 0..args.ahead {
            round += 1;
            cuda.launch(meet, &[words, args.ranks, args.rank, round, args.kernel_us], stream)?;
        }
        cuda.finish(stream)?;
    }
    // Other processes may have submitted further rounds, which must not wait for this process. SAFETY: the mapping has
    // a word for each process, and no other process writes this word.
    unsafe { (words as *mut u64).add(args.rank as usize).write_volatile(u64::MAX) };
    println!("rounds {round}");
    Ok(())
}
