//! A record of a scheduler's events and decisions: one line of JSON for each event. A record of a real run is replayed
//! through the same state machine, which must make the same decisions.
//!
//! The first line contains the format, and the scheduler at the start of the record without its accounts. Each further
//! line contains a time and either an event with its decisions, or a move of memory. A record can therefore begin at
//! any time.
//!
//! [`Trace::replay`] checks that the decisions are the same; [`Trace::under`] computes the decisions with other
//! settings.

mod bounded;
mod under;

pub use bounded::Recording;

use crate::{Decision, Event, Nanos, Scheduler, TenantId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, BufRead, Write};

/// Number of the format.
const FORMAT: u32 = 4;
/// Oldest supported format, which has no moves of memory.
const OLDEST_FORMAT: u32 = 3;

/// Format in a record's first line, checked before the rest of the line is parsed.
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

/// A move of memory between a card and host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryMove {
    /// Start of the move.
    pub from: Nanos,
    /// End of the move.
    pub until: Nanos,
    /// The vGPU that owns the memory.
    pub vgpu: TenantId,
    /// Bytes moved.
    pub bytes: u64,
    /// True if the memory has moved to the card; false if it has moved to host memory.
    pub to_card: bool,
}

/// A line after the first.
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

/// An event in a record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Time of the event.
    pub at: Nanos,
    /// The event.
    pub event: Event,
    /// Decisions of the scheduler.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub decisions: Vec<Decision>,
}

/// Writes a record.
#[derive(Debug)]
pub struct Recorder<W> {
    to: W,
}

impl<W: Write> Recorder<W> {
    /// Starts a record of `scheduler` at time `at`; `names` are the operators' names of its vGPUs.
    ///
    /// # Errors
    /// Returns an error if `to` fails.
    pub fn new(to: W, scheduler: &Scheduler, at: Nanos, names: &BTreeMap<TenantId, String>) -> io::Result<Self> {
        Self::start(to, &Header { sched_trace: FORMAT, at, names, turns: false, scheduler })
    }

    /// Starts a record of a scheduler that grants the whole card in turns (`Turns`).
    ///
    /// # Errors
    /// Returns an error if `to` fails.
    pub fn of_turns(to: W, scheduler: &Scheduler, at: Nanos, names: &BTreeMap<TenantId, String>) -> io::Result<Self> {
        Self::start(to, &Header { sched_trace: FORMAT, at, names, turns: true, scheduler })
    }

    fn start(mut to: W, header: &Header<'_>) -> io::Result<Self> {
        line(&mut to, header)?;
        let mut recorder = Self { to };
        for vgpu in header.scheduler.vgpus() {
            // The serialized scheduler omits these settings.
            if let Some(&params) = header.scheduler.competing(vgpu) {
                recorder.record(header.at, Event::Competes { vgpu, params: Some(params) }, &[])?;
            }
        }
        Ok(recorder)
    }

    /// Records a move of memory that has ended.
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

    /// Returns the writer, which then contains the whole record.
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
    #[error("line {line} of the record is not of a scheduler's")]
    Line {
        /// Number of the line, starting at 1.
        line: usize,
        /// Error of the parser.
        source: serde_json::Error,
    },
    /// The record has a different format version.
    #[error("the record has format {0}, not {FORMAT}")]
    Format(u32),
    /// The record is empty.
    #[error("the record has no first line")]
    Empty,
    /// The initial state is not a valid scheduler.
    #[error("the record begins with what cannot be a scheduler")]
    State,
}

/// A parsed record.
#[derive(Clone, Debug)]
pub struct Trace {
    /// The scheduler at the start of the record, with empty accounts.
    pub scheduler: Scheduler,
    /// Time at which the record starts.
    pub at: Nanos,
    /// Operators' names of the vGPUs that existed at the start.
    pub names: BTreeMap<TenantId, String>,
    /// True if the scheduler grants the whole card in turns.
    pub turns: bool,
    /// All events, in order.
    pub entries: Vec<Entry>,
    /// Numbers of the events' lines, from 1.
    pub lines: Vec<usize>,
    /// Moves of memory, in the order of their ends.
    pub moves: Vec<MemoryMove>,
}

/// Outcome of replaying a record.
#[derive(Debug)]
pub struct Replay {
    /// The scheduler after the last event.
    pub scheduler: Scheduler,
    /// Indices of the events whose decisions differ from the recorded ones, with the new decisions.
    pub other: Vec<(usize, Vec<Decision>)>,
}

impl Trace {
    /// Reads a record.
    ///
    /// # Errors
    /// See [`TraceError`].
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

    /// Returns the time in the record's last line.
    #[must_use]
    pub fn end(&self) -> Nanos {
        let moved = self.moves.last().map_or(self.at, |moved| moved.until);
        self.entries.last().map_or(moved, |entry| entry.at.max(moved))
    }

    /// Returns the record's length, in ns.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.end().since(self.at)
    }

    /// Feeds the events to a scheduler with the original settings.
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
