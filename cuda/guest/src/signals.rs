//! Signals of the program, which must not run handlers on the library's threads.
//!
//! UNSAFETY: changes the calling thread's signal mask.
#![allow(unsafe_code, reason = "see UNSAFETY")]

/// Signals that report an error of the thread's own instructions. The program may handle them, for example to fill
/// memory when it is first accessed.
const OWN_ERRORS: [libc::c_int; 4] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL];

/// Calls `start` while the calling thread's signals are blocked, so that threads that it starts receive no signals.
pub fn blocked<T>(start: impl FnOnce() -> T) -> T {
    // SAFETY: both sets are local variables, and are filled before they are read.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        for signal in OWN_ERRORS {
            libc::sigdelset(&raw mut all, signal);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let result = start();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        result
    }
}
