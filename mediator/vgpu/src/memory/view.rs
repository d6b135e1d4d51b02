//! View of the part of the card's memory that one VM may access. Readers of guest structures, page tables and rings
//! borrow the card once, together with other state of the VM.

use super::grants::Grants;
use super::operands::Names;
use card_manager::{CardVram, ManagerError, Needs, Reader};
use nvspec::addr::{Gpa, GpuVa, GuestVramAddr, Iova, Place, VramAddr};
use nvspec::fifo::ChannelId;
use shadow_pt::{AddressSpaces, Frame, Mapping, NoMemory, SpaceId};
use vram::{PagePool, TenantId};

/// One VM's view of the card. `with` contains additional state for the current task.
pub(crate) struct View<'a, With = ()> {
    vram: &'a mut CardVram,
    grants: &'a Grants,
    with: With,
}

/// A channel's ring, read through the shadow of its address space.
pub(crate) struct Ring<'a> {
    pub(super) vm: TenantId,
    pub(super) shadows: &'a AddressSpaces,
    pub(super) space: SpaceId,
    /// Extracts the addresses to which the work refers, if requested.
    pub(super) names: Option<Names<'a>>,
    /// Determines the engines that the work needs, if requested.
    pub(super) reader: Option<Reader<'a>>,
}

/// Card memory for shadow tables, from the VM's pool.
pub(super) struct Pool<'a> {
    vm: TenantId,
    pool: &'a mut PagePool,
    /// Set if the pool has run out of memory, but may grow later.
    lacks: bool,
}

impl<'a> View<'a> {
    pub(crate) fn new(vram: &'a mut CardVram, grants: &'a Grants) -> Self {
        Self { vram, grants, with: () }
    }
}

impl<'a, With> View<'a, With> {
    pub(super) fn with(vram: &'a mut CardVram, grants: &'a Grants, with: With) -> Self {
        Self { vram, grants, with }
    }

    pub(super) fn grants(&self) -> &'a Grants {
        self.grants
    }

    /// Reads guest memory at a location.
    pub(crate) fn fill(&mut self, place: Place, data: &mut [u8]) -> Option<()> {
        match place {
            Place::Vram(address) => self.grants.read_vram(self.vram, address, data),
            Place::Ram(address) => self.grants.ram_read(address, data).ok(),
        }
    }
}

impl<With> shadow_pt::GuestMemory for View<'_, With> {
    fn read(&mut self, place: Place, data: &mut [u8]) -> Result<(), shadow_pt::Unreadable> {
        self.fill(place, data).ok_or(shadow_pt::Unreadable)
    }
}

impl<With> channels::GuestMemory for View<'_, With> {
    fn read(&mut self, place: Place, data: &mut [u8]) -> Result<(), channels::Unreadable> {
        self.fill(place, data).ok_or(channels::Unreadable)
    }
}

impl<With> channels::Host for View<'_, With> {
    fn read32(&mut self, offset: u32) -> u32 {
        self.vram.memory.read32(offset)
    }

    fn write32(&mut self, offset: u32, value: u32) {
        self.vram.memory.write32(offset, value);
    }

    fn vram_read(&mut self, address: VramAddr, data: &mut [u8]) {
        self.vram.memory.vram_read(address, data);
    }

    fn vram_write(&mut self, address: VramAddr, data: &[u8]) {
        self.vram.memory.vram_write(address, data);
    }

    fn vram_flush(&mut self) {
        self.vram.memory.vram_flush();
    }

    fn userd_read(&mut self, channel: ChannelId, offset: u64) -> u32 {
        self.vram.memory.userd_read(channel, offset)
    }

    fn userd_write(&mut self, channel: ChannelId, offset: u64, value: u32) {
        self.vram.memory.userd_write(channel, offset, value);
    }
}

impl View<'_, Ring<'_>> {
    /// Returns the engines that the work pulled so far needs, or [`Needs::Graphics`] if they were not determined.
    pub(super) fn needs(self) -> Needs {
        self.with.reader.map_or(Needs::Graphics, Reader::needs)
    }
}

impl channels::GuestRing for View<'_, Ring<'_>> {
    fn read(&mut self, va: GpuVa, data: &mut [u8]) -> Result<(), channels::Unmapped> {
        let mut done = 0;
        while done < data.len() {
            let at = GpuVa(va.0 + done as u64);
            let Ring { shadows, space, .. } = &self.with;
            let Mapping { place, bytes, .. } = shadows.resolve(*space, at).ok_or(channels::Unmapped)?;
            let run = bytes.min((data.len() - done) as u64) as usize;
            self.fill(place, &mut data[done..done + run]).ok_or(channels::Unmapped)?;
            done += run;
        }
        Ok(())
    }

    fn taken(&mut self, va: GpuVa, dwords: u32) {
        if let Some(mut reader) = self.with.reader.take() {
            reader.range(dwords, |first, bytes| {
                let at = GpuVa(va.0.checked_add(first.checked_mul(4)? as u64)?);
                channels::GuestRing::read(self, at, bytes).ok()
            });
            self.with.reader = Some(reader);
        }
        let Some(mut names) = self.with.names.take() else { return };
        let mut bytes = vec![0; names.words(dwords) * 4];
        // Ignore unmapped addresses, which the card itself reports.
        if channels::GuestRing::read(self, va, &mut bytes).is_ok() {
            let Self { vram, with: Ring { vm, shadows, space, .. }, .. } = self;
            names.each(&bytes, vram.chunks.chunk_bytes(), |at, len| {
                if let Some(Mapping { place: Place::Vram(address), .. }) = shadows.resolve(*space, at) {
                    vram.named(*vm, GuestVramAddr(address.0), len);
                }
            });
        }
        self.with.names = Some(names);
    }
}

impl<'a> Pool<'a> {
    pub(super) fn new(vm: TenantId, pool: &'a mut PagePool) -> Self {
        Self { vm, pool, lacks: false }
    }
}

impl View<'_, Pool<'_>> {
    /// Returns the error for a failed allocation.
    pub(super) fn refused(&self, error: NoMemory) -> ManagerError {
        if self.with.lacks { ManagerError::Lacking } else { error.into() }
    }

    /// Flushes an address space from the card's TLBs.
    pub(super) fn invalidate(&mut self, directory: VramAddr) -> Result<(), ManagerError> {
        Ok(self.vram.memory.invalidate(directory, false)?)
    }
}

impl shadow_pt::Frames for View<'_, Pool<'_>> {
    fn vram(&mut self, address: GuestVramAddr, len: u64) -> Option<Frame> {
        self.grants.vram_frame(self.vram, address, len)
    }

    fn ram(&mut self, address: Gpa, len: u64, write: bool) -> Option<Iova> {
        self.grants.ram_frame(address, len, write)
    }
}

impl shadow_pt::ShadowMemory for View<'_, Pool<'_>> {
    fn alloc(&mut self, bytes: u64) -> Option<VramAddr> {
        let found = self.vram.alloc_for(self.with.vm, self.with.pool, bytes);
        self.with.lacks |= matches!(found, Err(ManagerError::Lacking));
        found.ok()
    }

    fn free(&mut self, address: VramAddr, _bytes: u64) {
        self.with.pool.free(VramAddr(address.0));
    }

    fn write(&mut self, address: VramAddr, data: &[u8]) {
        if let Err(error) = self.vram.memory.write(address, data) {
            tracing::error!(%error, "cannot write a shadow page table");
        }
    }
}
