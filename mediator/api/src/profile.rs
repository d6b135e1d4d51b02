//! Profiles, as the admin API shows them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use config::ProfileSpec;

/// The response to `GET /v1/profiles`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ProfileList {
    /// The profiles by name.
    pub profiles: Vec<Profile>,
}

/// A profile, its present instances, and the capacity of the cards for more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Profile {
    /// Keys of the profile: a `[[profile]]` table.
    #[serde(flatten)]
    pub spec: ProfileSpec,
    /// The cards, in the order of the configuration.
    pub cards: Vec<Capacity>,
}

/// Capacity of a card for a profile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Capacity {
    /// The card.
    pub card: String,
    /// Kind of the instances on this card: `vm` or `tenant`.
    pub of: String,
    /// Number of virtual machines or tenants on the card that were created from the profile.
    pub users: Vec<String>,
    /// Number of instances that can be added.
    pub left: u32,
    /// Reason why no more can be added.
    pub lacks: String,
}
