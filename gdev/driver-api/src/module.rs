//! Modules, functions and launches.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use gdev::{Grid, Image, Params};

use crate::context::{Function, Handle, State, new_handle, to_pointer, with};
use crate::error::{Code, Outcome, Status, status, store};

/// Maximum size of an image that is passed without a size, in bytes.
const MAX_IMAGE_BYTES: usize = 64 << 20;
/// Size of an ELF header in bytes. The image length is computed from the header.
const ELF_HEADER_BYTES: usize = 64;
/// Key in the `extra` list of `cuLaunchKernel`: the end of the list.
const EXTRA_END: usize = 0;
/// Key of the parameter buffer's address.
const EXTRA_BUFFER: usize = 1;
/// Key of the parameter buffer's size.
const EXTRA_SIZE: usize = 2;
/// Maximum number of keys in the `extra` list, including the end.
const MAX_EXTRA: usize = 16;

unsafe fn text<'a>(name: *const c_char) -> Outcome<&'a str> {
    if name.is_null() {
        return Err(Code::InvalidValue);
    }
    // SAFETY: guaranteed by the caller. See UNSAFETY in the crate documentation.
    unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| Code::InvalidValue)
}

fn load(state: &mut State, image: &[u8]) -> Outcome<usize> {
    let program = sm20::read(image).map_err(|why| {
        if std::env::var_os("GDEV_VERBOSE").is_some() {
            eprintln!("libcuda (gdev): {why}");
        }
        if image.starts_with(b".version") { Code::NoBinaryForGpu } else { Code::InvalidImage }
    })?;
    let module = state.gpu.load(Image::Sm20(&program))?;
    let handle = new_handle();
    state.modules.insert(handle, (module, program));
    Ok(handle)
}

/// Loads a module from a file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoad(module: *mut Handle, path: *const c_char) -> Status {
    status(with(|state| {
        // SAFETY: see UNSAFETY in the crate documentation.
        let path = unsafe { text(path) }?;
        let image = std::fs::read(path).map_err(|_| Code::FileNotFound)?;
        let handle = load(state, &image)?;
        // SAFETY: see UNSAFETY in the crate documentation.
        unsafe { store(module, to_pointer(handle)) }
    }))
}

/// Loads a module from an image in memory: an ELF file, or NUL-terminated text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut Handle, image: *const c_void) -> Status {
    status(with(|state| {
        if image.is_null() {
            return Err(Code::InvalidValue);
        }
        // SAFETY: the image is an ELF file, or NUL-terminated text.
        let bytes = unsafe {
            if CStr::from_ptr(image.cast()).to_bytes().starts_with(b"\x7fELF") {
                let header = std::slice::from_raw_parts(image.cast(), ELF_HEADER_BYTES);
                let length = sm20::cubin::length(header).filter(|length| *length <= MAX_IMAGE_BYTES);
                std::slice::from_raw_parts(image.cast::<u8>(), length.ok_or(Code::InvalidImage)?)
            } else {
                CStr::from_ptr(image.cast()).to_bytes()
            }
        };
        let handle = load(state, bytes)?;
        // SAFETY: see UNSAFETY in the crate documentation.
        unsafe { store(module, to_pointer(handle)) }
    }))
}

/// Waits for the context's work, and unloads a module. Invalidates the handles of its functions.
#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(module: Handle) -> Status {
    status(with(|state| {
        let handle = module.addr();
        if !state.modules.contains_key(&handle) {
            return Err(Code::InvalidHandle);
        }
        state.gpu.finish()?;
        state.modules.remove(&handle);
        state.functions.retain(|_, function| function.module != handle);
        Ok(())
    }))
}

/// Stores the handle of a kernel in a module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) -> Status {
    status(with(|state| {
        // SAFETY: see UNSAFETY in the crate documentation.
        let name = unsafe { text(name) }?;
        let (_, program) = state.modules.get(&module.addr()).ok_or(Code::InvalidHandle)?;
        let kernel = program.kernel(name).ok_or(Code::NotFound)?.clone();
        let handle = new_handle();
        let parameters = vec![0; kernel.params as usize];
        state.functions.insert(handle, Function { module: module.addr(), kernel, threads: [1; 3], parameters });
        // SAFETY: see UNSAFETY in the crate documentation.
        unsafe { store(function, to_pointer(handle)) }
    }))
}

/// Always fails, because this library does not support global variables.
#[unsafe(no_mangle)]
pub extern "C" fn cuModuleGetGlobal_v2(_: *mut u64, _: *mut usize, module: Handle, _: *const c_char) -> Status {
    status(with(|state| {
        Err(if state.modules.contains_key(&module.addr()) { Code::NotFound } else { Code::InvalidHandle })
    }))
}

/// Calls [`cuModuleGetGlobal_v2`], which always fails.
#[unsafe(no_mangle)]
pub extern "C" fn cuModuleGetGlobal(
    address: *mut u64,
    size: *mut usize,
    module: Handle,
    name: *const c_char,
) -> Status {
    cuModuleGetGlobal_v2(address, size, module, name)
}

fn function(state: &mut State, handle: Handle) -> Outcome<&mut Function> {
    state.functions.get_mut(&handle.addr()).ok_or(Code::InvalidHandle)
}

/// Stores a kernel attribute.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, handle: Handle) -> Status {
    status(with(|state| {
        let kernel = &function(state, handle)?.kernel;
        let found = match attribute {
            0 => 1024,
            1 => kernel.shared_bytes,
            2 => 0,
            3 => kernel.local_bytes,
            4 => kernel.registers,
            5 | 6 => 20,
            _ => return Err(Code::InvalidValue),
        };
        // SAFETY: see UNSAFETY in the crate documentation.
        unsafe { store(value, found as c_int) }
    }))
}

/// Sets the block dimensions for `cuLaunch`.
#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetBlockShape(handle: Handle, x: c_int, y: c_int, z: c_int) -> Status {
    status(with(|state| {
        let sizes = [x, y, z].map(|size| u32::try_from(size).ok().filter(|size| *size > 0));
        let [Some(x), Some(y), Some(z)] = sizes else { return Err(Code::InvalidValue) };
        function(state, handle)?.threads = [x, y, z];
        Ok(())
    }))
}

/// Sets the size of a launch's dynamic shared memory. Only 0 is supported.
#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetSharedSize(handle: Handle, bytes: c_uint) -> Status {
    status(with(|state| {
        function(state, handle)?;
        if bytes == 0 { Ok(()) } else { Err(Code::NotSupported) }
    }))
}

fn set_parameter(handle: Handle, offset: c_int, bytes: &[u8]) -> Status {
    status(with(|state| {
        let parameters = &mut function(state, handle)?.parameters;
        let start = usize::try_from(offset).map_err(|_| Code::InvalidValue)?;
        let end = start.checked_add(bytes.len()).ok_or(Code::InvalidValue)?;
        parameters.get_mut(start..end).ok_or(Code::InvalidValue)?.copy_from_slice(bytes);
        Ok(())
    }))
}

/// Checks the total size of a kernel's parameters. If it is smaller than the kernel declares, the remaining bytes are
/// zero.
#[unsafe(no_mangle)]
pub extern "C" fn cuParamSetSize(handle: Handle, bytes: c_uint) -> Status {
    status(with(|state| if bytes <= function(state, handle)?.kernel.params { Ok(()) } else { Err(Code::InvalidValue) }))
}

/// Sets the parameter at byte offset `offset` to a 32-bit value.
#[unsafe(no_mangle)]
pub extern "C" fn cuParamSeti(handle: Handle, offset: c_int, value: c_uint) -> Status {
    set_parameter(handle, offset, &value.to_le_bytes())
}

/// Sets the parameter at byte offset `offset` to a float.
#[unsafe(no_mangle)]
pub extern "C" fn cuParamSetf(handle: Handle, offset: c_int, value: f32) -> Status {
    set_parameter(handle, offset, &value.to_le_bytes())
}

/// Copies `bytes` bytes to the parameter at byte offset `offset`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuParamSetv(handle: Handle, offset: c_int, from: *const c_void, bytes: c_uint) -> Status {
    if from.is_null() {
        return status(Err(Code::InvalidValue));
    }
    // SAFETY: see UNSAFETY in the crate documentation.
    set_parameter(handle, offset, unsafe { std::slice::from_raw_parts(from.cast(), bytes as usize) })
}

fn launch(state: &mut State, handle: Handle, grid: Grid, parameters: &[u8]) -> Outcome<()> {
    let uses = state.uses();
    let State { gpu, modules, functions, .. } = state;
    let Function { module, kernel, .. } = functions.get(&handle.addr()).ok_or(Code::InvalidHandle)?;
    let (module, _) = modules.get(module).ok_or(Code::InvalidHandle)?;
    gpu.launch(*module, &kernel.name, grid, &Params::from_bytes(parameters), &uses)?;
    Ok(())
}

/// Launches a kernel on a two-dimensional grid, with the block dimensions and parameters set before.
#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchGrid(handle: Handle, width: c_int, height: c_int) -> Status {
    status(with(|state| {
        let sizes = [width, height].map(|size| u32::try_from(size).ok().filter(|size| *size > 0));
        let [Some(width), Some(height)] = sizes else { return Err(Code::InvalidValue) };
        let Function { threads, parameters, .. } = function(state, handle)?;
        let (grid, parameters) = (Grid { blocks: [width, height, 1], threads: *threads }, parameters.clone());
        launch(state, handle, grid, &parameters)
    }))
}

/// Launches a kernel like [`cuLaunchGrid`], in a stream.
#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchGridAsync(handle: Handle, width: c_int, height: c_int, stream: Handle) -> Status {
    match status(with(|state| state.check_stream(stream))) {
        0 => cuLaunchGrid(handle, width, height),
        error => error,
    }
}

/// Launches a kernel like [`cuLaunchGrid`], with one block.
#[unsafe(no_mangle)]
pub extern "C" fn cuLaunch(handle: Handle) -> Status {
    cuLaunchGrid(handle, 1, 1)
}

/// Launches a kernel. Dynamic shared memory is not supported.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    handle: Handle,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: Handle,
    parameters: *const *const c_void,
    extra: *const *const c_void,
) -> Status {
    status(with(|state| {
        state.check_stream(stream)?;
        if shared_bytes != 0 {
            return Err(Code::NotSupported);
        }
        let kernel = &function(state, handle)?.kernel;
        // SAFETY: see UNSAFETY in the crate documentation.
        let bytes = unsafe {
            match (parameters.is_null(), extra.is_null()) {
                (false, true) => from_array(kernel, parameters)?,
                (true, false) => from_extra(extra)?,
                (true, true) if kernel.params == 0 => Vec::new(),
                _ => return Err(Code::InvalidValue),
            }
        };
        let grid = Grid { blocks: [grid_x, grid_y, grid_z], threads: [block_x, block_y, block_z] };
        launch(state, handle, grid, &bytes)
    }))
}

/// Reads parameters from an array with one pointer per parameter.
unsafe fn from_array(kernel: &sm20::Kernel, parameters: *const *const c_void) -> Outcome<Vec<u8>> {
    if kernel.parameters.is_empty() && kernel.params != 0 {
        // The image does not contain the size of each parameter.
        return Err(Code::InvalidValue);
    }
    let mut bytes = vec![0; kernel.params as usize];
    for (index, parameter) in kernel.parameters.iter().enumerate() {
        let (start, end) = (parameter.offset as usize, (parameter.offset + parameter.bytes) as usize);
        let to = bytes.get_mut(start..end).ok_or(Code::InvalidImage)?;
        // SAFETY: guaranteed by the caller. See UNSAFETY in the crate documentation.
        unsafe {
            let from = *parameters.add(index);
            if from.is_null() {
                return Err(Code::InvalidValue);
            }
            to.copy_from_slice(std::slice::from_raw_parts(from.cast(), to.len()));
        }
    }
    Ok(bytes)
}

/// Reads parameters from the buffer that `extra` describes.
unsafe fn from_extra(extra: *const *const c_void) -> Outcome<Vec<u8>> {
    let (mut buffer, mut size) = (std::ptr::null::<u8>(), 0);
    for entry in 0..MAX_EXTRA {
        // SAFETY: guaranteed by the caller. See UNSAFETY in the crate documentation. The list ends with key 0.
        unsafe {
            let kind = (*extra.add(2 * entry)).addr();
            if kind == EXTRA_END {
                break;
            }
            let value = *extra.add(2 * entry + 1);
            match kind {
                EXTRA_BUFFER => buffer = value.cast(),
                EXTRA_SIZE if !value.is_null() => size = *value.cast::<usize>(),
                _ => return Err(Code::InvalidValue),
            }
        }
    }
    if buffer.is_null() || isize::try_from(size).is_err() {
        return Err(Code::InvalidValue);
    }
    // SAFETY: guaranteed by the caller. See UNSAFETY in the crate documentation.
    Ok(unsafe { std::slice::from_raw_parts(buffer, size) }.to_vec())
}
