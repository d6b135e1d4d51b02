//! Child processes that end together with this process, even if it is killed. Otherwise, a daemon or QEMU that outlives
//! a killed test or benchmark would distort later measurements.

#![expect(unsafe_code, reason = "a call between fork and exec")]

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

/// A command to spawn, and the channel for the result.
type Order = (Command, SyncSender<io::Result<Child>>);

/// Starts a program that is killed when this process exits. Takes the contents of `command`, and leaves an empty
/// command.
///
/// # Errors
/// Returns an error if the program cannot be started.
pub fn spawn(command: &mut Command) -> io::Result<Child> {
    let mut command = std::mem::replace(command, Command::new("/nonexistent"));
    let parent = getpid();
    let with_parent = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may already have exited.
        if getppid() == Some(parent) { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
    };
    // SAFETY: between fork and exec, the code makes only two system calls, and does not allocate memory.
    unsafe { command.pre_exec(with_parent) };
    let (answer, started) = sync_channel(1);
    let ended = || io::Error::other("the thread that starts programs has ended");
    starter().lock().unwrap_or_else(PoisonError::into_inner).send((command, answer)).map_err(|_| ended())?;
    started.recv().map_err(|_| ended())?
}

/// Returns the channel to the thread that spawns programs. The kernel kills a program when the thread that spawned it
/// exits, and most callers are short-lived threads that boot several VMs in parallel.
fn starter() -> &'static Mutex<Sender<Order>> {
    static STARTER: OnceLock<Mutex<Sender<Order>>> = OnceLock::new();
    STARTER.get_or_init(|| {
        let (orders, taken) = channel::<Order>();
        thread::spawn(move || {
            for (mut command, answer) in taken {
                // If the caller has stopped waiting, the child's handle is dropped.
                let _ = answer.send(command.spawn());
            }
        });
        Mutex::new(orders)
    })
}

/// Makes the kernel kill this process when its parent exits.
///
/// # Errors
/// Returns an error if the kernel rejects the request.
pub fn end_with_parent() -> io::Result<()> {
    Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;
    use std::time::{Duration, Instant};

    use super::*;

    /// Environment variable of the process that the test spawns from its own executable.
    const VARIABLE: &str = "GPU_MEDIATOR_TEST_CHILDREN";

    #[test]
    fn child_outlives_the_thread_that_wanted_it() {
        let started = thread::spawn(|| spawn(Command::new("sleep").arg("60")).unwrap());
        let mut child = started.join().unwrap();
        thread::sleep(Duration::from_millis(50));
        assert_eq!(child.try_wait().unwrap(), None);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn missing_program_is_an_error() {
        assert_eq!(spawn(&mut Command::new("/no/such/program")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    /// Runs in the process that the next test spawns.
    #[test]
    fn parent() {
        if std::env::var_os(VARIABLE).is_none() {
            return;
        }
        let mut child = spawn(Command::new("sleep").arg("60")).unwrap();
        println!("\nCHILD {}", child.id());
        child.wait().unwrap();
    }

    #[test]
    fn child_ends_with_a_parent_that_is_killed() {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["children::tests::parent", "--exact", "--nocapture"]).env(VARIABLE, "1").stdout(Stdio::piped());
        let mut parent = spawn(&mut command).unwrap();
        let lines = BufReader::new(parent.stdout.take().unwrap()).lines().map_while(Result::ok);
        let child = lines.filter_map(|line| line.strip_prefix("CHILD ").map(str::to_owned)).next().unwrap();
        parent.kill().unwrap();
        parent.wait().unwrap();
        let gone = || {
            // The child's new parent may not have reaped it yet.
            let stat = fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
        };
        let deadline = Instant::now() + crate::wait::scaled(Duration::from_secs(10));
        while !gone() {
            assert!(Instant::now() < deadline, "process {child} keeps running");
            thread::sleep(crate::wait::POLL_INTERVAL);
        }
    }
}
