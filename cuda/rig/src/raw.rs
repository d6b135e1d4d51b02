//! A client for tests with hostile programs. It speaks the owner's protocol without the library, and executes commands.
//!
//! The process reads one [`Command`] as JSON from each line of its standard input, and prints one [`Answer`] for each.
//! The process opens the driver only for [`Command::Launch`]. The `hostile` tests start this process, as a separate
//! user if they run as root.
//!
//! UNSAFETY: forks, waits for the child, and changes the process's user.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::io::{BufRead as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use cuda_protocol::{FromOwner, FromTenant, Link, LinkError, Usage};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};

use crate::Cuda;

/// Process that calls `connect`. The owner receives its credentials.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Through {
    /// The client process itself.
    #[default]
    Itself,
    /// A child that exits immediately and is reaped.
    Child,
    /// A child that exits immediately and stays a zombie.
    Zombie,
}

/// Automatic reply to an order from the owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// No reply.
    #[default]
    Silence,
    /// The library's reply: `Quiet`, all chunks redirected, or `Stopped`.
    Honest,
    /// A reply that declines the order (`Busy`, or no chunk redirected), or `Stopped` with waiting work.
    Declined,
}

/// Automatic replies to the owner's orders.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manner {
    /// Reply to `Quiesce`.
    pub quiesce: Reply,
    /// Reply to `Redirect`.
    pub redirect: Reply,
    /// Reply to `Stop`.
    pub stop: Reply,
}

impl Manner {
    /// Returns the manner of a client that replies to every order as the library does.
    #[must_use]
    pub fn honest() -> Self {
        Self { quiesce: Reply::Honest, redirect: Reply::Honest, stop: Reply::Honest }
    }
}

/// A command to the client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Command {
    /// Connects. The result is [`Answer::Link`].
    Connect {
        /// Process that calls `connect`.
        through: Through,
        /// Automatic replies, or `None` if no thread reads the connection.
        manner: Option<Manner>,
    },
    /// Sends a message one or more times. The result is [`Answer::Sent`].
    Say {
        /// Number of the connection.
        link: usize,
        /// The message, without descriptors.
        message: FromTenant,
        /// Number of times to send it.
        times: u32,
    },
    /// Waits for messages. The result is [`Answer::Heard`].
    Hear {
        /// Number of the connection.
        link: usize,
        /// Number of messages to wait for.
        count: usize,
        /// Time limit in milliseconds.
        within_ms: u64,
    },
    /// Closes a connection. Descriptors received over it stay open.
    Close {
        /// Number of the connection.
        link: usize,
    },
    /// Launches a kernel through the driver, bypassing the owner. The result is [`Answer::Done`], printed while the
    /// kernel runs.
    Launch {
        /// Duration of the kernel in milliseconds.
        ms: u64,
    },
    /// Forks and exits. The child continues with the connections and commands, but does not read messages.
    Desert,
    /// Closes the descriptors received over a connection.
    DropDescriptors {
        /// Number of the connection.
        link: usize,
    },
}

/// Result of a command.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// Number of the new connection.
    Link(usize),
    /// Number of messages sent. It is lower than requested if the connection failed, or if its queue was full for a
    /// second.
    Sent(u32),
    /// Messages received since the last `Hear`.
    Heard {
        /// The messages, oldest first.
        messages: Vec<FromOwner>,
        /// Number of descriptors received over this connection that are still open.
        descriptors: usize,
        /// Set if the owner has closed the connection.
        closed: bool,
    },
    /// The command has been executed.
    Done,
    /// The command failed for the given reason.
    Failed(String),
}

/// Messages and descriptors received over a connection.
#[derive(Debug, Default)]
struct Inbox {
    messages: Vec<FromOwner>,
    descriptors: Vec<OwnedFd>,
    closed: bool,
}

#[derive(Debug)]
struct Connection {
    link: Option<Arc<Link>>,
    inbox: Arc<(Mutex<Inbox>, Condvar)>,
    reads: bool,
}

fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Executes commands from standard input until end of file.
pub fn serve(socket: &Path) -> Result<()> {
    let mut connections = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let command = serde_json::from_str(&line?).context("standard input contains a line that is not a command")?;
        let answer = obey(socket, &mut connections, command).unwrap_or_else(|error| Answer::Failed(error.to_string()));
        println!("{}", serde_json::to_string(&answer)?);
        std::io::stdout().flush()?;
    }
    Ok(())
}

/// Sets this process's user and group IDs to `uid`.
pub fn become_user(uid: u32) -> Result<()> {
    // SAFETY: the only pointer is the null pointer of an empty list.
    let done = unsafe {
        libc::setgroups(0, std::ptr::null()) == 0
            && libc::setresgid(uid, uid, uid) == 0
            && libc::setresuid(uid, uid, uid) == 0
    };
    ensure!(done, "cannot become user {uid}: {}", std::io::Error::last_os_error());
    Ok(())
}

fn obey(socket: &Path, connections: &mut Vec<Connection>, command: Command) -> Result<Answer> {
    let missing = "no connection has this number";
    match command {
        Command::Connect { through, manner } => {
            let link = Arc::new(connect(socket, through)?);
            let inbox = Arc::new((Mutex::new(Inbox::default()), Condvar::new()));
            if let Some(manner) = manner {
                let (link, inbox) = (Arc::clone(&link), Arc::clone(&inbox));
                std::thread::spawn(move || read(&link, manner, &inbox));
            }
            connections.push(Connection { link: Some(link), inbox, reads: manner.is_some() });
            Ok(Answer::Link(connections.len() - 1))
        }
        Command::Say { link, message, times } => {
            let link = connections.get(link).context(missing)?.link.as_ref().context("the connection is closed")?;
            let sent = (0..times).take_while(|_| writable(link) && link.send(&message, &[]).is_ok()).count();
            Ok(Answer::Sent(u32::try_from(sent)?))
        }
        Command::Hear { link, count, within_ms } => {
            let connection = connections.get(link).context(missing)?;
            ensure!(connection.reads, "no thread reads this connection");
            let until = Instant::now() + Duration::from_millis(within_ms);
            let (inbox, changed) = &*connection.inbox;
            let mut inbox = guard(inbox);
            while inbox.messages.len() < count && !inbox.closed {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                inbox = changed.wait_timeout(inbox, left).unwrap_or_else(PoisonError::into_inner).0;
            }
            let messages = std::mem::take(&mut inbox.messages);
            Ok(Answer::Heard { messages, descriptors: inbox.descriptors.len(), closed: inbox.closed })
        }
        Command::Close { link } => {
            let link = connections.get_mut(link).context(missing)?.link.take();
            if let Some(link) = link {
                // Shut down explicitly, because the reading thread keeps the socket open.
                let _ = rustix::net::shutdown(&*link, rustix::net::Shutdown::Both);
            }
            Ok(Answer::Done)
        }
        Command::Launch { ms } => {
            let cuda = Cuda::open("libcuda.so.1")?;
            let word = cuda.alloc(4096)?;
            cuda.launch(cuda.kernel("spin")?, &[ms * 1000, word], cuda.stream()?)?;
            Ok(Answer::Done)
        }
        Command::Desert => {
            // SAFETY: the child has only this thread. Locks held by other threads stay locked forever, but the child
            // does not use any of them.
            let child = unsafe { libc::fork() };
            ensure!(child >= 0, "cannot fork: {}", std::io::Error::last_os_error());
            if child > 0 {
                // SAFETY: exits only this process. The child continues.
                unsafe { libc::_exit(0) };
            }
            Ok(Answer::Done)
        }
        Command::DropDescriptors { link } => {
            guard(&connections.get(link).context(missing)?.inbox.0).descriptors.clear();
            Ok(Answer::Done)
        }
    }
}

/// Waits for up to a second until the connection accepts a message. Returns false on a timeout.
fn writable(link: &Link) -> bool {
    let second = Timespec { tv_sec: 1, tv_nsec: 0 };
    poll(&mut [PollFd::from_borrowed_fd(link.as_fd(), PollFlags::OUT)], Some(&second)).is_ok_and(|ready| ready > 0)
}

fn connect(socket: &Path, through: Through) -> Result<Link> {
    let address = SocketAddrUnix::new(socket)?;
    let ours = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    if through == Through::Itself {
        rustix::net::connect(&ours, &address)?;
        return Ok(Link::new(ours));
    }
    // SAFETY: the child makes one system call, and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let done = rustix::net::connect(&ours, &address);
        // SAFETY: as above.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    ensure!(child > 0, "cannot fork: {}", std::io::Error::last_os_error());
    let options = libc::WEXITED | if through == Through::Zombie { libc::WNOWAIT } else { 0 };
    // SAFETY: all zeros is a valid value of the type.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: the child belongs to this process, and the pointer refers to a local variable.
    let waited = unsafe { libc::waitid(libc::P_PID, child.cast_unsigned(), &raw mut info, options) };
    ensure!(waited == 0, "cannot wait for the child: {}", std::io::Error::last_os_error());
    Ok(Link::new(ours))
}

/// Reads a connection until it is closed, and sends the configured replies.
fn read(link: &Link, manner: Manner, inbox: &(Mutex<Inbox>, Condvar)) {
    loop {
        let received = link.receive();
        let mut guard = guard(&inbox.0);
        match received {
            Ok(received) => {
                guard.messages.push(received.message.clone());
                guard.descriptors.extend(received.descriptors);
                drop(guard);
                let sent = reply(&received.message, manner).map_or(Ok(()), |answer| link.send(&answer, &[]));
                if matches!(sent, Err(LinkError::Malformed(_))) {
                    // This program created the message, so it must be valid.
                    unreachable!("an answer is malformed: {sent:?}");
                }
            }
            Err(_) => {
                guard.closed = true;
                inbox.1.notify_all();
                return;
            }
        }
        inbox.1.notify_all();
    }
}

fn reply(message: &FromOwner, manner: Manner) -> Option<FromTenant> {
    let answer = match *message {
        FromOwner::Quiesce { order, .. } => match manner.quiesce {
            Reply::Silence => return None,
            Reply::Honest => FromTenant::Quiet { order },
            Reply::Declined => FromTenant::Busy { order },
        },
        FromOwner::Reclaim { order } if manner.quiesce != Reply::Silence => FromTenant::Reclaimed { order },
        FromOwner::Redirect { order, ref moves } => match manner.redirect {
            Reply::Silence => return None,
            Reply::Honest => FromTenant::Redirected { order, moved: u32::try_from(moves.len()).unwrap_or(u32::MAX) },
            Reply::Declined => FromTenant::Redirected { order, moved: 0 },
        },
        FromOwner::Stop { card, turn } => match manner.stop {
            Reply::Silence => return None,
            reply => {
                let waiting = reply == Reply::Declined;
                FromTenant::Stopped { card, turn, usage: Usage::default(), waiting }
            }
        },
        _ => return None,
    };
    Some(answer)
}
