//! Initialization and devices.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

use crate::call::{code, described, index, invoke, to};
use crate::connection;
use crate::frame::{Frame, Handler};
use crate::result::{INVALID_DEVICE, INVALID_VALUE, NOT_INITIALIZED};

pub const HANDLERS: &[(&str, Handler)] = &[
    ("cuInit", init),
    ("cuDriverGetVersion", version),
    ("cuDeviceGetCount", count),
    ("cuDeviceGet", device),
    ("cuDeviceGetAttribute", attribute),
    ("cuModuleGetLoadingMode", loading_mode),
    ("cuProfilerStart", nothing),
    ("cuProfilerStop", nothing),
];

/// Maximum number of devices per program.
pub const MAX_DEVICES: usize = 32;
/// Number of cached attributes per device.
const ATTRIBUTES: usize = 256;

/// Number of devices, or -1 if unknown. This value and the next ones are static, because they never change once known.
static COUNT: AtomicI32 = AtomicI32::new(-1);
/// Driver version, or 0 if unknown.
static VERSION: AtomicI32 = AtomicI32::new(0);
/// Attributes of each device. Bit 32 is set if the value in the lower bits is known.
static KNOWN: [[AtomicU64; ATTRIBUTES]; MAX_DEVICES] =
    [const { [const { AtomicU64::new(0) }; ATTRIBUTES] }; MAX_DEVICES];
/// Set after `cuInit` has succeeded.
static INITIALISED: AtomicBool = AtomicBool::new(false);

/// Attributes that a guest does not support: pageable and concurrent managed access (88, 89, 100, 101), host pointers
/// to registered memory in kernels (91), cooperative multi-device launches (96), sharing by descriptors (103), sparse
/// arrays (112), direct RDMA (116), DMA-BUF (124), events of other processes (125), fabric handles (128), unified
/// function pointers (129), multicast (132).
const ABSENT: [usize; 14] = [88, 89, 91, 96, 100, 101, 103, 112, 116, 124, 125, 128, 129, 132];
/// Attributes that every guest supports: memory registration (99), including read-only memory (113).
const PRESENT: [usize; 2] = [99, 113];

fn init(frame: &Frame) -> i32 {
    if let Err(code) = connection::connect() {
        return code;
    }
    let result = described(frame);
    if result == 0 {
        INITIALISED.store(true, Ordering::Release);
    }
    result
}

/// Returns error 3 before `cuInit`.
pub fn ready() -> Result<(), i32> {
    if INITIALISED.load(Ordering::Acquire) { Ok(()) } else { Err(NOT_INITIALIZED) }
}

/// Returns the driver's version.
pub fn driver_version() -> Result<i32, i32> {
    let known = VERSION.load(Ordering::Acquire);
    if known != 0 {
        return Ok(known);
    }
    connection::connect()?;
    let mut version = 0i32;
    invoke(index!("cuDriverGetVersion+"), &[to(&mut version)])?;
    VERSION.store(version, Ordering::Release);
    Ok(version)
}

fn version(frame: &Frame) -> i32 {
    // As with NVIDIA's driver, the version is available before `cuInit`.
    driver_version().map_or_else(|error| error, |version| frame.put(0, version))
}

/// Returns the number of devices.
pub fn device_count() -> Result<i32, i32> {
    ready()?;
    let known = COUNT.load(Ordering::Acquire);
    if known >= 0 {
        return Ok(known);
    }
    let mut count = 0i32;
    invoke(index!("cuDeviceGetCount+"), &[to(&mut count)])?;
    let count = count.clamp(0, MAX_DEVICES as i32);
    COUNT.store(count, Ordering::Release);
    Ok(count)
}

/// Returns the index of an existing device.
pub fn checked(device: u32) -> Result<usize, i32> {
    if i64::from(device) < i64::from(device_count()?) { Ok(device as usize) } else { Err(INVALID_DEVICE) }
}

fn count(frame: &Frame) -> i32 {
    device_count().map_or_else(|error| error, |count| frame.put(0, count))
}

fn device(frame: &Frame) -> i32 {
    checked(frame.int(1)).map_or_else(|error| error, |device| frame.put(0, device as i32))
}

/// Returns an attribute of a device.
pub fn attribute_of(attribute: usize, device: usize) -> Result<i32, i32> {
    if ABSENT.contains(&attribute) {
        return Ok(0);
    }
    if PRESENT.contains(&attribute) {
        return Ok(1);
    }
    let place = KNOWN.get(device).and_then(|all| all.get(attribute)).ok_or(INVALID_VALUE)?;
    let known = place.load(Ordering::Acquire);
    if known >> 32 != 0 {
        return Ok(known as i32);
    }
    let mut value = 0i32;
    invoke(index!("cuDeviceGetAttribute+"), &[to(&mut value), attribute as u64, device as u64])?;
    place.store(1 << 32 | u64::from(value.cast_unsigned()), Ordering::Release);
    Ok(value)
}

fn attribute(frame: &Frame) -> i32 {
    let value = checked(frame.int(2)).and_then(|device| attribute_of(frame.int(1) as usize, device));
    value.map_or_else(|error| error, |value| frame.put(0, value))
}

fn loading_mode(frame: &Frame) -> i32 {
    // Report lazy loading. The host's library chooses its own mode.
    frame.put(0, 2i32)
}

fn nothing(_: &Frame) -> i32 {
    code(ready())
}
