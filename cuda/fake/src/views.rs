//! Textures and surfaces. Programs pass their handles to kernels as numbers.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Memory that a texture or surface refers to.
#[derive(Clone, Copy)]
pub struct View {
    /// Address of the first element.
    pub at: u64,
    /// Row pitch in bytes.
    pub row_bytes: u64,
    /// Size of an element in bytes.
    pub element_bytes: u64,
}

/// Views keyed by number, and the last number assigned. Static, because kernels get only the number.
static VIEWS: Mutex<Option<(HashMap<u64, View>, u64)>> = Mutex::new(None);

fn lock() -> MutexGuard<'static, Option<(HashMap<u64, View>, u64)>> {
    VIEWS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a view. Returns its number.
pub fn add(view: View) -> u64 {
    let mut views = lock();
    let (all, last) = views.get_or_insert_default();
    *last += 1;
    all.insert(*last, view);
    *last
}

/// Removes a view. Returns false if no view has this number.
pub fn remove(number: u64) -> bool {
    lock().get_or_insert_default().0.remove(&number).is_some()
}

/// Returns the address and size of an element.
pub fn element(number: u64, x: u64, y: u64) -> Option<(u64, u64)> {
    let View { at, row_bytes, element_bytes } = lock().as_ref()?.0.get(&number).copied()?;
    Some((at + y * row_bytes + x * element_bytes, element_bytes))
}
