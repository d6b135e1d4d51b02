//! Transports to a worker.

mod loopback;

use std::io;

use cuda_ring::Transport;
use render_node::RenderTransport;

/// Environment variable with the path of the `cuda-loopback` socket.
const LOOPBACK_VARIABLE: &str = "GPU_MEDIATOR_CUDA_LOOPBACK";

/// Opens the loopback socket given in the environment. If none is given, opens the render node of the VM's CUDA device.
///
/// # Errors
/// Returns an error if the socket or the render node cannot be opened.
pub fn open() -> io::Result<Box<dyn Transport>> {
    match std::env::var_os(LOOPBACK_VARIABLE) {
        Some(path) => Ok(Box::new(loopback::Loopback::connect(path.as_ref())?)),
        None => Ok(Box::new(RenderTransport::open().map_err(io::Error::other)?)),
    }
}

/// Starts a thread that does not receive the program's signals.
pub fn spawn(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    crate::signals::blocked(|| std::thread::Builder::new().name("cuda-guest".into()).spawn(work).map(drop))
}
