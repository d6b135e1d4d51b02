//! A record of what a scheduler was told and what it decided: one line of JSON for each event. A record of a real run is
//! replayed through the same state machine, which must decide the same.
//!
//! The first line holds the format and the settings that the scheduler was made with; each other line a time, an event and
//! the decisions that it brought.

use crate::{Config, ConfigError, Decision, Event, Nanos, Scheduler};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, Write};

/// Number of the format.
const FORMAT: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
struct Header {
    sched_trace: u32,
    at: Nanos,
    config: Config,
}

/// One event of a record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// When.
    pub at: Nanos,
    /// What.
    pub event: Event,
    /// What the scheduler decided.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub decisions: Vec<Decision>,
}

/// Writes a record.
#[derive(Debug)]
pub struct Recorder<W> {
    to: W,
}

impl<W: Write> Recorder<W> {
    /// A record of a scheduler that is made with `config` at `at`.
    ///
    /// # Errors
    /// Those of `to`.
    pub fn new(mut to: W, config: &Config, at: Nanos) -> io::Result<Self> {
        line(&mut to, &Header { sched_trace: FORMAT, at, config: *config })?;
        Ok(Self { to })
    }

    /// Writes down an event and what it brought.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn record(&mut self, at: Nanos, event: Event, decisions: &[Decision]) -> io::Result<()> {
        line(&mut self.to, &Entry { at, event, decisions: decisions.to_vec() })
    }

    /// The writer, with all that was recorded.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn finish(mut self) -> io::Result<W> {
        self.to.flush()?;
        Ok(self.to)
    }
}

fn line(to: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *to, value)?;
    to.write_all(b"\n")
}

/// Why a record cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// It cannot be read.
    #[error("the record cannot be read")]
    Io(#[from] io::Error),
    /// A line is not what it should be.
    #[error("line {line} of the record is not of a scheduler's")]
    Line {
        /// Which, from 1.
        line: usize,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// It is of another version.
    #[error("the record has format {0}, not {FORMAT}")]
    Format(u32),
    /// It is empty.
    #[error("the record has no first line")]
    Empty,
    /// The settings in it are out of bounds.
    #[error("the record's settings are out of bounds")]
    Config(#[from] ConfigError),
}

/// A record, read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// The settings at its start.
    pub config: Config,
    /// When it starts.
    pub at: Nanos,
    /// All events, in order.
    pub entries: Vec<Entry>,
}

/// What a record came to when it was replayed.
#[derive(Debug)]
pub struct Replay {
    /// The scheduler behind the last event.
    pub scheduler: Scheduler,
    /// Events, by index, that brought other decisions than are recorded, with those.
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
        let header: Header = parse(&first?, 1)?;
        if header.sched_trace != FORMAT {
            return Err(TraceError::Format(header.sched_trace));
        }
        let entries = lines.map(|(text, line)| parse(&text?, line)).collect::<Result<_, _>>()?;
        Ok(Self { config: header.config, at: header.at, entries })
    }

    /// Feeds the events to a new scheduler.
    ///
    /// # Errors
    /// When the settings are out of bounds.
    pub fn replay(&self) -> Result<Replay, ConfigError> {
        let mut scheduler = Scheduler::new(self.config, self.at)?;
        let mut other = Vec::new();
        for (index, entry) in self.entries.iter().enumerate() {
            let mut decisions = Vec::new();
            scheduler.event(entry.at, entry.event, &mut decisions);
            if decisions != entry.decisions {
                other.push((index, decisions));
            }
        }
        Ok(Replay { scheduler, other })
    }
}

fn parse<T: for<'a> Deserialize<'a>>(text: &str, line: usize) -> Result<T, TraceError> {
    serde_json::from_str(text).map_err(|source| TraceError::Line { line, source })
}
