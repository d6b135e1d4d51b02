//! Functions whose arguments name devices, and the rejection of calls that name hidden devices.
//!
//! The devices of a program are numbered from 0, and the hidden ones follow. A call that names a hidden device gets the
//! driver's result for a device that does not exist. The table lists the functions whose arguments name devices, as
//! numbers or as memory locations, except those for graphics interoperability.
//!
//! UNSAFETY: reads arguments by position, and structures to which they point.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, Ordering};

use cuda_driver::calls::{INVALID_DEVICE, INVALID_VALUE};
use cuda_driver::symbols::{Arguments, at};

/// An argument that names a device. The first number is the argument's position.
#[derive(Clone, Copy, Debug)]
enum Argument {
    /// `CUdevice`.
    Device(usize),
    /// `CUmemLocation` by value.
    Location(usize),
    /// Pointer to a structure, and the index of a `CUmemLocation` in that structure, in units of `int`.
    InStructure(usize, usize),
    /// Pointer to a list of `CUmemAccessDesc`, and the position of its length.
    List(usize, usize),
}

use Argument::{Device, InStructure, List, Location};

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_DEVICE: c_int = 1;
/// Size of a `CUmemAccessDesc` in units of `int`.
const ACCESS_WORDS: usize = 3;
/// Index of the location in `CUmemAllocationProp` and in `CUmemPoolProps`, in units of `int`.
const PROPERTY_LOCATION: usize = 2;
/// Maximum length of a list that is examined. No program has this many devices.
const MAX_LIST: usize = 1024;

/// Number of devices that the program sees. A static variable, because intercepted calls have no argument for it.
static SHOWN: AtomicI32 = AtomicI32::new(c_int::MAX);

/// Hides all devices whose numbers are at least `count`.
pub fn show(count: usize) {
    SHOWN.store(c_int::try_from(count).unwrap_or(c_int::MAX), Ordering::Relaxed);
}

/// Returns the number of devices that the program sees, if the driver shows `count`.
#[must_use]
pub fn shown(count: c_int) -> c_int {
    count.min(SHOWN.load(Ordering::Relaxed))
}

/// Returns true if a device is hidden from the program.
#[must_use]
pub fn is_hidden(device: c_int) -> bool {
    device >= SHOWN.load(Ordering::Relaxed)
}

/// Returns those arguments of a function that name devices.
fn arguments(index: usize) -> &'static [Argument] {
    match index {
        at::cuDevicePrimaryCtxRelease
        | at::cuDevicePrimaryCtxRelease_v2
        | at::cuDevicePrimaryCtxReset
        | at::cuDevicePrimaryCtxReset_v2
        | at::cuDevicePrimaryCtxSetFlags
        | at::cuDevicePrimaryCtxSetFlags_v2
        | at::cuDevicePrimaryCtxGetState
        | at::cuDeviceGetDevResource
        | at::cuDeviceSetMemPool
        | at::cuDeviceGetGraphMemAttribute
        | at::cuDeviceSetGraphMemAttribute
        | at::cuDeviceGraphMemTrim
        | at::cuDeviceRegisterAsyncNotification
        | at::cuDeviceUnregisterAsyncNotification => &[Device(0)],
        at::cuDeviceGet
        | at::cuDeviceGetUuid
        | at::cuDeviceGetUuid_v2
        | at::cuDeviceTotalMem
        | at::cuDeviceTotalMem_v2
        | at::cuDeviceGetNvSciSyncAttributes
        | at::cuDeviceGetMemPool
        | at::cuDeviceGetDefaultMemPool
        | at::cuDeviceGetProperties
        | at::cuDevicePrimaryCtxRetain
        | at::cuMulticastAddDevice => &[Device(1)],
        at::cuDeviceGetAttribute
        | at::cuDeviceGetName
        | at::cuDeviceGetLuid
        | at::cuDeviceGetExecAffinitySupport
        | at::cuDeviceComputeCapability
        | at::cuDeviceGetPCIBusId
        | at::cuCtxCreate
        | at::cuCtxCreate_v2
        | at::cuGreenCtxCreate
        | at::cuMemPrefetchAsync
        | at::cuMemPrefetchAsync_ptsz => &[Device(2)],
        at::cuDeviceGetTexture1DLinearMaxWidth
        | at::cuDeviceGetHostAtomicCapabilities
        | at::cuCtxCreate_v4
        | at::cuMemAdvise => &[Device(3)],
        at::cuCtxCreate_v3 => &[Device(4)],
        at::cuDeviceCanAccessPeer => &[Device(1), Device(2)],
        at::cuDeviceGetP2PAttribute => &[Device(2), Device(3)],
        at::cuDeviceGetP2PAtomicCapabilities => &[Device(3), Device(4)],
        at::cuMemPrefetchAsync_v2 | at::cuMemPrefetchAsync_v2_ptsz => &[Location(2)],
        at::cuMemAdvise_v2 => &[Location(3)],
        at::cuMemPoolCreate | at::cuMemGetAllocationGranularity => &[InStructure(1, PROPERTY_LOCATION)],
        at::cuMemCreate => &[InStructure(2, PROPERTY_LOCATION)],
        at::cuMemSetMemPool => &[InStructure(0, 0)],
        at::cuMemGetMemPool | at::cuMemGetDefaultMemPool | at::cuMemGetAccess => &[InStructure(1, 0)],
        at::cuMemPoolGetAccess => &[InStructure(2, 0)],
        at::cuMemSetAccess => &[List(2, 3)],
        at::cuMemPoolSetAccess => &[List(1, 2)],
        _ => &[],
    }
}

/// Returns true if any argument of a function names devices.
#[must_use]
pub fn names_devices(index: usize) -> bool {
    !arguments(index).is_empty()
}

/// Returns the result for a call that names a hidden device, or `None` if the call names none.
///
/// # Safety
/// `call` must contain the arguments of a call to the function.
#[must_use]
pub unsafe fn refusal(index: usize, call: Arguments) -> Option<c_int> {
    let is_hidden_at = |place: [c_int; 2]| place[0] == ON_DEVICE && is_hidden(place[1]);
    // SAFETY: all arguments of these functions are integers or pointers, and pointers are valid or null.
    let location = |pointer: u64, word: usize| unsafe {
        let pointer = pointer as *const c_int;
        (!pointer.is_null()).then(|| pointer.add(word).cast::<[c_int; 2]>().read_unaligned())
    };
    arguments(index).iter().find_map(|argument| {
        // SAFETY: the positions are those of the functions in NVIDIA's header.
        let get = |at: usize| unsafe { call.get(at) };
        let (hidden, result) = match *argument {
            Device(at) => (is_hidden(get(at) as c_int), INVALID_DEVICE),
            Location(at) => (is_hidden_at([get(at) as c_int, (get(at) >> 32) as c_int]), INVALID_DEVICE),
            InStructure(at, word) => (location(get(at), word).is_some_and(is_hidden_at), INVALID_DEVICE),
            List(at, length) => {
                let length = usize::try_from(get(length)).unwrap_or(usize::MAX).min(MAX_LIST);
                let mut all = (0..length).map_while(|entry| location(get(at), entry * ACCESS_WORDS));
                (all.any(is_hidden_at), INVALID_VALUE)
            }
        };
        hidden.then_some(result)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the result of a call with up to six arguments.
    fn refused(index: usize, arguments: &[u64]) -> Option<c_int> {
        let mut registers = [0; 6];
        for (at, value) in arguments.iter().enumerate() {
            registers[5 - at] = *value;
        }
        // SAFETY: the tests pass pointers to locals.
        unsafe { refusal(index, Arguments::new(registers.as_ptr(), std::ptr::null())) }
    }

    #[test]
    fn calls_that_name_hidden_devices_are_refused() {
        assert_eq!(refused(at::cuDeviceGet, &[0, 1]), None, "nothing is hidden yet");
        show(1);
        assert_eq!((shown(4), shown(0)), (1, 0));
        let cpu = -1_i32 as u32 as u64;
        for (index, own, hidden) in [
            (at::cuDeviceGet, &[0, 0][..], &[0, 1][..]),
            (at::cuDevicePrimaryCtxRelease_v2, &[0], &[1]),
            (at::cuCtxCreate_v3, &[0, 0, 0, 0, 0], &[0, 0, 0, 0, 3]),
            (at::cuDeviceCanAccessPeer, &[0, 0, 0], &[0, 0, 1]),
            (at::cuDeviceCanAccessPeer, &[0, 0, 0], &[0, 1, 0]),
            (at::cuMemPrefetchAsync, &[0, 0, cpu], &[0, 0, 1]),
            (at::cuMemAdvise_v2, &[0, 0, 0, 1], &[0, 0, 0, 1 | 1 << 32]),
            (at::cuMemAdvise_v2, &[0, 0, 0, 2 | 5 << 32], &[0, 0, 0, 1 | 7 << 32]),
        ] {
            assert_eq!(refused(index, own), None, "{index} {own:?}");
            assert_eq!(refused(index, hidden), Some(INVALID_DEVICE), "{index} {hidden:?}");
        }
        // Properties of pinned memory on a device or in host memory.
        let property = |kind: c_int, id: c_int| [1, 1, kind, id, 0, 0, 0, 0];
        let create = |property: &[c_int; 8]| refused(at::cuMemCreate, &[0, 0, property.as_ptr() as u64, 0]);
        assert_eq!((create(&property(1, 0)), create(&property(3, 1))), (None, None));
        assert_eq!(create(&property(1, 1)), Some(INVALID_DEVICE));
        assert_eq!(refused(at::cuMemCreate, &[0, 0, 0, 0]), None, "the driver refuses a null pointer");
        let list = [[1, 0, 3], [1, 1, 3]];
        let allow = |count| refused(at::cuMemSetAccess, &[0, 0, list.as_ptr() as u64, count]);
        assert_eq!((allow(0), allow(1), allow(2)), (None, None, Some(INVALID_VALUE)));
        assert!(names_devices(at::cuDeviceGetName) && !names_devices(at::cuMemAlloc_v2));
        show(usize::MAX);
    }
}
