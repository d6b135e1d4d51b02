//! Starts child processes, waits for them, and reaps orphans.
//!
//! Only one thread calls `wait`, so reaping orphans never consumes the exit status of a child that another thread is
//! waiting for. The lock is held while a child is started, so that a child that exits immediately is not reaped before
//! its owner has been recorded.

use std::collections::HashMap;
use std::io;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::process::{WaitId, WaitIdOptions, WaitOptions, wait, waitid};

static OWNERS: Mutex<Option<HashMap<i32, Sender<i32>>>> = Mutex::new(None);
static STARTED: Condvar = Condvar::new();

fn owners() -> MutexGuard<'static, Option<HashMap<i32, Sender<i32>>>> {
    OWNERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the thread that reaps children.
pub fn start() {
    std::thread::spawn(collect);
}

/// Starts a child. The receiver gets the child's exit code, which is 128 plus the signal number if a signal terminated
/// the child.
pub fn spawn(command: &mut Command) -> io::Result<(Child, Receiver<i32>)> {
    let mut owners = owners();
    let child = command.spawn()?;
    let (sender, receiver) = channel();
    owners.get_or_insert_default().insert(child.id().cast_signed(), sender);
    STARTED.notify_all();
    Ok((child, receiver))
}

fn collect() {
    loop {
        // First wait for a child to exit, and then reap it with the lock held.
        match waitid(WaitId::All, WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => {
                // There are no children, so sleep until a child is started.
                let guard = owners();
                if guard.as_ref().is_none_or(HashMap::is_empty) {
                    drop(STARTED.wait(guard));
                }
                continue;
            }
        }
        let mut guard = owners();
        // Wait for children in any process group, because a daemon creates its own process group.
        let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) else { continue };
        let code = status.exit_status().or(status.terminating_signal().map(|signal| 128 + signal)).unwrap_or(255);
        if let Some(owner) = guard.as_mut().and_then(|owners| owners.remove(&pid.as_raw_nonzero().get())) {
            // The owner may no longer be waiting.
            let _ = owner.send(code);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::time::Duration;

    use super::*;

    #[test]
    fn children_of_other_process_groups_are_collected() {
        start();
        let mut command = Command::new("/bin/sh");
        let (_child, code) = spawn(command.args(["-c", "exit 5"]).process_group(0)).expect("/bin/sh starts");
        let limit = Duration::from_secs(60);
        assert_eq!(code.recv_timeout(limit), Ok(5), "it stays, and is looked at for ever");
    }

    #[test]
    fn exit_codes_reach_spawners_and_missing_program_fails() {
        start();
        let children: Vec<_> = (0..8)
            .map(|code| spawn(Command::new("/bin/sh").args(["-c", &format!("exit {code}")])).expect("/bin/sh starts"))
            .collect();
        assert!(spawn(&mut Command::new("/no/such/program")).is_err());
        let codes: Vec<i32> = children.iter().map(|(_, code)| code.recv().expect("a status arrives")).collect();
        assert_eq!(codes, [0, 1, 2, 3, 4, 5, 6, 7]);
        let (_child, killed) = spawn(Command::new("/bin/sh").args(["-c", "kill -9 $$"])).expect("/bin/sh starts");
        assert_eq!(killed.recv(), Ok(128 + 9));
    }
}
