//! The divergence stack, which tracks active lanes and the resume addresses of inactive lanes.
//!
//! A lane that leaves the current path (by a join, break, return or exit) becomes inactive. When no lane is active,
//! entries are popped until one contains lanes. A divergence entry resumes the lanes that branched the other way. An
//! entry pushed by SSY, PBK, PCNT, CAL or similar reconverges the lanes that were active at the push and have not
//! exited.

/// Kind of an entry, named after the instruction that pushed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A branch that only some lanes took.
    Divergence,
    /// Pushed by SSY.
    Join,
    /// Pushed by PBK.
    Break,
    /// Pushed by PCNT.
    Continue,
    /// Pushed by CAL or PRET.
    Return,
    /// Pushed by PLONGJMP.
    LongJump,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    kind: Kind,
    lanes: u32,
    pc: u32,
}

/// Minimum number of entries available to every warp. GUESS: these use internal storage.
const OWN_ENTRIES: usize = 32;
/// Size of an entry in memory, in bytes. GUESS.
const ENTRY_BYTES: u32 = 8;
/// Maximum number of entries, regardless of the size that the program requests. The model keeps the stack in host
/// memory.
const ENTRIES_MAX: usize = 0x2000;

#[derive(Clone, Debug, Default)]
pub(crate) struct Stack {
    entries: Vec<Entry>,
}

/// Returns the maximum number of entries of a warp with `bytes` bytes of stack memory.
pub(crate) fn limit(bytes: u32) -> usize {
    (OWN_ENTRIES + (bytes / ENTRY_BYTES) as usize).min(ENTRIES_MAX)
}

impl Stack {
    pub(crate) fn clear(&mut self) {
        self.entries.clear();
    }

    /// Pushes an entry. Returns false if the stack is full.
    pub(crate) fn push(&mut self, kind: Kind, lanes: u32, pc: u32, limit: usize) -> bool {
        let room = self.entries.len() < limit;
        if room {
            self.entries.push(Entry { kind, lanes, pc });
        }
        room
    }

    /// Removes lanes from all entries above the innermost entry of the given kind that contains any of them, so that
    /// they wait in that entry. Returns true if such an entry exists.
    pub(crate) fn unwind(&mut self, kind: Kind, lanes: u32) -> bool {
        let Some(at) = self.entries.iter().rposition(|entry| entry.kind == kind && entry.lanes & lanes != 0) else {
            return false;
        };
        self.entries[at + 1..].iter_mut().for_each(|entry| entry.lanes &= !lanes);
        true
    }

    /// Removes exited lanes from all entries.
    pub(crate) fn end(&mut self, lanes: u32) {
        self.entries.iter_mut().for_each(|entry| entry.lanes &= !lanes);
    }

    /// Returns the lanes to run next and their program counter, or `None` if all lanes have exited.
    pub(crate) fn pop(&mut self) -> Option<(u32, u32)> {
        while let Some(Entry { lanes, pc, .. }) = self.entries.pop() {
            if lanes != 0 {
                return Some((lanes, pc));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_breaking_from_divergent_branch_rejoin_after_loop() {
        let mut stack = Stack::default();
        assert!(stack.push(Kind::Break, 0xf, 100, 8));
        assert!(stack.push(Kind::Join, 0xf, 50, 8));
        assert!(stack.push(Kind::Divergence, 0xc, 20, 8));
        // Lanes 0 and 1 break. Lanes 2 and 3 continue at 20, join at 50 without lanes 0 and 1, and then also break.
        assert!(stack.unwind(Kind::Break, 0x3));
        assert_eq!(stack.pop(), Some((0xc, 20)));
        assert_eq!(stack.pop(), Some((0xc, 50)));
        assert!(stack.unwind(Kind::Break, 0xc));
        assert_eq!(stack.pop(), Some((0xf, 100)));
        assert_eq!(stack.pop(), None);
    }

    #[test]
    fn ended_lanes_leave_stack_and_full_stack_is_an_error() {
        let mut stack = Stack::default();
        assert!(stack.push(Kind::Return, 0x3, 8, 1));
        assert!(!stack.push(Kind::Return, 0x3, 8, 1));
        assert!(!stack.unwind(Kind::Continue, 1));
        stack.end(0x3);
        assert_eq!(stack.pop(), None);
        assert_eq!((limit(0), limit(0x800), limit(u32::MAX)), (32, 288, ENTRIES_MAX));
    }
}
