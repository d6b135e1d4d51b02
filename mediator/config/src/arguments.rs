//! Command line of `mediatord`.

use std::path::PathBuf;

use clap::Parser;

use crate::DEFAULT_PATH;

/// Shares NVIDIA cards between virtual machines
#[derive(Debug, Parser)]
#[command(
    name = "mediatord",
    version,
    after_help = "Exit codes: 0 terminated by a signal, or the configuration is valid; 1 could not start or continue; \
                  2 invalid arguments or configuration"
)]
pub struct Arguments {
    /// Configuration file
    #[arg(long, value_name = "PATH", default_value = DEFAULT_PATH)]
    pub config: PathBuf,
    /// Checks the configuration file and exits
    #[arg(long)]
    pub check: bool,
    /// Moves the changes stored in `state_dir` aside, and starts with only the configuration file
    #[arg(long)]
    pub ignore_state: bool,
    /// Takes over from the daemon that is connected to standard input; set by `mediatorctl daemon upgrade`
    #[arg(long, conflicts_with_all = ["check", "ignore_state"])]
    pub takeover: bool,
}
