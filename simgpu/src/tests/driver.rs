//! A minimal driver, which creates page tables, channels and push buffers in the hardware formats through the card's
//! own windows. It shares `nvspec`'s constants with the card, but no code.

use crate::{Config, SimGpu};
use card::{Aperture, Card, DmaMemory};
use nvspec::falcon::{CODE_PAGE_WORDS, Falcon};
use nvspec::regs::windows::pramin;
use nvspec::regs::{ce0, ce1, fecs, pbus, pfb, pfifo, pgraph, pmc};
use std::sync::Arc;
use vm_memory::MmapRegion;

pub const PAGE: u64 = 0x1000;
/// Address of the USERD pages in BAR1.
pub const USERD_VA: u64 = 0;
const BAR1_PAGES: u64 = 1024;
/// Virtual address of a channel's ring.
pub const RING_VA: u64 = 0x10_0000;
/// Virtual address of a channel's push buffer.
pub const PUSH_VA: u64 = 0x20_0000;
/// Virtual address of a channel's context image.
pub const IMAGE_VA: u64 = 0x40_0000;
const RING_LOG2: u32 = 4;
const PUSH_BYTES: u64 = 0x1_0000;

/// A VRAM page (by address) or a host memory page (by I/O virtual address).
#[derive(Clone, Copy, Debug)]
pub enum At {
    Vram(u64),
    Host(u64),
}

/// A minimal driver of a card.
pub struct Driver {
    pub card: Arc<SimGpu>,
    next: u64,
    pub bar1: Space,
    userd: u64,
    pub runlist: Vec<u8>,
}

/// An address space: a directory, and one small-page table for the first 128 MiB.
#[derive(Clone, Copy, Debug)]
pub struct Space {
    pub directory: u64,
    pub table: u64,
}

/// A channel of the driver.
#[derive(Clone, Copy, Debug)]
pub struct Channel {
    pub id: u8,
    pub instance: u64,
    pub space: Space,
    pub ring: u64,
    pub push: u64,
    pub image: u64,
    used: u64,
    put: u32,
}

impl Driver {
    /// Creates a driver of a new card with a manual clock, and initializes the card.
    pub fn new(config: &Config) -> Self {
        Self::on(Arc::new(SimGpu::for_test(config)))
    }

    /// Creates a driver of `card`, and initializes the card.
    pub fn on(card: Arc<SimGpu>) -> Self {
        let nowhere = Space { directory: 0, table: 0 };
        let mut driver = Self { card, next: 0x10_0000, bar1: nowhere, userd: 0, runlist: Vec::new() };
        driver.bar1 = driver.space();
        let instance = driver.vram(1);
        driver.join(instance, driver.bar1);
        driver.userd = driver.vram(128);
        let (bar1, userd) = (driver.bar1, driver.userd);
        driver.map(bar1, USERD_VA, At::Vram(userd), 128);
        driver.wr(pbus::BAR1_BLOCK::OFFSET, 0x8000_0000 | (instance >> 12) as u32);
        driver.enable();
        driver
    }

    /// Enables interrupts, units and the scheduler, and loads firmware.
    pub fn enable(&self) {
        self.wr(pmc::ENABLE::OFFSET, u32::MAX);
        self.wr(pmc::INTR_EN_0::OFFSET, 1);
        self.wr(pmc::PBDMA_ENABLE::OFFSET, u32::MAX);
        self.wr(pfifo::PBDMA_PRESENT::OFFSET, u32::MAX);
        for (engine, pbdma) in [(0, 0), (4, 2), (5, 1)] {
            self.wr(pfifo::ENGINE_PBDMA_MASK::at(engine), !(1 << pbdma));
        }
        for unit in 0..3 {
            self.wr(nvspec::regs::pbdma::INTR_EN_0::at(unit), 0xffff_feff);
        }
        self.wr(pfifo::SCHED_EN::OFFSET, 1);
        self.wr(pfifo::USERD_BASE::OFFSET, 0x1000_0000 | (USERD_VA >> 12) as u32);
        self.wr(pfifo::INTR_EN::OFFSET, u32::MAX);
        self.wr(pfifo::NON_STALL_EN::OFFSET, 1);
        self.start_engines();
    }

    /// Resets the engines in `units`, a mask of bits of PMC's unit enable register, and starts their firmware.
    pub fn reset_engine(&self, units: u32) {
        self.wr(pmc::ENABLE::OFFSET, !units);
        self.wr(pmc::ENABLE::OFFSET, u32::MAX);
        self.start_engines();
    }

    /// Starts the engines' firmware.
    pub fn start_engines(&self) {
        self.wr(pgraph::INTR_EN::OFFSET, u32::MAX);
        Falcon::ALL.into_iter().for_each(|falcon| self.load(falcon));
        self.wr(fecs::CPU_CONTROL::OFFSET, 2);
        self.wr(ce0::CPU_CONTROL::OFFSET, 2);
        self.wr(ce1::CPU_CONTROL::OFFSET, 2);
    }

    /// Loads a page of code into a falcon.
    pub fn load(&self, falcon: Falcon) {
        let at = |register: u32| falcon.base() + (register - fecs::BASE);
        self.wr(at(fecs::IMEM_CONTROL::OFFSET), fecs::IMEM_CONTROL::WRITE_INCREMENT.mask());
        self.wr(at(fecs::IMEM_TAG::OFFSET), 0);
        (1..=CODE_PAGE_WORDS as u32).for_each(|word| self.wr(at(fecs::IMEM_DATA::OFFSET), word));
    }

    pub fn rd(&self, offset: u32) -> u32 {
        self.card.read32(offset)
    }

    pub fn wr(&self, offset: u32, value: u32) {
        self.card.write32(offset, value);
    }

    /// Allocates unused pages of VRAM, which a new card has zeroed. Returns their address.
    pub fn vram(&mut self, pages: u64) -> u64 {
        let at = self.next;
        self.next += pages * PAGE;
        at
    }

    /// Writes VRAM through PRAMIN.
    pub fn poke(&self, at: u64, value: u32) {
        self.wr(pbus::PRAMIN_WINDOW::OFFSET, (at >> 16) as u32);
        self.wr(pramin::BASE + (at & 0xffff) as u32, value);
    }

    /// Reads VRAM through PRAMIN.
    pub fn peek(&self, at: u64) -> u32 {
        self.wr(pbus::PRAMIN_WINDOW::OFFSET, (at >> 16) as u32);
        self.rd(pramin::BASE + (at & 0xffff) as u32)
    }

    /// Maps new host memory for the card at `iova`.
    pub fn host(&self, iova: u64, pages: u64) -> Arc<MmapRegion> {
        let len = (pages * PAGE) as usize;
        let region = Arc::new(MmapRegion::new(len).expect("host memory"));
        let memory = DmaMemory::new(Arc::clone(&region) as _, 0, len, true).expect("whole range");
        self.card.map_dma(iova, memory).expect("a free range");
        region
    }

    /// Creates an empty address space.
    pub fn space(&mut self) -> Space {
        let space = Space { directory: self.vram(16), table: self.vram(64) };
        // Add the small-page table, which is in VRAM, to the directory.
        self.poke(space.directory + 4, ((space.table >> 12) as u32) << 4 | 1);
        space
    }

    /// Stores `space` in the instance block at `instance`.
    pub fn join(&self, instance: u64, space: Space) {
        self.poke(instance + 0x200, space.directory as u32);
        self.poke(instance + 0x204, (space.directory >> 32) as u32);
        self.poke(instance + 0x208, 0xffff_ffff);
        self.poke(instance + 0x20c, 0xff);
    }

    /// Maps `pages` pages at `va` as valid and writable.
    pub fn map(&self, space: Space, va: u64, at: At, pages: u64) {
        for page in 0..pages {
            let (address, high) = match at {
                At::Vram(address) => (address, 0),
                At::Host(address) => (address, 2 << 1 | 1),
            };
            self.pte(space, va + page * PAGE, ((address + page * PAGE) >> 8) as u32 | 1, high);
        }
        self.flush();
    }

    /// Unmaps a page.
    pub fn unmap(&self, space: Space, va: u64) {
        self.pte(space, va, 0, 0);
        self.flush();
    }

    /// Writes a page table entry without flushing.
    pub fn pte(&self, space: Space, va: u64, low: u32, high: u32) {
        let at = space.table + (va >> 12) * 8;
        self.poke(at, low);
        self.poke(at + 4, high);
    }

    /// Flushes all translations.
    pub fn flush(&self) {
        self.wr(pfb::MMU_INVALIDATE_PDB::OFFSET, 0);
        self.wr(pfb::MMU_INVALIDATE::OFFSET, 0x8000_0003);
    }

    /// Creates a channel that is bound and enabled, but not on the runlist yet.
    pub fn channel(&mut self, id: u8) -> Channel {
        let space = self.space();
        let channel = Channel {
            id,
            instance: self.vram(1),
            space,
            ring: self.vram(1),
            push: self.vram(PUSH_BYTES / PAGE),
            image: self.vram(2),
            used: 0,
            put: 0,
        };
        self.join(channel.instance, space);
        self.map(space, RING_VA, At::Vram(channel.ring), 1);
        self.map(space, PUSH_VA, At::Vram(channel.push), PUSH_BYTES / PAGE);
        self.map(space, IMAGE_VA, At::Vram(channel.image), 2);
        let userd = self.userd + u64::from(id) * PAGE;
        for (offset, value) in [
            (0x08, userd as u32),
            (0x0c, 0),
            (0x10, 0xface),
            (0x30, 0xffff_f902),
            (0x48, RING_VA as u32),
            (0x4c, RING_LOG2 << 16),
            (0x54, 2),
            (0x84, 0x2040_0000),
            (0x94, 0x3000_0001),
            (0x9c, 0x100),
            (0xa4, 0x1f1f_1f1f),
            (0xa8, 0x1f1f_1f1f),
            (0xac, 0x1f),
            (0xb8, 0xf800_0000),
            (0xf8, 0x1000_3080),
            (0xfc, 0x1000_0010),
            (0x210, IMAGE_VA as u32 | 4),
            (0x230, IMAGE_VA as u32 | 4),
            (0x240, IMAGE_VA as u32 | 4),
        ] {
            self.poke(channel.instance + offset, value);
        }
        self.bind(&channel);
        channel
    }

    /// Binds and enables a channel.
    pub fn bind(&self, channel: &Channel) {
        self.wr(pfifo::CHANNEL::at(channel.id.into()), 0xc000_0000 | (channel.instance >> 12) as u32);
        self.wr(pfifo::CHANNEL_STATE::at(channel.id.into()), 0x001f_0001);
    }

    /// Submits a runlist.
    pub fn submit_runlist(&mut self, channels: &[u8]) {
        let list = self.vram(1);
        for (index, id) in (0..).zip(channels) {
            self.poke(list + 8 * index, u32::from(*id));
            self.poke(list + 8 * index + 4, 4);
        }
        self.runlist = channels.to_vec();
        self.wr(pfifo::RUNLIST_BASE::OFFSET, (list >> 12) as u32);
        self.wr(pfifo::RUNLIST::OFFSET, 0x01f0_0000 | channels.len() as u32);
    }

    /// Creates a channel and submits a runlist with only this channel.
    pub fn only_channel(&mut self, id: u8) -> Channel {
        let channel = self.channel(id);
        self.submit_runlist(&[id]);
        channel
    }

    /// Reads a dword of a channel's USERD through BAR1.
    pub fn userd(&self, channel: &Channel, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.card.aperture_read(Aperture::Bar1, USERD_VA + u64::from(channel.id) * PAGE + offset, &mut data);
        u32::from_le_bytes(data)
    }

    /// Writes GP_PUT through BAR1.
    pub fn ring_doorbell(&self, channel: &Channel, put: u32) {
        let at = USERD_VA + u64::from(channel.id) * PAGE + 0x8c;
        self.card.aperture_write(Aperture::Bar1, at, &put.to_le_bytes());
    }

    /// Queues a segment and rings the channel's doorbell.
    pub fn push(&self, channel: &mut Channel, words: &[u32]) {
        self.queue(channel, words);
        self.ring_doorbell(channel, channel.put);
    }

    /// Queues a segment without ringing the doorbell.
    pub fn queue(&self, channel: &mut Channel, words: &[u32]) {
        let bytes = words.len() as u64 * 4;
        if channel.used + bytes > PUSH_BYTES {
            channel.used = 0;
        }
        for (index, word) in (0..).zip(words) {
            self.poke(channel.push + channel.used + 4 * index, *word);
        }
        let entry = (PUSH_VA + channel.used) | (words.len() as u64) << 42;
        let slot = u64::from(channel.put);
        self.poke(channel.ring + 8 * slot, entry as u32);
        self.poke(channel.ring + 8 * slot + 4, (entry >> 32) as u32);
        channel.used += bytes;
        channel.put = (channel.put + 1) % (1 << RING_LOG2);
    }

    /// Runs the card until it is idle.
    pub fn run_until_idle(&self) {
        self.card.gpu().run_until_idle();
    }

    /// Advances the clock, then runs the card.
    pub fn advance(&self, ns: u64) {
        self.card.gpu().advance(ns);
        self.run_until_idle();
    }

    /// Maps `pages` new pages of VRAM at `va` in the channel's address space, and fills them with a pattern.
    pub fn buffer(&mut self, channel: &Channel, va: u64, pages: u64, seed: u32) -> u64 {
        let at = self.vram(pages);
        self.map(channel.space, va, At::Vram(at), pages);
        for index in 0..pages * PAGE / 4 {
            self.poke(at + 4 * index, pattern(seed, index));
        }
        at
    }

    /// Returns true if the VRAM at `at` contains the pattern.
    pub fn holds(&self, at: u64, pages: u64, seed: u32) -> bool {
        (0..pages * PAGE / 4).all(|index| self.peek(at + 4 * index) == pattern(seed, index))
    }

    /// Maps VRAM at `va` in BAR1.
    pub fn map_bar1(&self, va: u64, at: u64, pages: u64) {
        assert!(va / PAGE + pages <= BAR1_PAGES);
        self.map(self.bar1, va, At::Vram(at), pages);
    }
}

/// Returns the word at `index` of the pattern `seed`.
pub fn pattern(seed: u32, index: u64) -> u32 {
    (index as u32 ^ seed.rotate_left(7)).wrapping_mul(0x9e37_79b1).wrapping_add(seed)
}

/// Returns push buffer words that write data to consecutive methods.
pub fn methods(subchannel: u32, method: u32, data: &[u32]) -> Vec<u32> {
    let header = 1 << 29 | (data.len() as u32) << 16 | subchannel << 13 | method >> 2;
    std::iter::once(header).chain(data.iter().copied()).collect()
}

pub const M2MF: (u32, u32) = (2, 0x9039);
pub const CE0: (u32, u32) = (4, 0x4_90b5);
pub const CE1: (u32, u32) = (4, 0x5_90b8);

/// Returns the words that bind an object to its subchannel.
pub fn object(binding: (u32, u32)) -> Vec<u32> {
    let (subchannel, object) = binding;
    methods(subchannel, 0, &[object])
}

/// Returns the methods for copying one line of `bytes` bytes with M2MF.
pub fn m2mf_copy(from: u64, to: u64, bytes: u32) -> Vec<u32> {
    let mut words = methods(2, 0x238, &[(to >> 32) as u32, to as u32]);
    words.extend(methods(2, 0x30c, &[(from >> 32) as u32, from as u32, bytes, bytes, bytes, 1]));
    words.extend(methods(2, 0x300, &[0x0010_0110]));
    words
}

/// Returns the methods for copying whole pages with a copy engine.
pub fn ce_copy(from: u64, to: u64, pages: u32) -> Vec<u32> {
    let (page, lines) = (PAGE as u32, pages);
    let mut words =
        methods(4, 0x30c, &[(from >> 32) as u32, from as u32, (to >> 32) as u32, to as u32, page, page, page, lines]);
    words.extend(methods(4, 0x300, &[0x110]));
    words
}

/// Returns the methods for releasing a semaphore with 16 bytes of data.
pub fn release(va: u64, payload: u32) -> Vec<u32> {
    methods(0, 0x10, &[(va >> 32) as u32, va as u32, payload, 2])
}

/// Returns the methods for acquiring a semaphore with operation `how`.
pub fn acquire(va: u64, payload: u32, how: u32) -> Vec<u32> {
    methods(0, 0x10, &[(va >> 32) as u32, va as u32, payload, how])
}

/// Concatenates the parts.
pub fn words(parts: &[Vec<u32>]) -> Vec<u32> {
    parts.concat()
}

/// Returns the configuration of a card with 64 MiB of VRAM.
pub fn small() -> Config {
    Config { vram_mib: 64, ..Config::default() }
}
