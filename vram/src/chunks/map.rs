//! One VM's map from guest chunks to the card's.

use super::account::VmSummary;
use crate::GuestAddr;

/// Where each chunk of a guest's VRAM lies. Numbers of chunks are the card's on the right side.
#[derive(Debug)]
pub(super) struct VmMap {
    /// Bytes that the guest has, which the last chunk may exceed.
    bytes: u64,
    /// log2 of a chunk's bytes.
    shift: u32,
    /// The card's chunk for each guest chunk, as long as it has one.
    chunks: Vec<Option<u32>>,
    placed: u32,
    peak: u32,
    reserved: bool,
}

impl VmMap {
    /// A map of `count` chunks of `1 << shift` bytes, the last of which may be cut, without a place for any.
    pub(super) fn new(bytes: u64, count: u32, shift: u32, reserved: bool) -> Self {
        Self { bytes, shift, chunks: vec![None; count as usize], placed: 0, peak: 0, reserved }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn account(&self) -> VmSummary {
        let advertised = self.chunks.len() as u32;
        let reserved = if self.reserved { advertised } else { 0 };
        VmSummary { advertised, reserved, placed: self.placed, peak: self.peak }
    }

    /// Chunks that the VM is sure to get and has not got.
    pub(super) fn owed(&self) -> u32 {
        let account = self.account();
        account.reserved.saturating_sub(account.placed)
    }

    /// The guest chunk that `address` lies in, if the guest has that.
    pub(super) fn index(&self, address: GuestAddr) -> Option<u32> {
        u32::try_from(address.0 >> self.shift).ok().filter(|_| address.0 < self.bytes)
    }

    /// The card's chunk for guest chunk `index`.
    pub(super) fn get(&self, index: u32) -> Option<u32> {
        self.chunks.get(index as usize).copied().flatten()
    }

    /// Gives guest chunk `index`, which the guest has and which has no place, a place.
    pub(super) fn set(&mut self, index: u32, chunk: u32) {
        let old = self.chunks[index as usize].replace(chunk);
        assert_eq!(old, None, "guest chunk {index} has a place already");
        self.placed += 1;
        self.peak = self.peak.max(self.placed);
    }

    /// Takes the place of guest chunk `index` away, and says which it was.
    pub(super) fn take(&mut self, index: u32) -> Option<u32> {
        let chunk = self.chunks.get_mut(index as usize)?.take()?;
        self.placed -= 1;
        Some(chunk)
    }

    /// Takes all places away; they come in the order of guest chunks.
    pub(super) fn take_all(&mut self) -> Vec<u32> {
        self.placed = 0;
        self.chunks.iter_mut().filter_map(Option::take).collect()
    }

    /// How many chunks from guest chunk `index`, which lies in `chunk`, on follow one another on the card too. Never
    /// looks at more than `limit`.
    pub(super) fn neighbours(&self, index: u32, chunk: u32, limit: u64) -> u64 {
        let rest = self.chunks.get(index as usize..).unwrap_or(&[]);
        (0u64..limit).zip(rest).take_while(|&(step, &at)| at.map(u64::from) == Some(u64::from(chunk) + step)).count()
            as u64
    }

    /// How many of the `count` guest chunks from `index` on have a place.
    pub(super) fn placed_among(&self, index: u32, count: u64) -> u64 {
        let rest = self.chunks.get(index as usize..).unwrap_or(&[]);
        (0u64..count).zip(rest).filter(|(_, at)| at.is_some()).count() as u64
    }
}
