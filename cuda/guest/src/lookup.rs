//! Finds functions by name, and tables by UUID.
//!
//! UNSAFETY: reads and writes through the pointers that the program passes.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

use crate::devices::driver_version;
use crate::frame::{Frame, Handler};
use crate::result::{INVALID_VALUE, NOT_FOUND, SUCCESS};

pub const HANDLERS: &[(&str, Handler)] =
    &[("cuGetProcAddress", get_first), ("cuGetProcAddress_v2", get_second), ("cuGetExportTable", export_table)];

/// A family of functions: its name, and the version, kind and symbol of each form.
pub type Family = (&'static str, &'static [(u32, bool, usize)]);

/// The tables that the build generates.
#[derive(Clone, Copy, Debug)]
pub struct Tables {
    /// Exported functions in the order of symbols.
    pub entries: &'static [unsafe extern "C" fn()],
    /// Name, index of the call or -1, and true if the symbol is a per-thread variant.
    pub symbols: &'static [(&'static str, i32, bool)],
    /// Families in the order of their names.
    pub families: &'static [Family],
}

/// This value is static, because it is installed before the first call.
static TABLES: OnceLock<Tables> = OnceLock::new();

/// Sets the tables.
pub fn install(tables: Tables) {
    let _ = TABLES.set(tables);
}

/// Flag of the call: the returned functions use the per-thread default stream.
const PER_THREAD: u64 = 1 << 1;

/// Returns the symbol for a call with this name, version and flags.
fn symbol(name: &str, version: u32, per_thread: bool) -> Result<usize, u32> {
    /// `CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND` and `.._VERSION_NOT_SUFFICIENT`.
    const MISSING: u32 = 1;
    const TOO_NEW: u32 = 2;
    let tables = TABLES.get().ok_or(MISSING)?;
    let at = tables.families.binary_search_by(|(family, _)| (*family).cmp(name)).map_err(|_| MISSING)?;
    let forms = tables.families.get(at).map(|(_, forms)| *forms).unwrap_or_default();
    let newest = |kind: bool| forms.iter().rfind(|form| form.1 == kind && form.0 <= version).map(|form| form.2);
    let found = per_thread.then(|| newest(true)).flatten().or_else(|| newest(false)).ok_or(TOO_NEW)?;
    // Functions that guests do not have are reported as missing, so that runtimes do without them.
    match tables.symbols.get(found) {
        Some((_, index, _)) if *index >= 0 => Ok(found),
        _ => Err(MISSING),
    }
}

fn get(frame: &Frame, per_thread: bool, status: Option<usize>) -> i32 {
    let (name, place) = (frame.arg(0) as *const c_char, frame.arg(1) as *mut *mut c_void);
    if name.is_null() || place.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the program passes a valid name.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    // The host's driver may be older than the program.
    let version = frame.int(2).min(driver_version().unwrap_or(i32::MAX).cast_unsigned());
    let found = symbol(&name, version, per_thread);
    if let Some(index) = status {
        frame.put_optional(index, found.err().unwrap_or(0));
    }
    match found.ok().and_then(|found| TABLES.get()?.entries.get(found)) {
        Some(entry) => frame.put(1, *entry as *mut c_void),
        None => {
            frame.put(1, std::ptr::null_mut::<c_void>());
            NOT_FOUND
        }
    }
}

fn get_first(frame: &Frame) -> i32 {
    get(frame, frame.per_thread || frame.arg(3) & PER_THREAD != 0, None)
}

fn get_second(frame: &Frame) -> i32 {
    get(frame, frame.per_thread || frame.arg(3) & PER_THREAD != 0, Some(4))
}

fn export_table(frame: &Frame) -> i32 {
    if frame.arg(0) == 0 || frame.arg(1) == 0 {
        return INVALID_VALUE;
    }
    // SAFETY: the program passes a valid UUID.
    let uuid = unsafe { (frame.arg(1) as *const [u8; 16]).read_unaligned() };
    match crate::tables::find(&uuid) {
        Some(table) => {
            frame.put(0, table);
            SUCCESS
        }
        None => NOT_FOUND,
    }
}
