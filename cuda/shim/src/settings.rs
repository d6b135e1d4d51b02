//! Settings from the environment. They are read only once, because the program may later change its environment or
//! working directory while a thread of the library connects to the next owner.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use cuda_protocol::{MAX_CARDS, MAX_NAME, SOCKET_SEPARATOR};

/// NVIDIA's environment variable for the folder of an MPS control daemon's pipes.
const MPS_PIPES_VARIABLE: &str = "CUDA_MPS_PIPE_DIRECTORY";
/// Name of an MPS control daemon's pipe in the folder of its pipes.
const MPS_CONTROL_PIPE: &str = "control";

/// Settings of this process.
#[derive(Debug, Default)]
pub struct Settings {
    /// Absolute paths of the owners' sockets, one per card, in the order of the program's devices. Empty if the program
    /// does not belong to a tenant.
    pub sockets: Vec<PathBuf>,
    /// Name of the tenant, or an empty string.
    pub tenant: String,
    /// Path of the driver library, if the environment sets it.
    pub driver: Option<PathBuf>,
    /// Set if the process is a client of an MPS server: the environment contains the folder of a control daemon's pipe.
    /// During its initialization, the driver connects to this daemon or fails.
    pub mps: bool,
}

impl Settings {
    /// Reads the settings. Must be called before the library starts any thread.
    pub fn read() -> Self {
        let path = |name| std::env::var_os(name).map(PathBuf::from);
        let mut tenant = std::env::var(cuda_protocol::TENANT_VARIABLE).unwrap_or_default();
        tenant.truncate(tenant.floor_char_boundary(MAX_NAME));
        Self {
            sockets: std::env::var_os(cuda_protocol::SOCKET_VARIABLE).map(|list| sockets(&list)).unwrap_or_default(),
            tenant,
            driver: path(cuda_protocol::DRIVER_VARIABLE),
            mps: path(MPS_PIPES_VARIABLE).is_some_and(|folder| folder.join(MPS_CONTROL_PIPE).exists()),
        }
    }

    /// Returns an error message if the list of sockets is invalid, or contains several sockets of an MPS client.
    pub fn fault(&self) -> Option<String> {
        let variable = cuda_protocol::SOCKET_VARIABLE;
        let count = self.sockets.len();
        if count < 2 {
            return None;
        }
        if count > MAX_CARDS {
            return Some(format!("{variable} names {count} sockets, expected at most {MAX_CARDS}"));
        }
        for (at, socket) in self.sockets.iter().enumerate() {
            let number = at + 1;
            if socket.as_os_str().is_empty() {
                return Some(format!("socket {number} of {count} in {variable} is empty, expected a path"));
            }
            if self.sockets[..at].contains(socket) {
                let path = socket.display();
                return Some(format!("{variable} names {path} twice, expected the socket of each card once"));
            }
        }
        self.mps.then(|| {
            format!(
                "{MPS_PIPES_VARIABLE} names an MPS server, which serves one card, but {variable} names {count} \
                 sockets: unset one of them"
            )
        })
    }
}

/// Splits a list of sockets. Keeps empty elements, so that they are reported as errors.
fn sockets(list: &OsStr) -> Vec<PathBuf> {
    let path = |part: &[u8]| {
        let path = PathBuf::from(OsStr::from_bytes(part));
        std::path::absolute(&path).unwrap_or(path)
    };
    list.as_bytes().split(|byte| *byte == SOCKET_SEPARATOR).map(path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mistake_in_list_of_sockets_is_named() {
        let fault = |list: &str, mps| {
            Settings { sockets: sockets(list.as_ref()), mps, ..Settings::default() }.fault().unwrap_or_default()
        };
        for good in ["/run/a", "/run/a:/run/b", ""] {
            assert_eq!(fault(good, false), "", "{good}");
        }
        assert_eq!(fault("/run/a", true), "", "one card may have an MPS server");
        for (list, mps, expected) in [
            ("/run/a:", false, "socket 2 of 2 in GPU_MEDIATOR_CUDA_SOCKET is empty"),
            (":/run/a:/run/b", false, "socket 1 of 3"),
            ("/run/a:/run/b:/run/a", false, "names /run/a twice"),
            ("/a:/b:/c:/d:/e:/f:/g:/h:/i:/j:/k:/l:/m:/n:/o:/p:/q", false, "names 17 sockets, expected at most 16"),
            ("/run/a:/run/b", true, "CUDA_MPS_PIPE_DIRECTORY names an MPS server"),
        ] {
            assert!(fault(list, mps).contains(expected), "{list}: {}", fault(list, mps));
        }
    }

    #[test]
    fn relative_sockets_become_absolute() {
        let found = sockets("run/a:/run/b".as_ref());
        assert_eq!(found[0], std::path::absolute("run/a").expect("a path"));
        assert_eq!(found[1], PathBuf::from("/run/b"));
    }
}
