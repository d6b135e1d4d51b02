//! A CUDA test program that uses all visible devices in one process.

use std::sync::mpsc::{Receiver, channel};

use anyhow::Result;
use clap::{Parser, Subcommand};
use cuda_rig::{Cuda, cards};

#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Prints the devices as JSON: UUID, PCI address, total memory, and free and total memory in the context, in MiB.
    Look,
    /// Runs the same workload on each device, and prints checksums.
    Train {
        /// Memory per thread on its device, in MiB.
        #[arg(long, default_value_t = 12)]
        mib: u64,
        /// Number of rounds.
        #[arg(long, default_value_t = 40)]
        rounds: u64,
        /// Number of threads in each device's context; 0 means one thread for all devices.
        #[arg(long, default_value_t = 1)]
        threads: u64,
    },
    /// Copies memory between the devices.
    Copies {
        /// Number of rounds.
        #[arg(long, default_value_t = 24)]
        rounds: u64,
    },
    /// Uses the second device's memory on the first device.
    Peers {
        /// Number of rounds.
        #[arg(long, default_value_t = 24)]
        rounds: u64,
    },
    /// Uses the second device's memory on the first device without access rights.
    Trespass {
        /// First enables the access and disables it again.
        #[arg(long)]
        disables: bool,
    },
    /// Maps memory of all devices in one address range.
    Ranges {
        /// Number of rounds.
        #[arg(long, default_value_t = 12)]
        rounds: u64,
    },
    /// Allocates memory on each device until an allocation fails.
    Fill {
        /// Size of one allocation in MiB.
        #[arg(long, default_value_t = 4)]
        step_mib: u64,
    },
    /// Works on each device until end of file on standard input. A line `N` prints the progress of device N, and `alloc
    /// N` allocates memory there.
    Live {
        /// Memory on each device in MiB.
        #[arg(long, default_value_t = 6)]
        mib: u64,
    },
    /// Runs kernels on all devices that spin until their peers on the other devices run.
    Meet {
        /// Number of rounds.
        #[arg(long, default_value_t = 200)]
        rounds: u64,
        /// Card time of one kernel, in microseconds.
        #[arg(long, default_value_t = 1000)]
        kernel_us: u64,
        /// Maximum number of rounds in flight on a device.
        #[arg(long, default_value_t = 2)]
        ahead: u64,
    },
    /// Works on each device, and forks meanwhile.
    Fork {
        /// Memory on each device in MiB.
        #[arg(long, default_value_t = 6)]
        mib: u64,
        /// Number of rounds.
        #[arg(long, default_value_t = 60)]
        rounds: u64,
    },
    /// Creates and destroys contexts.
    Contexts {
        /// Number of rounds.
        #[arg(long, default_value_t = 8)]
        rounds: u64,
    },
}

/// Returns the lines of standard input as they arrive.
fn lines() -> Receiver<String> {
    let (lines, input) = channel();
    std::thread::spawn(move || std::io::stdin().lines().map_while(Result::ok).try_for_each(|line| lines.send(line)));
    input
}

fn main() -> Result<()> {
    let args = Args::parse();
    let cuda = Cuda::open("libcuda.so.1")?;
    let found = match args.what {
        What::Look => cards::look(cuda)?.to_string(),
        What::Train { mib, rounds, threads } => cards::train(cuda, mib, rounds, threads)?,
        What::Copies { rounds } => cards::copies(cuda, rounds)?,
        What::Peers { rounds } => cards::peers(cuda, rounds)?,
        What::Trespass { disables } => cards::trespass(cuda, disables)?,
        What::Ranges { rounds } => cards::ranges(cuda, rounds)?,
        What::Fill { step_mib } => cards::fill(cuda, step_mib)?,
        What::Live { mib } => return cards::live(cuda, mib, &lines(), |line| println!("{line}")),
        What::Meet { rounds, kernel_us, ahead } => cards::meet(cuda, rounds, kernel_us, ahead)?,
        What::Fork { mib, rounds } => cards::fork(cuda, mib, rounds)?,
        What::Contexts { rounds } => cards::contexts(cuda, rounds)?,
    };
    println!("{found}");
    Ok(())
}
