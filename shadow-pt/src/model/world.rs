//! A small world: guest memory, granted memory, card memory, and a page walker that is independent of the code under
//! test.

use crate::{Frame, Frames, GuestMemory, Place, ShadowMemory, Unreadable};
use nvspec::addr::{Gpa, GuestVramAddr, Iova, VramAddr};
use std::collections::BTreeMap;

pub(crate) const PAGE: u64 = 0x1000;
pub(crate) const LARGE: u64 = 0x2_0000;
/// Size of the guest's VRAM in bytes. Its 128 KiB chunks are ordered differently on the card, and the last one is
/// partly unused.
pub(crate) const GUEST_VRAM: u64 = 8 * LARGE - 0x4000;
const CARD_CHUNKS: [u64; 8] = [40, 41, 7, 90, 12, 13, 3, 55];
/// Address of the first shadow table, far from all guest chunks.
const SHADOW_BASE: u64 = 0x1_0000_0000;

pub(crate) struct Guest {
    pub(crate) vram: Vec<u8>,
    pub(crate) ram: BTreeMap<u64, Vec<u8>>,
    /// VRAM chunks that currently have no location, as a bit mask.
    pub(crate) gone: u8,
    pub(crate) reads: u64,
}

impl Guest {
    pub(crate) fn new() -> Self {
        Self { vram: vec![0; GUEST_VRAM as usize], ram: BTreeMap::new(), gone: 0, reads: 0 }
    }

    fn is_gone(&self, at: u64) -> bool {
        at / LARGE < 8 && self.gone & 1 << (at / LARGE) != 0
    }

    pub(crate) fn write64(&mut self, place: Place, value: u64) {
        match place {
            Place::Vram(GuestVramAddr(at)) if self.is_gone(at) => {}
            Place::Vram(GuestVramAddr(at)) => {
                if let Some(bytes) = self.vram.get_mut(at as usize..at as usize + 8) {
                    bytes.copy_from_slice(&value.to_le_bytes());
                }
            }
            Place::Ram(Gpa(at)) => {
                if let Some(page) = self.ram.get_mut(&(at / PAGE)) {
                    let at = (at % PAGE) as usize;
                    page[at..at + 8].copy_from_slice(&value.to_le_bytes());
                }
            }
        }
    }

    pub(crate) fn read64(&self, ram: bool, at: u64) -> Option<u64> {
        let bytes = if ram {
            let page = self.ram.get(&(at / PAGE))?;
            page.get((at % PAGE) as usize..(at % PAGE) as usize + 8)?
        } else {
            self.vram.get(at as usize..at as usize + 8).filter(|_| !self.is_gone(at))?
        };
        Some(u64::from_le_bytes(bytes.try_into().unwrap()))
    }
}

impl GuestMemory for Guest {
    fn read(&mut self, place: Place, data: &mut [u8]) -> Result<(), Unreadable> {
        self.reads += 1;
        let mut done = 0;
        while done < data.len() {
            let left = data.len() - done;
            let at = place.address().checked_add(done as u64).ok_or(Unreadable)?;
            let len = left.min((PAGE - at % PAGE) as usize);
            let source = match place {
                Place::Vram(_) if self.is_gone(at) => return Err(Unreadable),
                Place::Vram(_) => {
                    let at = usize::try_from(at).map_err(|_| Unreadable)?;
                    self.vram.get(at..at.saturating_add(len)).ok_or(Unreadable)?
                }
                Place::Ram(_) => {
                    let page = self.ram.get(&(at / PAGE)).ok_or(Unreadable)?;
                    &page[(at % PAGE) as usize..][..len]
                }
            };
            data[done..done + len].copy_from_slice(source);
            done += len;
        }
        Ok(())
    }
}

/// Memory granted to the guest.
#[derive(Clone)]
pub(crate) struct Grants {
    /// Card chunk that backs each VRAM chunk.
    pub(crate) chunks: [Option<u64>; 8],
    /// I/O page of each guest VRAM page that is in host memory.
    pub(crate) hosted: BTreeMap<u64, u64>,
    /// I/O page of each granted guest RAM page. The flag is true if the page is writable.
    pub(crate) ram: BTreeMap<u64, (u64, bool)>,
}

impl Default for Grants {
    fn default() -> Self {
        Self { chunks: CARD_CHUNKS.map(Some), hosted: BTreeMap::new(), ram: BTreeMap::new() }
    }
}

impl Grants {
    /// Grants `pages` pages of RAM starting at guest page `gpa`, at the I/O pages starting at `iova`.
    pub(crate) fn map(&mut self, gpa: u64, iova: u64, pages: u64, writable: bool) {
        self.ram.extend((0..pages).map(|page| (gpa + page, (iova + page, writable))));
    }

    /// Returns a flag that is true for an I/O address, and the address at which the card accesses a guest VRAM byte.
    pub(crate) fn home(&self, address: u64) -> Option<(bool, u64)> {
        let card = self.vram_page(address)?;
        Some(match self.hosted.get(&(address / PAGE)) {
            Some(page) => (true, page * PAGE + address % PAGE),
            None => (false, card),
        })
    }

    /// Returns the card address reserved for a guest VRAM byte, even if the byte is currently in host memory.
    pub(crate) fn vram_page(&self, address: u64) -> Option<u64> {
        let chunk = self.chunks.get((address / LARGE) as usize).filter(|_| address < GUEST_VRAM)?;
        Some((*chunk)? * LARGE + address % LARGE)
    }

    /// Returns the guest VRAM address of the byte at card address `card`, if the byte is guest VRAM.
    pub(crate) fn guest_vram(&self, card: u64) -> Option<u64> {
        let index = self.chunks.iter().position(|chunk| *chunk == Some(card / LARGE))?;
        let at = index as u64 * LARGE + card % LARGE;
        Some(at).filter(|at| *at < GUEST_VRAM && !self.hosted.contains_key(&(at / PAGE)))
    }

    /// Returns the guest VRAM address of the byte at I/O address `iova`, if the byte is guest VRAM.
    pub(crate) fn hosted_vram(&self, iova: u64) -> Option<u64> {
        let (page, _) = self.hosted.iter().find(|(_, host)| **host == iova / PAGE)?;
        Some(page * PAGE + iova % PAGE).filter(|at| self.vram_page(*at).is_some())
    }

    pub(crate) fn owns_vram(&self, card: u64) -> bool {
        self.guest_vram(card).is_some()
    }

    /// Returns the guest RAM address of the byte at I/O address `iova`, if the byte is guest RAM.
    pub(crate) fn guest_ram(&self, iova: u64) -> Option<u64> {
        let (gpa, _) = self.ram.iter().find(|(_, (page, _))| *page == iova / PAGE)?;
        Some(gpa * PAGE + iova % PAGE)
    }

    pub(crate) fn owns_ram(&self, iova: u64, write: bool) -> bool {
        self.ram.values().any(|&(page, writable)| page == iova / PAGE && (writable || !write))
            || self.hosted_vram(iova).is_some()
    }
}

impl Frames for Grants {
    fn vram(&mut self, address: GuestVramAddr, len: u64) -> Option<Frame> {
        let (host, first) = self.home(address.0)?;
        (0..len / PAGE)
            .all(|page| self.home(address.0 + page * PAGE) == Some((host, first + page * PAGE)))
            .then_some(if host { Frame::Host(Iova(first)) } else { Frame::Vram(VramAddr(first)) })
    }

    fn ram(&mut self, address: Gpa, len: u64, write: bool) -> Option<Iova> {
        let (first, _) = *self.ram.get(&(address.0 / PAGE))?;
        (0..len / PAGE)
            .all(|page| {
                self.ram
                    .get(&(address.0 / PAGE + page))
                    .is_some_and(|&(iova, writable)| iova == first + page && (writable || !write))
            })
            .then_some(Iova(first * PAGE))
    }
}

/// Card memory for shadow tables, with a log of all writes.
#[derive(Default)]
pub(crate) struct Card {
    pub(crate) next: u64,
    /// Contents of each allocation, by start address.
    pub(crate) allocated: BTreeMap<u64, Vec<u8>>,
    pub(crate) freed: Vec<u64>,
    /// Number of remaining allocations that succeed, or `None` if unlimited.
    pub(crate) room: Option<u32>,
    pub(crate) writes: Vec<(u64, Vec<u8>)>,
}

impl Card {
    /// Returns an allocation's bytes starting at `at`.
    pub(crate) fn bytes(&self, at: u64) -> &[u8] {
        let (start, bytes) = self.allocated.range(..=at).next_back().expect("an entry refers to unallocated memory");
        bytes.get((at - start) as usize..).expect("an entry refers to unallocated memory")
    }

    /// Returns `count` entries starting at `at`.
    pub(crate) fn entries(&self, at: u64, count: usize) -> impl Iterator<Item = u64> + '_ {
        let bytes = &self.bytes(at)[..count * 8];
        bytes.chunks_exact(8).map(|entry| u64::from_le_bytes(entry.try_into().unwrap()))
    }

    pub(crate) fn read64(&self, at: u64) -> u64 {
        let (start, bytes) = self.allocated.range(..=at).next_back().expect("an entry refers to unallocated memory");
        let at = (at - start) as usize;
        u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
    }
}

impl ShadowMemory for Card {
    fn alloc(&mut self, bytes: u64) -> Option<VramAddr> {
        if let Some(room) = &mut self.room {
            *room = room.checked_sub(1)?;
        }
        let start = SHADOW_BASE + self.next;
        self.next += bytes.next_multiple_of(PAGE);
        self.allocated.insert(start, vec![0; bytes as usize]);
        Some(VramAddr(start))
    }

    fn free(&mut self, address: VramAddr, bytes: u64) {
        let known = self.allocated.remove(&address.0).expect("freed memory was not allocated");
        assert_eq!(known.len() as u64, bytes);
        self.freed.push(address.0);
    }

    fn write(&mut self, address: VramAddr, data: &[u8]) {
        assert_eq!((address.0 % 8, data.len() % 8), (0, 0));
        let (start, bytes) =
            self.allocated.range_mut(..=address.0).next_back().expect("written memory is not allocated");
        let at = (address.0 - start) as usize;
        bytes[at..at + data.len()].copy_from_slice(data);
        self.writes.push((address.0, data.to_vec()));
    }
}

/// Result of a page walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Page {
    /// Aperture field of the entry (two bits).
    pub(crate) aperture: u64,
    /// Address of the 4 KiB page.
    pub(crate) address: u64,
    pub(crate) read_only: bool,
    pub(crate) privileged: bool,
    pub(crate) large: bool,
    pub(crate) raw: u64,
}

fn page(raw: u64, va: u64, large: bool) -> Page {
    let within = if large { va & 0x1_f000 } else { 0 };
    Page {
        aperture: (raw >> 33) & 3,
        address: ((raw >> 4) & 0xfff_ffff) * PAGE + within,
        read_only: raw & 4 != 0,
        privileged: raw & 2 != 0,
        large,
        raw,
    }
}

/// Walks page tables using shifts and masks. `read` takes a flag that is true for host memory, and an address.
/// Unreadable entries are treated as invalid.
pub(crate) fn walk(directory: (bool, u64), va: u64, read: &dyn Fn(bool, u64) -> Option<u64>) -> Option<Page> {
    let pde = read(directory.0, directory.1 + (va >> 27) * 8)?;
    let size = (pde >> 2) & 3;
    let offset = va & 0x7ff_ffff;
    if offset >= 0x800_0000 >> size {
        return None;
    }
    if pde & 3 != 0 {
        let table = ((pde >> 4) & 0xfff_ffff) << 12;
        let pte = read(pde & 3 != 1, table + (offset >> 17) * 8).unwrap_or(0);
        if pte & 1 != 0 {
            return Some(page(pte, va, true));
        }
    }
    if (pde >> 32) & 3 != 0 {
        let table = (pde >> 36) << 12;
        let pte = read((pde >> 32) & 3 != 1, table + (offset >> 12) * 8)?;
        if pte & 1 != 0 {
            return Some(page(pte, va, false));
        }
    }
    None
}

/// Returns all 4 KiB pages that the card can reach from a directory.
pub(crate) fn reachable(card: &Card, directory: u64) -> Vec<Page> {
    let mut pages = Vec::new();
    for pde in card.entries(directory, 8192) {
        if pde == 0 {
            continue;
        }
        let size = (pde >> 2) & 3;
        for (target, table, count, large) in [
            (pde & 3, ((pde >> 4) & 0xfff_ffff) << 12, 1024usize >> size, true),
            ((pde >> 32) & 3, (pde >> 36) << 12, 32768 >> size, false),
        ] {
            assert!(target <= 1, "a shadow table is in host memory");
            if target == 0 {
                continue;
            }
            for raw in card.entries(table, count) {
                if raw & 1 == 0 {
                    assert_eq!(raw, 0, "an invalid shadow entry is not zero");
                    continue;
                }
                let pieces = if large { 32 } else { 1 };
                pages.extend((0..pieces).map(|piece| page(raw, piece * PAGE, large)));
            }
        }
    }
    pages
}
