//! Segments, and references to another context's memory.

use std::ffi::{c_int, c_void};

use gdev::{Context, SegmentRequest};

use crate::handle::{Failure, Ghandle, Kind, invalid, status, store, value, with};

/// [`gshmget`] flag: the key belongs to the sharing group to which the operator assigned this virtual machine.
pub const GDEV_SHM_GROUP: c_int = 0x10000;
/// Permission bit that grants the group's other machines write access to a segment.
const OTHERS_WRITE: c_int = 0o002;

/// Finds the segment with a key, or creates it if `flags` contains `IPC_CREAT`. The low nine bits of `flags` are its
/// permissions. With [`GDEV_SHM_GROUP`], the group's other machines can find and read the segment. Permission bit 0002
/// also grants them write access. Returns the segment's number, or a negative errno value.
#[unsafe(no_mangle)]
pub extern "C" fn gshmget(handle: Ghandle, key: c_int, size: u64, flags: c_int) -> c_int {
    let found = with(handle, |state| {
        let request = SegmentRequest {
            create: flags & libc::IPC_CREAT != 0,
            mode: (flags & 0o777).cast_unsigned(),
            group: flags & GDEV_SHM_GROUP != 0,
            group_writes: flags & OTHERS_WRITE != 0,
            ..SegmentRequest::find(u64::from(key.cast_unsigned()), size)
        };
        let segment = state.context.segment(request)?;
        let number = c_int::try_from(segment.id).map_err(|_| invalid("the segment's number is too large"))?;
        state.segments.insert(segment.id, segment);
        Ok(number)
    });
    match found {
        Ok(number) => number,
        Err(failure) => status(Err(failure)),
    }
}

/// Maps a segment, read-only if `flags` contains `SHM_RDONLY`. Returns its GPU virtual address, or 0 on error. The
/// driver chooses the address, so `address` must be 0.
#[unsafe(no_mangle)]
pub extern "C" fn gshmat(handle: Ghandle, id: c_int, address: u64, flags: c_int) -> u64 {
    value(with(handle, |state| {
        if address != 0 {
            return Err(invalid("the driver chooses the address of a segment: pass 0"));
        }
        let segment = state.segments.get(&id.cast_unsigned()).copied();
        let segment = segment.ok_or_else(|| invalid("find the segment with gshmget first"))?;
        let memory = state.context.attach(segment, flags & libc::SHM_RDONLY != 0)?;
        state.memory.insert(memory.address, (memory, Kind::Attached));
        Ok(memory.address)
    }))
}

/// Waits for all work and unmaps a segment.
#[unsafe(no_mangle)]
pub extern "C" fn gshmdt(handle: Ghandle, address: u64) -> c_int {
    status(with(handle, |state| state.end(address, Kind::Attached, Context::detach).map(drop)))
}

/// Controls a segment. `IPC_RMID` removes its key. The segment is freed when the last context detaches it. `IPC_STAT`
/// stores the number of attached contexts in `buffer` as a `uint64_t`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gshmctl(handle: Ghandle, id: c_int, command: c_int, buffer: *mut c_void) -> c_int {
    status(with(handle, |state| {
        let segment = state.segments.get(&id.cast_unsigned()).copied();
        let segment = segment.ok_or_else(|| invalid("find the segment with gshmget first"))?;
        match command {
            libc::IPC_RMID => {
                state.context.remove(segment)?;
                state.segments.remove(&segment.id);
                Ok(())
            }
            libc::IPC_STAT => {
                let attached = state.context.attached(segment)?;
                // SAFETY: see UNSAFETY in the crate documentation.
                unsafe { store(buffer.cast(), attached) }
            }
            other => Err(Failure(libc::EOPNOTSUPP, format!("command {other}: IPC_RMID or IPC_STAT"))),
        }
    }))
}

/// Maps memory that `master` has allocated with [`crate::gmalloc`] into `slave`. Returns its GPU virtual address in
/// `slave`, or 0 on error. The memory exists until both contexts have freed it.
#[unsafe(no_mangle)]
pub extern "C" fn gref(master: Ghandle, address: u64, size: u64, slave: Ghandle) -> u64 {
    value((|| {
        let shared = with(master, |state| {
            let (memory, offset) = state.memory_at(address)?;
            if offset != 0 || size > memory.bytes {
                return Err(invalid("a reference starts at the first byte of an allocation and is within it"));
            }
            Ok(state.context.share(memory)?)
        })?;
        with(slave, |state| {
            let memory = state.context.reference(&shared)?;
            if state.memory.contains_key(&memory.address) {
                state.context.free(memory)?;
                return Err(invalid("the handle already has this memory"));
            }
            state.memory.insert(memory.address, (memory, Kind::Reference));
            Ok(memory.address)
        })
    })())
}

/// Frees a reference.
#[unsafe(no_mangle)]
pub extern "C" fn gunref(handle: Ghandle, address: u64) -> c_int {
    status(with(handle, |state| state.end(address, Kind::Reference, Context::free).map(drop)))
}
