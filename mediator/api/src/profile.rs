//! Profiles, as the admin API shows them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use config::ProfileSpec;

/// The answer to `GET /v1/profiles`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ProfileList {
    /// The profiles by name.
    pub profiles: Vec<Profile>,
}

/// A profile, what is made from it, and how much more of it the cards can have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Profile {
    /// Its keys: a `[[profile]]` table.
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
    /// Kind of what is made from it there: `vm` or `tenant`.
    pub of: String,
    /// The virtual machines or tenants of it that are there.
    pub users: Vec<String>,
    /// The number that can be added.
    pub left: u32,
    /// Reason why no more can be.
    pub lacks: String,
}
