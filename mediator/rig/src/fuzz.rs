//! Arbitrary sequences of accesses by a hostile guest and its VMM, next to a VM that must not be affected. Both the
//! fuzz target and a test with the target's seeds run this module.
//!
//! No input may cause a panic. At the end of each input, after the hostile client has disconnected, the harness checks
//! the other VM and the card: the other VM's VRAM and RAM must be unchanged, it must not have received an interrupt or
//! fault, and the card's resource accounting must have its initial values.

use super::driver::{At, CE0, CE1, Channel, Driver, M2MF, PAGE, ce_copy, m2mf_copy, object};
use super::paravirtual::{Interface, Ops, RAM_BYTES};
use super::{Guest, Rig, settings};
use nvspec::regs::blocks;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::{Duration, Instant};
use vgpu::Apertures;
use vgpu::{PvSettings, Settings};
use vmm_glue::RegionIndex;
use vram::TenantId;

/// Maximum number of steps per input.
const MAX_STEPS: usize = 256;
/// Maximum number of channels that the hostile guest creates per input.
const MAX_CHANNELS: usize = 8;
/// Maximum number of vGPU initializations per input, each of which takes milliseconds.
const MAX_BRING_UPS: u32 = 4;
const MIB: u64 = 1 << 20;
const CARD_MIB: u32 = 64;
const VM_MIB: u64 = 16;
/// Seed of the other VM's memory pattern, which changes every 64 bytes.
const CANARY: u8 = 0xc9;
/// Size of the other VM's RAM in bytes.
const CANARY_RAM: u64 = 0x1_0000;
/// Distance between lent regions in guest-physical address space, in bytes.
const SLOT: u64 = 0x20_0000;
/// Interval between full checks of the other VM's memory, in inputs. The other checks cover only a part of the memory.
const FULL_CHECK: u64 = 32;
/// Maximum time for an input's resources to be released.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Action of the hostile guest or VMM. Sizes are base-2 logarithms, modulo 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are self-explanatory")]
pub enum Step {
    /// Writes a register, selected by its position in the list of all registers and by an index.
    Register { number: u16, index: u8, value: u32 },
    /// Reads a register.
    Look { number: u16, index: u8 },
    /// Writes a region: 0 for BAR0, 1 for BAR1, 2 for BAR3, 3 for configuration space, 4 for a nonexistent region.
    Write { region: u8, offset: u32, size: u8, value: u64 },
    /// Reads a region.
    Read { region: u8, offset: u32, size: u8 },
    /// Writes through PRAMIN to the guest's VRAM, or beyond it.
    Poke { at: u32, value: u32 },
    /// The guest's CPU writes to RAM.
    Ram { slot: u8, at: u16, value: u64 },
    /// The VMM lends RAM.
    Map { slot: u8, pages: u8, writable: bool },
    /// The VMM withdraws RAM.
    Unmap { slot: u8 },
    /// The driver initializes the vGPU.
    BringUp,
    /// The driver creates a channel.
    Channel { id: u8 },
    /// The driver writes an arbitrary page table entry in its last channel's address space.
    Entry { page: u16, low: u32, high: u8 },
    /// The driver maps a page of lent RAM.
    MapRam { page: u16, slot: u8 },
    /// The driver submits a copy on its last channel. `engine` is 0 for M2MF, and 1 or 2 for a copy engine.
    Copy { engine: u8, from: u16, to: u16, pages: u8 },
    /// The driver submits two arbitrary words.
    Raw { words: u64 },
    /// The driver unbinds its last channel.
    Unbind,
    /// The driver handles interrupts.
    Service,
    /// The driver sets up the paravirtual interface in lent RAM.
    Paravirtual { slot: u8 },
    /// The driver publishes a batch of one operation, and rings the doorbell.
    Operation { code: u8, handle: u8, a: u32, b: u32, c: u64 },
    /// The driver publishes a chain of one descriptor at an arbitrary address, and rings the doorbell.
    Chain { head: u16, at: u64, bytes: u32, flags: u8 },
    /// The VMM resets the device.
    Reset,
    /// The VMM disconnects, and another VMM connects.
    Reconnect,
}

/// Reads numbers from a byte slice.
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
        Some(match self.u8()? % 21 {
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
            17 => Step::Reconnect,
            18 => Step::Paravirtual { slot: self.u8()? },
            19 => {
                Step::Operation { code: self.u8()?, handle: self.u8()?, a: self.u32()?, b: self.u32()?, c: self.u64()? }
            }
            _ => Step::Chain { head: self.u16()?, at: self.u64()?, bytes: self.u32()?, flags: self.u8()? },
        })
    }
}

/// Decodes arbitrary bytes into steps. Drops an incomplete step at the end.
#[must_use]
pub fn decode(bytes: &[u8]) -> Vec<Step> {
    let mut bytes = Bytes(bytes);
    std::iter::from_fn(|| bytes.step()).take(MAX_STEPS).collect()
}

/// Encodes steps as bytes.
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
            Step::Paravirtual { slot } => out.extend([18, slot]),
            Step::Operation { code, handle, a, b, c } => {
                out.extend([19, code, handle]);
                out.extend(a.to_le_bytes());
                out.extend(b.to_le_bytes());
                out.extend(c.to_le_bytes());
            }
            Step::Chain { head, at, bytes, flags } => {
                out.push(20);
                out.extend(head.to_le_bytes());
                out.extend(at.to_le_bytes());
                out.extend(bytes.to_le_bytes());
                out.push(flags);
            }
        }
    }
    out
}

/// The card's resource usage: numbers of free chunks, of the mediator's chunks, of each VM's chunks, of channels, and
/// of I/O address ranges.
type Taken = (u32, u32, Vec<(TenantId, u32)>, u32, usize);

fn taken(rig: &Rig) -> Taken {
    let (chunks, channels, ranges) = rig.usage();
    let placed = chunks.vms.iter().map(|(vm, account)| (*vm, account.placed)).collect();
    (chunks.free + chunks.to_scrub, chunks.mediator, placed, channels, ranges)
}

/// The card and both VMs, reused for all inputs.
struct World {
    rig: Rig,
    evil: Driver,
    victim: Guest,
    channels: Vec<Channel>,
    interface: Option<Interface>,
    bring_ups: u32,
    registers: Vec<(u32, u32, u32)>,
    taken: Taken,
    inputs: u64,
}

impl World {
    fn new(apertures: Apertures) -> Self {
        let rig = Rig::new(CARD_MIB);
        let paravirtual = PvSettings { table_bytes: 4 * MIB, segment_bytes: 4 * MIB, group: Some("fuzzed".into()) };
        let of_evil = Settings { apertures, paravirtual: Some(paravirtual), ..settings(VM_MIB, 16) };
        let evil = Driver::unborn(rig.guest_with(0, &of_evil));
        let mut victim = rig.guest(1, VM_MIB, 16);
        assert!(victim.map_ram(0, CANARY_RAM, true));
        victim.ram_write(0, &canary(CANARY_RAM));
        (0..VM_MIB).for_each(|mib| victim.vram_write(mib * MIB, &canary(MIB)));
        let registers = blocks().flat_map(|(_, _, _, info)| *info).map(|info| (info.offset, info.stride, info.count));
        let registers = registers.collect();
        let taken = taken(&rig);
        Self { rig, evil, victim, channels: Vec::new(), interface: None, bring_ups: 0, registers, taken, inputs: 0 }
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
                    // If a client can map the memory, write to it directly.
                    if let Some(file) = guest.mapped(region).filter(|_| guest.maps(region, offset, size as u64)) {
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
            Step::Paravirtual { slot } => {
                let base = u64::from(slot % 8) * SLOT;
                self.interface = guest
                    .ram_at(base)
                    .is_some_and(|(_, bytes)| bytes >= RAM_BYTES)
                    .then(|| Interface::open(guest, base));
            }
            Step::Operation { code, handle, a, b, c } => {
                if let Some(mut interface) = self.interface() {
                    let bytes = operation(code, handle.into(), a, b, c).bytes();
                    interface.post(&mut self.evil.guest, &bytes);
                    self.interface = Some(interface);
                }
            }
            Step::Chain { head, at, bytes, flags } => {
                if let Some(mut interface) = self.interface() {
                    interface.descriptor(&self.evil.guest, head % 64, at, bytes, flags.into(), head / 64);
                    interface.publish(&mut self.evil.guest, head);
                    self.interface = Some(interface);
                }
            }
        }
    }

    /// Removes the paravirtual interface, and returns it if its RAM is mapped.
    fn interface(&mut self) -> Option<Interface> {
        let interface = self.interface.take()?;
        let there = self.evil.guest.ram_at(interface.base).is_some_and(|(_, bytes)| bytes >= RAM_BYTES);
        there.then_some(interface)
    }

    fn finish(&mut self) {
        self.channels.clear();
        self.interface = None;
        self.bring_ups = 0;
        self.evil.guest.reconnect();
        self.evil.forget();
        // On a busy host, the software card can take a while to release a channel.
        let began = Instant::now();
        while taken(&self.rig) != self.taken && began.elapsed() < RELEASE_TIMEOUT {
            std::thread::sleep(POLL_INTERVAL);
            self.evil.guest.reconnect();
        }
        assert_eq!(taken(&self.rig), self.taken);
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

/// Returns a well-formed operation with arbitrary arguments.
fn operation(code: u8, handle: u32, a: u32, b: u32, c: u64) -> Ops {
    let ops = Ops::new();
    match code % 23 {
        0 => ops.create(handle % 8, a % 4),
        1 => ops.destroy(handle % 8),
        2 => ops.set(handle % 8, a, b % 8, (b >> 8) % 8),
        3 => ops.run(handle % 8, a, b % 0x1_0000, c, u64::from(b >> 16)),
        4 => ops.list(handle % 8, a, &[c, c.rotate_left(8), u64::from(b)]),
        5 => ops.zero(handle % 8, a, b),
        6 => ops.bind(handle % 8, u64::from(a) << 12),
        7 => ops.flush(handle % 8),
        8 => ops.channel(pv::abi::op::CHANNEL_CREATE, handle),
        9 => ops.bind_channel(handle, u64::from(a) << 12),
        10 => ops.channel(pv::abi::op::CHANNEL_ENABLE, handle),
        11 => ops.channel(pv::abi::op::CHANNEL_DISABLE, handle),
        12 => ops.channel(pv::abi::op::CHANNEL_DESTROY, handle),
        13 => ops.runlist(&[handle, a, b]),
        14 => ops.fill(c, u64::from(a), b),
        15 => ops.copy(c, u64::from(a), u64::from(b)),
        16 => ops.priority(c, u64::from(a), b as i32),
        17 => ops.share_get(c, u64::from(a), b, handle),
        18 => ops.attach(a % 4, handle, b),
        19 => ops.detach(a % 4, handle),
        20 => ops.control(a % 4, b, handle),
        21 => ops.query(handle),
        _ => ops.raw(a as u16, b, &c.to_le_bytes()),
    }
}

fn canary(bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| CANARY ^ (at >> 6) as u8).collect()
}

/// Returns an aligned access inside the region, as the server would pass it to a device.
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

/// Runs one input, on a VM with trapped apertures and on a VM with mapped apertures.
///
/// # Panics
/// Panics if a check fails.
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

/// Returns the seed inputs by name: typical actions and typical errors of a driver.
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
            "paravirtual",
            encode(&[
                Step::Map { slot: 1, pages: 63, writable: true },
                Step::Map { slot: 0, pages: 15, writable: true },
                Step::BringUp,
                Step::Channel { id: 1 },
                Step::Paravirtual { slot: 1 },
                Step::Operation { code: 0, handle: 1, a: 1, b: 0, c: 0 },
                Step::Operation { code: 0, handle: 2, a: 2, b: 0, c: 0 },
                Step::Operation { code: 2, handle: 1, a: 0, b: 2, c: 0 },
                Step::Operation { code: 3, handle: 2, a: 0x100, b: 16 | 16 << 16, c: 0x1001 },
                Step::Operation { code: 6, handle: 1, a: 0x150, b: 0, c: 0 },
                Step::Operation { code: 7, handle: 1, a: 0, b: 0, c: 0 },
                Step::Operation { code: 8, handle: 3, a: 0, b: 0, c: 0 },
                Step::Operation { code: 9, handle: 3, a: 0x150, b: 0, c: 0 },
                Step::Operation { code: 10, handle: 3, a: 0, b: 0, c: 0 },
                Step::Operation { code: 13, handle: 3, a: 1, b: 1, c: 0 },
                Step::Operation { code: 17, handle: 3, a: 0x2000, b: 5, c: 7 },
                Step::Operation { code: 18, handle: 1, a: 1, b: 0, c: 0 },
                Step::Operation { code: 14, handle: 0, a: 0x1000, b: 0x55aa, c: 0x20_0000 },
                Step::Operation { code: 1, handle: 2, a: 0, b: 0, c: 0 },
                Step::Chain { head: 0, at: SLOT, bytes: 64, flags: 3 },
                Step::Service,
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
