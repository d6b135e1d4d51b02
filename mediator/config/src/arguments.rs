//! The command line of `mediatord`.

use std::path::PathBuf;

use clap::Parser;

use crate::DEFAULT_PATH;

/// Shares NVIDIA cards between virtual machines
#[derive(Debug, Parser)]
#[command(
    name = "mediatord",
    version,
    after_help = "Exit codes: 0 ended by a signal, or the configuration is good; 1 could not start or go on; \
                  2 wrong usage or configuration"
)]
pub struct Arguments {
    /// The configuration file
    #[arg(long, value_name = "PATH", default_value = DEFAULT_PATH)]
    pub config: PathBuf,
    /// Only checks the configuration file
    #[arg(long)]
    pub check: bool,
    /// Sets what is kept in `state_dir` aside, and starts as the configuration file says
    #[arg(long)]
    pub ignore_state: bool,
    /// Goes on with what the daemon at the other end of the standard input has; started by `mediatorctl daemon upgrade`
    #[arg(long, conflicts_with_all = ["check", "ignore_state"])]
    pub takeover: bool,
}
