//! Saves the state of a program in a file: its log of objects, its reply counters, and the contents of its memory.
//!
//! Saving does not change the program. The file's size is fixed by the process that created it.
//!
//! ```text
//! size of the state in words | the state | contents of each memory and variable, in the order of the steps
//! ```

use std::os::fd::{AsFd, BorrowedFd};

use cuda_calls::{Handles as _, Kind, handle};
use cuda_ring::{Words as _, control};
use object_log::{Image, SavedBlob, SavedState, Step, StepKind};
use worker_link::Obstacle;

use crate::contents::{COPY_WORDS, bytes_of, content_words, read};
use crate::driver::{NOT_READY, Needed};
use crate::executor::Executor;
use crate::host_functions;
use crate::variables::{Addresses, Variable};

/// Writes words at a byte offset of the file.
fn write(file: BorrowedFd<'_>, words: &[u64], mut offset: u64) -> Result<(), Obstacle> {
    for part in words.chunks(COPY_WORDS) {
        let bytes = bytes_of(part);
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            match rustix::io::retry_on_intr(|| rustix::io::pwrite(file, rest, offset)) {
                Ok(0) | Err(_) => return Err(Obstacle::Copy),
                Ok(count) => {
                    rest = rest.get(count..).unwrap_or_default();
                    offset += count as u64;
                }
            }
        }
    }
    Ok(())
}

impl Executor {
    /// Returns the steps that let another worker continue the program.
    ///
    /// # Errors
    /// Returns the obstacle if the program cannot continue in another worker.
    pub(crate) fn steps(&mut self) -> Result<Vec<Step>, Obstacle> {
        if !self.started {
            return Err(Obstacle::Starting);
        }
        let sticky = self.control.load(control::STICKY);
        if sticky != 0 {
            return Err(Obstacle::Sticky(u32::try_from(sticky).unwrap_or(u32::MAX)));
        }
        if self.captures > 0 {
            return Err(Obstacle::Capture);
        }
        let steps = self.log.steps()?;
        for step in steps.iter().filter(|step| step.kind == StepKind::Memory) {
            let enters = self.enter_for(step.route as u32);
            if !enters || self.driver.allocate_at(0, 0) != 0 {
                return Err(Obstacle::Placement);
            }
        }
        Ok(steps)
    }

    /// Makes the context with this number current, or any other context if the number is 0 or that context was
    /// destroyed. Returns false if no context exists.
    fn enter_for(&mut self, number: u32) -> bool {
        if number != 0 && self.enter(number).is_ok() {
            return true;
        }
        self.objects.contexts().into_iter().any(|context| self.enter(context).is_ok())
    }

    /// Returns true if no work of the program is in flight.
    ///
    /// # Errors
    /// Returns the obstacle if work has failed.
    pub(crate) fn is_idle(&mut self) -> Result<bool, Obstacle> {
        if self.has_waits() {
            return Ok(false);
        }
        for context in self.objects.contexts() {
            if self.enter(context).is_err() {
                continue;
            }
            self.set_mode(2);
            let streams = self.objects.streams_of(context);
            for stream in [0, 2].into_iter().chain(streams) {
                match self.driver.invoke(Needed::StreamQuery, &[stream]) {
                    NOT_READY => return Ok(false),
                    // The work has completed, or the stream was destroyed with its context.
                    0 | 400 => {}
                    code => return Err(Obstacle::Sticky(code.cast_unsigned())),
                }
            }
        }
        Ok(true)
    }

    /// Makes the driver write the output of kernels that have ended. No work may be in flight.
    fn write_output(&mut self) {
        for context in self.objects.contexts() {
            if self.enter(context).is_ok() {
                self.set_mode(2);
                self.driver.invoke(Needed::Synchronize, &[]);
            }
        }
        self.output.collect(&self.control);
    }

    /// Writes the program's state to the file. No work may be in flight. `tail` is the read position in the ring.
    ///
    /// # Errors
    /// Returns the obstacle. The program is then unchanged, and the file does not contain a valid state.
    pub(crate) fn save(&mut self, file: impl AsFd, tail: u64) -> Result<(), Obstacle> {
        let file = file.as_fd();
        let mut steps = self.steps()?;
        let variables = self.variables(&steps)?;
        let known = Addresses::of(&variables);
        if !variables.is_empty() {
            self.search_pinned(&known)?;
        }
        if steps.iter().any(|step| known.are_in(&step.words)) {
            return Err(Obstacle::Addresses);
        }
        let first_variable = steps.len();
        steps.extend(variables.iter().map(Variable::step));
        self.write_output();
        steps.extend(self.output.step());
        let blob = |(id, blob): (u32, crate::window::Blob)| SavedBlob {
            id,
            kind: blob.kind.number(),
            serial: blob.serial,
            offset: blob.offset,
            bytes: blob.bytes,
        };
        let replies = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        let state = SavedState {
            process: self.process,
            tail,
            callbacks: host_functions::posted(),
            next_reservation: self.next_reservation,
            image: Image { words: self.objects.image.clone(), bytes: self.objects.image_bytes },
            replies: replies.map(|(slot, count)| (slot as u16, *count)).collect(),
            blobs: self.window.blobs().map(blob).collect(),
            steps,
        };
        let words = state.encode();
        let contents: u64 = state.steps.iter().map(content_words).fold(0, u64::saturating_add);
        let total = (1 + words.len() as u64).saturating_add(contents).saturating_mul(8);
        let room = rustix::fs::fstat(file).map_or(0, |stat| stat.st_size.cast_unsigned());
        if total > room {
            return Err(Obstacle::Size(total));
        }
        let mut offset = 8 * (1 + words.len() as u64);
        let (memory, _) = state.steps.split_at_checked(first_variable).unwrap_or_default();
        for step in memory {
            if let (StepKind::Memory, [address, bytes]) = (step.kind, &step.words[..]) {
                self.save_contents(file, step.route as u32, (*address, *bytes), offset, &known)?;
                offset += 8 * content_words(step);
            }
        }
        for variable in &variables {
            let (context, range) = (variable.context, (variable.address, variable.bytes));
            self.save_contents(file, context, range, offset, &known)?;
            offset += 8 * variable.bytes.div_ceil(8);
        }
        write(file, &words, 8)?;
        // The first word makes the file valid, so write it last.
        write(file, &[words.len() as u64], 0)
    }

    /// Copies card memory to the file. Returns an obstacle if the memory contains one of the `known` addresses.
    fn save_contents(
        &mut self,
        file: BorrowedFd<'_>,
        context: u32,
        (address, bytes): (u64, u64),
        offset: u64,
        known: &Addresses,
    ) -> Result<(), Obstacle> {
        if !self.enter_for(context) {
            return Err(Obstacle::Placement);
        }
        let mut buffer = vec![0u64; COPY_WORDS.min(usize::try_from(bytes.div_ceil(8)).unwrap_or(COPY_WORDS))];
        let part_bytes = 8 * COPY_WORDS as u64;
        for first in (0..bytes).step_by(8 * COPY_WORDS) {
            let count = (bytes - first).min(part_bytes);
            let words = buffer.get_mut(..count.div_ceil(8) as usize).unwrap_or_default();
            words.iter_mut().for_each(|word| *word = 0);
            if self.copy_now(words.as_mut_ptr().addr() as u64, address + first, count) != 0 {
                return Err(Obstacle::Copy);
            }
            if known.are_in(words) {
                return Err(Obstacle::Addresses);
            }
            write(file, words, offset + first)?;
        }
        Ok(())
    }

    /// Checks that pinned memory does not contain any of the addresses.
    fn search_pinned(&self, known: &Addresses) -> Result<(), Obstacle> {
        let mut buffer = vec![0u64; COPY_WORDS];
        // Read the file, because accessing an unused page through the mapping would allocate it.
        for (offset, bytes) in self.window.pinned() {
            for first in (0..bytes).step_by(8 * COPY_WORDS) {
                let count = (bytes - first).min(8 * COPY_WORDS as u64) / 8;
                let words = buffer.get_mut(..count as usize).unwrap_or_default();
                read(self.window.file(), words, offset + first).map_err(|_| Obstacle::Copy)?;
                if known.are_in(words) {
                    return Err(Obstacle::Addresses);
                }
            }
        }
        Ok(())
    }

    /// Copies bytes synchronously. Returns the driver's result.
    pub(crate) fn copy_now(&self, to: u64, from: u64, bytes: u64) -> i32 {
        match self.driver.invoke(Needed::Copy, &[to, from, bytes, 0]) {
            0 => self.driver.invoke(Needed::StreamSynchronize, &[0]),
            code => code,
        }
    }

    /// Returns true if a handle refers to an object.
    pub(crate) fn has_object(&self, kind: Kind, handle: u64) -> bool {
        self.objects.find(kind, handle).is_ok()
    }

    /// Makes the context of a step current. Returns false if this is impossible.
    pub(crate) fn enter_step(&mut self, step: &Step) -> bool {
        let number = step.route as u32;
        number != 0 && self.has_object(Kind::Context, handle(Kind::Context, number)) && self.enter(number).is_ok()
    }
}
