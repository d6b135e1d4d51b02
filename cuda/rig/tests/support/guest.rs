//! Programs as in a guest: with the guest library, and a worker each over the loopback transport.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

use super::{Rig, built};

/// A running `cuda-loopback`, whose workers are programs of a tenant.
pub struct Loopback {
    child: Child,
    /// Open, because it prints a line for each worker.
    _output: BufReader<ChildStdout>,
    socket: PathBuf,
}

impl Loopback {
    /// Starts it for a tenant of the rig's owner, which runs.
    pub fn start(rig: &Rig, tenant: &str) -> Self {
        let folder = rig.folder.path().join("guest");
        if !folder.exists() {
            std::fs::create_dir(&folder).expect("a folder");
            for file in ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ml.so"] {
                symlink(built("libcuda_guest.so"), folder.join(file)).expect("a link");
            }
        }
        let socket = rig.folder.path().join(format!("loopback-{tenant}"));
        let mut command = rig.command(built("cuda-loopback"), "shim");
        command.env(cuda_protocol::SOCKET_VARIABLE, rig.socket()).env(cuda_protocol::TENANT_VARIABLE, tenant);
        command.arg("--socket").arg(&socket).arg("--worker").arg(built("cuda-worker"));
        command.arg("--library").arg(rig.folder.path().join("shim/libcuda.so.1"));
        let mut child = command.stdout(Stdio::piped()).spawn().expect("starts");
        let mut line = String::new();
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        output.read_line(&mut line).expect("a line");
        assert_eq!(line.trim(), "ready");
        Self { child, _output: output, socket }
    }

    /// Returns a program of the guest.
    pub fn command(&self, rig: &Rig, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = rig.command(program, "guest");
        command.env("GPU_MEDIATOR_CUDA_LOOPBACK", &self.socket);
        command
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
