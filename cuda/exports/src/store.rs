//! The context store, where libraries store values for each context.
//!
//! Nearly every runtime call reads the runtime's value for the current context. Therefore, repeated reads by a thread
//! do not acquire a lock or allocate memory: each thread has a small cache, which is invalidated when any value
//! changes. Values change only when a library first uses a context and when a context is destroyed.
//!
//! UNSAFETY: writes through the pointers that libraries pass, and calls their destructors.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::result::{INVALID_HANDLE, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS};
use crate::{code, driver};

/// A library's destructor for a value. Its arguments are the context, the key and the value.
type Destructor = unsafe extern "C" fn(u64, u64, u64);

/// A value for a context.
#[derive(Clone, Copy)]
struct Entry {
    context: u64,
    /// Key of the value. It is unique, because it is an address in the library.
    key: u64,
    value: u64,
    destructor: Option<Destructor>,
}

/// Maximum number of values in a process. Each library has one value per context.
const MAX_VALUES: usize = 4096;

/// All values. Reads that miss the cache search this list. A process typically has about ten values.
static VALUES: Mutex<Vec<Entry>> = Mutex::new(Vec::new());
/// Number of changes so far. Cache entries with an older number are invalid.
static CHANGES: AtomicU64 = AtomicU64::new(1);

/// A value that a thread has read.
#[derive(Clone, Copy)]
struct Cached {
    /// Value of [`CHANGES`] when this value was read.
    changes: u64,
    context: u64,
    key: u64,
    value: u64,
}

/// Number of entries in a thread's cache. Must be a power of two.
const CACHED: usize = 16;

thread_local! {
    static CACHE: [Cell<Cached>; CACHED] =
        const { [const { Cell::new(Cached { changes: 0, context: 0, key: 0, value: 0 }) }; CACHED] };
}

/// Returns the cache index of a value. Mixes the bits of the key, because keys are aligned addresses with equal low
/// bits.
fn place(context: u64, key: u64) -> usize {
    let mixed = (context ^ key.rotate_left(32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed >> 32) as usize % CACHED
}

fn values() -> MutexGuard<'static, Vec<Entry>> {
    VALUES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns `context`, or the current context if `context` is 0.
fn named(context: u64) -> Result<u64, i32> {
    if context == 0 { driver()?.current_context() } else { Ok(context) }
}

/// Slot 0: sets a value for a context. The destructor runs when the context is destroyed.
///
/// # Safety
///
/// `destructor` must be null or a function that accepts the context, the key and the value.
pub unsafe extern "C" fn put(context: u64, key: u64, value: u64, destructor: Option<Destructor>) -> i32 {
    code(insert(context, key, value, destructor))
}

fn insert(context: u64, key: u64, value: u64, destructor: Option<Destructor>) -> Result<(), i32> {
    driver()?.ready()?;
    let entry = Entry { context: named(context)?, key, value, destructor };
    let mut values = values();
    if let Some(known) = values.iter_mut().find(|e| e.context == entry.context && e.key == key) {
        *known = entry;
    } else if values.len() < MAX_VALUES {
        values.push(entry);
    } else {
        return Err(OUT_OF_MEMORY);
    }
    CHANGES.fetch_add(1, Ordering::Release);
    Ok(())
}

/// Slot 1: removes a context's value without calling the destructor.
pub extern "C" fn delete(context: u64, key: u64) -> i32 {
    code(remove(context, key))
}

fn remove(context: u64, key: u64) -> Result<(), i32> {
    driver()?.ready()?;
    let context = named(context)?;
    let mut values = values();
    let place = values.iter().position(|e| e.context == context && e.key == key).ok_or(INVALID_HANDLE)?;
    values.swap_remove(place);
    CHANGES.fetch_add(1, Ordering::Release);
    Ok(())
}

/// Slot 2: reads a context's value. Fails with code 400 if the value does not exist.
///
/// # Safety
///
/// `to` must be null or writable.
pub unsafe extern "C" fn get(to: *mut *mut c_void, context: u64, key: u64) -> i32 {
    if to.is_null() {
        return INVALID_VALUE;
    }
    match find(context, key) {
        Ok(value) => {
            // SAFETY: `to` is not null, so the caller guarantees that it is writable.
            unsafe { to.write(value as *mut c_void) };
            SUCCESS
        }
        Err(error) => error,
    }
}

fn find(context: u64, key: u64) -> Result<u64, i32> {
    let context = named(context)?;
    let changes = CHANGES.load(Ordering::Acquire);
    // This also works in an exiting thread, because the cache has no destructor.
    CACHE.with(|cache| {
        let cached = &cache[place(context, key)];
        let known = cached.get();
        if known.changes == changes && known.context == context && known.key == key {
            return Ok(known.value);
        }
        driver()?.ready()?;
        // The number of changes was read before the value, so a change in between invalidates the cache entry.
        let values = values();
        let entry = values.iter().find(|e| e.context == context && e.key == key).ok_or(INVALID_HANDLE)?;
        cached.set(Cached { changes, context, key, value: entry.value });
        Ok(entry.value)
    })
}

/// Removes all of a context's values and calls their destructors, which may call the store. The guest library calls
/// this function before the context's handle becomes invalid.
pub fn forget(context: u64) {
    let ended: Vec<Entry> = {
        let mut values = values();
        let ended = values.extract_if(.., |e| e.context == context).collect();
        CHANGES.fetch_add(1, Ordering::Release);
        ended
    };
    for Entry { key, value, destructor, .. } in ended {
        if let Some(destructor) = destructor {
            // SAFETY: the caller of `put` guarantees that the function accepts these arguments.
            unsafe { destructor(context, key, value) };
        }
    }
}
