//! Runs NVIDIA's Multi-Process Service (MPS) for one share group of a card, with a private control daemon and its
//! server.
//!
//! [`GroupServer`] has a thread that starts the daemon (`nvidia-cuda-mps-control -f`) with separate folders, polls the
//! clients, and restarts the daemon when it exits. The thread sends a [`Report`] for each change. `control` manages the
//! process and sends commands to it, and [`group_server`](GroupServer) contains the thread.
//!
//! Each group has a separate daemon, because a fault of one client terminates all clients of the same server. A daemon
//! with clients outlives the process that started it, so that programs keep their contexts while the owner of the card
//! is replaced. The next owner finds the daemon through a file in the daemon's folder. Commands have a time limit, and
//! a daemon that hangs is killed. The crate does not decide which groups need a server, and does not know about
//! tenants.

#![forbid(unsafe_code)]

mod control;
mod folder;
mod group_server;

pub use control::{ControlError, MpsConfig, pipe_folder};
pub use folder::group_folder;
pub use group_server::{GroupServer, Report};
