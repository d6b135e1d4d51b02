//! Context images: channel state that an engine's firmware saves while other channels use the engine.
//!
//! To load a context, PGRAPH's firmware writes registers anywhere in BAR0, as listed in the image. The host therefore
//! owns the images, and a guest's pointer only indicates that a context exists. The card's pointer refers to the
//! channel's image in the mediator's memory, which is mapped after the channel's work area. The mapping permits only
//! privileged accesses, which a channel's work cannot make.

use crate::block::{BLOCK, CONTEXTS};
use crate::work::{PAGE_STRIDE, Span, WORK_BYTES};
use crate::{Host, Layout, work_va};
use nvspec::addr::{GpuVa, SMALL_PAGE, VramAddr};
use nvspec::fifo::ChannelId;
use nvspec::instance::graph_image;
use nvspec::mmu::Rights;

/// Maximum size of PGRAPH's image in bytes, which is the remainder of a channel's span.
pub const GRAPH_IMAGE_MAX: u64 = (PAGE_STRIDE as u64 - GRAPH_PAGE as u64) * SMALL_PAGE;
/// First small page of PGRAPH's image in a channel's span. This image is last, because the card determines its size.
const GRAPH_PAGE: u32 = 6;
/// First small page of each engine's image in a channel's span, in the order of [`CONTEXTS`].
const PAGES: [u32; CONTEXTS.len()] = [GRAPH_PAGE, 4, 5];
/// Size of a copy engine's image in bytes. The firmware saves 256 bytes.
const COPY_IMAGE: u64 = SMALL_PAGE;
const _: () = assert!(WORK_BYTES == 4 * SMALL_PAGE && COPY_IMAGE == BLOCK as u64);

/// Initial contents of the images of a new context.
#[derive(Clone, Debug, Default)]
pub(crate) struct Golden(Vec<u8>);

impl Golden {
    /// Creates the contents from `graph`, an unused context's image as saved by PGRAPH's firmware.
    pub(crate) fn new(graph: &[u8], layout: &Layout) -> Self {
        let mut bytes = graph.to_vec();
        bytes.resize(usize::try_from(layout.graph_image_bytes()).unwrap_or(0), 0);
        // Zero the head, because images provided by the host never list registers.
        bytes.iter_mut().zip(0..graph_image::HEAD_BYTES).for_each(|(byte, _)| *byte = 0);
        Self(bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Restores the contents. Returns `None` if they list registers.
    pub(crate) fn restored(bytes: Vec<u8>) -> Option<Self> {
        let named = bytes.iter().zip(0..graph_image::HEAD_BYTES).any(|(byte, _)| *byte != 0);
        (!named).then_some(Self(bytes))
    }
}

impl Layout {
    /// Returns the distance in bytes between the images of consecutive channels.
    #[must_use]
    pub fn images_stride(&self) -> u64 {
        self.graph_image_bytes().saturating_add(COPY_IMAGE.saturating_mul(2))
    }

    fn graph_image_bytes(&self) -> u64 {
        self.graph_image.min(GRAPH_IMAGE_MAX).next_multiple_of(SMALL_PAGE)
    }

    /// Returns the locations and sizes of a physical channel's images for PGRAPH, CE0 and CE1.
    pub(crate) fn images_of(&self, channel: ChannelId) -> [(VramAddr, u64); CONTEXTS.len()] {
        let ce0 = self.images.offset(u64::from(channel.0).wrapping_mul(self.images_stride()));
        let ce1 = ce0.offset(COPY_IMAGE);
        [(ce1.offset(COPY_IMAGE), self.graph_image_bytes()), (ce0, COPY_IMAGE), (ce1, COPY_IMAGE)]
    }

    /// Returns the pages that a physical channel's address space must map in addition to [`Self::work_pages`].
    pub fn image_pages(&self, channel: ChannelId, span: Span) -> impl Iterator<Item = (u32, VramAddr, Rights)> {
        let first = span.first_page();
        PAGES.into_iter().zip(self.images_of(channel)).flat_map(move |(page, (image, bytes))| {
            let at = (0..bytes).step_by(BLOCK).map(move |offset| image.offset(offset));
            (first.wrapping_add(page)..).zip(at).map(|(index, at)| (index, at, Rights::Privileged))
        })
    }
}

/// Returns the addresses of the images for PGRAPH, CE0 and CE1 in the channel's address space.
pub(crate) fn image_vas(span: impl Into<Span>) -> [GpuVa; CONTEXTS.len()] {
    let base = work_va(span);
    PAGES.map(|page| base.offset(u64::from(page).wrapping_mul(SMALL_PAGE)))
}

/// Resets the images of the contexts marked in `fresh`.
pub(crate) fn renew(
    host: &mut impl Host,
    layout: &Layout,
    channel: ChannelId,
    golden: &Golden,
    fresh: [bool; CONTEXTS.len()],
) {
    let [(graph, _), copies @ ..] = layout.images_of(channel);
    let [graph_fresh, copies_fresh @ ..] = fresh;
    if graph_fresh {
        host.vram_write(graph, &golden.0);
    }
    for ((image, _), _) in copies.into_iter().zip(copies_fresh).filter(|(_, fresh)| *fresh) {
        host.vram_write(image, &[0; BLOCK]);
    }
}

#[cfg(test)]
mod tests;
