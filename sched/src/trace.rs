//! A record of a scheduler's events and decisions: one line of JSON for each event. A record of a real run is replayed
//! through the same state machine, which must make the same decisions.
//!
//! The first line contains the format and the scheduler at the start of the record, without its accounts; each other
//! line contains a time, an event and its decisions. So a record may begin at any time.
//!
//! [`Trace::replay`] checks that the decisions are the same; [`Trace::under`] makes decisions with other settings.

mod under;

use crate::{Decision, Event, Nanos, Scheduler, TenantId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, BufRead, Write};

/// Number of the record format.
const FORMAT: u32 = 3;

/// Format of a record's first line, checked before the rest of the line is parsed.
#[derive(Debug, Deserialize)]
struct Format {
    sched_trace: u32,
}

#[derive(Debug, Serialize)]
struct Header<'a> {
    sched_trace: u32,
    at: Nanos,
    names: &'a BTreeMap<TenantId, String>,
    scheduler: &'a Scheduler,
}

#[derive(Debug, Deserialize)]
struct Start {
    at: Nanos,
    names: BTreeMap<TenantId, String>,
    scheduler: Scheduler,
}

/// One event of a record.
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
    /// Starts a record of `scheduler` from `at` on; `names` are the operators' names of its vGPUs.
    ///
    /// # Errors
    /// Errors of the writer.
    pub fn new(mut to: W, scheduler: &Scheduler, at: Nanos, names: &BTreeMap<TenantId, String>) -> io::Result<Self> {
        line(&mut to, &Header { sched_trace: FORMAT, at, names, scheduler })?;
        let mut recorder = Self { to };
        for vgpu in scheduler.vgpus() {
            // The serialized scheduler omits these settings.
            if let Some(&params) = scheduler.competing(vgpu) {
                recorder.record(at, Event::Competes { vgpu, params: Some(params) }, &[])?;
            }
        }
        Ok(recorder)
    }

    /// Writes an event and its decisions.
    ///
    /// # Errors
    /// Errors of the writer.
    pub fn record(&mut self, at: Nanos, event: Event, decisions: &[Decision]) -> io::Result<()> {
        line(&mut self.to, &Entry { at, event, decisions: decisions.to_vec() })
    }

    /// Returns the writer, which contains everything that was recorded.
    ///
    /// # Errors
    /// Errors of the writer.
    pub fn finish(mut self) -> io::Result<W> {
        self.to.flush()?;
        Ok(self.to)
    }
}

fn line(to: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *to, value)?;
    to.write_all(b"\n")
}

/// Reason that a record cannot be replayed.
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
    /// The record has another format version.
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
    /// All events, in order.
    pub entries: Vec<Entry>,
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
        if sched_trace != FORMAT {
            return Err(TraceError::Format(sched_trace));
        }
        let Start { at, names, scheduler } = parse(&first, 1)?;
        if !scheduler.is_whole() {
            return Err(TraceError::State);
        }
        let entries = lines.map(|(text, line)| parse(&text?, line)).collect::<Result<_, _>>()?;
        Ok(Self { scheduler, at, names, entries })
    }

    /// Returns the record's length, in ns.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.entries.last().map_or(0, |entry| entry.at.since(self.at))
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
