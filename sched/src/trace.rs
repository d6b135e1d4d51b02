//! Records of a scheduler's events and decisions, as JSON lines. A record of a real run can be replayed through the
//! same state machine, which must make the same decisions.
//!
//! The first line contains the format and the initial state of the scheduler, excluding its accounts, so that a record
//! can start at any time. Each further line contains either an event with its time and decisions, or a memory move.
//!
//! [`Trace::replay`] checks that the decisions are the same, and [`Trace::under`] computes the effect of other
//! settings.

mod bounded;
mod under;

pub use bounded::Recording;

use crate::{Decision, Event, Nanos, Scheduler, TenantId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, BufRead, Write};

/// Format version.
const FORMAT: u32 = 4;
/// Oldest supported format version, whose records contain no memory moves.
const OLDEST_FORMAT: u32 = 3;

/// Format version in a record's first line, which is checked before the rest of the line is parsed.
#[derive(Debug, Deserialize)]
struct Format {
    sched_trace: u32,
}

#[derive(Debug, Serialize)]
struct Header<'a> {
    sched_trace: u32,
    at: Nanos,
    names: &'a BTreeMap<TenantId, String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    turns: bool,
    scheduler: &'a Scheduler,
}

#[derive(Debug, Deserialize)]
struct Start {
    at: Nanos,
    names: BTreeMap<TenantId, String>,
    #[serde(default)]
    turns: bool,
    scheduler: Scheduler,
}

/// A memory move between the card and the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryMove {
    /// Start time.
    pub from: Nanos,
    /// End time.
    pub until: Nanos,
    /// vGPU that owns the memory.
    pub vgpu: TenantId,
    /// Number of bytes moved.
    pub bytes: u64,
    /// True for a move to the card, or false for a move to host memory.
    pub to_card: bool,
}

/// A line after the first line.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Moved { moved: MemoryMove },
    Event(Entry),
}

#[derive(Serialize)]
struct Moved {
    moved: MemoryMove,
}

/// A recorded event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Time of the event.
    pub at: Nanos,
    /// Event that the scheduler received.
    pub event: Event,
    /// Decisions that the scheduler made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub decisions: Vec<Decision>,
}

/// Writes a record.
#[derive(Debug)]
pub struct Recorder<W> {
    to: W,
}

impl<W: Write> Recorder<W> {
    /// Starts a record of `scheduler` at time `at`. `names` are the operator's names for its vGPUs.
    ///
    /// # Errors
    /// Returns an error if the state cannot be written to `to`.
    pub fn new(to: W, scheduler: &Scheduler, at: Nanos, names: &BTreeMap<TenantId, String>) -> io::Result<Self> {
        Self::start(to, &Header { sched_trace: FORMAT, at, names, turns: false, scheduler })
    }

    /// Starts a record of a scheduler that grants turns on the whole card.
    ///
    /// # Errors
    /// Returns an error if the state cannot be written to `to`.
    pub fn of_turns(to: W, scheduler: &Scheduler, at: Nanos, names: &BTreeMap<TenantId, String>) -> io::Result<Self> {
        Self::start(to, &Header { sched_trace: FORMAT, at, names, turns: true, scheduler })
    }

    fn start(mut to: W, header: &Header<'_>) -> io::Result<Self> {
        line(&mut to, header)?;
        let mut recorder = Self { to };
        for vgpu in header.scheduler.vgpus() {
            // These settings are not part of the serialized scheduler.
            if let Some(&params) = header.scheduler.competing(vgpu) {
                recorder.record(header.at, Event::Competes { vgpu, params: Some(params) }, &[])?;
            }
        }
        Ok(recorder)
    }

    /// Records a completed memory move.
    ///
    /// # Errors
    /// Returns an error if the writer fails.
    pub fn record_move(&mut self, moved: MemoryMove) -> io::Result<()> {
        line(&mut self.to, &Moved { moved })
    }

    /// Records an event and its decisions.
    ///
    /// # Errors
    /// Returns an error if the writer fails.
    pub fn record(&mut self, at: Nanos, event: Event, decisions: &[Decision]) -> io::Result<()> {
        line(&mut self.to, &Entry { at, event, decisions: decisions.to_vec() })
    }

    /// Flushes and returns the writer.
    ///
    /// # Errors
    /// Returns an error if the writer fails.
    pub fn finish(mut self) -> io::Result<W> {
        self.to.flush()?;
        Ok(self.to)
    }
}

fn line(to: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *to, value)?;
    to.write_all(b"\n")
}

/// Reason why a record cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The record cannot be read.
    #[error("the record cannot be read")]
    Io(#[from] io::Error),
    /// A line is malformed.
    #[error("line {line} of the record is malformed")]
    Line {
        /// Line number, starting at 1.
        line: usize,
        /// Error of the parser.
        source: serde_json::Error,
    },
    /// The record's format version is not supported.
    #[error("the record has format {0}, not {FORMAT}")]
    Format(u32),
    /// The record is empty.
    #[error("the record has no first line")]
    Empty,
    /// The initial state is invalid.
    #[error("the initial state in the record is invalid")]
    State,
}

/// A parsed record.
#[derive(Clone, Debug)]
pub struct Trace {
    /// Scheduler at the start of the record, with empty accounts.
    pub scheduler: Scheduler,
    /// Time at which the record starts.
    pub at: Nanos,
    /// Operator's names for the initial vGPUs.
    pub names: BTreeMap<TenantId, String>,
    /// True if the scheduler grants turns on the whole card.
    pub turns: bool,
    /// All events, in order.
    pub entries: Vec<Entry>,
    /// Line numbers of the events, starting at 1.
    pub lines: Vec<usize>,
    /// Memory moves, ordered by end time.
    pub moves: Vec<MemoryMove>,
}

/// Result of replaying a record.
#[derive(Debug)]
pub struct Replay {
    /// Scheduler after the last event.
    pub scheduler: Scheduler,
    /// Index and new decisions of each event whose decisions differ from the recorded ones.
    pub other: Vec<(usize, Vec<Decision>)>,
}

impl Trace {
    /// Reads a record.
    ///
    /// # Errors
    /// Returns a [`TraceError`] if the record cannot be read or is invalid.
    pub fn read(from: impl BufRead) -> Result<Self, TraceError> {
        let mut lines = from.lines().zip(1..);
        let (first, _) = lines.next().ok_or(TraceError::Empty)?;
        let first = first?;
        let Format { sched_trace } = parse(&first, 1)?;
        if !(OLDEST_FORMAT..=FORMAT).contains(&sched_trace) {
            return Err(TraceError::Format(sched_trace));
        }
        let Start { at, names, turns, scheduler } = parse(&first, 1)?;
        if !scheduler.is_whole() {
            return Err(TraceError::State);
        }
        let mut trace = Self { scheduler, at, names, turns, entries: Vec::new(), lines: Vec::new(), moves: Vec::new() };
        for (text, line) in lines {
            match parse(&text?, line)? {
                Line::Moved { moved } => trace.moves.push(moved),
                Line::Event(entry) => {
                    trace.entries.push(entry);
                    trace.lines.push(line);
                }
            }
        }
        Ok(trace)
    }

    /// Returns the latest time in the record.
    #[must_use]
    pub fn end(&self) -> Nanos {
        let moved = self.moves.last().map_or(self.at, |moved| moved.until);
        self.entries.last().map_or(moved, |entry| entry.at.max(moved))
    }

    /// Returns the duration of the record, in ns.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.end().since(self.at)
    }

    /// Replays the events with the original settings.
    #[must_use]
    pub fn replay(&self) -> Replay {
        let mut scheduler = self.scheduler.clone();
        let mut other = Vec::new();
        for (index, entry) in self.entries.iter().enumerate() {
            let mut decisions = Vec::new();
            scheduler.event(entry.at, entry.event, &mut decisions);
            if decisions != entry.decisions {
                other.push((index, decisions));
            }
        }
        Replay { scheduler, other }
    }
}

fn parse<T: for<'a> Deserialize<'a>>(text: &str, line: usize) -> Result<T, TraceError> {
    serde_json::from_str(text).map_err(|source| TraceError::Line { line, source })
}
