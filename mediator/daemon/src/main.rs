//! The daemon, which owns the cards of a host and serves a virtual GPU to each virtual machine.
//!
//! The daemon stays in the foreground, notifies its service manager when it is ready (`Type=notify`), accepts sockets
//! from the service manager, and exits cleanly on SIGTERM and SIGINT.

use std::process::ExitCode;

use clap::Parser;
use config::arguments::Arguments;

fn main() -> ExitCode {
    mediatord::program::run(Arguments::parse())
}
