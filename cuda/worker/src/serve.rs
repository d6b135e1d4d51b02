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
use worker_link::{FromWorker, Link, LinkError, Obstacle, Reason, ToWorker};

use crate::device_link::DeviceLink;
use crate::driver::Driver;
use crate::executor::{Broken, Executor};
use crate::host_functions;
use crate::output::Output;
use crate::restore::{RestoreError, read_state};
use crate::window::{Window, WindowError};

/// Time without messages after which the worker sleeps instead of polling.
const SPIN: Duration = Duration::from_micros(50);
/// Maximum sleep while calls wait for work on the card.
const LONGEST_PAUSE: Duration = Duration::from_micros(200);
/// Time limit for the announcement of a blob to reach this thread.
// TIMEOUT: only a guest that uses a nonexistent blob waits this long, and no other guest waits with it.
const LONGEST_ANNOUNCEMENT: Duration = Duration::from_secs(2);
/// Time limit for a program's work to complete before its state is saved.
// TIMEOUT: if the work does not complete in time, the state is not saved and the program continues.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);
/// Maximum number of messages executed between checks of waiting calls.
const BATCH: usize = 32;

/// Reason why a worker cannot serve its program.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The window cannot be used.
    #[error(transparent)]
    Window(#[from] WindowError),
    /// A message was invalid or exceeded a limit.
    #[error("the guest program broke the rules of its ring: {0:?}")]
    Broken(Broken),
    /// The program of another worker cannot continue in this one.
    #[error("cannot continue the program of another worker: {0}")]
    Restore(#[from] RestoreError),
}

impl ServeError {
    /// Returns the reason to report to the device.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Broken(Broken::Limit) | Self::Window(WindowError::TooMany) => Reason::Limit,
            Self::Broken(Broken::Malformed) | Self::Window(_) => Reason::Malformed,
            Self::Restore(_) => Reason::Restore,
        }
    }
}

/// Descriptors that a worker may receive at startup, in addition to the window and the connection to its device.
#[derive(Debug, Default)]
pub struct Start {
    /// An additional connection for requests to save the worker's state.
    pub starter: Option<Link>,
    /// File with the state saved by the program's previous worker.
    pub restore: Option<OwnedFd>,
    /// Output of kernels, which this process collects.
    pub output: Output,
    /// Set if the previous worker still has the program, so that this worker must wait for [`ToWorker::Resume`].
    pub is_held: bool,
}

/// State of a move between two workers, only one of which executes the program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Hold {
    /// This worker executes the program.
    #[default]
    None,
    /// This worker has saved the state, and waits. It executes the program again if the connection to the device is
    /// closed.
    Saved,
    /// The previous worker has the program. This worker exits if the connection to the device is closed.
    Arriving,
}

/// A request to save the program's state.
#[derive(Debug)]
struct SaveRequest {
    file: OwnedFd,
    /// The connection for the reply.
    link: Arc<DeviceLink>,
    /// Set if the worker waits afterwards instead of exiting. Contains [`Inbox::resumed`] at the time of the request.
    holds: Option<u64>,
}

/// Messages from the link that the loop has not handled yet.
#[derive(Debug, Default)]
struct Inbox {
    messages: VecDeque<ToWorker>,
    rung: bool,
    save: Option<SaveRequest>,
    hold: Hold,
    /// Number of [`ToWorker::Resume`] messages and of closed device connections. Both also cancel a hold that has not
    /// begun.
    resumed: u64,
}

impl Inbox {
    fn is_empty(&self) -> bool {
        self.messages.is_empty() && self.save.is_none()
    }
}

/// Inbox shared by the main loop and the threads that read connections.
#[derive(Debug, Default)]
struct Mail(Mutex<Inbox>, Condvar);

impl Mail {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a message for at most `limit`.
    fn wait(&self, limit: Duration) {
        let inbox = self.lock();
        drop(self.1.wait_timeout_while(inbox, limit, |inbox| inbox.is_empty()));
    }

    /// Waits until this worker may execute the program.
    fn wait_until_resumed(&self, inbox: MutexGuard<'_, Inbox>) {
        drop(self.1.wait_while(inbox, |inbox| inbox.hold != Hold::None));
    }
}

/// Exits without running exit handlers, because the driver's handlers could wait for work that never completes.
fn end() -> ! {
    // SAFETY: exits without running any more code of this process.
    unsafe { libc::_exit(0) }
}

/// Reads the link. Exits the process if the device sends `Goodbye`, if no daemon can be reached, or if the connection
/// is closed while the previous worker has the program.
fn read_link(link: &Arc<DeviceLink>, mail: &Mail) {
    let mut lost = None;
    loop {
        link.wait();
        // A worker that saves its state holds this lock, so that the next worker receives the remaining messages.
        let mut inbox = mail.lock();
        match link.try_receive() {
            Ok((ToWorker::Goodbye, _)) => end(),
            Err(LinkError::Closed | LinkError::Socket(_)) => {
                inbox.resumed += 1;
                // The program stays with its previous worker, because the next daemon knows only that worker.
                match std::mem::take(&mut inbox.hold) {
                    Hold::Arriving => end(),
                    Hold::Saved => mail.1.notify_all(),
                    Hold::None => {}
                }
                drop(inbox);
                if !link.rejoin(*lost.get_or_insert_with(Instant::now)) {
                    end();
                }
                continue;
            }
            Ok((ToWorker::Doorbell, _)) => inbox.rung = true,
            Ok((message @ (ToWorker::Save | ToWorker::Hold), file)) => {
                let holds = (message == ToWorker::Hold).then_some(inbox.resumed);
                inbox.save = file.map(|file| SaveRequest { file, link: Arc::clone(link), holds });
            }
            Ok((ToWorker::Resume, _)) => {
                inbox.resumed += 1;
                inbox.hold = Hold::None;
            }
            // The number of blobs is not checked, because the device is trusted; the window checks each blob.
            Ok((message, _)) => inbox.messages.push_back(message),
            Err(LinkError::WouldBlock | LinkError::Malformed(_)) => continue,
        }
        lost = None;
        mail.1.notify_all();
    }
}

/// Reads the connection to the process that started the worker until it is closed.
fn read_starter(link: &Arc<DeviceLink>, mail: &Mail) {
    loop {
        link.wait();
        match link.try_receive() {
            Ok((ToWorker::Save, Some(file))) => {
                mail.lock().save = Some(SaveRequest { file, link: Arc::clone(link), holds: None });
                mail.1.notify_all();
            }
            Err(LinkError::Closed | LinkError::Socket(_)) => return,
            Ok(_) | Err(LinkError::WouldBlock | LinkError::Malformed(_)) => {}
        }
    }
}

/// Wakes guest threads through the device, and through the futex of the loopback transport.
fn notify(control: Shared, link: &DeviceLink) {
    control.add(control::EVENTS, 1);
    let word = control.address(control::EVENTS);
    // SAFETY: the word is mapped, and `FUTEX_WAKE` does not access memory.
    unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, i32::MAX) };
    link.send(FromWorker::Check);
}

/// Serves a program. Returns only on errors. Exits the process when the program exits.
///
/// # Errors
/// Returns an error if the program sends an invalid message or cannot be served.
pub fn serve(driver: Driver, window: OwnedFd, link: DeviceLink, start: Start) -> Result<(), ServeError> {
    let link = Arc::new(link);
    let result = serve_over(driver, window, &link, start);
    if let Err(error) = &result {
        link.send(FromWorker::Failed { reason: error.reason() });
    }
    result
}

fn serve_over(driver: Driver, window: OwnedFd, link: &Arc<DeviceLink>, start: Start) -> Result<(), ServeError> {
    let mail = Arc::new(Mail::default());
    let is_held = start.is_held;
    if is_held {
        mail.lock().hold = Hold::Arriving;
    }
    let mut window = Window::map(window)?;
    let starter = start.starter.map(|starter| Arc::new(DeviceLink::new(starter, None)));
    if let Some(starter) = &starter {
        let (starter, mail) = (Arc::clone(starter), Arc::clone(&mail));
        std::thread::spawn(move || read_starter(&starter, &mail));
    }
    let restored = start.restore.map(|file| read_state(&file).map(|(state, contents)| (file, state, contents)));
    let restored = restored.transpose()?;
    if let Some((_, state, _)) = &restored {
        for blob in &state.blobs {
            window.add(blob.id, blob.kind, blob.serial, (blob.offset, blob.bytes))?;
        }
    }
    std::thread::spawn({
        let (link, mail) = (Arc::clone(link), Arc::clone(&mail));
        move || read_link(&link, &mail)
    });
    let (control, ring) = loop {
        if let (Some(control), Some(ring)) = (window.first(BlobKind::Control), window.first(BlobKind::Ring)) {
            break (control, ring);
        }
        // The saved state of a started program contains these blobs, so a state without them is invalid.
        if restored.is_some() {
            return Err(RestoreError::File.into());
        }
        let mut inbox = mail.lock();
        while inbox.is_empty() {
            inbox = mail.1.wait(inbox).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(SaveRequest { link, .. }) = inbox.save.take() {
            link.send(FromWorker::Refused { obstacle: Obstacle::Starting });
        }
        match inbox.messages.pop_front() {
            Some(ToWorker::Blob { id, kind, serial, offset, size }) => window.add(id, kind, serial, (offset, size))?,
            // The program has exited: the guest's kernel removes its blobs before its context.
            Some(ToWorker::Remove { .. }) => end(),
            _ => {}
        }
    };
    let callbacks = restored.as_ref().map_or(0, |(_, state, _)| state.callbacks);
    host_functions::prepare(control, callbacks, {
        let link = Arc::clone(link);
        Box::new(move || {
            if sleep::must_notify(&control) {
                notify(control, &link);
            }
        })
    });
    let mut executor = Executor::new(driver, control, window);
    executor.output = start.output;
    let link = Arc::clone(link);
    let tail = restored.as_ref().map_or(0, |(_, state, _)| state.tail);
    let restore = |executor: &mut Executor| match restored {
        // With a different position in the ring, messages would be skipped or executed twice.
        Some((_, state, _)) if control.load(control::TAIL) != state.tail => Err(RestoreError::File),
        Some((file, state, contents)) => {
            executor.restore(&state, &file, contents)?;
            [Some(&link), starter.as_ref()].into_iter().flatten().for_each(|link| link.send(FromWorker::Restored));
            Ok(())
        }
        None => Ok(()),
    };
    let result = match restore(&mut executor) {
        // Do not mark the worker as lost, because the previous worker continues the program.
        Err(error) if is_held => return Err(error.into()),
        Err(error) => Err(error.into()),
        Ok(()) => {
            mail.wait_until_resumed(mail.lock());
            executor.output.watch(control);
            let ordered = Consumer::resume(control, ring, Geometry::ORDERED, tail);
            Service { executor, mail, link, control, message: Vec::new() }.run(ordered)
        }
    };
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
    fn run(&mut self, mut ordered: Consumer<Shared, Shared>) -> Result<(), ServeError> {
        let mut last = Instant::now();
        self.executor.announce();
        self.notify_waiters();
        loop {
            self.take_mail()?;
            self.save_on_request(&ordered)?;
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
    /// another thread reads the announcement from the link.
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
                    // The next daemon repeats a message that received no reply. By then, the guest may have reused the
                    // identifier for another blob.
                    let is_there = self.executor.window().blob(id).is_some_and(|blob| blob.serial == serial);
                    // The range of a removed blob may be reused for another program, so the worker must no longer write
                    // to it. The worker exits without a report, because this is how most programs exit: the guest's
                    // kernel removes their blobs before their context.
                    if is_there && self.executor.needs_blob(id) {
                        end();
                    }
                    if is_there {
                        self.executor.unpin(id);
                        self.executor.window().remove(id);
                    }
                    self.link.send(FromWorker::Removed { id, serial });
                }
                ToWorker::Doorbell | ToWorker::Goodbye | ToWorker::Save | ToWorker::Hold | ToWorker::Resume => {}
            }
        }
    }

    /// Handles a request to save the program's state: saves it, and exits or waits for the device. If an obstacle
    /// prevents this, the program continues here.
    fn save_on_request(&mut self, ordered: &Consumer<Shared, Shared>) -> Result<(), ServeError> {
        let Some(SaveRequest { file, link, holds }) = self.mail.lock().save.take() else { return Ok(()) };
        let mut found = self.executor.steps().map(drop);
        if found.is_ok() {
            found = self.drain()?;
        }
        if found.is_ok() {
            let mail = Arc::clone(&self.mail);
            // Keep holding the lock, so that the next worker receives the later messages.
            let mut inbox = mail.lock();
            while !inbox.messages.is_empty() {
                drop(inbox);
                self.take_mail()?;
                inbox = mail.lock();
            }
            found = self.executor.save(&file, ordered.position());
            if found.is_ok() {
                link.send(FromWorker::Saved);
                let Some(resumed) = holds else { end() };
                if inbox.resumed == resumed {
                    inbox.hold = Hold::Saved;
                }
                mail.wait_until_resumed(inbox);
            }
        }
        if let Err(obstacle) = found {
            link.send(FromWorker::Refused { obstacle });
        }
        Ok(())
    }

    /// Waits until no work of the program is in flight. New messages from the program stay in the ring.
    fn drain(&mut self) -> Result<Result<(), Obstacle>, ServeError> {
        let until = Instant::now() + DRAIN_LIMIT;
        loop {
            self.take_mail()?;
            self.executor.poll_waits();
            self.notify_waiters();
            match self.executor.is_idle() {
                Ok(true) => return Ok(Ok(())),
                Ok(false) if Instant::now() < until => std::thread::sleep(LONGEST_PAUSE),
                Ok(false) => return Ok(Err(Obstacle::Busy)),
                Err(obstacle) => return Ok(Err(obstacle)),
            }
        }
    }

    fn notify_waiters(&self) {
        if sleep::must_notify(&self.control) {
            notify(self.control, &self.link);
        }
    }

    /// Sleeps until a message from the device arrives or the time limit expires.
    fn pause(&self, limit: Option<Duration>) {
        let mut inbox = self.mail.lock();
        let until = limit.map(|limit| Instant::now() + limit);
        while !inbox.rung && inbox.is_empty() {
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
