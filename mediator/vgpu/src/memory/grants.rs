//! Memory to which a VM's page tables and guest structures may refer, and its current location.

use super::ram::RamMap;
use super::remap::{Home, Remap};
use card_manager::CardVram;
use nvspec::addr::{Gpa, GuestVramAddr, Iova, Place, SMALL_PAGE};
use shadow_pt::Frame;
use std::sync::Arc;
use vmm_glue::Link;
use vmm_glue::memory::MemoryTable;
use vram::{TenantId, VramAddr};

/// Error for guest memory that the guest may not access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotGranted;

/// Memory that belongs to one VM.
pub(crate) struct Grants {
    vm: TenantId,
    /// Size of the VM's VRAM in bytes.
    vram_bytes: u64,
    link: Link,
    ram: RamMap,
    bus_master: bool,
    /// Apertures that the VMM has mapped, and the VRAM under them.
    remap: Remap,
    /// Page tables that the mediator keeps for the guest, at addresses beyond the end of its VRAM.
    tables: Option<pv::Tables>,
}

impl Grants {
    pub(super) fn new(vm: TenantId, link: Link, vram_bytes: u64) -> Self {
        Self { vm, vram_bytes, link, ram: RamMap::default(), bus_master: false, remap: Remap::default(), tables: None }
    }

    /// Restores the grants from the mapped RAM regions, the kept page tables, and the apertures that the VMM maps.
    pub(super) fn restored(
        vm: TenantId,
        link: Link,
        vram_bytes: u64,
        ram: RamMap,
        bus_master: bool,
        tables: Option<pv::Tables>,
        remap: Remap,
    ) -> Self {
        Self { ram, bus_master, tables, remap, ..Self::new(vm, link, vram_bytes) }
    }

    /// Adopts the state of a VM that arrives from another card.
    pub(super) fn receive(&mut self, bus_master: bool, tables: Option<pv::Tables>) {
        (self.bus_master, self.tables) = (bus_master, tables);
    }

    /// Returns the size of the VM's VRAM in bytes.
    pub(crate) fn vram_bytes(&self) -> u64 {
        self.vram_bytes
    }

    /// Returns true if the device may access guest RAM.
    pub(crate) fn bus_master(&self) -> bool {
        self.bus_master
    }

    pub(crate) fn set_bus_master(&mut self, enabled: bool) {
        self.bus_master = enabled;
    }

    /// Makes the server check that the client lends only shared memory.
    pub(super) fn check_shared(&self) {
        self.link.check_shared();
    }

    /// Returns the regions of RAM mapped for the card.
    pub(super) fn ram(&self) -> &RamMap {
        &self.ram
    }

    /// Like [`Self::ram`], but mutable.
    pub(crate) fn ram_mut(&mut self) -> &mut RamMap {
        &mut self.ram
    }

    /// Returns the apertures that the VMM maps.
    pub(crate) fn remap(&self) -> &Remap {
        &self.remap
    }

    /// Like [`Self::remap`], but mutable.
    pub(crate) fn remap_mut(&mut self) -> &mut Remap {
        &mut self.remap
    }

    /// Returns the page tables that the mediator keeps for the guest, if it may keep any.
    pub(crate) fn tables(&self) -> Option<&pv::Tables> {
        self.tables.as_ref()
    }

    /// Like [`Self::tables`], but mutable.
    pub(crate) fn tables_mut(&mut self) -> Option<&mut pv::Tables> {
        self.tables.as_mut()
    }

    /// Permits the mediator to keep up to `bytes` bytes of page tables for the guest.
    pub(crate) fn keep_tables(&mut self, bytes: u64) {
        self.tables = Some(pv::Tables::new(GuestVramAddr(self.vram_bytes), bytes));
    }

    /// Returns the kept directory that the guest has bound to an instance block.
    pub(crate) fn directory_of(&self, instance: Place) -> Option<Place> {
        match instance {
            Place::Vram(at) => self.tables.as_ref()?.directory_of(at).map(Place::Vram),
            Place::Ram(_) => None,
        }
    }

    /// Returns the guest's RAM, or `None` while the device may not access it.
    pub(crate) fn ram_now(&self) -> Option<Arc<MemoryTable>> {
        self.bus_master.then(|| self.link.memory().snapshot())
    }

    /// Reads guest RAM on behalf of the device.
    pub(crate) fn ram_read(&self, address: Gpa, data: &mut [u8]) -> Result<(), NotGranted> {
        // A PCI device must not access memory while bus mastering is disabled.
        if !self.bus_master {
            return Err(NotGranted);
        }
        self.link.memory().read(address.0, data).map_err(|_| NotGranted)
    }

    /// Writes guest RAM on behalf of the device.
    pub(crate) fn ram_write(&self, address: Gpa, data: &[u8]) -> Result<(), NotGranted> {
        if !self.bus_master {
            return Err(NotGranted);
        }
        self.link.memory().write(address.0, data).map_err(|_| NotGranted)
    }

    /// Reads guest VRAM page by page, each page from its current location.
    pub(super) fn read_vram(&self, vram: &mut CardVram, address: GuestVramAddr, data: &mut [u8]) -> Option<()> {
        let Self { vm, remap, tables, .. } = self;
        if let Some(tables) = tables.as_ref().filter(|tables| tables.contains(address)) {
            return tables.read(address, data).ok();
        }
        if remap.pages() == 0 {
            return vram.guest_read(*vm, address, data);
        }
        let mut done = 0;
        while done < data.len() {
            let at = address.checked_add(done as u64)?;
            let within = at.0 % SMALL_PAGE;
            let run = ((SMALL_PAGE - within) as usize).min(data.len() - done);
            let piece = &mut data[done..done + run];
            match remap.home(at.0 / SMALL_PAGE) {
                Some(slot) => remap.read(slot, within, piece),
                None => vram.guest_read(*vm, at, piece)?,
            }
            done += run;
        }
        Some(())
    }

    /// Returns the card's address of a guest VRAM page. Places an unplaced page, because GPU writes are not trapped.
    pub(super) fn vram_frame(&self, vram: &mut CardVram, address: GuestVramAddr, len: u64) -> Option<Frame> {
        match self.remap.whereabouts(address, len) {
            Home::Chunk => match vram.place(self.vm, address, len)? {
                vram::Place::Card(VramAddr(at)) => Some(Frame::Vram(nvspec::addr::VramAddr(at))),
                vram::Place::Host(at) => Some(Frame::Host(vram.pinned.iova(at))),
            },
            Home::Host(iova) => Some(Frame::Host(iova)),
            Home::Apart => None,
        }
    }

    /// Returns the card's address of a guest RAM page.
    pub(super) fn ram_frame(&self, address: Gpa, len: u64, write: bool) -> Option<Iova> {
        if !self.bus_master {
            return None;
        }
        let (iova, run) = self.ram.translate(address, write)?;
        (run >= len).then_some(iova)
    }
}
