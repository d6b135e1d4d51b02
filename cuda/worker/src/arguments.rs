//! Command-line arguments of the worker, and of programs that start workers without the daemon.

use std::path::PathBuf;

use clap::Args;

/// Arguments that restrict a worker.
#[derive(Args, Clone, Debug)]
pub struct SandboxArgs {
    /// User ID that the worker switches to, if permitted.
    #[arg(long, requires = "group")]
    pub user: Option<u32>,
    /// Group ID that the worker switches to.
    #[arg(long, requires = "user")]
    pub group: Option<u32>,
    /// File or folder that the worker may read, in addition to libraries and devices. May be repeated.
    #[arg(long)]
    pub readable: Vec<PathBuf>,
    /// File or folder that the worker may modify. May be repeated.
    #[arg(long)]
    pub writable: Vec<PathBuf>,
    /// Disables all restrictions, for debuggers.
    #[arg(long)]
    pub no_sandbox: bool,
}
