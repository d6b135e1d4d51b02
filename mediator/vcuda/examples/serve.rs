//! Serves one CUDA function: `serve SOCKET WORKER`.

use std::path::PathBuf;

use vcuda::{CudaDevice, Limits, MIN_WINDOW_BYTES, ProgramLauncher};
use vmm_glue::{Link, Server, ServerOptions, SocketOptions, StopHandle};
use worker_link::{Restrictions, WorkerOptions};

fn main() {
    let mut paths = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(socket), Some(program)) = (paths.next(), paths.next()) else { panic!("serve SOCKET WORKER") };
    let options = WorkerOptions {
        program,
        environment: Vec::new(),
        library: None,
        restrictions: Restrictions::default(),
        rejoin: None,
    };
    let link = Link::new(vcuda::irqs()).expect("a link");
    let limits = Limits { window_bytes: MIN_WINDOW_BYTES, workers: 16 };
    let launcher = Box::new(ProgramLauncher { card: String::new(), options });
    let (mut device, function) = CudaDevice::build("serve", limits, &link, launcher).expect("a device");
    let server = Server::bind(&socket, &SocketOptions::default(), ServerOptions::default()).expect("a socket");
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(std::time::Duration::from_secs(5));
            eprintln!("{:?} {:?}", function.counters(), function.programs());
        }
    });
    server.run(&link, &mut device, &StopHandle::new().expect("an event")).expect("it serves");
}
