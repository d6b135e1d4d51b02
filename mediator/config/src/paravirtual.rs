//! The `[vm.paravirtual]` table: the paravirtual interface of a guest, and its limits.

use super::check::name_is_good;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A `[vm.paravirtual]` table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Paravirtual {
    /// Offers the paravirtual interface to the guest. Stock drivers do not use it.
    pub offered: bool,
    /// Maximum host memory for page tables that the mediator keeps for the guest, in MiB.
    #[serde(deserialize_with = "crate::size::key")]
    pub tables_mib: u64,
    /// Maximum card memory for shared segments created by the guest, in MiB.
    #[serde(deserialize_with = "crate::size::key")]
    pub segments_mib: u64,
    /// Sharing group. Virtual machines of the same card and group may attach each other's segments if the owners permit
    /// it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

impl Default for Paravirtual {
    fn default() -> Self {
        Self { offered: false, tables_mib: 64, segments_mib: 32, group: None }
    }
}

impl Paravirtual {
    /// Maximum value of `tables_mib` and `segments_mib`.
    pub(crate) const MIB_MAX: u64 = 1024;

    /// Returns the invalid keys, each with its error.
    pub(super) fn check(&self) -> Vec<(&'static str, String)> {
        let mut wrong = Vec::new();
        for (key, mib, least) in
            [("paravirtual.tables_mib", self.tables_mib, 1), ("paravirtual.segments_mib", self.segments_mib, 0)]
        {
            if !(least..=Self::MIB_MAX).contains(&mib) {
                wrong.push((key, format!("{mib} MiB, expected {least} to {}", Self::MIB_MAX)));
            }
        }
        if let Some(Err(what)) = self.group.as_deref().map(name_is_good) {
            wrong.push(("paravirtual.group", what));
        }
        wrong
    }
}
