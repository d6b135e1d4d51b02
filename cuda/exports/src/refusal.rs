//! Slots of unknown meaning.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::result::NOT_SUPPORTED;
use crate::{driver, uuids};

/// For each table, a bit mask of the slots whose first call has been reported.
static REPORTED: [AtomicU64; uuids::COUNT] = [const { AtomicU64::new(0) }; uuids::COUNT];

/// Fails with "not supported" regardless of the arguments. Reports the first call to the slot.
///
/// Undeclared arguments are harmless, because the caller removes them in this calling convention.
pub extern "C" fn refuse<const TABLE: usize, const SLOT: usize>() -> i32 {
    let bit = 1 << (SLOT % 64);
    let is_first = REPORTED.get(TABLE).is_some_and(|all| all.fetch_or(bit, Ordering::Relaxed) & bit == 0);
    if is_first && let Ok(driver) = driver() {
        driver.refused(uuids::name(TABLE), SLOT);
    }
    NOT_SUPPORTED
}
