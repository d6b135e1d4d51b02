//! Records how often a virtual machine's memory is used while its guest works.

use std::sync::Arc;

use owner::{HostCard, Uses};
use vram::VmId;

use super::memory::mediated;
use super::{Daemon, DaemonError};

/// A count of uses that is being made. It ends when it is dropped, too.
pub(crate) struct UsesRecord {
    host: Arc<HostCard>,
    vm: VmId,
    name: String,
    over: bool,
}

impl Daemon {
    /// Begins to count how often each part of a guest's VRAM is used.
    ///
    /// # Errors
    /// As [`Self::vm_memory`], and when that is being done already.
    pub(crate) fn record_uses(&self, name: &str) -> Result<UsesRecord, DaemonError> {
        let (host, vm) = self.with_scheduled(&mut self.state.lock(), name, |_, card, vm| Ok((mediated(card)?, vm)))?;
        let mut state = host.lock();
        let now = state.now_ns();
        let begun = state.memory_mut().count_uses(now, vm);
        drop(state);
        if !begun {
            return Err(DaemonError::NoProfileNow(name.to_owned()));
        }
        tracing::info!(vm = name, "what the VM uses of its memory is counted");
        Ok(UsesRecord { host, vm, name: name.to_owned(), over: false })
    }
}

impl UsesRecord {
    /// Ends it.
    ///
    /// # Errors
    /// When the virtual machine has gone meanwhile.
    pub fn end(mut self) -> Result<api::MemoryProfile, DaemonError> {
        self.over = true;
        let mut state = self.host.lock();
        let now = state.now_ns();
        let gone =
            || DaemonError::Failed(format!("VM `{}` has left its card while its memory was profiled", self.name));
        let uses = state.memory_mut().uses_counted(now, self.vm).ok_or_else(gone)?;
        Ok(profile(&self.name, state.vram().chunks.chunk_bytes(), &uses))
    }
}

impl Drop for UsesRecord {
    fn drop(&mut self) {
        // Whoever wanted it has gone; nothing is left of it.
        if !self.over {
            let mut state = self.host.lock();
            let now = state.now_ns();
            let _ = state.memory_mut().uses_counted(now, self.vm);
        }
    }
}

/// The uses by range: chunks side by side that are used alike make one.
fn profile(vm: &str, chunk_bytes: u64, uses: &Uses) -> api::MemoryProfile {
    // The unit may be any, as long as all fit.
    let most = uses.chunks.iter().copied().max().unwrap_or(0);
    let unit = most.div_ceil(u32::MAX.into()).max(1);
    let mut ranges: Vec<api::RangeUse> = Vec::new();
    for (index, &count) in (0..).zip(&uses.chunks) {
        // What was used is not rounded to nothing.
        let accesses = u32::try_from(count.div_ceil(unit)).unwrap_or(u32::MAX);
        match ranges.last_mut() {
            Some(last) if last.accesses == accesses => last.range.bytes += chunk_bytes,
            _ => ranges
                .push(api::RangeUse { range: api::Range { start: index * chunk_bytes, bytes: chunk_bytes }, accesses }),
        }
    }
    api::MemoryProfile { vm: vm.to_owned(), counted_by_card: uses.counted, looks: uses.looks, ranges }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_that_are_used_alike_make_a_range_and_all_counts_fit() {
        let most = 3 * u64::from(u32::MAX);
        let uses = Uses { counted: true, looks: 4, chunks: vec![0, 0, most, most, 1, 0] };
        let api::MemoryProfile { counted_by_card, looks, ranges, .. } = profile("a", 10, &uses);
        assert_eq!((counted_by_card, looks), (true, 4));
        let ranges: Vec<_> = ranges.iter().map(|of| (of.range.start, of.range.bytes, of.accesses)).collect();
        assert_eq!(ranges, [(0, 20, 0), (20, 20, u32::MAX), (40, 10, 1), (50, 10, 0)]);
    }
}
