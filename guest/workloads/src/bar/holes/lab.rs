//! Common code of the attempts: our own memory in VRAM and RAM, address spaces, a copy channel, and verdicts.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, bail, ensure};

use super::super::card::Card;
use super::super::layout::{Aperture, CHANNELS, LARGE_PAGE, PAGE, RAMFC, instance_pointer, page_entry, reg};
use crate::pattern::{Random, mix};
use gdev::mapping::{Mapping, Width};
use gdev::nouveau::push::{Engine, Push, Rect};

/// Virtual addresses in a channel's address space.
pub mod va {
    /// The GPFIFO ring.
    pub const RING: u64 = 0x1_0000;
    /// The push buffer, which consists of 4 pages.
    pub const PUSH: u64 = 0x2_0000;
    /// The fence page.
    pub const FENCE: u64 = 0x3_0000;
    /// The engine contexts.
    pub const IMAGE: u64 = 0x4_0000;
    /// One of our own buffers.
    pub const A: u64 = 0x10_0000;
    /// Address that the attempt accesses.
    pub const B: u64 = 0x20_0000;
    /// Another buffer of our own.
    pub const C: u64 = 0x30_0000;
    /// Address that the attempt accesses through large pages. No small page is mapped there.
    pub const LARGE: u64 = 0x80_0000;
}

/// Value that attempts write to memory where it must not persist.
pub const BRAND: u32 = 0xa77a_c4ed;
/// Value that attempts write to our own memory, where it must persist.
pub const MARKER: u32 = 0x600d_f00d;

/// VRAM address of the first hole's memory. Each hole has its own memory, so that holes do not interfere.
const FIRST_HOLE_AT: u64 = 4 << 20;
/// Size of a hole's memory in bytes.
const BYTES_PER_HOLE: u64 = 2 << 20;
/// Exclusive upper bound of the hole numbers.
pub const ROOMS: u32 = 40;
/// End of the last hole's VRAM.
pub const UNUSED: u64 = FIRST_HOLE_AT + ROOMS as u64 * BYTES_PER_HOLE;
/// Size of a page directory, in bytes.
const DIRECTORY: u64 = 64 << 10;
const TABLE: u64 = 32 << 10;
/// Size code of a directory entry that limits the small-page table to an eighth of its normal size: 4,096 entries.
const EIGHTH: u32 = 3 << 2;
/// Size of the engine contexts, in pages.
pub const IMAGE_PAGES: u64 = 16;
const PUSH_PAGES: u64 = 4;
const RING_ORDER: u32 = 6;
/// Maximum number of fence polls for work that must complete or fail.
const MAX_POLLS: u32 = 20_000;
/// Maximum number of fence polls for work that should not complete.
const SHORT_PATIENCE: u32 = 400;

/// The card, and the guest's own memory for an attempt.
pub struct Lab<'a> {
    /// The card.
    pub card: &'a Card,
    /// BAR1 and BAR3.
    pub bars: [&'a Mapping; 2],
    /// Size of the share's VRAM, in bytes.
    pub share: u64,
    /// Pattern that identifies another guest's memory.
    pub pattern: Vec<u8>,
    /// Source of random choices.
    pub random: Random,
    number: u32,
    base: u64,
    next: u64,
    bar1: Space,
    bar1_instance: u64,
    page: Option<RamPage>,
}

/// A page of this program's RAM, with its guest-physical address.
pub struct RamPage {
    _file: File,
    /// Contents of the page.
    pub bytes: Mapping,
    /// Guest-physical address of the page.
    pub gpa: u64,
}

/// A page directory with a small-page table for the first 16 MiB of the address space.
#[derive(Clone, Copy)]
pub struct Space {
    /// Guest VRAM address of the directory.
    pub directory: u64,
    /// Guest VRAM address of the table.
    pub table: u64,
}

/// A channel, with its structures in the guest's own VRAM.
#[derive(Clone, Copy)]
pub struct Channel {
    /// Channel number.
    pub id: u32,
    /// Address space of the channel.
    pub space: Space,
    /// Guest VRAM address of the instance block.
    pub instance: u64,
    /// Guest VRAM address of USERD.
    pub userd: u64,
    ring: u64,
    push: u64,
    fence: u64,
    image: u64,
    list: u64,
    put: u32,
    sequence: u32,
}

impl Channel {
    /// Returns the mappings that the channel needs, as tuples of virtual address, guest VRAM address, and number of
    /// pages.
    pub fn memory(&self) -> [(u64, u64, u64); 4] {
        [
            (va::RING, self.ring, 1),
            (va::PUSH, self.push, PUSH_PAGES),
            (va::FENCE, self.fence, 1),
            (va::IMAGE, self.image, IMAGE_PAGES),
        ]
    }

    /// Skips a fence value, which is then never released.
    pub fn sequence_skipped(&mut self) {
        self.sequence += 1;
    }
}

/// Outcome of submitted work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ran {
    /// The work has completed.
    Done,
    /// The card reported a fault at this address.
    Fault(u64),
    /// The card reported another error.
    Error,
    /// Neither completion nor an error occurred within the time limit.
    Nothing,
}

/// Result of the attempts at one hole.
#[derive(Debug, Default)]
pub struct Verdict {
    /// Number of attempts that were visibly rejected.
    pub denied: u64,
    /// Number of attempts that had no effect beyond the guest.
    pub contained: u64,
    /// Attempts that had an effect beyond the guest.
    pub open: Vec<String>,
}

impl Verdict {
    /// Records an attempt. `refused` is true if the card visibly rejected it, and `gained` if the attempt had an effect
    /// beyond the guest.
    pub fn note(&mut self, what: &str, refused: bool, gained: bool) {
        match (gained, refused) {
            (true, _) => self.open.push(what.to_owned()),
            (false, true) => self.denied += 1,
            (false, false) => self.contained += 1,
        }
    }

    /// Records work that must not complete.
    pub fn must_not_run(&mut self, what: &str, ran: Ran) {
        self.note(&format!("{what}: {ran:x?}"), matches!(ran, Ran::Fault(_) | Ran::Error), ran == Ran::Done);
    }

    /// Records work that must fault at `va`.
    pub fn must_fault(&mut self, what: &str, ran: Ran, va: u64) {
        let elsewhere = matches!(ran, Ran::Fault(at) if at & !0xfff != va & !0xfff);
        self.note(&format!("{what}: {ran:x?}"), true, elsewhere || !matches!(ran, Ran::Fault(_)));
    }

    /// Checks a condition that must hold before or after an attempt. A violation counts as an open hole.
    pub fn check(&mut self, what: &str, good: bool) {
        if !good {
            self.open.push(what.to_owned());
        }
    }
}

impl<'a> Lab<'a> {
    /// Claims the VRAM of hole `number` in a share of `share` bytes, and initializes the card.
    pub fn new(card: &'a Card, number: u32, share: u64, pattern: Vec<u8>) -> Result<Self> {
        ensure!(share >= UNUSED + BYTES_PER_HOLE, "{share} bytes of VRAM are too few");
        let base = FIRST_HOLE_AT + u64::from(number % ROOMS) * BYTES_PER_HOLE;
        let bars = [card.region(1)?, card.region(3)?];
        let random = Random(mix(u64::from(number)));
        let bar1 = Space { directory: base + PAGE, table: base + PAGE + DIRECTORY };
        let mut lab = Self {
            card,
            bars,
            share,
            pattern,
            random,
            number,
            base,
            next: base + PAGE,
            bar1,
            bar1_instance: 0,
            page: None,
        };
        // The first word of the hole's VRAM contains the number of bytes used so far.
        let used = u64::from(card.vram_read(base)).min(BYTES_PER_HOLE);
        card.vram_zero(base, used);
        lab.bar1 = lab.space();
        lab.bar1_instance = lab.take(1);
        lab.join(lab.bar1_instance, lab.bar1);
        lab.bring_up();
        Ok(lab)
    }

    /// Enables all units as a driver does, activates BAR1's address space, and acknowledges pending errors.
    pub fn bring_up(&self) {
        let card = self.card;
        card.write(reg::PMC_ENABLE, u32::MAX);
        card.write(reg::PBDMA_ENABLE, 0x7);
        card.write(reg::PFIFO_PBDMAS, 0x7);
        for (engine, pbdma) in [0u32, 1, 1, 1, 2, 1].into_iter().enumerate() {
            card.write(reg::PFIFO_ROUTE + 4 * engine as u32, !(1 << pbdma));
        }
        for pbdma in 0..3 {
            card.write(reg::PBDMA_INTR + pbdma * 0x2000, u32::MAX);
            card.write(reg::PBDMA_INTR_ENABLE + pbdma * 0x2000, 0xffff_feff);
        }
        card.write(reg::PFIFO_ENABLE, 1);
        card.write(reg::USERD_BASE, 0x1000_0000);
        for falcon in [0x409100, 0x104100, 0x105100] {
            card.write(falcon, 2);
        }
        card.write(reg::BAR1_INSTANCE, instance_pointer(self.bar1_instance, 0));
        self.flush();
        // The limit exceeds the number of faults that may be pending.
        for _ in 0..1000 {
            self.acknowledge();
            if self.error().is_none() {
                break;
            }
        }
    }

    /// Returns the address of this hole's VRAM, and its size in bytes.
    pub fn room(&self) -> (u64, u64) {
        (self.base, BYTES_PER_HOLE)
    }

    /// Reinitializes the lab in memory that the caller has cleared.
    pub fn renew(&mut self) -> Result<()> {
        *self = Self::new(self.card, self.number, self.share, std::mem::take(&mut self.pattern))?;
        Ok(())
    }

    /// Allocates pages of zeroed VRAM.
    pub fn take(&mut self, pages: u64) -> u64 {
        let at = self.next;
        self.next += pages * PAGE;
        assert!(self.next <= self.base + BYTES_PER_HOLE, "a hole needs more than {BYTES_PER_HOLE} bytes");
        self.card.vram_write(self.base, (self.next - self.base) as u32);
        at
    }

    /// Releases and clears all pages, except those of BAR1's address space.
    pub fn release(&mut self) {
        let first = self.bar1_instance + PAGE;
        self.card.vram_zero(first, self.next - first);
        self.next = first;
    }

    /// Creates an empty address space.
    pub fn space(&mut self) -> Space {
        let space = Space { directory: self.take(DIRECTORY / PAGE), table: self.take(TABLE / PAGE) };
        self.set(space.directory, [EIGHTH, (space.table >> 8) as u32 | 1]);
        space
    }

    /// Assigns an address space to an instance block.
    pub fn join(&self, instance: u64, space: Space) {
        for (offset, word) in [(0x200, space.directory as u32), (0x204, 0), (0x208, 0xffff_ffff), (0x20c, 0xff)] {
            self.card.vram_write(instance + offset, word);
        }
    }

    /// Maps pages without a TLB flush.
    pub fn map(&self, space: Space, va: u64, address: u64, aperture: Aperture, pages: u64) {
        for page in 0..pages {
            self.raw(space, va + page * PAGE, page_entry(address + page * PAGE, aperture));
        }
    }

    /// Writes a raw page table entry without a TLB flush.
    pub fn raw(&self, space: Space, va: u64, entry: [u32; 2]) {
        self.set(space.table + va / PAGE * 8, entry);
    }

    /// Adds a large-page table to an address space. Returns the address of the entry for `va::LARGE`.
    pub fn large(&mut self, space: Space) -> u64 {
        let table = self.take(1);
        self.card.vram_write(space.directory, (table >> 8) as u32 | 1 | EIGHTH);
        table + va::LARGE / LARGE_PAGE * 8
    }

    /// Writes an entry of two dwords at a VRAM address, for example a page table or runlist entry.
    pub fn set(&self, at: u64, [low, high]: [u32; 2]) {
        self.card.vram_write(at, low);
        self.card.vram_write(at + 4, high);
    }

    /// Flushes all TLBs.
    pub fn flush(&self) {
        self.card.write(reg::TLB_TRIGGER, 0x8000_0007);
        self.card.read(reg::TLB_TRIGGER);
    }

    /// Creates the structures of a channel, and maps its USERD in BAR1. [`Self::start`] binds the channel.
    pub fn channel(&mut self, id: u32) -> Channel {
        let space = self.space();
        let [instance, userd, ring, fence, list] = [1; 5].map(|pages| self.take(pages));
        let (push, image) = (self.take(PUSH_PAGES), self.take(IMAGE_PAGES));
        let channel = Channel { id, space, instance, userd, ring, push, fence, image, list, put: 0, sequence: 0 };
        for (va, at, pages) in channel.memory() {
            self.map(space, va, at, Aperture::Vram, pages);
        }
        self.fill_instance(&channel);
        self.map(self.bar1, u64::from(id) * PAGE, userd, Aperture::Vram, 1);
        self.flush();
        channel
    }

    /// Writes a valid instance block for the channel.
    pub fn fill_instance(&self, channel: &Channel) {
        self.join(channel.instance, channel.space);
        let image = va::IMAGE as u32 | 4;
        let words = [
            (0x08, channel.userd as u32),
            (0x0c, 0),
            (0x14, 0),
            (0x00, 0),
            (0x48, va::RING as u32),
            (0x4c, RING_ORDER << 16),
            (0x210, image),
            (0x230, image),
            (0x240, image),
        ];
        for (offset, word) in words.into_iter().chain(RAMFC) {
            self.card.vram_write(channel.instance + offset, word);
        }
    }

    /// Binds and enables a channel with an empty ring, and adds it to the runlist.
    pub fn start(&self, channel: &mut Channel) {
        let card = self.card;
        channel.put = 0;
        card.vram_write(channel.userd + 0x88, 0);
        card.vram_write(channel.userd + 0x8c, 0);
        // The instance block contains the ring position at which the channel was removed: GP_PUT, GP_GET and GP_FETCH.
        for saved in [0x000, 0x014, 0x050] {
            card.vram_write(channel.instance + saved, 0);
        }
        card.write(reg::CHANNEL + 8 * channel.id, 0x4000_0000 | instance_pointer(channel.instance, 0));
        card.write(reg::CHANNEL_STATE + 8 * channel.id, 0x001f_0001);
        self.list(channel);
    }

    /// Submits a runlist that contains only this channel.
    pub fn list(&self, channel: &Channel) {
        self.set(channel.list, [channel.id, 4]);
        self.card.write(reg::RUNLIST, (channel.list >> 12) as u32);
        self.card.write(reg::RUNLIST_SUBMIT, 0x01f0_0001);
    }

    /// Removes the channel, and acknowledges its errors.
    pub fn stop(&self, channel: &Channel) {
        self.card.write(reg::CHANNEL_STATE + 8 * channel.id, 0);
        self.card.write(reg::RUNLIST_SUBMIT, 0x01f0_0000);
        self.card.write(reg::CHANNEL + 8 * channel.id, 0);
        self.acknowledge();
    }

    /// Queues methods, followed by a fence.
    pub fn queue(&self, channel: &mut Channel, push: &Push) {
        let mut push = push.clone();
        channel.sequence += 1;
        push.methods(0, 0x10, &[0, va::FENCE as u32, channel.sequence, 2]);
        for (index, word) in push.words().iter().enumerate() {
            self.card.vram_write(channel.push + u64::from(channel.put) * 256 + 4 * index as u64, *word);
        }
        let from = va::PUSH + u64::from(channel.put) * 256;
        self.entry(channel, [from as u32, (push.words().len() as u32) << 10]);
    }

    /// Queues a raw ring entry.
    pub fn entry(&self, channel: &mut Channel, entry: [u32; 2]) {
        self.set(channel.ring + 8 * u64::from(channel.put), entry);
        channel.put += 1;
        assert!(channel.put < 1 << RING_ORDER, "the ring is full");
    }

    /// Rings the doorbell.
    pub fn ring(&self, channel: &Channel) {
        self.bars[0].store((u64::from(channel.id) * PAGE) as usize + 0x8c, Width::Dword, channel.put.into());
    }

    /// Waits until the queued work completes or fails, for at most `MAX_POLLS` polls, or `SHORT_PATIENCE` polls if
    /// `patient` is false.
    pub fn wait(&self, channel: &Channel, patient: bool) -> Ran {
        for _ in 0..if patient { MAX_POLLS } else { SHORT_PATIENCE } {
            if self.card.vram_read(channel.fence) == channel.sequence {
                return Ran::Done;
            }
            if let Some(ran) = self.error() {
                return ran;
            }
        }
        Ran::Nothing
    }

    /// Returns and acknowledges the card's pending error, if any.
    pub fn error(&self) -> Option<Ran> {
        let units = self.card.read(0x259c);
        if units != 0 {
            let unit = 0x2800 + 16 * units.trailing_zeros();
            let va = u64::from(self.card.read(unit + 8)) << 32 | u64::from(self.card.read(unit + 4));
            self.acknowledge();
            return Some(Ran::Fault(va));
        }
        let others = (0..3).map(|pbdma| reg::PBDMA_INTR + pbdma * 0x2000).chain([0x400100, 0x104008, 0x105008]);
        let shown = others.into_iter().any(|register| self.card.read(register) != 0);
        if shown {
            self.acknowledge();
        }
        shown.then_some(Ran::Error)
    }

    /// Starts a channel, runs methods on it, and stops it.
    pub fn run(&self, channel: &mut Channel, push: &Push) -> Ran {
        self.start(channel);
        let ran = self.go(channel, push, true);
        self.stop(channel);
        ran
    }

    /// Same as [`Self::run`], but waits only briefly, because the work should have no effect.
    pub fn try_run(&self, channel: &mut Channel, push: &Push) -> Ran {
        self.start(channel);
        let ran = self.go(channel, push, false);
        self.stop(channel);
        ran
    }

    /// Submits methods on a started channel, and waits for the result, longer if `patient` is true.
    pub fn go(&self, channel: &mut Channel, push: &Push, patient: bool) -> Ran {
        self.queue(channel, push);
        self.ring(channel);
        self.wait(channel, patient)
    }

    /// Copies a page with a copy engine.
    pub fn copy(&self, channel: &mut Channel, from: u64, to: u64) -> Ran {
        self.run(channel, &copies(&[(from, to)]))
    }

    /// Returns a page of this program's RAM, which is allocated on first use.
    pub fn ram(&mut self) -> Result<&RamPage> {
        if self.page.is_none() {
            self.page = Some(RamPage::new()?);
        }
        self.page.as_ref().context("a page")
    }

    /// Returns VRAM addresses outside our share that are multiples of `aligned`.
    pub fn outside(&mut self, aligned: u64) -> Vec<u64> {
        let (share, top) = (self.share, 1u64 << 40);
        let mut addresses =
            vec![share, share + aligned, 2 * share, 3 * share, (1 << 32) - aligned, 1 << 32, top - aligned];
        for _ in 0..8 {
            addresses.push(share + self.random.below(4 * share));
        }
        addresses.iter_mut().for_each(|address| *address &= !(aligned - 1));
        addresses.retain(|address| *address >= share);
        addresses
    }

    /// Returns true if a dword that was read outside the share reveals data.
    pub fn tells(&self, word: u32) -> bool {
        let bytes = word.to_le_bytes();
        let piece = |start: usize| self.pattern.iter().cycle().skip(start).take(4).eq(bytes.iter());
        let nothing = word == 0 || word == u32::MAX || word >> 20 == 0xbad;
        !nothing || (!self.pattern.is_empty() && word != 0 && (0..self.pattern.len()).any(piece))
    }

    /// Waits for writes in flight by reading a register, because a read is ordered after them.
    pub fn settle(&self) {
        self.card.read(reg::BOOT0);
    }

    /// Acknowledges all errors.
    pub fn acknowledge(&self) {
        for register in [0x259c, reg::PFIFO_INTR, 0x400108, 0x400100, 0x104004, 0x105004, 0x2a00] {
            self.card.write(register, u32::MAX);
        }
        (0..3).for_each(|pbdma| self.card.write(reg::PBDMA_INTR + pbdma * 0x2000, u32::MAX));
        self.card.write(0x400500, 0x0001_0001);
    }

    /// Fails unless the card responds, its clock advances, and one of our channels can copy.
    pub fn alive(&mut self, boot0: u32) -> Result<()> {
        ensure!(self.card.read(reg::BOOT0) == boot0, "BOOT0 is {:#x}", self.card.read(reg::BOOT0));
        let clock = || u64::from(self.card.read(reg::PTIMER_HIGH)) << 32 | u64::from(self.card.read(reg::PTIMER_LOW));
        let first = clock();
        ensure!((0..1000).any(|_| clock() != first), "the clock does not advance");
        self.bring_up();
        let mut channel = self.channel(CHANNELS - 1);
        let (from, to) = (self.take(1), self.take(1));
        self.card.vram_write(from, MARKER);
        self.map(channel.space, va::A, from, Aperture::Vram, 1);
        self.map(channel.space, va::B, to, Aperture::Vram, 1);
        self.flush();
        let ran = self.copy(&mut channel, va::A, va::B);
        if ran != Ran::Done || self.card.vram_read(to) != MARKER {
            bail!("a good copy afterwards: {ran:x?}");
        }
        Ok(())
    }
}

impl RamPage {
    /// Allocates a page that contains [`MARKER`], and determines its guest-physical address.
    pub fn new() -> Result<Self> {
        let path = format!("/tmp/gpu-workloads.{}", std::process::id());
        let _ = std::fs::create_dir("/tmp");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .context("a page's file")?;
        let _ = std::fs::remove_file(&path);
        file.set_len(PAGE)?;
        let bytes = Mapping::new(&file, 0, PAGE as usize)?;
        bytes.store(0, Width::Dword, MARKER.into());
        let map = File::open("/proc/self/pagemap").context("/proc/self/pagemap")?;
        let mut entry = [0; 8];
        map.read_exact_at(&mut entry, bytes.address() as u64 / PAGE * 8).context("/proc/self/pagemap")?;
        let entry = u64::from_le_bytes(entry);
        let frame = entry & ((1 << 55) - 1);
        ensure!(entry >> 63 == 1 && frame != 0, "the location of the page is unknown: {entry:#x}");
        Ok(Self { _file: file, bytes, gpa: frame * PAGE })
    }

    /// Returns the page's first dword.
    pub fn word(&self) -> u32 {
        self.bytes.load(0, Width::Dword) as u32
    }

    /// Sets the page's first dword.
    pub fn set(&self, word: u32) {
        self.bytes.store(0, Width::Dword, word.into());
    }
}

/// Returns the methods with which copy engine 0 copies one page for each pair.
pub fn copies(pairs: &[(u64, u64)]) -> Push {
    let mut push = Push::default();
    push.bind(Engine::Ce0.object());
    for &(source, target) in pairs {
        let page = PAGE as u32;
        push.copy(
            Engine::Ce0,
            &Rect { source, target, source_pitch: page, target_pitch: page, line_bytes: page, lines: 1 },
        );
    }
    push
}
