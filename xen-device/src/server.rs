//! The server of a virtual machine, which serves each domain with the machine's name, one after another.

use std::io;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use vmm_glue::device::Device;
use vmm_glue::link::{Link, StopHandle};
use vmm_glue::server::ServerError;

use crate::hypervisor::{AttachError, DomainId, Hypervisor};
use crate::options::XenOptions;
use crate::session::{Ended, Session};
use crate::store::{Found, Store};

/// A server that waits for its domain.
#[derive(Debug)]
pub struct XenServer {
    options: XenOptions,
    hypervisor: Box<dyn Hypervisor>,
    store: Box<dyn Store>,
    /// The domain that must not be served again, because it was already served or cannot be served.
    done: Option<DomainId>,
}

impl XenServer {
    /// Creates a server that uses this host's kernel.
    ///
    /// # Errors
    /// Returns an error if this is not domain 0 of a Xen host.
    pub fn open(options: XenOptions) -> Result<Self, AttachError> {
        let hypervisor = crate::kernel::KernelHypervisor::open()?;
        let store = crate::store::XenStore::open().map_err(|error| AttachError::Device {
            path: crate::wire::DEVICE,
            error,
            advice: "xenstored, from the package xen-utils, reports domains",
        })?;
        Ok(Self::with(options, Box::new(hypervisor), Box::new(store)))
    }

    /// Creates a server that uses the given interfaces.
    #[must_use]
    pub fn with(options: XenOptions, hypervisor: Box<dyn Hypervisor>, store: Box<dyn Store>) -> Self {
        Self { options, hypervisor, store, done: None }
    }

    /// Serves the domain whenever it exists, until `stop` is set. `device` must have been created with a clone of
    /// `link`.
    ///
    /// # Errors
    /// Returns an error if the host fails, which guests cannot cause.
    pub fn run(&mut self, link: &Link, device: &mut dyn Device, stop: &StopHandle) -> Result<(), ServerError> {
        while !stop.is_stopped() {
            match self.find().map_err(ServerError::Poll)? {
                Some(found) => self.serve(found, link, device, stop).map_err(ServerError::Poll)?,
                None => self.wait(link, stop)?,
            }
        }
        Ok(())
    }

    /// Returns the domain, if it exists and has been neither served nor rejected yet.
    fn find(&mut self) -> io::Result<Option<Found>> {
        self.store.changed()?;
        if let Some(done) = self.done
            && !self.store.exists(done)?
        {
            self.done = None;
        }
        let found = self.store.find(&self.options.domain)?;
        Ok(found.filter(|found| self.done != Some(found.id)))
    }

    fn serve(&mut self, found: Found, link: &Link, device: &mut dyn Device, stop: &StopHandle) -> io::Result<()> {
        let (domain, name) = (found.id, self.options.domain.to_string());
        self.done = Some(domain);
        // For a domain with a target below its maximum, mapping an unused page would reduce the number of pages that
        // the domain may still use.
        if found.target_kib < found.most_kib {
            let Found { most_kib, target_kib, .. } = found;
            tracing::error!(
                domain,
                name,
                most_kib,
                target_kib,
                "the domain is not served: set its maxmem to its memory"
            );
            return Ok(());
        }
        let slot = self.options.slot;
        let session = match self.hypervisor.attach(domain, slot, link.wake()) {
            Ok(target) => {
                // Drop a request to disconnect the previous domain.
                link.take_disconnect();
                // The virtual CPUs' ports exist from now on, and incoming accesses wait.
                target.enable().and_then(|()| Session::begin(found, Arc::clone(&target), link, device, &self.options))
            }
            Err(error) => {
                tracing::error!(domain, name, error = chain(&error), "the domain is not served");
                return Ok(());
            }
        };
        let mut session = match session {
            Ok(session) => session,
            Err(error) => {
                tracing::error!(domain, name, %error, "the domain is not served");
                return Ok(());
            }
        };
        tracing::info!(domain, name, slot, memory_kib = found.most_kib, "domain connected");
        // The device cannot be saved together with its domain.
        if let Err(error) = self.store.refuse_saves(domain, true) {
            tracing::warn!(domain, name, %error, "cannot make the toolstack refuse to save or migrate the domain");
        }
        let ended = session.run(&mut *self.store, stop);
        session.end();
        if !matches!(ended, Ok(Ended::Gone)) {
            // This fails if the domain has just been destroyed.
            let _ = self.store.refuse_saves(domain, false);
        }
        match ended? {
            Ended::Gone => tracing::info!(domain, name, "domain gone"),
            Ended::Disconnected | Ended::Stopped => tracing::info!(domain, name, "domain disconnected"),
        }
        Ok(())
    }

    fn wait(&mut self, link: &Link, stop: &StopHandle) -> Result<(), ServerError> {
        // Watch events that arrived during a request to xenstore end the wait immediately.
        if self.store.changed().map_err(ServerError::Poll)? {
            return Ok(());
        }
        let input = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds = [input(self.store.events()), input(link.wake().fd()), input(stop.fd())];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(ServerError::Poll(errno.into())),
        }
        let [_, wake, _] = &fds;
        if !wake.revents().is_empty() {
            link.wake().clear();
        }
        Ok(())
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        None => error.to_string(),
        Some(source) => format!("{error}: {}", chain(source)),
    }
}
