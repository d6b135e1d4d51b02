//! A record in memory with a size limit.

use super::{MemoryMove, Recorder};
use crate::{Decision, Event, Nanos, Scheduler, TenantId};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Write};

/// A writer to memory with a size limit.
#[derive(Debug)]
struct Bounded {
    bytes: Vec<u8>,
    limit: usize,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.limit.saturating_sub(self.bytes.len()) < bytes.len() {
            return Err(ErrorKind::StorageFull.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A record in progress. If the size limit is reached, the record ends with the last complete line.
#[derive(Debug)]
pub struct Recording {
    recorder: Recorder<Bounded>,
    full: bool,
}

impl Recording {
    /// Starts a record of at most `limit` bytes. `turns` is true if the scheduler grants turns on the whole card.
    ///
    /// # Errors
    /// Returns an error if the scheduler's current state exceeds the limit.
    pub fn new(
        scheduler: &Scheduler,
        turns: bool,
        at: Nanos,
        names: &BTreeMap<TenantId, String>,
        limit: usize,
    ) -> io::Result<Self> {
        let to = Bounded { bytes: Vec::new(), limit };
        let new = if turns { Recorder::of_turns } else { Recorder::new };
        Ok(Self { recorder: new(to, scheduler, at, names)?, full: false })
    }

    /// Records an event and its decisions.
    pub fn note(&mut self, at: Nanos, event: Event, decisions: &[Decision]) {
        self.full = self.full || self.recorder.record(at, event, decisions).is_err();
    }

    /// Records a completed memory move.
    pub fn note_move(&mut self, moved: MemoryMove) {
        self.full = self.full || self.recorder.record_move(moved).is_err();
    }

    /// Returns the record.
    #[must_use]
    pub fn end(self) -> Vec<u8> {
        let mut bytes = self.recorder.finish().map(|to| to.bytes).unwrap_or_default();
        // Remove the incomplete line.
        let end = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        bytes.truncate(end);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Trace;
    use crate::{Config, VgpuParams};

    #[test]
    fn record_without_room_ends_with_a_whole_line() {
        let scheduler = Scheduler::new(Config::default(), Nanos(5)).unwrap();
        let mut recording = Recording::new(&scheduler, false, Nanos(5), &BTreeMap::new(), 4000).unwrap();
        for vm in 0..1000 {
            let event = Event::Added { vgpu: TenantId(vm), params: VgpuParams::default() };
            recording.note(Nanos(u64::from(vm)), event, &[]);
        }
        let bytes = recording.end();
        assert!(bytes.len() <= 4000);
        let trace = Trace::read(&*bytes).unwrap();
        assert!((10..1000).contains(&trace.entries.len()), "{}", trace.entries.len());
        assert!(Recording::new(&scheduler, false, Nanos(5), &BTreeMap::new(), 10).is_err());
    }

    #[test]
    fn memory_moves_do_not_change_the_replay() {
        let mut scheduler = Scheduler::new(Config::default(), Nanos(5)).unwrap();
        let mut recording = Recording::new(&scheduler, true, Nanos(5), &BTreeMap::new(), 1 << 20).unwrap();
        let moved = MemoryMove { from: Nanos(6), until: Nanos(9), vgpu: TenantId(1), bytes: 4096, to_card: true };
        recording.note_move(moved);
        let event = Event::Added { vgpu: TenantId(1), params: VgpuParams::default() };
        scheduler.event(Nanos(7), event, &mut Vec::new());
        recording.note(Nanos(7), event, &[]);
        let trace = Trace::read(&*recording.end()).unwrap();
        assert_eq!((trace.turns, trace.moves.as_slice(), trace.lines.as_slice()), (true, &[moved][..], &[3][..]));
        assert!(trace.replay().other.is_empty());
    }
}
