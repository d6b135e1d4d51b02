//! Access sessions of one address space.
//!
//! Work is charged by the number of bytes transferred, so code that works for a channel counts its accesses
//! ([`Session::count`] and the `counted` functions). Copies always count their accesses. Counting only adds to the
//! count of the most recent translation. When this translation is replaced, its count is attributed to VRAM or system
//! memory.

use super::tlb::TlbEntry;
use super::walk::{check, place, walk};
use super::{Access, AddressSpace, Client, Mmu, MmuFault, TlbKey, Translation};
use crate::memory::{BusAddr, Memory, View};
use nvspec::addr::GpuVa;
use nvspec::mmu::fault;
use parking_lot::RwLockReadGuard;

/// A copy that faulted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyFault {
    /// Number of bytes copied before the fault.
    pub copied: u64,
    /// Fault of the failed access.
    pub fault: MmuFault,
}

/// Number of pages that a copy translates ahead.
const PAGES_AT_ONCE: usize = 64;
/// Number of runs that a copy plans ahead.
const PIECES_AT_ONCE: usize = 8;

/// A run of bytes that is contiguous on both sides of a copy.
#[derive(Clone, Copy, Debug)]
struct Piece {
    from: BusAddr,
    to: BusAddr,
    len: u64,
}

/// The next runs of a copy.
#[derive(Debug)]
struct Plan {
    pieces: [Piece; PIECES_AT_ONCE],
    count: usize,
}

impl Default for Plan {
    fn default() -> Self {
        let nowhere = BusAddr::Vram(nvspec::addr::VramAddr(0));
        Self { pieces: [Piece { from: nowhere, to: nowhere, len: 0 }; PIECES_AT_ONCE], count: 0 }
    }
}

impl Plan {
    /// Adds a run, or merges it with the last run if they are adjacent on both sides. Returns false if the plan is
    /// full.
    fn add(&mut self, piece: Piece) -> bool {
        if let Some(last) = self.count.checked_sub(1).map(|last| &mut self.pieces[last])
            && last.from.offset(last.len) == piece.from
            && last.to.offset(last.len) == piece.to
        {
            last.len += piece.len;
            return true;
        }
        let Some(free) = self.pieces.get_mut(self.count) else { return false };
        *free = piece;
        self.count += 1;
        true
    }
}

/// The most recent translation in one direction, valid for the addresses `start..end`, which are in one page.
#[derive(Clone, Copy, Debug)]
struct Recent {
    start: u64,
    end: u64,
    address: BusAddr,
    kind: u8,
    /// Number of bytes transferred through this translation but not yet attributed to a memory.
    moved: u64,
    /// Set if the count must be attributed to a memory.
    sorted: bool,
}

impl Recent {
    fn place(&self, va: GpuVa) -> Option<Translation> {
        (self.start..self.end).contains(&va.0).then(|| Translation {
            address: self.address.offset(va.0 - self.start),
            bytes: self.end - va.0,
            kind: self.kind,
        })
    }
}

const NO_RECENT: Recent =
    Recent { start: 0, end: 0, address: BusAddr::Vram(nvspec::addr::VramAddr(0)), kind: 0, moved: 0, sorted: false };

/// An access session. Flushes and removals of host memory mappings wait until it is dropped.
#[derive(Debug)]
pub struct Session<'a> {
    mmu: &'a Mmu,
    space: &'a AddressSpace,
    access: Access,
    view: View<'a>,
    reads: Recent,
    writes: Recent,
    /// Number of bytes transferred to or from system memory.
    bus_bytes: u64,
    /// Set if bytes in VRAM must also be counted.
    profiled: bool,
    _gate: RwLockReadGuard<'a, ()>,
}

impl<'a> Session<'a> {
    pub(super) fn new(mmu: &'a Mmu, memory: &'a Memory, space: &'a AddressSpace, access: Access) -> Self {
        let gate = mmu.gate.read();
        let view = if access.client == Client::Gpc { memory.view_of_shaders() } else { memory.view() };
        let (reads, writes) = (NO_RECENT, NO_RECENT);
        let profiled = memory.is_profiled();
        Self { mmu, space, access, view, reads, writes, bus_bytes: 0, profiled, _gate: gate }
    }

    /// Counts bytes as transferred by the last read, or by the last write if `write` is true. An access to several
    /// pages is attributed to the last page.
    pub fn count(&mut self, write: bool, bytes: u64) {
        let recent = if write { &mut self.writes } else { &mut self.reads };
        recent.moved += bytes;
    }

    /// Returns the number of bytes transferred to or from system memory since the last call. Bytes transferred in both
    /// directions count twice. Must be called at the end of the session, or the counts of the last pages are lost.
    pub fn take_bus_bytes(&mut self) -> u64 {
        self.sort(false);
        self.sort(true);
        self.view.memory().end_touches();
        std::mem::take(&mut self.bus_bytes)
    }

    /// Attributes the bytes counted for a translation to VRAM or to system memory.
    fn sort(&mut self, write: bool) {
        let recent = if write { &mut self.writes } else { &mut self.reads };
        // Fast path: the target is VRAM, and no profile is active.
        if !recent.sorted || recent.moved == 0 {
            return;
        }
        let (address, moved) = (recent.address, std::mem::take(&mut recent.moved));
        if let BusAddr::System(_) = address {
            self.bus_bytes += moved;
        }
        self.view.memory().count_moved(address, moved, write);
    }

    /// Completes all writes to host memory that are in flight.
    pub fn push_posted(&self) {
        self.view.push_posted();
    }

    /// Translates one address for a read or a write.
    ///
    /// # Errors
    /// Returns [`MmuFault`] if the page is inaccessible.
    pub fn translate(&mut self, va: GpuVa, write: bool) -> Result<Translation, MmuFault> {
        let recent = if write { &self.writes } else { &self.reads };
        if let Some(translation) = recent.place(va) {
            return Ok(translation);
        }
        let entry = self.entry(va, write)?;
        let fail = |reason| MmuFault { reason, va, write };
        check(entry.pte, write, self.access.privileged).map_err(fail)?;
        // GUESS: this reason was later named "unsupported aperture". The card has no peers.
        let (address, to_end) = place(entry, va).ok_or(fail(fault::COMPRESSED_SYSRAM))?;
        // The address space limit may be within the page.
        let bytes = to_end.min((self.space.limit.0 - va.0).saturating_add(1));
        self.sort(write);
        let sorted = self.profiled || matches!(address, BusAddr::System(_));
        let recent = Recent { start: va.0, end: va.0 + bytes, address, kind: entry.pte.kind(), moved: 0, sorted };
        if write {
            self.writes = recent;
        } else {
            self.reads = recent;
        }
        Ok(Translation { address, bytes, kind: recent.kind })
    }

    fn entry(&self, va: GpuVa, write: bool) -> Result<TlbEntry, MmuFault> {
        // The limit is a property of the channel, not of the directory, so cached pages are also checked.
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

    /// Reads the bytes at `va` into `data`. Bytes without a memory target read as 0xff.
    ///
    /// # Errors
    /// Returns [`MmuFault`] if a page is inaccessible. `data` may then be partially filled.
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

    /// Writes `data` to `va`. Writes without a memory target are lost.
    ///
    /// # Errors
    /// Returns [`MmuFault`] if a page is inaccessible. The bytes before that page have then been written.
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

    /// Calls [`Self::read`], and counts the bytes as transferred.
    ///
    /// # Errors
    /// Returns [`MmuFault`] if a page is inaccessible. `data` may then be partially filled, and the filled part is
    /// counted.
    pub fn read_counted(&mut self, va: GpuVa, data: &mut [u8]) -> Result<(), MmuFault> {
        let mut done = 0;
        while done < data.len() {
            let va = va.offset(done as u64);
            let len = self.translate(va, false)?.bytes.min((data.len() - done) as u64) as usize;
            self.read(va, &mut data[done..done + len])?;
            self.count(false, len as u64);
            done += len;
        }
        Ok(())
    }

    /// Calls [`Self::write`], and counts the bytes as transferred.
    ///
    /// # Errors
    /// Returns [`MmuFault`] if a page is inaccessible. The bytes before that page have then been written and counted.
    pub fn write_counted(&mut self, va: GpuVa, data: &[u8]) -> Result<(), MmuFault> {
        let mut done = 0;
        while done < data.len() {
            let va = va.offset(done as u64);
            let len = self.translate(va, true)?.bytes.min((data.len() - done) as u64) as usize;
            self.write(va, &data[done..done + len])?;
            self.count(true, len as u64);
            done += len;
        }
        Ok(())
    }

    /// Reads 32 bits, in a single access if aligned.
    ///
    /// # Errors
    /// Returns [`MmuFault`] if the page is inaccessible.
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

    /// Writes 32 bits, in a single access if aligned.
    ///
    /// # Errors
    /// Returns [`MmuFault`] if the page is inaccessible.
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

    /// Replaces 32 aligned bits with the result of `update` in a single access. Returns the old value.
    ///
    /// # Errors
    /// Returns [`MmuFault`] if the page is inaccessible.
    pub fn update32(&mut self, va: GpuVa, update: impl Fn(u32) -> u32) -> Result<u32, MmuFault> {
        let Translation { address, .. } = self.translate(va, true)?;
        Ok(self.view.update32(address, update).unwrap_or_else(|error| {
            self.view.memory().count_lost(error);
            u32::MAX
        }))
    }

    /// Replaces 64 aligned bits with the result of `update` in a single access. Returns the old value.
    ///
    /// # Errors
    /// Returns [`MmuFault`] if the page is inaccessible.
    pub fn update64(&mut self, va: GpuVa, update: impl Fn(u64) -> u64) -> Result<u64, MmuFault> {
        let Translation { address, .. } = self.translate(va, true)?;
        Ok(self.view.update64(address, update).unwrap_or_else(|error| {
            self.view.memory().count_lost(error);
            u64::MAX
        }))
    }

    /// Copies `len` bytes in ascending address order, and counts them on both sides. Reads without a memory target
    /// return all ones, and writes without one are lost.
    ///
    /// # Errors
    /// Returns [`CopyFault`] with the number of bytes already copied. In each run, the source is accessed before the
    /// destination.
    pub fn copy(&mut self, from: GpuVa, to: GpuVa, len: u64) -> Result<(), CopyFault> {
        let mut copied = 0;
        if let Some(piece) = self.short_copy(from, to, len) {
            self.count(false, len);
            self.count(true, len);
            self.copy_piece(&piece);
            return Ok(());
        }
        while copied < len {
            let mut plan = Plan::default();
            let fault = self.plan(&mut plan, from.offset(copied), to.offset(copied), len - copied).err();
            for piece in &plan.pieces[..plan.count] {
                self.copy_piece(piece);
                copied += piece.len;
            }
            if let Some(fault) = fault {
                return Err(CopyFault { copied, fault });
            }
        }
        Ok(())
    }

    /// Returns the copy as a single run if source and target are within the most recently used pages, as is usual for a
    /// block row or a short line.
    fn short_copy(&self, from: GpuVa, to: GpuVa, len: u64) -> Option<Piece> {
        let (source, target) = (self.reads.place(from)?, self.writes.place(to)?);
        (source.bytes >= len && target.bytes >= len).then_some(Piece { from: source.address, to: target.address, len })
    }

    /// Translates the pages of a copy before its first access. Acquiring a lock between accesses would wait for earlier
    /// stores.
    fn plan(&mut self, plan: &mut Plan, from: GpuVa, to: GpuVa, len: u64) -> Result<(), MmuFault> {
        let mut planned = 0;
        for _ in 0..PAGES_AT_ONCE {
            if planned == len {
                break;
            }
            let source = self.translate(from.offset(planned), false)?;
            let target = self.translate(to.offset(planned), true)?;
            let bytes = source.bytes.min(target.bytes).min(len - planned);
            if !plan.add(Piece { from: source.address, to: target.address, len: bytes }) {
                break;
            }
            // Copy the planned runs even if a later page faults.
            self.count(false, bytes);
            self.count(true, bytes);
            planned += bytes;
        }
        Ok(())
    }

    fn copy_piece(&self, piece: &Piece) {
        if let Err(error) = self.view.copy(piece.from, piece.to, piece.len) {
            self.view.memory().count_lost(error);
            self.copy_over_a_hole(piece.from, piece.to, piece.len);
        }
    }

    /// Copies a run that is only partly backed by memory, 256 bytes at a time. Chunks that cannot be read are copied as
    /// 0xff, and chunks that cannot be written are lost. This is the slow path.
    #[cold]
    fn copy_over_a_hole(&self, from: BusAddr, to: BusAddr, len: u64) {
        let mut buffer = [0; 256];
        let mut done = 0;
        while done < len {
            let part = &mut buffer[..(len - done).min(256) as usize];
            if self.view.read(from.offset(done), part).is_err() {
                part.fill(0xff);
            }
            // The caller has already counted the lost access.
            let _lost = self.view.write(to.offset(done), part);
            done += part.len() as u64;
        }
    }
}
