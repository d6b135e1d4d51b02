//! Hands the owners of cards to the next daemon during an upgrade.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;

use cuda_control::{Request, Tenant};
use cuda_status::StatusCell;
use events::Log;
use owner_process::{CardIdentity, Command, HandedOver, HandingOver, SavedOwner, Supervisor};
use owner_settings::{rules, settings};

use super::{Change, CudaCard};
use crate::error::DaemonError;
use config::{CardSpec, Config};
use overrides::Tuning;

/// An owner in the form that one daemon hands to the next.
pub(crate) struct GivenOwner {
    pub model: String,
    pub uuid: String,
    /// Saved state of the owner, as JSON.
    pub owner: String,
    pub descriptors: Vec<OwnedFd>,
}

impl CudaCard {
    /// Stops using the owner. `until` is the deadline. Returns the owner with a sender for the outcome: true if another
    /// daemon has taken over the owner.
    ///
    /// # Errors
    /// Returns an error if the owner is not responding.
    pub fn hand_over(&self, until: Instant) -> Result<(GivenOwner, Sender<bool>), String> {
        let gone = || "its owner does not respond now".to_owned();
        let (request, given, outcome) = HandingOver::new();
        self.commands.send(Command::HandOver(request)).map_err(|_| gone())?;
        locks::may_wait();
        let given = given.recv_timeout(until.saturating_duration_since(Instant::now())).map_err(|_| gone())?;
        let HandedOver { saved, descriptors } = given?;
        let owner = serde_json::to_string(&saved).map_err(|error| error.to_string())?;
        let CardIdentity { model, uuid, .. } = self.identity.clone();
        Ok((GivenOwner { model, uuid, owner, descriptors }, outcome))
    }

    /// Creates a card with the owner that another daemon started. This daemon starts using the owner with
    /// [`Self::begin`]. `names` lists the card's current tenants and VMs.
    ///
    /// # Errors
    /// Returns an error if the owner is incompatible with this configuration.
    pub fn adopted(
        spec: &CardSpec,
        config: &Config,
        events: &Arc<Log>,
        given: GivenOwner,
        names: &[&str],
    ) -> Result<Self, String> {
        let GivenOwner { model, uuid, owner, descriptors } = given;
        let saved: SavedOwner = serde_json::from_str(&owner).map_err(|error| error.to_string())?;
        let settings = settings(spec, &config.cards, &config.daemon.socket_dir);
        saved.check(&settings)?;
        if let Some(name) = saved.tenants().find(|name| !names.contains(name)) {
            return Err(format!(
                "the configuration no longer contains tenant `{name}`; restore it in the file, or remove the tenant first"
            ));
        }
        let (status_cell, stop) = (Arc::new(StatusCell::new(&spec.name)), Arc::default());
        let mut supervisor = Supervisor::new(&spec.name, settings, &status_cell, (&stop, events));
        supervisor.adopt(HandedOver { saved: saved.clone(), descriptors })?;
        let identity = CardIdentity { model, uuid, links: saved.links.clone() };
        Ok(Self::with(spec, identity, supervisor, status_cell, stop, Some(saved)))
    }

    /// Returns the socket on which an owner that another daemon started listens for a tenant. Earlier versions named
    /// the sockets of VMs differently.
    pub(super) fn known_socket(&self, tenant: &str) -> Option<PathBuf> {
        self.known.lock().as_ref()?.socket(tenant).map(Path::to_owned)
    }

    /// Sends this configuration's rules to an owner that another daemon started, unless that owner already has them.
    /// Returns the same errors as [`Change::ask`].
    pub(crate) fn confirm_rules(&self) -> Result<(), DaemonError> {
        let rules = rules(&self.spec, &Tuning::from_spec(&self.spec));
        let request = self.known.lock().as_ref().and_then(|known| known.tuning(rules));
        match request {
            Some(request) => self.change()?.ask(&format!("card `{}`", self.spec.name), request).map(drop),
            None => Ok(()),
        }
    }

    /// Adds a tenant. `turn` is the right to change the card. An owner started by another daemon may already have the
    /// tenant. Returns the right to change the card, and true if the tenant is new.
    ///
    /// # Errors
    /// Returns the same errors as [`Self::promise`].
    pub fn add<'a>(&'a self, turn: Change<'a>, of: &str, tenant: Tenant) -> Result<(Change<'a>, bool), DaemonError> {
        let known = self.known.lock().as_mut().map(|known| known.request(tenant.clone()));
        match known.unwrap_or(Some(Request::Add(tenant))) {
            Some(request) => Ok((self.promise(turn, of, &request)?, matches!(request, Request::Add(_)))),
            None => Ok((turn, false)),
        }
    }
}
