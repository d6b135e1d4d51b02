//! Registered memory, run-time linking, and queries that the guest library answers itself.
//!
//! UNSAFETY: calls library functions with the signatures from NVIDIA's headers.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{CString, c_char, c_int, c_void};

use super::{Cuda, Failed, check};

/// Results of the calls for registered memory, and of copying it.
#[derive(Debug)]
pub struct Registration {
    /// Results in the order of the calls.
    pub codes: Vec<c_int>,
    /// Result code and memory type of `cuPointerGetAttribute`, during the registration and after it.
    pub kinds: Vec<(c_int, u32)>,
    /// Set if the memory was copied to the card and back correctly.
    pub is_equal: bool,
}

impl Cuda {
    /// Registers the program's memory, copies it to the card and back, and unregisters it. Also prefetches managed
    /// memory.
    pub fn register_memory(&self) -> Result<Registration, Failed> {
        let register = function!(self, c"cuMemHostRegister", 12_000, fn(u64, usize, u32));
        let unregister = function!(self, c"cuMemHostUnregister", 12_000, fn(u64));
        let pointer = function!(self, c"cuMemHostGetDevicePointer", 12_000, fn(*mut u64, u64, u32));
        let attribute = function!(self, c"cuDeviceGetAttribute", 12_000, fn(*mut c_int, c_int, c_int));
        let stream = self.stream()?;
        let bytes = 3 << 20;
        let source: Vec<u8> = (0..bytes).map(|at: usize| (at * 7 + at / 255) as u8).collect();
        let mut back = vec![0u8; bytes];
        let (from, to) = (source.as_ptr().addr() as u64, back.as_mut_ptr().addr() as u64);
        let card = self.alloc(bytes as u64)?;
        let kind = |at| {
            let mut kind = 0u32;
            // SAFETY: the pointer refers to a local variable.
            (unsafe { (self.functions.raw_attribute)((&raw mut kind).cast::<c_void>(), 2, at) }, kind)
        };
        let (mut device, mut supported) = (0, [0; 2]);
        // SAFETY: the memory exists, and the pointers refer to local variables.
        let codes = unsafe {
            check("cuDeviceGetAttribute", attribute(&raw mut supported[0], 99, 0))?;
            check("cuDeviceGetAttribute", attribute(&raw mut supported[1], 91, 0))?;
            vec![
                register(0, bytes, 0),
                register(from, bytes, 1 << 20),
                register(from, bytes, 2),
                register(from, bytes, 1),
                register(from + 4096, 1, 0),
                register(to, bytes, 0),
                pointer(&raw mut device, from, 0),
                unregister(from + 8),
                supported[0],
                supported[1],
            ]
        };
        let prefetch = function!(self, c"cuMemPrefetchAsync", 12_000, fn(u64, usize, c_int, u64));
        let managed = self.alloc_managed(8192)?;
        // SAFETY: prefetching does not change memory.
        let hints = unsafe {
            [prefetch(managed, 8192, 0, stream), prefetch(managed, 8193, 0, stream), prefetch(card, 8, 0, stream)]
        };
        let mut kinds = vec![kind(from)];
        self.copy(card, from, bytes as u64, stream)?;
        self.copy(to, card, bytes as u64, stream)?;
        self.finish(stream)?;
        let is_equal = source == back;
        // SAFETY: as above.
        let ends = unsafe { [unregister(from), unregister(to), unregister(from)] };
        kinds.push(kind(from));
        Ok(Registration { codes: [&codes[..], &ends, &hints].concat(), kinds, is_equal })
    }

    /// Allocates pinned memory.
    pub fn pin(&self, bytes: usize) -> Result<u64, Failed> {
        let pin = function!(self, c"cuMemHostAlloc", 12_000, fn(*mut u64, usize, u32));
        let mut pinned = 0u64;
        // SAFETY: the pointer refers to a local variable.
        check("cuMemHostAlloc", unsafe { pin(&raw mut pinned, bytes, 0) })?;
        Ok(pinned)
    }

    /// Reads beyond the end of pinned memory several times. Returns the result codes.
    pub fn read_too_much(&self) -> Result<Vec<c_int>, Failed> {
        let bytes = 8usize << 20;
        let (mut back, pinned) = (vec![0u8; bytes + (4 << 20)], self.pin(bytes)?);
        let read = |back: &mut Vec<u8>| {
            // SAFETY: the buffer has this size, and the guest library rejects reads beyond the pinned memory.
            unsafe { (self.functions.raw_read)(back.as_mut_ptr().cast(), pinned, back.len()) }
        };
        let codes = (0..20).map(|_| read(&mut back)).collect();
        back.truncate(bytes);
        check("cuMemcpyDtoH", read(&mut back))?;
        Ok(codes)
    }

    /// Links `data` and a file. Returns the linked image, and the results of adding empty data and of destroying the
    /// link.
    pub fn link(&self, data: &[u8], file: &std::path::Path) -> Result<(Vec<u8>, Vec<c_int>), Failed> {
        type Options = *const c_int;
        type Values = *const u64;
        let create = function!(self, c"cuLinkCreate", 12_000, fn(u32, Options, Values, *mut u64));
        let add = function!(
            self,
            c"cuLinkAddData",
            12_000,
            fn(u64, c_int, *const u8, usize, *const c_char, u32, Options, Values)
        );
        let add_file = function!(self, c"cuLinkAddFile", 12_000, fn(u64, c_int, *const c_char, u32, Options, Values));
        let complete = function!(self, c"cuLinkComplete", 12_000, fn(u64, *mut *const u8, *mut usize));
        let destroy = function!(self, c"cuLinkDestroy", 12_000, fn(u64));
        let path = CString::new(file.as_os_str().as_encoded_bytes()).map_err(|_| Failed { call: "path", code: 1 })?;
        let (mut link, mut result, mut bytes) = (0u64, std::ptr::null(), 0usize);
        // Options: the log buffer and its size, the wall time, and the optimization level.
        let mut log = [0u8; 64];
        let (kinds, values) = ([3, 4, 2, 7], [log.as_mut_ptr().addr() as u64, 64, 0, 3]);
        let none = (std::ptr::null(), std::ptr::null());
        // SAFETY: the arguments are local variables of the right sizes, and the result is valid until the link is
        // destroyed.
        unsafe {
            check("cuLinkCreate", create(4, kinds.as_ptr(), values.as_ptr(), &raw mut link))?;
            check("cuLinkAddData", add(link, 1, data.as_ptr(), data.len(), c"data".as_ptr(), 0, none.0, none.1))?;
            check("cuLinkAddFile", add_file(link, 4, path.as_ptr(), 0, none.0, none.1))?;
            let empty = add(link, 1, data.as_ptr(), 0, std::ptr::null(), 0, none.0, none.1);
            check("cuLinkComplete", complete(link, &raw mut result, &raw mut bytes))?;
            let linked = std::slice::from_raw_parts(result, bytes).to_vec();
            Ok((linked, vec![empty, destroy(link)]))
        }
    }

    /// Returns properties that programs query in each step: a stream's capture state (from two calls), a context limit,
    /// an occupancy, and 1 if an address is in the first card's memory.
    pub fn facts(&self, stream: u64, function: u64, at: u64) -> Result<[u64; 5], Failed> {
        let is_capturing = function!(self, c"cuStreamIsCapturing", 12_000, fn(u64, *mut c_int));
        let information = function!(
            self,
            c"cuStreamGetCaptureInfo",
            12_000,
            fn(u64, *mut c_int, *mut u64, *mut u64, *mut u64, *mut u64)
        );
        let limit = function!(self, c"cuCtxGetLimit", 12_000, fn(*mut usize, c_int));
        let blocks =
            function!(self, c"cuOccupancyMaxActiveBlocksPerMultiprocessor", 12_000, fn(*mut c_int, u64, c_int, usize));
        let (mut state, mut detail, mut stack, mut count) = (7, 7, 0usize, 0);
        let none = std::ptr::null_mut();
        // SAFETY: the pointers refer to local variables.
        unsafe {
            check("cuStreamIsCapturing", is_capturing(stream, &raw mut state))?;
            check("cuStreamGetCaptureInfo", information(stream, &raw mut detail, none, none, none, none))?;
            check("cuCtxGetLimit", limit(&raw mut stack, 0))?;
            check("cuOccupancy", blocks(&raw mut count, function, 256, 0))?;
        }
        let (mut kind, mut pointer, mut device) = (0u32, 0u64, 7i32);
        self.raw_attribute((&raw mut kind).cast(), 2, at)?;
        self.raw_attribute((&raw mut pointer).cast(), 3, at)?;
        self.raw_attribute((&raw mut device).cast(), 9, at)?;
        let is_card = (kind, pointer, device) == (2, at, 0);
        Ok([state as u64, detail as u64, stack as u64, count as u64, u64::from(is_card)])
    }

    /// Begins a capture in relaxed mode.
    pub fn begin(&self, stream: u64) -> Result<(), Failed> {
        self.raw_begin(stream, 2)
    }

    /// Ends a capture. Returns the result code.
    pub fn end(&self, stream: u64) -> c_int {
        let mut graph = 0;
        self.raw_end(stream, &raw mut graph).err().map_or(0, |failed| failed.code)
    }
}
