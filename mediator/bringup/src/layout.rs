//! Layout of the mediator's fixed structures in VRAM: page tables of the apertures, runlists, instance blocks, USERD,
//! rings, and context images.

use super::CardError;
use channels::GRAPH_IMAGE_MAX;
use nvspec::addr::{LARGE_PAGE, VramAddr};
use nvspec::fifo::CHANNELS;
use nvspec::instance::{INSTANCE_BYTES, userd};
use nvspec::mmu::{LPT_BYTES, PD_BYTES};

/// Addresses of the fixed structures, which are consecutive from `base`.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Start of the structures, aligned to 128 KiB.
    pub base: VramAddr,
    /// Instance block of BAR1.
    pub bar1_instance: VramAddr,
    /// Instance block of BAR3.
    pub bar3_instance: VramAddr,
    /// Page directory of BAR1.
    pub bar1_directory: VramAddr,
    /// Page directory of BAR3.
    pub bar3_directory: VramAddr,
    /// Large-page table of BAR1.
    pub bar1_table: VramAddr,
    /// Large-page table of BAR3.
    pub bar3_table: VramAddr,
    /// Two runlist pages, which are used alternately.
    pub runlists: [VramAddr; 2],
    /// Instance blocks of all physical channels.
    pub instances: VramAddr,
    /// USERD pages of all physical channels, aligned to 128 KiB.
    pub userd: VramAddr,
    /// Rings and completion records of all physical channels.
    pub work: VramAddr,
    /// Context images of all physical channels.
    pub images: VramAddr,
    /// Size of a PGRAPH context image in bytes.
    pub graph_image: u64,
    end: VramAddr,
}

impl Layout {
    /// Returns the total size of the structures in bytes for PGRAPH contexts of `graph_image` bytes. The size does not
    /// depend on the start address.
    ///
    /// # Errors
    /// Returns an error if the contexts are too large.
    pub fn needed(graph_image: u64) -> Result<u64, CardError> {
        Ok(Self::new(VramAddr(0), u64::MAX, graph_image)?.bytes())
    }

    /// Lays out the structures in the `bytes` bytes from `base`. `graph_image` is the size of a PGRAPH context in
    /// bytes.
    ///
    /// # Errors
    /// Returns an error if the structures do not fit, or if the contexts are too large.
    pub fn new(base: VramAddr, bytes: u64, graph_image: u64) -> Result<Self, CardError> {
        if graph_image > GRAPH_IMAGE_MAX {
            return Err(CardError::Contexts { bytes: graph_image, most: GRAPH_IMAGE_MAX });
        }
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
        let images = VramAddr(work.0 + u64::from(CHANNELS) * channels::WORK_BYTES);
        let mut layout = Self {
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
            images,
            graph_image,
            end: images,
        };
        let all = u64::from(CHANNELS) * layout.channels().images_stride();
        let end = VramAddr((images.0 + all).next_multiple_of(LARGE_PAGE));
        if end.0 - base.0 > bytes {
            return Err(CardError::TooSmall { needed: end.0 - base.0, available: bytes });
        }
        layout.end = end;
        Ok(layout)
    }

    /// Returns the part of the layout that channels use.
    #[must_use]
    pub fn channels(&self) -> channels::Layout {
        let Self { instances, userd, runlists, work, images, graph_image, .. } = *self;
        channels::Layout { instances, userd, runlists, work, images, graph_image }
    }

    /// Returns the total size in bytes, a multiple of 128 KiB.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.end.0 - self.base.0
    }

    /// Returns the number of bytes that must be zeroed before BAR3 is used, which are all bytes before USERD.
    #[must_use]
    pub fn bootstrap_bytes(&self) -> u64 {
        self.userd.0 - self.base.0
    }

    /// Returns the size of all USERD pages in bytes.
    #[must_use]
    pub(crate) fn userd_bytes(&self) -> u64 {
        u64::from(CHANNELS) * userd::BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvspec::addr::SMALL_PAGE;

    #[test]
    fn structures_fit_wherever_the_layout_begins() {
        for graph_image in [0x2000, 0x2001, GRAPH_IMAGE_MAX] {
            let needed = Layout::needed(graph_image).unwrap();
            for base in [0, 128 << 10, (6 << 30) - needed] {
                let layout = Layout::new(VramAddr(base), needed, graph_image).unwrap();
                assert_eq!(layout.bytes(), needed);
                assert_eq!(layout.userd.0 % LARGE_PAGE, 0);
                let last = nvspec::fifo::ChannelId(127);
                let ends = layout.channels().image_pages(last, last.into()).map(|(_, at, _)| at.0 + SMALL_PAGE).max();
                assert!(ends.is_some_and(|end| end <= base + needed && end > layout.images.0));
            }
        }
    }

    #[test]
    fn contexts_that_there_is_no_room_for_are_refused() {
        let text = Layout::needed(GRAPH_IMAGE_MAX + 1).unwrap_err().to_string();
        assert!(text.contains("106497") && text.contains("106496"), "{text}");
    }

    #[test]
    fn too_little_memory_is_said() {
        assert!(matches!(
            Layout::new(VramAddr(0), 1 << 20, 0x2000),
            Err(CardError::TooSmall { available: 0x10_0000, .. })
        ));
    }
}
