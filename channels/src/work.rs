//! The host's work area for a physical channel: a GPFIFO ring, and a completion record for each submission in flight. A
//! record consists of a push buffer and the semaphore that it releases.

use crate::Layout;
use nvspec::addr::{GpuVa, SMALL_PAGE, VramAddr};
use nvspec::fifo::host_method::{NON_STALL_INTERRUPT, NOP, SEMAPHORE_A, semaphore_d};
use nvspec::fifo::{ChannelId, GpEntry, HeaderOp, MethodHeader};
use nvspec::mmu::{HOST_VA_BASE, Rights};

/// Size of a channel's work area in bytes.
pub const WORK_BYTES: u64 = 4 * SMALL_PAGE;
/// Distance in bytes between the virtual address ranges of consecutive spans.
pub(crate) const VA_STRIDE: u64 = 128 << 10;
/// Distance in small pages between the virtual address ranges of consecutive spans.
pub(crate) const PAGE_STRIDE: u32 = 32;

/// Log2 of the number of entries in a host ring.
pub(crate) const RING_LOG2: u32 = 9;
/// Number of entries in a host ring.
pub(crate) const RING_ENTRIES: u32 = 1 << RING_LOG2;
/// Size of a GPFIFO entry in bytes.
pub(crate) const ENTRY_BYTES: usize = 8;
/// Number of completion records per channel.
pub(crate) const RECORDS: usize = 256;
/// Offset of the records' push buffers in the work area, in bytes.
const PUSH: u64 = SMALL_PAGE;
/// Distance in bytes between consecutive push buffers.
const PUSH_STRIDE: u64 = 32;
/// Offset of the records' semaphores in the work area, in bytes.
const SEMAPHORES: u64 = 3 * SMALL_PAGE;
/// Size of a semaphore in bytes: a payload, zeros, and a 64-bit time in ns.
pub(crate) const SEMAPHORE_BYTES: usize = 16;
/// Offset of the time in a semaphore, in bytes.
const SEMAPHORE_TIME: usize = 8;
/// Number of dwords in a record's push buffer. The push buffer is shorter than [`PUSH_STRIDE`], so that the end of one
/// range is not the start of the next one.
const PUSH_WORDS: u32 = 6;
/// Size of a record's push buffer in bytes.
const PUSH_BYTES: usize = 24;
/// Subchannel of the records' methods. The host unit executes these methods on any subchannel.
const SUBCHANNEL: u8 = 0;

const _: () = assert!(
    RING_ENTRIES as u64 * ENTRY_BYTES as u64 == PUSH
        && PUSH + RECORDS as u64 * PUSH_STRIDE == SEMAPHORES
        && SEMAPHORES + (RECORDS * SEMAPHORE_BYTES) as u64 == WORK_BYTES
        && PUSH_BYTES == 4 * PUSH_WORDS as usize
        && (PUSH_BYTES as u64) < PUSH_STRIDE
        && VA_STRIDE == PAGE_STRIDE as u64 * SMALL_PAGE
        && WORK_BYTES <= VA_STRIDE
);

/// Index of a bound channel's virtual address range, which is above the guest's addresses and contains the work area
/// and images. Each channel of a VM has a different index. The index equals the physical channel number if that index
/// is free, and does not change if the channel moves to another card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span(pub(crate) u8);

impl From<ChannelId> for Span {
    fn from(channel: ChannelId) -> Self {
        Self(channel.0)
    }
}

impl Span {
    /// Returns the first small page of the span, counted from [`HOST_VA_BASE`].
    pub(crate) fn first_page(self) -> u32 {
        u32::from(self.0).wrapping_mul(PAGE_STRIDE)
    }
}

/// Returns the start address of a channel's work area in the channel's address space.
#[must_use]
pub fn work_va(span: impl Into<Span>) -> GpuVa {
    HOST_VA_BASE.offset(u64::from(span.into().0).wrapping_mul(VA_STRIDE))
}

impl Layout {
    /// Returns the VRAM address of a physical channel's work area.
    #[must_use]
    pub fn work_area(&self, channel: ChannelId) -> VramAddr {
        self.work.offset(u64::from(channel.0).wrapping_mul(WORK_BYTES))
    }

    /// Returns the pages that a physical channel's address space must map in its `span`, in addition to
    /// [`Self::image_pages`]. They must be mapped before the channel is enabled, and stay mapped while it is bound.
    /// Each item contains the index of the small page, counted from [`HOST_VA_BASE`], the VRAM address of the page, and
    /// its permissions.
    #[must_use]
    pub fn work_pages(&self, channel: ChannelId, span: Span) -> [(u32, VramAddr, Rights); 4] {
        let first = span.first_page();
        let area = self.work_area(channel);
        [0u32, 1, 2, 3].map(|page| {
            let offset = u64::from(page).wrapping_mul(SMALL_PAGE);
            let rights = if offset >= SEMAPHORES { Rights::ReadWrite } else { Rights::ReadOnly };
            (first.wrapping_add(page), area.offset(offset), rights)
        })
    }
}

/// Returns the byte offset of a ring entry in the work area.
pub(crate) fn entry_offset(index: u32) -> u64 {
    u64::from(index).wrapping_mul(ENTRY_BYTES as u64)
}

/// Returns the byte offset of a record's push buffer in the work area.
pub(crate) fn push_offset(slot: usize) -> u64 {
    PUSH.wrapping_add((slot as u64).wrapping_mul(PUSH_STRIDE))
}

/// Returns the byte offset of a record's semaphore in the work area.
pub(crate) fn semaphore_offset(slot: usize) -> u64 {
    SEMAPHORES.wrapping_add((slot as u64).wrapping_mul(SEMAPHORE_BYTES as u64))
}

/// Returns the ring entry that makes the card fetch a record's push buffer. The entry is marked as a subroutine, so it
/// does not affect the guest's top-level state.
pub(crate) fn record_entry(span: Span, slot: usize) -> u64 {
    let va = work_va(span).offset(push_offset(slot));
    GpEntry::new().with_address_dwords(va.0 >> 2).with_not_main(true).with_dwords(PUSH_WORDS).into()
}

/// Returns a record's push buffer. Once all earlier work has ended, it releases the semaphore with `sequence` and the
/// time, and then raises the non-stall interrupt.
pub(crate) fn record_push(span: Span, slot: usize, sequence: u32) -> [u8; PUSH_BYTES] {
    let va = work_va(span).offset(semaphore_offset(slot));
    let [b0, b1, b2, b3, b4, ..] = va.0.to_le_bytes();
    let words = [
        MethodHeader::to(HeaderOp::Increasing, SUBCHANNEL, SEMAPHORE_A, 4).into(),
        u32::from(b4),
        u32::from_le_bytes([b0, b1, b2, b3]),
        sequence,
        semaphore_d::OPERATION.encode(semaphore_d::RELEASE),
        MethodHeader::to(HeaderOp::Immediate, SUBCHANNEL, NON_STALL_INTERRUPT, 0).into(),
    ];
    let mut bytes = [0; PUSH_BYTES];
    for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
        to.copy_from_slice(&u32::to_le_bytes(word));
    }
    bytes
}

/// Byte offset, in a record's push buffer, of the dword that raises the interrupt.
pub(crate) const RAISES: u64 = PUSH_BYTES as u64 - 4;
/// Returns the no-op dword that can replace the dword at [`RAISES`].
pub(crate) fn raises_nothing() -> [u8; 4] {
    u32::from(MethodHeader::to(HeaderOp::Immediate, SUBCHANNEL, NOP, 0)).to_le_bytes()
}

/// Returns the card's GET address after the card has read a record's push buffer to the end.
pub(crate) fn record_end(span: Span, slot: usize) -> u64 {
    work_va(span).offset(push_offset(slot)).offset(PUSH_BYTES as u64).0
}

/// Returns the slot of the record whose push buffer contains `va` or ends at `va`.
pub(crate) fn record_at(span: Span, va: u64) -> Option<usize> {
    let within = va.checked_sub(work_va(span).offset(PUSH).0)?;
    let slot = usize::try_from(within / PUSH_STRIDE).ok()?;
    (slot < RECORDS && within % PUSH_STRIDE <= PUSH_BYTES as u64).then_some(slot)
}

/// Returns the contents of a semaphore: its payload and its time in ns.
pub(crate) fn semaphore(bytes: &[u8; SEMAPHORE_BYTES]) -> (u32, u64) {
    let payload = bytes.first_chunk().map_or(0, |payload| u32::from_le_bytes(*payload));
    let time = bytes.get(SEMAPHORE_TIME..).and_then(<[u8]>::first_chunk).map_or(0, |time| u64::from_le_bytes(*time));
    (payload, time)
}
