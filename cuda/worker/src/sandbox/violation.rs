//! Handles the signal for a forbidden system call.
//!
//! The filter makes the kernel send `SIGSYS` instead of executing the call. The handler executes a `connect` to a
//! stored address, with the pointer that the filter allows. For any other call, the handler reports the call and
//! terminates the process. A process does not gain anything by installing another handler, because the call was not
//! executed. Only the report depends on the handler.
//!
//! UNSAFETY: installs a signal handler, which uses only system calls and the registers of its thread.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::io::Errno;
use worker_link::{FromWorker, Reason, call_name};

use super::addresses::Addresses;

/// Exit status of a worker that made a forbidden call. A shell reports the same status for a process killed by
/// `SIGSYS`.
const STATUS: c_int = 128 + libc::SIGSYS;
/// Registers of a call's first three arguments.
const ARGUMENTS: [c_int; 3] = [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX];
/// Standard error.
const STDERR: c_int = 2;

/// Stored addresses. A static variable, because a signal handler has no user argument.
static ADDRESSES: OnceLock<Addresses> = OnceLock::new();
/// Descriptor of the connection to the device. A static variable, because a signal handler has no user argument.
static LINK: AtomicI32 = AtomicI32::new(-1);

/// `siginfo_t` of a `SIGSYS` signal.
#[repr(C)]
struct Information {
    _signal: [c_int; 4],
    _address: u64,
    call: c_int,
    _architecture: u32,
}

/// Installs the handler.
pub(super) fn prepare(link: BorrowedFd<'_>, addresses: Addresses) -> Result<(), Errno> {
    // Build the table of names before the first signal arrives.
    let _ = call_name(0);
    let _ = ADDRESSES.set(addresses);
    set_link(link);
    // SAFETY: the structure is initialized before it is used, and the handler's signature matches the flags.
    let failed = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_forbidden_call as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
        libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut())
    };
    if failed != 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL));
    }
    Ok(())
}

/// Sets the connection for reports.
pub(super) fn set_link(link: BorrowedFd<'_>) {
    LINK.store(link.as_raw_fd(), Ordering::Relaxed);
}

extern "C" fn on_forbidden_call(_signal: c_int, information: *const Information, context: *mut libc::ucontext_t) {
    // SAFETY: the kernel passes both pointers, and they are valid while the handler runs.
    let (information, registers) = unsafe { (&*information, &mut (*context).uc_mcontext.gregs) };
    let addresses = ADDRESSES.get().copied().unwrap_or_default();
    let [socket, address, length] = ARGUMENTS.map(|register| registers[register as usize]);
    if i64::from(information.call) == libc::SYS_connect
        // SAFETY: the thread passed this address to the kernel. If it is not readable, the process dies.
        && let Some(kept) = unsafe { addresses.find(address as u64, length as u64) }
    {
        // SAFETY: the address stays mapped.
        let result = unsafe { libc::syscall(libc::SYS_connect, socket, kept.pointer, kept.length) };
        // SAFETY: the location belongs to this thread.
        let error = unsafe { *libc::__errno_location() };
        registers[libc::REG_RAX as usize] = if result < 0 { -i64::from(error) } else { result };
        return;
    }
    report(information.call as u32, LINK.load(Ordering::Relaxed));
    // SAFETY: terminates the process.
    unsafe { libc::_exit(STATUS) }
}

/// Reports the call without allocating memory or acquiring locks.
fn report(call: u32, link: c_int) {
    let packet = FromWorker::Failed { reason: Reason::Forbidden(call) }.encode();
    let parts: [&[u8]; 3] =
        [b"cuda-worker: the call `", call_name(call).as_bytes(), b"` is forbidden: the worker ends\n"];
    let parts = parts.map(|part| libc::iovec { iov_base: part.as_ptr() as *mut c_void, iov_len: part.len() });
    // SAFETY: both calls only read local memory.
    unsafe {
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        libc::send(link, packet.as_ptr().cast(), packet.len(), flags);
        libc::writev(STDERR, parts.as_ptr(), parts.len() as c_int);
    }
}
