//! Starts programs as a tenant.
//!
//! The process executes the program in place of itself. With `--memory` or `--weight`, the daemon changes the tenant's
//! limits until this process exits.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Args;

use super::path;
use crate::cdi::{self, LIBRARY};
use crate::client::{self, Client, ClientError};
use crate::values;
use api::{MpsState, Tenant, TenantPatch};
use cdi_spec::MPS_VARIABLE;
use cuda_protocol::{SOCKET_SEPARATOR, SOCKET_VARIABLE, TENANT_VARIABLE};

/// Time limit for the card's owner to respond, and for the MPS server of the tenant's group to start.
// TIMEOUT: an owner that has exited is restarted within a second.
const OWNER_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval at which the command requests the tenant's state from the daemon.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Clone, Debug, Args)]
pub(crate) struct Run {
    /// Name of the tenant
    #[arg(long, value_name = "NAME")]
    tenant: String,
    /// Tenant's quota while the program runs: maximum memory on the card, such as 20G
    #[arg(long, value_name = "SIZE", value_parser = values::mib)]
    memory: Option<u64>,
    /// Tenant's weight for the card's time and memory while the program runs
    #[arg(long, value_name = "WEIGHT")]
    weight: Option<u32>,
    /// Folder with the library `libcuda.so.1` of gpu-mediator
    #[arg(long, value_name = "DIR", env = "GPU_MEDIATOR_CUDA_LIBRARY", default_value = LIBRARY)]
    library: PathBuf,
    /// Also preloads the library (LD_PRELOAD), for programs that open NVIDIA's library by path
    #[arg(long)]
    preload: bool,
    /// Program with its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

impl Run {
    /// Executes the program in place of this process; returns only on failure.
    pub(crate) fn run(self, client: &Client) -> Result<String, ClientError> {
        let tenant = self.served(client)?;
        // If one of the names is missing in the folder, a program that loads it gets NVIDIA's library, and runs outside
        // the tenant's limits.
        for name in cdi::NAMES {
            let path = self.library.join(name);
            if !path.exists() {
                return Err(ClientError::File { path, source: io::ErrorKind::NotFound.into() });
            }
        }
        let library = self.library.join("libcuda.so.1");
        let mps = tenant.group_state.as_ref().and_then(|state| state.mps_pipes.as_deref());
        let mut command = self.command(&list(tenant.all_sockets()), &library, mps);
        let patch = self.patch();
        if patch != TenantPatch::default() {
            // The daemon restores the limits when this process, which becomes the program, exits.
            let _: Tenant = client.post(&format!("{}/lease", path(&self.tenant)), &patch)?;
        }
        let source = command.exec();
        Err(ClientError::File { path: command.get_program().into(), source })
    }

    /// Waits until the card's owner responds and the MPS server of the tenant's group has started, because a program
    /// can become an MPS client only at its start. Returns the tenant. After the time limit, no longer waits for the
    /// server, and returns an error if the owner does not respond.
    fn served(&self, client: &Client) -> Result<Tenant, ClientError> {
        let deadline = Instant::now() + OWNER_TIMEOUT;
        loop {
            let tenant: Tenant = client.get(&path(&self.tenant))?;
            let late = Instant::now() > deadline;
            let starts = tenant.group_state.as_ref().is_some_and(|state| state.mps == MpsState::Starting);
            if tenant.served && (late || !starts) {
                return Ok(tenant);
            }
            if late {
                let card: api::Card = client.get(&format!("/v1/cards/{}", client::segment(&tenant.card)))?;
                let reason = card.error.unwrap_or_else(|| "its owner does not respond".to_owned());
                return Err(ClientError::NotServed { tenant: tenant.name, card: tenant.card, reason });
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns the settings that apply while the program runs.
    fn patch(&self) -> TenantPatch {
        let mut patch = TenantPatch::default();
        if let Some(mib) = self.memory {
            patch.memory.insert("quota_mib".to_owned(), mib.into());
        }
        if let Some(weight) = self.weight {
            patch.memory.insert("weight".to_owned(), weight.into());
            patch.time.insert("weight".to_owned(), weight.into());
        }
        patch
    }

    fn command(&self, sockets: &OsStr, library: &Path, mps: Option<&Path>) -> Command {
        let mut command = Command::new(self.program.first().cloned().unwrap_or_default());
        command.args(self.program.iter().skip(1));
        command.env(SOCKET_VARIABLE, sockets).env(TENANT_VARIABLE, &self.tenant);
        if let Some(pipes) = mps {
            command.env(MPS_VARIABLE, pipes);
        }
        command.env("LD_LIBRARY_PATH", in_front(self.library.as_os_str().to_owned(), "LD_LIBRARY_PATH"));
        if self.preload {
            command.env("LD_PRELOAD", in_front(library.as_os_str().to_owned(), "LD_PRELOAD"));
        }
        command
    }
}

/// Returns the sockets of a tenant's cards in the format of the library's environment variable.
fn list(sockets: &[PathBuf]) -> OsString {
    let separator = OsStr::from_bytes(&[SOCKET_SEPARATOR]);
    sockets.iter().map(|path| path.as_os_str()).collect::<Vec<_>>().join(separator)
}

/// Prepends a path to an environment variable that the dynamic loader reads.
fn in_front(mut first: OsString, variable: &str) -> OsString {
    if let Some(rest) = std::env::var_os(variable).filter(|rest| !rest.is_empty()) {
        first.push(":");
        first.push(rest);
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_given_the_library_and_the_socket() {
        let run = Run {
            tenant: "a".to_owned(),
            memory: None,
            weight: None,
            library: "/lib/front".into(),
            preload: true,
            program: ["python3", "train.py"].map(OsString::from).into(),
        };
        let command = run.command(
            &list(&["/run/y.sock".into(), "/run/x.sock".into()]),
            Path::new("/lib/front/libcuda.so.1"),
            Some(Path::new("/run/gpu.mps/g/pipes")),
        );
        let variables: Vec<_> = command.get_envs().map(|(name, value)| (name, value.unwrap_or_default())).collect();
        let of = |name: &str| {
            let found = variables.iter().find(|(one, _)| *one == name);
            found.map(|(_, value)| value.to_string_lossy().into_owned()).unwrap_or_default()
        };
        assert_eq!(of(SOCKET_VARIABLE), "/run/y.sock:/run/x.sock");
        assert_eq!(list(&["/run/a.cuda".into()]), "/run/a.cuda");
        assert_eq!(of(TENANT_VARIABLE), "a");
        assert_eq!(of(MPS_VARIABLE), "/run/gpu.mps/g/pipes");
        assert!(of("LD_LIBRARY_PATH").starts_with("/lib/front"));
        assert!(of("LD_PRELOAD").starts_with("/lib/front/libcuda.so.1"));
        assert_eq!((command.get_program(), command.get_args().count()), ("python3".as_ref(), 1));
    }
}
