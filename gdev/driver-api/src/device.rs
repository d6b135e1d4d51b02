//! Enumerates devices: the nouveau render nodes, or the device named in an environment variable.

use std::ffi::{c_char, c_int, c_uint};
use std::path::PathBuf;
use std::sync::OnceLock;

use gdev::Target;

use crate::error::{Code, Outcome, Status, status, store};

/// Version of the driver API that this library partly implements: 4.0, like Gdev.
const DRIVER_VERSION: c_int = 4000;
/// Environment variable that replaces the device list with a single device.
const TARGET_VARIABLE: &str = "GDEV_TARGET";
/// Folder of the render nodes.
const NODES: &str = "/dev/dri";
/// Name prefix of the render nodes.
const NODE_PREFIX: &str = "renderD";
/// Name reported for every device, which is the card model that the mediator shares.
const NAME: &[u8] = b"NVIDIA GF100 (gdev)\0";

static DEVICES: OnceLock<Vec<Target>> = OnceLock::new();

/// Returns the target of a device number.
pub(crate) fn target(number: c_int) -> Outcome<&'static Target> {
    let devices = DEVICES.get().ok_or(Code::NotInitialized)?;
    usize::try_from(number).ok().and_then(|number| devices.get(number)).ok_or(Code::InvalidDevice)
}

fn find() -> Outcome<Vec<Target>> {
    if let Ok(name) = std::env::var(TARGET_VARIABLE) {
        return Ok(vec![name.parse()?]);
    }
    let entries = std::fs::read_dir(NODES).map_err(|_| Code::NoDevice)?;
    let mut nodes: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    nodes.retain(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(NODE_PREFIX)));
    nodes.sort();
    let is_ours = |path: &PathBuf| gdev::nouveau::Device::open(path).is_ok();
    let targets: Vec<Target> = nodes.into_iter().filter(is_ours).map(Target::Nouveau).collect();
    if targets.is_empty() { Err(Code::NoDevice) } else { Ok(targets) }
}

/// Enumerates the devices.
#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> Status {
    status(match (flags, DEVICES.get()) {
        (0, Some(_)) => Ok(()),
        (0, None) => find().map(|found| {
            DEVICES.get_or_init(|| found);
        }),
        _ => Err(Code::InvalidValue),
    })
}

/// Stores the version of the driver API.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> Status {
    // SAFETY: see UNSAFETY in the crate documentation.
    status(unsafe { store(version, DRIVER_VERSION) })
}

/// Stores the number of devices.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Status {
    let found = DEVICES.get().ok_or(Code::NotInitialized);
    // SAFETY: see UNSAFETY in the crate documentation.
    status(found.and_then(|devices| unsafe { store(count, devices.len() as c_int) }))
}

/// Stores a device's handle, which is its number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, number: c_int) -> Status {
    // SAFETY: see UNSAFETY in the crate documentation.
    status(target(number).and_then(|_| unsafe { store(device, number) }))
}

/// Stores a device's name, truncated to `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, size: c_int, device: c_int) -> Status {
    status(target(device).and_then(|_| {
        let room = usize::try_from(size).ok().filter(|room| *room > 0 && !name.is_null()).ok_or(Code::InvalidValue)?;
        let length = NAME.len().min(room);
        // SAFETY: see UNSAFETY in the crate documentation. The name is NUL-terminated even if it is truncated.
        unsafe {
            std::ptr::copy_nonoverlapping(NAME.as_ptr().cast(), name, length);
            *name.add(length - 1) = 0;
        }
        Ok(())
    }))
}

/// Stores the compute capability, which is 2.0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceComputeCapability(major: *mut c_int, minor: *mut c_int, device: c_int) -> Status {
    // SAFETY: see UNSAFETY in the crate documentation.
    status(target(device).and_then(|_| unsafe { store(major, 2).and_then(|()| store(minor, 0)) }))
}

/// Stores the size of a device's memory in bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> Status {
    // SAFETY: see UNSAFETY in the crate documentation.
    status(target(device).and_then(|target| unsafe { store(bytes, gdev::memory_bytes(target)? as usize) }))
}

/// Calls [`cuDeviceTotalMem_v2`], because sizes are 64 bits wide in this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem(bytes: *mut usize, device: c_int) -> Status {
    // SAFETY: see UNSAFETY in the crate documentation.
    unsafe { cuDeviceTotalMem_v2(bytes, device) }
}

/// Stores a device attribute. Rejects attributes whose value is unknown.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> Status {
    status(target(device).and_then(|_| {
        let found = match attribute {
            // Maximum number of threads per block, and maximum block dimensions in x and y.
            1..=3 => 1024,
            4 => 64,
            // Maximum grid dimensions in x, y and z.
            5..=7 => 65_535,
            // Shared memory per block, and constant memory, in bytes.
            8 => 48 << 10,
            9 => 64 << 10,
            // Warp size.
            10 => 32,
            // Maximum pitch in bytes.
            11 => c_int::MAX,
            // Number of registers per block.
            12 => 32_768,
            // Texture alignment in bytes.
            14 => 512,
            // Unsupported: copy overlap, a kernel run-time limit, an integrated GPU, concurrent kernels, ECC, the TCC
            // driver, asynchronous copy engines, and unified addressing.
            15 | 17 | 18 | 31 | 32 | 35 | 40 | 41 => 0,
            // Compute mode: several contexts may exist.
            20 => 0,
            // Compute capability.
            75 => 2,
            76 => 0,
            // Maximum number of threads per multiprocessor.
            39 => 1536,
            _ => return Err(Code::InvalidValue),
        };
        // SAFETY: see UNSAFETY in the crate documentation.
        unsafe { store(value, found) }
    }))
}
