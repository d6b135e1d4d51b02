//! Serves a memory-only device on the socket at the given path until the process is killed. This is a minimal server
//! for transport benchmarks.

use std::path::PathBuf;

use vmm_glue::echo::EchoDevice;
use vmm_glue::{IrqCounts, Link, Server, ServerOptions, SocketOptions, StopHandle};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args_os().nth(1).map(PathBuf::from).ok_or("usage: echo PATH")?;
    let server = Server::bind(&path, &SocketOptions::default(), ServerOptions::default())?;
    let link = Link::new(IrqCounts { intx: 1, msi: 1, ..IrqCounts::default() })?;
    let mut device = EchoDevice::new(1 << 20, 0x1af4, 0xfffe);
    println!("serving {}", path.display());
    server.run(&link, &mut device, &StopHandle::new()?)?;
    Ok(())
}
