//! Makes a program unresponsive to its owner: replaces its library's connection with one over which no messages arrive.
//!
//! UNSAFETY: replaces a descriptor with another one.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::os::fd::{AsRawFd as _, BorrowedFd};

use anyhow::{Result, ensure};
use cuda_protocol::Link;
use rustix::net::{SocketType, sockopt};

/// Cuts the library's thread off from further messages. The thread itself cannot be stopped, because it blocks all
/// signals.
pub fn stop_answers() -> Result<()> {
    let entries = std::fs::read_dir("/proc/self/fd")?.flatten();
    let numbers: Vec<i32> = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let mut found = 0;
    for number in numbers {
        // SAFETY: the descriptor was just listed as open. If it has been closed since, the query fails.
        let connection = unsafe { BorrowedFd::borrow_raw(number) };
        if sockopt::socket_type(connection) != Ok(SocketType::SEQPACKET) {
            continue;
        }
        let (silent, end) = Link::pair()?;
        // Keep the connection to the owner and the other end of the silent connection open.
        std::mem::forget((connection.try_clone_to_owned()?, end));
        // SAFETY: the library's descriptor stays valid, and now refers to another connection.
        let put = unsafe { libc::dup2(std::os::fd::AsFd::as_fd(&silent).as_raw_fd(), number) };
        ensure!(put == number, "cannot replace the connection: {}", std::io::Error::last_os_error());
        found += 1;
    }
    ensure!(found == 1, "found {found} connections of the library");
    Ok(())
}
