//! The mediator's access to VRAM, through BAR1 windows that are remapped on demand.
//!
//! BAR1 is smaller than VRAM, so it is divided into windows of 2 MiB. The first window always maps USERD. Each other
//! window maps an aligned 2 MiB block of VRAM with sixteen large pages. On a miss, the clock algorithm selects a window
//! that was not used recently. Its sixteen entries are rewritten through BAR3, and the card's BAR TLBs are invalidated.
//! BAR3 maps the mediator's own [`Layout`] linearly, so the page tables are always accessible.

use super::CardError;
use super::layout::Layout;
use card::{Aperture, Card};
use nvspec::addr::{Iova, LARGE_PAGE, Target, VramAddr};
use nvspec::fifo::ChannelId;
use nvspec::instance::userd;
use nvspec::mmu::{BARRIER_SHIFT, ENTRY_BYTES, Pte};
use nvspec::regs::{pbus, pfb, pflush, windows::pramin};
use std::sync::Arc;

/// Size of a window in bytes.
pub const WINDOW_BYTES: u64 = 2 << 20;
const ENTRIES_PER_WINDOW: u64 = WINDOW_BYTES / LARGE_PAGE;
const NO_WINDOW: u16 = u16::MAX;
/// Maximum number of polls for the completion of a flush. A flush takes microseconds, and a poll is a bus read of about
/// a microsecond. An unresponsive card therefore delays other callers by 2 ms.
const FLUSH_LOOKS: u32 = 2_000;

/// The mediator's access to VRAM.
pub struct CardMemory {
    card: Arc<dyn Card>,
    layout: Layout,
    vram_bytes: u64,
    /// Window that maps each 2 MiB block of VRAM, or `NO_WINDOW` if none does.
    window_of: Vec<u16>,
    /// VRAM block that each window maps, and a flag that is true if the window was used since the last pass of the
    /// clock hand.
    windows: Vec<Window>,
    hand: usize,
    /// Number of window remaps since startup.
    pub moves: u64,
}

#[derive(Clone, Copy)]
struct Window {
    maps: Option<u64>,
    used: bool,
}

impl CardMemory {
    /// Takes over BAR1 and BAR3 of `card`: writes instance blocks and page tables to `layout` through PRAMIN, and makes
    /// both BARs use them.
    ///
    /// # Errors
    /// Returns an error if the card does not respond to a TLB invalidation.
    pub fn take_over(card: Arc<dyn Card>, layout: Layout, vram_bytes: u64) -> Result<Self, CardError> {
        let mut memory = Self::unmapped(card, layout, vram_bytes);
        memory.pramin_zero(VramAddr(layout.base.0), layout.bootstrap_bytes());
        memory.pramin_write_instance(layout.bar3_instance, layout.bar3_directory);
        memory.pramin_write_directory(layout.bar3_directory, layout.bar3_table);
        for page in 0..layout.bytes() / LARGE_PAGE {
            let entry = large_entry(layout.base.offset(page * LARGE_PAGE));
            memory.pramin_write64(layout.bar3_table.offset(page * ENTRY_BYTES), entry);
        }
        memory.pramin_write_instance(layout.bar1_instance, layout.bar1_directory);
        memory.pramin_write_directory(layout.bar1_directory, layout.bar1_table);
        memory.bind(pbus::BAR3_BLOCK::OFFSET, layout.bar3_instance);
        memory.bind(pbus::BAR1_BLOCK::OFFSET, layout.bar1_instance);
        memory.invalidate(layout.bar3_directory, true)?;
        for page in 0..layout.userd_bytes().div_ceil(LARGE_PAGE) {
            let entry = large_entry(layout.userd.offset(page * LARGE_PAGE));
            memory.write_own(layout.bar1_table.offset(page * ENTRY_BYTES), &entry.to_le_bytes());
        }
        memory.invalidate(layout.bar1_directory, true)?;
        Ok(memory)
    }

    /// Takes over BAR1 and BAR3 of a `card` that a previous process has [taken over](Self::take_over) with the same
    /// layout. Writes nothing until VRAM is accessed.
    #[must_use]
    pub fn resume(card: Arc<dyn Card>, layout: Layout, vram_bytes: u64) -> Self {
        Self::unmapped(card, layout, vram_bytes)
    }

    /// Creates the accessor with all windows unmapped.
    fn unmapped(card: Arc<dyn Card>, layout: Layout, vram_bytes: u64) -> Self {
        let bar1_size = card.identity().bar1_size;
        let slots = bar1_size.min(nvspec::mmu::PDE_SPAN) / WINDOW_BYTES;
        Self {
            card,
            layout,
            vram_bytes,
            window_of: vec![NO_WINDOW; vram_bytes.div_ceil(WINDOW_BYTES) as usize],
            windows: vec![Window { maps: None, used: false }; slots as usize],
            hand: 1,
            moves: 0,
        }
    }

    /// Returns the size of VRAM in bytes.
    #[must_use]
    pub fn vram_bytes(&self) -> u64 {
        self.vram_bytes
    }

    /// Returns the card.
    #[must_use]
    pub fn card(&self) -> &Arc<dyn Card> {
        &self.card
    }

    /// Reads VRAM. The caller must have checked that the range is within VRAM.
    ///
    /// # Errors
    /// Returns an error if the card does not respond to a TLB invalidation.
    pub fn read(&mut self, addr: VramAddr, data: &mut [u8]) -> Result<(), CardError> {
        let mut done = 0;
        while done < data.len() {
            let (offset, run) = self.window(addr.offset(done as u64), data.len() - done)?;
            self.card.aperture_read(Aperture::Bar1, offset, &mut data[done..done + run]);
            done += run;
        }
        Ok(())
    }

    /// Writes VRAM. The caller must have checked that the range is within VRAM.
    ///
    /// # Errors
    /// Returns an error if the card does not respond to a TLB invalidation.
    pub fn write(&mut self, addr: VramAddr, data: &[u8]) -> Result<(), CardError> {
        let mut done = 0;
        while done < data.len() {
            let (offset, run) = self.window(addr.offset(done as u64), data.len() - done)?;
            self.card.aperture_write(Aperture::Bar1, offset, &data[done..done + run]);
            done += run;
        }
        Ok(())
    }

    /// Zeroes a VRAM range.
    ///
    /// # Errors
    /// Returns an error if the card does not respond to a TLB invalidation.
    pub fn zero(&mut self, addr: VramAddr, bytes: u64) -> Result<(), CardError> {
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        let mut done = 0;
        while done < bytes {
            let run = (bytes - done).min(ZEROS.len() as u64);
            self.write(addr.offset(done), &ZEROS[..run as usize])?;
            done += run;
        }
        Ok(())
    }

    /// Returns a description of the damage if the card has lost its state since bring-up, or `None` otherwise. BAR1's
    /// instance block register keeps its value until another program resets the card.
    #[must_use]
    pub fn undone(&self) -> Option<&'static str> {
        let block = self.card.read32(pbus::BAR1_BLOCK::OFFSET);
        let expected = pbus::BAR1_BLOCK::ADDRESS.encode((self.layout.bar1_instance.0 >> 12) as u32);
        match block {
            u32::MAX => Some("it no longer responds: its registers read as all ones"),
            _ if block != pbus::BAR1_BLOCK::VALID.mask() | expected => {
                Some("another program has reset it: its registers do not have the values that the mediator wrote")
            }
            _ => None,
        }
    }

    /// Invalidates the card's TLBs for the address space of page directory `directory`, and waits for completion.
    ///
    /// # Errors
    /// Returns an error if the card does not respond.
    pub fn invalidate(&mut self, directory: VramAddr, hub_only: bool) -> Result<(), CardError> {
        use pfb::{MMU_CTRL, MMU_INVALIDATE, MMU_INVALIDATE_PDB};
        let card = &self.card;
        let wait = |ready: &dyn Fn(u32) -> bool| (0..FLUSH_LOOKS).any(|_| ready(card.read32(MMU_CTRL::OFFSET)));
        if !wait(&|ctrl| MMU_CTRL::FLUSH_SLOTS_FREE.is_set(ctrl)) {
            return Err(CardError::Unresponsive("it has no free TLB invalidation slot"));
        }
        card.write32(
            MMU_INVALIDATE_PDB::OFFSET,
            MMU_INVALIDATE_PDB::ADDRESS.encode((directory.0 >> 12) as u32)
                | MMU_INVALIDATE_PDB::TARGET.encode(Target::Vram.bits()),
        );
        card.write32(
            MMU_INVALIDATE::OFFSET,
            MMU_INVALIDATE::TRIGGER.mask()
                | MMU_INVALIDATE::ALL_VA.mask()
                | MMU_INVALIDATE::HUB_ONLY.encode(u32::from(hub_only)),
        );
        if !wait(&|ctrl| MMU_CTRL::FLUSH_DONE.is_set(ctrl)) {
            return Err(CardError::Unresponsive("a TLB invalidation does not complete"));
        }
        Ok(())
    }

    /// Sets the system memory page for barriers. Without it, barriers do not order engine writes to system memory.
    pub fn set_barrier_page(&self, page: Iova) {
        self.card.write32(pfb::NISO_ADDRESS::OFFSET, (page.0 >> BARRIER_SHIFT) as u32);
    }

    /// Waits for the completion of all previous writes by the CPU to card memory and by engines to system memory.
    /// Memory may be reused only after a barrier, because an engine may write until it switches channels or its TLBs
    /// are invalidated.
    ///
    /// # Errors
    /// Returns an error if the card does not respond.
    pub fn barrier(&self) -> Result<(), CardError> {
        use pflush::BAR_FLUSH;
        self.card.write32(BAR_FLUSH::OFFSET, BAR_FLUSH::TRIGGER.mask());
        let done = (0..FLUSH_LOOKS).any(|_| !BAR_FLUSH::BUSY.is_set(self.card.read32(BAR_FLUSH::OFFSET)));
        if done { Ok(()) } else { Err(CardError::Unresponsive("its writes do not arrive")) }
    }

    /// Returns the BAR1 offset of `addr`, and the number of bytes, at most `len`, up to the end of the window.
    fn window(&mut self, addr: VramAddr, len: usize) -> Result<(u64, usize), CardError> {
        assert!(addr.0 < self.vram_bytes, "{addr} is beyond the end of VRAM");
        let block = addr.0 / WINDOW_BYTES;
        let within = addr.0 % WINDOW_BYTES;
        let mut slot = self.window_of[block as usize];
        if slot == NO_WINDOW {
            slot = self.move_window(block)?;
        }
        self.windows[usize::from(slot)].used = true;
        let run = (WINDOW_BYTES - within).min(len as u64) as usize;
        Ok((u64::from(slot) * WINDOW_BYTES + within, run))
    }

    fn move_window(&mut self, block: u64) -> Result<u16, CardError> {
        let slot = loop {
            let slot = self.hand;
            // Skip window 0, which maps USERD.
            self.hand = if slot + 1 < self.windows.len() { slot + 1 } else { 1 };
            if !std::mem::take(&mut self.windows[slot].used) {
                break slot;
            }
        };
        if let Some(old) = self.windows[slot].maps {
            self.window_of[old as usize] = NO_WINDOW;
        }
        let mut entries = [0u8; (ENTRIES_PER_WINDOW * ENTRY_BYTES) as usize];
        for (page, entry) in entries.chunks_exact_mut(ENTRY_BYTES as usize).enumerate() {
            let at = block * WINDOW_BYTES + page as u64 * LARGE_PAGE;
            let value = if at + LARGE_PAGE <= self.vram_bytes { large_entry(VramAddr(at)) } else { 0 };
            entry.copy_from_slice(&value.to_le_bytes());
        }
        let first = slot as u64 * ENTRIES_PER_WINDOW * ENTRY_BYTES;
        self.write_own(self.layout.bar1_table.offset(first), &entries);
        self.invalidate(self.layout.bar1_directory, true)?;
        self.windows[slot].maps = Some(block);
        self.window_of[block as usize] = slot as u16;
        self.moves += 1;
        Ok(slot as u16)
    }

    /// Writes to the mediator's own structures through BAR3.
    fn write_own(&self, addr: VramAddr, data: &[u8]) {
        self.card.aperture_write(Aperture::Bar3, addr.0 - self.layout.base.0, data);
    }

    fn bind(&self, register: u32, instance: VramAddr) {
        // Both registers have the same layout.
        let block = pbus::BAR1_BLOCK::VALID.mask() | pbus::BAR1_BLOCK::ADDRESS.encode((instance.0 >> 12) as u32);
        self.card.write32(register, block);
    }

    fn pramin_write_instance(&self, instance: VramAddr, directory: VramAddr) {
        use nvspec::instance::vm;
        let limit = nvspec::mmu::PDE_SPAN - 1;
        for (offset, value) in [
            (vm::PDB_LO, directory.0 as u32),
            (vm::PDB_HI, (directory.0 >> 32) as u32),
            (vm::LIMIT_LO, limit as u32),
            (vm::LIMIT_HI, (limit >> 32) as u32),
        ] {
            self.pramin_write32(instance.offset(offset), value);
        }
    }

    fn pramin_write_directory(&self, directory: VramAddr, table: VramAddr) {
        use nvspec::mmu::{Pde, TableTarget};
        let entry = Pde::new().with_large_target(TableTarget::Vram).with_large_frame((table.0 >> 12) as u32);
        self.pramin_write64(directory, entry.into());
    }

    fn pramin_write64(&self, addr: VramAddr, value: u64) {
        self.pramin_write32(addr, value as u32);
        self.pramin_write32(addr.offset(4), (value >> 32) as u32);
    }

    fn pramin_write32(&self, addr: VramAddr, value: u32) {
        self.pramin_window(addr);
        self.card.write32(pramin::BASE + (addr.0 & 0xffff) as u32, value);
    }

    fn pramin_zero(&self, addr: VramAddr, bytes: u64) {
        for offset in (0..bytes).step_by(4) {
            let at = addr.offset(offset);
            if offset == 0 || at.0 & 0xffff == 0 {
                self.pramin_window(at);
            }
            self.card.write32(pramin::BASE + (at.0 & 0xffff) as u32, 0);
        }
    }

    fn pramin_window(&self, addr: VramAddr) {
        let window = pbus::PRAMIN_WINDOW::TARGET.encode(Target::Vram.bits())
            | pbus::PRAMIN_WINDOW::BASE.encode((addr.0 >> 16) as u32);
        self.card.write32(pbus::PRAMIN_WINDOW::OFFSET, window);
    }
}

impl channels::Host for CardMemory {
    fn vram_read(&mut self, address: VramAddr, data: &mut [u8]) {
        if let Err(error) = self.read(address, data) {
            tracing::error!(%error, "cannot read a channel structure");
            data.fill(0);
        }
    }

    fn read32(&mut self, offset: u32) -> u32 {
        self.card.read32(offset)
    }

    fn write32(&mut self, offset: u32, value: u32) {
        self.card.write32(offset, value);
    }

    fn vram_write(&mut self, address: VramAddr, data: &[u8]) {
        if let Err(error) = self.write(address, data) {
            tracing::error!(%error, "cannot write a channel structure");
        }
    }

    fn vram_flush(&mut self) {
        if let Err(error) = self.barrier() {
            tracing::error!(%error, "the card does not flush writes to its memory");
        }
    }

    fn userd_read(&mut self, channel: ChannelId, offset: u64) -> u32 {
        let mut word = [0; 4];
        self.card.aperture_read(Aperture::Bar1, u64::from(channel.0) * userd::BYTES + offset, &mut word);
        u32::from_le_bytes(word)
    }

    fn userd_write(&mut self, channel: ChannelId, offset: u64, value: u32) {
        let at = u64::from(channel.0) * userd::BYTES + offset;
        self.card.aperture_write(Aperture::Bar1, at, &value.to_le_bytes());
    }
}

/// Returns a valid entry for a large VRAM page.
fn large_entry(addr: VramAddr) -> u64 {
    Pte::new().with_valid(true).with_frame((addr.0 >> 12) as u32).into()
}
