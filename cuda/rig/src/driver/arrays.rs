//! Copies of boxes and arrays, and accesses through textures and surfaces. Programs look up these functions by name.
//!
//! UNSAFETY: calls library functions with the signatures from NVIDIA's headers.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_int, c_void};

use super::{Cuda, Failed, check};

/// `CU_MEMORYTYPE_HOST`.
const HOST: u32 = 1;
/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE: u32 = 2;
/// `CU_MEMORYTYPE_ARRAY`.
const ARRAY: u32 = 3;
/// `CU_MEMORYTYPE_UNIFIED`.
const UNIFIED: u32 = 4;

/// Source or destination of a `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
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
#[derive(Clone, Copy, Default)]
struct Copy2d {
    from: End2d,
    to: End2d,
    width: usize,
    height: usize,
}

/// Source or destination of a `CUDA_MEMCPY3D`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct End3d {
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
#[derive(Clone, Copy, Default)]
pub(super) struct Copy3d {
    from: End3d,
    to: End3d,
    width: usize,
    height: usize,
    depth: usize,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Descriptor {
    width: usize,
    height: usize,
    depth: usize,
    format: u32,
    channels: u32,
    flags: u32,
}

/// Returns the descriptor of an array of this size. Its elements are 32-bit numbers if `is_wide` is set, and bytes
/// otherwise.
fn described([width, height, depth]: [usize; 3], is_wide: bool) -> Descriptor {
    Descriptor { width, height, depth, format: if is_wide { 3 } else { 1 }, channels: 1, flags: 0 }
}

impl End2d {
    fn linear(kind: u32, address: u64, pitch: usize) -> Self {
        let (host, device) = if kind == HOST { (address, 0) } else { (0, address) };
        Self { kind, host, device, pitch, ..Self::default() }
    }
}

impl End3d {
    /// Creates an end in linear memory, with the given pitch in bytes and number of rows per layer.
    fn linear(kind: u32, address: u64, pitch: usize, rows: usize) -> Self {
        let (host, device) = if kind == HOST { (address, 0) } else { (0, address) };
        Self { kind, host, device, pitch, rows, ..Self::default() }
    }

    fn array(array: u64) -> Self {
        Self { kind: ARRAY, array, ..Self::default() }
    }

    fn at(self, [x, y, z]: [usize; 3]) -> Self {
        Self { x, y, z, ..self }
    }
}

impl Copy3d {
    /// Creates a copy of one row between two addresses of any kind.
    pub(super) fn line(to: u64, from: u64, bytes: usize) -> Self {
        let end = |address| End3d::linear(UNIFIED, address, bytes, 1);
        Self { from: end(from), to: end(to), width: bytes, height: 1, depth: 1 }
    }
}

fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum: u64, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// Returns bytes that depend on their index.
fn pattern(count: usize) -> Vec<u8> {
    (0..count).map(|at| (at * 31 + at / 251) as u8).collect()
}

fn address(bytes: &[u8]) -> u64 {
    bytes.as_ptr().addr() as u64
}

impl Cuda {
    /// Copies boxes between pageable memory, pinned memory, the card and arrays. Returns digests of the data that was
    /// copied back, and results of invalid calls.
    pub fn copy_boxes(&self) -> Result<Vec<u64>, Failed> {
        let mut all = Vec::new();
        // Test copies in a message and through staging buffers, a copy of 10 MB, and rows longer than a staging buffer.
        for (width, height, pitch) in
            [(200, 50, 300), (5000, 1000, 5120), (4999, 2000, 5120), (3_000_001, 2, 3_000_320)]
        {
            all.push(self.there_and_back(width, height, pitch)?);
        }
        all.extend(self.copy_layers()?);
        all.extend(self.copy_rows_of_arrays()?);
        all.extend(self.copy_batch()?);
        all.extend(self.copy_wrongly()?);
        Ok(all)
    }

    /// Copies a rectangle of pageable memory to the card, within the card, and back.
    fn there_and_back(&self, width: usize, height: usize, pitch: usize) -> Result<u64, Failed> {
        let copy = function!(self, c"cuMemcpy2D", 12_000, fn(*const Copy2d));
        let copy_async = function!(self, c"cuMemcpy2DAsync", 12_000, fn(*const Copy2d, u64));
        let unaligned = function!(self, c"cuMemcpy2DUnaligned", 12_000, fn(*const Copy2d));
        let stream = self.stream()?;
        let source = pattern(pitch * height);
        let mut back = vec![0u8; (width + 7) * (height + 1)];
        let (first, second) = (self.alloc((pitch * height) as u64)?, self.alloc((pitch * height) as u64)?);
        let to_card = Copy2d {
            from: End2d { x: 3, ..End2d::linear(HOST, address(&source), pitch) },
            to: End2d::linear(DEVICE, first, pitch),
            width: width - 3,
            height,
        };
        let within = Copy2d {
            from: End2d { y: 1, ..End2d::linear(DEVICE, first, pitch) },
            to: End2d { y: 1, ..End2d::linear(UNIFIED, second, pitch) },
            width,
            height: height - 1,
        };
        let to_host = Copy2d {
            from: End2d { y: 1, ..End2d::linear(UNIFIED, second, pitch) },
            to: End2d { x: 5, y: 1, ..End2d::linear(HOST, back.as_mut_ptr().addr() as u64, width + 7) },
            width: width - 3,
            height: height - 1,
        };
        // SAFETY: the structures are local variables, and describe memory of these sizes.
        unsafe {
            check("cuMemcpy2DAsync", copy_async(&raw const to_card, stream))?;
            self.finish(stream)?;
            check("cuMemcpy2DUnaligned", unaligned(&raw const within))?;
            check("cuMemcpy2D", copy(&raw const to_host))?;
        }
        let row = |row: usize| back.get(row * (width + 7) + 5..).and_then(|rest| rest.get(..width - 3));
        let expected = |row: usize| source.get(row * pitch + 3..).and_then(|rest| rest.get(..width - 3));
        let is_equal = (1..height).all(|at| row(at) == expected(at));
        check("the copied rows", i32::from(!is_equal))?;
        Ok(sum(&back))
    }

    /// Copies layers to a three-dimensional array, and a part of it back to pageable and to pinned memory.
    fn copy_layers(&self) -> Result<Vec<u64>, Failed> {
        let create = function!(self, c"cuArray3DCreate", 12_000, fn(*mut u64, *const Descriptor));
        let describe = function!(self, c"cuArray3DGetDescriptor", 12_000, fn(*mut Descriptor, u64));
        let destroy = function!(self, c"cuArrayDestroy", 12_000, fn(u64));
        let copy = function!(self, c"cuMemcpy3D", 12_000, fn(*const Copy3d));
        let copy_async = function!(self, c"cuMemcpy3DAsync", 12_000, fn(*const Copy3d, u64));
        let pin = function!(self, c"cuMemHostAlloc", 12_000, fn(*mut u64, usize, u32));
        let unpin = function!(self, c"cuMemFreeHost", 12_000, fn(u64));
        let stream = self.stream()?;
        let (mut array, mut known, mut pinned) = (0u64, Descriptor::default(), 0u64);
        let description = described([400, 300, 20], false);
        let source = pattern(410 * 310 * 20);
        let back = vec![0u8; 100 * 50 * 10];
        let fill = Copy3d {
            from: End3d::linear(HOST, address(&source), 410, 310),
            to: End3d::array(array),
            width: 400,
            height: 300,
            depth: 20,
        };
        let take = |array, to| Copy3d {
            from: End3d::array(array).at([30, 20, 5]),
            to: End3d::linear(UNIFIED, to, 100, 50),
            width: 100,
            height: 50,
            depth: 10,
        };
        // SAFETY: the structures are local variables, and describe memory of these sizes.
        unsafe {
            check("cuArray3DCreate", create(&raw mut array, &raw const description))?;
            check("cuArray3DGetDescriptor", describe(&raw mut known, array))?;
            check("cuMemHostAlloc", pin(&raw mut pinned, back.len(), 0))?;
            let fill = Copy3d { to: End3d::array(array), ..fill };
            check("cuMemcpy3DAsync", copy_async(&raw const fill, stream))?;
            self.finish(stream)?;
            let (pageable, pinning) = (take(array, address(&back)), take(array, pinned));
            check("cuMemcpy3D", copy(&raw const pageable))?;
            check("cuMemcpy3D", copy(&raw const pinning))?;
            let same = std::slice::from_raw_parts(pinned as *const u8, back.len()) == back;
            check("the pinned copy", i32::from(!same))?;
            check("cuMemFreeHost", unpin(pinned))?;
            check("cuArrayDestroy", destroy(array))?;
            let again = destroy(array);
            Ok(vec![sum(&back), (known.width * 1000 + known.depth) as u64, again as u64])
        }
    }

    /// Copies between a one-dimensional array and host or card memory.
    fn copy_rows_of_arrays(&self) -> Result<Vec<u64>, Failed> {
        let create = function!(self, c"cuArray3DCreate", 12_000, fn(*mut u64, *const Descriptor));
        let to_array = function!(self, c"cuMemcpyHtoA", 12_000, fn(u64, usize, u64, usize));
        let to_array_async = function!(self, c"cuMemcpyHtoAAsync", 12_000, fn(u64, usize, u64, usize, u64));
        let card_to_array = function!(self, c"cuMemcpyDtoA", 12_000, fn(u64, usize, u64, usize));
        let to_card = function!(self, c"cuMemcpyAtoD", 12_000, fn(u64, u64, usize, usize));
        let to_host = function!(self, c"cuMemcpyAtoH", 12_000, fn(u64, u64, usize, usize));
        let to_host_async = function!(self, c"cuMemcpyAtoHAsync", 12_000, fn(u64, u64, usize, usize, u64));
        let (mut array, stream, card) = (0u64, self.stream()?, self.alloc(4096)?);
        let (source, back) = (pattern(2048), vec![0u8; 2048]);
        let description = described([2048, 0, 0], false);
        let (from, to) = (address(&source), address(&back));
        // SAFETY: the structures are local variables, and the memory has these sizes.
        unsafe {
            check("cuArray3DCreate", create(&raw mut array, &raw const description))?;
            check("cuMemcpyHtoA", to_array(array, 0, from, 1024))?;
            check("cuMemcpyHtoAAsync", to_array_async(array, 1024, from + 100, 1024, stream))?;
            self.finish(stream)?;
            check("cuMemcpyAtoD", to_card(card, array, 1000, 500))?;
            check("cuMemcpyDtoA", card_to_array(array, 100, card, 500))?;
            check("cuMemcpyAtoH", to_host(to, array, 0, 1024))?;
            check("cuMemcpyAtoHAsync", to_host_async(to + 1024, array, 1024, 1024, stream))?;
        }
        self.finish(stream)?;
        Ok(vec![sum(&back)])
    }

    /// Copies three ranges to the card in one batch, and back in another one.
    fn copy_batch(&self) -> Result<Vec<u64>, Failed> {
        type Words = *const u64;
        let batch = function!(
            self,
            c"cuMemcpyBatchAsync",
            13_000,
            fn(Words, Words, Words, usize, *const [u32; 6], Words, usize, u64)
        );
        let (stream, card) = (self.stream()?, self.alloc(1 << 20)?);
        let (source, back) = (pattern(300_000), vec![0u8; 300_000]);
        let (from, to) = (address(&source), address(&back));
        let (order, index) = ([[1u32, 0, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0]], [0u64, 1]);
        let run = |to: [u64; 3], from: [u64; 3], bytes: [u64; 3]| {
            let (to, from, bytes) = (to.as_ptr(), from.as_ptr(), bytes.as_ptr());
            // SAFETY: all arrays are local variables of these lengths.
            check("cuMemcpyBatchAsync", unsafe { batch(to, from, bytes, 3, order.as_ptr(), index.as_ptr(), 2, stream) })
        };
        let bytes = [10, 20_000, 270_000];
        run([card, card + 100, card + 50_000], [from, from + 10, from + 30_000], bytes)?;
        self.finish(stream)?;
        run([to, to + 10, to + 30_000], [card, card + 100, card + 50_000], bytes)?;
        self.finish(stream)?;
        check("the copied bytes", i32::from(back[30_000..] != source[30_000..]))?;
        Ok(vec![sum(&back)])
    }

    /// Returns the results of a valid copy and of invalid copies.
    fn copy_wrongly(&self) -> Result<Vec<u64>, Failed> {
        let copy = function!(self, c"cuMemcpy3D", 12_000, fn(*const Copy3d));
        let (card, host) = (self.alloc(4096)?, [0u8; 64]);
        let end = End3d::linear(DEVICE, card, 16, 4);
        let fine = Copy3d { from: end, to: end, width: 16, height: 4, depth: 1 };
        let narrow = Copy3d { from: End3d { pitch: 8, ..end }, ..fine };
        let low = Copy3d { to: End3d { rows: 3, ..end }, ..fine };
        let unknown = Copy3d { to: End3d { kind: 9, ..end }, ..fine };
        let from_host = Copy3d { from: End3d::linear(HOST, address(&host), 16, 4), ..fine };
        let empty = Copy3d { depth: 0, ..fine };
        // SAFETY: the structures are local variables.
        let codes = [fine, narrow, low, unknown, from_host, empty].map(|it| unsafe { copy(&raw const it) } as u64);
        Ok(codes.to_vec())
    }

    /// Reads an array through a texture and writes it through a surface. Returns the elements, and results of invalid
    /// calls.
    pub fn sample(&self) -> Result<Vec<u64>, Failed> {
        type Words = *const [u64; 18];
        let create = function!(self, c"cuArray3DCreate", 12_000, fn(*mut u64, *const Descriptor));
        let copy = function!(self, c"cuMemcpy3D", 12_000, fn(*const Copy3d));
        let texture_of =
            function!(self, c"cuTexObjectCreate", 12_000, fn(*mut u64, Words, *const [u32; 26], *const c_void));
        let end_texture = function!(self, c"cuTexObjectDestroy", 12_000, fn(u64));
        let surface_of = function!(self, c"cuSurfObjectCreate", 12_000, fn(*mut u64, Words));
        let end_surface = function!(self, c"cuSurfObjectDestroy", 12_000, fn(u64));
        let (read, paint) = (self.kernel("sample")?, self.kernel("paint")?);
        // `CUDA_ARRAY3D_SURFACE_LDST`.
        let description = Descriptor { flags: 2, ..described([16, 8, 0], true) };
        let source = pattern(16 * 8 * 4);
        let (mut array, mut texture, mut surface, mut line) = (0u64, 0u64, 0u64, 0u64);
        let (stream, result) = (self.stream()?, self.alloc(4096)?);
        let settings = [0u32; 26];
        let mut resource = [0u64; 18];
        // SAFETY: the structures are local variables.
        unsafe {
            check("cuArray3DCreate", create(&raw mut array, &raw const description))?;
            let fill = Copy3d {
                from: End3d::linear(HOST, address(&source), 64, 8),
                to: End3d::array(array),
                width: 64,
                height: 8,
                depth: 1,
            };
            check("cuMemcpy3D", copy(&raw const fill))?;
            resource[1] = array;
            let none = std::ptr::null();
            check("cuTexObjectCreate", texture_of(&raw mut texture, &raw const resource, &raw const settings, none))?;
            check("cuSurfObjectCreate", surface_of(&raw mut surface, &raw const resource))?;
            // A linear resource (`CU_RESOURCE_TYPE_LINEAR`) that covers the memory at `result`.
            let mut linear = [0u64; 18];
            linear[..4].copy_from_slice(&[2, result, 1 | 1 << 32, 4096]);
            check("cuTexObjectCreate", texture_of(&raw mut line, &raw const linear, &raw const settings, none))?;
        }
        self.launch(read, &[texture, 5, 3, result], stream)?;
        self.launch(paint, &[surface, 6, 3, 0x1234_5678], stream)?;
        self.launch(read, &[texture, 6, 3, result + 8], stream)?;
        self.launch(read, &[line, 0, 0, result + 16], stream)?;
        self.finish(stream)?;
        let mut all = self.read(result, 3)?;
        let wrong = [9u64; 18];
        // SAFETY: the structures are local variables.
        unsafe {
            all.push(surface_of(&raw mut surface, &raw const wrong) as u64);
            all.push(end_surface(surface) as u64);
            all.push(end_texture(texture) as u64);
            all.push(end_texture(texture) as u64);
            all.push(end_texture(line) as u64);
        }
        Ok(all)
    }
}
