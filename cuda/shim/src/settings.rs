//! Settings from the environment. They are read only once, because the program may later change its environment and its
//! working directory while a thread of the library connects to the next owner.

use std::path::PathBuf;

use cuda_protocol::MAX_NAME;

/// Environment variable of NVIDIA's driver that names the folder with the pipes of an MPS control daemon.
const MPS_PIPES_VARIABLE: &str = "CUDA_MPS_PIPE_DIRECTORY";
/// Name of the control daemon's pipe in this folder.
const MPS_CONTROL_PIPE: &str = "control";

/// Settings of this process.
#[derive(Debug, Default)]
pub struct Settings {
    /// Absolute path of the owner's socket, if the program belongs to a tenant.
    pub socket: Option<PathBuf>,
    /// Name of the tenant; may be empty.
    pub tenant: String,
    /// The driver's library, if the environment names it.
    pub driver: Option<PathBuf>,
    /// True if the process is a client of an MPS server, because the environment names a folder with the pipe of a
    /// control daemon. The driver connects to this daemon when it is initialised, or fails.
    pub mps: bool,
}

impl Settings {
    /// Reads the settings. Called when a library is loaded, before any other thread of the library runs.
    pub fn read() -> Self {
        let path = |name| std::env::var_os(name).map(PathBuf::from);
        let mut tenant = std::env::var(cuda_protocol::TENANT_VARIABLE).unwrap_or_default();
        tenant.truncate(tenant.floor_char_boundary(MAX_NAME));
        let socket = path(cuda_protocol::SOCKET_VARIABLE);
        Self {
            socket: socket.map(|path| std::path::absolute(&path).unwrap_or(path)),
            tenant,
            driver: path(cuda_protocol::DRIVER_VARIABLE),
            mps: path(MPS_PIPES_VARIABLE).is_some_and(|folder| folder.join(MPS_CONTROL_PIPE).exists()),
        }
    }
}
