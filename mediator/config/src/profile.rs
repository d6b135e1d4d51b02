//! Named profiles, known as vGPU types elsewhere. A `[[vm]]` or `[[tenant]]` table that names a profile inherits the
//! profile's keys, except for those that it sets itself.
//!
//! A profile is merged into a table before the table is parsed, so an added object has all its keys and does not use
//! the profile again. Changes to a profile apply only to objects created afterwards.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::check::{Key, Mistake};
use super::patch::table;
use super::{CardKind, CardSpec, Config, DaemonSpec, TenantSpec, VmMemory, VmSpec, check};

/// Maximum number of profiles, which bounds the size of status responses.
pub(crate) const MAX_PROFILES: usize = 64;
/// Key of a `[[vm]]` or `[[tenant]]` table that names its profile.
const KEY: &str = "profile";

/// A `[[profile]]` table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProfileSpec {
    /// Name of the profile.
    pub name: String,
    /// Memory that a guest or a tenant's programs see, in MiB.
    #[serde(deserialize_with = "crate::size::key")]
    pub vram_mib: u64,
    /// Weight for the card's time and, unless `memory.weight` is set, for the card's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Latency class. Among the virtual machines and tenants that are due, the better class runs first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<sched::LatencyClass>,
    /// Additional limits on card memory.
    #[serde(default, skip_serializing_if = "VmMemory::is_silent")]
    pub memory: VmMemory,
    /// Additional limits on card time.
    #[serde(default, skip_serializing_if = "ProfileTime::is_silent")]
    pub time: ProfileTime,
    /// Maximum number of channels of a guest; ignored for tenants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<u32>,
    /// Time that a guest's channel may occupy an engine without progress, in milliseconds; ignored for tenants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hang_limit_ms: Option<u64>,
}

/// A `[profile.time]` table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ProfileTime {
    /// Guaranteed share of the time, in permille.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guarantee_permille: Option<u32>,
    /// Maximum share of the time, in permille.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cap_permille: Option<u32>,
    /// Time limit of one submission in milliseconds; 0 means no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_run_ms: Option<u64>,
    /// Share of the copy engines, if it differs from the share of compute; ignored for tenants.
    #[serde(skip_serializing_if = "sched::CopyShare::is_silent")]
    pub copies: sched::CopyShare,
}

impl ProfileTime {
    fn is_silent(&self) -> bool {
        *self == Self::default()
    }
}

/// Kind of object created from a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    /// A virtual machine.
    Vm,
    /// A tenant of a CUDA card.
    Tenant,
}

impl ProfileSpec {
    /// Returns the keys that the profile adds to a table of this kind.
    fn keys(&self, of: Of) -> Result<Map<String, Value>, String> {
        let (mut memory, mut time) = (self.memory.clone(), self.time);
        memory.weight = memory.weight.or(self.weight);
        let mut keys = Map::new();
        keys.insert("vram_mib".to_owned(), self.vram_mib.into());
        if of == Of::Vm {
            keys.extend(self.channels.map(|channels| ("channels".to_owned(), channels.into())));
            keys.extend(self.hang_limit_ms.map(|limit| ("hang_limit_ms".to_owned(), limit.into())));
        } else {
            // Tenants do not lend RAM, and have one share of all engines.
            memory.ram = super::RamSpec::default();
            time.copies = sched::CopyShare::AS_COMPUTE;
        }
        let mut time = table(&time)?;
        time.extend(self.weight.map(|weight| ("weight".to_owned(), weight.into())));
        if let Some(class) = self.class {
            time.insert("class".to_owned(), serde_json::to_value(class).map_err(|error| error.to_string())?);
        }
        keys.insert("memory".to_owned(), table(&memory)?.into());
        keys.insert("time".to_owned(), time.into());
        Ok(keys)
    }

    /// Creates a virtual machine on a card from the profile. Returns `None` if the profile's keys are invalid.
    #[must_use]
    pub fn vm(&self, name: &str, card: &str) -> Option<VmSpec> {
        let keys = [("name", name), ("card", card), (KEY, &self.name)];
        let keys = keys.into_iter().map(|(key, value)| (key.to_owned(), value.into())).collect();
        VmSpec::from_table(&expanded(&keys, std::slice::from_ref(self), Of::Vm).ok()?).ok()
    }

    /// Creates a tenant on a card from the profile. Returns `None` if the profile's keys are invalid.
    #[must_use]
    pub fn tenant(&self, name: &str, card: &str) -> Option<TenantSpec> {
        let keys = [("name", name), ("card", card), (KEY, &self.name)];
        let keys = keys.into_iter().map(|(key, value)| (key.to_owned(), value.into())).collect();
        TenantSpec::from_table(&expanded(&keys, std::slice::from_ref(self), Of::Tenant).ok()?).ok()
    }

    /// Returns the reason why one more instance of the profile does not fit on a card with `vms` and `tenants`; `None`
    /// if it fits.
    #[must_use]
    pub fn lacks(
        &self,
        daemon: &DaemonSpec,
        card: &CardSpec,
        vms: &[VmSpec],
        tenants: &[TenantSpec],
    ) -> Option<String> {
        let name = "0".repeat(check::MAX_NAME);
        let cards = std::slice::from_ref(card);
        let refusals = if card.kind == CardKind::Cuda {
            let others: Vec<&TenantSpec> = tenants.iter().collect();
            if others.len() >= check::MAX_TENANTS {
                return Some(format!("one daemon serves at most {} tenants", check::MAX_TENANTS));
            }
            self.tenant(&name, &card.name).map(|tenant| check::tenant(&tenant, daemon, cards, &[], &others))
        } else {
            let others: Vec<&VmSpec> = vms.iter().collect();
            if others.len() >= check::MAX_VMS {
                return Some(format!("one daemon serves at most {} VMs", check::MAX_VMS));
            }
            self.vm(&name, &card.name).map(|vm| check::vm(&vm, daemon, cards, &others))
        };
        let Some(refusals) = refusals else { return Some("its keys are invalid".to_owned()) };
        // Ignore refusals of the name and the socket, which do not depend on the profile.
        let refusal = refusals.into_iter().find(|refusal| !["name", "socket"].contains(&refusal.field));
        refusal.map(|refusal| format!("{}: {}", refusal.field, refusal.what))
    }

    /// Returns the number of further instances of the profile that fit on a card, and the reason why no more fit. The
    /// number is at most the number of virtual machines or tenants that a daemon supports.
    #[must_use]
    pub fn room(&self, daemon: &DaemonSpec, card: &CardSpec, vms: &[VmSpec], tenants: &[TenantSpec]) -> (u32, String) {
        let (mut vms, mut tenants) = (vms.to_vec(), tenants.to_vec());
        let mut left = 0;
        loop {
            let drained = crate::place::drained(card).map(|refusal| format!("{}: {}", refusal.field, refusal.what));
            if let Some(lacks) = drained.or_else(|| self.lacks(daemon, card, &vms, &tenants)) {
                return (left, lacks);
            }
            // Operators cannot use these names, because they contain a space.
            let name = format!("further {left}");
            match card.kind {
                CardKind::Cuda => tenants.extend(self.tenant(&name, &card.name)),
                CardKind::Simgpu | CardKind::Vfio => vms.extend(self.vm(&name, &card.name)),
            }
            left += 1;
        }
    }
}

/// Returns a table extended with the keys of its profile, if it names one. The table's own keys take precedence.
///
/// # Errors
/// Returns an error if no profile has this name, or if the name is not a string.
pub fn expanded(table: &Map<String, Value>, profiles: &[ProfileSpec], of: Of) -> Result<Map<String, Value>, String> {
    let Some(name) = table.get(KEY).filter(|name| !name.is_null()) else { return Ok(table.clone()) };
    let name = name.as_str().ok_or_else(|| format!("profile: {name}, expected the name of a profile"))?;
    let Some(profile) = profiles.iter().find(|profile| profile.name == name) else {
        let known: Vec<_> = profiles.iter().map(|profile| format!("`{}`", profile.name)).collect();
        let known = if known.is_empty() { "a [[profile]] table first".to_owned() } else { known.join(" or ") };
        let name: String = name.chars().take(check::MAX_NAME).collect();
        return Err(format!("profile: there is no profile `{name}`, expected {known}"));
    };
    let mut whole = profile.keys(of)?;
    merge(&mut whole, table);
    Ok(whole)
}

/// Merges `over` into `under`, recursively. `over` takes precedence, but its nulls do not replace values.
fn merge(under: &mut Map<String, Value>, over: &Map<String, Value>) {
    for (key, value) in over {
        match (under.get_mut(key), value) {
            (Some(Value::Object(under)), Value::Object(over)) => merge(under, over),
            (Some(_), Value::Null) => {}
            _ => {
                under.insert(key.clone(), value.clone());
            }
        }
    }
}

impl Config {
    /// Merges profiles into the tables that name them, and assigns cards to virtual machines without a card.
    ///
    /// Returns an error for each table that cannot be parsed. Such a table is left unchanged.
    pub(super) fn with_profiles(mut self, text: &str) -> (Self, Vec<Mistake>) {
        let mut mistakes = Vec::new();
        let tables: Map<String, Value> = toml::from_str(text).unwrap_or_default();
        let named = |kind: &str, index: usize| {
            let table = tables.get(kind)?.get(index)?.as_object()?;
            table.contains_key(KEY).then_some(table)
        };
        for (index, vm) in self.vms.iter_mut().enumerate() {
            if let Some(table) = named("vm", index) {
                let made = expanded(table, &self.profiles, Of::Vm).and_then(|table| VmSpec::from_table(&table));
                match made {
                    Ok(made) => *vm = made,
                    Err(what) => mistakes.push(unread("vm", index, what)),
                }
            }
        }
        for (index, tenant) in self.tenants.iter_mut().enumerate() {
            if let Some(table) = named("tenant", index) {
                let made = expanded(table, &self.profiles, Of::Tenant).and_then(|table| TenantSpec::from_table(&table));
                match made {
                    Ok(made) => *tenant = made,
                    Err(what) => mistakes.push(unread("tenant", index, what)),
                }
            }
        }
        for index in 0..self.vms.len() {
            let (before, rest) = self.vms.split_at_mut(index);
            let others: Vec<&VmSpec> = before.iter().collect();
            if let Some(vm) = rest.first_mut() {
                *vm = vm.clone().placed(&self.daemon, &self.cards, &others);
            }
        }
        (self, mistakes)
    }
}

/// Returns the error for a table that cannot be parsed with its profile. The text names the key, unless the key is
/// `profile`.
fn unread(table: &'static str, index: usize, what: String) -> Mistake {
    let (field, what) = match what.strip_prefix("profile: ") {
        Some(what) => (KEY, what.to_owned()),
        None => ("", what),
    };
    Mistake { key: Key { table, index: Some(index), field }, what }
}

/// Returns all errors in a configuration's profiles.
pub(super) fn mistakes(config: &Config) -> Vec<Mistake> {
    let mut mistakes = Vec::new();
    if config.profiles.len() > MAX_PROFILES {
        let key = Key { table: "profile", index: Some(MAX_PROFILES), field: "" };
        mistakes.push(Mistake {
            key,
            what: format!("{} profiles, expected at most {MAX_PROFILES}", config.profiles.len()),
        });
    }
    for (index, profile) in config.profiles.iter().enumerate().take(MAX_PROFILES) {
        let mut say = |field, what| {
            mistakes.push(Mistake { key: Key { table: "profile", index: Some(index), field }, what });
        };
        if let Err(what) = check::name_is_good(&profile.name) {
            say("name", what);
        }
        if let Some(first) = config.profiles[..index].iter().position(|other| other.name == profile.name) {
            say("name", format!("`{}` is also the name of profile[{first}], expected another", profile.name));
        }
        let lacks = |card: &CardSpec| {
            profile.lacks(&config.daemon, card, &[], &[]).map(|what| format!("`{}` ({what})", card.name))
        };
        let against: Vec<_> = config.cards.iter().map_while(lacks).collect();
        if !config.cards.is_empty() && against.len() == config.cards.len() {
            say("", format!("no card can run it, expected a profile that fits a card: {}", against.join(", ")));
        }
    }
    mistakes
}

#[cfg(test)]
mod tests;
