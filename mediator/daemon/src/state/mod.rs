//! What was changed while the daemon ran, and is still so after its restart.
//!
//! Parts: the differences between the configuration file and what is now (this file), `store` (the file that they are kept
//! in, written so that a kill at any moment leaves the old or the new one), `keeper` (both, for the daemon).
//!
//! Only differences are kept, each with what the file said when it was made. When the daemon starts, a difference applies
//! if the file still says that; where the operator has edited the file since, the file holds and the difference is forgotten.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use config::patch::{self, Difference};
use config::{CardMemory, CardSpec, Config, VmSpec};

mod keeper;
mod store;

#[cfg(test)]
mod tests;

pub use keeper::{Keeper, StateError};
pub use store::{FILE, StoreError};

/// Form of the file. Another one is refused.
const VERSION: u32 = 1;

/// The differences.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    version: u32,
    /// Virtual machines that the file has not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    vms_added: Vec<VmSpec>,
    /// Virtual machines of the file that are no more, as the file had them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    vms_removed: Vec<VmSpec>,
    /// Keys of virtual machines of the file that have other values, by name and path.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    vms_changed: BTreeMap<String, Changes>,
    /// The same of cards.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    cards_changed: BTreeMap<String, Changes>,
}

/// Keys with other values, by path.
type Changes = BTreeMap<String, Change>;

/// What became of a key.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Change {
    /// What the file said; null for nothing.
    file: Value,
    /// What it is.
    now: Value,
}

impl Default for State {
    fn default() -> Self {
        Self {
            version: VERSION,
            vms_added: Vec::new(),
            vms_removed: Vec::new(),
            vms_changed: BTreeMap::new(),
            cards_changed: BTreeMap::new(),
        }
    }
}

/// What can be changed of a card while the daemon runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tuning {
    /// How its time is shared.
    pub scheduler: sched::Config,
    /// How its memory is divided.
    pub memory: CardMemory,
}

impl Tuning {
    /// As a configuration says.
    pub fn of(card: &CardSpec) -> Self {
        Self { scheduler: card.scheduler, memory: card.memory }
    }
}

/// What is now, of what can be changed while the daemon runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Live {
    /// The virtual machines by name.
    pub vms: BTreeMap<String, VmSpec>,
    /// What can be changed of the cards, by their names.
    pub tunings: BTreeMap<String, Tuning>,
}

impl Live {
    /// As a configuration says.
    pub fn of(config: &Config) -> Self {
        Self {
            vms: config.vms.iter().map(|vm| (vm.name.clone(), vm.clone())).collect(),
            tunings: config.cards.iter().map(|card| (card.name.clone(), Tuning::of(card))).collect(),
        }
    }
}

impl State {
    /// The differences between the configuration file and what is now.
    ///
    /// # Errors
    /// When a value cannot be written as JSON.
    pub fn between(file: &Config, now: &Live) -> Result<Self, String> {
        let mut state = Self::default();
        for vm in &file.vms {
            match now.vms.get(&vm.name) {
                None => state.vms_removed.push(vm.clone()),
                Some(now) => insert(&mut state.vms_changed, &vm.name, vm, now)?,
            }
        }
        let added = now.vms.values().filter(|vm| file.vms.iter().all(|other| other.name != vm.name));
        state.vms_added.extend(added.cloned());
        for card in &file.cards {
            if let Some(Tuning { scheduler, memory }) = now.tunings.get(&card.name).copied() {
                let now = CardSpec { scheduler, memory, ..card.clone() };
                insert(&mut state.cards_changed, &card.name, card, &now)?;
            }
        }
        Ok(state)
    }

    /// The configuration file with the differences that still apply, and in words those that do not.
    ///
    /// # Errors
    /// When a key that is kept is none.
    pub fn applied(&self, file: &Config) -> Result<(Config, Vec<String>), String> {
        let (mut config, mut forgotten) = (file.clone(), Vec::new());
        config.vms.clear();
        for vm in &file.vms {
            let name = &vm.name;
            let removed = self.vms_removed.iter().find(|removed| removed.name == *name);
            if removed == Some(vm) {
                continue;
            }
            if removed.is_some() {
                forgotten
                    .push(format!("VM `{name}` was removed, but its table in the configuration file is another now"));
            }
            let changes = self.vms_changed.get(name);
            config.vms.push(changed(&format!("VM `{name}`"), vm, changes, &mut forgotten)?);
        }
        for card in &mut config.cards {
            let changes = self.cards_changed.get(&card.name);
            *card = changed(&format!("card `{}`", card.name), card, changes, &mut forgotten)?;
        }
        for vm in &self.vms_added {
            match file.vms.iter().any(|other| other.name == vm.name) {
                true => forgotten.push(format!("VM `{}` was added, but the configuration file has it now", vm.name)),
                false => config.vms.push(vm.clone()),
            }
        }
        let gone = |kind: &str, name: &String| {
            format!("{kind} `{name}` was changed, but the configuration file has it no more")
        };
        let vms = self.vms_changed.keys().filter(|name| file.vms.iter().all(|vm| vm.name != **name));
        forgotten.extend(vms.map(|name| gone("VM", name)));
        let cards = self.cards_changed.keys().filter(|name| file.cards.iter().all(|card| card.name != **name));
        forgotten.extend(cards.map(|name| gone("card", name)));
        Ok((config, forgotten))
    }
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

/// A table of the file with the changes of keys that the file still has as they were.
fn changed<T: Serialize + serde::de::DeserializeOwned>(
    what: &str,
    said: &T,
    changes: Option<&Changes>,
    forgotten: &mut Vec<String>,
) -> Result<T, String> {
    let table = patch::table(said)?;
    let mut values = BTreeMap::new();
    for (key, Change { file, now }) in changes.into_iter().flatten() {
        // A key that there is not is damage, not an edit.
        patch::with(said, &BTreeMap::from([(key.clone(), now.clone())])).map_err(|error| format!("{what}: {error}"))?;
        let says = patch::value(&table, key);
        if says == *file {
            values.insert(key.clone(), now.clone());
        } else if says != *now {
            forgotten.push(format!(
                "{key} of {what} was changed from {file} to {now}, but the configuration file says {says} now"
            ));
        }
    }
    patch::with(said, &values).map_err(|error| format!("{what}: {error}"))
}
