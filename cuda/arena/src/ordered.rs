//! Manages memory that programs free in stream order (`cuMemFreeAsync`).
//!
//! A stream may immediately reuse memory that it has freed, without a driver call, because the work in a stream runs in
//! order. Other streams can use the memory once an event after that work has completed. The event is recorded only when
//! an allocation needs memory.

use foldhash::{HashMap, HashSet};

/// Address of an allocation.
type Address = u64;

/// A stream, as identified by a call that frees memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lane {
    /// Context handle.
    pub context: u64,
    /// Stream handle, or 0 for the context's default stream.
    pub stream: u64,
    /// Set if the program called the per-thread variant of the function.
    pub per_thread: bool,
}

/// The work that must complete before memory is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behind {
    /// No work, because all of it has already completed.
    Nothing,
    /// The work up to this driver event.
    Event(u64),
    /// All work of the context.
    All,
}

/// Memory waiting for work to complete.
#[derive(Debug)]
struct Waits {
    context: u64,
    behind: Behind,
    addresses: Vec<Address>,
}

/// Memory that was freed but not yet released.
#[derive(Debug, Default)]
pub struct Ordered {
    /// Freed memory that its lane may reuse, keyed by lane and length.
    loose: HashMap<Lane, HashMap<u64, Vec<Address>>>,
    loose_bytes: u64,
    waits: Vec<Waits>,
    /// All memory that was freed and has not been reused or released.
    freed: HashSet<Address>,
    /// Unused events, as pairs of context and event.
    spare: Vec<(u64, u64)>,
}

impl Ordered {
    /// Returns true if the memory was freed and has not been reused.
    #[must_use]
    pub fn is_freed(&self, address: Address) -> bool {
        self.freed.contains(&address)
    }

    /// Returns all memory that was freed and has not been reused.
    pub fn freed(&self) -> impl Iterator<Item = Address> {
        self.freed.iter().copied()
    }

    /// Returns true if any memory waits for an event.
    #[must_use]
    pub fn waits_for_events(&self) -> bool {
        self.waits.iter().any(|waits| matches!(waits.behind, Behind::Event(_)))
    }

    /// Returns true if no memory waits to be reused or released.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.freed.is_empty()
    }

    /// Returns the number of bytes that only the lanes that freed them may reuse.
    #[must_use]
    pub fn loose_bytes(&self) -> u64 {
        self.loose_bytes
    }

    /// Records memory that a lane freed.
    pub fn put(&mut self, lane: Lane, bytes: u64, address: Address) {
        self.freed.insert(address);
        self.loose_bytes += bytes;
        self.loose.entry(lane).or_default().entry(bytes).or_default().push(address);
    }

    /// Queues memory for release after the context's work that `behind` specifies.
    pub fn put_behind(&mut self, context: u64, behind: Behind, address: Address) {
        self.freed.insert(address);
        self.waits.push(Waits { context, behind, addresses: vec![address] });
    }

    /// Removes and returns memory of this length that the same lane has freed.
    pub fn take(&mut self, lane: Lane, bytes: u64) -> Option<Address> {
        let address = self.loose.get_mut(&lane)?.get_mut(&bytes)?.pop()?;
        self.freed.remove(&address);
        self.loose_bytes -= bytes;
        Some(address)
    }

    /// Removes and returns an unused event of a context, if any.
    pub fn spare(&mut self, context: u64) -> Option<u64> {
        let at = self.spare.iter().position(|(of, _)| *of == context)?;
        Some(self.spare.swap_remove(at).1)
    }

    /// Returns the lanes with freed memory that they may reuse.
    #[must_use]
    pub fn lanes(&self) -> Vec<Lane> {
        self.loose
            .iter()
            .filter(|(_, lengths)| lengths.values().any(|list| !list.is_empty()))
            .map(|(l, _)| *l)
            .collect()
    }

    /// Queues all memory that a lane has freed for release after the work that `behind` specifies.
    pub fn gather(&mut self, lane: Lane, behind: Behind) {
        let lengths = self.loose.remove(&lane).unwrap_or_default();
        self.loose_bytes -= lengths.iter().map(|(bytes, list)| bytes * list.len() as u64).sum::<u64>();
        let addresses: Vec<Address> = lengths.into_values().flatten().collect();
        self.waits.push(Waits { context: lane.context, behind, addresses });
    }

    /// Returns true if memory waits for all work of a context.
    #[must_use]
    pub fn waits_for_all(&self) -> bool {
        self.waits.iter().any(|waits| waits.behind == Behind::All)
    }

    /// Releases the memory whose events have completed according to `passed`, and returns its addresses. If `ended` is
    /// set, also releases the memory that waits for all work.
    pub fn passed(&mut self, passed: impl Fn(u64) -> bool, ended: bool) -> Vec<Address> {
        let is_done = |behind| match behind {
            Behind::Nothing => true,
            Behind::Event(event) => passed(event),
            Behind::All => ended,
        };
        let mut done = Vec::new();
        for Waits { context, behind, addresses } in self.waits.extract_if(.., |waits| is_done(waits.behind)) {
            if let Behind::Event(event) = behind {
                self.spare.push((context, event));
            }
            done.extend(addresses);
        }
        for address in &done {
            self.freed.remove(address);
        }
        done
    }

    /// Calls [`Self::forget`] for every context, because any of them may be destroyed.
    pub fn forget_all(&mut self) {
        let contexts: HashSet<u64> = self.loose.keys().map(|lane| lane.context).collect();
        let waiting = self.waits.iter().map(|waits| waits.context);
        let spare = self.spare.iter().map(|(context, _)| *context);
        let all: HashSet<u64> = contexts.into_iter().chain(waiting).chain(spare).collect();
        all.into_iter().for_each(|context| self.forget(context));
    }

    /// Drops the unused events of a destroyed context. The memory freed in the context then waits for all work.
    pub fn forget(&mut self, context: u64) {
        self.spare.retain(|(of, _)| *of != context);
        for waits in self.waits.iter_mut().filter(|waits| waits.context == context) {
            waits.behind = Behind::All;
        }
        let lanes: Vec<Lane> = self.loose.keys().copied().filter(|lane| lane.context == context).collect();
        for lane in lanes {
            self.gather(lane, Behind::All);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LANE: Lane = Lane { context: 1, stream: 5, per_thread: false };

    #[test]
    fn stream_reuses_its_freed_memory_and_others_wait() {
        let mut ordered = Ordered::default();
        ordered.put(LANE, 512, 0x1000);
        let other = Lane { stream: 6, ..LANE };
        assert_eq!(ordered.take(other, 512), None, "its work may still use it");
        assert_eq!(ordered.take(LANE, 1024), None, "the freed memory is shorter");
        assert!(ordered.is_freed(0x1000));
        assert_eq!(ordered.loose_bytes(), 512);
        assert_eq!(ordered.take(LANE, 512), Some(0x1000));
        assert_eq!(ordered.take(LANE, 512), None, "it is in use");
        assert!(!ordered.is_freed(0x1000));
        assert_eq!(ordered.loose_bytes(), 0);
    }

    #[test]
    fn stream_memory_is_released_after_work_of_its_stream() {
        let mut ordered = Ordered::default();
        ordered.put(LANE, 512, 0x1000);
        ordered.put(LANE, 1024, 0x2000);
        assert_eq!(ordered.lanes(), [LANE]);
        assert_eq!(ordered.loose_bytes(), 1536);
        ordered.gather(LANE, Behind::Event(77));
        assert_eq!(ordered.loose_bytes(), 0);
        assert_eq!(ordered.take(LANE, 512), None, "it will be released to all lanes");
        assert_eq!(ordered.passed(|_| false, true), []);
        let mut done = ordered.passed(|event| event == 77, false);
        done.sort_unstable();
        assert_eq!(done, [0x1000, 0x2000]);
        assert!(ordered.is_empty());
        assert_eq!((ordered.spare(2), ordered.spare(1), ordered.spare(1)), (None, Some(77), None));
        ordered.put(LANE, 512, 0x3000);
        ordered.gather(LANE, Behind::Nothing);
        assert_eq!(ordered.passed(|_| false, false), [0x3000], "the stream had no work left");
    }

    #[test]
    fn memory_of_ended_context_does_not_poll_its_events() {
        let mut ordered = Ordered::default();
        ordered.put(LANE, 512, 0x1000);
        ordered.put(LANE, 512, 0x2000);
        ordered.take(LANE, 512);
        ordered.put_behind(1, Behind::Event(9), 0x3000);
        ordered.forget(1);
        assert!(ordered.waits_for_all());
        assert_eq!(ordered.passed(|_| panic!("its events were destroyed"), false), []);
        assert_eq!(ordered.passed(|_| panic!("its events were destroyed"), true).len(), 2);
        assert_eq!(ordered.spare(1), None);
    }
}
