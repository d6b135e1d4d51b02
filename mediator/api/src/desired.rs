//! All state that operators can change, as one document.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use config::{CardMemory, TenantSpec, VmSpec};

/// Response to `GET /v1/desired`. Applying it as a [`Desired`] document changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Exported {
    /// Revision of the state, which differs after every change.
    pub revision: String,
    /// Changeable settings of all cards, sorted by name.
    pub card: Vec<CardSettings>,
    /// All virtual machines, sorted by name, as `[[vm]]` tables of the configuration file.
    pub vm: Vec<VmSpec>,
    /// All tenants of CUDA cards, sorted by name, as `[[tenant]]` tables of the configuration file.
    #[serde(default)]
    pub tenant: Vec<TenantSpec>,
}

/// Settings of a card that can be changed at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct CardSettings {
    /// Name of the card.
    pub name: String,
    /// True if the card accepts no new virtual machines or tenants.
    #[serde(default)]
    pub drained: bool,
    /// Memory settings of the card: a `[card.memory]` table.
    pub memory: CardMemory,
    /// Scheduler settings of the card: a `[card.scheduler]` table.
    pub scheduler: sched::Config,
}

/// Body of requests that compare or change the state: tables of a configuration file. Absent objects and keys are
/// neither compared nor changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Desired {
    /// Expected revision. The request is rejected if the state has another revision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// Keys of the `[daemon]` table, which can only be compared, not changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub daemon: Option<Map<String, Value>>,
    /// Tables of cards, each with its `name`.
    pub card: Vec<Map<String, Value>>,
    /// Tables of virtual machines, each with its `name`.
    pub vm: Vec<Map<String, Value>>,
    /// Tables of tenants, each with its `name`.
    pub tenant: Vec<Map<String, Value>>,
}

/// Kind of an object in a desired state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The daemon itself.
    Daemon,
    /// A card.
    Card,
    /// A virtual machine.
    Vm,
    /// A tenant of a CUDA card.
    Tenant,
}

/// Action that changes an object to the desired state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// No action.
    Keep,
    /// The object is added, because it does not exist.
    Create,
    /// Keys of the object are changed, because their values differ.
    Change,
    /// The object is removed, because it exists but is not desired.
    Remove,
}

/// A key whose value differs from the desired one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct KeyChange {
    /// Path of the key, such as `time.weight`.
    pub key: String,
    /// Current value; null if the key is not set.
    pub from: Value,
    /// Desired value.
    pub to: Value,
}

/// Step for one object of a desired state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Step {
    /// Kind of the object.
    pub kind: Kind,
    /// Name of the object; empty for the daemon.
    pub name: String,
    /// Action that was taken or, with `dry_run` and in comparisons, would be taken.
    pub action: Action,
    /// Changed keys.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<KeyChange>,
}

/// Response to `POST /v1/desired/compare`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Comparison {
    /// Revision of the compared state.
    pub revision: String,
    /// Differences from the desired state; empty if there are none.
    pub differences: Vec<Step>,
}

/// Response to `PATCH /v1/desired`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Applied {
    /// Revision of the state after the request.
    pub revision: String,
    /// True for a dry run: nothing was changed, and `steps` lists the actions that would be taken.
    pub dry_run: bool,
    /// One step for each object in the document, in the order of execution.
    pub steps: Vec<Step>,
}
