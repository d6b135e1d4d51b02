//! A fake card, which executes commands from the host's rings and records their order, and a fake guest with memory and
//! rings.

use crate::{
    Bind, Channels, DoorbellError, GuestInstance, GuestMemory, GuestRing, Host, Layout, Parts, Place, Pulled,
    RingFault, TenantId, Unmapped, Unreadable, work_va,
};
use nvspec::addr::{GpuVa, GuestVramAddr, VramAddr};
use nvspec::fifo::{ChannelId, VirtualChannelId};
use nvspec::instance::{ramfc, userd, vm};
use nvspec::regs::pfifo;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub(crate) const LAYOUT: Layout = Layout {
    instances: VramAddr(0x10_0000),
    userd: VramAddr(0x20_0000),
    runlists: [VramAddr(0x30_0000), VramAddr(0x30_1000)],
    work: VramAddr(0x40_0000),
    images: VramAddr(0x4000_0000),
    graph_image: GOLDEN.len() as u64,
};
/// Contents of the image of a new PGRAPH context, except for the first dwords.
pub(crate) const GOLDEN: [u8; 0x1800] = [0x60; 0x1800];
pub(crate) const A: TenantId = TenantId(1);
pub(crate) const B: TenantId = TenantId(2);
/// First virtual address of the host's range.
const HOST: u64 = 0xff_f800_0000;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Did {
    Register(u32, u32),
    Vram(u64, usize),
    Flush,
    Doorbell(u8, u32),
}

/// Fetch and execution state of a bound channel.
#[derive(Clone, Debug, Default)]
pub(crate) struct Unit {
    gp_get: u32,
    /// Entries that were fetched but not executed.
    queue: VecDeque<u64>,
    /// Entry that is being executed.
    current: Option<u64>,
    /// Guest entries fetched so far, in order.
    pub(crate) given: Vec<u64>,
    /// Number of records fetched so far.
    pub(crate) records: u32,
    /// Sequence numbers released so far, in order.
    pub(crate) released: Vec<u32>,
    /// True if the dwords of the next record become data of a guest method.
    pub(crate) swallow: bool,
}

#[derive(Default)]
pub(crate) struct Card {
    pub(crate) registers: BTreeMap<u32, u32>,
    /// VRAM pages by address.
    pub(crate) vram: BTreeMap<u64, Box<[u8; 4096]>>,
    pub(crate) units: BTreeMap<u8, Unit>,
    /// Channels that are loaded in a PBDMA, with or without work.
    pub(crate) loaded: BTreeSet<u8>,
    /// True if the card never reports pending work.
    pub(crate) coy: bool,
    pub(crate) did: Vec<Did>,
    /// Channels that never leave their engines.
    pub(crate) hung: BTreeSet<u8>,
    pub(crate) reads: u32,
    /// Card time in ns. Each release advances it by one.
    pub(crate) time: u64,
    /// Number of non-stall interrupts raised.
    pub(crate) raised: u32,
}

impl Card {
    pub(crate) fn word(&self, at: u64) -> u32 {
        let Some(page) = self.vram.get(&(at / 4096)) else { return 0 };
        u32::from_le_bytes(*page[(at % 4096) as usize..].first_chunk().unwrap())
    }

    fn put_word(&mut self, at: u64, value: u32) {
        let page = self.vram.entry(at / 4096).or_insert_with(|| Box::new([0; 4096]));
        page[(at % 4096) as usize..][..4].copy_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn block_word(&self, channel: ChannelId, offset: u64) -> u32 {
        self.word(LAYOUT.instance(channel).0 + offset)
    }

    pub(crate) fn userd(&self, channel: ChannelId, offset: u64) -> u32 {
        self.word(LAYOUT.userd(channel).0 + offset)
    }

    pub(crate) fn set_userd(&mut self, channel: ChannelId, offset: u64, value: u32) {
        self.put_word(LAYOUT.userd(channel).0 + offset, value);
    }

    /// Returns the channel numbers in the card's current runlist.
    pub(crate) fn runlist(&self) -> Vec<u32> {
        let Some(base) = self.registers.get(&pfifo::RUNLIST_BASE::OFFSET) else { return Vec::new() };
        let base = u64::from(base & 0xfff_ffff) << 12;
        let length = self.registers.get(&pfifo::RUNLIST::OFFSET).map_or(0, |list| list & 0xfff);
        (0..u64::from(length)).map(|entry| self.word(base + entry * 8)).collect()
    }

    pub(crate) fn enabled(&self, channel: ChannelId) -> bool {
        self.registers.get(&pfifo::CHANNEL_STATE::at(channel.0.into())).is_some_and(|state| state & 1 != 0)
    }

    pub(crate) fn bound(&self, channel: ChannelId) -> u32 {
        self.registers.get(&pfifo::CHANNEL::at(channel.0.into())).copied().unwrap_or(0)
    }

    /// Returns the position in the log of the first write of `value` to the register at `offset`.
    pub(crate) fn when(&self, offset: u32, value: u32) -> usize {
        let wanted = Did::Register(offset, value);
        self.did
            .iter()
            .position(|did| *did == wanted)
            .unwrap_or_else(|| panic!("{wanted:x?} is not in {:x?}", self.did))
    }

    fn runnable(&self, channel: ChannelId) -> bool {
        self.bound(channel) >> 31 != 0 && self.enabled(channel) && self.runlist().contains(&channel.0.into())
    }

    fn pending(&self, channel: ChannelId) -> bool {
        let unit = self.units.get(&channel.0);
        unit.is_some_and(|unit| {
            unit.current.is_some() || !unit.queue.is_empty() || unit.gp_get != self.userd(channel, userd::GP_PUT)
        })
    }

    /// Returns the dword at one of the host's virtual addresses in a channel's address space.
    fn host_word(&self, channel: ChannelId, va: u64) -> u32 {
        let within = va - work_va(channel).0;
        assert!(within < 0x4000, "channel {} has only its own work area mapped", channel.0);
        self.word(LAYOUT.work.0 + u64::from(channel.0) * 0x4000 + within)
    }

    /// Returns entry `index` of a channel's ring.
    pub(crate) fn ring_entry(&self, channel: ChannelId, index: u32) -> u64 {
        let high = self.block_word(channel, ramfc::GP_BASE_HI);
        assert_eq!(high >> 16, 9, "the host's ring has 512 entries");
        let base = u64::from(high & 0xff) << 32 | u64::from(self.block_word(channel, ramfc::GP_BASE_LO));
        let at = base + 8 * u64::from(index);
        u64::from(self.host_word(channel, at)) | u64::from(self.host_word(channel, at + 4)) << 32
    }

    /// Returns the indices of the ring entries that the card may still fetch.
    pub(crate) fn unfetched(&self, channel: ChannelId) -> Vec<u32> {
        let put = self.userd(channel, userd::GP_PUT);
        let get = self.units.get(&channel.0).map_or(0, |unit| unit.gp_get);
        (get..get + (put + 512 - get) % 512).map(|index| index % 512).collect()
    }

    /// Fetches one entry. Returns `false` if there is none, or if the channel may not run.
    pub(crate) fn fetch(&mut self, channel: ChannelId) -> bool {
        let put = self.userd(channel, userd::GP_PUT);
        assert!(put < 512, "GP_PUT {put} is beyond the ring");
        let Some(gp_get) = self.units.get(&channel.0).map(|unit| unit.gp_get) else { return false };
        if !self.runnable(channel) || gp_get == put {
            return false;
        }
        let raw = self.ring_entry(channel, gp_get);
        let next = (gp_get + 1) % 512;
        let unit = self.units.get_mut(&channel.0).unwrap();
        unit.gp_get = next;
        unit.queue.push_back(raw);
        if raw & 0xff_ffff_fffc >= HOST && raw >> 42 != 0 {
            unit.records += 1;
        } else {
            unit.given.push(raw);
        }
        self.set_userd(channel, userd::GP_GET, next);
        self.loaded.insert(channel.0);
        true
    }

    /// Starts a fetched range, or ends the one in progress. Returns `false` if there is none, or if the channel may not
    /// run.
    pub(crate) fn execute(&mut self, channel: ChannelId) -> bool {
        if !self.runnable(channel) {
            return false;
        }
        let Some(unit) = self.units.get_mut(&channel.0) else { return false };
        let Some(raw) = unit.current.take() else {
            let Some(raw) = unit.queue.pop_front() else { return false };
            unit.current = Some(raw);
            self.set_get(channel, raw & 0xff_ffff_fffc);
            return true;
        };
        let (address, dwords) = (raw & 0xff_ffff_fffc, raw >> 42 & 0x1f_ffff);
        if address >= HOST && dwords != 0 && !std::mem::take(&mut unit.swallow) {
            self.record(channel, address, dwords);
        }
        self.set_get(channel, address + 4 * dwords);
        true
    }

    /// Fetches and executes all entries.
    pub(crate) fn run(&mut self, channel: ChannelId) {
        while self.fetch(channel) || self.execute(channel) {}
    }

    fn set_get(&mut self, channel: ChannelId, va: u64) {
        self.set_userd(channel, userd::GET, va as u32);
        self.set_userd(channel, userd::GET_HI, (va >> 32) as u32);
    }

    /// Executes a record according to the class definition: SEMAPHORE_A to SEMAPHORE_D, as a 16-byte release with
    /// wait-for-idle, followed by the interrupt or a NOP.
    fn record(&mut self, channel: ChannelId, address: u64, dwords: u64) {
        let words: Vec<u32> = (0..dwords).map(|word| self.host_word(channel, address + 4 * word)).collect();
        let [0x2004_0004, high, low, payload, 0x0000_0002, last @ (0x8000_0008 | 0x8000_0002)] = words[..] else {
            panic!("not a completion record: {words:#x?}");
        };
        let within = (u64::from(high) << 32 | u64::from(low)) - work_va(channel).0;
        assert!((0x3000..0x4000).contains(&within), "only the last page is writable");
        let at = LAYOUT.work.0 + u64::from(channel.0) * 0x4000 + within;
        self.time += 1;
        self.put_word(at + 4, 0);
        self.put_word(at + 8, self.time as u32);
        self.put_word(at + 12, (self.time >> 32) as u32);
        self.put_word(at, payload);
        self.raised += u32::from(last == 0x8000_0008);
        self.units.get_mut(&channel.0).unwrap().released.push(payload);
    }

    /// Writes `payload` and a time to one of a channel's semaphores, as a guest's work can.
    pub(crate) fn forge(&mut self, channel: ChannelId, slot: u8, payload: u32) {
        let at = LAYOUT.work.0 + u64::from(channel.0) * 0x4000 + 0x3000 + u64::from(slot) * 16;
        self.put_word(at, payload);
        self.put_word(at + 8, 0xdead);
    }

    /// Resets the card.
    pub(crate) fn reset(&mut self) {
        self.registers.clear();
        self.units.clear();
        self.loaded.clear();
        self.hung.clear();
    }
}

impl Host for Card {
    fn read32(&mut self, offset: u32) -> u32 {
        self.reads += 1;
        let value = self.registers.get(&offset).copied().unwrap_or(0);
        let index = offset.wrapping_sub(pfifo::CHANNEL_STATE::at(0)) / 8;
        if index < 128 && offset == pfifo::CHANNEL_STATE::at(index) {
            let channel = ChannelId(index as u8);
            let pending = self.runnable(channel) && self.pending(channel) && !self.coy;
            return value | u32::from(pending) << 28 | u32::from(self.loaded.contains(&channel.0)) << 12;
        }
        let hung = offset == pfifo::PREEMPT::OFFSET && self.hung.contains(&((value & 0x7f) as u8));
        if hung { value | pfifo::PREEMPT::PENDING.mask() } else { value }
    }

    fn write32(&mut self, offset: u32, value: u32) {
        self.did.push(Did::Register(offset, value));
        self.registers.insert(offset, value);
        let index = offset.wrapping_sub(pfifo::CHANNEL::at(0)) / 8;
        if index < 128 && offset == pfifo::CHANNEL::at(index) {
            let channel = ChannelId(index as u8);
            self.units.remove(&channel.0);
            self.loaded.remove(&channel.0);
            if value >> 31 != 0 {
                let gp_get = self.block_word(channel, ramfc::GP_GET);
                self.units.insert(channel.0, Unit { gp_get, ..Unit::default() });
            }
        }
    }

    fn vram_read(&mut self, address: VramAddr, data: &mut [u8]) {
        let page = self.vram.get(&(address.0 / 4096));
        let within = (address.0 % 4096) as usize;
        match page {
            Some(page) => data.copy_from_slice(&page[within..within + data.len()]),
            None => data.fill(0),
        }
    }

    fn vram_write(&mut self, address: VramAddr, data: &[u8]) {
        self.did.push(Did::Vram(address.0, data.len()));
        let within = (address.0 % 4096) as usize;
        let (first, rest) = data.split_at(data.len().min(4096 - within));
        let page = self.vram.entry(address.0 / 4096).or_insert_with(|| Box::new([0; 4096]));
        page[within..within + first.len()].copy_from_slice(first);
        for (at, data) in (address.0 / 4096 + 1..).zip(rest.chunks(4096)) {
            let page = self.vram.entry(at).or_insert_with(|| Box::new([0; 4096]));
            page[..data.len()].copy_from_slice(data);
        }
    }

    fn vram_flush(&mut self) {
        self.did.push(Did::Flush);
    }

    fn userd_read(&mut self, channel: ChannelId, offset: u64) -> u32 {
        self.userd(channel, offset)
    }

    fn userd_write(&mut self, channel: ChannelId, offset: u64, value: u32) {
        self.did.push(Did::Doorbell(channel.0, value));
        self.set_userd(channel, offset, value);
    }
}

/// A guest's sparse VRAM, stored by dword, and its rings, stored by virtual address. VRAM reads beyond 16 MiB fail.
#[derive(Default)]
pub(crate) struct Guest {
    words: BTreeMap<u64, [u8; 4]>,
    /// Ring entries that differ from the default in [`Self::entry`].
    pub(crate) entries: BTreeMap<u64, u64>,
    /// Numbers of unmapped virtual pages: their addresses divided by 4096.
    pub(crate) unmapped: BTreeSet<u64>,
}

impl Guest {
    pub(crate) fn put(&mut self, at: u64, value: u32) {
        self.words.insert(at / 4, value.to_le_bytes());
    }

    /// Writes an instance block at `at`, as a driver does before binding the channel.
    pub(crate) fn instance(&mut self, at: u64, userd: u64) -> GuestInstance {
        for (offset, value) in ramfc::DEFAULTS {
            self.put(at + offset, value);
        }
        self.put(at + ramfc::USERD_LO, userd as u32);
        self.put(at + ramfc::GP_BASE_LO, 0x2000_0000);
        self.put(at + ramfc::GP_BASE_HI, 10 << 16 | 0x12);
        self.put(at + vm::PDB_LO, 0x7000);
        self.put(at + vm::LIMIT_LO, 0xffff_ffff);
        self.put(at + vm::LIMIT_HI, 0xff);
        self.parse(at)
    }

    pub(crate) fn bytes(&mut self, at: u64) -> [u8; 4096] {
        let mut block = [0; 4096];
        GuestMemory::read(self, Place::Vram(GuestVramAddr(at)), &mut block).unwrap();
        block
    }

    pub(crate) fn parse(&mut self, at: u64) -> GuestInstance {
        GuestInstance::parse(&self.bytes(at)).unwrap()
    }

    /// Returns the ring entry at `va`. By default, this is an entry for four dwords at a unique address.
    pub(crate) fn entry(&self, va: u64) -> u64 {
        self.entries.get(&va).copied().unwrap_or(4 << 42 | (va & 0x7f_ffff_fff8) >> 1)
    }
}

impl GuestMemory for Guest {
    fn read(&mut self, place: Place, data: &mut [u8]) -> Result<(), Unreadable> {
        let Place::Vram(start) = place else { return Err(Unreadable) };
        if start.0 + data.len() as u64 > 16 << 20 {
            return Err(Unreadable);
        }
        for (index, bytes) in (start.0 / 4..).zip(data.chunks_mut(4)) {
            let word = self.words.get(&index).copied().unwrap_or_default();
            bytes.copy_from_slice(&word[..bytes.len()]);
        }
        Ok(())
    }
}

impl GuestRing for Guest {
    fn read(&mut self, va: GpuVa, data: &mut [u8]) -> Result<(), Unmapped> {
        assert!(!data.is_empty() && va.0 / 4096 == (va.0 + data.len() as u64 - 1) / 4096, "one page at a time");
        assert!(va.0 < HOST, "the host's addresses do not belong to the guest");
        if self.unmapped.contains(&(va.0 / 4096)) {
            return Err(Unmapped);
        }
        for (at, bytes) in (va.0..).step_by(8).zip(data.chunks_mut(8)) {
            bytes.copy_from_slice(&self.entry(at).to_le_bytes());
        }
        Ok(())
    }
}

/// Two VMs with at most four channels each. The VMs share one guest memory.
pub(crate) struct World {
    pub(crate) channels: Channels,
    pub(crate) card: Card,
    pub(crate) guest: Guest,
    pub(crate) now: u64,
}

impl World {
    pub(crate) fn new() -> Self {
        let mut channels = Channels::new(LAYOUT, &GOLDEN);
        channels.add_vm(A, 4);
        channels.add_vm(B, 4);
        Self { channels, card: Card::default(), guest: Guest::default(), now: 0 }
    }

    /// Returns the guest VRAM address of a channel's instance block.
    pub(crate) fn instance_of(channel: u8) -> u64 {
        0x1_0000 + u64::from(channel) * 0x1000
    }

    pub(crate) fn userd_of(channel: u8) -> u64 {
        0x20_0000 + u64::from(channel) * 0x1000
    }

    /// Returns the virtual address of a channel's ring, which has 1024 entries.
    pub(crate) fn ring_of(vm: TenantId, channel: u8) -> u64 {
        0x12_2000_0000 + (u64::from(vm.0) * 256 + u64::from(channel)) * 0x2000
    }

    pub(crate) fn directory_of(vm: TenantId) -> VramAddr {
        VramAddr(0x80_0000 + u64::from(vm.0) * 0x1_0000)
    }

    /// Binds the channel with the current contents of the guest's instance block.
    pub(crate) fn bind_block(&mut self, vm: TenantId, channel: u8) -> Result<ChannelId, crate::BindError> {
        let at = Self::instance_of(channel);
        let guest = self.guest.parse(at);
        let instance = Place::Vram(GuestVramAddr(at));
        let bind = Bind { instance, guest: &guest, directory: Self::directory_of(vm) };
        self.channels.bind(&mut self.card, vm, VirtualChannelId(channel), bind)
    }

    pub(crate) fn try_bind(&mut self, vm: TenantId, channel: u8) -> Result<ChannelId, crate::BindError> {
        let at = Self::instance_of(channel);
        self.guest.instance(at, Self::userd_of(channel));
        let ring = Self::ring_of(vm, channel);
        self.guest.put(at + ramfc::GP_BASE_LO, ring as u32);
        self.guest.put(at + ramfc::GP_BASE_HI, 10 << 16 | (ring >> 32) as u32);
        self.bind_block(vm, channel)
    }

    pub(crate) fn bind(&mut self, vm: TenantId, channel: u8) -> ChannelId {
        self.try_bind(vm, channel).unwrap()
    }

    pub(crate) fn enable(&mut self, vm: TenantId, channel: u8, enabled: bool) -> bool {
        let parts = &mut Parts { card: &mut self.card, guest: &mut self.guest };
        self.channels.enable(parts, vm, VirtualChannelId(channel), enabled)
    }

    pub(crate) fn preempt(&mut self, vm: TenantId, channel: u8) {
        let parts = &mut Parts { card: &mut self.card, guest: &mut self.guest };
        self.channels.preempt(parts, vm, VirtualChannelId(channel));
    }

    pub(crate) fn list(&mut self, vm: TenantId, list: &[u8]) -> crate::Submitted {
        let list: Vec<_> = list.iter().copied().map(VirtualChannelId).collect();
        self.channels.submit_runlist(&mut Parts { card: &mut self.card, guest: &mut self.guest }, vm, &list)
    }

    /// Binds, starts and lists a channel, as a driver does.
    pub(crate) fn run(&mut self, vm: TenantId, channel: u8) -> ChannelId {
        let physical = self.bind(vm, channel);
        self.start(vm, channel);
        physical
    }

    pub(crate) fn start(&mut self, vm: TenantId, channel: u8) {
        self.enable(vm, channel, true);
        let mut list: Vec<u8> = self.channels.vms[&vm].list.clone();
        list.push(channel);
        self.list(vm, &list);
    }

    pub(crate) fn check(&mut self, vm: TenantId, channel: u8, gp_put: u32) -> Result<crate::Doorbell, DoorbellError> {
        let parts = &mut Parts { card: &mut self.card, guest: &mut self.guest };
        self.channels.doorbell(parts, vm, VirtualChannelId(channel), gp_put)
    }

    /// Pulls a doorbell without starting the submission.
    pub(crate) fn stage(&mut self, doorbell: crate::Doorbell) -> Result<Pulled, crate::PullError> {
        self.channels.pull(&mut Parts { card: &mut self.card, guest: &mut self.guest }, doorbell, self.now)
    }

    /// Pulls a doorbell and starts the submission. Clears the submission's number and dword count, so that results can
    /// be compared.
    pub(crate) fn pull(&mut self, doorbell: crate::Doorbell) -> Result<Pulled, RingFault> {
        let result = self.stage(doorbell);
        let pulled = result.unwrap_or_else(|error| error.pulled);
        assert_eq!(pulled.submission.is_some(), pulled.taken > 0);
        if let Some(submission) = pulled.submission {
            assert!(self.channels.start(&mut self.card, doorbell.channel, submission));
        }
        result.map(|pulled| Pulled { submission: None, words: 0, ..pulled }).map_err(|error| error.fault)
    }

    /// Rings a doorbell and pulls immediately.
    pub(crate) fn ring(&mut self, vm: TenantId, channel: u8, gp_put: u32) -> Result<Pulled, DoorbellError> {
        let doorbell = self.check(vm, channel, gp_put)?;
        Ok(self.pull(doorbell).expect("the ring is valid"))
    }

    pub(crate) fn completed(&mut self) -> Vec<crate::Completion> {
        self.channels.completed(&mut self.card, self.now, true)
    }

    pub(crate) fn userd(&mut self, vm: TenantId, channel: u8, offset: u64) -> u32 {
        self.channels.userd_read(&mut self.card, vm, VirtualChannelId(channel), offset)
    }
}
