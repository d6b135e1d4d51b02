//! Modules and libraries: their variables, and the handles of their kernels.
//!
//! The driver places a module's variables in card memory. Their addresses differ between processes, and programs get
//! them only from calls and from the module's kernels. Only variables declared in PTX are known: `.global .u64 name`
//! and `.global .b8 name[BYTES]`, also in containers with compressed entries. They are zero-initialized.
//!
//! UNSAFETY: reads the program's images and maps card memory, like the real driver.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::sync::{Mutex, PoisonError};

use cuda_images::{PTX_KIND, entries, is_container};

use crate::card::Card;
use crate::further;
use crate::result::{INVALID_VALUE, NOT_FOUND, SUCCESS};
use crate::space::GRANULE;

/// Number of the module shared by all images without variables.
pub const PLAIN: u64 = 1;
/// Bit position of the module number in kernel handles.
const SHIFT: u32 = 16;
/// Maximum decompressed size of a container entry in bytes.
const MAX_TEXT_BYTES: usize = 1 << 20;
/// Alignment of variables in bytes.
const ALIGNMENT: u64 = 256;

/// A variable: name, address, and size in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Variable {
    name: String,
    address: u64,
    bytes: u64,
}

/// All modules with variables.
static MODULES: Mutex<Option<HashMap<u64, Vec<Variable>>>> = Mutex::new(None);

fn with<T>(work: impl FnOnce(&mut HashMap<u64, Vec<Variable>>) -> T) -> T {
    work(MODULES.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// Parses the name and the size of the variable that a PTX statement declares.
fn declared(statement: &str) -> Option<(String, u64)> {
    let (_, declaration) = statement.split_once(".global ")?;
    let (head, count) = match declaration.split_once('[') {
        Some((head, rest)) => (head, rest.split_once(']')?.0.trim().parse().ok()?),
        None => (declaration, 1),
    };
    let bytes = if head.contains(".b8 ") {
        1
    } else if head.contains(".u64 ") {
        8
    } else {
        4
    };
    Some((head.split_whitespace().next_back()?.to_owned(), bytes * count))
}

/// Returns the PTX of an image. For a container, this is its first readable entry with PTX.
unsafe fn text(image: *const c_char) -> String {
    // SAFETY: an image has at least four bytes, or is a shorter NUL-terminated string.
    let start = unsafe { CStr::from_ptr(image) }.to_bytes();
    if !is_container(start) {
        return String::from_utf8_lossy(start).into_owned();
    }
    // SAFETY: a container has a 16-byte header, whose last 64-bit word is the size of the rest.
    let bytes = unsafe { image.cast::<u8>().add(8).cast::<u64>().read_unaligned() } as usize + 16;
    // SAFETY: as above.
    let container = unsafe { std::slice::from_raw_parts(image.cast::<u8>(), bytes) };
    let texts = entries(container).unwrap_or_default();
    let texts = texts.iter().filter(|entry| entry.kind == PTX_KIND);
    let text = texts.filter_map(|entry| entry.unpack(MAX_TEXT_BYTES).ok()).next().unwrap_or_default();
    String::from_utf8_lossy(&text).into_owned()
}

/// Loads an image as a module. Returns the module's number.
pub unsafe fn load(card: &Card, image: *const c_char) -> Result<u64, i32> {
    // SAFETY: see UNSAFETY.
    let text = unsafe { text(image) };
    let mut end = 0;
    let mut variables = Vec::new();
    for (name, bytes) in text.split(';').filter_map(declared) {
        variables.push(Variable { name, address: end, bytes });
        end = (end + bytes).next_multiple_of(ALIGNMENT);
    }
    let (number, base) = further::load(card, end)?;
    for variable in &mut variables {
        variable.address += base;
    }
    with(|modules| modules.insert(number, variables));
    Ok(number)
}

/// Loads a library without variables.
pub fn load_plain(card: &Card) -> Result<u64, i32> {
    further::load(card, 0).map(|(number, _)| number)
}

/// Unloads a module.
pub fn unload(module: u64) -> i32 {
    if module == PLAIN {
        return SUCCESS;
    }
    if let Some(variables) = with(|modules| modules.remove(&module))
        && let (Some(first), Some(last)) = (variables.first(), variables.last())
    {
        let bytes = (last.address + last.bytes - first.address).next_multiple_of(GRANULE);
        // SAFETY: `further` has mapped this memory for the module.
        unsafe { libc::munmap(first.address as *mut libc::c_void, bytes as usize) };
    }
    further::unload(module)
}

/// Returns the address and the size of a variable.
pub unsafe fn variable(module: u64, name: *const c_char) -> Result<(u64, u64), i32> {
    if name.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: see UNSAFETY.
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    named(module, name).ok_or(NOT_FOUND)
}

fn named(module: u64, name: &[u8]) -> Option<(u64, u64)> {
    with(|modules| {
        let found = modules.get(&module)?.iter().find(|variable| variable.name.as_bytes() == name)?;
        Some((found.address, found.bytes))
    })
}

/// Returns the address of a variable that a kernel uses, or 0 if the kernel's module does not have it.
pub fn used(handle: u64, name: &str) -> u64 {
    named(handle >> SHIFT, name.as_bytes()).map_or(0, |(address, _)| address)
}

/// Returns true if an address belongs to a variable.
pub fn contains(address: u64) -> bool {
    let is_in = |it: &Variable| (it.address..it.address + it.bytes).contains(&address);
    with(|modules| modules.values().flatten().any(is_in))
}

/// Returns the handle of a kernel from its module and its number in the module.
pub fn handle(module: u64, kernel: u64) -> u64 {
    if module == PLAIN { kernel } else { module << SHIFT | kernel }
}

/// Returns a kernel's number in its module if the module is loaded.
pub fn kernel(handle: u64) -> Option<u64> {
    let module = handle >> SHIFT;
    (module == 0 || further::is_loaded(module)).then_some(handle & ((1 << SHIFT) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declared_variables_have_their_sizes() {
        for (statement, expected) in [
            (".global .align 4 .b8 name[64]", Some(("name", 64))),
            ("\n.visible .global .u64 tally", Some(("tally", 8))),
            (".global .u32 n[3]", Some(("n", 12))),
            (".entry f() { ld.global.u32 %r1, [%rd1]", None),
        ] {
            let expected = expected.map(|(name, bytes): (&str, u64)| (name.to_owned(), bytes));
            assert_eq!(declared(statement), expected, "{statement}");
        }
    }
}
