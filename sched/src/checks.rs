//! Validity checks that several parts of a saved scheduler share.

use crate::types::TenantId;
use saved_state::{Invalid, ascend};

/// Upper bound of event counts, so that sums over many vGPUs fit into 64 bits.
pub(crate) const COUNT_MAX: u64 = 1 << 48;

/// Returns true if each map has exactly the vGPUs in `members` as keys.
pub(crate) fn of_members<'a>(
    keys: impl IntoIterator<Item = &'a TenantId>,
    members: impl IntoIterator<Item = &'a TenantId>,
) -> Result<(), Invalid> {
    Invalid::unless(keys.into_iter().eq(members), || "a policy knows other vGPUs than its lane".into())
}

/// Returns true if `order` contains each of `members` exactly once.
pub(crate) fn is_order_of<'a>(
    order: impl IntoIterator<Item = &'a TenantId>,
    members: impl IntoIterator<Item = &'a TenantId>,
) -> bool {
    let mut order: Vec<&TenantId> = order.into_iter().collect();
    order.sort();
    ascend(&order) && order.into_iter().eq(members)
}
