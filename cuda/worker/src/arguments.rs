//! Arguments that the worker has, and every program that starts workers by hand.

use std::path::PathBuf;

use clap::Args;

/// Restrictions of a worker.
#[derive(Args, Clone, Debug)]
pub struct SandboxArgs {
    /// User of the worker, if it may change it.
    #[arg(long, requires = "group")]
    pub user: Option<u32>,
    /// Group of the worker.
    #[arg(long, requires = "user")]
    pub group: Option<u32>,
    /// File or folder that the worker may read, in addition to libraries and devices. May be repeated.
    #[arg(long)]
    pub readable: Vec<PathBuf>,
    /// File or folder that the worker may change. May be repeated.
    #[arg(long)]
    pub writable: Vec<PathBuf>,
    /// Sets no restriction, for debuggers.
    #[arg(long)]
    pub no_sandbox: bool,
}
