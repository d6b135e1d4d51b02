//! A minimal driver for a mediated guest: page tables, channels and push buffers with guest addresses.

use super::{Guest, Machine};
use nvspec::instance::ramfc;
use nvspec::regs::{ce0, ce1, fecs, pbdma, pbus, pfb, pfifo, pgraph, pmc, ppci};
use std::time::{Duration, Instant};
use vmm_glue::RegionIndex;

/// Page size in bytes.
pub const PAGE: u64 = 0x1000;
/// Virtual address of a channel's GPFIFO ring.
pub const RING_VA: u64 = 0x10_0000;
/// Virtual address of a channel's push buffer.
pub const PUSH_VA: u64 = 0x20_0000;
/// Virtual address of a channel's fence page.
pub const FENCE_VA: u64 = 0x30_0000;
/// Virtual address of a channel's context image.
pub const IMAGE_VA: u64 = 0x40_0000;
const RING_LOG2: u32 = 6;
const PUSH_BYTES: u64 = 0x4000;
/// Number of entries in a ring.
pub const RING_ENTRIES: u32 = 1 << RING_LOG2;
/// Maximum number of used entries in a ring. One entry stays free, to distinguish a full ring from an empty one.
const RING_ROOM: u32 = RING_ENTRIES - 1;
/// Maximum time that a ring may stay full. After that, the channel is considered dead, and its entries are ignored.
const FULL_RING_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which a full ring is polled.
const POLL_INTERVAL: Duration = Duration::from_micros(100);
/// Maximum number of faults per unit that one call handles.
const FAULTS_AT_ONCE: u32 = 64;
/// Size of a context image in pages.
const IMAGE_PAGES: u64 = 16;
/// Lowest guest VRAM address used by the driver.
const FIRST_VRAM_ADDR: u64 = 0x10_0000;
/// Subchannel and SET_OBJECT data of M2MF.
pub const M2MF: (u32, u32) = (2, 0x9039);
/// Subchannel and SET_OBJECT data of copy engine 0.
pub const CE0: (u32, u32) = (4, 0x4_90b5);
/// Subchannel and SET_OBJECT data of copy engine 1.
pub const CE1: (u32, u32) = (4, 0x5_90b8);

/// Address of a page.
#[derive(Clone, Copy, Debug)]
pub enum At {
    /// Guest VRAM.
    Vram(u64),
    /// Guest RAM.
    Ram(u64),
}

/// Address space: a page directory, and one table of small pages for the first 128 MiB.
#[derive(Clone, Copy, Debug)]
pub struct Space {
    /// Guest VRAM address of the page directory.
    pub directory: u64,
    /// Guest VRAM address of the page table.
    pub table: u64,
}

/// GPU channel.
#[derive(Clone, Copy, Debug)]
pub struct Channel {
    /// Channel number.
    pub id: u8,
    /// Guest VRAM address of the instance block.
    pub instance: u64,
    /// Address space of the channel.
    pub space: Space,
    /// Guest VRAM address of USERD.
    pub userd: u64,
    /// Guest VRAM address of the GPFIFO ring.
    pub ring: u64,
    push: u64,
    /// Guest VRAM address of the fence that is released after each submission.
    pub fence: u64,
    used: u64,
    put: u32,
    /// Number of ring entries known to be free.
    free: u32,
    /// Number of the push buffer half that receives new segments: 0 or 1.
    half: u64,
    halves: [u32; 2],
    /// Number of submissions so far, which is also the fence value once all of them have completed.
    pub fences: u32,
}

impl Channel {
    /// Returns the guest VRAM addresses of the ring, the push buffer and the context image.
    #[must_use]
    pub fn memory(&self) -> [u64; 3] {
        [self.ring, self.push, self.push + PUSH_BYTES]
    }
}

/// MMU fault reported in the guest's registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Number of the unit that reported the fault.
    pub unit: u32,
    /// Guest address of the faulting channel's instance block.
    pub instance: u64,
    /// Faulting GPU virtual address.
    pub va: u64,
}

/// Minimal driver.
pub struct Driver<M = Guest> {
    /// VM in which the driver runs.
    pub guest: M,
    next: u64,
    /// First VRAM address of the memory for channels.
    first: u64,
    userd: u64,
    /// Address spaces of BAR1 and BAR3.
    pub apertures: [Space; 2],
    list: u64,
    listed: Vec<u8>,
    /// Handled faults, oldest first, excluding those that [`Self::wait_fault`] has returned.
    pub faults: Vec<Fault>,
}

impl<M: Machine> Driver<M> {
    /// Creates a driver, and initializes its vGPU.
    #[must_use]
    pub fn new(guest: M) -> Self {
        let mut driver = Self::unborn(guest);
        driver.bring_up();
        driver
    }

    /// Creates a driver without initializing its vGPU.
    #[must_use]
    pub fn unborn(guest: M) -> Self {
        let apertures = [Space { directory: 0, table: 0 }; 2];
        Self {
            guest,
            next: FIRST_VRAM_ADDR,
            first: FIRST_VRAM_ADDR,
            userd: 0,
            apertures,
            list: 0,
            listed: Vec::new(),
            faults: Vec::new(),
        }
    }

    /// Returns true if [`Self::bring_up`] was called after the last [`Self::forget`].
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.userd != 0
    }

    /// Discards all of the driver's state.
    pub fn forget(&mut self) {
        (self.next, self.first, self.userd) = (FIRST_VRAM_ADDR, FIRST_VRAM_ADDR, 0);
        self.listed.clear();
        self.faults.clear();
    }

    /// Initializes the vGPU: PCI, apertures, interrupts, engines.
    pub fn bring_up(&mut self) {
        self.forget();
        let driver = self;
        driver.guest.write(RegionIndex::Config, 4, &6u16.to_le_bytes());
        driver.guest.write(RegionIndex::Config, 0x6a, &1u16.to_le_bytes());
        driver.userd = driver.vram(128);
        driver.list = driver.vram(1);
        for (index, register) in [pbus::BAR1_BLOCK::OFFSET, pbus::BAR3_BLOCK::OFFSET].into_iter().enumerate() {
            let (space, instance, userd) = (driver.space(), driver.vram(1), driver.userd);
            driver.apertures[index] = space;
            driver.join(instance, space);
            // Both BARs map USERD, with one page per channel.
            driver.entries(space, 0, At::Vram(userd), 128);
            driver.guest.wr(register, 0x8000_0000 | (instance >> 12) as u32);
        }
        for (register, value) in [
            (pmc::ENABLE::OFFSET, u32::MAX),
            (pmc::INTR_MASK_0::OFFSET, u32::MAX),
            (pmc::INTR_EN_0::OFFSET, 1),
            (pmc::PBDMA_ENABLE::OFFSET, u32::MAX),
            (pfifo::SCHED_EN::OFFSET, 1),
            (pfifo::USERD_BASE::OFFSET, 0x1000_0000),
            (pfifo::INTR_EN::OFFSET, u32::MAX),
            (pfifo::NON_STALL_EN::OFFSET, 1),
            (pgraph::INTR_EN::OFFSET, u32::MAX),
            (fecs::CPU_CONTROL::OFFSET, 2),
            (ce0::CPU_CONTROL::OFFSET, 2),
            (ce1::CPU_CONTROL::OFFSET, 2),
        ] {
            driver.guest.wr(register, value);
        }
        driver.first = driver.next;
    }

    /// Frees and zeroes all VRAM of channels, so that it can be reused. No channel may be bound.
    pub fn rewind(&mut self) {
        let zeros = vec![0; PAGE as usize];
        for at in (self.first..self.next).step_by(PAGE as usize) {
            self.guest.vram_write(at, &zeros);
        }
        self.next = self.first;
    }

    /// Initializes the vGPU again after a reset. A reset preserves VRAM, so all of the driver's memory is zeroed first.
    pub fn start_over(&mut self) {
        self.first = FIRST_VRAM_ADDR;
        self.rewind();
        self.bring_up();
    }

    /// Allocates pages of guest VRAM, and returns their address.
    pub fn vram(&mut self, pages: u64) -> u64 {
        let at = self.next;
        self.next += pages * PAGE;
        assert!(self.next <= self.guest.vram_bytes(), "the guest's VRAM is full");
        at
    }

    /// Returns the number of bytes left for [`Self::vram`].
    #[must_use]
    pub fn room(&self) -> u64 {
        self.guest.vram_bytes() - self.next
    }

    /// Creates an empty address space.
    pub fn space(&mut self) -> Space {
        let space = Space { directory: self.vram(16), table: self.vram(64) };
        self.guest.poke(space.directory + 4, ((space.table >> 12) as u32) << 4 | 1);
        space
    }

    /// Sets an instance block's address space.
    pub fn join(&mut self, instance: u64, space: Space) {
        for (offset, value) in [(0x200, space.directory as u32), (0x204, 0), (0x208, 0xffff_ffff), (0x20c, 0xff)] {
            self.guest.poke(instance + offset, value);
        }
    }

    /// Maps writable pages, and flushes the TLBs.
    pub fn map(&mut self, space: Space, va: u64, at: At, pages: u64) {
        self.entries(space, va, at, pages);
        self.flush();
    }

    /// Maps pages without flushing the TLBs, for an address space that is not in use yet.
    fn entries(&mut self, space: Space, va: u64, at: At, pages: u64) {
        for page in 0..pages {
            let (address, high) = match at {
                At::Vram(address) => (address, 0),
                At::Ram(address) => (address, 2 << 1 | 1),
            };
            self.pte(space, va + page * PAGE, ((address + page * PAGE) >> 8) as u32 | 1, high);
        }
    }

    /// Writes a page table entry without flushing the TLBs.
    pub fn pte(&mut self, space: Space, va: u64, low: u32, high: u32) {
        let at = space.table + (va >> 12) * 8;
        self.guest.poke(at, low);
        self.guest.poke(at + 4, high);
    }

    /// Flushes all TLBs.
    pub fn flush(&mut self) {
        self.guest.wr(pfb::MMU_INVALIDATE_PDB::OFFSET, 0);
        self.guest.wr(pfb::MMU_INVALIDATE::OFFSET, 0x8000_0003);
    }

    /// Creates a channel in its own address space. The channel is bound, enabled, and in the runlist.
    pub fn channel(&mut self, id: u8) -> Channel {
        let channel = self.prepare(id);
        self.bind(&channel);
        self.listed.push(id);
        self.submit_runlist();
        channel
    }

    /// Creates a channel that is not bound yet.
    pub fn prepare(&mut self, id: u8) -> Channel {
        let space = self.space();
        let [instance, ring, fence] = [self.vram(1), self.vram(1), self.vram(1)];
        let (push, image) = (self.vram(PUSH_BYTES / PAGE), self.vram(IMAGE_PAGES));
        let userd = self.userd + u64::from(id) * PAGE;
        let channel = Channel {
            id,
            instance,
            space,
            userd,
            ring,
            push,
            fence,
            used: 0,
            put: 0,
            free: RING_ROOM,
            half: 0,
            halves: [0; 2],
            fences: 0,
        };
        self.join(instance, space);
        for (va, at, pages) in [
            (RING_VA, ring, 1),
            (PUSH_VA, push, PUSH_BYTES / PAGE),
            (FENCE_VA, fence, 1),
            (IMAGE_VA, image, IMAGE_PAGES),
        ] {
            self.entries(space, va, At::Vram(at), pages);
        }
        let own = [
            (ramfc::USERD_LO, userd as u32),
            (ramfc::USERD_HI, 0),
            (ramfc::GP_BASE_LO, RING_VA as u32),
            (ramfc::GP_BASE_HI, RING_LOG2 << 16),
            (0x210, IMAGE_VA as u32 | 4),
            (0x230, IMAGE_VA as u32 | 4),
            (0x240, IMAGE_VA as u32 | 4),
        ];
        for (offset, value) in own.into_iter().chain(ramfc::DEFAULTS) {
            self.guest.poke(instance + offset, value);
        }
        channel
    }

    /// Binds and enables a channel.
    pub fn bind(&mut self, channel: &Channel) {
        self.guest.wr(pfifo::CHANNEL::at(channel.id.into()), 0xc000_0000 | (channel.instance >> 12) as u32);
        self.guest.wr(pfifo::CHANNEL_STATE::at(channel.id.into()), 0x001f_0001);
    }

    /// Unbinds a channel.
    pub fn unbind(&mut self, channel: &Channel) {
        self.guest.wr(pfifo::CHANNEL::at(channel.id.into()), 0);
        self.listed.retain(|id| *id != channel.id);
    }

    /// Submits the runlist.
    pub fn submit_runlist(&mut self) {
        for (index, id) in (0..).zip(self.listed.clone()) {
            self.guest.poke(self.list + 8 * index, u32::from(id));
            self.guest.poke(self.list + 8 * index + 4, 4);
        }
        self.guest.wr(pfifo::RUNLIST_BASE::OFFSET, (self.list >> 12) as u32);
        self.guest.wr(pfifo::RUNLIST::OFFSET, 0x01f0_0000 | self.listed.len() as u32);
    }

    /// Submits a runlist that contains the channels `ids`.
    pub fn list(&mut self, ids: &[u8]) {
        self.listed = ids.to_vec();
        self.submit_runlist();
    }

    /// Waits until a channel's ring has a free entry, and reserves it. Meanwhile, handles interrupts, including those
    /// for errors that stop the channel. After [`FULL_RING_TIMEOUT`], assumes that the whole ring is free.
    fn take_room(&mut self, channel: &mut Channel) {
        let began = Instant::now();
        while channel.free == 0 {
            let mut get = [0; 4];
            let at = u64::from(channel.id) * PAGE + nvspec::instance::userd::GP_GET;
            self.guest.read(RegionIndex::Bar1, at, &mut get);
            let taken = channel.put.wrapping_sub(u32::from_le_bytes(get)) % (1 << RING_LOG2);
            channel.free = RING_ROOM - taken;
            if channel.free == 0 {
                if began.elapsed() > FULL_RING_TIMEOUT {
                    channel.free = RING_ROOM;
                    break;
                }
                self.service();
                std::thread::sleep(POLL_INTERVAL);
            }
        }
        channel.free -= 1;
    }

    /// Switches to a half of the push buffer once its previous contents have been executed. A free ring entry does not
    /// guarantee this, because entries are fetched before they are executed.
    fn take_half(&mut self, channel: &mut Channel, half: u64) {
        let index = half as usize % 2;
        let fence = channel.halves[index];
        if std::mem::replace(&mut channel.half, half) != half {
            let began = Instant::now();
            while self.guest.peek(channel.fence).wrapping_sub(fence).cast_signed() < 0
                && began.elapsed() < FULL_RING_TIMEOUT
            {
                self.service();
                std::thread::sleep(POLL_INTERVAL);
            }
        }
        channel.halves[index] = channel.fences;
    }

    /// Queues a raw GPFIFO entry. Returns the value of GP_PUT that submits it.
    pub fn queue_entry(&mut self, channel: &mut Channel, entry: u64) -> u32 {
        self.take_room(channel);
        let slot = channel.ring + 8 * u64::from(channel.put);
        self.guest.poke(slot, entry as u32);
        self.guest.poke(slot + 4, (entry >> 32) as u32);
        channel.put = (channel.put + 1) % (1 << RING_LOG2);
        channel.put
    }

    /// Writes a channel's GP_PUT through BAR1.
    pub fn ring(&mut self, channel: &Channel, put: u32) {
        let at = u64::from(channel.id) * PAGE + nvspec::instance::userd::GP_PUT;
        self.guest.write(RegionIndex::Bar1, at, &put.to_le_bytes());
    }

    /// Queues a segment. Returns the value of GP_PUT that submits it.
    pub fn queue(&mut self, channel: &mut Channel, words: &[u32]) -> u32 {
        let bytes = words.len() as u64 * 4;
        assert!(bytes <= PUSH_BYTES);
        self.take_room(channel);
        if channel.used + bytes > PUSH_BYTES {
            channel.used = 0;
        }
        let last = (channel.used + bytes).saturating_sub(1) / (PUSH_BYTES / 2);
        for half in channel.used / (PUSH_BYTES / 2)..=last {
            self.take_half(channel, half);
        }
        for (index, word) in (0..).zip(words) {
            self.guest.poke(channel.push + channel.used + 4 * index, *word);
        }
        let entry = (PUSH_VA + channel.used) | (words.len() as u64) << 42;
        let slot = channel.ring + 8 * u64::from(channel.put);
        self.guest.poke(slot, entry as u32);
        self.guest.poke(slot + 4, (entry >> 32) as u32);
        channel.used += bytes;
        channel.put = (channel.put + 1) % (1 << RING_LOG2);
        channel.put
    }

    /// Queues a segment that ends with a fence, and rings the doorbell in BAR1. [`Self::wait`] waits for the work.
    pub fn submit(&mut self, channel: &mut Channel, words: &[u32]) {
        let put = self.queue_fenced(channel, words);
        let at = u64::from(channel.id) * PAGE + nvspec::instance::userd::GP_PUT;
        self.guest.write(RegionIndex::Bar1, at, &put.to_le_bytes());
    }

    /// Like [`Self::queue`], but appends a fence and an interrupt.
    pub fn queue_fenced(&mut self, channel: &mut Channel, words: &[u32]) -> u32 {
        channel.fences += 1;
        let end = [release(FENCE_VA, channel.fences), methods(0, 0x20, &[0])].concat();
        self.queue(channel, &[words, &end].concat())
    }

    /// Returns true if the last submission has released its fence.
    pub fn is_done(&mut self, channel: &Channel) -> bool {
        self.guest.peek(channel.fence) == channel.fences
    }

    /// Waits for interrupts until all submissions have completed, or until the device has disappeared.
    pub fn wait(&mut self, channel: &Channel) {
        assert_eq!(self.wait_or_fault(channel), None, "the channel has faulted");
    }

    /// Like [`Self::wait`], but returns early with the fault if the channel faults.
    pub fn wait_or_fault(&mut self, channel: &Channel) -> Option<Fault> {
        let before = self.faults.len();
        while !self.is_done(channel) && self.guest.wait_msi() {
            self.service();
            let mut new = self.faults.iter().skip(before);
            if let Some(fault) = new.find(|one| one.instance == channel.instance) {
                return Some(*fault);
            }
        }
        None
    }

    /// Removes and returns the oldest fault in [`Self::faults`]. Waits for an interrupt if there is none.
    pub fn wait_fault(&mut self) -> Fault {
        while self.faults.is_empty() {
            assert!(self.guest.wait_msi(), "the device is gone");
            self.service();
        }
        self.faults.remove(0)
    }

    /// Handles pending interrupts, and re-enables interrupts.
    pub fn service(&mut self) {
        let guest = &mut self.guest;
        let intr = guest.rd(pfifo::INTR::OFFSET);
        // A unit reports one fault at a time. The next fault appears once the current one is acknowledged.
        for _ in 0..FAULTS_AT_ONCE {
            if !pfifo::INTR::MMU_FAULT.is_set(guest.rd(pfifo::INTR::OFFSET)) {
                break;
            }
            let units = guest.rd(pfifo::MMU_FAULT_ID::OFFSET);
            for unit in (0..pfifo::FAULT_INST::COUNT).filter(|unit| units & (1 << unit) != 0) {
                let va = u64::from(guest.rd(pfifo::FAULT_VA_HI::at(unit))) << 32
                    | u64::from(guest.rd(pfifo::FAULT_VA_LO::at(unit)));
                let instance = u64::from(guest.rd(pfifo::FAULT_INST::at(unit))) << 12;
                self.faults.push(Fault { unit, instance, va });
            }
            guest.wr(pfifo::MMU_FAULT_ID::OFFSET, units);
        }
        for engine in 0..6 {
            let bits = guest.rd(pfifo::NON_STALL_INTR::at(engine));
            guest.wr(pfifo::NON_STALL_INTR::at(engine), bits);
        }
        for unit in 0..3 {
            let bits = guest.rd(pbdma::INTR_0::at(unit));
            guest.wr(pbdma::INTR_0::at(unit), bits);
        }
        guest.wr(pfifo::RUNLIST_INTR::OFFSET, u32::MAX);
        guest.wr(pfifo::INTR::OFFSET, intr);
        guest.wr(ppci::MSI_REARM::OFFSET, ppci::MSI_REARM::REARM.mask());
    }

    /// Allocates pages of VRAM, fills them with the pattern `seed`, and maps them at `va` for the channel. Returns
    /// their VRAM address.
    pub fn buffer(&mut self, channel: &Channel, va: u64, pages: u64, seed: u32) -> u64 {
        let at = self.vram(pages);
        self.map(channel.space, va, At::Vram(at), pages);
        for page in 0..pages {
            self.guest.vram_write(at + page * PAGE, &pattern(seed, page));
        }
        at
    }

    /// Returns true if guest VRAM at `at` contains the pattern `seed`.
    #[must_use]
    pub fn vram_holds(&self, at: u64, pages: u64, seed: u32) -> bool {
        let mut data = [0; PAGE as usize];
        (0..pages).all(|page| {
            self.guest.vram_read(at + page * PAGE, &mut data);
            data[..] == pattern(seed, page)[..]
        })
    }

    /// Fills guest RAM with the pattern `seed`.
    pub fn fill_ram(&self, gpa: u64, pages: u64, seed: u32) {
        (0..pages).for_each(|page| self.guest.ram_write(gpa + page * PAGE, &pattern(seed, page)));
    }

    /// Returns true if guest RAM at `gpa` contains the pattern `seed`.
    #[must_use]
    pub fn ram_holds(&self, gpa: u64, pages: u64, seed: u32) -> bool {
        let mut data = [0; PAGE as usize];
        (0..pages).all(|page| {
            self.guest.ram_read(gpa + page * PAGE, &mut data);
            data[..] == pattern(seed, page)[..]
        })
    }
}

/// Returns page `page` of the pattern `seed`.
#[must_use]
pub fn pattern(seed: u32, page: u64) -> Vec<u8> {
    (0..PAGE / 4)
        .map(|word| (page * PAGE / 4 + word) as u32)
        .flat_map(|word| (word ^ seed.rotate_left(7)).wrapping_mul(0x9e37_79b1).wrapping_add(seed).to_le_bytes())
        .collect()
}

/// Returns push buffer words that write data to consecutive methods.
#[must_use]
pub fn methods(subchannel: u32, method: u32, data: &[u32]) -> Vec<u32> {
    let header = 1 << 29 | (data.len() as u32) << 16 | subchannel << 13 | method >> 2;
    std::iter::once(header).chain(data.iter().copied()).collect()
}

/// Returns push buffer words that bind an object to its subchannel.
#[must_use]
pub fn object(binding: (u32, u32)) -> Vec<u32> {
    let (subchannel, object) = binding;
    methods(subchannel, 0, &[object])
}

/// Returns push buffer words for an M2MF copy of one line of `bytes` bytes.
#[must_use]
pub fn m2mf_copy(from: u64, to: u64, bytes: u32) -> Vec<u32> {
    let mut words = methods(2, 0x238, &[(to >> 32) as u32, to as u32]);
    words.extend(methods(2, 0x30c, &[(from >> 32) as u32, from as u32, bytes, bytes, bytes, 1]));
    words.extend(methods(2, 0x300, &[0x0010_0110]));
    words
}

/// Returns push buffer words for a copy of whole pages with a copy engine.
#[must_use]
pub fn ce_copy(from: u64, to: u64, pages: u32) -> Vec<u32> {
    let page = PAGE as u32;
    let (from_high, to_high) = ((from >> 32) as u32, (to >> 32) as u32);
    let mut words = methods(4, 0x30c, &[from_high, from as u32, to_high, to as u32, page, page, page, pages]);
    words.extend(methods(4, 0x300, &[0x110]));
    words
}

/// Returns push buffer words for a 16-byte semaphore release.
#[must_use]
pub fn release(va: u64, payload: u32) -> Vec<u32> {
    methods(0, 0x10, &[(va >> 32) as u32, va as u32, payload, 2])
}
