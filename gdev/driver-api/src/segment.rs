//! Shared segments, under Gdev's function names. Commands and flags have the same values as for `shmget` and `shmctl`.

use std::ffi::{c_int, c_void};

use gdev::{Segment, SegmentRequest};

use crate::context::with;
use crate::error::{Code, Outcome, Status, status, store};

/// Stores the ID of the segment with a key. Creates the segment if it does not exist and `flags` contains `IPC_CREAT`.
/// The low nine bits of `flags` are file-style permissions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuShmGet(id: *mut c_int, key: c_int, size: usize, flags: c_int) -> Status {
    const RIGHTS: c_int = 0o777;
    status(with(|state| {
        let key = u64::try_from(key).map_err(|_| Code::InvalidValue)?;
        let create = flags & libc::IPC_CREAT != 0;
        let mode = (flags & RIGHTS).cast_unsigned();
        let request = SegmentRequest { create, mode, ..SegmentRequest::find(key, size as u64) };
        let segment = state.gpu.segment(request)?;
        let number = c_int::try_from(segment.id).map_err(|_| Code::Unknown)?;
        state.segments.insert(number, segment);
        // SAFETY: see UNSAFETY in the crate documentation.
        unsafe { store(id, number) }
    }))
}

fn known(state: &crate::context::State, id: c_int) -> Outcome<Segment> {
    state.segments.get(&id).copied().ok_or(Code::InvalidHandle)
}

/// Maps a segment, and stores its GPU virtual address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuShmAt(address: *mut u64, id: c_int, flags: c_int) -> Status {
    status(with(|state| {
        let segment = known(state, id)?;
        if address.is_null() {
            return Err(Code::InvalidValue);
        }
        let memory = state.gpu.attach(segment, flags & libc::SHM_RDONLY != 0)?;
        state.attached.insert(memory.address, memory);
        // SAFETY: see UNSAFETY in the crate documentation.
        unsafe { store(address, memory.address) }
    }))
}

/// Waits for the context's work, and unmaps a segment.
#[unsafe(no_mangle)]
pub extern "C" fn cuShmDt(address: u64) -> Status {
    status(with(|state| {
        let memory = *state.attached.get(&address).ok_or(Code::InvalidValue)?;
        state.gpu.detach(memory)?;
        state.attached.remove(&address);
        Ok(())
    }))
}

/// Removes the key of a segment if `command` is `IPC_RMID`. Rejects all other commands.
#[unsafe(no_mangle)]
pub extern "C" fn cuShmCtl(id: c_int, command: c_int, _buffer: *mut c_void) -> Status {
    status(with(|state| {
        let segment = known(state, id)?;
        if command != libc::IPC_RMID {
            return Err(Code::NotSupported);
        }
        state.gpu.remove(segment)?;
        state.segments.remove(&id);
        Ok(())
    }))
}
