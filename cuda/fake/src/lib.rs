//! A `libcuda.so.1` without a GPU, for tests: stricter than NVIDIA's.
//!
//! - Each card is a folder that several processes share ([`card`]): each allocation is a file whose lock tells that a
//!   handle, an exported descriptor or a mapping of it still lives, in whatever process. `FAKE_CUDA_CARDS` says how many
//!   cards there are, and `CUDA_VISIBLE_DEVICES` which of them a process sees.
//! - Addresses ([`space`]): every rule of virtual memory management is checked; an access to an address with nothing mapped,
//!   or that was not given access, kills the program.
//! - Work ([`work`]): a thread for each stream; kernels of all processes take turns on the card's one engine. Captures are
//!   as easily disturbed as the real ones. Graphs have their allocations' memory reserved when they are uploaded or launched.
//! - Kernels ([`kernels`]) are known by their names and do what those say.
//! - Resets ([`card`]): a card loses all memory, and each process with a context its context, for good.
//! - Checkpoints ([`checkpoint`]): a process is taken off the card by another one.
//! - Uses of memory besides allocations ([`further`]): contexts, limits, variables of modules.
//! - NVML ([`nvml`]): which processes have a context, with their bytes, and the card's memory.
//!
//! The clock is the host's. There is no code in modules, and there are no textures.

mod api;
mod card;
mod checkpoint;
mod further;
mod kernels;
mod memory;
mod nvml;
mod space;
mod work;

/// Starts a thread that takes no signal of the program: NVIDIA's take them, and a test could not tell those from the library's.
///
/// UNSAFETY: sets the mask of signals, which is the thread's own again when this returns.
#[allow(unsafe_code, reason = "see UNSAFETY")]
fn spawn(name: &str, work: impl FnOnce() + Send + 'static) {
    // SAFETY: both sets are locals, of which the first is filled before it is read.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        // Without its threads the driver does less.
        let _ = std::thread::Builder::new().name(name.into()).spawn(work);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
    }
}

/// Results of calls, as NVIDIA's headers number them.
mod result {
    pub const SUCCESS: i32 = 0;
    pub const INVALID_VALUE: i32 = 1;
    pub const OUT_OF_MEMORY: i32 = 2;
    pub const NOT_INITIALIZED: i32 = 3;
    pub const NO_DEVICE: i32 = 100;
    pub const INVALID_DEVICE: i32 = 101;
    pub const INVALID_CONTEXT: i32 = 201;
    pub const INVALID_HANDLE: i32 = 400;
    pub const ECC_UNCORRECTABLE: i32 = 214;
    pub const ILLEGAL_STATE: i32 = 401;
    pub const NOT_FOUND: i32 = 500;
    pub const NOT_READY: i32 = 600;
    pub const NOT_SUPPORTED: i32 = 801;
    pub const CAPTURE_UNSUPPORTED: i32 = 900;
    pub const CAPTURE_INVALIDATED: i32 = 901;
    pub const CAPTURE_IMPLICIT: i32 = 906;
    pub const CAPTURED_EVENT: i32 = 907;
}
