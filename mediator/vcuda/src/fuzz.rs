//! Decodes bytes into steps, for property tests and the fuzz target.

use std::cell::Cell;

use zerocopy::FromBytes;

use crate::command::{Command, Header, Submission};
use crate::core::{Core, Limits, Ticket, Words, WorkerId};

/// A step of a random sequence.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// The guest sends a command.
    Command {
        /// ID of the context.
        context: u32,
        /// The command.
        command: Command,
    },
    /// A word of the window changes.
    Store {
        /// Index of the word.
        word: u16,
        /// New value of the word.
        value: u64,
    },
    /// A worker has unregistered a blob.
    Removed {
        /// ID of the worker.
        worker: WorkerId,
        /// Blob number.
        blob: u32,
    },
    /// A worker has exited.
    Exited {
        /// ID of the worker.
        worker: WorkerId,
    },
    /// Time passes.
    Tick {
        /// Elapsed time in seconds.
        seconds: u8,
    },
    /// The guest resets the device.
    Reset,
}

/// Returns the header of a command for a context.
///
/// # Panics
/// Never panics, because a header has 24 bytes.
#[must_use]
#[expect(clippy::unwrap_used, reason = "the array is as large as a header")]
pub(crate) fn header(context: u32) -> Header {
    let mut bytes = [0; 24];
    for (to, from) in bytes.iter_mut().skip(16).zip(context.to_le_bytes()) {
        *to = from;
    }
    Header::read_from_bytes(&bytes).unwrap()
}

/// Decodes steps of five bytes each. IDs are small, so that different steps refer to the same objects.
#[must_use]
pub(crate) fn steps(input: &[u8]) -> Vec<Step> {
    let (chunks, _) = input.as_chunks::<5>();
    chunks.iter().map(|chunk| step(*chunk)).collect()
}

fn step([kind, first, second, third, fourth]: [u8; 5]) -> Step {
    let (context, resource, number) = (u32::from(first % 6), u32::from(second % 12), u32::from(third % 4));
    let (worker, value) = (WorkerId(u64::from(first % 10)), u64::from(fourth % 3));
    let command = match kind % 16 {
        0 | 1 => Command::CreateContext { capset: if fourth % 8 == 0 { 4 } else { 24 }, name: String::new() },
        2 => Command::DestroyContext,
        3..=5 => {
            let size = u64::from(fourth % 5).wrapping_mul(0x1000);
            let blob = u64::from(number).wrapping_shl(32) | u64::from(fourth % 3);
            Command::CreateBlob { resource, blob, size }
        }
        6..=8 => {
            let offset = match fourth {
                255 => u64::MAX.wrapping_sub(0xfff),
                page => u64::from(page % 16).wrapping_mul(0x1000),
            };
            Command::MapBlob { resource, offset }
        }
        9 => Command::Unref { resource },
        10 => {
            let offset = u64::from(fourth).wrapping_mul(if second % 16 == 0 { 1 } else { 8 });
            Command::Submit(Submission::Wait { blob: number, offset, value })
        }
        11 => {
            let all = [Submission::Doorbell, Submission::Empty, Submission::Identify { pid: 1 }, Submission::Malformed];
            let place = if fourth % 32 == 0 { 3 } else { usize::from(fourth % 3) };
            Command::Submit(all.get(place).copied().unwrap_or(Submission::Empty))
        }
        12 => return Step::Store { word: u16::from(fourth).wrapping_mul(u16::from(third)), value },
        13 => return Step::Removed { worker, blob: number },
        14 => return Step::Exited { worker },
        _ if fourth % 16 == 0 => return Step::Reset,
        _ => return Step::Tick { seconds: fourth % 16 },
    };
    Step::Command { context, command }
}

/// Words that change on each load.
struct Changing(Cell<u64>);

impl Words for Changing {
    fn load(&self, _offset: u64) -> u64 {
        let value = self.0.get();
        self.0.set(value.wrapping_add(1));
        value % 4
    }
}

/// Interprets the first half of arbitrary bytes as a guest's commands, and the second half as steps. Neither may panic
/// or use unbounded memory.
pub fn run(input: &[u8]) {
    let mut core = Core::new(Limits { window_bytes: 1 << 20, workers: 4 });
    let words = Changing(Cell::new(0));
    let (head, tail) = input.split_at(input.len() / 2);
    for (chunk, number) in head.chunks(64).zip(0..) {
        if let Some((header, command)) = Command::decode(chunk)
            && let Some(answer) = core.command(&header, command, Ticket(number), &words, number)
        {
            assert!(answer.encode(&header).len() <= crate::command::MAX_ANSWER_BYTES, "a response is bounded");
        }
        core.take_actions();
    }
    for (step, number) in steps(tail).into_iter().zip(1 << 32..) {
        match step {
            Step::Command { context, command } => {
                let _ = core.command(&header(context), command, Ticket(number), &words, number);
            }
            Step::Store { word, value } => {
                words.0.set(value.wrapping_add(word.into()));
                core.check_all(&words);
            }
            Step::Removed { worker, blob } => {
                let serial = core.removing_serial(worker, blob);
                core.removed(worker, blob, serial);
            }
            Step::Exited { worker } => core.exited(worker),
            Step::Tick { seconds } => core.tick(u64::from(seconds).wrapping_mul(1 << 30)),
            Step::Reset => core.reset(),
        }
        core.take_actions();
    }
}
