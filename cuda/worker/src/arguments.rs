//! Arguments of the worker, and of every program that starts workers by hand.

use std::path::PathBuf;

use clap::Args;

/// Restrictions of a worker.
#[derive(Args, Clone, Debug)]
pub struct SandboxArgs {
    /// User ID that the worker changes to, if it may.
    #[arg(long, requires = "group")]
    pub user: Option<u32>,
    /// Group ID that the worker changes to.
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
