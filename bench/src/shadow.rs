//! Measures shadow page tables without a VM: the cost of a TLB flush by size of the change, and the speed of table
//! scans in comparison with a plain copy of the same bytes.
//!
//! An address space maps 1 GiB with 4 KiB pages, in eight 256 KiB tables in guest VRAM. Guest memory is an array, so
//! the measured time consists of the mediator's own work and the reads.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use nvspec::addr::{Gpa, GuestVramAddr, Iova, Place, VramAddr};
use nvspec::mmu::{ENTRY_BYTES, Pde, Pte, PteAperture, TableTarget};
use shadow_pt::{
    AddressSpaces, Frame, Frames, GuestMemory, Limits, Mode, Parts, ShadowMemory, SpaceId, SyncReport, Unreadable,
};

use crate::report::{Metric, Target, median};

const PAGE: u64 = 4096;
/// Number of mapped bytes.
const MAPPED: u64 = 1 << 30;
/// Guest VRAM address of the directory. The tables follow it.
const DIRECTORY: u64 = 0;
const DIRECTORY_BYTES: u64 = 64 << 10;
const TABLES: u64 = DIRECTORY + DIRECTORY_BYTES;
const TABLE_BYTES: u64 = 256 << 10;
/// Size of all tables in bytes.
const ALL: u64 = MAPPED / PAGE * ENTRY_BYTES;
/// VRAM address of the first mapped byte. The tables are outside the mapped range.
const DATA: u64 = 16 << 20;
/// Number of measurements of each kind. The report contains the median.
const ROUNDS: usize = 201;

/// Guest VRAM, which contains the tables.
struct Guest(Vec<u8>);

impl GuestMemory for Guest {
    fn read(&mut self, place: Place, data: &mut [u8]) -> Result<(), Unreadable> {
        let Place::Vram(GuestVramAddr(at)) = place else { return Err(Unreadable) };
        let at = usize::try_from(at).map_err(|_| Unreadable)?;
        data.copy_from_slice(self.0.get(at..at + data.len()).ok_or(Unreadable)?);
        Ok(())
    }
}

/// Grants for all guest VRAM, at different card addresses.
struct All;

impl Frames for All {
    fn vram(&mut self, address: GuestVramAddr, _len: u64) -> Option<Frame> {
        Some(Frame::Vram(VramAddr(address.0 + (2 << 30))))
    }

    fn ram(&mut self, _address: Gpa, _len: u64, _write: bool) -> Option<Iova> {
        None
    }
}

/// The card's memory for shadow tables.
struct Card {
    next: u64,
    bytes: Vec<u8>,
}

impl ShadowMemory for Card {
    fn alloc(&mut self, bytes: u64) -> Option<VramAddr> {
        let at = self.next;
        self.next += bytes.next_multiple_of(PAGE);
        self.bytes.resize(self.next as usize, 0);
        Some(VramAddr(at))
    }

    fn free(&mut self, _address: VramAddr, _bytes: u64) {}

    fn write(&mut self, address: VramAddr, data: &[u8]) {
        self.bytes[address.0 as usize..][..data.len()].copy_from_slice(data);
    }
}

struct World {
    spaces: AddressSpaces,
    space: SpaceId,
    guest: Guest,
    card: Card,
}

impl World {
    fn new(mode: Mode) -> Result<Self> {
        let mut guest = Guest(vec![0; (TABLES + ALL) as usize]);
        for table in 0..ALL / TABLE_BYTES {
            let frame = u32::try_from((TABLES + table * TABLE_BYTES) / PAGE)?;
            let pde = Pde::new().with_small_target(TableTarget::Vram).with_small_frame(frame);
            put(&mut guest, DIRECTORY + table * ENTRY_BYTES, pde.into());
        }
        for page in 0..MAPPED / PAGE {
            put(&mut guest, TABLES + page * ENTRY_BYTES, entry(DATA + page * PAGE)?);
        }
        let mut card = Card { next: 0, bytes: Vec::new() };
        let mut spaces = AddressSpaces::new(mode, Limits { table_bytes: 64 << 20 });
        let space = spaces.open(Place::Vram(GuestVramAddr(DIRECTORY)), &mut card).context("a space")?;
        let mut world = Self { spaces, space, guest, card };
        let done = world.prepare();
        ensure!(done.entries_written >= MAPPED / PAGE, "{done:?} does not cover the whole space");
        world.spaces.flushed(world.space, &mut world.card);
        Ok(world)
    }

    fn prepare(&mut self) -> SyncReport {
        let Self { spaces, space, guest, card } = self;
        let done = spaces.prepare(*space, &mut Parts { guest, frames: &mut All, memory: card });
        spaces.flushed(*space, card);
        done
    }

    fn flush(&mut self) -> SyncReport {
        let Self { spaces, space, guest, card } = self;
        let done = spaces.flush(*space, true, &mut Parts { guest, frames: &mut All, memory: card });
        spaces.flushed(*space, card);
        done
    }

    /// Changes the page of an entry, as the guest's CPU would.
    fn change(&mut self, page: u64, round: u64) -> Result<()> {
        let at = TABLES + page * ENTRY_BYTES;
        put(&mut self.guest, at, entry(DATA + (page ^ (round & 1)) * PAGE)?);
        self.spaces.written(GuestVramAddr(at), ENTRY_BYTES);
        Ok(())
    }
}

fn put(guest: &mut Guest, at: u64, value: u64) {
    guest.0[at as usize..][..8].copy_from_slice(&value.to_le_bytes());
}

fn entry(address: u64) -> Result<u64> {
    let frame = u32::try_from(address / PAGE)?;
    Ok(Pte::new().with_valid(true).with_frame(frame).with_aperture(PteAperture::Vram).into())
}

/// Returns the median duration of `each` in microseconds, excluding the preceding `prepare`.
fn timed(mut prepare: impl FnMut(u64) -> Result<()>, mut each: impl FnMut()) -> Result<f64> {
    let mut times = Vec::new();
    for round in 0..ROUNDS as u64 {
        prepare(round)?;
        let began = Instant::now();
        each();
        times.push(began.elapsed().as_secs_f64() * 1e6);
    }
    median(&times).context("no measurement")
}

/// Runs the benchmark.
pub fn run() -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    let world = std::cell::RefCell::new(World::new(Mode::Incremental)?);
    let last = std::cell::Cell::new(SyncReport::default());
    let flush = || {
        let done = world.borrow_mut().flush();
        last.set(done);
    };

    // After a change, at least one page of a table must be read and compared.
    let mut page = vec![0u8; PAGE as usize];
    let read = timed(
        |_| Ok(()),
        || {
            page.copy_from_slice(&world.borrow().guest.0[TABLES as usize..][..PAGE as usize]);
            black_box(&page);
        },
    )?;
    let idle = timed(|_| Ok(()), flush)?;
    metrics.push(Metric::plain("shadow.flush.nothing_changed", idle, "us"));
    for pages in [1, 8, 64, 512] {
        let time = timed(|round| (0..pages).try_for_each(|at| world.borrow_mut().change(at * 512, round)), flush)?;
        let done = last.take();
        let name = format!("shadow.flush.{pages}_changed");
        metrics.push(Metric::plain(format!("{name}.time"), time, "us"));
        metrics.push(Metric::plain(format!("{name}.bytes_scanned"), done.bytes_scanned as f64, "bytes"));
        metrics.push(Metric::plain(format!("{name}.entries_written"), done.entries_written as f64, "entries"));
        if pages == 1 {
            metrics.push(Metric {
                target: Target::AtMost(20.0),
                ..Metric::plain("shadow.flush.1_changed.beyond_reading_the_page", time - read, "us")
            });
        }
    }

    // Compare a full scan of unchanged tables with a copy of the same bytes.
    let mut copy = vec![0u8; (TABLES + ALL) as usize];
    let plain = timed(
        |_| Ok(()),
        || {
            copy.copy_from_slice(&world.borrow().guest.0);
            black_box(&copy);
        },
    )?;
    let scan = timed(
        |_| {
            // Report the tables as written, although their contents are unchanged.
            world.borrow_mut().spaces.written(GuestVramAddr(DIRECTORY), TABLES + ALL);
            Ok(())
        },
        flush,
    )?;
    let scanned = last.take().bytes_scanned as f64;
    ensure!(scanned >= ALL as f64, "a scan of {scanned} bytes is incomplete");
    let rate = |bytes: f64, time: f64| bytes / time;
    let copied = (TABLES + ALL) as f64;
    metrics.push(Metric::ratio(
        "shadow.full_scan.bandwidth",
        rate(scanned, scan),
        "MB/s",
        rate(copied, plain),
        Target::AtLeast(0.5),
    ));

    // Make the same change in each mode, with one flush and one submission.
    for mode in Mode::ALL {
        let mut world = World::new(mode)?;
        let mut times = Vec::new();
        let mut sum = SyncReport::default();
        let rounds = if mode == Mode::Incremental || mode == Mode::LazyAdd { ROUNDS } else { 7 };
        for round in 0..rounds as u64 {
            world.change(512, round)?;
            let began = Instant::now();
            let Steps { flushed, prepared } = flush_and_submit(&mut world);
            times.push(began.elapsed().as_secs_f64() * 1e6);
            sum.merge(&flushed);
            sum.merge(&prepared);
        }
        let name = format!("shadow.mode.{}", mode.name());
        metrics.push(Metric::plain(format!("{name}.time"), median(&times).context("no measurement")?, "us"));
        let each = |count: u64| count as f64 / rounds as f64;
        metrics.push(Metric::plain(format!("{name}.bytes_scanned"), each(sum.bytes_scanned), "bytes"));
        metrics.push(Metric::plain(format!("{name}.entries_written"), each(sum.entries_written), "entries"));
    }
    Ok(metrics)
}

/// Reports of the flush and the submission after a change.
struct Steps {
    flushed: SyncReport,
    prepared: SyncReport,
}

fn flush_and_submit(world: &mut World) -> Steps {
    let World { spaces, space, guest, card } = world;
    let flushed = spaces.flush(*space, false, &mut Parts { guest, frames: &mut All, memory: card });
    spaces.flushed(*space, card);
    let prepared = world.prepare();
    Steps { flushed, prepared }
}
