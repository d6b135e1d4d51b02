//! The tables: a word with the table's size in bytes, then functions.
//!
//! UNSAFETY: statics with pointers to functions, which nothing writes.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::c_void;

use crate::refusal::refuse;
use crate::{integrity, runtime, store};

/// Number of tables.
pub const COUNT: usize = 7;
/// Numbers of the tables in this crate: functions of the runtime.
pub const RUNTIME: usize = 0;
/// Buffers for callbacks of tools.
const HOOKS: usize = 1;
/// Data of tools for each thread.
const TOOLS: usize = 2;
/// Values of libraries for each context.
const STORE: usize = 3;
/// The question about the driver.
pub const INTEGRITY: usize = 4;
/// Checks of launches.
const CHECKS: usize = 5;
/// A table that the runtime of CUDA 13.5 needs in order to start, and of which it calls no slot.
const FURTHER: usize = 6;

/// A word of a table.
#[derive(Clone, Copy)]
#[repr(C)]
union Word {
    bytes: usize,
    function: *const c_void,
}

/// A table.
struct Table<const WORDS: usize>([Word; WORDS]);

// SAFETY: a table contains numbers and addresses of functions, and is never written.
unsafe impl<const WORDS: usize> Sync for Table<WORDS> {}

/// A word with a function, or with the refusal of its slot.
macro_rules! word {
    ($table:ident, $slot:literal) => {
        Word { function: refuse::<$table, $slot> as *const c_void }
    };
    ($table:ident, $slot:literal, $function:path) => {
        Word { function: $function as *const c_void }
    };
}

/// A table with its size, of the slots from 1.
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
static TOOLS_TABLE: Table<4> = sized!(TOOLS: 1, 2, 3);
/// This table has no size, and starts with a function.
static STORE_TABLE: Table<4> =
    Table([word!(STORE, 0, store::put), word!(STORE, 1, store::delete), word!(STORE, 2, store::get), word!(STORE, 3)]);
static INTEGRITY_TABLE: Table<3> = sized!(INTEGRITY: 1 = integrity::answer, 2);
static CHECKS_TABLE: Table<4> = sized!(CHECKS: 1, 2 = runtime::active_checks, 3 = runtime::needed_checks);
static FURTHER_TABLE: Table<16> = sized!(FURTHER: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);

/// The UUID of each table.
const NAMES: [(&str, u128); COUNT] = [
    ("6BD5FB6C-5BF4-E74A-8987-D93912FD9DF9", 0x6BD5_FB6C_5BF4_E74A_8987_D939_12FD_9DF9),
    ("A094798C-2E74-2E74-93F2-0800200C0A66", 0xA094_798C_2E74_2E74_93F2_0800_200C_0A66),
    ("42D85A81-23F6-CB47-8298-F6E78A3AECDC", 0x42D8_5A81_23F6_CB47_8298_F6E7_8A3A_ECDC),
    ("C693336E-1121-DF11-A8C3-68F355D89593", 0xC693_336E_1121_DF11_A8C3_68F3_55D8_9593),
    ("D4082055-BDE6-704B-8D34-BA123C66E1F2", 0xD408_2055_BDE6_704B_8D34_BA12_3C66_E1F2),
    ("263E8860-7CD2-6143-92F6-BBD5006DFA7E", 0x263E_8860_7CD2_6143_92F6_BBD5_006D_FA7E),
    ("21318C60-9714-3248-8CA6-41FF7324C8F2", 0x2131_8C60_9714_3248_8CA6_41FF_7324_C8F2),
];

/// Returns the table of a UUID, as `cuGetExportTable` does; `None` for unknown ones, for which it fails with 500.
///
/// One UUID must stay unknown: with the table F8CFF951-2146-8B4E-B9E2-FB469E7C0DD9 the runtime would skip its start.
pub fn table(uuid: &[u8; 16]) -> Option<*const c_void> {
    let number = u128::from_be_bytes(*uuid);
    let index = NAMES.iter().position(|(_, known)| *known == number)?;
    Some(pointer(index))
}

/// The UUID of a table as text.
pub fn name(table: usize) -> &'static str {
    NAMES.get(table).map_or("unknown", |(name, _)| name)
}

/// The address of a table.
pub fn address(table: usize) -> u64 {
    pointer(table) as u64
}

fn pointer(table: usize) -> *const c_void {
    match table {
        RUNTIME => RUNTIME_TABLE.0.as_ptr().cast(),
        HOOKS => HOOKS_TABLE.0.as_ptr().cast(),
        TOOLS => TOOLS_TABLE.0.as_ptr().cast(),
        STORE => STORE_TABLE.0.as_ptr().cast(),
        INTEGRITY => INTEGRITY_TABLE.0.as_ptr().cast(),
        CHECKS => CHECKS_TABLE.0.as_ptr().cast(),
        FURTHER => FURTHER_TABLE.0.as_ptr().cast(),
        _ => std::ptr::null(),
    }
}
