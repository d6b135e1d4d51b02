//! Runs the scripted owner until end of file on standard input, and then prints its counters as JSON.

use std::io::Read as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use cuda_rig::owner::{Owner, Script};

#[derive(Parser)]
struct Args {
    /// Path of the socket to listen on.
    #[arg(long)]
    socket: PathBuf,
    /// Path of the driver's library.
    #[arg(long)]
    driver: PathBuf,
    /// Chunk size in MiB.
    #[arg(long, default_value_t = 2)]
    chunk_mib: u64,
    /// Maximum card memory per process in MiB.
    #[arg(long, default_value_t = 1024)]
    device_mib: u64,
    /// Maximum total memory per process in MiB.
    #[arg(long, default_value_t = 1024)]
    quota_mib: u64,
    /// Interval between relocations in milliseconds; 0 disables them.
    #[arg(long, default_value_t = 0)]
    relocate_ms: u64,
    /// Number of chunks per relocation.
    #[arg(long, default_value_t = 32)]
    batch: usize,
    /// Limit on work in flight in microseconds; 0 means no limit.
    #[arg(long, default_value_t = 0)]
    run_ahead_us: u32,
    /// Length of turns and of the pauses between them in microseconds; 0 means one endless turn.
    #[arg(long, default_value_t = 0)]
    turn_us: u32,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let script = Script {
        driver: args.driver,
        chunk_bytes: args.chunk_mib << 20,
        device_bytes: args.device_mib << 20,
        quota_bytes: args.quota_mib << 20,
        relocate: (args.relocate_ms > 0).then(|| Duration::from_millis(args.relocate_ms)),
        batch: args.batch,
        run_ahead_us: args.run_ahead_us,
        turn_us: args.turn_us,
        patience: Duration::from_secs(10),
    };
    let owner = Owner::start(&args.socket, script)?;
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    println!("{}", serde_json::to_string(&owner.finish())?);
    Ok(())
}
