//! Endpoint of a virtual machine: a socket for a VMM, or a Xen domain.

use std::os::fd::OwnedFd;
use std::path::Path;

use vmm_glue::journal::Remains;
use vmm_glue::memory::MemoryLimits;
use vmm_glue::server::{Server, ServerError, ServerOptions};
use vmm_glue::{Device, Link, ParkError, SavedClients, StopHandle, SuspendedClient};
use xen_device::{DomainName, XenOptions, XenServer};

use config::VmSpec;

use super::error::DaemonError;
use listening::account;
use listening::{Listening, SocketPath, Sockets, folders};

/// An open endpoint that does not serve a client yet.
pub(super) enum Endpoint {
    /// A listening socket, with its path unless the service manager created it. VMMs that connect early wait in its
    /// backlog.
    Socket(Listening),
    /// The Xen domain with this name.
    Domain(DomainName),
}

impl Endpoint {
    /// Opens the endpoint of a virtual machine.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be created, or if its owner is unknown.
    pub fn open(spec: &VmSpec, folder: &Path, sockets: &Sockets) -> Result<Self, DaemonError> {
        if let Some(domain) = &spec.xen_domain {
            let name = domain.parse().map_err(|error| failed(&spec.name, &error))?;
            return Ok(Self::Domain(name));
        }
        let rights = account::socket_options(spec.mode, spec.owner.as_deref(), spec.group.as_deref())?;
        folders::make(&spec.name, &spec.socket_path(folder), folder)?;
        Ok(Self::Socket(sockets.of_vm(&spec.name, &spec.socket_path(folder), &rights)?))
    }

    /// Creates the server of the endpoint. Returns the server with the socket's path.
    ///
    /// # Errors
    /// Returns an error if the host does not run Xen, or if the socket cannot be served; the socket is then removed.
    pub fn serve(
        self,
        vm: &str,
        memory: MemoryLimits,
        sockets: &Sockets,
    ) -> Result<(EndpointServer, Option<SocketPath>), DaemonError> {
        match self {
            Self::Domain(domain) => {
                let options = XenOptions { memory, ..XenOptions::new(domain) };
                let server = XenServer::open(options).map_err(|error| failed(vm, &error))?;
                Ok((EndpointServer::Xen(server), None))
            }
            Self::Socket(Listening { listener, path }) => {
                let options = ServerOptions { memory, ..ServerOptions::default() };
                match Server::from_listener(listener, options) {
                    Ok(server) => Ok((EndpointServer::Socket(server.kept_by(sockets.keeper(vm))), path)),
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

/// Server run by a virtual machine's thread.
pub(super) enum EndpointServer {
    /// Server for a socket.
    Socket(Server),
    /// Server for a Xen domain.
    Xen(XenServer),
}

impl EndpointServer {
    /// Serves until `stop` is set, starting with the suspended clients in `parked`. Returns the suspended clients if
    /// suspension was requested.
    ///
    /// # Errors
    /// Returns an error if the socket or the Xen domain fails.
    pub fn serve(
        &mut self,
        link: &Link,
        device: &mut dyn Device,
        stop: &StopHandle,
        parked: Option<SuspendedClient>,
    ) -> Result<Option<SuspendedClient>, ServerError> {
        match self {
            Self::Socket(server) => server.serve(link, device, stop, parked),
            Self::Xen(server) => server.run(link, device, stop).map(|()| None),
        }
    }

    /// Restores another daemon's clients, and connects their memory and interrupts to `link`.
    ///
    /// # Errors
    /// Returns an error if the endpoint is a Xen domain, if the clients' state is invalid, or if their memory cannot be
    /// mapped.
    pub fn parked(
        &self,
        saved: SavedClients,
        descriptors: Vec<OwnedFd>,
        link: &Link,
    ) -> Result<SuspendedClient, ParkError> {
        match self {
            Self::Socket(server) => server.restored(saved, descriptors, link),
            Self::Xen(_) => Err(ParkError::Stays("domain")),
        }
    }

    /// Restores a killed daemon's client, and connects its memory and interrupts to `link`.
    ///
    /// # Errors
    /// Returns the same errors as [`Self::parked`].
    pub fn revived(&self, remains: Remains, link: &Link) -> Result<SuspendedClient, ParkError> {
        match self {
            Self::Socket(server) => server.revived(remains, link),
            Self::Xen(_) => Err(ParkError::Stays("domain")),
        }
    }

    /// Duplicates the descriptor of the listening socket.
    ///
    /// # Errors
    /// Returns an error if the endpoint has no socket, or if the descriptor cannot be duplicated.
    pub fn listener(&self) -> std::io::Result<OwnedFd> {
        match self {
            Self::Socket(server) => server.listener(),
            Self::Xen(_) => Err(std::io::ErrorKind::Unsupported.into()),
        }
    }

    /// Returns the kind of client that the endpoint waits for.
    pub fn awaits(&self) -> &'static str {
        match self {
            Self::Socket(_) => "a VMM",
            Self::Xen(_) => "a domain",
        }
    }
}
