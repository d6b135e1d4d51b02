//! A job of a copy engine or M2MF, which copies lines between surfaces, optionally remaps elements, and then runs the
//! completion.
//!
//! Lines, and bytes within a line, are copied in ascending order. Overlapping copies are therefore well-defined: they
//! read bytes that they have already written. GUESS: the hardware copies bursts in this order. Drivers do not issue
//! overlapping copies.

use super::layout::Surface;
use crate::engines::semaphore::{self, Form};
use crate::engines::{EngineCx, EngineError, Progress};
use nvspec::addr::{GpuVa, VA_BITS};
use simgpu_memory::mmu::{CopyFault, MmuFault, Session};
use std::time::Instant;

/// Maximum number of bytes per step, regardless of the budget, because TLB flushes wait for the step.
pub const STEP_MAX: u64 = 1 << 20;
/// Maximum size of an element in bytes.
const ELEMENT_MAX: usize = 16;
/// Number of elements remapped at a time.
const ELEMENTS_AT_ONCE: usize = 64;

/// Source of one byte of a destination element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// The byte with this index in the source element.
    Source(u8),
    /// A constant.
    Constant(u8),
}

/// Remaps elements during a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remap {
    /// Size of a source element in bytes, from 1 to 16.
    pub source_bytes: usize,
    /// Size of a destination element in bytes, from 1 to 16.
    pub target_bytes: usize,
    /// Source of each byte of a destination element.
    pub lanes: [Lane; ELEMENT_MAX],
}

impl Remap {
    fn reads_source(&self) -> bool {
        self.lanes[..self.target_bytes].iter().any(|lane| matches!(lane, Lane::Source(_)))
    }

    fn apply(&self, source: &[u8], target: &mut [u8]) {
        for (from, to) in source.chunks_exact(self.source_bytes).zip(target.chunks_exact_mut(self.target_bytes)) {
            for (byte, lane) in to.iter_mut().zip(self.lanes) {
                *byte = match lane {
                    // GUESS: a component that the source lacks is zero.
                    Lane::Source(which) => from.get(usize::from(which)).copied().unwrap_or(0),
                    Lane::Constant(value) => value,
                };
            }
        }
    }
}

/// Actions to perform after a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// The semaphore to release: its address, payload, and form.
    pub semaphore: Option<(GpuVa, u32, Form)>,
    /// True if the engine's non-stall interrupt must be raised.
    pub interrupt: bool,
}

impl Completion {
    fn is_nothing(self) -> bool {
        self.semaphore.is_none() && !self.interrupt
    }

    /// Performs the completion's actions.
    ///
    /// # Errors
    /// Returns [`EngineError::Fault`] if the semaphore is not writable.
    pub fn run(self, session: &mut Session<'_>, cx: &mut EngineCx<'_>) -> Result<(), EngineError> {
        if let Some((va, payload, form)) = self.semaphore {
            // The semaphore must not become visible before the copied data.
            session.push_posted();
            semaphore::release(session, va, payload, form, cx.now_ns)?;
            cx.work.releases += 1;
        }
        cx.work.non_stall |= self.interrupt;
        Ok(())
    }
}

/// A copy job.
#[derive(Clone, Debug)]
pub struct Job {
    source: Surface,
    target: Surface,
    /// Length of a line in elements, or in bytes if nothing is remapped.
    line: u64,
    lines: u64,
    remap: Option<Remap>,
    completion: Completion,
    /// Index of the next element within the line.
    x: u64,
    /// Index of the current line.
    y: u64,
}

impl Job {
    /// Creates a job that copies `lines` lines of `line` elements each (bytes, if `remap` is `None`).
    #[must_use]
    pub fn new(
        source: Surface,
        target: Surface,
        line: u32,
        lines: u32,
        remap: Option<Remap>,
        completion: Completion,
    ) -> Self {
        let (mut line, mut lines) = (u64::from(line), u64::from(lines));
        if remap.is_none() && is_solid(&source, line, lines) && is_solid(&target, line, lines) {
            (line, lines) = (line * lines, 1);
        }
        if line == 0 {
            lines = 0;
        }
        Self { source, target, line, lines, remap, completion, x: 0, y: 0 }
    }

    /// Creates a job that only runs the completion.
    #[must_use]
    pub fn nothing(completion: Completion) -> Self {
        let nowhere = Surface::Pitch { base: GpuVa(0), pitch: 0 };
        Self::new(nowhere, nowhere, 0, 0, None, completion)
    }

    /// Copies about `budget` bytes, at most [`STEP_MAX`]. The last step runs the completion.
    ///
    /// # Errors
    /// Returns [`EngineError::Fault`] if a memory access fails. The copy must not be resumed after an error.
    pub fn step(&mut self, cx: &mut EngineCx<'_>, budget: u64) -> Result<Progress, EngineError> {
        let began = Instant::now();
        let mut session = cx.session();
        let result = self.step_in(&mut session, cx, budget);
        cx.work.bus_bytes += session.take_bus_bytes();
        cx.work.host_ns += u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        result
    }

    fn step_in(
        &mut self,
        session: &mut Session<'_>,
        cx: &mut EngineCx<'_>,
        budget: u64,
    ) -> Result<Progress, EngineError> {
        let mut left = budget.clamp(1, STEP_MAX);
        let begun = self.y < self.lines;
        while self.y < self.lines {
            if left == 0 {
                return Ok(Progress::More);
            }
            cx.work.written = Some(self.target.locate(self.x, self.y).0);
            let done = match &self.remap {
                None => self.copy_run(session, left, &mut cx.work.bytes)?,
                Some(remap) => self.remap_run(remap, session, &mut cx.work.bytes)?,
            };
            let bytes = done * self.remap.map_or(1, |remap| remap.target_bytes as u64);
            left = left.saturating_sub(bytes);
            self.x += done;
            if self.x == self.line {
                self.x = 0;
                self.y += 1;
            }
        }
        // Run the completion in a separate step, so that the caller can first wait until the copy has ended according
        // to the time model.
        if begun && !self.completion.is_nothing() {
            return Ok(Progress::More);
        }
        self.completion.run(session, cx)?;
        Ok(Progress::Done)
    }

    /// Copies one run of contiguous bytes and returns its length.
    fn copy_run(&self, session: &mut Session<'_>, left: u64, bytes: &mut u64) -> Result<u64, MmuFault> {
        let (from, source_run) = self.source.locate(self.x, self.y);
        let (to, target_run) = self.target.locate(self.x, self.y);
        let len = left.min(self.line - self.x).min(source_run).min(target_run);
        match session.copy(from, to, len) {
            Ok(()) => {
                *bytes += len;
                Ok(len)
            }
            Err(CopyFault { copied, fault }) => {
                *bytes += copied;
                Err(fault)
            }
        }
    }

    /// Remaps a few elements and returns their number.
    fn remap_run(&self, remap: &Remap, session: &mut Session<'_>, bytes: &mut u64) -> Result<u64, MmuFault> {
        let (mut source, mut target) = ([0; ELEMENTS_AT_ONCE * ELEMENT_MAX], [0; ELEMENTS_AT_ONCE * ELEMENT_MAX]);
        let count = (self.line - self.x).min(ELEMENTS_AT_ONCE as u64);
        let source = &mut source[..count as usize * remap.source_bytes];
        let target = &mut target[..count as usize * remap.target_bytes];
        if remap.reads_source() {
            let x = self.x * remap.source_bytes as u64;
            each_run(&self.source, x, self.y, source.len(), |va, range| session.read_counted(va, &mut source[range]))?;
        }
        remap.apply(source, target);
        let x = self.x * remap.target_bytes as u64;
        each_run(&self.target, x, self.y, target.len(), |va, range| {
            let len = range.len() as u64;
            let written = session.write_counted(va, &target[range]);
            *bytes += written.err().map_or(len, |fault| fault.va.0 - va.0);
            written
        })?;
        Ok(count)
    }
}

/// Splits the `len` bytes starting at byte `x` of line `y` into contiguous runs. Calls `access` with each run's address
/// and its range within the `len` bytes.
pub fn each_run(
    surface: &Surface,
    x: u64,
    y: u64,
    len: usize,
    mut access: impl FnMut(GpuVa, std::ops::Range<usize>) -> Result<(), MmuFault>,
) -> Result<(), MmuFault> {
    let mut done = 0;
    while done < len {
        let (va, run) = surface.locate(x + done as u64, y);
        let end = done + run.min((len - done) as u64) as usize;
        access(va, done..end)?;
        done = end;
    }
    Ok(())
}

/// Returns true if the lines are adjacent, without gaps or wrap-around, and can be copied as one line.
fn is_solid(surface: &Surface, line: u64, lines: u64) -> bool {
    match *surface {
        Surface::Pitch { base, pitch } => {
            u64::try_from(pitch).is_ok_and(|pitch| pitch == line) && base.0 + line * lines <= 1 << VA_BITS
        }
        Surface::Blocks(_) => false,
    }
}
