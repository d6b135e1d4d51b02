//! Records the events and decisions of a card's scheduler in memory, on an operator's request.

use super::Work;
use sched::trace::Recorder;
use sched::{Decision, Event, Nanos, Scheduler, TenantId};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Write};

/// A memory buffer of limited size, in bytes.
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

/// A running record. When it is full, it ends with the last event that fits.
#[derive(Debug)]
pub(crate) struct Recording {
    recorder: Recorder<Bounded>,
    full: bool,
}

impl Recording {
    fn new(scheduler: &Scheduler, at: Nanos, names: &BTreeMap<TenantId, String>, limit: usize) -> io::Result<Self> {
        let to = Bounded { bytes: Vec::new(), limit };
        Ok(Self { recorder: Recorder::new(to, scheduler, at, names)?, full: false })
    }

    /// Records an event and its decisions.
    pub(crate) fn note(&mut self, at: Nanos, event: Event, decisions: &[Decision]) {
        self.full = self.full || self.recorder.record(at, event, decisions).is_err();
    }

    fn end(self) -> Vec<u8> {
        let mut bytes = self.recorder.finish().map(|to| to.bytes).unwrap_or_default();
        // Drop the line that did not fit.
        let end = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        bytes.truncate(end);
        bytes
    }
}

impl Work {
    /// Starts a record of the scheduler of at most `limit` bytes; `names` are the VMs' names. Returns `false` if a
    /// record is already running, or the scheduler's current state does not fit.
    pub(crate) fn start_record(&mut self, at: Nanos, names: &BTreeMap<TenantId, String>, limit: usize) -> bool {
        if self.schedule.recording.is_some() {
            return false;
        }
        let names = names.iter().map(|(vm, name)| (*vm, name.clone())).collect();
        self.schedule.recording = Recording::new(self.schedule.scheduler(), at, &names, limit).ok();
        self.schedule.recording.is_some()
    }

    /// Ends the record and returns it; `None` if no record is running.
    pub(crate) fn end_record(&mut self) -> Option<Vec<u8>> {
        self.schedule.recording.take().map(Recording::end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sched::trace::Trace;
    use sched::{Config, VgpuParams};

    #[test]
    fn a_record_without_room_ends_with_a_whole_line() {
        let scheduler = Scheduler::new(Config::default(), Nanos(5)).unwrap();
        let mut recording = Recording::new(&scheduler, Nanos(5), &BTreeMap::new(), 4000).unwrap();
        for vm in 0..1000 {
            let event = Event::Added { vgpu: TenantId(vm), params: VgpuParams::default() };
            recording.note(Nanos(u64::from(vm)), event, &[]);
        }
        let bytes = recording.end();
        assert!(bytes.len() <= 4000);
        let trace = Trace::read(&*bytes).unwrap();
        assert!((10..1000).contains(&trace.entries.len()), "{}", trace.entries.len());
        assert!(Recording::new(&scheduler, Nanos(5), &BTreeMap::new(), 10).is_err());
    }
}
