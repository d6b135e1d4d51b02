//! NVIDIA's CUDA runtime as programs call it, loaded from a path.
//!
//! UNSAFETY: calls library functions with the signatures from NVIDIA's headers.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt as _;
use std::ptr::{from_ref, null, null_mut};

use anyhow::{Result, bail, ensure};

/// PTX of [`Runtime::launch_fill`]'s kernel, which writes `value + i` to word `i` of `count` words.
const PTX: &CStr = c".version 7.0
.target sm_70
.address_size 64
.visible .entry fill(.param .u64 at, .param .u64 count, .param .u64 value)
{
    .reg .pred %p;
    .reg .u32 %r<5>;
    .reg .u64 %d<8>;
    ld.param.u64 %d1, [at];
    ld.param.u64 %d2, [count];
    ld.param.u64 %d3, [value];
    cvta.to.global.u64 %d1, %d1;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mad.lo.u32 %r4, %r2, %r3, %r1;
    cvt.u64.u32 %d4, %r4;
    setp.ge.u64 %p, %d4, %d2;
    @%p ret;
    add.u64 %d5, %d3, %d4;
    shl.b64 %d6, %d4, 3;
    add.u64 %d7, %d1, %d6;
    st.global.u64 [%d7], %d5;
    ret;
}
";
/// Name of the kernel in the image.
const KERNEL: &CStr = c"fill";
/// Number of threads per block.
const THREADS: u32 = 128;

/// Image wrapper, as emitted by the compiler.
#[repr(C)]
struct Wrapper {
    magic: u32,
    version: u32,
    data: *const u64,
    names: *const c_void,
}

const WRAPPER_MAGIC: u32 = 0x4662_43B1;
const FATBIN_MAGIC: u32 = 0xBA55_ED50;

/// Returns a fat binary with one PTX entry.
fn fatbin(ptx: &[u8]) -> Vec<u64> {
    /// Size of the entry's header in bytes.
    const HEADER: u32 = 64;
    let padded = ptx.len().next_multiple_of(8);
    let mut words = vec![
        // Magic number, version 1, 16 bytes of header, and the number of bytes after the header.
        u64::from(FATBIN_MAGIC) | 1 << 32 | 16 << 48,
        u64::from(HEADER) + padded as u64,
        // Kind 1 (PTX), version, size of the entry's header, and padded size of the text.
        1 | 0x101 << 16 | u64::from(HEADER) << 32,
        padded as u64,
        // No compression, no options, version 7.0, and the target.
        0,
        7 << 16 | 70 << 32,
        // No name. Flags: 64-bit, Linux.
        0,
        0x11,
        0,
        0,
    ];
    let chunk = |bytes: &[u8]| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    };
    words.extend(ptx.chunks(8).map(chunk));
    words
}

/// Dimensions of a grid or block (`dim3`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Dim3 {
    x: u32,
    y: u32,
    z: u32,
}

impl Dim3 {
    fn line(x: u32) -> Self {
        Self { x, y: 1, z: 1 }
    }
}

macro_rules! functions {
    ($($name:ident = $symbol:ident($($arg:ident: $ty:ty),*);)*) => {
        #[derive(Clone, Copy)]
        struct Functions {
            $($name: unsafe extern "C" fn($($ty),*) -> c_int,)*
        }

        impl Functions {
            fn load(library: *mut c_void) -> Result<Self> {
                Ok(Self { $($name: {
                    let found = symbol(library, concat!(stringify!($symbol), "\0"))?;
                    // SAFETY: the symbol has this signature.
                    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($ty),*) -> c_int>(found) }
                },)* })
            }
        }

        impl Runtime {
            $(#[allow(clippy::too_many_arguments, reason = "the runtime's own signature")]
            fn $name(&self, $($arg: $ty),*) -> Result<()> {
                // SAFETY: the callers in this file pass valid pointers and handles.
                match unsafe { (self.functions.$name)($($arg),*) } {
                    0 => Ok(()),
                    code => bail!("{} failed with {code}: {}", stringify!($symbol), self.text(code)),
                }
            })*
        }
    };
}

functions! {
    raw_version = cudaRuntimeGetVersion(version: *mut c_int);
    raw_driver_version = cudaDriverGetVersion(version: *mut c_int);
    raw_count = cudaGetDeviceCount(count: *mut c_int);
    raw_attribute = cudaDeviceGetAttribute(value: *mut c_int, which: c_int, device: c_int);
    raw_malloc = cudaMalloc(at: *mut u64, bytes: usize);
    raw_free = cudaFree(at: u64);
    raw_memset = cudaMemset(at: u64, value: c_int, bytes: usize);
    raw_copy = cudaMemcpy(to: u64, from: u64, bytes: usize, kind: c_int);
    raw_copy_async = cudaMemcpyAsync(to: u64, from: u64, bytes: usize, kind: c_int, stream: u64);
    raw_launch = cudaLaunchKernel(
        function: *const c_void, grid: Dim3, block: Dim3, arguments: *mut *mut c_void, shared: usize, stream: u64
    );
    raw_stream = cudaStreamCreate(stream: *mut u64);
    raw_end_stream = cudaStreamDestroy(stream: u64);
    raw_finish = cudaStreamSynchronize(stream: u64);
    raw_finish_all = cudaDeviceSynchronize();
    raw_event = cudaEventCreate(event: *mut u64);
    raw_end_event = cudaEventDestroy(event: u64);
    raw_record = cudaEventRecord(event: u64, stream: u64);
    raw_finish_event = cudaEventSynchronize(event: u64);
    raw_query_event = cudaEventQuery(event: u64);
    raw_elapsed = cudaEventElapsedTime(ms: *mut f32, from: u64, to: u64);
    raw_begin_capture = cudaStreamBeginCapture(stream: u64, mode: c_int);
    raw_end_capture = cudaStreamEndCapture(stream: u64, graph: *mut u64);
    raw_instantiate = cudaGraphInstantiateWithFlags(made: *mut u64, graph: u64, flags: u64);
    raw_launch_graph = cudaGraphLaunch(made: u64, stream: u64);
    raw_end_graph = cudaGraphDestroy(graph: u64);
    raw_end_made = cudaGraphExecDestroy(made: u64);
    raw_reset = cudaDeviceReset();
}

/// `cudaMemcpyHostToDevice`.
const TO_DEVICE: c_int = 1;
/// `cudaMemcpyDeviceToHost`.
const TO_HOST: c_int = 2;

/// The runtime, with a registered program.
pub struct Runtime {
    functions: Functions,
    library: *mut c_void,
    /// Byte whose address identifies the kernel in launches. A real program uses the address of its host function.
    function: Box<u8>,
    /// Stored because the runtime keeps pointers to both values.
    _image: Box<(Wrapper, Vec<u64>)>,
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runtime").field("library", &self.library).finish_non_exhaustive()
    }
}

/// Returns a symbol of a library. `name` must be NUL-terminated.
fn symbol(library: *mut c_void, name: &str) -> Result<*mut c_void> {
    let name = CStr::from_bytes_with_nul(name.as_bytes())?;
    // SAFETY: the name is NUL-terminated.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    ensure!(!found.is_null(), "the runtime has no {}", name.to_string_lossy());
    Ok(found)
}

impl Runtime {
    /// Loads the library, and registers a program with one kernel, like code generated by NVIDIA's compiler.
    pub fn load(path: &OsStr) -> Result<Self> {
        let name = CString::new(path.as_bytes())?;
        // SAFETY: the name is NUL-terminated.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        ensure!(!library.is_null(), "{} does not load", path.display());
        let functions = Functions::load(library)?;
        let data = fatbin(PTX.to_bytes_with_nul());
        let wrapper = Wrapper { magic: WRAPPER_MAGIC, version: 1, data: data.as_ptr(), names: null() };
        let image = Box::new((wrapper, data));
        let runtime = Self { functions, library, function: Box::new(0), _image: image };
        runtime.register()?;
        Ok(runtime)
    }

    fn register(&self) -> Result<()> {
        type Register = unsafe extern "C" fn(*const Wrapper) -> *mut *mut c_void;
        type Function = unsafe extern "C" fn(
            *mut *mut c_void,
            *const u8,
            *const c_char,
            *const c_char,
            c_int,
            *mut c_void,
            *mut c_void,
            *mut c_void,
            *mut c_void,
            *mut c_int,
        );
        type End = unsafe extern "C" fn(*mut *mut c_void);
        let register = symbol(self.library, "__cudaRegisterFatBinary\0")?;
        let function = symbol(self.library, "__cudaRegisterFunction\0")?;
        let end = symbol(self.library, "__cudaRegisterFatBinaryEnd\0")?;
        // SAFETY: the symbols have these signatures, and the image and the names are valid as long as `self` exists.
        unsafe {
            let registered = std::mem::transmute::<*mut c_void, Register>(register)(from_ref(&self._image.0));
            let (own, name, none) = (from_ref(&*self.function), KERNEL.as_ptr(), null_mut());
            std::mem::transmute::<*mut c_void, Function>(function)(
                registered,
                own,
                name,
                name,
                -1,
                none,
                none,
                none,
                none,
                null_mut(),
            );
            std::mem::transmute::<*mut c_void, End>(end)(registered);
        }
        Ok(())
    }

    /// Returns the runtime's message for an error code.
    fn text(&self, code: c_int) -> String {
        let Ok(found) = symbol(self.library, "cudaGetErrorString\0") else { return String::new() };
        // SAFETY: the symbol has this signature, and returns a static string.
        unsafe {
            let text = std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int) -> *const c_char>(found)(code);
            if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        }
    }

    /// Returns the versions of the runtime and the driver.
    pub fn versions(&self) -> Result<(i32, i32)> {
        let (mut own, mut driver) = (0, 0);
        self.raw_version(&raw mut own)?;
        self.raw_driver_version(&raw mut driver)?;
        Ok((own, driver))
    }

    /// Returns the number of devices.
    pub fn count(&self) -> Result<i32> {
        let mut count = 0;
        self.raw_count(&raw mut count)?;
        Ok(count)
    }

    /// Returns an attribute of the first device.
    pub fn attribute(&self, which: i32) -> Result<i32> {
        let mut value = 0;
        self.raw_attribute(&raw mut value, which, 0)?;
        Ok(value)
    }

    /// Allocates device memory.
    pub fn malloc(&self, bytes: usize) -> Result<u64> {
        let mut at = 0;
        self.raw_malloc(&raw mut at, bytes)?;
        Ok(at)
    }

    /// Frees device memory.
    pub fn free(&self, at: u64) -> Result<()> {
        self.raw_free(at)
    }

    /// Fills device memory with a byte value.
    pub fn memset(&self, at: u64, value: u8, bytes: usize) -> Result<()> {
        self.raw_memset(at, c_int::from(value), bytes)
    }

    /// Copies words to the device.
    pub fn upload(&self, at: u64, words: &[u64]) -> Result<()> {
        self.raw_copy(at, words.as_ptr() as u64, size_of_val(words), TO_DEVICE)
    }

    /// Copies words from the device.
    pub fn download(&self, at: u64, count: usize) -> Result<Vec<u64>> {
        let mut words = vec![0; count];
        self.raw_copy(words.as_mut_ptr() as u64, at, 8 * count, TO_HOST)?;
        Ok(words)
    }

    /// Copies words from the device in stream order, and waits for completion.
    pub fn download_in(&self, stream: u64, at: u64, count: usize) -> Result<Vec<u64>> {
        let mut words = vec![0; count];
        self.raw_copy_async(words.as_mut_ptr() as u64, at, 8 * count, TO_HOST, stream)?;
        self.finish(stream)?;
        Ok(words)
    }

    /// Launches the kernel: writes `value + i` to word `i` of `count` words.
    pub fn launch_fill(&self, stream: u64, at: u64, count: u64, value: u64) -> Result<()> {
        let (mut at, mut count, mut value) = (at, count, value);
        let blocks = u32::try_from(count.div_ceil(u64::from(THREADS)))?;
        let mut arguments: [*mut c_void; 3] = [(&raw mut at).cast(), (&raw mut count).cast(), (&raw mut value).cast()];
        let function = from_ref(&*self.function).cast();
        self.raw_launch(function, Dim3::line(blocks), Dim3::line(THREADS), arguments.as_mut_ptr(), 0, stream)
    }

    /// Creates a stream.
    pub fn stream(&self) -> Result<u64> {
        let mut stream = 0;
        self.raw_stream(&raw mut stream)?;
        Ok(stream)
    }

    /// Destroys a stream.
    pub fn end_stream(&self, stream: u64) -> Result<()> {
        self.raw_end_stream(stream)
    }

    /// Waits for a stream.
    pub fn finish(&self, stream: u64) -> Result<()> {
        self.raw_finish(stream)
    }

    /// Waits for all work on the device.
    pub fn finish_all(&self) -> Result<()> {
        self.raw_finish_all()
    }

    /// Returns the duration of `work` in a stream, measured with events, in milliseconds.
    pub fn timed(&self, stream: u64, work: impl FnOnce() -> Result<()>) -> Result<f32> {
        let (mut first, mut last, mut ms) = (0, 0, 0.0);
        self.raw_event(&raw mut first)?;
        self.raw_event(&raw mut last)?;
        self.raw_record(first, stream)?;
        work()?;
        self.raw_record(last, stream)?;
        self.raw_finish_event(last)?;
        self.raw_query_event(last)?;
        self.raw_elapsed(&raw mut ms, first, last)?;
        self.raw_end_event(first)?;
        self.raw_end_event(last)?;
        Ok(ms)
    }

    /// Captures `work` in a stream, and launches it as a graph `times` times.
    pub fn graph(&self, stream: u64, times: usize, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let (mut graph, mut made) = (0, 0);
        self.raw_begin_capture(stream, 0)?;
        work()?;
        self.raw_end_capture(stream, &raw mut graph)?;
        self.raw_instantiate(&raw mut made, graph, 0)?;
        for _ in 0..times {
            self.raw_launch_graph(made, stream)?;
        }
        self.finish(stream)?;
        self.raw_end_made(made)?;
        self.raw_end_graph(graph)
    }

    /// Resets the device.
    pub fn reset(&self) -> Result<()> {
        self.raw_reset()
    }
}
