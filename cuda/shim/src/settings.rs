//! Settings from the environment, read once. The program may change its environment and its working directory later,
//! while a thread of the library connects to the next owner.

use std::path::PathBuf;

use cuda_protocol::MAX_NAME;

/// Settings of this process.
#[derive(Debug, Default)]
pub struct Settings {
    /// Absolute path of the owner's socket, if the program belongs to a tenant.
    pub socket: Option<PathBuf>,
    /// Name of the tenant; may be empty.
    pub tenant: String,
    /// The driver's library, if the environment names it.
    pub driver: Option<PathBuf>,
}

impl Settings {
    /// Reads the settings, when a library is loaded, before any other thread of the library runs.
    pub fn read() -> Self {
        let path = |name| std::env::var_os(name).map(PathBuf::from);
        let mut tenant = std::env::var(cuda_protocol::TENANT_VARIABLE).unwrap_or_default();
        tenant.truncate(tenant.floor_char_boundary(MAX_NAME));
        let socket = path(cuda_protocol::SOCKET_VARIABLE);
        Self {
            socket: socket.map(|path| std::path::absolute(&path).unwrap_or(path)),
            tenant,
            driver: path(cuda_protocol::DRIVER_VARIABLE),
        }
    }
}
