//! Where the mediator's fixed structures lie in VRAM: the apertures' page tables, runlists, instance blocks,
//! USERD, rings.

use super::HostError;
use nvspec::addr::{LARGE_PAGE, VramAddr};
use nvspec::fifo::CHANNELS;
use nvspec::instance::{INSTANCE_BYTES, userd};
use nvspec::mmu::{LPT_BYTES, PD_BYTES};

/// Bytes that the layout may take, wherever it begins.
pub const LAYOUT_BYTES: u64 = 4 << 20;

/// Addresses of the fixed structures, one behind the other from `base` on.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Start, a multiple of 128 KiB.
    pub base: VramAddr,
    /// BAR1's instance block.
    pub bar1_instance: VramAddr,
    /// BAR3's instance block.
    pub bar3_instance: VramAddr,
    /// BAR1's page directory.
    pub bar1_directory: VramAddr,
    /// BAR3's page directory.
    pub bar3_directory: VramAddr,
    /// BAR1's large-page table.
    pub bar1_table: VramAddr,
    /// BAR3's large-page table.
    pub bar3_table: VramAddr,
    /// Two pages for runlists, used in turn.
    pub runlists: [VramAddr; 2],
    /// Instance blocks of all physical channels.
    pub instances: VramAddr,
    /// USERD of all physical channels; a multiple of 128 KiB.
    pub userd: VramAddr,
    /// Rings and completion records of all physical channels.
    pub work: VramAddr,
    end: VramAddr,
}

impl Layout {
    /// Lays the structures out from `base` on, within `bytes`.
    ///
    /// # Errors
    /// When they do not fit.
    pub fn new(base: VramAddr, bytes: u64) -> Result<Self, HostError> {
        let mut next = base.0;
        let mut take = |size: u64| {
            let at = VramAddr(next);
            next += size.next_multiple_of(INSTANCE_BYTES);
            at
        };
        let (bar1_instance, bar3_instance) = (take(INSTANCE_BYTES), take(INSTANCE_BYTES));
        let (bar1_directory, bar3_directory) = (take(PD_BYTES), take(PD_BYTES));
        let (bar1_table, bar3_table) = (take(LPT_BYTES), take(LPT_BYTES));
        let runlists = [take(INSTANCE_BYTES), take(INSTANCE_BYTES)];
        let instances = take(u64::from(CHANNELS) * INSTANCE_BYTES);
        let userd = VramAddr(next.next_multiple_of(LARGE_PAGE));
        let work = VramAddr((userd.0 + u64::from(CHANNELS) * userd::BYTES).next_multiple_of(LARGE_PAGE));
        let end = VramAddr((work.0 + u64::from(CHANNELS) * channels::WORK_BYTES).next_multiple_of(LARGE_PAGE));
        if end.0 - base.0 > bytes {
            return Err(HostError::TooSmall { needed: end.0 - base.0, available: bytes });
        }
        Ok(Self {
            base,
            bar1_instance,
            bar3_instance,
            bar1_directory,
            bar3_directory,
            bar1_table,
            bar3_table,
            runlists,
            instances,
            userd,
            work,
            end,
        })
    }

    /// Returns what channels use.
    #[must_use]
    pub fn channels(&self) -> channels::Layout {
        channels::Layout { instances: self.instances, userd: self.userd, runlists: self.runlists, work: self.work }
    }

    /// Bytes in all, a multiple of 128 KiB.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.end.0 - self.base.0
    }

    /// Bytes of what must be zero before BAR3 works: all but USERD and what lies behind it.
    #[must_use]
    pub fn bootstrap_bytes(&self) -> u64 {
        self.userd.0 - self.base.0
    }

    /// Bytes of USERD of all channels.
    #[must_use]
    pub fn userd_bytes(&self) -> u64 {
        u64::from(CHANNELS) * userd::BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_fit_wherever_the_layout_begins() {
        for base in [0, 128 << 10, (6 << 30) - LAYOUT_BYTES] {
            let layout = Layout::new(VramAddr(base), LAYOUT_BYTES).unwrap();
            assert!(layout.bytes() <= LAYOUT_BYTES);
            assert_eq!(layout.userd.0 % LARGE_PAGE, 0);
        }
    }

    #[test]
    fn too_little_memory_is_said() {
        assert!(matches!(Layout::new(VramAddr(0), 1 << 20), Err(HostError::TooSmall { available: 0x10_0000, .. })));
    }
}
