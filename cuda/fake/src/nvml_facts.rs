//! Properties of a card and of the system that NVML reports. All cards are of the same model.
//!
//! UNSAFETY: writes through the program's pointers, like the real library.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, reason = "names of NVML")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "see UNSAFETY; the promise is the caller's everywhere")]

use std::ffi::{c_char, c_int, c_void};

use crate::card::Card;
use crate::nvml::{INSUFFICIENT_SIZE, INVALID_ARGUMENT, SUCCESS, card, ready};

/// `nvmlPciInfo_t`.
#[repr(C)]
struct PciInfo {
    legacy: [u8; 16],
    place: [u32; 3],
    identifiers: [u32; 2],
    address: [u8; 32],
}

/// `nvmlUtilization_t`, in percent.
#[repr(C)]
struct Rates {
    card: u32,
    memory: u32,
}

/// Returns the string padded with zeros.
fn padded<const BYTES: usize>(text: &str) -> [u8; BYTES] {
    let mut padded = [0; BYTES];
    padded.iter_mut().zip(text.bytes()).for_each(|(to, byte)| *to = byte);
    padded
}

unsafe fn text(to: *mut c_char, bytes: u32, text: &str) -> c_int {
    match ready() {
        SUCCESS if to.is_null() => INVALID_ARGUMENT,
        SUCCESS if bytes as usize <= text.len() => INSUFFICIENT_SIZE,
        SUCCESS => {
            unsafe {
                std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
                *to.add(text.len()) = 0;
            }
            SUCCESS
        }
        error => error,
    }
}

/// Writes a property of a device.
unsafe fn fact<T>(device: *mut c_void, to: *mut T, fact: impl FnOnce(&Card) -> T) -> c_int {
    match card(device) {
        Ok(_) if to.is_null() => INVALID_ARGUMENT,
        Ok(card) => {
            unsafe { *to = fact(card) };
            SUCCESS
        }
        Err(error) => error,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetDriverVersion(to: *mut c_char, bytes: u32) -> c_int {
    unsafe { text(to, bytes, "580.0") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetNVMLVersion(to: *mut c_char, bytes: u32) -> c_int {
    unsafe { text(to, bytes, "13.580.0") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetCudaDriverVersion_v2(to: *mut c_int) -> c_int {
    if ready() == SUCCESS {
        unsafe { *to = 13_000 };
    }
    ready()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetName(device: *mut c_void, to: *mut c_char, bytes: u32) -> c_int {
    match card(device) {
        Ok(_) => unsafe { text(to, bytes, "Fake CUDA card") },
        Err(error) => error,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(device: *mut c_void, to: *mut PciInfo) -> c_int {
    let info = |card: &Card| PciInfo {
        legacy: padded(&card.bus_id()),
        place: [0, card.number() as u32 + 1, 0],
        identifiers: [0x2330_10de, 0x16c1_10de],
        address: padded(&format!("0000{}", card.bus_id())),
    };
    unsafe { fact(device, to, info) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCudaComputeCapability(
    device: *mut c_void,
    major: *mut c_int,
    minor: *mut c_int,
) -> c_int {
    unsafe { fact(device, major, |_| 9).max(fact(device, minor, |_| 0)) }
}

/// Reports 100 % utilization while work runs on the card.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUtilizationRates(device: *mut c_void, to: *mut Rates) -> c_int {
    let rates = |card: &Card| Rates { card: if card.occupants().is_empty() { 0 } else { 100 }, memory: 0 };
    unsafe { fact(device, to, rates) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetTemperature(device: *mut c_void, _sensor: c_int, to: *mut u32) -> c_int {
    unsafe { fact(device, to, |_| 40) }
}
