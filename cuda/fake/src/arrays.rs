//! Arrays, two- and three-dimensional copies, textures and surfaces. An array is card memory with contiguous rows.
//!
//! UNSAFETY: reads and writes through the program's pointers, like the real driver.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, reason = "names of the driver API")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "see UNSAFETY; the promise is the caller's everywhere")]

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, PoisonError};

use crate::api::{api, context, put};
use crate::memory;
use crate::result::{INVALID_HANDLE, INVALID_VALUE, SUCCESS};
use crate::views::{self, View};
use crate::work::{self, Op};

/// `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Descriptor {
    width: usize,
    height: usize,
    format: u32,
    channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Descriptor3d {
    width: usize,
    height: usize,
    depth: usize,
    format: u32,
    channels: u32,
    flags: u32,
}

/// One end of a `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy)]
struct End2d {
    x: usize,
    y: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    pitch: usize,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Copy2d {
    from: End2d,
    to: End2d,
    width: usize,
    height: usize,
}

/// One end of a `CUDA_MEMCPY3D`.
#[repr(C)]
#[derive(Clone, Copy)]
struct End3d {
    x: usize,
    y: usize,
    z: usize,
    level: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    reserved: u64,
    pitch: usize,
    rows: usize,
}

/// `CUDA_MEMCPY3D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Copy3d {
    from: End3d,
    to: End3d,
    width: usize,
    height: usize,
    depth: usize,
}

/// `CUDA_RESOURCE_DESC`: an array or linear memory.
#[repr(C)]
#[derive(Clone, Copy)]
struct Resource {
    kind: u32,
    object: u64,
    format: u32,
    channels: u32,
    bytes: usize,
    rest: [u64; 13],
    flags: u32,
}

#[derive(Clone, Copy)]
struct Array {
    at: u64,
    description: Descriptor3d,
}

#[derive(Default)]
struct All {
    arrays: HashMap<u64, Array>,
    next: u64,
}

static ALL: Mutex<Option<All>> = Mutex::new(None);

fn with<T>(work: impl FnOnce(&mut All) -> T) -> T {
    work(ALL.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

impl Descriptor3d {
    fn element_bytes(&self) -> u64 {
        let bytes = match self.format {
            0x01 | 0x08 => 1,
            0x02 | 0x09 | 0x10 => 2,
            _ => 4,
        };
        bytes * u64::from(self.channels)
    }

    fn row_bytes(&self) -> u64 {
        self.element_bytes() * self.width as u64
    }
}

fn create(description: Descriptor3d) -> Result<u64, i32> {
    if description.width == 0 || !matches!(description.channels, 1 | 2 | 4) {
        return Err(INVALID_VALUE);
    }
    let rows = description.height.max(1) * description.depth.max(1);
    let at = memory::allocate(description.row_bytes() * rows as u64)?;
    Ok(with(|all| {
        all.next += 1;
        let made = 0x50_0000 + 16 * all.next;
        all.arrays.insert(made, Array { at, description });
        made
    }))
}

fn array(handle: u64) -> Result<Array, i32> {
    with(|all| all.arrays.get(&handle).copied().ok_or(INVALID_HANDLE))
}

/// Address of one end of a copy, and the strides of its rows and layers, in bytes.
struct Place {
    at: u64,
    pitch: u64,
    layer: u64,
}

impl End3d {
    fn place(&self, copy: &Copy3d) -> Result<Place, i32> {
        let (x, y, z) = (self.x as u64, self.y as u64, self.z as u64);
        let (width, height) = (copy.width as u64, copy.height as u64);
        let (base, pitch, rows) = match self.kind {
            1 => (self.host, self.pitch as u64, self.rows as u64),
            2 | 4 => (self.device, self.pitch as u64, self.rows as u64),
            3 => {
                let Array { at, description } = array(self.array)?;
                let (pitch, rows) = (description.row_bytes(), description.height.max(1) as u64);
                let is_within = x + width <= pitch
                    && y + height <= rows
                    && z + copy.depth as u64 <= description.depth.max(1) as u64;
                if !is_within {
                    return Err(INVALID_VALUE);
                }
                (at, pitch, rows)
            }
            _ => return Err(INVALID_VALUE),
        };
        // The strides matter only for several rows or layers.
        let (pitch, rows) = (if pitch == 0 { x + width } else { pitch }, if rows == 0 { y + height } else { rows });
        if pitch < x + width || rows < y + height {
            return Err(INVALID_VALUE);
        }
        Ok(Place { at: base + (z * rows + y) * pitch + x, pitch, layer: rows * pitch })
    }
}

impl Copy3d {
    /// Returns the copy as an operation on rows.
    pub fn operation(&self) -> Result<Op, i32> {
        let (from, to) = (self.from.place(self)?, self.to.place(self)?);
        let mut rows = Vec::new();
        for layer in 0..self.depth as u64 {
            for row in 0..self.height as u64 {
                let address = |place: &Place| place.at + layer * place.layer + row * place.pitch;
                rows.push([address(&to), address(&from), self.width as u64]);
            }
        }
        Ok(Op::Rows(rows))
    }
}

impl Copy2d {
    fn three(&self) -> Copy3d {
        let end = |end: End2d| End3d {
            x: end.x,
            y: end.y,
            z: 0,
            level: 0,
            kind: end.kind,
            host: end.host,
            device: end.device,
            array: end.array,
            reserved: 0,
            pitch: end.pitch,
            rows: 0,
        };
        Copy3d { from: end(self.from), to: end(self.to), width: self.width, height: self.height, depth: 1 }
    }
}

fn run(operation: Result<Op, i32>, stream: Option<u64>) -> c_int {
    match (operation, stream) {
        (Ok(operation), Some(stream)) => work::submit(stream, operation),
        (Ok(operation), None) => work::synchronous(operation),
        (Err(error), _) => error,
    }
}

unsafe fn two(copy: *const Copy2d, stream: Option<u64>) -> c_int {
    match unsafe { copy.as_ref() } {
        Some(copy) => run(copy.three().operation(), stream),
        None => INVALID_VALUE,
    }
}

unsafe fn three(copy: *const Copy3d, stream: Option<u64>) -> c_int {
    match unsafe { copy.as_ref() } {
        Some(copy) => run(copy.operation(), stream),
        None => INVALID_VALUE,
    }
}

/// Copies between a one-row array and linear memory.
fn row(array_handle: u64, x: u64, memory: u64, bytes: u64, is_out: bool, stream: Option<u64>) -> c_int {
    let operation = array(array_handle).and_then(|array| {
        if x + bytes > array.description.row_bytes() {
            return Err(INVALID_VALUE);
        }
        let inside = array.at + x;
        Ok(Op::Rows(vec![if is_out { [memory, inside, bytes] } else { [inside, memory, bytes] }]))
    });
    run(operation, stream)
}

unsafe fn view(made: *mut u64, resource: *const Resource) -> c_int {
    let Some(resource) = (unsafe { resource.as_ref() }) else { return INVALID_VALUE };
    let view = match resource.kind {
        0 => array(resource.object).map(|array| View {
            at: array.at,
            row_bytes: array.description.row_bytes(),
            element_bytes: array.description.element_bytes(),
        }),
        2 => Ok(View { at: resource.object, row_bytes: resource.bytes as u64, element_bytes: 1 }),
        _ => Err(INVALID_VALUE),
    };
    unsafe { put(made, view.map(views::add)) }
}

fn end_view(number: u64) -> c_int {
    if views::remove(number) { SUCCESS } else { INVALID_VALUE }
}

api! {
    context cuArrayCreate_v2(made: *mut u64, description: *const Descriptor) {
        let Some(&Descriptor { width, height, format, channels }) = description.as_ref() else { return INVALID_VALUE };
        put(made, create(Descriptor3d { width, height, depth: 0, format, channels, flags: 0 }))
    }
    context cuArray3DCreate_v2(made: *mut u64, description: *const Descriptor3d) {
        let Some(description) = description.as_ref() else { return INVALID_VALUE };
        put(made, create(*description))
    }
    context cuArray3DGetDescriptor_v2(description: *mut Descriptor3d, of: u64) {
        put(description, array(of).map(|array| array.description))
    }
    context cuArrayGetDescriptor_v2(description: *mut Descriptor, of: u64) {
        let short = |of: Descriptor3d| Descriptor {
            width: of.width,
            height: of.height,
            format: of.format,
            channels: of.channels,
        };
        put(description, array(of).map(|array| short(array.description)))
    }
    context cuArrayDestroy(of: u64) {
        work::finish_all();
        match with(|all| all.arrays.remove(&of)) {
            Some(array) => memory::free(array.at).err().unwrap_or(SUCCESS),
            None => INVALID_HANDLE,
        }
    }
    context cuMemcpy2D_v2(copy: *const Copy2d) { two(copy, None) }
    context cuMemcpy2DUnaligned_v2(copy: *const Copy2d) { two(copy, None) }
    context cuMemcpy2DAsync_v2(copy: *const Copy2d, stream: u64) { two(copy, Some(stream)) }
    context cuMemcpy3D_v2(copy: *const Copy3d) { three(copy, None) }
    context cuMemcpy3DAsync_v2(copy: *const Copy3d, stream: u64) { three(copy, Some(stream)) }
    context cuMemcpyHtoA_v2(to: u64, x: usize, from: u64, bytes: usize) {
        row(to, x as u64, from, bytes as u64, false, None)
    }
    context cuMemcpyHtoAAsync_v2(to: u64, x: usize, from: u64, bytes: usize, stream: u64) {
        row(to, x as u64, from, bytes as u64, false, Some(stream))
    }
    context cuMemcpyDtoA_v2(to: u64, x: usize, from: u64, bytes: usize) {
        row(to, x as u64, from, bytes as u64, false, None)
    }
    context cuMemcpyAtoH_v2(to: u64, from: u64, x: usize, bytes: usize) {
        row(from, x as u64, to, bytes as u64, true, None)
    }
    context cuMemcpyAtoHAsync_v2(to: u64, from: u64, x: usize, bytes: usize, stream: u64) {
        row(from, x as u64, to, bytes as u64, true, Some(stream))
    }
    context cuMemcpyAtoD_v2(to: u64, from: u64, x: usize, bytes: usize) {
        row(from, x as u64, to, bytes as u64, true, None)
    }
    context cuMemcpyBatchAsync_v2(
        to: *const u64, from: *const u64, bytes: *const usize, count: usize, _attributes: *const c_void,
        _indices: *const usize, _groups: usize, stream: u64
    ) {
        for at in 0..count {
            match work::submit(stream, Op::Copy(*to.add(at), *from.add(at), *bytes.add(at) as u64)) {
                SUCCESS => {}
                error => return error,
            }
        }
        SUCCESS
    }
    context cuTexObjectCreate(
        made: *mut u64, resource: *const Resource, texture: *const c_void, _view: *const c_void
    ) { if texture.is_null() { INVALID_VALUE } else { view(made, resource) } }
    context cuTexObjectDestroy(texture: u64) { end_view(texture) }
    context cuSurfObjectCreate(made: *mut u64, resource: *const Resource) { view(made, resource) }
    context cuSurfObjectDestroy(surface: u64) { end_view(surface) }
}
