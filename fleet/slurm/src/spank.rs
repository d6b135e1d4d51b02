//! The entry points that Slurm calls, and calls to Slurm's functions.
//!
//! Slurm loads a plugin into `srun`, `sbatch` and `salloc`, which read the options, and into `slurmstepd` on the nodes.
//! `slurmstepd` starts a job's processes, which run as root until they switch to the user. `slurmstepd` runs epilogs in
//! another process.
//!
//! UNSAFETY: Slurm is written in C. Slurm guarantees that the pointers it passes are valid during the call. This module
//! looks up Slurm's functions by name at run time, with the signatures from `spank(7)`, so that the crate links without
//! Slurm.
#![allow(unsafe_code, reason = "Slurm calls plugins by C functions")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::catch_unwind;
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library, Symbol};

use admin_client::terminal;

use crate::options::{Arguments, Given, OPTIONS};
use crate::work::{self, Job};

/// Name of the plugin. It is part of the names of the environment variables that Slurm uses to pass options.
const NAME: &[u8] = b"gpu_mediator\0";
/// Type of the plugin as a C string.
const TYPE: &[u8] = b"spank\0";
/// Marker after the version. The installer searches for it.
pub const MARK: [u32; 3] = [0x6d70_6773, 0x5f61_6964, 0x7265_7376];

/// Plugin name, which Slurm reads.
#[unsafe(no_mangle)]
pub static plugin_name: [u8; NAME.len()] = *b"gpu_mediator\0";
/// Plugin type, which Slurm reads.
#[unsafe(no_mangle)]
pub static plugin_type: [u8; TYPE.len()] = *b"spank\0";
/// Slurm version for which the plugin was built. Slurm compares the first element with its own version. The version is
/// 0 in this build. The installer writes Slurm's version into its copy of the library.
#[unsafe(no_mangle)]
pub static plugin_version: [u32; 4] = [0, MARK[0], MARK[1], MARK[2]];
/// Version of the plugin itself.
#[unsafe(no_mangle)]
pub static spank_plugin_version: u32 = 1;

/// Slurm's handle for a call to the plugin.
type Handle = *mut c_void;

/// `ESPANK_SUCCESS` and `SLURM_SUCCESS`.
const GOOD: c_int = 0;
/// `SLURM_ERROR`.
const BAD: c_int = -1;
/// `S_JOB_UID` of `enum spank_item`.
const JOB_UID: c_int = 0;
/// `S_JOB_ID`.
const JOB_ID: c_int = 2;
/// `S_CTX_REMOTE` of `spank_context`.
const REMOTE: c_int = 2;
/// `S_JOB_ARRAY_ID`, which is 0 for a job that is not in an array.
const ARRAY_ID: c_int = 30;
/// `S_JOB_ARRAY_TASK_ID`.
const ARRAY_TASK_ID: c_int = 31;
/// `ESPANK_NOSPACE`: the value before Slurm 21.08, and the value since then.
const NO_SPACE: [c_int; 2] = [6, 3005];
/// Maximum size of a variable that the kernel passes to a program (`MAX_ARG_STRLEN`), in bytes, including its name and
/// its terminator.
const MAX_VARIABLE: usize = 128 << 10;
/// Environment variable that lists a step's shards. It is only a hint, because the user can write it.
const SHARDS: &CStr = c"SLURM_SHARDS_ON_NODE";

/// `struct spank_option`.
#[repr(C)]
struct SpankOption {
    name: *const c_char,
    arginfo: *const c_char,
    usage: *const c_char,
    has_arg: c_int,
    val: c_int,
    callback: Option<unsafe extern "C" fn(c_int, *const c_char, c_int) -> c_int>,
}

/// The options that were given in this process.
static GIVEN: Mutex<Given> = Mutex::new(Given::new());

/// Looks up a Slurm function in this process.
fn function<T>(name: &str) -> Option<Symbol<T>> {
    // SAFETY: the type matches the signature of this function in `spank(7)`. The symbol is in this process and is never
    // unloaded.
    unsafe { Library::this().get::<T>(name.as_bytes()) }.ok()
}

/// Writes a line to the log of the process. For a command that a user runs, this log is the terminal.
fn complain(what: &str) {
    // The line may contain names chosen by jobs and programs.
    let line = CString::new(format!("gpu-mediator: {}", terminal::word(what))).unwrap_or_default();
    match function::<unsafe extern "C" fn(*const c_char, ...)>("slurm_error") {
        // SAFETY: the format takes one string, and the string is terminated.
        Some(error) => unsafe { error(c"%s".as_ptr(), line.as_ptr()) },
        None => eprintln!("{}", line.to_string_lossy()),
    }
}

/// Returns the full value of one of the step's environment variables.
fn variable(handle: Handle, name: &CStr) -> Result<Option<Vec<u8>>, String> {
    type Get = unsafe extern "C" fn(Handle, *const c_char, *mut c_char, c_int) -> c_int;
    let Some(get) = function::<Get>("spank_getenv") else { return Ok(None) };
    whole(&name.to_string_lossy(), |value| {
        let length = c_int::try_from(value.len()).unwrap_or(c_int::MAX);
        // SAFETY: the handle is valid during this call, and the buffer has `length` bytes.
        unsafe { get(handle, name.as_ptr(), value.as_mut_ptr().cast(), length) }
    })
}

/// Reads a value of at most `MAX_VARIABLE` bytes with `get`, which fills a buffer or reports that the buffer is too
/// small.
fn whole(name: &str, get: impl Fn(&mut [u8]) -> c_int) -> Result<Option<Vec<u8>>, String> {
    for size in [4 << 10, MAX_VARIABLE] {
        let mut value = vec![0u8; size];
        match get(&mut value) {
            GOOD => return Ok(CStr::from_bytes_until_nul(&value).ok().map(|value| value.to_bytes().to_owned())),
            code if NO_SPACE.contains(&code) => {}
            _ => return Ok(None),
        }
    }
    Err(too_long(name))
}

fn too_long(name: &str) -> String {
    format!("the variable {name} has more than the {MAX_VARIABLE} bytes that a program can have; shorten it")
}

/// Prepends `first` to the colon-separated list of folders in a variable, if any. Returns the variable's new value.
fn in_front(name: &str, first: &str, rest: Option<Vec<u8>>) -> Result<Vec<u8>, String> {
    let mut value = first.as_bytes().to_owned();
    if let Some(rest) = rest.filter(|rest| !rest.is_empty()) {
        value.push(b':');
        value.extend(rest);
    }
    // The limit includes the name, `=` and the terminator.
    if name.len() + value.len() + 2 > MAX_VARIABLE { Err(too_long(name)) } else { Ok(value) }
}

fn set_variable(handle: Handle, name: &str, value: Vec<u8>) -> bool {
    type Set = unsafe extern "C" fn(Handle, *const c_char, *const c_char, c_int) -> c_int;
    let (Ok(name), Ok(value)) = (CString::new(name), CString::new(value)) else { return false };
    // SAFETY: the handle is valid during this call. Both strings are terminated, and Slurm copies them.
    function::<Set>("spank_setenv").is_some_and(|set| unsafe { set(handle, name.as_ptr(), value.as_ptr(), 1) } == GOOD)
}

/// Removes a variable from the job's environment. Ignores a missing variable.
fn unset_variable(handle: Handle, name: &CStr) {
    if let Some(unset) = function::<unsafe extern "C" fn(Handle, *const c_char) -> c_int>("spank_unsetenv") {
        // SAFETY: the handle is valid during this call, and the string is terminated.
        unsafe { unset(handle, name.as_ptr()) };
    }
}

/// Returns the name of this process's node, which Slurm sets in the environment of `slurmstepd` (22.05 and later). The
/// variable in the step's environment must not be used, because the user can write it and the name becomes part of
/// paths.
fn node() -> Result<String, String> {
    let node = std::env::var("SLURMD_NODENAME").ok().filter(|node| !node.is_empty());
    let node = node.ok_or("Slurm does not provide the name of this node: Slurm 22.05 or newer is required")?;
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if !node.bytes().all(good) || node.starts_with('.') {
        return Err(format!("{node:?} is not the name of a node"));
    }
    Ok(node)
}

fn number(handle: Handle, item: c_int) -> Option<u32> {
    let get = function::<unsafe extern "C" fn(Handle, c_int, ...) -> c_int>("spank_get_item")?;
    let mut number: u32 = 0;
    // SAFETY: all requested items are 32 bits wide, and the variable for them outlives the call.
    (unsafe { get(handle, item, &raw mut number) } == GOOD).then_some(number)
}

fn is_remote() -> bool {
    // SAFETY: the function takes no arguments.
    function::<unsafe extern "C" fn() -> c_int>("spank_context").is_some_and(|context| unsafe { context() } == REMOTE)
}

/// Parses the words of a line in `plugstack.conf`.
fn arguments(count: c_int, words: *const *const c_char) -> Result<Arguments, String> {
    let count = usize::try_from(count).unwrap_or(0).min(64);
    let word = |index: usize| {
        // SAFETY: Slurm guarantees `count` pointers to terminated strings.
        let word = unsafe { CStr::from_ptr(*words.add(index)) };
        word.to_str().map_err(|_| "an argument in plugstack.conf is not UTF-8".to_owned())
    };
    Arguments::read(&(0..count).map(word).collect::<Result<Vec<_>, _>>()?)
}

/// Runs a hook's function. Converts a panic to an error, so that it does not terminate Slurm's process.
fn guarded(what: impl FnOnce() -> Result<(), String> + std::panic::UnwindSafe) -> c_int {
    match catch_unwind(what) {
        Ok(Ok(())) => GOOD,
        Ok(Err(error)) => {
            complain(&error);
            BAD
        }
        Err(_) => {
            complain("the plugin panicked");
            BAD
        }
    }
}

unsafe extern "C" fn on_option(number: c_int, value: *const c_char, _remote: c_int) -> c_int {
    guarded(|| {
        let text = if value.is_null() {
            ""
        } else {
            // SAFETY: Slurm guarantees a terminated string.
            unsafe { CStr::from_ptr(value) }.to_str().map_err(|_| "an option's value is not UTF-8".to_owned())?
        };
        let number = usize::try_from(number).map_err(|_| "Slurm passed an unknown option".to_owned())?;
        GIVEN.lock().unwrap_or_else(PoisonError::into_inner).take(number, text)
    })
}

/// Registers the options in every process that loads the plugin.
#[unsafe(no_mangle)]
pub extern "C" fn slurm_spank_init(handle: Handle, count: c_int, words: *const *const c_char) -> c_int {
    guarded(|| {
        arguments(count, words)?;
        type Register = unsafe extern "C" fn(Handle, *const SpankOption) -> c_int;
        // Contexts such as Slurm's daemons have no options.
        let Some(register) = function::<Register>("spank_option_register") else { return Ok(()) };
        for (index, option) in OPTIONS.iter().enumerate() {
            let shown = SpankOption {
                name: option.name.as_ptr(),
                arginfo: option.value.map_or(std::ptr::null(), CStr::as_ptr),
                usage: option.usage.as_ptr(),
                has_arg: c_int::from(option.value.is_some()),
                val: c_int::try_from(index).unwrap_or(c_int::MAX),
                callback: Some(on_option),
            };
            // SAFETY: the handle is valid during this call. Slurm copies the option, whose texts are constants.
            if unsafe { register(handle, &raw const shown) } != GOOD {
                return Err(format!("Slurm rejected the option --{}", option.name.to_string_lossy()));
            }
        }
        Ok(())
    })
}

/// As root, creates the job's tenant or vGPU before the job's first process runs. Sets the environment variables of
/// each process.
#[unsafe(no_mangle)]
pub extern "C" fn slurm_spank_task_init_privileged(handle: Handle, count: c_int, words: *const *const c_char) -> c_int {
    guarded(|| {
        if !is_remote() {
            return Ok(());
        }
        let given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // Most jobs have no shards, so the controller need not be queried for them. For other jobs, trust only the
        // controller's number of shards.
        if variable(handle, SHARDS)?.is_none() && given.is_silent() {
            return Ok(());
        }
        let arguments = arguments(count, words)?.on(Some(&node()?));
        let array = number(handle, ARRAY_ID).filter(|array| *array != 0);
        let job = Job {
            id: number(handle, JOB_ID).ok_or("Slurm does not provide the job's ID")?,
            uid: number(handle, JOB_UID).ok_or("Slurm does not provide the job's user")?,
            of_array: array.zip(number(handle, ARRAY_TASK_ID)),
        };
        let variables = work::begin(&arguments, &given, &job)?;
        if variables.is_empty() {
            return Ok(());
        }
        // The variable contains Slurm's card number. The library does not need this variable, because only the tenant's
        // card is visible.
        unset_variable(handle, c"CUDA_VISIBLE_DEVICES");
        for (name, value) in variables {
            let there = if name == "LD_LIBRARY_PATH" { variable(handle, c"LD_LIBRARY_PATH")? } else { None };
            if !set_variable(handle, &name, in_front(&name, &value, there)?) {
                return Err(format!("the variable {name} cannot be set"));
            }
        }
        Ok(())
    })
}

/// Records the job's usage so far, while the controller still accepts notes.
#[unsafe(no_mangle)]
pub extern "C" fn slurm_spank_exit(handle: Handle, count: c_int, words: *const *const c_char) -> c_int {
    guarded(|| {
        if !is_remote() {
            return Ok(());
        }
        let Some(id) = number(handle, JOB_ID) else { return Ok(()) };
        let arguments = arguments(count, words)?;
        // A failure to store the note must not make the job fail.
        if let Err(error) = node().and_then(|node| work::note(&arguments.on(Some(&node)), id)) {
            complain(&error);
        }
        Ok(())
    })
}

/// Removes the job's tenant or vGPU after the job has ended. On failure, returns an error, so that Slurm drains the
/// node.
#[unsafe(no_mangle)]
pub extern "C" fn slurm_spank_job_epilog(_handle: Handle, count: c_int, words: *const *const c_char) -> c_int {
    guarded(|| {
        let id = std::env::var("SLURM_JOB_ID").ok().and_then(|id| id.parse().ok());
        let id: u32 = id.ok_or("SLURM_JOB_ID is not set, or is not a number")?;
        let arguments = arguments(count, words)?.on(std::env::var("SLURMD_NODENAME").ok().as_deref());
        work::end(&arguments, id)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fills a buffer as `spank_getenv` does: writes as many bytes as fit, followed by a terminator.
    fn get(value: &[u8]) -> impl Fn(&mut [u8]) -> c_int {
        move |buffer| {
            let fits = value.len().min(buffer.len() - 1);
            buffer[..fits].copy_from_slice(&value[..fits]);
            buffer[fits] = 0;
            if fits < value.len() { NO_SPACE[1] } else { GOOD }
        }
    }

    #[test]
    fn long_variables_are_kept_whole_or_refused_and_never_replaced() {
        for length in [0, 1, 4095, 4096, 5000, MAX_VARIABLE - 1] {
            let value = vec![b'x'; length];
            assert_eq!(whole("A", get(&value)).unwrap().as_deref(), Some(&value[..]), "{length}");
        }
        assert!(whole("A", get(&vec![b'x'; MAX_VARIABLE])).unwrap_err().contains("the variable A has more than"));
        assert_eq!(whole("A", |_| 3004), Ok(None));
        // A path is not necessarily valid UTF-8.
        assert_eq!(whole("A", get(b"/\xff")).unwrap().unwrap(), b"/\xff");
    }

    #[test]
    fn library_is_prepended_to_existing_value() {
        assert_eq!(in_front("P", "/a", None).unwrap(), b"/a");
        assert_eq!(in_front("P", "/a", Some(Vec::new())).unwrap(), b"/a");
        assert_eq!(in_front("P", "/a", Some(b"/b:/\xff".to_vec())).unwrap(), b"/a:/b:/\xff");
        assert!(in_front("P", "/a", Some(vec![b'x'; MAX_VARIABLE - 6])).is_ok());
        assert!(in_front("P", "/a", Some(vec![b'x'; MAX_VARIABLE - 5])).is_err());
    }
}
