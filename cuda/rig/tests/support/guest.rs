//! Runs programs as in a guest: with the guest library, and one worker per program over the loopback transport.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

use super::{Rig, built};

/// A running `cuda-loopback`, whose workers are tenant programs.
pub struct Loopback {
    child: Child,
    /// Standard output of `cuda-loopback`. Kept open because it prints a line for each worker.
    _output: BufReader<ChildStdout>,
    socket: PathBuf,
    control: PathBuf,
}

/// Permits workers to modify the fake card's folder, and to read the folder of the fake driver's symbolic links.
fn permit_fake(rig: &Rig, command: &mut Command) {
    let libraries = rig.fake.parent().expect("a folder");
    command.arg("--writable").arg(rig.folder.path().join("card")).arg("--readable").arg(libraries);
}

impl Loopback {
    /// Starts `cuda-loopback` for a tenant of the rig's owner. The owner must be running.
    pub fn start(rig: &Rig, tenant: &str) -> Self {
        Self::start_with(rig, tenant, Stdio::inherit(), &[])
    }

    /// Like [`Self::start`], with additional arguments. `errors` is the standard error of `cuda-loopback` and its
    /// workers.
    pub fn start_with(rig: &Rig, tenant: &str, errors: Stdio, arguments: &[&str]) -> Self {
        let socket = Self::prepare(rig, tenant);
        let mut command = rig.command(built("cuda-loopback"), "shim");
        command.env(cuda_protocol::SOCKET_VARIABLE, rig.socket()).env(cuda_protocol::TENANT_VARIABLE, tenant);
        command.arg("--socket").arg(&socket).arg("--worker").arg(built("cuda-worker"));
        command.arg("--library").arg(rig.folder.path().join("shim/libcuda.so.1"));
        command.arg("--control").arg(rig.folder.path().join(format!("control-{tenant}")));
        permit_fake(rig, &mut command);
        command.args(arguments).stderr(errors);
        Self::ready(command, socket)
    }

    /// Creates a folder with the guest libraries. Returns the socket's path.
    fn prepare(rig: &Rig, tenant: &str) -> std::path::PathBuf {
        let folder = rig.folder.path().join("guest");
        if !folder.exists() {
            std::fs::create_dir(&folder).expect("a folder");
            for file in ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ml.so"] {
                symlink(built("libcuda_guest.so"), folder.join(file)).expect("a link");
            }
        }
        rig.folder.path().join(format!("loopback-{tenant}"))
    }

    /// Starts `cuda-loopback`, and waits until it listens.
    fn ready(mut command: Command, socket: std::path::PathBuf) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("starts");
        let mut line = String::new();
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        output.read_line(&mut line).expect("a line");
        assert_eq!(line.trim(), "ready");
        let name = socket.file_name().expect("a name").to_string_lossy().replace("loopback", "control");
        let control = socket.with_file_name(name);
        Self { child, _output: output, socket, control }
    }

    /// Makes a worker's program continue in a new worker. Returns the new worker's process ID, or the reason for a
    /// rejection.
    pub fn restart(&self, worker: i32) -> Result<i32, String> {
        use std::io::Write as _;
        let mut connection = std::os::unix::net::UnixStream::connect(&self.control).expect("listens");
        writeln!(connection, "restart {worker}").expect("sent");
        let mut reply = String::new();
        BufReader::new(connection).read_line(&mut reply).expect("a reply");
        let worker = reply.trim().strip_prefix("worker ").map(|worker| worker.parse().expect("a process"));
        worker.ok_or_else(|| reply.trim().to_owned())
    }

    /// Starts `cuda-loopback` for a tenant of a daemon.
    pub fn under_daemon(rig: &Rig, tenant: &str) -> Self {
        let socket = Self::prepare(rig, tenant);
        let mut command = rig.command(built("mediatorctl"), "plain");
        command.env(cuda_protocol::DRIVER_VARIABLE, &rig.fake);
        command.arg("--socket").arg(rig.folder.path().join("admin.sock")).args(["run", "--tenant", tenant]);
        command.arg("--library").arg(rig.folder.path().join("shim")).arg("--").arg(built("cuda-loopback"));
        command.arg("--socket").arg(&socket).arg("--worker").arg(built("cuda-worker"));
        permit_fake(rig, &mut command);
        Self::ready(command, socket)
    }

    /// Returns the process IDs of all workers.
    pub fn workers(&self) -> Vec<i32> {
        let own = self.child.id().to_string();
        let entries = std::fs::read_dir("/proc").expect("readable").flatten();
        let of = |pid: i32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
            (fields.get(1) == Some(&own.as_str()) && fields.first() != Some(&"Z")).then_some(pid)
        };
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok().and_then(of)).collect()
    }

    /// Returns a command that runs a program in the guest.
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
