//! Output of the program's kernels (`printf`). The driver writes it to this process's standard output, and the guest
//! takes it with messages.
//!
//! The card stores output in a buffer. The driver writes it when the program waits for work, launches a kernel, unloads
//! a module, or destroys a context. Queries do not make the driver write. The worker replaces the waits for streams and
//! events by queries, so after the first output, it also calls the function that waits.
//!
//! UNSAFETY: changes the buffering of the C library's standard output.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuda_ring::{Shared, Words as _, control};
use object_log::{Step, StepKind};
use rustix::event::{PollFd, PollFlags, poll};

use crate::contents::{bytes_of, words_of};

/// Maximum size of output that the guest has not taken, in bytes. Further output is lost.
const MAX_BYTES: usize = 8 << 20;
/// Maximum size of the output in a reply, in bytes.
const MAX_REPLY_BYTES: usize = control::AREA_BYTES as usize - 16;
/// Maximum size of one read, in bytes.
const READ_BYTES: usize = 16 << 10;
/// Maximum number of reads while a call waits for them.
const MAX_READS: usize = 1024;

/// Output of kernels that the guest has not taken. Clones share their state.
#[derive(Clone, Debug, Default)]
pub struct Output(Arc<State>);

#[derive(Debug, Default)]
struct State {
    /// Pipe to which the driver writes, or `None` if the output is not collected.
    pipe: Option<OwnedFd>,
    text: Mutex<VecDeque<u8>>,
    /// Set once a kernel has printed.
    has_printed: AtomicBool,
}

unsafe extern "C" {
    static stdout: *mut libc::FILE;
}

impl Output {
    /// Replaces this process's standard output. This must precede all output.
    ///
    /// # Errors
    /// Returns an error if the process has no further descriptors.
    pub fn redirect() -> io::Result<Self> {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        rustix::fs::fcntl_setfl(&reader, rustix::fs::OFlags::NONBLOCK)?;
        rustix::stdio::dup2_stdout(&writer)?;
        // SAFETY: no other thread exists yet, and nothing has been printed.
        unsafe { libc::setvbuf(stdout, std::ptr::null_mut(), libc::_IONBF, 0) };
        Ok(Self(Arc::new(State { pipe: Some(reader), ..State::default() })))
    }

    /// Returns true if a kernel has printed.
    pub(crate) fn has_printed(&self) -> bool {
        self.0.has_printed.load(Ordering::Relaxed)
    }

    /// Collects output while no call waits for it, so that the driver's writes never block. Also reports restored
    /// output to the guest.
    pub(crate) fn watch(&self, control: Shared) {
        let output = self.clone();
        let count = output.text().len();
        control.store(control::OUTPUT, count as u64);
        // If the thread cannot be created, only calls that wait collect output.
        let _ = std::thread::Builder::new().name("kernel-output".to_owned()).spawn(move || {
            let Some(pipe) = &output.0.pipe else { return };
            loop {
                let mut descriptors = [PollFd::new(pipe, PollFlags::IN)];
                if poll(&mut descriptors, None).is_ok() && !output.collect(&control) {
                    return;
                }
            }
        });
    }

    /// Reads the output that the driver has written, and reports its size to the guest. Returns false if no further
    /// output can arrive.
    pub(crate) fn collect(&self, control: &Shared) -> bool {
        let Some(pipe) = &self.0.pipe else { return false };
        let mut text = self.text();
        let mut part = [0; READ_BYTES];
        for _ in 0..MAX_READS {
            match rustix::io::retry_on_intr(|| rustix::io::read(pipe.as_fd(), &mut part)) {
                Ok(0) => return false,
                Ok(count) => {
                    self.0.has_printed.store(true, Ordering::Relaxed);
                    let room = MAX_BYTES.saturating_sub(text.len());
                    text.extend(part.get(..count.min(room)).unwrap_or_default());
                    control.store(control::OUTPUT, text.len() as u64);
                }
                Err(_) => break,
            }
        }
        true
    }

    /// Takes output for a reply. Returns the number of bytes that are left, the number of taken bytes, and the bytes.
    pub(crate) fn take(&self, control: &Shared) -> Vec<u64> {
        let mut text = self.text();
        let count = text.len().min(MAX_REPLY_BYTES);
        let taken: Vec<u8> = text.drain(..count).collect();
        control.store(control::OUTPUT, text.len() as u64);
        [&[text.len() as u64, count as u64][..], &words_of(&taken)].concat()
    }

    /// Returns the step that passes the output to another worker, or `None` if no kernel has printed. Without output,
    /// the step lets the other worker expect output.
    pub(crate) fn step(&self) -> Option<Step> {
        let text: Vec<u8> = self.text().iter().copied().collect();
        let words = words_of(&text);
        let words = [&[text.len() as u64][..], &words].concat();
        self.has_printed().then_some(Step { kind: StepKind::Output, op: 0, route: 0, words, image: None })
    }

    /// Restores the output of a step.
    ///
    /// # Errors
    /// Returns error 0 if the step is malformed.
    pub(crate) fn restore(&self, step: &Step) -> Result<(), i32> {
        let [bytes, words @ ..] = &step.words[..] else { return Err(0) };
        let bytes = usize::try_from(*bytes).map_err(|_| 0)?;
        let mut text = self.text();
        let room = MAX_BYTES.saturating_sub(text.len());
        if bytes > room || words.len() != bytes.div_ceil(8) {
            return Err(0);
        }
        text.extend(bytes_of(words).into_iter().take(bytes));
        self.0.has_printed.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn text(&self) -> MutexGuard<'_, VecDeque<u8>> {
        self.0.text.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
