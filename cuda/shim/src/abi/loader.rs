//! Finds and loads the real libraries.
//!
//! UNSAFETY: calls the dynamic loader.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{CStr, CString, OsStr, c_void};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::stubs::{self, SLOTS};
use super::{lookup, start};
use crate::log::{self, report};
use crate::settings::Settings;
use crate::symbols::{COUNT, NAMES, REAL, real};
use crate::{driver, fork};

/// File name that programs load.
const NAME: &str = "libcuda.so.1";
/// Default folders of the driver library.
const FOLDERS: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
    "/run/opengl-driver/lib",
    "/usr/lib",
];

/// Returns the function that implements a symbol in this process. The first call loads the driver and fills all slots.
pub fn resolve(index: usize) -> *mut () {
    let loaded = super::prepare().is_some_and(|shim| shim.libraries.driver.run(|| load(&shim.settings)));
    let function = stubs::get(index);
    // In a child, use the driver's own functions, some of which work without initialization.
    let is_drivers = || real(index).is_null() || function == real(index);
    if loaded && (fork::is_own() || is_drivers() || lookup::ours(index).is_some()) {
        return function;
    }
    driver::not_initialized as *mut ()
}

fn load(settings: &Settings) {
    let library = library(NAME, settings.driver.clone(), 0..COUNT);
    lookup::prepare();
    let mediated = !settings.sockets.is_empty();
    if mediated && !library && !log::wanted() {
        // Without this message, the program reports only CUDA error 100.
        log::write(&format!("gpu-mediator: libcuda: {}\n", no_driver(NAME)));
    }
    for index in 0..COUNT {
        let real = REAL[index].load(std::sync::atomic::Ordering::Relaxed);
        let missing = if library { driver::not_supported } else { driver::no_driver };
        let function = if real.is_null() { missing as *mut () } else { real };
        let ours = if mediated && !real.is_null() { start::ours(index) } else { None };
        SLOTS[index].store(ours.unwrap_or(function), std::sync::atomic::Ordering::Release);
    }
}

/// Loads the library from the path `named`, or else searches for the file `name`, and records its functions for
/// `symbols`. Returns true if the library was found.
pub fn library(name: &str, named: Option<PathBuf>, symbols: Range<usize>) -> bool {
    let library = candidates(name, named).find_map(|path| open(&path));
    if library.is_none() {
        report!("{}", no_driver(name));
    }
    for index in symbols {
        let symbol = library.map_or(std::ptr::null_mut(), |library| find(library, NAMES[index]));
        REAL[index].store(symbol, std::sync::atomic::Ordering::Release);
    }
    library.is_some()
}

/// Returns the error message for a missing driver.
fn no_driver(name: &str) -> String {
    let variable = cuda_protocol::DRIVER_VARIABLE;
    format!("no {name} of NVIDIA's driver was found; install the driver, or name its library in {variable}")
}

fn find(library: *mut c_void, name: &CStr) -> *mut () {
    // SAFETY: the handle comes from the loader and is never closed; the name is NUL-terminated.
    unsafe { libc::dlsym(library, name.as_ptr()).cast() }
}

fn open(path: &Path) -> Option<*mut c_void> {
    let name = CString::new(path.as_os_str().as_bytes()).ok()?;
    // SAFETY: loads the driver library, as the program would without this library.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        report!("{} cannot be loaded", path.display());
        return None;
    }
    report!("the driver is {}", path.display());
    Some(library)
}

/// Returns the candidate paths of the real library `name` in the loader's search order, excluding this library.
fn candidates(name: &str, named: Option<PathBuf>) -> impl Iterator<Item = PathBuf> {
    let own = own_file();
    let searched = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let searched: Vec<PathBuf> = std::env::split_paths(&searched).map(|folder| folder.join(name)).collect();
    let known = FOLDERS.iter().map(move |folder| Path::new(folder).join(name));
    named.into_iter().chain(searched).chain(cached(name)).chain(known).filter(move |path| {
        path.is_absolute() && std::fs::metadata(path).is_ok_and(|file| Some((file.dev(), file.ino())) != own)
    })
}

/// Returns the library's paths in the loader's cache: the strings in the cache file that end with the library's name.
fn cached(name: &str) -> Vec<PathBuf> {
    let cache = std::fs::read("/etc/ld.so.cache").unwrap_or_default();
    let suffix = format!("/{name}");
    let strings = cache.split(|byte| *byte == 0).filter(|text| text.ends_with(suffix.as_bytes()));
    strings.filter(|text| text.starts_with(b"/")).map(|text| PathBuf::from(OsStr::from_bytes(text))).collect()
}

/// Returns the device and inode numbers of this library's file.
fn own_file() -> Option<(u64, u64)> {
    // SAFETY: an all-zero `Dl_info` is valid, and the address lies in this library.
    let info = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        (libc::dladdr(resolve as *const c_void, &raw mut info) != 0).then_some(info)
    }?;
    // SAFETY: the loader's string is valid as long as the library is loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let file = std::fs::metadata(OsStr::from_bytes(name.to_bytes())).ok()?;
    Some((file.dev(), file.ino()))
}
