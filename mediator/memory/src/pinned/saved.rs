//! Saved form of host memory slots: their I/O addresses, and the numbers of those with memory. The memory is in a file,
//! which is handed over separately.

use super::{PinnedPool, SEALS};
use crate::ManagerError;
use crate::pages;
use card::{Card, DmaMemory};
use nvspec::addr::Iova;
use rustix::fs::{fcntl_get_seals, fstat};
use saved_state::{Invalid, ascend};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;
use vram::HostAddr;

/// Saved form of a [`PinnedPool`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedSlots {
    /// First I/O address of the slots.
    pub base: u64,
    pub slots: u32,
    /// Numbers of the slots that have memory, in ascending order.
    filled: Vec<u32>,
    /// Numbers of the slots that have memory but no owner.
    kept: Vec<u32>,
}

impl PinnedPool {
    /// Saves the slots. Their contents are in [`PinnedPool::file`].
    pub(crate) fn save(&self) -> SavedSlots {
        let Self {
            card: _,
            base,
            slot_bytes: _,
            slots,
            kept,
            file: _,
            // No slot borrows memory while the card is quiesced.
            borrowed: _,
            handed: _,
        } = self;
        let filled = (0..).zip(slots).filter(|(_, memory)| memory.is_some()).map(|(number, _)| number);
        SavedSlots {
            base: base.0,
            slots: u32::try_from(slots.len()).unwrap_or(u32::MAX),
            filled: filled.collect(),
            kept: kept.iter().map(|number| u32::try_from(*number).unwrap_or(u32::MAX)).collect(),
        }
    }

    /// Restores slots of `slot_bytes` bytes, with their memory in `file`, and maps them for `card`. They must not be
    /// mapped yet. If the result is dropped before [`Self::owned`], the memory is kept.
    ///
    /// # Errors
    /// Returns an error if the saved state is invalid, if the file does not match it, or if the host cannot map the
    /// file.
    pub(crate) fn restored(
        saved: SavedSlots,
        card: Arc<dyn Card>,
        slot_bytes: u64,
        file: Option<File>,
    ) -> Result<Self, ManagerError> {
        let SavedSlots { base, slots: count, filled, kept } = saved;
        let len = u64::from(count)
            .checked_mul(slot_bytes)
            .ok_or_else(|| Invalid::new("the size of host memory overflows"))?;
        let within = |numbers: &[u32]| ascend(numbers) && numbers.iter().all(|number| *number < count);
        let sound = within(&filled) && within(&kept) && kept.iter().all(|number| filled.binary_search(number).is_ok());
        Invalid::unless(sound, || "nonexistent host memory slots have memory".into())?;
        let file = file.map(|file| checked(file, len)).transpose()?;
        Invalid::unless(file.is_some() == (count != 0), || {
            format!("{count} slots of host memory come with a file: {}", file.is_some())
        })?;
        let kept = kept.into_iter().map(|number| number as usize).collect();
        let slots = (0..count).map(|_| None).collect();
        let (base, borrowed) = (Iova(base), BTreeMap::new());
        let mut pool = Self { card, base, slot_bytes, slots, kept, file, borrowed, handed: true };
        for number in filled {
            let Some(file) = &pool.file else { break };
            let (offset, bytes) = (u64::from(number) * slot_bytes, slot_bytes as usize);
            let region = pages::mapped(file, offset, bytes)?;
            pool.give(HostAddr(offset), DmaMemory::new(Arc::new(region), 0, bytes, true)?)?;
        }
        Ok(pool)
    }

    /// Makes this process the owner of the slots and their memory.
    pub fn owned(&mut self) {
        self.handed = false;
    }

    /// Returns true if the slot at `address` has memory.
    pub fn has(&self, address: HostAddr) -> bool {
        let number = usize::try_from(address.0 / self.slot_bytes).unwrap_or(usize::MAX);
        self.slots.get(number).is_some_and(Option::is_some)
    }
}

/// Returns the file if it has the given length and its length is sealed.
fn checked(file: File, len: u64) -> Result<Arc<File>, ManagerError> {
    let look = |error| ManagerError::host("cannot read the state of a host memory file", error);
    let (seals, bytes) = (fcntl_get_seals(&file).map_err(look)?, fstat(&file).map_err(look)?.st_size);
    Invalid::unless(seals.contains(SEALS) && u64::try_from(bytes) == Ok(len), || {
        format!(
            "host memory of {len:#x} bytes was handed over in a file of {bytes:#x}, or in one that can be truncated"
        )
    })?;
    Ok(Arc::new(file))
}
