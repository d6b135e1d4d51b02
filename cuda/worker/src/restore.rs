//! Continues a program from the file that its previous worker saved. The guest may have run arbitrary code in the
//! previous worker, so the file is as untrusted as the ring: each step is checked like a message.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use cuda_calls::own;
use cuda_ring::{ADDRESSES, Header, PINNED_ADDRESSES};
use object_log::{SavedState, Step, StepKind, created_by};

use crate::contents::{COPY_WORDS, ReadError, content_words, read};
use crate::driver::Needed;
use crate::executor::Executor;
use crate::processes;

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i32 = 2;
/// Time limit for retrying an allocation.
// TIMEOUT: the card's owner frees the previous worker's memory when it detects that worker's exit.
const ALLOCATION_LIMIT: Duration = Duration::from_secs(10);
/// Interval between attempts to allocate.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Reason why a program cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The file cannot be read, or does not contain a worker's valid state.
    #[error("the file of the previous worker has no valid state")]
    File,
    /// A step of the log failed.
    #[error("step {step} of {steps} of the log has failed: message {op:#x}, error {code}")]
    Step {
        /// Number of the step, starting at 1.
        step: usize,
        /// Total number of steps.
        steps: usize,
        /// Type of the step's message.
        op: u16,
        /// The driver's error, or 0 if the step is invalid or its result differs from the original one.
        code: i32,
    },
}

impl From<ReadError> for RestoreError {
    fn from(_: ReadError) -> Self {
        Self::File
    }
}

/// Reads the state from a file. Returns the state, and the offset of the memory contents in bytes.
///
/// # Errors
/// Returns an error if the file does not contain a valid state.
pub(crate) fn read_state(file: impl AsFd) -> Result<(SavedState, u64), RestoreError> {
    let file = file.as_fd();
    let size = rustix::fs::fstat(file).map_or(0, |stat| stat.st_size.cast_unsigned());
    let mut count = [0];
    read(file, &mut count, 0)?;
    let [count] = count;
    let fits = count > 0 && count.checked_add(1).and_then(|words| words.checked_mul(8)).is_some_and(|end| end <= size);
    if !fits {
        return Err(RestoreError::File);
    }
    // Read in parts, so that memory is allocated only for words that the file contains.
    let mut words = Vec::new();
    let mut rest = usize::try_from(count).map_err(|_| RestoreError::File)?;
    while rest > 0 {
        let first = words.len();
        let part = rest.min(COPY_WORDS);
        words.resize(first + part, 0);
        read(file, words.get_mut(first..).unwrap_or_default(), 8 * (1 + first as u64))?;
        rest -= part;
    }
    let state = SavedState::decode(&words).map_err(|_| RestoreError::File)?;
    Ok((state, 8 * (1 + count)))
}

impl Executor {
    /// Executes the steps of a state, and restores the memory contents.
    ///
    /// # Errors
    /// Returns an error if a step fails or the file is invalid. The program then has no usable context.
    pub(crate) fn restore(&mut self, state: &SavedState, file: impl AsFd, mut offset: u64) -> Result<(), RestoreError> {
        let file = file.as_fd();
        self.process = state.process;
        processes::name_after(state.process);
        self.started = true;
        self.next_reservation = state.next_reservation;
        for (slot, count) in &state.replies {
            *self.counts.get_mut(usize::from(*slot)).ok_or(RestoreError::File)? = *count;
        }
        self.is_replaying = true;
        let steps = state.steps.len();
        let failed = |number, step: &Step, code| RestoreError::Step { step: number + 1, steps, op: step.op, code };
        for (number, step) in state.steps.iter().enumerate() {
            let done = match step.kind {
                StepKind::Message | StepKind::Again => self.replay_message(step),
                StepKind::Memory => self.allocate_again(step),
                StepKind::Variable => Ok(()),
                StepKind::Output => self.output.restore(step),
            };
            done.map_err(|code| failed(number, step, code))?;
        }
        self.is_replaying = false;
        // Write the contents last, because copies would disturb the captures that the steps repeat.
        for (number, step) in state.steps.iter().enumerate() {
            let target = match step.kind {
                StepKind::Message | StepKind::Again | StepKind::Output => continue,
                StepKind::Memory => self.memory_of(step),
                StepKind::Variable => self.variable_of(step),
            };
            let at = offset;
            offset = offset.checked_add(content_words(step).saturating_mul(8)).ok_or(RestoreError::File)?;
            let done = target.and_then(|target| self.write_contents(target, file, at));
            done.map_err(|code| failed(number, step, code))?;
        }
        self.objects.image.clone_from(&state.image.words);
        self.objects.image_bytes = state.image.bytes;
        Ok(())
    }

    fn replay_message(&mut self, step: &Step) -> Result<(), i32> {
        if step.op == own::START {
            return Err(0);
        }
        if let Some(image) = &step.image {
            self.objects.image.clone_from(&image.words);
            self.objects.image_bytes = image.bytes;
        }
        let words = u32::try_from(step.words.len() + 2).map_err(|_| 0)?;
        let header = Header { op: step.op, flags: 0, words };
        let message = [&[header.word(), step.route][..], &step.words].concat();
        self.last_code = 0;
        self.execute(&message).map_err(|_| 0)?;
        if self.last_code != 0 {
            return Err(self.last_code);
        }
        // If the driver has returned an existing object, the message's handle does not refer to it.
        match created_by(step) {
            Some((kind, handle)) if !self.has_object(kind, handle) => Err(0),
            _ => Ok(()),
        }
    }

    /// Allocates a step's memory at its previous address.
    fn allocate_again(&mut self, step: &Step) -> Result<(), i32> {
        let [address, bytes] = *step.words else { return Err(0) };
        let end = address.checked_add(bytes);
        let is_card = (ADDRESSES.start..PINNED_ADDRESSES).contains(&address)
            && end.is_some_and(|end| end <= PINNED_ADDRESSES)
            && bytes > 0;
        if !is_card || !self.enter_step(step) {
            return Err(0);
        }
        // An allocation must not disturb captures.
        self.set_mode(2);
        let until = Instant::now() + ALLOCATION_LIMIT;
        loop {
            match self.driver.allocate_at(address, bytes) {
                0 => break,
                OUT_OF_MEMORY if Instant::now() < until => std::thread::sleep(RETRY_INTERVAL),
                code => return Err(code),
            }
        }
        self.log.restored(step);
        Ok(())
    }

    /// Returns the address and size of a step's memory, and makes the step's context current.
    fn memory_of(&mut self, step: &Step) -> Result<(u64, u64), i32> {
        let [address, bytes] = *step.words else { return Err(0) };
        if self.enter_step(step) { Ok((address, bytes)) } else { Err(0) }
    }

    /// Copies contents from the file to memory of the current context.
    fn write_contents(&mut self, (address, bytes): (u64, u64), file: BorrowedFd<'_>, offset: u64) -> Result<(), i32> {
        self.set_mode(2);
        let mut buffer = vec![0u64; COPY_WORDS.min(usize::try_from(bytes.div_ceil(8)).unwrap_or(COPY_WORDS))];
        for first in (0..bytes).step_by(8 * COPY_WORDS) {
            let count = (bytes - first).min(8 * COPY_WORDS as u64);
            let words = buffer.get_mut(..count.div_ceil(8) as usize).unwrap_or_default();
            read(file, words, offset + first).map_err(|_| 0)?;
            match self.copy_now(address + first, words.as_ptr().addr() as u64, count) {
                0 => {}
                code => return Err(code),
            }
        }
        match self.driver.invoke(Needed::Synchronize, &[]) {
            0 => Ok(()),
            code => Err(code),
        }
    }
}
