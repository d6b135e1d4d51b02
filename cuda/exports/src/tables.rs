//! The tables. Each consists of a word with the table's size in bytes, followed by functions.
//!
//! UNSAFETY: shares statics with function pointers between threads; they are never written.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::integrity::{self, Addresses};
use crate::refusal::refuse;
use crate::uuids::{CHECKS, HOOKS, IDENTITIES, INTEGRITY, NAMES, RUNTIME, STORE, TOOLS};
use crate::{runtime, store};

/// A word of a table.
#[derive(Clone, Copy)]
#[repr(C)]
union Word {
    bytes: usize,
    function: *const c_void,
}

/// An export table of `WORDS` words.
struct Table<const WORDS: usize>([Word; WORDS]);

// SAFETY: a table contains numbers and function pointers, and is never written.
unsafe impl<const WORDS: usize> Sync for Table<WORDS> {}

/// Expands to a word with a function, or with a function that rejects calls to its slot.
macro_rules! word {
    ($table:ident, $slot:literal) => {
        Word { function: refuse::<$table, $slot> as *const c_void }
    };
    ($table:ident, $slot:literal, $function:path) => {
        Word { function: $function as *const c_void }
    };
}

/// Expands to a table: its size, then the slots from 1 on.
macro_rules! sized {
    ($table:ident: $($slot:literal $(= $function:path)?),*) => {
        Table([
            Word { bytes: size_of::<Word>() * [0, $($slot),*].len() },
            $(word!($table, $slot $(, $function)?)),*
        ])
    };
}

static RUNTIME_TABLE: Table<13> = sized!(RUNTIME:
    1 = runtime::load_module_silently, 2 = runtime::primary_context, 3, 4, 5, 6 = runtime::load_module,
    7 = runtime::end, 8, 9, 10, 11, 12 = runtime::load_compilers);
static HOOKS_TABLE: Table<7> = sized!(HOOKS: 1, 2 = runtime::hooks, 3, 4, 5, 6 = runtime::further_hooks);
static TOOLS_TABLE: Table<3> = sized!(TOOLS: 1, 2 = runtime::current_context);
/// The context store's table. It has no size word, and begins with a function.
static STORE_TABLE: Table<4> =
    Table([word!(STORE, 0, store::put), word!(STORE, 1, store::delete), word!(STORE, 2, store::get), word!(STORE, 3)]);
static INTEGRITY_TABLE: Table<3> = sized!(INTEGRITY: 1 = answer, 2);
static CHECKS_TABLE: Table<4> = sized!(CHECKS: 1, 2 = runtime::active_checks, 3 = runtime::needed_checks);
static IDENTITIES_TABLE: Table<16> =
    sized!(IDENTITIES: 1, 2, 3, 4 = runtime::context_id, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);

/// Returns the table with the given UUID, or `None` for an unknown UUID. In this case, `cuGetExportTable` fails with
/// code 500.
///
/// The UUID F8CFF951-2146-8B4E-B9E2-FB469E7C0DD9 must remain unknown, because the runtime skips its initialization if
/// this table exists.
pub fn table(uuid: &[u8; 16]) -> Option<*const c_void> {
    let number = u128::from_be_bytes(*uuid);
    let index = NAMES.iter().position(|(_, known)| *known == number)?;
    Some(pointer(index))
}

/// Slot 1 of the integrity table: writes the result for `version` and the time `seconds`.
///
/// # Safety
///
/// `to` must be null or point to 16 writable bytes.
unsafe extern "C" fn answer(version: u32, seconds: u64, to: *mut [u8; 16]) -> i32 {
    let addresses = Addresses {
        runtime_table: match DRIVERS_RUNTIME_TABLE.load(Ordering::Relaxed) {
            0 => pointer(RUNTIME) as u64,
            address => address,
        },
        own_table: pointer(INTEGRITY) as u64,
        function: answer as *const () as u64,
    };
    // SAFETY: guaranteed by the caller.
    unsafe { runtime::put(to, integrity::answer(version, seconds, addresses)) }
}

/// Address of the driver's table of the runtime's functions, or 0 if the runtime uses the table of this crate. Static,
/// because the runtime defines the arguments of `answer`.
static DRIVERS_RUNTIME_TABLE: AtomicU64 = AtomicU64::new(0);

/// Returns the table of the integrity query for a program that has the driver's own table of the runtime's functions.
pub fn integrity_table_beside(runtime_table: *const c_void) -> *const c_void {
    DRIVERS_RUNTIME_TABLE.store(runtime_table as u64, Ordering::Relaxed);
    pointer(INTEGRITY)
}

fn pointer(table: usize) -> *const c_void {
    match table {
        RUNTIME => RUNTIME_TABLE.0.as_ptr().cast(),
        HOOKS => HOOKS_TABLE.0.as_ptr().cast(),
        TOOLS => TOOLS_TABLE.0.as_ptr().cast(),
        STORE => STORE_TABLE.0.as_ptr().cast(),
        INTEGRITY => INTEGRITY_TABLE.0.as_ptr().cast(),
        CHECKS => CHECKS_TABLE.0.as_ptr().cast(),
        IDENTITIES => IDENTITIES_TABLE.0.as_ptr().cast(),
        _ => std::ptr::null(),
    }
}
