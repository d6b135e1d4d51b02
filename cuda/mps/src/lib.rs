//! NVIDIA's Multi-Process Service (MPS) for one share group of a card: a private control daemon with its server.
//!
//! [`GroupServer`] has a thread that starts `nvidia-cuda-mps-control -f` with folders of its own, asks it for its
//! clients, and starts it again when it ends. It reports to its owner with [`Report`]. Parts: `control` (the process,
//! and the commands that it takes), [`group_server`](GroupServer) (the thread).
//!
//! Each group has a daemon of its own, because a fault of one client ends all clients of its server. A daemon outlives
//! the process that started it: programs keep their contexts while the owner of the card is replaced, and the next
//! owner finds the daemon through a file in its folder.
//!
//! Limits: commands have a time limit, so a daemon that hangs is killed. The crate does not decide which groups need a
//! server, and does not know tenants.

#![forbid(unsafe_code)]

mod control;
mod group_server;

pub use control::{ControlError, MpsConfig, pipe_folder};
pub use group_server::{GroupServer, Report};
