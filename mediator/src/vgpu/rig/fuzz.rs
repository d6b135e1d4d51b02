//! Any sequence of what a hostile guest and its VMM can do, beside a VM that must not notice: the body of the fuzz
//! target, and of a test over its seeds.
//!
//! Checked on the way: nothing panics. At the end of each input, when the hostile client has gone: the other VM's VRAM and
//! RAM hold what they held, it saw no interrupt and no fault, and the card's accounts are what they were.

use super::driver::{At, CE0, CE1, Channel, Driver, M2MF, PAGE, ce_copy, m2mf_copy, object};
use super::{Guest, Rig, settings};
use crate::config::Apertures;
use crate::vgpu::Settings;
use nvspec::regs::blocks;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::LazyLock;
use vmm_glue::RegionIndex;
use vram::Summary;

/// Most steps of one input.
const MAX_STEPS: usize = 256;
/// Channels that the hostile guest's own driver makes in one input.
const MAX_CHANNELS: usize = 8;
/// How often it brings the vGPU up in one input, which takes milliseconds.
const MAX_BRING_UPS: u32 = 4;
const MIB: u64 = 1 << 20;
const CARD_MIB: u32 = 64;
const VM_MIB: u64 = 16;
/// What the other VM's memory is full of: `fill` of the byte, different in each 64 bytes.
const CANARY: u8 = 0xc9;
/// Bytes of the other VM's RAM.
const CANARY_RAM: u64 = 0x1_0000;
/// Guest-physical distance of the regions that are lent.
const SLOT: u64 = 0x20_0000;
/// Inputs after which all of the other VM's memory is looked at, not only a part.
const FULL_CHECK: u64 = 32;

/// One thing that the hostile side does. Sizes are logarithms, modulo 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Step {
    /// Writes a register by its number in the list of all, and its index.
    Register { number: u16, index: u8, value: u32 },
    /// Reads one.
    Look { number: u16, index: u8 },
    /// Writes a region: 0 BAR0, 1 BAR1, 2 BAR3, 3 configuration space, 4 one that is not there.
    Write { region: u8, offset: u32, size: u8, value: u64 },
    /// Reads a region.
    Read { region: u8, offset: u32, size: u8 },
    /// Writes the guest's VRAM, or beyond, through PRAMIN.
    Poke { at: u32, value: u32 },
    /// The guest's CPU writes its RAM.
    Ram { slot: u8, at: u16, value: u64 },
    /// The VMM lends RAM.
    Map { slot: u8, pages: u8, writable: bool },
    /// The VMM takes RAM back.
    Unmap { slot: u8 },
    /// The driver brings the vGPU up.
    BringUp,
    /// The driver makes a channel.
    Channel { id: u8 },
    /// The driver maps memory in its last channel's address space, checked by no one but the mediator.
    Entry { page: u16, low: u32, high: u8 },
    /// The driver maps a page of lent RAM.
    MapRam { page: u16, slot: u8 },
    /// The driver submits a copy to its last channel: 0 M2MF, 1 and 2 the copy engines.
    Copy { engine: u8, from: u16, to: u16, pages: u8 },
    /// The driver submits two words as they are.
    Raw { words: u64 },
    /// The driver unbinds its last channel.
    Unbind,
    /// The driver serves interrupts.
    Service,
    /// The VMM resets the device.
    Reset,
    /// The VMM goes and another comes.
    Reconnect,
}

/// Reads numbers off the front of some bytes.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk()?;
        self.0 = tail;
        Some(*head)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn step(&mut self) -> Option<Step> {
        Some(match self.u8()? % 18 {
            0 => Step::Register { number: self.u16()?, index: self.u8()?, value: self.u32()? },
            1 => Step::Look { number: self.u16()?, index: self.u8()? },
            2 => Step::Write { region: self.u8()?, offset: self.u32()?, size: self.u8()?, value: self.u64()? },
            3 => Step::Read { region: self.u8()?, offset: self.u32()?, size: self.u8()? },
            4 => Step::Poke { at: self.u32()?, value: self.u32()? },
            5 => Step::Ram { slot: self.u8()?, at: self.u16()?, value: self.u64()? },
            6 => Step::Map { slot: self.u8()?, pages: self.u8()?, writable: self.u8()? & 1 != 0 },
            7 => Step::Unmap { slot: self.u8()? },
            8 => Step::BringUp,
            9 => Step::Channel { id: self.u8()? },
            10 => Step::Entry { page: self.u16()?, low: self.u32()?, high: self.u8()? },
            11 => Step::MapRam { page: self.u16()?, slot: self.u8()? },
            12 => Step::Copy { engine: self.u8()?, from: self.u16()?, to: self.u16()?, pages: self.u8()? },
            13 => Step::Raw { words: self.u64()? },
            14 => Step::Unbind,
            15 => Step::Service,
            16 => Step::Reset,
            _ => Step::Reconnect,
        })
    }
}

/// The steps that some bytes stand for. Any bytes do; what is cut short at the end is left out.
#[must_use]
pub fn decode(bytes: &[u8]) -> Vec<Step> {
    let mut bytes = Bytes(bytes);
    std::iter::from_fn(|| bytes.step()).take(MAX_STEPS).collect()
}

/// Bytes that decode to these steps.
#[must_use]
pub fn encode(steps: &[Step]) -> Vec<u8> {
    let mut out = Vec::new();
    for step in steps {
        match *step {
            Step::Register { number, index, value } => {
                out.push(0);
                out.extend(number.to_le_bytes());
                out.push(index);
                out.extend(value.to_le_bytes());
            }
            Step::Look { number, index } => {
                out.push(1);
                out.extend(number.to_le_bytes());
                out.push(index);
            }
            Step::Write { region, offset, size, value } => {
                out.extend([2, region]);
                out.extend(offset.to_le_bytes());
                out.push(size);
                out.extend(value.to_le_bytes());
            }
            Step::Read { region, offset, size } => {
                out.extend([3, region]);
                out.extend(offset.to_le_bytes());
                out.push(size);
            }
            Step::Poke { at, value } => {
                out.push(4);
                out.extend(at.to_le_bytes());
                out.extend(value.to_le_bytes());
            }
            Step::Ram { slot, at, value } => {
                out.extend([5, slot]);
                out.extend(at.to_le_bytes());
                out.extend(value.to_le_bytes());
            }
            Step::Map { slot, pages, writable } => out.extend([6, slot, pages, writable.into()]),
            Step::Unmap { slot } => out.extend([7, slot]),
            Step::BringUp => out.push(8),
            Step::Channel { id } => out.extend([9, id]),
            Step::Entry { page, low, high } => {
                out.push(10);
                out.extend(page.to_le_bytes());
                out.extend(low.to_le_bytes());
                out.push(high);
            }
            Step::MapRam { page, slot } => {
                out.push(11);
                out.extend(page.to_le_bytes());
                out.push(slot);
            }
            Step::Copy { engine, from, to, pages } => {
                out.extend([12, engine]);
                out.extend(from.to_le_bytes());
                out.extend(to.to_le_bytes());
                out.push(pages);
            }
            Step::Raw { words } => {
                out.push(13);
                out.extend(words.to_le_bytes());
            }
            Step::Unbind => out.push(14),
            Step::Service => out.push(15),
            Step::Reset => out.push(16),
            Step::Reconnect => out.push(17),
        }
    }
    out
}

/// A card and both VMs; kept from input to input.
struct World {
    rig: Rig,
    evil: Driver,
    victim: Guest,
    channels: Vec<Channel>,
    bring_ups: u32,
    registers: Vec<(u32, u32, u32)>,
    usage: (Summary, u32, usize),
    inputs: u64,
}

impl World {
    fn new(apertures: Apertures) -> Self {
        let rig = Rig::new(CARD_MIB);
        let evil = Driver::unborn(rig.guest_with(0, &Settings { apertures, ..settings(VM_MIB, 16) }));
        let mut victim = rig.guest(1, VM_MIB, 16);
        assert!(victim.map_ram(0, CANARY_RAM, true));
        victim.ram_write(0, &canary(CANARY_RAM));
        (0..VM_MIB).for_each(|mib| victim.vram_write(mib * MIB, &canary(MIB)));
        let registers = blocks().flat_map(|(_, _, _, info)| *info).map(|info| (info.offset, info.stride, info.count));
        let registers = registers.collect();
        let usage = rig.usage();
        Self { rig, evil, victim, channels: Vec::new(), bring_ups: 0, registers, usage, inputs: 0 }
    }

    fn register(&self, number: u16, index: u8) -> u32 {
        let (offset, stride, count) = self.registers[usize::from(number) % self.registers.len()];
        offset + stride * (u32::from(index) % count.max(1))
    }

    fn step(&mut self, step: Step) {
        let guest = &mut self.evil.guest;
        match step {
            Step::Register { number, index, value } => {
                let offset = self.register(number, index);
                self.evil.guest.wr(offset, value);
            }
            Step::Look { number, index } => {
                let offset = self.register(number, index);
                self.evil.guest.rd(offset);
            }
            Step::Write { region, offset, size, value } => {
                if let Some((region, offset, size)) = place(region, offset, size) {
                    let data = &value.to_le_bytes()[..size];
                    guest.write(region, offset, data);
                    // What a client can map it writes without telling, wherever it can.
                    if let Some(file) = guest.mapped(region) {
                        assert_eq!(rustix::io::pwrite(&file, data, offset), Ok(size));
                    }
                }
            }
            Step::Read { region, offset, size } => {
                if let Some((region, offset, size)) = place(region, offset, size) {
                    guest.read(region, offset, &mut [0; 8][..size]);
                }
            }
            Step::Poke { at, value } => guest.poke(u64::from(at % (CARD_MIB << 20)) & !3, value),
            Step::Ram { slot, at, value } => {
                let gpa = u64::from(slot % 8) * SLOT + u64::from(at & !7);
                if guest.ram_at(gpa).is_some() {
                    guest.ram_write(gpa, &value.to_le_bytes());
                }
            }
            Step::Map { slot, pages, writable } => {
                guest.map_ram(u64::from(slot % 8) * SLOT, u64::from(pages % 64 + 1) * PAGE, writable);
            }
            Step::Unmap { slot } => {
                guest.unmap_ram(u64::from(slot % 8) * SLOT);
            }
            Step::BringUp => {
                if self.bring_ups < MAX_BRING_UPS {
                    self.bring_ups += 1;
                    self.channels.clear();
                    self.evil.bring_up();
                }
            }
            Step::Channel { id } => {
                if self.evil.is_up() && self.channels.len() < MAX_CHANNELS && self.evil.room() >= MIB {
                    self.channels.push(self.evil.channel(id & 0x7f));
                }
            }
            Step::Entry { page, low, high } => {
                if let Some(channel) = self.channels.last() {
                    self.evil.pte(channel.space, u64::from(page) * PAGE % (128 * MIB), low, high.into());
                    self.evil.flush();
                }
            }
            Step::MapRam { page, slot } => {
                if let Some(channel) = self.channels.last() {
                    let at = At::Ram(u64::from(slot % 8) * SLOT);
                    self.evil.map(channel.space, u64::from(page) * PAGE % (128 * MIB), at, 1);
                }
            }
            Step::Copy { engine, from, to, pages } => {
                if let Some(channel) = self.channels.last_mut() {
                    let (from, to, pages) = (u64::from(from) * PAGE, u64::from(to) * PAGE, u32::from(pages % 8 + 1));
                    let words = match engine % 3 {
                        0 => [object(M2MF), m2mf_copy(from, to, pages * PAGE as u32)].concat(),
                        1 => [object(CE0), ce_copy(from, to, pages)].concat(),
                        _ => [object(CE1), ce_copy(from, to, pages)].concat(),
                    };
                    self.evil.submit(channel, &words);
                }
            }
            Step::Raw { words } => {
                if let Some(channel) = self.channels.last_mut() {
                    self.evil.submit(channel, &[words as u32, (words >> 32) as u32]);
                }
            }
            Step::Unbind => {
                if let Some(channel) = self.channels.pop() {
                    self.evil.unbind(&channel);
                    self.evil.submit_runlist();
                }
            }
            Step::Service => self.evil.service(),
            Step::Reset => guest.reset(),
            Step::Reconnect => guest.reconnect(),
        }
    }

    fn finish(&mut self) {
        self.channels.clear();
        self.bring_ups = 0;
        self.evil.guest.reconnect();
        self.evil.forget();
        let (mut chunks, channels, iova) = self.rig.usage();
        // How much was scrubbed since the start is no account of what there is.
        chunks.scrubbed = self.usage.0.scrubbed;
        let unowned = |chunks: &Summary| {
            let placed: Vec<_> = chunks.vms.iter().map(|(vm, account)| (*vm, account.placed)).collect();
            (chunks.free + chunks.to_scrub, chunks.mediator, placed)
        };
        assert_eq!((unowned(&chunks), channels, iova), (unowned(&self.usage.0), self.usage.1, self.usage.2));
        self.check_victim();
        self.inputs += 1;
    }

    fn check_victim(&self) {
        let wanted = canary(MIB);
        let mut found = vec![0; MIB as usize];
        let all = self.inputs.is_multiple_of(FULL_CHECK);
        for mib in (0..VM_MIB).filter(|mib| all || *mib == self.inputs % VM_MIB) {
            self.victim.vram_read(mib * MIB, &mut found);
            assert!(found == wanted, "the other VM's VRAM has changed, in MiB {mib}");
        }
        let found = &mut found[..CANARY_RAM as usize];
        self.victim.ram_read(0, found);
        assert!(*found == wanted[..CANARY_RAM as usize], "the other VM's RAM has changed");
        assert!(!self.victim.take_msi(), "the other VM was interrupted");
        assert_eq!(self.victim.counter("faults"), 0);
    }
}

fn canary(bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| CANARY ^ (at >> 6) as u8).collect()
}

/// Aligned, and inside of the region, as the server hands accesses to a device.
fn place(region: u8, offset: u32, size: u8) -> Option<(RegionIndex, u64, usize)> {
    let (region, bytes) = match region % 5 {
        0 => (RegionIndex::Bar0, 16 * MIB),
        1 => (RegionIndex::Bar1, 128 * MIB),
        2 => (RegionIndex::Bar3, 64 * MIB),
        3 => (RegionIndex::Config, 4096),
        _ => return None,
    };
    let size = 1u64 << (size % 4);
    Some((region, (u64::from(offset) % bytes) & !(size - 1), size as usize))
}

/// Runs one input, by a VM whose apertures are trapped and by one whose are mapped.
///
/// # Panics
/// When something is wrong with the mediator.
pub fn run(input: &[u8]) {
    static WORLDS: LazyLock<[Mutex<World>; 2]> =
        LazyLock::new(|| [Apertures::Trapped, Apertures::Remapped].map(|apertures| Mutex::new(World::new(apertures))));
    for world in &*WORLDS {
        let world = &mut *world.lock();
        for step in decode(input) {
            world.step(step);
        }
        world.finish();
    }
}

/// Inputs to begin with, by name: what a driver does, and some of what it should not.
#[must_use]
pub fn seeds() -> BTreeMap<&'static str, Vec<u8>> {
    let up = [Step::Map { slot: 0, pages: 15, writable: true }, Step::BringUp, Step::Channel { id: 1 }];
    let copy = |engine, from, to| Step::Copy { engine, from, to, pages: 0 };
    let seed = |rest: &[Step]| encode(&[&up, rest].concat());
    BTreeMap::from([
        ("bring_up", encode(&up)),
        ("copy", seed(&[Step::MapRam { page: 0x1000, slot: 0 }, copy(1, 0x200, 0x1000), Step::Service])),
        ("engines", seed(&[copy(0, 0x200, 0x201), copy(1, 0x201, 0x202), copy(2, 0x202, 0x203), Step::Service])),
        ("fault", seed(&[copy(1, 0x200, 0x2000), Step::Service, Step::Unbind, Step::Channel { id: 1 }])),
        (
            "foreign",
            seed(&[Step::Entry { page: 0x1000, low: ((16 * MIB) >> 8) as u32 | 1, high: 0 }, copy(2, 0x200, 0x1000)]),
        ),
        ("unmap", seed(&[Step::MapRam { page: 0x1000, slot: 0 }, copy(1, 0x200, 0x1000), Step::Unmap { slot: 0 }])),
        ("reset", seed(&[copy(0, 0x200, 0x201), Step::Reset, Step::BringUp, Step::Channel { id: 2 }])),
        (
            "reconnect",
            seed(&[copy(0, 0x200, 0x201), Step::Reconnect, Step::Map { slot: 1, pages: 1, writable: false }]),
        ),
        (
            "windows",
            seed(&[
                Step::Poke { at: 0x10_0000, value: 0x1234_5678 },
                Step::Poke { at: 0x110_0000, value: 0x1234_5678 },
                Step::Write { region: 1, offset: 0x108c, size: 2, value: 1 },
                Step::Read { region: 2, offset: 0x1088, size: 3 },
                Step::Write { region: 3, offset: 4, size: 1, value: 0 },
                Step::Ram { slot: 0, at: 0x100, value: u64::MAX },
            ]),
        ),
        (
            "registers",
            seed(&[
                Step::Register { number: 40, index: 3, value: 0xc000_0100 },
                Step::Look { number: 40, index: 3 },
                Step::Raw { words: 0x2001_0000_0000_0000 },
            ]),
        ),
    ])
}
