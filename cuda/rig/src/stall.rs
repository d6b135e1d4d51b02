//! A program that stops a thread of its own: the one that answers the owner.
//!
//! UNSAFETY: installs a signal's handler, and signals a thread.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use anyhow::{Context as _, Result, ensure};

/// Name of the library's thread.
const NAME: &str = "gpu-mediator";

extern "C" fn wait_for_ever(_: libc::c_int) {
    loop {
        // SAFETY: no pointers; it may be called in a handler.
        unsafe { libc::pause() };
    }
}

/// Has the library's thread do nothing from now on.
pub fn stop_answers() -> Result<()> {
    let threads = std::fs::read_dir("/proc/self/task")?.flatten();
    let named = |path: &std::path::Path| std::fs::read_to_string(path.join("comm")).is_ok_and(|n| n.trim() == NAME);
    let thread = threads.map(|entry| entry.path()).find(|path| named(path)).context("no thread of the library's")?;
    let number: i32 = thread.file_name().context("a thread")?.to_string_lossy().parse()?;
    // SAFETY: the handler only waits; the thread is one of this process's.
    let sent = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = wait_for_ever as extern "C" fn(libc::c_int) as libc::sighandler_t;
        libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut());
        libc::syscall(libc::SYS_tgkill, libc::getpid(), number, libc::SIGUSR1)
    };
    ensure!(sent == 0, "the thread cannot be signalled: {}", std::io::Error::last_os_error());
    Ok(())
}
