//! A CUDA test program. It uses pinned memory, host functions in a stream, large copies of pageable memory, the
//! per-thread default stream and events. It checks each result, and prints a checksum. With the argument `fill`, it
//! instead allocates pinned memory until an allocation fails, and prints the number of allocations.
//!
//! UNSAFETY: calls library functions with the signatures from NVIDIA's headers.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{CString, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Result, ensure};
use cuda_rig::Cuda;

/// Number of words per buffer. A buffer is larger than a staging buffer.
const WORDS: usize = 700_000;
const BYTES: usize = WORDS * 8;

/// Sum to which the host functions add their arguments. A static variable, because these functions have only one
/// argument.
static SEEN: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" fn count(data: *mut c_void) {
    SEEN.fetch_add(data as u64, Ordering::SeqCst);
}

/// Returns a function of the library.
fn function<T: Copy>(library: *mut c_void, name: &str) -> Result<T> {
    let name = CString::new(name)?;
    // SAFETY: the library is loaded.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    ensure!(!found.is_null() && size_of::<T>() == size_of::<usize>(), "function {name:?} does not exist");
    // SAFETY: the caller specifies the function's type, which has the size of a pointer.
    Ok(unsafe { std::mem::transmute_copy(&found) })
}

fn good(call: &str, code: c_int) -> Result<()> {
    ensure!(code == 0, "{call} failed with {code}");
    Ok(())
}

type Alloc = unsafe extern "C" fn(*mut *mut u64, usize, u32) -> c_int;
type Free = unsafe extern "C" fn(*mut u64) -> c_int;
type Launch = unsafe extern "C" fn(u64, unsafe extern "C" fn(*mut c_void), *mut c_void) -> c_int;

/// Allocates pinned memory until an allocation fails, and again after freeing one allocation. Returns the number of
/// allocations.
fn fill_window(alloc: Alloc, free: Free) -> Result<usize> {
    const MAX_PARTS: usize = 64;
    let pin = || {
        let mut part = std::ptr::null_mut::<u64>();
        // SAFETY: the pointer refers to a local variable.
        match unsafe { alloc(&raw mut part, 128 << 20, 0) } {
            0 => Ok(part),
            code => Err(code),
        }
    };
    let mut parts = Vec::new();
    let refusal = loop {
        match pin() {
            Ok(part) if parts.len() < MAX_PARTS => parts.push(part),
            other => break other,
        }
    };
    ensure!(refusal == Err(2), "after {} allocations: {refusal:?}, expected error 2", parts.len());
    let count = parts.len();
    let last = parts.pop().ok_or_else(|| anyhow::anyhow!("no allocation succeeded"))?;
    // SAFETY: no work in flight uses the memory.
    good("cuMemFreeHost", unsafe { free(last) })?;
    parts.push(pin().map_err(|code| anyhow::anyhow!("freed memory cannot be allocated: {code}"))?);
    ensure!(pin() == Err(2), "more memory than before");
    // SAFETY: as above.
    parts.into_iter().try_for_each(|part| good("cuMemFreeHost", unsafe { free(part) }))?;
    Ok(count)
}

fn main() -> Result<()> {
    let cuda = Cuda::open("libcuda.so.1")?;
    // SAFETY: the library is already loaded, and the call only adds a reference.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    let alloc: Alloc = function(library, "cuMemHostAlloc")?;
    let free: Free = function(library, "cuMemFreeHost")?;
    if std::env::args().nth(1).as_deref() == Some("fill") {
        println!("{}", fill_window(alloc, free)?);
        return Ok(());
    }
    let launch: Launch = function(library, "cuLaunchHostFunc")?;
    let stream = cuda.stream()?;
    let (fill, add, sum) = (cuda.kernel("fill")?, cuda.kernel("add")?, cuda.kernel("checksum")?);
    let (at, result) = (cuda.alloc(BYTES as u64)?, cuda.alloc(4096)?);

    // Copy pageable memory in both directions, in many chunks.
    let data: Vec<u64> = (0..WORDS as u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    cuda.write(at, &data)?;
    ensure!(cuda.read(at, WORDS)? == data, "pageable bytes changed");

    // The card and the program access pinned memory at the same address.
    let mut pinned = std::ptr::null_mut::<u64>();
    // SAFETY: the pointer refers to a local variable.
    good("cuMemHostAlloc", unsafe { alloc(&raw mut pinned, BYTES, 0) })?;
    // SAFETY: the memory has `WORDS` words, and no other code uses it now.
    unsafe { std::slice::from_raw_parts_mut(pinned, WORDS) }.copy_from_slice(&data);
    cuda.copy(at, pinned as u64, BYTES as u64, stream)?;
    cuda.launch(add, &[at, WORDS as u64, 5], stream)?;
    cuda.copy(pinned as u64, at, BYTES as u64, stream)?;
    // A host function runs after earlier work in the stream, and later work waits for it.
    // SAFETY: the function accepts any argument.
    good("cuLaunchHostFunc", unsafe { launch(stream, count, 3 as *mut c_void) })?;
    // SAFETY: as above.
    good("cuLaunchHostFunc", unsafe { launch(stream, count, 4 as *mut c_void) })?;
    cuda.finish(stream)?;
    ensure!(SEEN.load(Ordering::SeqCst) == 7, "host functions ran: {SEEN:?}");
    // A host function in a graph runs once per launch of the graph.
    cuda.begin_capture(stream)?;
    // SAFETY: the function accepts any argument.
    good("cuLaunchHostFunc", unsafe { launch(stream, count, 100 as *mut c_void) })?;
    let graph = cuda.end_capture(stream)?;
    for _ in 0..3 {
        cuda.graph(graph, stream)?;
        // SAFETY: as above.
        good("cuLaunchHostFunc", unsafe { launch(stream, count, std::ptr::dangling_mut::<c_void>()) })?;
    }
    cuda.finish(stream)?;
    ensure!(SEEN.load(Ordering::SeqCst) == 310, "host functions of a graph ran: {SEEN:?}");
    // SAFETY: the copy is complete.
    let copied = unsafe { std::slice::from_raw_parts(pinned, WORDS) };
    ensure!(copied.iter().zip(&data).all(|(a, b)| *a == b.wrapping_add(5)), "pinned bytes are wrong");

    // A kernel writes pinned memory directly.
    cuda.launch(fill, &[pinned as u64, 1000, 42], stream)?;
    cuda.finish(stream)?;
    // SAFETY: the kernel has completed.
    ensure!(unsafe { pinned.add(999).read_volatile() } == 1041, "the kernel wrote elsewhere");
    // SAFETY: the memory is no longer used.
    good("cuMemFreeHost", unsafe { free(pinned) })?;

    // Each thread has its own default stream.
    let threads: Vec<_> = (0..3)
        .map(|n| {
            std::thread::spawn(move || -> Result<()> {
                cuda.enter()?;
                let own = cuda.alloc(8000)?;
                for _ in 0..50 {
                    cuda.launch(fill, &[own, 1000, n], 2)?;
                }
                cuda.finish(2)?;
                ensure!(cuda.read(own, 2)? == [n, n + 1], "thread {n}");
                Ok(cuda.free(own)?)
            })
        })
        .collect();
    for thread in threads {
        thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
    }
    cuda.launch(sum, &[at, WORDS as u64, result], stream)?;
    cuda.finish(stream)?;
    println!("{:016x}", cuda.read(result, 1)?[0]);
    Ok(())
}
