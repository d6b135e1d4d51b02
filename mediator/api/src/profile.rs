//! Profiles in the admin API.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use config::ProfileSpec;

/// Response to `GET /v1/profiles`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ProfileList {
    /// All profiles, sorted by name.
    pub profiles: Vec<Profile>,
}

/// Profile, with its instances and the remaining capacity of each card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Profile {
    /// Keys of the profile: a `[[profile]]` table.
    #[serde(flatten)]
    pub spec: ProfileSpec,
    /// Capacity of each card, in the order of the configuration.
    pub cards: Vec<Capacity>,
}

/// Capacity of a card for a profile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Capacity {
    /// Name of the card.
    pub card: String,
    /// Kind of instances on this card: `vm` or `tenant`.
    pub of: String,
    /// Names of the virtual machines or tenants on the card that were created from the profile.
    pub users: Vec<String>,
    /// Number of further instances that fit.
    pub left: u32,
    /// Reason why no more instances fit.
    pub lacks: String,
}
