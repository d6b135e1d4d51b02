//! Modules, launches and waits.

use std::ffi::{c_char, c_int, c_void};
use std::time::{Duration, Instant};

use gdev::{Fence, Grid, Image, Params};

use crate::handle::{Failure, Ghandle, Outcome, State, bytes, invalid, status, store, text, with};

/// Grid and block dimensions in x, y and z.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GdevGrid {
    /// Grid dimensions in blocks.
    pub blocks: [u32; 3],
    /// Block dimensions in threads.
    pub threads: [u32; 3],
}

/// Description of a kernel in raw `sm_20` code.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GdevKernel {
    /// Name of the kernel, NUL-terminated.
    pub name: *const c_char,
    /// Offset of the entry point in the code, in bytes.
    pub entry_offset: u32,
    /// Size of the kernel's code in bytes.
    pub size: u32,
    /// Number of registers per thread.
    pub registers: u32,
    /// Static shared memory per block in bytes.
    pub shared_bytes: u32,
    /// Local memory per thread in bytes.
    pub local_bytes: u32,
    /// Number of barriers per block.
    pub barriers: u32,
    /// Size of the parameters in bytes.
    pub params: u32,
}

/// Poll interval of a wait with a timeout.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

fn keep(state: &mut State, image: Image<'_>, module: *mut u32) -> Outcome<()> {
    let loaded = state.context.load(image)?;
    state.modules.push(loaded);
    let number = u32::try_from(state.modules.len() - 1).map_err(|_| invalid("too many modules"))?;
    // SAFETY: the functions below pass the program's pointer. See UNSAFETY in the crate documentation.
    unsafe { store(module, number) }
}

/// Loads a module. A CUDA device accepts PTX or a cubin. Other devices accept an `sm_20` cubin or `sm_20` assembly.
/// Stores the module number in `module`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gload(handle: Ghandle, image: *const c_void, size: u64, module: *mut u32) -> c_int {
    status(with(handle, |state| {
        // SAFETY: see UNSAFETY in the crate documentation.
        let image = unsafe { bytes(image, size) }?;
        if state.context.backend().name() == "cuda" {
            return keep(state, Image::Cuda(image), module);
        }
        let program = sm20::read(image).map_err(invalid)?;
        keep(state, Image::Sm20(&program), module)
    }))
}

/// Loads raw `sm_20` code (64-bit instructions) with the descriptions of `count` kernels.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gload_raw(
    handle: Ghandle,
    code: *const c_void,
    size: u64,
    kernels: *const GdevKernel,
    count: u32,
    module: *mut u32,
) -> c_int {
    status(with(handle, |state| {
        // SAFETY: see UNSAFETY in the crate documentation.
        let code = unsafe { bytes(code, size) }?;
        // SAFETY: see UNSAFETY in the crate documentation.
        let descriptions = unsafe { bytes(kernels.cast(), u64::from(count) * size_of::<GdevKernel>() as u64) }?;
        let mut known = Vec::new();
        for description in descriptions.chunks_exact(size_of::<GdevKernel>()) {
            // SAFETY: the chunk has the size of the structure, and every bit pattern is valid for it.
            let kernel: GdevKernel = unsafe { description.as_ptr().cast::<GdevKernel>().read_unaligned() };
            let GdevKernel { name, entry_offset, size, registers, shared_bytes, local_bytes, barriers, params } =
                kernel;
            // SAFETY: see UNSAFETY in the crate documentation.
            let name = unsafe { text(name) }?.to_owned();
            known.push(sm20::Kernel {
                name,
                entry_offset,
                size,
                registers,
                shared_bytes,
                local_bytes,
                barriers,
                params,
                parameters: Vec::new(),
            });
        }
        let program = sm20::Program::from_raw(code, known).map_err(invalid)?;
        keep(state, Image::Sm20(&program), module)
    }))
}

/// Launches a kernel of a module without waiting. `params` contains the parameters in the kernel's layout. Stores the
/// number for [`gsync`] in `id`. The kernel may access all memory of the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glaunch(
    handle: Ghandle,
    module: u32,
    kernel: *const c_char,
    grid: *const GdevGrid,
    params: *const c_void,
    params_size: u64,
    id: *mut u64,
) -> c_int {
    status(with(handle, |state| {
        // SAFETY: see UNSAFETY in the crate documentation.
        let (name, params) = unsafe { (text(kernel)?, bytes(params, params_size)?) };
        if grid.is_null() {
            return Err(invalid("the grid is NULL"));
        }
        // SAFETY: see UNSAFETY in the crate documentation.
        let GdevGrid { blocks, threads } = unsafe { grid.read_unaligned() };
        let module = state.modules.get(module as usize).copied();
        let module = module.ok_or_else(|| invalid("the module does not belong to this handle"))?;
        let uses: Vec<_> = state.memory.values().map(|(memory, _)| *memory).collect();
        let (grid, params) = (Grid { blocks, threads }, Params::from_bytes(params));
        let fence = state.context.launch(module, name, grid, &params, &uses)?;
        let number = state.number(fence);
        // SAFETY: see UNSAFETY in the crate documentation.
        unsafe { store(id, number) }
    }))
}

/// Waits for the work with number `id`, and for all earlier work. If `timeout` is not NULL, waits at most that long,
/// and returns `-ETIMEDOUT` when the timeout expires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gsync(handle: Ghandle, id: u64, timeout: *const libc::timespec) -> c_int {
    let limit = if timeout.is_null() {
        None
    } else {
        // SAFETY: see UNSAFETY in the crate documentation.
        let libc::timespec { tv_sec, tv_nsec } = unsafe { timeout.read_unaligned() };
        let nanos = u32::try_from(tv_nsec).unwrap_or_default().min(999_999_999);
        Some(Duration::new(u64::try_from(tv_sec).unwrap_or_default(), nanos))
    };
    let began = Instant::now();
    loop {
        let done = with(handle, |state| {
            if id == 0 || id > state.fences {
                return Err(invalid(format!("{id} is not a number of this handle's work")));
            }
            let fence = Fence::new(id);
            if limit.is_none() || state.context.is_done(fence)? {
                state.context.wait(fence)?;
                return Ok(true);
            }
            Ok(false)
        });
        // Other threads can use the handle between polls.
        match (done, limit) {
            (Ok(true), _) => return 0,
            (Err(failure), _) => return status(Err(failure)),
            (Ok(false), Some(limit)) if began.elapsed() >= limit => {
                return status(Err(Failure(libc::ETIMEDOUT, format!("work {id} did not complete in time"))));
            }
            (Ok(false), _) => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

/// Waits for all work of a handle.
#[unsafe(no_mangle)]
pub extern "C" fn gbarrier(handle: Ghandle) -> c_int {
    status(with(handle, |state| Ok(state.context.finish()?)))
}
