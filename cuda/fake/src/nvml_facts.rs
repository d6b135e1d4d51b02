//! Properties of a card and of the system that NVML reports. All cards are of the same model.
//!
//! UNSAFETY: writes through the program's pointers, like the real library.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, reason = "names of NVML")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "see UNSAFETY; the promise is the caller's everywhere")]

use std::ffi::{c_char, c_int, c_void};

use crate::card::{self, Card};
use crate::nvml::{INSUFFICIENT_SIZE, INVALID_ARGUMENT, SUCCESS, card as of_device, ready};

/// Environment variable with the NVLink connections: `0-1:4,2-3:2` for 4 connections between the first two cards and 2
/// between the next two, `switch:18` for 18 connections of each card to switches. By default, no card has NVLink.
const NVLINKS: &str = "FAKE_CUDA_NVLINKS";
/// `NVML_NVLINK_MAX_LINKS`.
const MAX_LINKS: usize = 18;
const NOT_SUPPORTED: c_int = 3;

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

fn pci_info(card: &Card) -> PciInfo {
    PciInfo {
        legacy: padded(&card.bus_id()),
        place: [0, card.number() as u32 + 1, 0],
        identifiers: [0x2330_10de, 0x16c1_10de],
        address: padded(&format!("0000{}", card.bus_id())),
    }
}

/// Writes a property of a device.
unsafe fn fact<T>(device: *mut c_void, to: *mut T, fact: impl FnOnce(&Card) -> T) -> c_int {
    match of_device(device) {
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
    match of_device(device) {
        Ok(_) => unsafe { text(to, bytes, "Fake CUDA card") },
        Err(error) => error,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(device: *mut c_void, to: *mut PciInfo) -> c_int {
    unsafe { fact(device, to, pci_info) }
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

/// Returns the other end of each connection of a card. Connections have numbers from 0.
fn links(card: &Card) -> Vec<End> {
    let text = std::env::var(NVLINKS).unwrap_or_default();
    let parts = text.split(',').filter_map(|part| {
        let (ends, count) = part.trim().split_once(':')?;
        let count = count.parse::<usize>().ok()?;
        let end = match ends.split_once('-') {
            None => (ends == "switch").then_some(End::Switch)?,
            Some((one, other)) => {
                let (one, other) = (one.parse::<usize>().ok()?, other.parse::<usize>().ok()?);
                match card.number() {
                    number if number == one => End::Card(other),
                    number if number == other => End::Card(one),
                    _ => return None,
                }
            }
        };
        Some(std::iter::repeat_n(end, count))
    });
    parts.flatten().take(MAX_LINKS).collect()
}

/// The other end of an NVLink connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Card(usize),
    Switch,
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetNvLinkState(device: *mut c_void, link: u32, to: *mut c_int) -> c_int {
    match of_device(device).map(|card| links(card).len()) {
        Ok(0) => NOT_SUPPORTED,
        Ok(_) if link as usize >= MAX_LINKS => INVALID_ARGUMENT,
        Ok(count) => unsafe { fact(device, to, |_| c_int::from((link as usize) < count)) },
        Err(error) => error,
    }
}

/// Reports the address of a card. A switch has no address that is known to this library.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(device: *mut c_void, link: u32, to: *mut PciInfo) -> c_int {
    let end = match of_device(device) {
        Ok(card) => links(card).get(link as usize).copied(),
        Err(error) => return error,
    };
    match end.map(|end| (end, card::all())) {
        Some((End::Card(number), all)) if number < all.len() => unsafe { fact(device, to, |_| pci_info(&all[number])) },
        Some(_) => NOT_SUPPORTED,
        None => INVALID_ARGUMENT,
    }
}
