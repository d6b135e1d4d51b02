//! One entry point for set-up, demo, test, bench and lint.

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Set-up, demo, test, bench and lint of gpu-mediator")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make sure that QEMU, the guest kernels and their initramfs exist.
    Setup {
        /// Look the package versions up anew, even if older ones are in the cache.
        #[arg(long)]
        refresh: bool,
    },
}

fn main() -> Result<()> {
    match Args::parse().command {
        Command::Setup { refresh } => {
            let images = images::ensure_with(&images::Progress::stderr(), refresh)?;
            println!("QEMU {}", images.qemu.version);
            for kernel in &images.kernels {
                println!("kernel {}: {}", kernel.name, kernel.release);
            }
            Ok(())
        }
    }
}
