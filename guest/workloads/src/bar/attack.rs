//! Common code of the attacks: chooses addresses outside the share, writes tables in the share, and checks dwords that
//! were read.

use anyhow::{Result, ensure};

use super::card::Card;
use super::layout::{Aperture, LARGE_PAGE, PAGE, directory_entry, own, page_entry, reg};
use crate::pattern::Random;
use gdev::mapping::Mapping;

/// Value that attacks write outside our share, where it must not persist.
pub const BRAND: u32 = 0xa77a_c4ed;
/// Value that attacks write to our own VRAM, where it must persist.
pub const MARKER: u32 = 0x600d_f00d;

/// VRAM offset of our own structures. It is low, because an earlier driver allocated and freed its first buffers there.
const OWN_BASE: u64 = 4 << 20;

/// Context of the attacks: the card, our own VRAM range, and the findings so far.
pub struct Ground<'a> {
    /// The card.
    pub card: &'a Card,
    /// BAR1 and BAR3.
    pub apertures: [&'a Mapping; 2],
    /// Size of the share's VRAM, in bytes.
    pub vram: u64,
    /// Start address of our own structures.
    pub base: u64,
    /// Source of random choices.
    pub random: Random,
    /// Set if the attacks also write outside the share.
    pub writes: bool,
    /// Set if the VMM has mapped memory for the apertures. A write to an address without a page then stays in that
    /// memory, which only this guest can access.
    pub mapped: bool,
    /// Byte pattern to search for.
    pub pattern: Vec<u8>,
    /// Findings so far.
    pub found: Found,
}

/// Findings of the attacks.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// Number of dwords read at addresses where no data may be visible.
    pub probes: u64,
    /// Number of probed dwords that contained data.
    pub nonzero: u64,
    /// Number of probed dwords that contained data written by us earlier, which means that an address outside the share
    /// stores data.
    pub sticky: u64,
    /// Number of probed dwords that contained part of the pattern.
    pub hits: u64,
    /// Number of register writes and channels that refer to an address or object outside the share.
    pub pokes: u64,
}

impl<'a> Ground<'a> {
    /// Claims a range in a share of `vram` bytes. The range must be zeroed.
    pub fn new(card: &'a Card, vram: u64, random: Random, pattern: Vec<u8>, writes: bool) -> Result<Self> {
        let fits = vram.is_multiple_of(1 << 20) && vram <= 1 << 39;
        ensure!(fits, "a share of {vram} bytes: whole MiB are expected");
        ensure!(vram >= OWN_BASE + own::END, "{vram} bytes of VRAM are too few for the attacks");
        let apertures = [card.region(1)?, card.region(3)?];
        let found = Found::default();
        Ok(Self { card, apertures, vram, base: OWN_BASE, random, writes, mapped: false, pattern, found })
    }

    /// Returns addresses outside the share that are multiples of `aligned`: adjacent addresses, powers of two, and
    /// random addresses.
    pub fn outside(&mut self, aligned: u64, count: u64) -> Vec<u64> {
        let (vram, top) = (self.vram, 1u64 << 40);
        let mut addresses =
            vec![vram, vram + aligned, 2 * vram, 3 * vram, 4 * vram, (1 << 32) - aligned, top - aligned];
        for number in 0..count {
            // Most of these addresses may belong to a neighbor on the same card.
            let end = [vram.saturating_mul(4), 6 << 30, top][number as usize % 3].clamp(vram + 1, top);
            addresses.push(vram + self.random.below(end - vram));
        }
        addresses.iter_mut().for_each(|address| *address &= !(aligned - 1) & (top - 1));
        addresses.retain(|address| *address >= vram);
        addresses
    }

    /// Checks a dword that was read outside the share.
    pub fn judge(&mut self, what: &str, word: u32) {
        self.found.probes += 1;
        let hit = word != 0 && self.pattern.len() >= 4 && holds_piece(&self.pattern, word);
        if hit {
            self.found.hits += 1;
        }
        if word == BRAND {
            self.found.sticky += 1;
        } else if !is_nothing(word) {
            self.found.nonzero += 1;
        }
        if (hit || word == BRAND || !is_nothing(word)) && self.found.nonzero + self.found.sticky <= 20 {
            println!("seen {word:#010x}: {what}");
        }
    }

    /// Checks a dword that was read outside the share through an aperture or PRAMIN. If `mapped` is set, [`BRAND`] is
    /// not a finding.
    pub fn judge_aperture(&mut self, what: &str, word: u32) {
        if self.mapped && word == BRAND {
            self.found.probes += 1;
        } else {
            self.judge(what, word);
        }
    }

    /// Writes a register as part of an attack, and counts the write.
    pub fn poke(&mut self, register: u32, value: u32) {
        self.found.pokes += 1;
        self.card.write(register, value);
    }

    /// Points the instance block at `instance` to a page directory.
    pub fn set_instance(&self, instance: u64, directory: u64, target: u32) {
        let at = self.base + instance;
        self.card.vram_write(at + 0x200, directory as u32 & 0xffff_f000 | target);
        self.card.vram_write(at + 0x204, (directory >> 32) as u32);
        self.card.vram_write(at + 0x208, 0xffff_ffff);
        self.card.vram_write(at + 0x20c, 0xff);
    }

    /// Sets an entry in the page directory of one of our own address spaces.
    pub fn set_directory(
        &self,
        space: usize,
        index: u64,
        large: Option<(u64, Aperture)>,
        small: Option<(u64, Aperture)>,
    ) {
        self.set_pair(self.base + own::DIRECTORIES[space] + index * 8, directory_entry(large, small));
    }

    /// Maps the small page at a virtual address below 128 MiB in one of our own address spaces.
    pub fn set_page(&self, space: usize, va: u64, address: u64, aperture: Aperture) {
        self.set_pair(self.base + own::TABLES[space] + va / PAGE * 8, page_entry(address, aperture));
    }

    /// Unmaps the small page at a virtual address below 128 MiB in one of our own address spaces.
    pub fn clear_page(&self, space: usize, va: u64) {
        self.set_pair(self.base + own::TABLES[space] + va / PAGE * 8, [0, 0]);
    }

    /// Maps the large page at a virtual address below 128 MiB of BAR1's address space.
    pub fn set_large_page(&self, va: u64, address: u64, aperture: Aperture) {
        self.set_pair(self.base + own::LARGE_TABLE + va / LARGE_PAGE * 8, page_entry(address, aperture));
    }

    fn set_pair(&self, at: u64, [low, high]: [u32; 2]) {
        self.card.vram_write(at, low);
        self.card.vram_write(at + 4, high);
    }

    /// Flushes the card's TLB entries for a page directory.
    pub fn flush(&self, directory: u64) {
        self.card.write(reg::BAR_FLUSH, 1);
        // One read per flush suffices: the flush is complete when the next register access completes.
        self.card.read(reg::BAR_FLUSH);
        self.card.write(reg::TLB_DIRECTORY, ((directory >> 12) << 4) as u32);
        self.card.write(reg::TLB_TRIGGER, 0x8000_0005);
        self.card.read(reg::TLB_TRIGGER);
    }

    /// Returns true if the card still responds and our own memory is intact.
    pub fn alive(&self, boot0: u32) -> bool {
        let clock = || u64::from(self.card.read(reg::PTIMER_HIGH)) << 32 | u64::from(self.card.read(reg::PTIMER_LOW));
        let first = clock();
        let advanced = (0..1000).any(|_| clock() != first);
        let marker = self.card.vram_read(self.base + own::DATA);
        advanced && self.card.read(reg::BOOT0) == boot0 && marker == MARKER
    }
}

/// Returns true if the dword is zero, all ones, or the hardware's code for a failed access.
fn is_nothing(word: u32) -> bool {
    word == 0 || word == u32::MAX || word >> 20 == 0xbad
}

/// Returns true if the dword occurs in the repeated pattern, at any byte offset.
fn holds_piece(pattern: &[u8], word: u32) -> bool {
    let bytes = word.to_le_bytes();
    (0..pattern.len()).any(|start| {
        let piece = pattern.iter().cycle().skip(start).take(4);
        piece.eq(bytes.iter())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_repeated_pattern_are_known_at_any_byte() {
        let pattern = [1, 2, 3, 4, 5, 6, 7, 8];
        assert!(holds_piece(&pattern, 0x0403_0201));
        assert!(holds_piece(&pattern, 0x0706_0504));
        assert!(holds_piece(&pattern, 0x0201_0807));
        assert!(!holds_piece(&pattern, 0x0102_0304));
    }

    #[test]
    fn refused_reads_count_as_nothing() {
        assert!([0, u32::MAX, 0xbad0_ac0f, 0xbadf_1000].into_iter().all(is_nothing));
        assert!(![1, 0xdead_beef, BRAND].into_iter().any(is_nothing));
    }
}
