//! NVML, the management library. Calls go to the real NVML, but the reported card memory is the tenant's quota.
//!
//! Programs that use NVML do not need a context and may never call the driver. Forked children may also use NVML.
//! Therefore, each query opens a separate connection to the owner, like a program without work. NVML reports only the
//! tenant's cards, and none until all owners have replied once. If the owner does not reply to a later query, the
//! program receives NVML's own result for the card. A tenant sees only its own processes on a card.
//!
//! UNSAFETY: calls functions with the signatures in NVML's header, and writes through the program's pointers.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::{AsFd as _, AsRawFd as _};

use cuda_protocol::{End, FromOwner, FromTenant, Link, Welcome};

use super::{loader, shim, stubs};
use crate::descriptors::Connection;
use crate::settings::Settings;
use crate::symbols::{ALL, COUNT, at, real};

mod cards;
mod processes;

/// File name that programs load.
const NAME: &str = "libnvidia-ml.so.1";
/// `NVML_SUCCESS`.
const SUCCESS: c_int = 0;
/// `NVML_ERROR_UNINITIALIZED`.
const UNINITIALIZED: c_int = 1;
/// `NVML_ERROR_INVALID_ARGUMENT`.
const INVALID_ARGUMENT: c_int = 2;
/// `NVML_ERROR_NOT_FOUND`.
const NOT_FOUND: c_int = 6;
/// `NVML_ERROR_INSUFFICIENT_SIZE`.
const INSUFFICIENT_SIZE: c_int = 7;
/// `NVML_ERROR_LIBRARY_NOT_FOUND`.
const NO_LIBRARY: c_int = 12;
/// `NVML_ERROR_FUNCTION_NOT_FOUND`.
const NO_FUNCTION: c_int = 13;
/// Timeout for an owner's reply in ms.
// TIMEOUT: if an owner is stuck, a tool should show NVML's own values instead of hanging.
const PATIENCE_MS: c_int = 2000;

/// `nvmlDevice_t`.
type Device = *mut c_void;

/// `nvmlMemory_t`, in bytes.
#[repr(C)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`, in bytes.
#[repr(C)]
struct MemoryV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// Returns the function that implements a symbol, also in a forked child, because NVML works in a child that
/// initializes it again. The first call loads the real library and fills its slots.
pub fn resolve(index: usize) -> *mut () {
    if super::prepare().is_some_and(|shim| shim.libraries.nvml.run(|| load(&shim.settings))) {
        stubs::get(index)
    } else {
        uninitialized as *mut ()
    }
}

fn load(settings: &Settings) {
    // NVML is in the same folder as the driver library.
    let named = settings.driver.as_ref().map(|path| path.with_file_name(NAME));
    let library = loader::library(NAME, named, COUNT..ALL);
    let mediated = !settings.sockets.is_empty();
    for index in COUNT..ALL {
        let function = match real(index) {
            found if !found.is_null() => ours(index).filter(|_| mediated).unwrap_or(found),
            _ if index == at::nvmlErrorString => error_string as *mut (),
            _ if library => no_function as *mut (),
            _ => no_library as *mut (),
        };
        stubs::set(index, function);
    }
}

fn ours(index: usize) -> Option<*mut ()> {
    match index {
        at::nvmlDeviceGetMemoryInfo => Some(memory_info as *mut ()),
        at::nvmlDeviceGetMemoryInfo_v2 => Some(memory_info_v2 as *mut ()),
        _ => processes::ours(index).or_else(|| cards::ours(index)),
    }
}

extern "C" fn uninitialized() -> c_int {
    UNINITIALIZED
}

extern "C" fn no_library() -> c_int {
    NO_LIBRARY
}

extern "C" fn no_function() -> c_int {
    NO_FUNCTION
}

extern "C" fn error_string(_: c_int) -> *const c_char {
    c"NVML Shared Library Not Found".as_ptr()
}

unsafe fn call<T>(index: usize, device: Device, to: *mut T) -> c_int {
    let function = real(index);
    if function.is_null() {
        return NO_FUNCTION;
    }
    // SAFETY: the header declares the symbol with these arguments.
    let function: unsafe extern "C" fn(Device, *mut T) -> c_int = unsafe { std::mem::transmute(function) };
    // SAFETY: guaranteed by the caller.
    unsafe { function(device, to) }
}

unsafe extern "C" fn memory_info(device: Device, to: *mut Memory) -> c_int {
    // SAFETY: guaranteed by the caller.
    let result = unsafe { call(at::nvmlDeviceGetMemoryInfo, device, to) };
    // SAFETY: as above.
    if let (SUCCESS, Some((free, total)), Some(memory)) = (result, memory(device), unsafe { to.as_mut() }) {
        *memory = Memory { total, free, used: total - free };
    }
    result
}

unsafe extern "C" fn memory_info_v2(device: Device, to: *mut MemoryV2) -> c_int {
    // SAFETY: guaranteed by the caller.
    let result = unsafe { call(at::nvmlDeviceGetMemoryInfo_v2, device, to) };
    // SAFETY: as above.
    if let (SUCCESS, Some((free, total)), Some(memory)) = (result, memory(device), unsafe { to.as_mut() }) {
        *memory = MemoryV2 { version: memory.version, total, reserved: 0, free, used: total - free };
    }
    result
}

/// Connects to the owner of a device's card. Returns the connection, the card's index in the owner's list, and the
/// protocol version.
fn connect(device: Device) -> Option<(Connection, u8, u16)> {
    let uuid = uuid(device)?;
    let shim = shim();
    let number = if shim.is_single() { 0 } else { cards::find(&uuid)?.0 };
    let (link, welcome) = hello(number)?;
    let card = welcome.cards.iter().position(|card| card.uuid == uuid)?;
    Some((link, u8::try_from(card).ok()?, welcome.version))
}

/// Connects to the owner at socket index `number`. Returns the connection and the owner's terms.
fn hello(number: usize) -> Option<(Connection, Welcome)> {
    let shim = shim();
    let link = Connection::open(shim.settings.sockets.get(number)?).ok()?;
    link.send(&FromTenant::Hello(shim.card(number).link.hello(&shim.settings, false)), &[]).ok()?;
    let (FromOwner::Welcome(welcome) | FromOwner::WelcomeAmong { welcome, .. }) = answer(&link)? else { return None };
    Some((link, welcome))
}

/// Returns the tenant's free memory and its quota on a device, in bytes. Returns `None` if the card does not belong to
/// the tenant, or if its owner does not reply.
fn memory(device: Device) -> Option<(u64, u64)> {
    let (link, card, _) = connect(device)?;
    link.send(&FromTenant::AskMemory { request: 1, card }, &[]).ok()?;
    let FromOwner::Memory { free_bytes, total_bytes, .. } = answer(&link)? else { return None };
    let _ = link.send(&FromTenant::Goodbye(End::Leaving), &[]);
    Some((free_bytes.min(total_bytes), total_bytes))
}

fn answer(link: &Link) -> Option<FromOwner> {
    let mut poll = libc::pollfd { fd: link.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer refers to one valid entry.
    let ready = unsafe { libc::poll(&raw mut poll, 1, PATIENCE_MS) };
    (ready > 0).then(|| link.receive().ok()).flatten().map(|received| received.message)
}

/// Returns the UUID of a device.
fn uuid(device: Device) -> Option<[u8; 16]> {
    let function = real(at::nvmlDeviceGetUUID);
    if function.is_null() {
        return None;
    }
    let mut text = [0; 96];
    // SAFETY: the header declares the symbol with these arguments, and the buffer has the given length.
    let result = unsafe {
        let function: unsafe extern "C" fn(Device, *mut c_char, u32) -> c_int = std::mem::transmute(function);
        function(device, text.as_mut_ptr().cast(), text.len() as u32)
    };
    (result == SUCCESS).then(|| parsed(CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?)).flatten()
}

/// Parses a card UUID: `GPU-` and 32 hexadecimal digits in groups. Rejects the UUIDs of MIG instances (`MIG-`).
fn parsed(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.strip_prefix("GPU-")?.chars().filter(|digit| *digit != '-').collect();
    let number = u128::from_str_radix(&digits, 16).ok()?;
    (digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit())).then(|| number.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn card_uuid_is_parsed_and_mig_uuid_is_rejected() {
        let text = "GPU-12345678-9abc-def0-0123-456789abcdef";
        assert_eq!(parsed(text).map(u128::from_be_bytes), Some(0x1234_5678_9abc_def0_0123_4567_89ab_cdef));
        for text in [
            "MIG-12345678-9abc-def0-0123-456789abcdef",
            "GPU-1234",
            "GPU-",
            "",
            "GPU-+2345678-9abc-def0-0123-456789abcdef",
        ] {
            assert_eq!(parsed(text), None, "{text}");
        }
    }

    #[test]
    fn the_structures_are_as_long_as_the_header_has_them() {
        assert_eq!(size_of::<Memory>(), 24);
        // The low half of the version that callers pass is the structure size.
        assert_eq!(size_of::<MemoryV2>(), 0x0200_0028 & 0xffff);
    }
}
