//! All that operators can change, as one document.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use config::{CardMemory, TenantSpec, VmSpec};

/// The response to `GET /v1/desired`. It can be sent back as [`Desired`], and then changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Exported {
    /// Revision of the state. Every change of the state changes it.
    pub revision: String,
    /// The cards by name, with their changeable settings.
    pub card: Vec<CardSettings>,
    /// The virtual machines by name: `[[vm]]` tables of the configuration file.
    pub vm: Vec<VmSpec>,
    /// The tenants of CUDA cards by name: `[[tenant]]` tables of the configuration file.
    #[serde(default)]
    pub tenant: Vec<TenantSpec>,
}

/// Settings of a card that can be changed while the daemon runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct CardSettings {
    /// Name of the card.
    pub name: String,
    /// True if the card accepts no further virtual machines and tenants.
    #[serde(default)]
    pub drained: bool,
    /// Division of the card's memory: a `[card.memory]` table.
    pub memory: CardMemory,
    /// Division of the card's time: a `[card.scheduler]` table.
    pub scheduler: sched::Config,
}

/// The body of requests that compare or change the state: tables of a configuration file. Objects and keys that are
/// absent are not compared, and stay unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Desired {
    /// Required revision: the request is refused if the state has another revision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// Keys of the `[daemon]` table. They cannot be changed, only compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub daemon: Option<Map<String, Value>>,
    /// Tables of cards, each with its `name`.
    pub card: Vec<Map<String, Value>>,
    /// Tables of virtual machines, each with its `name`.
    pub vm: Vec<Map<String, Value>>,
    /// Tables of tenants, each with its `name`.
    pub tenant: Vec<Map<String, Value>>,
}

/// Kind of an object.
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

/// Action that brings an object to the desired state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// No action.
    Keep,
    /// The object does not exist, and is added.
    Create,
    /// Some keys of the object have other values, and are changed.
    Change,
    /// The object exists but is not desired, and is removed.
    Remove,
}

/// A key whose value differs from the desired one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct KeyChange {
    /// Path of the key, such as `time.weight`.
    pub key: String,
    /// Present value; null if the key is not set.
    pub from: Value,
    /// Desired value.
    pub to: Value,
}

/// One object of a desired state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Step {
    /// Kind of the object.
    pub kind: Kind,
    /// Name of the object; empty for the daemon.
    pub name: String,
    /// Action that was done or, with `dry_run` and in comparisons, would be done.
    pub action: Action,
    /// Keys that change.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<KeyChange>,
}

/// The response to `POST /v1/desired/compare`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Comparison {
    /// Revision of the compared state.
    pub revision: String,
    /// Differences from the desired state; empty if there are none.
    pub differences: Vec<Step>,
}

/// The response to `PATCH /v1/desired`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Applied {
    /// Revision after the request.
    pub revision: String,
    /// True for a dry run: nothing was changed, and `steps` lists the actions that would be done.
    pub dry_run: bool,
    /// One step for each object in the document, in the order of execution.
    pub steps: Vec<Step>,
}
