//! NVML's lists of a card's processes. A tenant sees only its own processes.
//!
//! UNSAFETY: calls functions with the signatures in NVML's header, and writes through the program's pointers.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::c_int;

use cuda_protocol::{End, FromOwner, FromTenant, VERSION_PROCESSES};

use super::{Device, INSUFFICIENT_SIZE, INVALID_ARGUMENT, NO_FUNCTION, SUCCESS, answer, connect};
use crate::symbols::{at, real};

/// A list entry. Its first field is the process ID.
trait Entry: Copy {
    fn pid(&self) -> u32;
}

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct First {
    pid: u32,
    used: u64,
}

/// `nvmlProcessInfo_v2_t`, which versions 2 and 3 of the list functions use.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Second {
    pid: u32,
    used: u64,
    instance: u32,
    compute_instance: u32,
}

impl Entry for First {
    fn pid(&self) -> u32 {
        self.pid
    }
}

impl Entry for Second {
    fn pid(&self) -> u32 {
        self.pid
    }
}

type Function<T> = unsafe extern "C" fn(Device, *mut u32, *mut T) -> c_int;

/// Returns the tenant's process IDs in the owner's PID namespace, or `None` if the card does not belong to the tenant.
/// With an owner of an older version, returns only this process's ID.
fn own(device: Device) -> Option<Vec<u32>> {
    let (link, card, version) = connect(device)?;
    let mut pids = vec![std::process::id()];
    if version >= VERSION_PROCESSES {
        link.send(&FromTenant::AskProcesses { request: 1, card }, &[]).ok()?;
        let FromOwner::Processes { pids: all, .. } = answer(&link)? else { return None };
        pids = all;
    }
    let _ = link.send(&FromTenant::Goodbye(End::Leaving), &[]);
    Some(pids)
}

/// Returns all entries reported by the real library.
unsafe fn all<T: Entry + Default>(function: Function<T>, device: Device) -> Result<Vec<T>, c_int> {
    /// Maximum number of entries to request. A card has far fewer processes.
    const MAX_PROCESSES: u32 = 1 << 16;
    let mut room = 64;
    loop {
        let (mut list, mut count) = (vec![T::default(); room as usize], room);
        // SAFETY: the list has the given length.
        match unsafe { function(device, &raw mut count, list.as_mut_ptr()) } {
            SUCCESS => {
                list.truncate(count.min(room) as usize);
                return Ok(list);
            }
            INSUFFICIENT_SIZE if room < MAX_PROCESSES => room = count.max(room).saturating_mul(2).min(MAX_PROCESSES),
            error => return Err(error),
        }
    }
}

/// Writes the entries of the processes in `pids` to the program's buffer.
unsafe fn put<T: Entry>(list: &[T], pids: &[u32], count: *mut u32, to: *mut T) -> c_int {
    let own: Vec<T> = list.iter().copied().filter(|entry| pids.contains(&entry.pid())).collect();
    // SAFETY: `count` is not null, and the caller guarantees that it is valid.
    let room = unsafe { *count } as usize;
    // SAFETY: as above.
    unsafe { *count = u32::try_from(own.len()).unwrap_or(u32::MAX) };
    if own.len() > room {
        return INSUFFICIENT_SIZE;
    }
    if own.is_empty() {
        return SUCCESS;
    }
    if to.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: the caller guarantees that the buffer has space for `*count` entries.
    unsafe { std::ptr::copy_nonoverlapping(own.as_ptr(), to, own.len()) };
    SUCCESS
}

unsafe fn listed<T: Entry + Default>(index: usize, device: Device, count: *mut u32, to: *mut T) -> c_int {
    let function = real(index);
    if function.is_null() {
        return NO_FUNCTION;
    }
    // SAFETY: the header declares the symbol with these arguments.
    let function: Function<T> = unsafe { std::mem::transmute(function) };
    let Some(pids) = own(device).filter(|_| !count.is_null()) else {
        // SAFETY: guaranteed by the caller.
        return unsafe { function(device, count, to) };
    };
    // SAFETY: as above.
    unsafe {
        match all(function, device) {
            Ok(list) => put(&list, &pids, count, to),
            Err(error) => error,
        }
    }
}

macro_rules! lists {
    ($($symbol:ident: $entry:ty),* $(,)?) => {
        pub fn ours(index: usize) -> Option<*mut ()> {
            $({
                unsafe extern "C" fn list(device: Device, count: *mut u32, to: *mut $entry) -> c_int {
                    // SAFETY: guaranteed by the caller.
                    unsafe { listed(at::$symbol, device, count, to) }
                }
                if index == at::$symbol {
                    return Some(list as *mut ());
                }
            })*
            None
        }
    };
}

lists! {
    nvmlDeviceGetComputeRunningProcesses: First,
    nvmlDeviceGetComputeRunningProcesses_v2: Second,
    nvmlDeviceGetComputeRunningProcesses_v3: Second,
    nvmlDeviceGetGraphicsRunningProcesses: First,
    nvmlDeviceGetGraphicsRunningProcesses_v2: Second,
    nvmlDeviceGetGraphicsRunningProcesses_v3: Second,
    nvmlDeviceGetMPSComputeRunningProcesses: First,
    nvmlDeviceGetMPSComputeRunningProcesses_v2: Second,
    nvmlDeviceGetMPSComputeRunningProcesses_v3: Second,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(pid: u32) -> Second {
        Second { pid, used: u64::from(pid), ..Second::default() }
    }

    #[test]
    fn entries_are_as_long_as_the_header_has_them() {
        assert_eq!((size_of::<First>(), size_of::<Second>()), (16, 24));
    }

    #[test]
    fn only_processes_of_tenant_are_listed() {
        let list = [5, 6, 7, 8].map(entry);
        let mut to = [Second::default(); 2];
        let put = |count: &mut u32, to: *mut Second| {
            // SAFETY: the count is the size of the buffer.
            unsafe { put(&list, &[6, 8, 99], &raw mut *count, to) }
        };
        let mut count = 1;
        assert_eq!((put(&mut count, to.as_mut_ptr()), count), (INSUFFICIENT_SIZE, 2));
        assert_eq!(to[0].pid, 0, "nothing is written");
        assert_eq!((put(&mut count, to.as_mut_ptr()), count), (SUCCESS, 2));
        assert_eq!(to.map(|entry| (entry.pid, entry.used)), [(6, 6), (8, 8)]);
        let mut none = 0;
        assert_eq!(
            (put(&mut none, std::ptr::null_mut()), none),
            (INSUFFICIENT_SIZE, 2),
            "a query for the number of entries"
        );
    }
}
