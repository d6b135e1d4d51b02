//! Instance blocks: decodes a guest's block, and builds the card's block.

use crate::Place;
use crate::block::{BLOCK, CONTEXTS};
use crate::image::image_vas;
use crate::work::{RING_LOG2, Span, work_va};
use nvspec::addr::{GpuVa, GuestVramAddr, Target, VA_BITS, VramAddr};
use nvspec::instance::{context, ramfc, userd, vm};

/// Mask of the bits of a GPU virtual address.
const VA_MASK: u64 = (1 << VA_BITS) - 1;
/// Mask of the bits of a page-aligned address.
const PAGE_MASK: u64 = VA_MASK & !(userd::BYTES - 1);
/// Mask of the target bits in an instance block's directory and USERD dwords.
const TARGET_BITS: u32 = 3;

/// Offset of the range that contains all context pointers.
pub(crate) const CONTEXTS_FIRST: u64 = context::GR;
/// Size in bytes of the range that contains all context pointers.
pub(crate) const CONTEXTS_BYTES: usize = 0x38;
const _: () = assert!(context::CE1 + 8 - context::GR == CONTEXTS_BYTES as u64);

/// Reason for rejecting a guest's instance block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InstanceError {
    /// The data is shorter than an instance block.
    #[error("the instance block is shorter than 4096 bytes")]
    Short,
    /// USERD is not in VRAM.
    #[error("the channel's USERD is not in VRAM")]
    Userd,
    /// The GPFIFO ring exceeds the host's limit.
    #[error("the channel's GPFIFO ring has 2^{0} entries, more than 2^{max}", max = ramfc::GP_ENTRIES_LOG2_MAX)]
    RingSize(u32),
    /// The directory's target is invalid.
    #[error("the channel's page directory has an invalid target")]
    Directory,
}

/// Fields of a guest's instance block that the host uses, decoded and validated. The host sets all other fields itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestInstance {
    /// USERD address in guest VRAM, a multiple of 4 KiB.
    pub userd: GuestVramAddr,
    /// GPU virtual address of the GPFIFO ring, a multiple of 8 below 2^40.
    pub gp_base: GpuVa,
    /// Log2 of the number of entries in the ring.
    pub gp_entries_log2: u32,
    /// Saved state: index of the entry after the last one consumed. The value is not validated.
    pub gp_get: u32,
    /// Saved state: index of the entry after the last one known to be written. The value is not validated.
    pub gp_put: u32,
    /// Location of the guest's page directory.
    pub directory: Place,
    /// Engine context pointers for PGRAPH, CE0 and CE1, below 2^40. The card gets pointers to the host's images
    /// instead.
    pub contexts: [Option<GpuVa>; 3],
}

impl GuestInstance {
    /// Decodes a copy of a guest's instance block.
    ///
    /// # Errors
    /// Returns an [`InstanceError`] if the block is invalid.
    pub fn parse(bytes: &[u8]) -> Result<Self, InstanceError> {
        if bytes.len() < BLOCK {
            return Err(InstanceError::Short);
        }
        let pair = |low: u64, high: u64| {
            let low = word(bytes, low).ok_or(InstanceError::Short)?;
            let high = word(bytes, high).ok_or(InstanceError::Short)?;
            Ok((low, u64::from(high) << 32 | u64::from(low)))
        };
        let (userd_lo, userd_address) = pair(ramfc::USERD_LO, ramfc::USERD_HI)?;
        if Target::from_bits(userd_lo & TARGET_BITS) != Target::Vram {
            return Err(InstanceError::Userd);
        }
        let (_, gp_base) = pair(ramfc::GP_BASE_LO, ramfc::GP_BASE_HI)?;
        let log2 = word(bytes, ramfc::GP_BASE_HI).ok_or(InstanceError::Short)? >> 16;
        if log2 > ramfc::GP_ENTRIES_LOG2_MAX {
            return Err(InstanceError::RingSize(log2));
        }
        let (directory_lo, directory) = pair(vm::PDB_LO, vm::PDB_HI)?;
        let target = Target::from_bits(directory_lo & TARGET_BITS);
        Ok(Self {
            userd: GuestVramAddr(userd_address & PAGE_MASK),
            gp_base: GpuVa(gp_base & VA_MASK & !7),
            gp_entries_log2: log2,
            gp_get: word(bytes, ramfc::GP_GET).ok_or(InstanceError::Short)?,
            gp_put: word(bytes, ramfc::GP_PUT).ok_or(InstanceError::Short)?,
            directory: Place::new(target, directory & PAGE_MASK).ok_or(InstanceError::Directory)?,
            contexts: CONTEXTS.map(|at| context_at(bytes, at)),
        })
    }

    /// Returns the number of entries in the GPFIFO ring.
    #[must_use]
    pub const fn gp_entries(&self) -> u32 {
        1 << self.gp_entries_log2
    }

    /// Returns the card's instance block. It contains constants, the host's USERD, ring and directory, and the host's
    /// image for each engine with a guest context. The address limit covers all virtual addresses, because the host's
    /// addresses are at the end. The saved PBDMA state is all zeros.
    pub(crate) fn block(&self, span: Span, userd: VramAddr, directory: VramAddr) -> [u8; BLOCK] {
        let mut block = constants(span);
        put_wide(&mut block, ramfc::USERD_LO, userd.0);
        put_wide(&mut block, vm::PDB_LO, directory.0);
        for ((offset, pointer), image) in CONTEXTS.into_iter().zip(self.contexts).zip(image_vas(span)) {
            put_wide(&mut block, offset, context_words(pointer.map(|_| image)));
        }
        block
    }
}

/// Returns an instance block with the host's ring and the fields that are the same for all channels.
pub(crate) fn constants(span: Span) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    for (offset, value) in ramfc::DEFAULTS {
        put(&mut block, offset, value);
    }
    put_wide(&mut block, ramfc::GP_BASE_LO, work_va(span).0 | u64::from(RING_LOG2) << 48);
    put_wide(&mut block, vm::LIMIT_LO, VA_MASK);
    block
}

/// Returns the two dwords of a context pointer, with the low dword first.
pub(crate) fn context_words(pointer: Option<GpuVa>) -> u64 {
    pointer.map_or(0, |va| va.0 | u64::from(context::VALID))
}

/// Returns the context pointers in `bytes`, a copy of the instance block starting at [`CONTEXTS_FIRST`].
pub(crate) fn contexts_in(bytes: &[u8; CONTEXTS_BYTES]) -> [Option<GpuVa>; 3] {
    CONTEXTS.map(|at| context_at(bytes, at.wrapping_sub(CONTEXTS_FIRST)))
}

fn context_at(bytes: &[u8], offset: u64) -> Option<GpuVa> {
    let low = word(bytes, offset)?;
    let high = word(bytes, offset.wrapping_add(4))?;
    // A context is page-aligned, and the low bits of the pointer are flags.
    (low & context::VALID != 0).then_some(GpuVa((u64::from(high) << 32 | u64::from(low)) & PAGE_MASK))
}

pub(crate) fn word(bytes: &[u8], offset: u64) -> Option<u32> {
    let at = usize::try_from(offset).ok()?;
    bytes.get(at..)?.first_chunk().map(|word| u32::from_le_bytes(*word))
}

pub(crate) fn put(block: &mut [u8; BLOCK], offset: u64, value: u32) {
    if let Some(word) = usize::try_from(offset).ok().and_then(|at| block.get_mut(at..)?.first_chunk_mut()) {
        *word = value.to_le_bytes();
    }
}

/// Writes two dwords, with the low dword first, as in all pairs in an instance block.
pub(crate) fn put_wide(block: &mut [u8; BLOCK], offset: u64, value: u64) {
    if let Some(words) = usize::try_from(offset).ok().and_then(|at| block.get_mut(at..)?.first_chunk_mut()) {
        *words = value.to_le_bytes();
    }
}

const _: () = assert!(
    ramfc::USERD_HI == ramfc::USERD_LO + 4
        && ramfc::GP_BASE_HI == ramfc::GP_BASE_LO + 4
        && vm::PDB_HI == vm::PDB_LO + 4
        && vm::LIMIT_HI == vm::LIMIT_LO + 4
);

#[cfg(test)]
mod tests;
