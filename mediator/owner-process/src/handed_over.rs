//! Handover of an owner to the next daemon during an upgrade. The owner's programs are not affected.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};

use cuda_control::{Request, Rules, Settings, Tenant};
use serde::{Deserialize, Serialize};

use super::{Process, Supervisor};

/// Serialized state of an owner (JSON). Its pipes and its process file descriptor are handed over separately.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedOwner {
    settings: Settings,
    tenants: BTreeMap<String, Tenant>,
    /// NVLink connections of the card, as in [`CardIdentity`](super::CardIdentity). Missing in earlier versions.
    #[serde(default)]
    pub links: BTreeMap<String, u32>,
}

/// An owner with its descriptors. An owner that is being restarted has no descriptors.
#[derive(Debug)]
pub struct HandedOver {
    /// The owner's serialized state.
    pub saved: SavedOwner,
    /// The owner's descriptors.
    pub descriptors: Vec<OwnedFd>,
}

/// A request to hand over an owner.
#[derive(Debug)]
pub struct HandingOver {
    reply: Sender<Result<HandedOver, String>>,
    verdict: Receiver<bool>,
}

impl HandingOver {
    /// Creates a request, the receiver for the owner, and the sender for the outcome, which is true if another daemon
    /// has taken over the owner. Without an outcome, the owner stays with this daemon.
    #[must_use]
    pub fn new() -> (Self, Receiver<Result<HandedOver, String>>, Sender<bool>) {
        let ((reply, given), (outcome, verdict)) = (channel(), channel());
        (Self { reply, verdict }, given, outcome)
    }
}

impl SavedOwner {
    /// Checks that an owner started with these settings can continue under the given ones.
    ///
    /// # Errors
    /// Returns an error if the settings differ in a value that cannot be changed while an owner runs.
    pub fn check(&self, settings: &Settings) -> Result<(), String> {
        // An owner that an earlier version started has neither MPS nor gangs until it is restarted.
        let mps = self.settings.mps.as_ref().and(settings.mps.clone());
        let gangs = self.settings.gangs.as_ref().and(settings.gangs.clone());
        // A changed list of other cards takes effect when the owner is restarted.
        let (rules, others) = (self.settings.rules.clone(), self.settings.others.clone());
        let same = Settings { rules, mps, gangs, others, ..settings.clone() } == self.settings;
        let why = "the configuration of its owner has changed; restore it, or restart the daemon";
        if same { Ok(()) } else { Err(why.to_owned()) }
    }

    /// Returns the names of the owner's tenants.
    pub fn tenants(&self) -> impl Iterator<Item = &str> {
        self.tenants.keys().map(String::as_str)
    }

    /// Returns the socket on which the owner listens for a tenant.
    #[must_use]
    pub fn socket(&self, tenant: &str) -> Option<&Path> {
        self.tenants.get(tenant).map(|tenant| tenant.socket.as_path())
    }

    /// Returns a request that sets the card's rules, if they differ from the owner's.
    #[must_use]
    pub fn tuning(&self, rules: Rules) -> Option<Request> {
        (rules != self.settings.rules).then(|| Request::Tune(Box::new(rules)))
    }

    /// Returns a request that adds or changes a tenant, if its settings differ from the owner's. Removes the tenant's
    /// record, because the tenant may be removed and added again later.
    #[must_use]
    pub fn request(&mut self, tenant: Tenant) -> Option<Request> {
        match self.tenants.remove(&tenant.name) {
            Some(known) if known == tenant => None,
            Some(_) => Some(Request::Change(tenant)),
            None => Some(Request::Add(tenant)),
        }
    }
}

impl Supervisor {
    /// Takes over another daemon's owner. No message is sent to the owner before [`Self::run`].
    ///
    /// # Errors
    /// Returns an error if the descriptors do not belong to an owner.
    pub fn adopt(&mut self, HandedOver { saved, descriptors }: HandedOver) -> Result<(), String> {
        let SavedOwner { settings, tenants, links } = saved;
        (self.settings.rules, self.tenants, self.links) = (settings.rules, tenants, links);
        self.lacks_gangs = settings.gangs.is_none();
        if !descriptors.is_empty() {
            let descriptors = descriptors.try_into().map_err(|_| "an owner must have three descriptors".to_owned())?;
            self.process = Some(Process::adopted(descriptors));
        }
        Ok(())
    }

    /// Hands the owner over. Returns true if another daemon has taken over the owner.
    pub(super) fn hand_over(&mut self, HandingOver { reply, verdict }: HandingOver) -> bool {
        let descriptors = self.process.as_ref().map_or_else(|| Ok(Vec::new()), Process::descriptors);
        let saved =
            SavedOwner { settings: self.settings.clone(), tenants: self.tenants.clone(), links: self.links.clone() };
        let handed =
            descriptors.map(|descriptors| HandedOver { saved, descriptors }).map_err(|error| error.to_string());
        if reply.send(handed).is_err() || verdict.recv() != Ok(true) {
            return false;
        }
        self.leave();
        true
    }

    /// Leaves the owner to another daemon. The owner's input stays open there, so the owner is not affected.
    pub fn leave(&mut self) {
        (self.process, self.dying) = (None, None);
    }
}
