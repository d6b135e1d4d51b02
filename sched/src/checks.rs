//! Validity checks shared by several parts of a saved scheduler.

use crate::types::TenantId;
use saved_state::{Invalid, ascend};

/// Maximum value of an event counter. It ensures that sums over many vGPUs fit in 64 bits.
pub(crate) const COUNT_MAX: u64 = 1 << 48;

/// Checks that `keys` and `members` are the same vGPUs in the same order.
pub(crate) fn of_members<'a>(
    keys: impl IntoIterator<Item = &'a TenantId>,
    members: impl IntoIterator<Item = &'a TenantId>,
) -> Result<(), Invalid> {
    Invalid::unless(keys.into_iter().eq(members), || "the vGPUs of a policy differ from those of its lane".into())
}

/// Returns true if `order` is a permutation of `members`, which must be in ascending order.
pub(crate) fn is_order_of<'a>(
    order: impl IntoIterator<Item = &'a TenantId>,
    members: impl IntoIterator<Item = &'a TenantId>,
) -> bool {
    let mut order: Vec<&TenantId> = order.into_iter().collect();
    order.sort();
    ascend(&order) && order.into_iter().eq(members)
}
