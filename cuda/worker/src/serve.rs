//! The worker's main loop, and the thread that reads the link.
//!
//! UNSAFETY: wakes a futex in the control blob.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cuda_calls::own;
use cuda_ring::{BlobKind, Consumer, Geometry, Header, Shared, Words as _, control, sleep, state};
use worker_link::{FromWorker, LinkError, Reason, ToWorker};

use crate::device_link::DeviceLink;
use crate::driver::Driver;
use crate::executor::{Broken, Executor};
use crate::host_functions;
use crate::window::{Window, WindowError};

/// Time for which the worker polls after the last message before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// Maximum sleep while calls wait for work of the card.
const LONGEST_PAUSE: Duration = Duration::from_micros(200);
/// Maximum time until an announced blob reaches this thread.
// TIMEOUT: only a guest that uses a blob which does not exist waits this long, and only that guest waits.
const LONGEST_ANNOUNCEMENT: Duration = Duration::from_secs(2);
/// Maximum number of consecutive messages before waiting calls are checked.
const BATCH: usize = 32;

/// Reasons for which a worker cannot serve its program.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The window cannot be used.
    #[error(transparent)]
    Window(#[from] WindowError),
    /// The device closed the connection before the program started.
    #[error("the program ended before it started")]
    Ended,
    /// A message was invalid.
    #[error("the guest program broke the rules of its ring: {0:?}")]
    Broken(Broken),
}

impl ServeError {
    /// Returns the reason to report to the device.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Broken(Broken::Limit) | Self::Window(WindowError::TooMany) => Reason::Limit,
            Self::Broken(Broken::Malformed) | Self::Window(_) => Reason::Malformed,
            Self::Ended => Reason::Driver,
        }
    }
}

/// Messages from the link that the loop has not handled yet.
#[derive(Debug, Default)]
struct Inbox {
    messages: VecDeque<ToWorker>,
    rung: bool,
}

/// The inbox. Two threads share it.
#[derive(Debug, Default)]
struct Mail(Mutex<Inbox>, Condvar);

impl Mail {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a message for at most `limit`.
    fn wait(&self, limit: Duration) {
        let inbox = self.lock();
        drop(self.1.wait_timeout_while(inbox, limit, |inbox| inbox.messages.is_empty()));
    }
}

/// Exits without running exit handlers, because those of the driver could wait for work that never ends.
fn end() -> ! {
    // SAFETY: exits without running any more code of this process.
    unsafe { libc::_exit(0) }
}

/// Reads the link until the device sends `Goodbye` or no device is left. Exits in both cases.
fn read_link(link: &DeviceLink, mail: &Mail) {
    let mut lost = None;
    loop {
        let message = link.receive();
        match &message {
            Ok(ToWorker::Goodbye) => end(),
            Err(LinkError::Closed | LinkError::Socket(_)) => {
                if !link.rejoin(*lost.get_or_insert_with(Instant::now)) {
                    end();
                }
                continue;
            }
            Ok(_) => lost = None,
            Err(LinkError::WouldBlock | LinkError::Malformed(_)) => {}
        }
        let mut inbox = mail.lock();
        match message {
            Ok(ToWorker::Doorbell) => inbox.rung = true,
            // The number of blobs is not checked, because the device is trusted; the window checks each blob.
            Ok(message) => inbox.messages.push_back(message),
            Err(_) => {}
        }
        mail.1.notify_all();
    }
}

/// Wakes guest threads through the device, and through the futex of the loopback transport.
fn notify(control: Shared, link: &DeviceLink) {
    control.add(control::EVENTS, 1);
    let word = control.address(control::EVENTS);
    // SAFETY: the word is mapped, and waking does not read memory.
    unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, i32::MAX) };
    link.send(FromWorker::Check);
}

/// Serves a program until it ends or breaks a rule. Does not return if the program ends.
///
/// # Errors
/// Returns an error if the program breaks a rule, or ends before it starts.
pub fn serve(driver: Driver, window: OwnedFd, link: DeviceLink) -> Result<(), ServeError> {
    let link = Arc::new(link);
    let result = serve_over(driver, window, &link);
    if let Err(error) = &result {
        link.send(FromWorker::Failed { reason: error.reason() });
    }
    result
}

fn serve_over(driver: Driver, window: OwnedFd, link: &Arc<DeviceLink>) -> Result<(), ServeError> {
    let mail = Arc::new(Mail::default());
    let mut window = Window::map(window)?;
    std::thread::spawn({
        let (link, mail) = (Arc::clone(link), Arc::clone(&mail));
        move || read_link(&link, &mail)
    });
    let (control, ring) = loop {
        if let (Some(control), Some(ring)) = (window.first(BlobKind::Control), window.first(BlobKind::Ring)) {
            break (control, ring);
        }
        let mut inbox = mail.lock();
        while inbox.messages.is_empty() {
            inbox = mail.1.wait(inbox).unwrap_or_else(PoisonError::into_inner);
        }
        match inbox.messages.pop_front() {
            Some(ToWorker::Blob { id, kind, serial, offset, size }) => window.add(id, kind, serial, (offset, size))?,
            Some(ToWorker::Remove { .. }) => return Err(ServeError::Ended),
            _ => {}
        }
    };
    host_functions::prepare(control, {
        let link = Arc::clone(link);
        Box::new(move || {
            if sleep::must_notify(&control) {
                notify(control, &link);
            }
        })
    });
    let executor = Executor::new(driver, control, window);
    let link = Arc::clone(link);
    let result = Service { executor, mail, link, control, message: Vec::new() }.run(ring);
    control.store(control::STATE, state::LOST);
    result
}

struct Service {
    executor: Executor,
    mail: Arc<Mail>,
    link: Arc<DeviceLink>,
    control: Shared,
    message: Vec<u64>,
}

impl Service {
    fn run(&mut self, ring: Shared) -> Result<(), ServeError> {
        let mut ordered = Consumer::new(self.control, ring, Geometry::ORDERED);
        let mut last = Instant::now();
        self.executor.announce();
        self.notify_waiters();
        loop {
            self.take_mail()?;
            let busy = self.take_messages(&mut ordered)?;
            let had_waits = self.executor.has_waits();
            let waits = self.executor.poll_waits();
            if busy || had_waits {
                self.notify_waiters();
            }
            if busy {
                last = Instant::now();
                continue;
            }
            if last.elapsed() < SPIN {
                std::hint::spin_loop();
                continue;
            }
            sleep::announce_sleep(&self.control);
            if !ordered.has_messages() {
                self.pause(waits.then(|| last.elapsed().min(LONGEST_PAUSE)));
            }
            sleep::awake(&self.control);
        }
    }

    fn take_messages(&mut self, ring: &mut Consumer<Shared, Shared>) -> Result<bool, ServeError> {
        for count in 0..BATCH {
            if !ring.next(&mut self.message).map_err(|_| ServeError::Broken(Broken::Malformed))? {
                return Ok(count > 0);
            }
            self.take_mail()?;
            self.await_blob()?;
            self.executor.execute(&self.message).map_err(ServeError::Broken)?;
            self.notify_waiters();
        }
        Ok(true)
    }

    /// Waits for the blob that the message refers to. The device announces a blob before the guest can refer to it, but
    /// it does so on the link, which another thread reads.
    fn await_blob(&mut self) -> Result<(), ServeError> {
        let &[header, _, id, ..] = &self.message[..] else { return Ok(()) };
        let Ok(id) = u32::try_from(id) else { return Ok(()) };
        if !matches!(Header::from_word(header).op, own::PIN | own::UNPIN | own::STAGING) {
            return Ok(());
        }
        let until = Instant::now() + LONGEST_ANNOUNCEMENT;
        while self.executor.window().blob(id).is_none() {
            let Some(rest) = until.checked_duration_since(Instant::now()) else { return Ok(()) };
            self.mail.wait(rest);
            self.take_mail()?;
        }
        Ok(())
    }

    fn take_mail(&mut self) -> Result<(), ServeError> {
        loop {
            let Some(message) = self.mail.lock().messages.pop_front() else { return Ok(()) };
            match message {
                ToWorker::Blob { id, kind, serial, offset, size } => {
                    self.executor.window().add(id, kind, serial, (offset, size))?;
                }
                ToWorker::Remove { id, serial } => {
                    // The next daemon repeats the message if it does not have the reply. The guest may have another
                    // blob with this identifier by then.
                    let is_there = self.executor.window().blob(id).is_some_and(|blob| blob.serial == serial);
                    // Another program may get the range of a removed blob, so the worker must not write to it any more.
                    if is_there && self.executor.needs_blob(id) {
                        return Err(ServeError::Broken(Broken::Malformed));
                    }
                    if is_there {
                        self.executor.unpin(id);
                        self.executor.window().remove(id);
                    }
                    self.link.send(FromWorker::Removed { id, serial });
                }
                ToWorker::Doorbell | ToWorker::Goodbye => {}
            }
        }
    }

    fn notify_waiters(&self) {
        if sleep::must_notify(&self.control) {
            notify(self.control, &self.link);
        }
    }

    /// Sleeps until the device sends a message, or until the time limit.
    fn pause(&self, limit: Option<Duration>) {
        let mut inbox = self.mail.lock();
        let until = limit.map(|limit| Instant::now() + limit);
        while !inbox.rung && inbox.messages.is_empty() {
            let Some(until) = until else {
                inbox = self.mail.1.wait(inbox).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let Some(rest) = until.checked_duration_since(Instant::now()) else { break };
            inbox = self.mail.1.wait_timeout(inbox, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
        inbox.rung = false;
    }
}
