//! A card that does as it is told and remembers in which order, and a guest's memory.

use crate::{Bind, Channels, GuestInstance, GuestMemory, Host, Layout, Place, Unreadable, VmId};
use nvspec::addr::{GuestVramAddr, VramAddr};
use nvspec::fifo::{ChannelId, VirtualChannelId};
use nvspec::instance::{ramfc, vm};
use nvspec::regs::pfifo;
use std::collections::BTreeMap;

pub(crate) const LAYOUT: Layout = Layout {
    instances: VramAddr(0x10_0000),
    userd: VramAddr(0x20_0000),
    runlists: [VramAddr(0x30_0000), VramAddr(0x30_1000)],
};
pub(crate) const A: VmId = VmId(1);
pub(crate) const B: VmId = VmId(2);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Did {
    Register(u32, u32),
    Vram(u64, usize),
    Flush,
    Doorbell(u8, u32),
}

#[derive(Default)]
pub(crate) struct Card {
    pub(crate) registers: BTreeMap<u32, u32>,
    /// By page.
    pub(crate) vram: BTreeMap<u64, Box<[u8; 4096]>>,
    pub(crate) userd: BTreeMap<(u8, u64), u32>,
    pub(crate) did: Vec<Did>,
    /// Channels that are never let go of.
    pub(crate) hung: Vec<u8>,
    pub(crate) polls: u32,
}

impl Card {
    pub(crate) fn word(&self, at: u64) -> u32 {
        let Some(page) = self.vram.get(&(at / 4096)) else { return 0 };
        u32::from_le_bytes(*page[(at % 4096) as usize..].first_chunk().unwrap())
    }

    pub(crate) fn block_word(&self, channel: ChannelId, offset: u64) -> u32 {
        self.word(LAYOUT.instance(channel).0 + offset)
    }

    /// The runlist that the card has now: channel numbers.
    pub(crate) fn runlist(&self) -> Vec<u32> {
        let base = u64::from(self.registers[&pfifo::RUNLIST_BASE::OFFSET] & 0xfff_ffff) << 12;
        let length = self.registers[&pfifo::RUNLIST::OFFSET] & 0xfff;
        (0..u64::from(length)).map(|entry| self.word(base + entry * 8)).collect()
    }

    pub(crate) fn enabled(&self, channel: ChannelId) -> bool {
        self.registers.get(&pfifo::CHANNEL_STATE::at(channel.0.into())).is_some_and(|state| state & 1 != 0)
    }

    pub(crate) fn bound(&self, channel: ChannelId) -> u32 {
        self.registers.get(&pfifo::CHANNEL::at(channel.0.into())).copied().unwrap_or(0)
    }

    /// Where in the record the register was first written with `value`.
    pub(crate) fn when(&self, offset: u32, value: u32) -> usize {
        let wanted = Did::Register(offset, value);
        self.did.iter().position(|did| *did == wanted).unwrap_or_else(|| panic!("no {wanted:x?} in {:x?}", self.did))
    }
}

impl Host for Card {
    fn read32(&mut self, offset: u32) -> u32 {
        let value = self.registers.get(&offset).copied().unwrap_or(0);
        let hung = offset == pfifo::PREEMPT::OFFSET && self.hung.contains(&((value & 0x7f) as u8));
        if hung { value | pfifo::PREEMPT::PENDING.mask() } else { value }
    }

    fn write32(&mut self, offset: u32, value: u32) {
        self.did.push(Did::Register(offset, value));
        self.registers.insert(offset, value);
    }

    fn vram_write(&mut self, address: VramAddr, data: &[u8]) {
        self.did.push(Did::Vram(address.0, data.len()));
        let page = self.vram.entry(address.0 / 4096).or_insert_with(|| Box::new([0; 4096]));
        let within = (address.0 % 4096) as usize;
        page[within..within + data.len()].copy_from_slice(data);
    }

    fn vram_flush(&mut self) {
        self.did.push(Did::Flush);
    }

    fn userd_read(&mut self, channel: ChannelId, offset: u64) -> u32 {
        self.userd.get(&(channel.0, offset)).copied().unwrap_or(0)
    }

    fn userd_write(&mut self, channel: ChannelId, offset: u64, value: u32) {
        self.did.push(Did::Doorbell(channel.0, value));
        self.userd.insert((channel.0, offset), value);
    }

    fn relax(&mut self) {
        self.polls += 1;
    }
}

/// A guest's VRAM, sparse, by word; reads beyond 16 MiB fail.
#[derive(Default)]
pub(crate) struct Guest(BTreeMap<u64, [u8; 4]>);

impl Guest {
    pub(crate) fn put(&mut self, at: u64, value: u32) {
        self.0.insert(at / 4, value.to_le_bytes());
    }

    /// An instance block at `at` as a driver writes it before it binds the channel.
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

    pub(crate) fn parse(&mut self, at: u64) -> GuestInstance {
        let mut block = [0; 4096];
        self.read(Place::Vram(GuestVramAddr(at)), &mut block).unwrap();
        GuestInstance::parse(&block).unwrap()
    }
}

impl GuestMemory for Guest {
    fn read(&mut self, place: Place, data: &mut [u8]) -> Result<(), Unreadable> {
        let Place::Vram(start) = place else { return Err(Unreadable) };
        if start.0 + data.len() as u64 > 16 << 20 {
            return Err(Unreadable);
        }
        for (index, bytes) in (start.0 / 4..).zip(data.chunks_mut(4)) {
            let word = self.0.get(&index).copied().unwrap_or_default();
            bytes.copy_from_slice(&word[..bytes.len()]);
        }
        Ok(())
    }
}

/// Two VMs of four channels each, and one guest memory that serves both.
pub(crate) struct World {
    pub(crate) channels: Channels,
    pub(crate) card: Card,
    pub(crate) guest: Guest,
}

impl World {
    pub(crate) fn new() -> Self {
        let mut channels = Channels::new(LAYOUT);
        channels.add_vm(A, 4);
        channels.add_vm(B, 4);
        Self { channels, card: Card::default(), guest: Guest::default() }
    }

    /// Where the instance block of a channel lies for its guest.
    pub(crate) fn instance_of(channel: u8) -> u64 {
        0x1_0000 + u64::from(channel) * 0x1000
    }

    pub(crate) fn userd_of(channel: u8) -> u64 {
        0x20_0000 + u64::from(channel) * 0x1000
    }

    pub(crate) fn try_bind(&mut self, vm: VmId, channel: u8) -> Result<ChannelId, crate::BindError> {
        let at = Self::instance_of(channel);
        let guest = self.guest.instance(at, Self::userd_of(channel));
        let bind = Bind {
            instance: Place::Vram(GuestVramAddr(at)),
            guest: &guest,
            directory: VramAddr(0x80_0000 + u64::from(vm.0) * 0x1_0000),
        };
        self.channels.bind(&mut self.card, vm, VirtualChannelId(channel), bind)
    }

    pub(crate) fn bind(&mut self, vm: VmId, channel: u8) -> ChannelId {
        self.try_bind(vm, channel).unwrap()
    }

    pub(crate) fn enable(&mut self, vm: VmId, channel: u8, enabled: bool) -> bool {
        self.channels.enable(&mut self.card, &mut self.guest, vm, VirtualChannelId(channel), enabled)
    }

    pub(crate) fn list(&mut self, vm: VmId, list: &[u8]) -> crate::Submitted {
        let list: Vec<_> = list.iter().copied().map(VirtualChannelId).collect();
        self.channels.submit_runlist(&mut self.card, &mut self.guest, vm, &list)
    }

    /// As a driver does it: bind, start, list.
    pub(crate) fn run(&mut self, vm: VmId, channel: u8) -> ChannelId {
        let physical = self.bind(vm, channel);
        self.enable(vm, channel, true);
        let mut list: Vec<u8> = self.channels.vms[&vm].list.clone();
        list.push(channel);
        self.list(vm, &list);
        physical
    }

    pub(crate) fn ring(&mut self, vm: VmId, channel: u8, gp_put: u32) -> Result<bool, crate::DoorbellError> {
        let channel = VirtualChannelId(channel);
        let doorbell = self.channels.doorbell(&mut self.card, &mut self.guest, vm, channel, gp_put)?;
        Ok(self.channels.ring(&mut self.card, doorbell))
    }
}
