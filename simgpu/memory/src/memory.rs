//! The card's memory bus and its memory: VRAM, and the host memory mapped for the card.
//!
//! Modules:
//! - [`Vram`]: a single sparse mapping
//! - [`Sysmem`]: the table of I/O virtual addresses
//! - [`Memory`]: both kinds of memory under one address type
//! - [`View`]: the same memory with the table locked, for series of accesses
//! - `posted`: posted writes in flight
//! - `profile`: the engines' access counts per memory block; [`Touches`]: the order of their accesses
//!
//! All accesses are volatile, because other processes and CPUs write to the same memory. Aligned 32-bit and 64-bit
//! accesses are atomic, as semaphores and page table entries require.
//!
//! An access without a memory target is not an MMU fault: as on a real bus, a read returns all ones and a write is
//! lost. The typed functions return [`BusError`]. Callers that ignore the error count it with [`Memory::count_lost`].
//!
//! Not modelled: caches (VRAM and host memory are always coherent), peer memory, and ECC.

mod log;
mod posted;
mod profile;
mod sysmem;
#[cfg(test)]
mod tests;
mod vram;

use card::AccessCounts;
use log::Log;
use nvspec::addr::{Iova, SMALL_PAGE, Target, VramAddr};
use nvspec::mmu::{PteAperture, TableTarget};
use posted::Posted;
use profile::Profile;
use std::cell::OnceCell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use vm_memory::{Bytes, VolatileMemory, VolatileSlice};

pub use log::{Touched, Touches};
pub use sysmem::{Sysmem, SysmemView};
pub use vram::{VRAM_MAX, VRAM_MIN, Vram, VramError};

/// A byte address on the card's memory bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum BusAddr {
    /// An address in VRAM.
    Vram(VramAddr),
    /// I/O virtual address of host memory.
    System(Iova),
}

impl BusAddr {
    /// Returns the bus address in an instance block, directory or runlist register, or `None` for a reserved target.
    #[must_use]
    pub const fn from_target(target: Target, address: u64) -> Option<Self> {
        match target {
            Target::Vram => Some(Self::Vram(VramAddr(address))),
            Target::Reserved => None,
            Target::SysCoherent | Target::SysNonCoherent => Some(Self::System(Iova(address))),
        }
    }

    /// Returns the bus address given by a directory entry, or `None` if the entry has no table.
    #[must_use]
    pub const fn from_table(target: TableTarget, address: u64) -> Option<Self> {
        match target {
            TableTarget::None => None,
            TableTarget::Vram => Some(Self::Vram(VramAddr(address))),
            TableTarget::SysCoherent | TableTarget::SysNonCoherent => Some(Self::System(Iova(address))),
        }
    }

    /// Returns the bus address given by a page table entry, or `None` for peer memory.
    #[must_use]
    pub const fn from_aperture(aperture: PteAperture, address: u64) -> Option<Self> {
        match aperture {
            PteAperture::Vram => Some(Self::Vram(VramAddr(address))),
            PteAperture::Peer => None,
            PteAperture::SysCoherent | PteAperture::SysNonCoherent => Some(Self::System(Iova(address))),
        }
    }

    /// Returns true if the address is a multiple of 4 KiB.
    #[must_use]
    pub const fn is_page(self) -> bool {
        match self {
            Self::Vram(address) => address.0.is_multiple_of(SMALL_PAGE),
            Self::System(address) => address.0.is_multiple_of(SMALL_PAGE),
        }
    }

    /// Returns the address plus `bytes`, with wrap-around.
    #[must_use]
    pub const fn offset(self, bytes: u64) -> Self {
        match self {
            Self::Vram(address) => Self::Vram(address.offset(bytes)),
            Self::System(address) => Self::System(address.offset(bytes)),
        }
    }
}

impl std::fmt::Display for BusAddr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Vram(address) => write!(f, "VRAM {address}"),
            Self::System(address) => write!(f, "system memory {address}"),
        }
    }
}

/// A bus access without a memory target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BusError {
    /// Part of the range is beyond the end of VRAM.
    #[error("{len:#x} bytes at VRAM address {address} exceed the card's {size:#x} bytes")]
    BeyondVram {
        /// Start address of the access.
        address: VramAddr,
        /// Length of the access in bytes.
        len: u64,
        /// Size of VRAM in bytes.
        size: u64,
    },
    /// No host memory is mapped at this address.
    #[error("no host memory is mapped for the card at I/O virtual address {iova}")]
    Unmapped {
        /// Address of the first unmapped byte.
        iova: Iova,
    },
    /// The host memory at this address is mapped read-only.
    #[error("host memory at I/O virtual address {iova} is read-only for the card")]
    ReadOnly {
        /// Address of the first read-only byte.
        iova: Iova,
    },
}

/// The card's VRAM and the host memory mapped for it.
#[derive(Debug)]
pub struct Memory {
    /// The card's VRAM.
    pub vram: Vram,
    /// The host memory mapped for the card.
    pub sysmem: Sysmem,
    lost: AtomicU64,
    posted: Posted,
    profile: Option<(Profile, Log)>,
}

impl Memory {
    /// Creates a bus with `vram` and no host memory.
    #[must_use]
    pub fn new(vram: Vram) -> Self {
        Self { vram, sysmem: Sysmem::new(), lost: AtomicU64::new(0), posted: Posted::default(), profile: None }
    }

    /// Creates a bus like [`Self::new`] that also counts the engines' accesses per memory block.
    #[must_use]
    pub fn profiled(vram: Vram) -> Self {
        let profile = Some((Profile::new(vram.size()), Log::default()));
        Self { profile, ..Self::new(vram) }
    }

    /// Returns the engines' access counts per memory block since the last reset, or `None` if counting is disabled.
    #[must_use]
    pub fn access_counts(&self, reset: bool) -> Option<AccessCounts> {
        self.profile.as_ref().map(|(profile, _)| profile.read(reset))
    }

    /// Returns true if access counting is enabled.
    pub(crate) fn is_profiled(&self) -> bool {
        self.profile.is_some()
    }

    /// Returns the engines' accesses since the last call, in order. The first call starts the recording.
    #[must_use]
    pub fn take_touches(&self) -> Vec<Touches> {
        self.profile.as_ref().map_or_else(Vec::new, |(_, log)| log.take())
    }

    /// Counts bytes that an engine read from the page at `address`, or wrote to it if `write` is true.
    pub(crate) fn count_moved(&self, address: BusAddr, bytes: u64, write: bool) {
        if let Some((profile, log)) = &self.profile {
            profile.add(address, bytes);
            log.add(address, bytes, write);
        }
    }

    /// Marks the end of a step of an engine's work.
    pub(crate) fn end_touches(&self) {
        if let Some((_, log)) = &self.profile {
            log.end();
        }
    }

    /// If `hold` is true, keeps writes to host memory in flight until a read from host memory, a flush or a full buffer
    /// completes them. Otherwise, writes arrive immediately.
    pub fn hold_posted(&self, hold: bool) {
        self.posted.hold(hold);
        if !hold {
            self.push_all();
        }
    }

    /// Completes all writes to host memory that are in flight.
    pub fn push_posted(&self) {
        if self.posted.is_held() {
            self.push_all();
        }
    }

    fn push_all(&self) {
        let table = self.sysmem.view();
        (0..posted::PATHS).for_each(|way| self.posted.push(way, self, &table));
    }

    /// Drops all writes to host memory that are in flight.
    pub fn drop_posted(&self) {
        self.posted.clear();
    }

    /// Returns a view for a series of accesses. No mapping can be removed between the view's first access to host
    /// memory and its drop. While the view exists, do not call other functions of this `Memory` on the same thread.
    #[must_use]
    pub fn view(&self) -> View<'_> {
        View { memory: self, sysmem: OnceCell::new(), way: 0 }
    }

    /// Returns a view for shader accesses, which have a separate path to host memory.
    pub(crate) fn view_of_shaders(&self) -> View<'_> {
        View { way: 1, ..self.view() }
    }

    /// Reads the bytes at `address` into `data`.
    ///
    /// # Errors
    /// Returns [`BusError`] if part of the range has no memory target. `data` may then be partially filled.
    pub fn read(&self, address: BusAddr, data: &mut [u8]) -> Result<(), BusError> {
        match address {
            BusAddr::Vram(address) => self.vram.read(address, data),
            BusAddr::System(_) => self.view().read(address, data),
        }
    }

    /// Writes `data` to `address`.
    ///
    /// # Errors
    /// Returns [`BusError`] if part of the range has no memory target. Earlier bytes may have been written.
    pub fn write(&self, address: BusAddr, data: &[u8]) -> Result<(), BusError> {
        match address {
            BusAddr::Vram(address) => self.vram.write(address, data),
            BusAddr::System(_) => self.view().write(address, data),
        }
    }

    /// Reads 32 bits, in a single access if aligned.
    ///
    /// # Errors
    /// Returns [`BusError`] if the address has no memory target.
    pub fn read32(&self, address: BusAddr) -> Result<u32, BusError> {
        match address {
            BusAddr::Vram(address) => self.vram.read32(address),
            BusAddr::System(_) => self.view().read32(address),
        }
    }

    /// Writes 32 bits, in a single access if aligned.
    ///
    /// # Errors
    /// Returns [`BusError`] if the address has no memory target.
    pub fn write32(&self, address: BusAddr, value: u32) -> Result<(), BusError> {
        match address {
            BusAddr::Vram(address) => self.vram.write32(address, value),
            BusAddr::System(_) => self.view().write32(address, value),
        }
    }

    /// Reads 64 bits, in a single access if aligned.
    ///
    /// # Errors
    /// Returns [`BusError`] if the address has no memory target.
    pub fn read64(&self, address: BusAddr) -> Result<u64, BusError> {
        self.view().read64(address)
    }

    /// Copies `len` bytes in ascending address order.
    ///
    /// # Errors
    /// Returns [`BusError`] if part of either range has no memory target. Earlier bytes may have been copied.
    pub fn copy(&self, from: BusAddr, to: BusAddr, len: u64) -> Result<(), BusError> {
        self.view().copy(from, to, len)
    }

    /// Counts an access without a memory target.
    pub fn count_lost(&self, error: BusError) {
        self.lost.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(%error, "bus access lost");
    }

    /// Restores the number of lost accesses from another process's card.
    pub fn set_lost(&self, lost: u64) {
        self.lost.store(lost, Ordering::Relaxed);
    }

    /// Returns the number of bus accesses without a memory target.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}

/// A view of [`Memory`] that keeps the host memory table locked after its first access to host memory.
#[derive(Debug)]
pub struct View<'a> {
    memory: &'a Memory,
    /// The locked host memory table. It is locked on first use, because most accesses are to VRAM.
    sysmem: OnceCell<SysmemView<'a>>,
    /// Path of this view's writes to host memory.
    way: usize,
}

impl<'a> View<'a> {
    /// Returns the memory that this view accesses.
    #[must_use]
    pub fn memory(&self) -> &'a Memory {
        self.memory
    }

    /// Returns the longest slice that starts at `address`, is within one host mapping, and is at most `len` bytes long.
    /// `len` must not be 0.
    fn piece(&self, address: BusAddr, len: u64, write: bool) -> Result<VolatileSlice<'_, ()>, BusError> {
        match address {
            BusAddr::Vram(address) => self.memory.vram.piece(address, len),
            BusAddr::System(iova) => {
                // Accesses that read memory (reads and atomic operations) must not pass writes in flight.
                self.push_own();
                self.table().piece(iova, len, write)
            }
        }
    }

    fn table(&self) -> &SysmemView<'a> {
        self.sysmem.get_or_init(|| self.memory.sysmem.view())
    }

    /// Completes all writes to host memory that are in flight.
    pub fn push_posted(&self) {
        if self.memory.posted.is_held() {
            (0..posted::PATHS).for_each(|way| self.memory.posted.push(way, self.memory, self.table()));
        }
    }

    /// Completes the writes that are in flight on this view's path.
    fn push_own(&self) {
        if self.memory.posted.is_held() {
            self.memory.posted.push(self.way, self.memory, self.table());
        }
    }

    /// Keeps a write to host memory in flight if posted writes are held. Returns true if the write is now in flight.
    fn post(&self, address: BusAddr, data: &[u8]) -> bool {
        match address {
            BusAddr::System(iova) if self.memory.posted.is_held() => {
                if !self.memory.posted.add(self.way, iova, data) {
                    self.push_own();
                    self.memory.posted.add(self.way, iova, data);
                }
                true
            }
            BusAddr::System(_) | BusAddr::Vram(_) => false,
        }
    }

    /// Reads the bytes at `address` into `data`.
    ///
    /// # Errors
    /// Returns [`BusError`] if part of the range has no memory target. `data` may then be partially filled.
    pub fn read(&self, address: BusAddr, data: &mut [u8]) -> Result<(), BusError> {
        let mut done = 0;
        while done < data.len() {
            let rest = &mut data[done..];
            let piece = self.piece(address.offset(done as u64), rest.len() as u64, false)?;
            done += piece.copy_to(rest);
        }
        Ok(())
    }

    /// Writes `data` to `address`.
    ///
    /// # Errors
    /// Returns [`BusError`] if part of the range has no memory target. Earlier bytes may have been written.
    pub fn write(&self, address: BusAddr, data: &[u8]) -> Result<(), BusError> {
        if self.post(address, data) {
            return Ok(());
        }
        let mut done = 0;
        while done < data.len() {
            let piece = self.piece(address.offset(done as u64), (data.len() - done) as u64, true)?;
            piece.copy_from(&data[done..]);
            done += piece.len();
        }
        Ok(())
    }

    /// Reads 32 bits, in a single access if aligned.
    ///
    /// # Errors
    /// Returns [`BusError`] if the address has no memory target.
    pub fn read32(&self, address: BusAddr) -> Result<u32, BusError> {
        let piece = self.piece(address, 4, false)?;
        if let Ok(value) = piece.load::<u32>(0, Ordering::Acquire) {
            return Ok(value);
        }
        let mut bytes = [0; 4];
        self.read(address, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Writes 32 bits, in a single access if aligned.
    ///
    /// # Errors
    /// Returns [`BusError`] if the address has no memory target.
    pub fn write32(&self, address: BusAddr, value: u32) -> Result<(), BusError> {
        if self.post(address, &value.to_le_bytes()) {
            return Ok(());
        }
        let piece = self.piece(address, 4, true)?;
        if piece.store(value, 0, Ordering::Release).is_ok() {
            return Ok(());
        }
        self.write(address, &value.to_le_bytes())
    }

    /// Reads 64 bits, in a single access if aligned.
    ///
    /// # Errors
    /// Returns [`BusError`] if the address has no memory target.
    pub fn read64(&self, address: BusAddr) -> Result<u64, BusError> {
        let piece = self.piece(address, 8, false)?;
        if let Ok(value) = piece.load::<u64>(0, Ordering::Acquire) {
            return Ok(value);
        }
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Replaces 32 bits with the result of `update`, in a single access if aligned. Returns the old value.
    ///
    /// # Errors
    /// Returns [`BusError`] if the address has no memory target.
    pub fn update32(&self, address: BusAddr, update: impl Fn(u32) -> u32) -> Result<u32, BusError> {
        let piece = self.piece(address, 4, true)?;
        if let Ok(word) = piece.get_atomic_ref::<AtomicU32>(0) {
            let result = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| Some(update(old)));
            return Ok(result.unwrap_or_else(|old| old));
        }
        let old = self.read32(address)?;
        self.write32(address, update(old))?;
        Ok(old)
    }

    /// Replaces 64 bits with the result of `update`, in a single access if aligned. Returns the old value.
    ///
    /// # Errors
    /// Returns [`BusError`] if the address has no memory target.
    pub fn update64(&self, address: BusAddr, update: impl Fn(u64) -> u64) -> Result<u64, BusError> {
        let piece = self.piece(address, 8, true)?;
        if let Ok(word) = piece.get_atomic_ref::<AtomicU64>(0) {
            let result = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| Some(update(old)));
            return Ok(result.unwrap_or_else(|old| old));
        }
        let old = self.read64(address)?;
        self.write(address, &update(old).to_le_bytes())?;
        Ok(old)
    }

    /// Copies `len` bytes in ascending address order. If the ranges overlap, the copy reads bytes that it has already
    /// written.
    ///
    /// # Errors
    /// Returns [`BusError`] if part of either range has no memory target. Earlier bytes may have been copied.
    pub fn copy(&self, from: BusAddr, to: BusAddr, len: u64) -> Result<(), BusError> {
        let mut done = 0;
        if matches!(to, BusAddr::System(_)) && self.memory.posted.is_held() {
            let mut piece = [0; posted::MAX_WRITE_BYTES];
            while done < len {
                let part = &mut piece[..(len - done).min(posted::MAX_WRITE_BYTES as u64) as usize];
                self.read(from.offset(done), part)?;
                self.post(to.offset(done), part);
                done += part.len() as u64;
            }
            return Ok(());
        }
        while done < len {
            let source = self.piece(from.offset(done), len - done, false)?;
            let target = self.piece(to.offset(done), len - done, true)?;
            done += copy_ascending(&source, &target) as u64;
        }
        Ok(())
    }
}

/// Copies bytes in ascending order, up to the length of the shorter slice. Returns the number of copied bytes.
fn copy_ascending(source: &VolatileSlice<'_, ()>, target: &VolatileSlice<'_, ()>) -> usize {
    let len = source.len().min(target.len());
    let (first, second) = (source.ptr_guard().as_ptr() as usize, target.ptr_guard().as_ptr() as usize);
    let distance = second.wrapping_sub(first);
    if distance == 0 {
        return len;
    }
    // The ranges do not overlap, or the target starts below the source, so a plain ascending copy is correct.
    if distance >= len {
        if let Ok(part) = source.subslice(0, len) {
            part.copy_to_volatile_slice(*target);
        }
        return len;
    }
    // The target starts within the source, so the first `distance` bytes repeat. The copied length is a multiple of
    // this period, so the next copy may cover all data before it.
    let mut done = 0;
    while done < len {
        let step = (done + distance).min(len - done);
        let (Ok(part), Ok(rest)) = (source.subslice(0, step), target.subslice(done, step)) else { break };
        part.copy_to_volatile_slice(rest);
        done += step;
    }
    len
}
