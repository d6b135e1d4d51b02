//! Accesses in a row through one address space.

use super::tlb::TlbEntry;
use super::walk::{check, place, walk};
use super::{Access, AddressSpace, Mmu, MmuFault, TlbKey, Translation};
use crate::memory::{BusAddr, Memory, View};
use nvspec::addr::GpuVa;
use nvspec::mmu::fault;
use parking_lot::RwLockReadGuard;

/// A copy that faulted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyFault {
    /// Bytes that were copied before.
    pub copied: u64,
    /// What happened then.
    pub fault: MmuFault,
}

/// The last translation in one direction: good for the addresses `start..end`.
#[derive(Clone, Copy, Debug)]
struct Recent {
    start: u64,
    end: u64,
    address: BusAddr,
    kind: u8,
}

const NO_RECENT: Recent = Recent { start: 0, end: 0, address: BusAddr::Vram(nvspec::addr::VramAddr(0)), kind: 0 };

/// Accesses in a row. While it lives, flushes and withdrawals of host memory wait.
#[derive(Debug)]
pub struct Session<'a> {
    mmu: &'a Mmu,
    space: &'a AddressSpace,
    access: Access,
    view: View<'a>,
    reads: Recent,
    writes: Recent,
    _gate: RwLockReadGuard<'a, ()>,
}

impl<'a> Session<'a> {
    pub(super) fn new(mmu: &'a Mmu, memory: &'a Memory, space: &'a AddressSpace, access: Access) -> Self {
        let gate = mmu.gate.read();
        Self { mmu, space, access, view: memory.view(), reads: NO_RECENT, writes: NO_RECENT, _gate: gate }
    }

    /// Translates one address, for reading or for writing.
    ///
    /// # Errors
    /// [`MmuFault`].
    pub fn translate(&mut self, va: GpuVa, write: bool) -> Result<Translation, MmuFault> {
        let recent = if write { &self.writes } else { &self.reads };
        if (recent.start..recent.end).contains(&va.0) {
            let (address, kind) = (recent.address.offset(va.0 - recent.start), recent.kind);
            return Ok(Translation { address, bytes: recent.end - va.0, kind });
        }
        let entry = self.entry(va, write)?;
        let fail = |reason| MmuFault { reason, va, write };
        check(entry.pte, write, self.access.privileged).map_err(fail)?;
        // GUESS: there is no other card, and the reason's later name is "unsupported aperture".
        let (address, to_end) = place(entry, va).ok_or(fail(fault::COMPRESSED_SYSRAM))?;
        // The limit may end within the page.
        let bytes = to_end.min((self.space.limit.0 - va.0).saturating_add(1));
        let recent = Recent { start: va.0, end: va.0 + bytes, address, kind: entry.pte.kind() };
        if write {
            self.writes = recent;
        } else {
            self.reads = recent;
        }
        Ok(Translation { address, bytes, kind: recent.kind })
    }

    fn entry(&self, va: GpuVa, write: bool) -> Result<TlbEntry, MmuFault> {
        // The limit belongs to the channel, not to the directory: it is checked even when the page is known.
        if va.0 > self.space.limit.0 {
            return Err(MmuFault { reason: fault::VA_LIMIT, va, write });
        }
        let tlb = self.mmu.tlb(self.access.client);
        let key = TlbKey { directory: self.space.directory, va };
        if let Some(entry) = tlb.lookup(key) {
            return Ok(entry);
        }
        let entry = walk(&self.view, self.space, va, write)?;
        tlb.insert(key, entry);
        Ok(entry)
    }

    /// Reads bytes. What nothing on the bus answers reads as ones.
    ///
    /// # Errors
    /// [`MmuFault`]; `data` may be filled in part.
    pub fn read(&mut self, va: GpuVa, data: &mut [u8]) -> Result<(), MmuFault> {
        let mut done = 0;
        while done < data.len() {
            let Translation { address, bytes, .. } = self.translate(va.offset(done as u64), false)?;
            let len = bytes.min((data.len() - done) as u64) as usize;
            let part = &mut data[done..done + len];
            if let Err(error) = self.view.read(address, part) {
                self.view.memory().count_lost(error);
                part.fill(0xff);
            }
            done += len;
        }
        Ok(())
    }

    /// Writes bytes. What nothing on the bus answers is lost.
    ///
    /// # Errors
    /// [`MmuFault`]; the bytes before the bad one are written.
    pub fn write(&mut self, va: GpuVa, data: &[u8]) -> Result<(), MmuFault> {
        let mut done = 0;
        while done < data.len() {
            let Translation { address, bytes, .. } = self.translate(va.offset(done as u64), true)?;
            let len = bytes.min((data.len() - done) as u64) as usize;
            if let Err(error) = self.view.write(address, &data[done..done + len]) {
                self.view.memory().count_lost(error);
            }
            done += len;
        }
        Ok(())
    }

    /// Reads 32 bits, in one access when aligned.
    ///
    /// # Errors
    /// [`MmuFault`].
    pub fn read32(&mut self, va: GpuVa) -> Result<u32, MmuFault> {
        let Translation { address, bytes, .. } = self.translate(va, false)?;
        if bytes < 4 {
            let mut data = [0; 4];
            self.read(va, &mut data)?;
            return Ok(u32::from_le_bytes(data));
        }
        Ok(self.view.read32(address).unwrap_or_else(|error| {
            self.view.memory().count_lost(error);
            u32::MAX
        }))
    }

    /// Writes 32 bits, in one access when aligned.
    ///
    /// # Errors
    /// [`MmuFault`].
    pub fn write32(&mut self, va: GpuVa, value: u32) -> Result<(), MmuFault> {
        let Translation { address, bytes, .. } = self.translate(va, true)?;
        if bytes < 4 {
            return self.write(va, &value.to_le_bytes());
        }
        if let Err(error) = self.view.write32(address, value) {
            self.view.memory().count_lost(error);
        }
        Ok(())
    }

    /// Copies `len` bytes, lowest address first. What nothing on the bus answers reads as ones and is lost in writing.
    ///
    /// # Errors
    /// [`CopyFault`], with what was copied before. The source is accessed before the destination.
    pub fn copy(&mut self, from: GpuVa, to: GpuVa, len: u64) -> Result<(), CopyFault> {
        let mut copied = 0;
        while copied < len {
            let fail = |fault| CopyFault { copied, fault };
            let source = self.translate(from.offset(copied), false).map_err(fail)?;
            let target = self.translate(to.offset(copied), true).map_err(fail)?;
            let piece = source.bytes.min(target.bytes).min(len - copied);
            if let Err(error) = self.view.copy(source.address, target.address, piece) {
                self.view.memory().count_lost(error);
                self.copy_over_a_hole(source.address, target.address, piece);
            }
            copied += piece;
        }
        Ok(())
    }

    /// The slow way for a piece of which some is not answered on the bus: what can be read is written where it can be.
    fn copy_over_a_hole(&self, from: BusAddr, to: BusAddr, len: u64) {
        let mut buffer = [0; 256];
        let mut done = 0;
        while done < len {
            let part = &mut buffer[..(len - done).min(256) as usize];
            if self.view.read(from.offset(done), part).is_err() {
                part.fill(0xff);
            }
            // Each loss was counted once, by the caller.
            let _lost = self.view.write(to.offset(done), part);
            done += part.len() as u64;
        }
    }
}
