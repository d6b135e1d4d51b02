//! Lookup of functions by name and version, and of export tables.
//!
//! The export tables are the same as in the guest library, so that NVIDIA's runtime also works with this library.
//!
//! UNSAFETY: reads and writes through the program's pointers, like the real driver.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, reason = "names of the driver API")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "see UNSAFETY; the promise is the caller's everywhere")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use crate::api::{any, api, initialised, put};
use crate::card;
use crate::current::{CONTEXT, CURRENT, device_of};
use crate::result::{INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, NOT_FOUND, SUCCESS};

/// Result of `cuDriverGetVersion`.
const VERSION: i32 = 13_000;

/// The driver, as the export tables call it.
struct Fake;

impl cuda_exports::Driver for Fake {
    fn ready(&self) -> Result<(), i32> {
        match initialised() {
            SUCCESS => Ok(()),
            error => Err(error),
        }
    }

    fn version(&self) -> u32 {
        VERSION as u32
    }

    fn devices(&self) -> Vec<cuda_exports::Device> {
        let identity = |at: &usize| {
            let card = card::all().get(*at)?;
            let bus = card.number() as i32 + 1;
            Some(cuda_exports::Device { uuid: card.uuid(), domain: 0, bus, device: 0 })
        };
        card::visible().iter().filter_map(identity).collect()
    }

    fn primary_context(&self, device: i32) -> Result<u64, i32> {
        card::of_device(device).map(|_| CONTEXT + device as u64).ok_or(INVALID_DEVICE)
    }

    fn current_context(&self) -> Result<u64, i32> {
        match CURRENT.get() {
            0 => Err(INVALID_CONTEXT),
            context => Ok(context),
        }
    }

    fn context_id(&self, context: u64) -> Result<u64, i32> {
        device_of(context).map(|_| context - CONTEXT + 1).ok_or(INVALID_CONTEXT)
    }

    fn load_module(&self, _image: *const c_void) -> Result<u64, i32> {
        crate::modules::load_plain(crate::api::current_card())
    }

    fn refused(&self, table: &str, slot: usize) {
        eprintln!("cuda-fake: slot {slot} of the export table {table} is unknown");
    }
}

api! {
    any cuDriverGetVersion(version: *mut c_int) { put(version, Ok(VERSION)) }
    any cuGetProcAddress(name: *const c_char, to: *mut *mut c_void, version: c_int, _flags: u64) {
        find(name, to, version)
    }
    any cuGetProcAddress_v2(
        name: *const c_char, to: *mut *mut c_void, version: c_int, _flags: u64, status: *mut c_int
    ) {
        let result = find(name, to, version);
        if !status.is_null() {
            *status = i32::from(result != SUCCESS);
        }
        result
    }
    any cuGetExportTable(to: *mut *const c_void, uuid: *const [u8; 16]) {
        if uuid.is_null() {
            return INVALID_VALUE;
        }
        cuda_exports::install(&Fake);
        put(to, cuda_exports::table(&*uuid).ok_or(NOT_FOUND))
    }
}

/// Finds the newest exported variant of a function up to `version`. No per-thread variants exist.
unsafe fn find(name: *const c_char, to: *mut *mut c_void, version: c_int) -> c_int {
    if name.is_null() || to.is_null() {
        return INVALID_VALUE;
    }
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    let version = u32::try_from(version).unwrap_or_default().min(VERSION as u32);
    let Some((_, family)) = cuda_table::families().find(|(_, family)| family.name == name) else { return NOT_FOUND };
    let mut forms: Vec<_> = family.forms().filter(|form| form.version <= version && !form.per_thread()).collect();
    forms.reverse();
    let found = forms.iter().find_map(|form| exported(&format!("{name}{}", form.suffix)));
    match found {
        Some(function) => {
            unsafe { *to = function };
            SUCCESS
        }
        None => NOT_FOUND,
    }
}

/// Returns a symbol of this library, even if other libraries export the same symbol.
fn exported(symbol: &str) -> Option<*mut c_void> {
    let symbol = CString::new(symbol).ok()?;
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let own = exported as *const c_void;
    if unsafe { libc::dladdr(own, &raw mut info) } == 0 {
        return None;
    }
    let library = unsafe { libc::dlopen(info.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    let found = unsafe { libc::dlsym(library, symbol.as_ptr()) };
    (!found.is_null()).then_some(found)
}
