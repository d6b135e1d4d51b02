//! All that operators can change, as one document.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use config::{CardMemory, TenantSpec, VmSpec};

/// The answer to `GET /v1/desired`. It can be sent back as [`Desired`], and then changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Exported {
    /// Another one after each change, of whatever kind.
    pub revision: String,
    /// The cards by name, with what can be changed.
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
    /// Its name.
    pub name: String,
    /// It takes no further virtual machine or tenant.
    #[serde(default)]
    pub drained: bool,
    /// Division of its memory: a `[card.memory]` table.
    pub memory: CardMemory,
    /// Division of its time: a `[card.scheduler]` table.
    pub scheduler: sched::Config,
}

/// The body of requests that compare or change: the tables of a configuration file, as far as they are to be looked at.
/// What it does not name stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Desired {
    /// The revision that it was made from: it is refused if there is another by now.
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

/// Action by which an object becomes as desired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Nothing.
    Keep,
    /// It is not there.
    Create,
    /// Some keys have other values.
    Change,
    /// It is there, but not desired.
    Remove,
}

/// A key that has, or gets, another value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct KeyChange {
    /// Its path, such as `time.weight`.
    pub key: String,
    /// Its value; null for none.
    pub from: Value,
    /// The one desired.
    pub to: Value,
}

/// One thing of a desired state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Step {
    /// Kind of the object.
    pub kind: Kind,
    /// Its name; empty for the daemon.
    pub name: String,
    /// Action that is, was or is to be done.
    pub action: Action,
    /// The keys that change.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<KeyChange>,
}

/// The answer to `POST /v1/desired/compare`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Comparison {
    /// The revision that was compared.
    pub revision: String,
    /// Differences from what is desired; empty without any.
    pub differences: Vec<Step>,
}

/// The answer to `PATCH /v1/desired`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Applied {
    /// The revision now.
    pub revision: String,
    /// Set when nothing was changed: the answer says what would be.
    pub dry_run: bool,
    /// All that the document names, in the order in which it is done.
    pub steps: Vec<Step>,
}
