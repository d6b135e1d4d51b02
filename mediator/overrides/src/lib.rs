//! Settings changed at run time that must survive a restart.
//!
//! Modules: the differences between the configuration file and the current settings (this file), `store` (the file that
//! contains them, which is replaced atomically), `override_store` (combines both for the daemon), `revision` (revisions
//! of the state), [`lease`] (values that apply until a process exits).
//!
//! Only differences are stored, each with the value that the file contained at that time. At startup, a difference
//! applies if the file still contains that value. If the operator has edited it since then, the file takes precedence
//! and the difference is dropped.
//!
//! The crate does not change settings; the daemon passes the current settings.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use config::patch::{self, Difference};
use config::{CardMemory, CardSpec, Config, TenantSpec, VmSpec};

pub mod lease;
mod override_store;
mod revision;
mod store;

#[cfg(test)]
mod tests;

pub use override_store::{OverrideStore, StateError};
pub use revision::Revision;
pub use store::{FILE, StoreError};

/// Version of the file format. Other versions are rejected.
const VERSION: u32 = 1;

/// The differences from the configuration file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct State {
    version: u32,
    /// Virtual machines that are not in the file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    vms_added: Vec<VmSpec>,
    /// Virtual machines in the file that were removed, with their settings from the file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    vms_removed: Vec<VmSpec>,
    /// Changed keys of the file's virtual machines, by name and path.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    vms_changed: BTreeMap<String, Changes>,
    /// Tenants that are not in the file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tenants_added: Vec<TenantSpec>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tenants_removed: Vec<TenantSpec>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    tenants_changed: BTreeMap<String, Changes>,
    /// Changed keys of cards, by card name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    cards_changed: BTreeMap<String, Changes>,
}

/// Changed keys, by path.
type Changes = BTreeMap<String, Change>;

/// A change to a key's value.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Change {
    /// Value in the file; null if the file has none.
    file: Value,
    /// The current value.
    now: Value,
}

impl Default for State {
    fn default() -> Self {
        Self {
            version: VERSION,
            vms_added: Vec::new(),
            vms_removed: Vec::new(),
            vms_changed: BTreeMap::new(),
            tenants_added: Vec::new(),
            tenants_removed: Vec::new(),
            tenants_changed: BTreeMap::new(),
            cards_changed: BTreeMap::new(),
        }
    }
}

/// Card settings that can be changed at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Settings of the card's scheduler.
    pub scheduler: sched::Config,
    /// Settings of the card's memory.
    pub memory: CardMemory,
    /// True if the card rejects new virtual machines and tenants.
    pub drained: bool,
}

impl Tuning {
    /// Returns the settings in a card's configuration.
    pub fn from_spec(card: &CardSpec) -> Self {
        Self { scheduler: card.scheduler, memory: card.memory, drained: card.drained }
    }

    /// Returns the card's configuration with these settings applied.
    pub fn on(&self, card: &CardSpec) -> CardSpec {
        let Self { scheduler, memory, drained } = *self;
        CardSpec { scheduler, memory, drained, ..card.clone() }
    }
}

/// All current settings that can be changed at run time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// The virtual machines by name.
    pub vms: BTreeMap<String, VmSpec>,
    /// Settings of the cards, by name.
    pub tunings: BTreeMap<String, Tuning>,
    /// The tenants by name.
    pub tenants: BTreeMap<String, TenantSpec>,
}

impl Live {
    /// Returns the settings in a configuration.
    pub fn from_config(config: &Config) -> Self {
        Self {
            vms: config.vms.iter().map(|vm| (vm.name.clone(), vm.clone())).collect(),
            tunings: config.cards.iter().map(|card| (card.name.clone(), Tuning::from_spec(card))).collect(),
            tenants: config.tenants.iter().map(|tenant| (tenant.name.clone(), tenant.clone())).collect(),
        }
    }
}

impl State {
    /// Returns the differences between the configuration file and the current settings.
    ///
    /// # Errors
    /// Returns an error if a value cannot be represented as JSON.
    pub fn between(file: &Config, now: &Live) -> Result<Self, String> {
        let mut state = Self::default();
        let vms =
            Parts { added: &mut state.vms_added, removed: &mut state.vms_removed, changed: &mut state.vms_changed };
        vms.fill(&file.vms, &now.vms)?;
        let (added, removed) = (&mut state.tenants_added, &mut state.tenants_removed);
        Parts { added, removed, changed: &mut state.tenants_changed }.fill(&file.tenants, &now.tenants)?;
        for card in &file.cards {
            if let Some(tuning) = now.tunings.get(&card.name) {
                insert(&mut state.cards_changed, &card.name, card, &tuning.on(card))?;
            }
        }
        Ok(state)
    }

    /// Applies the overrides to the configuration file. Also returns messages about overrides that no longer apply.
    ///
    /// # Errors
    /// Returns an error if a stored key is unknown.
    pub fn applied(&self, file: &Config) -> Result<(Config, Vec<String>), String> {
        let (mut config, mut forgotten) = (file.clone(), Vec::new());
        let vms = Parts { added: &self.vms_added, removed: &self.vms_removed, changed: &self.vms_changed };
        config.vms = vms.put_on(&file.vms, &mut forgotten)?;
        let (added, removed) = (&self.tenants_added, &self.tenants_removed);
        let tenants = Parts { added, removed, changed: &self.tenants_changed };
        config.tenants = tenants.put_on(&file.tenants, &mut forgotten)?;
        for card in &mut config.cards {
            let changes = self.cards_changed.get(&card.name);
            *card = changed(&format!("card `{}`", card.name), card, changes, &mut forgotten)?;
        }
        let cards = self.cards_changed.keys().filter(|name| file.cards.iter().all(|card| card.name != **name));
        forgotten.extend(cards.map(|name| gone("card", name)));
        Ok((config, forgotten))
    }
}

/// An object that can be added and removed at run time.
trait Named: Clone + PartialEq + Serialize + DeserializeOwned {
    /// Kind of the object, for messages.
    const KIND: &'static str;

    fn name(&self) -> &str;
}

impl Named for VmSpec {
    const KIND: &'static str = "VM";

    fn name(&self) -> &str {
        &self.name
    }
}

impl Named for TenantSpec {
    const KIND: &'static str = "tenant";

    fn name(&self) -> &str {
        &self.name
    }
}

/// The differences for one kind of object.
struct Parts<List, Table> {
    added: List,
    removed: List,
    changed: Table,
}

impl<T: Named> Parts<&mut Vec<T>, &mut BTreeMap<String, Changes>> {
    /// Adds the differences between the file and the current settings.
    fn fill(self, file: &[T], now: &BTreeMap<String, T>) -> Result<(), String> {
        for said in file {
            match now.get(said.name()) {
                None => self.removed.push(said.clone()),
                Some(now) => insert(self.changed, said.name(), said, now)?,
            }
        }
        let added = now.values().filter(|one| file.iter().all(|other| other.name() != one.name()));
        self.added.extend(added.cloned());
        Ok(())
    }
}

impl<T: Named> Parts<&Vec<T>, &BTreeMap<String, Changes>> {
    /// Applies the differences that are still valid to the file's objects. Appends messages about differences that no
    /// longer apply to `forgotten`.
    fn put_on(&self, file: &[T], forgotten: &mut Vec<String>) -> Result<Vec<T>, String> {
        let kind = T::KIND;
        let mut all = Vec::new();
        for said in file {
            let name = said.name();
            let removed = self.removed.iter().find(|removed| removed.name() == name);
            if removed == Some(said) {
                continue;
            }
            if removed.is_some() {
                forgotten
                    .push(format!("{kind} `{name}` was removed, but its table in the configuration file has changed"));
            }
            all.push(changed(&format!("{kind} `{name}`"), said, self.changed.get(name), forgotten)?);
        }
        for one in self.added {
            let name = one.name();
            match file.iter().any(|other| other.name() == name) {
                true => {
                    forgotten.push(format!("{kind} `{name}` was added, but the configuration file now contains it"))
                }
                false => all.push(one.clone()),
            }
        }
        let gone_now = self.changed.keys().filter(|name| file.iter().all(|one| one.name() != **name));
        forgotten.extend(gone_now.map(|name| gone(kind, name)));
        Ok(all)
    }
}

fn gone(kind: &str, name: &str) -> String {
    format!("{kind} `{name}` was changed, but the configuration file no longer contains it")
}

fn insert<T: Serialize>(all: &mut BTreeMap<String, Changes>, name: &str, file: &T, now: &T) -> Result<(), String> {
    let differences = patch::differences(&patch::table(file)?, &patch::table(now)?);
    let change = |Difference { key, from, to }| (key, Change { file: from, now: to });
    let changes: Changes = differences.into_iter().map(change).collect();
    if !changes.is_empty() {
        all.insert(name.to_owned(), changes);
    }
    Ok(())
}

/// Returns a table of the file, after applying the changes whose old values match the file.
fn changed<T: Serialize + serde::de::DeserializeOwned>(
    what: &str,
    said: &T,
    changes: Option<&Changes>,
    forgotten: &mut Vec<String>,
) -> Result<T, String> {
    let table = patch::table(said)?;
    let mut values = BTreeMap::new();
    for (key, Change { file, now }) in changes.into_iter().flatten() {
        // An unknown key indicates corruption, because an operator cannot have added it.
        patch::with(said, &BTreeMap::from([(key.clone(), now.clone())])).map_err(|error| format!("{what}: {error}"))?;
        let says = patch::value(&table, key);
        if says == *file {
            values.insert(key.clone(), now.clone());
        } else if says != *now {
            forgotten.push(format!(
                "{key} of {what} was changed from {file} to {now}, but the configuration file now has {says}"
            ));
        }
    }
    patch::with(said, &values).map_err(|error| format!("{what}: {error}"))
}
