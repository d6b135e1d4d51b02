//! Programs that are started as a tenant's.
//!
//! Without settings the process becomes the program. With `--memory` or `--weight` it stays, passes signals on, and
//! takes the settings back when the program has ended.

use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, IsTerminal};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use clap::Args;
use rustix::process::{Pid, Signal, kill_process};
use tokio::signal::unix::{SignalKind, signal};

use super::path;
use crate::cdi::{self, LIBRARY};
use crate::client::{self, Client, ClientError};
use crate::values;
use api::{Tenant, TenantPatch};
use cuda_protocol::{SOCKET_VARIABLE, TENANT_VARIABLE};

/// Time that the owner of a card may take to answer.
// TIMEOUT: an owner that ended is started again within a second.
const OWNER_TIMEOUT: Duration = Duration::from_secs(5);
/// Time between two looks at it.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Clone, Debug, Args)]
pub(crate) struct Run {
    /// Name of the tenant
    #[arg(long, value_name = "NAME")]
    tenant: String,
    /// Sets the tenant's quota while the program runs: memory of the card that it may have at most, such as 20G
    #[arg(long, value_name = "SIZE", value_parser = values::mib)]
    memory: Option<u64>,
    /// Sets the tenant's weight for the card's time and memory while the program runs
    #[arg(long, value_name = "WEIGHT")]
    weight: Option<u32>,
    /// Folder with the library `libcuda.so.1` of gpu-mediator
    #[arg(long, value_name = "DIR", env = "GPU_MEDIATOR_CUDA_LIBRARY", default_value = LIBRARY)]
    library: PathBuf,
    /// Loads the library before all others as well, for programs that name NVIDIA's by its path
    #[arg(long)]
    preload: bool,
    /// The program with its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

impl Run {
    /// Becomes the program, or runs it and ends with its exit code; returns only on failure.
    pub(crate) fn run(self, client: &Client) -> Result<String, ClientError> {
        let tenant = self.served(client)?;
        // A program that opens a name that is missing here gets NVIDIA's library, and runs outside its limits.
        for name in cdi::NAMES {
            let path = self.library.join(name);
            if !path.exists() {
                return Err(ClientError::File { path, source: io::ErrorKind::NotFound.into() });
            }
        }
        let library = self.library.join("libcuda.so.1");
        let mut command = self.command(&tenant.socket, &library);
        let patch = self.patch();
        if patch == TenantPatch::default() {
            let source = command.exec();
            return Err(ClientError::File { path: command.get_program().into(), source });
        }
        let limits = Limits::set(client, &self.tenant, patch)?;
        let status =
            supervised(&mut command).map_err(|source| ClientError::File { path: command.get_program().into(), source });
        let restored = limits.restore(client);
        let status = status?;
        if let Err(error) = restored {
            eprintln!("mediatorctl: the limits of tenant {} stay as they were set: {error}", self.tenant);
        }
        // As a shell reports a program that a signal has ended.
        let code = status.code().or_else(|| Some(128 + status.signal()?)).unwrap_or(1);
        std::process::exit(code)
    }

    /// Returns the tenant as soon as its card's owner answers.
    fn served(&self, client: &Client) -> Result<Tenant, ClientError> {
        let deadline = Instant::now() + OWNER_TIMEOUT;
        loop {
            let tenant: Tenant = client.get(&path(&self.tenant))?;
            if tenant.served {
                return Ok(tenant);
            }
            if Instant::now() > deadline {
                let card: api::Card = client.get(&format!("/v1/cards/{}", client::segment(&tenant.card)))?;
                let reason = card.error.unwrap_or_else(|| "its owner does not answer".to_owned());
                return Err(ClientError::NotServed { tenant: tenant.name, card: tenant.card, reason });
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns the settings that hold while the program runs.
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

    fn command(&self, socket: &Path, library: &Path) -> Command {
        let mut command = Command::new(self.program.first().cloned().unwrap_or_default());
        command.args(self.program.iter().skip(1));
        command.env(SOCKET_VARIABLE, socket).env(TENANT_VARIABLE, &self.tenant);
        command.env("LD_LIBRARY_PATH", in_front(self.library.as_os_str().to_owned(), "LD_LIBRARY_PATH"));
        if self.preload {
            command.env("LD_PRELOAD", in_front(library.as_os_str().to_owned(), "LD_PRELOAD"));
        }
        command
    }
}

/// Limits of a tenant that hold while a program runs.
struct Limits {
    tenant: String,
    set: TenantPatch,
    before: TenantPatch,
    /// One program at a time sets limits of a tenant: otherwise the last one would restore another one's.
    _lock: UnixListener,
}

impl Limits {
    fn set(client: &Client, tenant: &str, set: TenantPatch) -> Result<Self, ClientError> {
        let mut hasher = DefaultHasher::new();
        (client.socket(), tenant).hash(&mut hasher);
        let name = format!("gpu-mediator-run-{:016x}", hasher.finish());
        // The kernel releases this name when the process ends, however it ends.
        let lock = SocketAddr::from_abstract_name(name).and_then(|name| UnixListener::bind_addr(&name));
        let lock = lock.map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => ClientError::LimitsTaken(tenant.to_owned()),
            _ => ClientError::Runtime(source),
        })?;
        let now: Tenant = client.get(&path(tenant))?;
        let before = values_of(&now, &set);
        let _: Tenant = client.patch(&path(tenant), &set)?;
        Ok(Self { tenant: tenant.to_owned(), set, before, _lock: lock })
    }

    /// Restores the limits, unless an operator has changed them since.
    fn restore(&self, client: &Client) -> Result<(), ClientError> {
        let now: Tenant = client.get(&path(&self.tenant))?;
        if values_of(&now, &self.set) == self.set {
            let _: Tenant = client.patch(&path(&self.tenant), &self.before)?;
        }
        Ok(())
    }
}

/// Returns the present values of the keys of a patch.
fn values_of(tenant: &Tenant, patch: &TenantPatch) -> TenantPatch {
    let mut values = patch.clone();
    for (key, value) in &mut values.memory {
        *value = match key.as_str() {
            "quota_mib" => tenant.memory.quota_mib.into(),
            _ => tenant.memory.weight.into(),
        };
    }
    for value in values.time.values_mut() {
        *value = tenant.time.weight.into();
    }
    values
}

/// Runs a program to its end, and passes signals on to it.
fn supervised(command: &mut Command) -> io::Result<ExitStatus> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let mut ended = signal(SignalKind::child())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut quit = signal(SignalKind::quit())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut hang_up = signal(SignalKind::hangup())?;
        let mut child = command.spawn()?;
        // A terminal sends these two to the program itself.
        let ours = |signal| if io::stdin().is_terminal() { None } else { Some(signal) };
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            let signal = tokio::select! {
                _ = ended.recv() => None,
                _ = interrupt.recv() => ours(Signal::INT),
                _ = quit.recv() => ours(Signal::QUIT),
                _ = terminate.recv() => Some(Signal::TERM),
                _ = hang_up.recv() => Some(Signal::HUP),
            };
            let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
            if let Some((pid, signal)) = pid.zip(signal) {
                kill_process(pid, signal)?;
            }
        }
    })
}

/// Prepends a value to an environment variable, in the format of the loader's variables.
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
        let command = run.command(Path::new("/run/a.cuda"), Path::new("/lib/front/libcuda.so.1"));
        let variables: Vec<_> = command.get_envs().map(|(name, value)| (name, value.unwrap_or_default())).collect();
        let of = |name: &str| {
            let found = variables.iter().find(|(one, _)| *one == name);
            found.map(|(_, value)| value.to_string_lossy().into_owned()).unwrap_or_default()
        };
        assert_eq!(of(SOCKET_VARIABLE), "/run/a.cuda");
        assert_eq!(of(TENANT_VARIABLE), "a");
        assert!(of("LD_LIBRARY_PATH").starts_with("/lib/front"));
        assert!(of("LD_PRELOAD").starts_with("/lib/front/libcuda.so.1"));
        assert_eq!((command.get_program(), command.get_args().count()), ("python3".as_ref(), 1));
    }
}
