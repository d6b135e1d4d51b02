//! Module and library images, and their variables.
//!
//! UNSAFETY: reads images through the program's pointers.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt as _;
use std::sync::{Mutex, PoisonError};

use cuda_calls::own;

use crate::addresses;
use crate::call::{code, index, invoke, to};
use crate::connection::{self, Connection};
use crate::frame::{Frame, Handler};
use crate::result::{FILE_NOT_FOUND, INVALID_VALUE, NOT_FOUND, OUT_OF_MEMORY};
use crate::thread;

pub const HANDLERS: &[(&str, Handler)] = &[
    ("cuModuleLoad", load_file),
    ("cuModuleLoadData", load_data),
    ("cuModuleLoadDataEx", load_data_with_options),
    ("cuModuleLoadFatBinary", load_data),
    ("cuModuleGetGlobal_v2", module_global),
    ("cuLibraryLoadData", load_library),
    ("cuLibraryLoadFromFile", load_library_file),
    ("cuLibraryGetGlobal", library_global),
    ("cuLibraryGetManaged", library_managed),
];

/// `CUDA_ERROR_INVALID_IMAGE`.
const INVALID_IMAGE: i32 = 200;
/// Magic number of a fat binary wrapper.
const WRAPPER: u32 = 0x4662_43b1;
/// Magic number of a fat binary.
const FAT_BINARY: u32 = 0xba55_ed50;
/// Magic number of an ELF file.
const ELF: u32 = 0x464c_457f;
/// JIT options that refer to the program's buffers: logs and their sizes. These options are not sent to the worker.
const LOG_OPTIONS: [u32; 4] = [3, 4, 5, 6];
/// JIT option that returns the compilation time. A link would store it later, when the program's memory may no longer
/// be valid.
const TIME_OPTION: u32 = 2;
/// Maximum number of JIT options.
const MAX_OPTIONS: usize = 64;

/// Lock held from sending an image's first part until the call that uses the image. Static, because exported functions
/// cannot receive state as an argument.
static LOADING: Mutex<()> = Mutex::new(());

/// Reads an integer at an offset.
///
/// # Safety
/// The bytes read must be within the image.
unsafe fn at<T: Copy>(image: u64, offset: u64) -> T {
    // SAFETY: guaranteed by the caller.
    unsafe { ((image + offset) as *const T).read_unaligned() }
}

/// Returns the address and the size of an image.
///
/// # Safety
/// `image` must be an image that `cuModuleLoadData` accepts.
unsafe fn extent(image: u64) -> Result<(u64, usize), i32> {
    // SAFETY: guaranteed by the caller; each image type has the fields that are read.
    unsafe {
        match at::<u32>(image, 0) {
            WRAPPER => extent(at(image, 8)),
            FAT_BINARY => {
                let bytes = u64::from(at::<u16>(image, 6)).checked_add(at::<u64>(image, 8)).ok_or(INVALID_IMAGE)?;
                Ok((image, usize::try_from(bytes).map_err(|_| INVALID_IMAGE)?))
            }
            ELF => {
                let table = |offset: u64, size: u64, count: u64| {
                    let entries = u64::from(at::<u16>(image, size)) * u64::from(at::<u16>(image, count));
                    at::<u64>(image, offset).checked_add(entries)
                };
                // The image ends after its segment or section header table, because the section header table follows
                // all contents.
                let end = table(32, 54, 56).zip(table(40, 58, 60)).map(|(a, b)| a.max(b)).ok_or(INVALID_IMAGE)?;
                Ok((image, usize::try_from(end).map_err(|_| INVALID_IMAGE)?))
            }
            _ => Ok((image, CStr::from_ptr(image as *const c_char).to_bytes_with_nul().len())),
        }
    }
}

/// Sends an image in parts.
///
/// # Safety
/// The image must be readable for `bytes` bytes.
unsafe fn send(connection: &Connection, image: u64, bytes: usize) -> Result<(), i32> {
    if bytes > own::MAX_IMAGE_BYTES {
        return Err(OUT_OF_MEMORY);
    }
    let mut done = 0;
    while done < bytes {
        let part = (bytes - done).min(own::IMAGE_PART_BYTES);
        thread::with(|thread| {
            connection.post(thread, own::IMAGE_PART, |message| {
                message.extend([u64::from(done == 0), part as u64]);
                let first = message.len();
                message.resize(first + part.div_ceil(8), 0);
                let room = message.get_mut(first..).ok_or(INVALID_VALUE)?;
                let from = (image + done as u64) as *const u8;
                // SAFETY: the buffer has this size, and the caller guarantees the source.
                unsafe { std::ptr::copy_nonoverlapping(from, room.as_mut_ptr().cast(), part) };
                Ok(())
            })
        })?;
        done += part;
    }
    Ok(())
}

/// Sends an image, unless it is null, and then the call that uses it.
fn with_image(image: u64, call: impl FnOnce() -> Result<(), i32>) -> Result<(), i32> {
    let connection = connection::get()?;
    let _loading = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
    if image != 0 {
        // SAFETY: the program passes a valid image.
        unsafe {
            let (address, bytes) = extent(image)?;
            send(connection, address, bytes)?;
        }
    }
    call()
}

/// Sends bytes as an image, and then the call that uses them.
pub fn with_bytes(data: &[u8], call: impl FnOnce() -> Result<(), i32>) -> Result<(), i32> {
    let connection = connection::get()?;
    let _loading = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the slice has this size.
    unsafe { send(connection, data.as_ptr().addr() as u64, data.len())? };
    call()
}

/// Loads a module from the program's memory.
pub fn load(place: u64, image: u64) -> Result<(), i32> {
    with_image(image, || invoke(index!("cuModuleLoadData+"), &[place, u64::from(image != 0)]))
}

fn load_data(frame: &Frame) -> i32 {
    code(load(frame.arg(0), frame.arg(1)))
}

/// JIT options that are sent to the worker.
pub struct Options {
    kinds: Vec<u32>,
    values: Vec<u64>,
}

/// Reads JIT options, and omits those that are not sent to the worker.
///
/// # Safety
/// Both lists must have `count` elements.
pub unsafe fn options(count: u32, kinds: u64, values: u64) -> Result<Options, i32> {
    let count = count as usize;
    if count > MAX_OPTIONS || (count > 0 && (kinds == 0 || values == 0)) {
        return Err(INVALID_VALUE);
    }
    let mut read = Options { kinds: Vec::new(), values: Vec::new() };
    for index in 0..count as u64 {
        // SAFETY: guaranteed by the caller.
        let (kind, value) = unsafe { (at::<u32>(kinds, 4 * index), at::<u64>(values, 8 * index)) };
        if !LOG_OPTIONS.contains(&kind) && kind != TIME_OPTION {
            read.kinds.push(kind);
            read.values.push(value);
        }
    }
    Ok(read)
}

impl Options {
    /// Returns the number of options, and the addresses of the options and of their values.
    pub fn arguments(&self) -> [u64; 3] {
        let (kinds, values) = (self.kinds.as_ptr().addr() as u64, self.values.as_ptr().addr() as u64);
        [self.kinds.len() as u64, kinds, values]
    }
}

fn load_data_with_options(frame: &Frame) -> i32 {
    // SAFETY: the program passes valid arguments.
    let options = unsafe { options(frame.int(2), frame.arg(3), frame.arg(4)) };
    let image = frame.arg(1);
    code(options.and_then(|options| {
        let [count, kinds, values] = options.arguments();
        let args = [frame.arg(0), u64::from(image != 0), count, kinds, values];
        with_image(image, || invoke(index!("cuModuleLoadDataEx+"), &args))
    }))
}

fn load_library(frame: &Frame) -> i32 {
    load_library_from(frame, frame.arg(1))
}

/// Loads a library from an image, with the other arguments of the call.
fn load_library_from(frame: &Frame, image: u64) -> i32 {
    let load = || {
        // SAFETY: the program passes valid arguments.
        let jit = unsafe { options(frame.int(4), frame.arg(2), frame.arg(3))? };
        // Omit library options, which refer to the program's tables or promise that the image remains in memory.
        let [jits, jit_kinds, jit_values] = jit.arguments();
        let args = [frame.arg(0), u64::from(image != 0), jit_kinds, jit_values, jits, 0, 0, 0];
        with_image(image, || invoke(index!("cuLibraryLoadData+"), &args))
    };
    code(load())
}

/// Reads the file named by the second argument, and loads it from memory.
fn with_file(frame: &Frame, load: impl FnOnce(u64) -> i32) -> i32 {
    if frame.arg(1) == 0 {
        return INVALID_VALUE;
    }
    // SAFETY: the program passes a valid path.
    let path = unsafe { CStr::from_ptr(frame.arg(1) as *const c_char) };
    // PTX must be NUL-terminated.
    match std::fs::read(OsStr::from_bytes(path.to_bytes())) {
        Ok(mut image) => {
            image.push(0);
            image.resize(image.len().max(64), 0);
            load(image.as_ptr().addr() as u64)
        }
        Err(_) => FILE_NOT_FOUND,
    }
}

fn load_file(frame: &Frame) -> i32 {
    with_file(frame, |image| code(load(frame.arg(0), image)))
}

fn load_library_file(frame: &Frame) -> i32 {
    with_file(frame, |image| load_library_from(frame, image))
}

fn global(frame: &Frame, call: usize) -> i32 {
    let (mut address, mut bytes) = (0u64, 0u64);
    match invoke(call, &[to(&mut address), to(&mut bytes), frame.arg(2), frame.arg(3)]) {
        Ok(()) if addresses::add(address, bytes) => {
            frame.put_optional(0, address);
            frame.put_optional(1, bytes);
            0
        }
        Ok(()) => NOT_FOUND,
        Err(error) => error,
    }
}

fn module_global(frame: &Frame) -> i32 {
    global(frame, index!("cuModuleGetGlobal_v2+"))
}

fn library_global(frame: &Frame) -> i32 {
    global(frame, index!("cuLibraryGetGlobal+"))
}

fn library_managed(frame: &Frame) -> i32 {
    global(frame, index!("cuLibraryGetManaged+"))
}
