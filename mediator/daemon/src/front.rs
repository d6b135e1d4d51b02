//! The way to a virtual machine: a socket for a VMM, or a domain of Xen.

use std::os::fd::OwnedFd;
use std::path::Path;

use vmm_glue::journal::Remains;
use vmm_glue::memory::MemoryLimits;
use vmm_glue::server::{Server, ServerError, ServerOptions};
use vmm_glue::xen::{DomainName, XenOptions, XenServer};
use vmm_glue::{Device, Link, ParkError, Parked, SavedClients, StopHandle};

use config::VmSpec;

use super::account;
use super::error::DaemonError;
use listening::{Listening, SocketPath, Sockets, folders};

/// A way to a virtual machine that is open, and serves nobody yet.
pub(super) enum Front {
    /// A socket that listens: a VMM that connects early waits in the backlog. With its path, unless the service manager made it.
    Socket(Listening),
    /// The domain of that name.
    Domain(DomainName),
}

impl Front {
    /// Opens what a virtual machine asks for.
    ///
    /// # Errors
    /// When there can be no such socket, or its owner is unknown.
    pub fn open(spec: &VmSpec, folder: &Path, sockets: &Sockets) -> Result<Self, DaemonError> {
        if let Some(domain) = &spec.xen_domain {
            let name = domain.parse().map_err(|error| failed(&spec.name, &error))?;
            return Ok(Self::Domain(name));
        }
        let rights = account::socket_options(spec.mode, spec.owner.as_deref(), spec.group.as_deref())?;
        folders::make(&spec.name, &spec.socket_path(folder), folder)?;
        Ok(Self::Socket(sockets.of_vm(&spec.name, &spec.socket_path(folder), &rights)?))
    }

    /// Makes the server. Returns it with the socket's path.
    ///
    /// # Errors
    /// When this host has no Xen, or cannot serve a socket; the path is forgotten then.
    pub fn serve(
        self,
        vm: &str,
        memory: MemoryLimits,
        sockets: &Sockets,
    ) -> Result<(FrontServer, Option<SocketPath>), DaemonError> {
        match self {
            Self::Domain(domain) => {
                let options = XenOptions { memory, ..XenOptions::new(domain) };
                let server = XenServer::open(options).map_err(|error| failed(vm, &error))?;
                Ok((FrontServer::Xen(server), None))
            }
            Self::Socket(Listening { listener, path }) => {
                let options = ServerOptions { memory, ..ServerOptions::default() };
                match Server::from_listener(listener, options) {
                    Ok(server) => Ok((FrontServer::Socket(server.kept_by(sockets.keeper(vm))), path)),
                    Err(error) => {
                        if let Some(path) = path {
                            path.forget();
                        }
                        Err(failed(vm, &error))
                    }
                }
            }
        }
    }
}

fn failed(vm: &str, error: &dyn std::fmt::Display) -> DaemonError {
    DaemonError::Failed(format!("VM `{vm}` cannot be added: {error}"))
}

/// The server that a virtual machine's thread runs.
pub(super) enum FrontServer {
    /// Of a socket.
    Socket(Server),
    /// Of a domain.
    Xen(XenServer),
}

impl FrontServer {
    /// Serves until `stop`, going on with clients that were `parked`. Returns them as they are if it is to rest.
    ///
    /// # Errors
    /// When the host fails.
    pub fn serve(
        &mut self,
        link: &Link,
        device: &mut dyn Device,
        stop: &StopHandle,
        parked: Option<Parked>,
    ) -> Result<Option<Parked>, ServerError> {
        match self {
            Self::Socket(server) => server.serve(link, device, stop, parked),
            Self::Xen(server) => server.run(link, device, stop).map(|()| None),
        }
    }

    /// Clients that another daemon has served, with what was behind their link put behind `link`.
    ///
    /// # Errors
    /// When they are none that there can be, or their memory cannot be mapped.
    pub fn parked(&self, saved: SavedClients, descriptors: Vec<OwnedFd>, link: &Link) -> Result<Parked, ParkError> {
        match self {
            Self::Socket(server) => server.restored(saved, descriptors, link),
            Self::Xen(_) => Err(ParkError::Stays("domain")),
        }
    }

    /// The client of a daemon that was killed, with what was behind its link put behind `link`.
    ///
    /// # Errors
    /// As [`Self::parked`].
    pub fn revived(&self, remains: Remains, link: &Link) -> Result<Parked, ParkError> {
        match self {
            Self::Socket(server) => server.revived(remains, link),
            Self::Xen(_) => Err(ParkError::Stays("domain")),
        }
    }

    /// Another descriptor of the listening socket.
    ///
    /// # Errors
    /// When there is none.
    pub fn listener(&self) -> std::io::Result<OwnedFd> {
        match self {
            Self::Socket(server) => server.listener(),
            Self::Xen(_) => Err(std::io::ErrorKind::Unsupported.into()),
        }
    }

    /// Names whom it waits for.
    pub fn awaits(&self) -> &'static str {
        match self {
            Self::Socket(_) => "a VMM",
            Self::Xen(_) => "a domain",
        }
    }
}
