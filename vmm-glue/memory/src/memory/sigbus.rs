//! Protects this process from clients that withdraw memory while it is mapped here.
//!
//! A client can truncate an unsealed file after this process has mapped it, or the host can fail to load a page. The
//! next access then raises `SIGBUS`, which would kill the process, and with it the devices of all other clients. The
//! handler in this module replaces the whole mapping with anonymous zero pages, marks the mapping, and wakes its
//! server. The access is then retried and succeeds. A `SIGBUS` at any other address is forwarded to the previous
//! handler.
#![expect(unsafe_code, reason = "installs a signal handler that repairs mappings")]
// UNSAFETY: the handler can run on any thread, at any access to a mapping. It only uses atomics, `mmap` and `write`,
// which are async-signal-safe here.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Once};

use parking_lot::Mutex;

use crate::wake::Wake;

/// Number of slots per block. A block is added when all slots are in use, and is never freed.
const SLOTS: usize = 256;

/// A registered mapping. `start` and `end` are consistent if `version` is even.
struct Slot {
    version: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    writable: AtomicBool,
    tripped: AtomicBool,
    wake: AtomicI32,
}

struct Block {
    slots: [Slot; SLOTS],
    next: AtomicPtr<Block>,
}

/// Number of this process's mappings that have been replaced.
static TRIPS: AtomicUsize = AtomicUsize::new(0);

/// Returns the number of this process's mappings that were withdrawn. Comparing this number is cheaper than searching
/// all regions for withdrawn ones.
pub fn withdrawals() -> usize {
    TRIPS.load(Ordering::Acquire)
}

static BLOCKS: AtomicPtr<Block> = AtomicPtr::new(ptr::null_mut());
static FREE: Mutex<Vec<&'static Slot>> = Mutex::new(Vec::new());
static INSTALL: Once = Once::new();
/// Previous handler, stored once before the installation of this module's handler.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// An address range that the handler can repair.
#[derive(Debug)]
pub(super) struct Guard {
    slot: &'static Slot,
    /// Keeps the descriptor in the slot open.
    _wake: Arc<Wake>,
    released: bool,
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}..{:#x}", self.start.load(Ordering::Relaxed), self.end.load(Ordering::Relaxed))
    }
}

impl Guard {
    /// Registers the mapping of `len` bytes at `start`. Both are multiples of the file's page size.
    pub(super) fn new(start: usize, len: usize, writable: bool, wake: Arc<Wake>) -> Self {
        INSTALL.call_once(install);
        let slot = free_slot();
        slot.start.store(start, Ordering::Relaxed);
        slot.end.store(start.saturating_add(len), Ordering::Relaxed);
        slot.writable.store(writable, Ordering::Relaxed);
        slot.tripped.store(false, Ordering::Relaxed);
        slot.wake.store(wake.raw(), Ordering::Relaxed);
        slot.version.fetch_add(1, Ordering::Release);
        Self { slot, _wake: wake, released: false }
    }

    /// Returns true if the mapping has been replaced.
    pub(super) fn is_tripped(&self) -> bool {
        self.slot.tripped.load(Ordering::Relaxed)
    }

    /// Marks the mapping as replaced and wakes its server. Called if the file could not be mapped.
    pub(super) fn trip(&self) {
        trip(self.slot);
    }

    /// Unregisters the mapping. Must be called before the mapping is unmapped.
    pub(super) fn release(&mut self) {
        if !std::mem::replace(&mut self.released, true) {
            self.slot.version.fetch_add(1, Ordering::AcqRel);
            self.slot.start.store(0, Ordering::Relaxed);
            self.slot.end.store(0, Ordering::Relaxed);
            FREE.lock().push(self.slot);
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.release();
    }
}

fn free_slot() -> &'static Slot {
    let mut free = FREE.lock();
    if let Some(slot) = free.pop() {
        return slot;
    }
    let empty = || Slot {
        version: AtomicUsize::new(1),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        writable: AtomicBool::new(false),
        tripped: AtomicBool::new(false),
        wake: AtomicI32::new(-1),
    };
    let next = AtomicPtr::new(BLOCKS.load(Ordering::Acquire));
    let block: &'static mut Block = Box::leak(Box::new(Block { slots: std::array::from_fn(|_| empty()), next }));
    let raw: *mut Block = block;
    BLOCKS.store(raw, Ordering::Release);
    // SAFETY: the block was leaked above, and is never freed or borrowed mutably again.
    let block: &'static Block = unsafe { &*raw };
    let [first, rest @ ..] = &block.slots;
    free.extend(rest);
    first
}

fn install() {
    // SAFETY: `sigaction` is plain data, and all zeros is a valid value.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handle as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: as above.
    let previous = Box::leak(Box::new(unsafe { std::mem::zeroed::<libc::sigaction>() }));
    // SAFETY: both pointers are valid. The old action is stored before the new one is installed, so that the handler
    // finds it. `handle` has the signature required by `SA_SIGINFO`.
    let installed = unsafe {
        libc::sigemptyset(&raw mut action.sa_mask);
        let read = libc::sigaction(libc::SIGBUS, ptr::null(), previous);
        PREVIOUS.store(previous, Ordering::Release);
        read | libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut())
    };
    if installed != 0 {
        let error = std::io::Error::last_os_error();
        tracing::error!(%error, "cannot handle SIGBUS; a VMM that truncates its memory file will crash this process");
    }
}

extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t` to a handler with `SA_SIGINFO`, and provides an address for
    // `SIGBUS`.
    let address = unsafe { (*info).si_addr() }.addr();
    // SAFETY: returns a pointer to this thread's `errno`, which must be preserved for the interrupted code.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let saved = unsafe { *errno };
    let repaired = repair(address);
    // SAFETY: as above.
    unsafe { *errno = saved };
    if !repaired {
        forward(signal, info, context);
    }
}

/// Replaces the registered mapping that contains `address`. Returns false if none contains it, or if the replacement
/// failed.
fn repair(address: usize) -> bool {
    let mut block = BLOCKS.load(Ordering::Acquire);
    // SAFETY: blocks are never freed. The pointer is null or points to one of them.
    while let Some(current) = unsafe { block.as_ref() } {
        for slot in &current.slots {
            let version = slot.version.load(Ordering::Acquire);
            let (start, end) = (slot.start.load(Ordering::Relaxed), slot.end.load(Ordering::Relaxed));
            if address < start || address >= end {
                continue;
            }
            std::sync::atomic::fence(Ordering::Acquire);
            // If the version is odd or has changed, this slot does not belong to the accessed mapping, because a
            // mapping stays registered while it is in use.
            if version % 2 != 0 || slot.version.load(Ordering::Relaxed) != version {
                continue;
            }
            return replace(slot, start, end.saturating_sub(start));
        }
        block = current.next.load(Ordering::Acquire);
    }
    false
}

fn replace(slot: &Slot, start: usize, len: usize) -> bool {
    let write = if slot.writable.load(Ordering::Relaxed) { libc::PROT_WRITE } else { 0 };
    // SAFETY: the range is one whole mapping of this process, which the faulting thread keeps alive. Its old contents
    // are lost.
    let result = unsafe {
        libc::mmap(
            ptr::without_provenance_mut(start),
            len,
            libc::PROT_READ | write,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if result == libc::MAP_FAILED {
        return false;
    }
    trip(slot);
    true
}

/// Marks a mapping as replaced and wakes its server. Uses only async-signal-safe calls.
fn trip(slot: &Slot) {
    slot.tripped.store(true, Ordering::Relaxed);
    TRIPS.fetch_add(1, Ordering::Release);
    let one = 1u64;
    // SAFETY: writes 8 bytes of a local variable to the server's own eventfd, which the guard keeps open.
    let _ = unsafe { libc::write(slot.wake.load(Ordering::Relaxed), (&raw const one).cast(), 8) };
}

/// Forwards the signal to the previous handler.
fn forward(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    type Handler = extern "C" fn(libc::c_int);
    type InfoHandler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
    // SAFETY: the pointer is null, or `install` leaked its target.
    let previous = unsafe { PREVIOUS.load(Ordering::Acquire).as_ref() };
    match previous {
        Some(action) if action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN => {
            if action.sa_flags & libc::SA_SIGINFO != 0 {
                // SAFETY: an action with `SA_SIGINFO` contains a handler with this signature.
                let handler: InfoHandler = unsafe { std::mem::transmute(action.sa_sigaction) };
                handler(signal, info, context);
            } else {
                // SAFETY: an action without `SA_SIGINFO` that is neither default nor ignore contains a handler with
                // this signature.
                let handler: Handler = unsafe { std::mem::transmute(action.sa_sigaction) };
                handler(signal);
            }
        }
        _ => {
            // SAFETY: restores the default action, so that the access is retried on return and then kills the process.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
    }
}
