//! Checks the invariants using the contents of card memory.

use super::spec;
use super::world::{self, Card, Grants, Guest, LARGE, PAGE};
use crate::{AddressSpaces, HOST_PAGES, HostPage, Place, SHARED_PAGES, SpaceId};
use nvspec::addr::GpuVa;
use nvspec::mmu::Rights;
use std::collections::{BTreeMap, BTreeSet};

/// Indices of the directory entries reserved for the mediator: for shared pages and for channel pages.
const HOST_ENTRIES: [u64; 2] = [8190, 8191];

/// Required agreement between a shadow and the guest's current tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// The shadow maps only granted memory.
    Isolated,
    /// In addition, each entry is either 0 or the translation of the guest's current entry.
    Sound,
    /// Each entry is the translation of the guest's current entry.
    Exact,
}

/// Mediator pages in a space, with their card addresses and access rights.
pub(crate) type HostPages = BTreeMap<HostPage, (u64, Rights)>;

/// The card's view of a space, and its expected state.
pub(crate) struct View<'a> {
    pub(crate) guest: &'a Guest,
    pub(crate) grants: &'a Grants,
    pub(crate) card: &'a Card,
    pub(crate) spaces: &'a AddressSpaces,
    pub(crate) id: SpaceId,
    pub(crate) host: &'a HostPages,
}

/// A table of a directory entry: target, address, number of entries, and a flag that is true for large-page tables.
type Half = (u64, u64, usize, bool);

/// Returns the two tables of a directory entry.
fn halves(pde: u64) -> [Half; 2] {
    let size = (pde >> 2) & 3;
    [
        (pde & 3, ((pde >> 4) & 0xfff_ffff) << 12, 1024 >> size, true),
        ((pde >> 32) & 3, (pde >> 36) << 12, 32768 >> size, false),
    ]
}

impl View<'_> {
    fn guest64(&self, ram: bool, at: u64) -> u64 {
        self.guest.read64(ram, at).unwrap_or(0)
    }

    fn directories(&self) -> (u64, bool, u64) {
        let card = self.spaces.directory(self.id).expect("the space is not open").0;
        let guest = self.spaces.guest_directory(self.id).expect("the space is not open");
        (card, matches!(guest, Place::Ram(_)), guest.address())
    }

    /// Checks everything that the card can reach from the space's directory.
    pub(crate) fn check(&self, fit: Fit) {
        let (card, ram, guest) = self.directories();
        // Many directory entries may be equal, so check each pair of tables only once.
        let mut seen = BTreeSet::new();
        for (index, shadow) in (0u64..).zip(self.card.entries(card, 8192)) {
            if HOST_ENTRIES.contains(&index) {
                self.check_host(index, shadow);
                continue;
            }
            let pde = guest.checked_add(index * 8).map_or(0, |at| self.guest64(ram, at));
            if shadow == 0 && (fit != Fit::Exact || pde == 0) {
                continue;
            }
            if fit != Fit::Isolated && shadow != 0 {
                assert_eq!(
                    (shadow >> 2) & 3,
                    (pde >> 2) & 3,
                    "the size differs from that of the guest's entry {index}"
                );
            }
            let theirs = halves(pde);
            for mine in halves(shadow) {
                if seen.insert((mine, theirs)) {
                    self.check_table(fit, mine, theirs);
                }
            }
            if fit == Fit::Exact {
                self.check_walks(index, pde);
            }
        }
    }

    /// Returns entry `at` of a guest table, or 0 if the entry does not exist.
    fn raw(&self, (target, table, count, _): Half, at: u64) -> u64 {
        if target == 0 || at >= count as u64 { 0 } else { self.guest64(target != 1, table + at * 8) }
    }

    fn check_table(&self, fit: Fit, mine: Half, theirs: [Half; 2]) {
        let (target, table, count, large) = mine;
        assert!(target <= 1, "a shadow table is in host memory");
        let wanted = |at: u64| {
            if large {
                return spec::entry(self.raw(theirs[0], at), true, self.grants);
            }
            spec::small(at, self.raw(theirs[0], at / 32), self.raw(theirs[1], at), self.grants)
        };
        if target == 0 {
            if fit == Fit::Exact {
                (0..count as u64).for_each(|at| assert_eq!(wanted(at), 0, "a table is missing"));
            }
            return;
        }
        for (at, raw) in (0u64..).zip(self.card.entries(table, count)) {
            if raw == 0 && fit != Fit::Exact {
                continue;
            }
            self.check_frames(raw, large);
            if fit == Fit::Isolated {
                continue;
            }
            let wanted = wanted(at);
            // Until the page is read, the shadow may still contain small entries that the guest has hidden with a large
            // page.
            let hidden = || !large && raw == spec::entry(self.raw(theirs[1], at), false, self.grants);
            assert!(
                raw == wanted || (fit == Fit::Sound && (raw == 0 || hidden())),
                "entry {at} of the shadow of {theirs:x?} is {raw:#x}, expected {wanted:#x}"
            );
        }
    }

    /// Checks that each 4 KiB page that an entry maps belongs to the guest.
    fn check_frames(&self, raw: u64, large: bool) {
        if raw & 1 == 0 {
            assert_eq!(raw, 0, "an invalid shadow entry is not zero");
            return;
        }
        let start = ((raw >> 4) & 0xfff_ffff) * PAGE;
        for at in (start..start + if large { LARGE } else { PAGE }).step_by(PAGE as usize) {
            match (raw >> 33) & 3 {
                0 => assert!(self.grants.owns_vram(at), "the guest does not own the VRAM of {raw:#x}"),
                1 => panic!("{raw:#x} refers to peer memory"),
                _ => assert!(self.grants.owns_ram(at, raw & 4 == 0), "the guest does not own the RAM of {raw:#x}"),
            }
        }
    }

    fn check_host(&self, entry: u64, pde: u64) {
        let shared = entry == HOST_ENTRIES[0];
        let page = |index| if shared { HostPage::Shared(index) } else { HostPage::Own(index) };
        let pages = if shared { SHARED_PAGES } else { HOST_PAGES };
        let none = !self.host.keys().any(|page| matches!(page, HostPage::Shared(_)) == shared);
        assert!(!none || pde == 0 || pde >> 32 & 3 == 1, "a reserved entry refers to a guest table");
        for index in 0..if pde == 0 { 0 } else { pages } {
            let va = (entry << 27) + u64::from(index) * PAGE;
            let found = self.shadow_page(va).map(|page| (page.address, page.read_only, page.privileged));
            let wanted = self
                .host
                .get(&page(index))
                .map(|(at, rights)| (*at, *rights == Rights::ReadOnly, *rights == Rights::Privileged));
            assert_eq!(found, wanted, "mediator page {index}");
            assert_eq!(self.spaces.resolve(self.id, GpuVa(va)), None);
        }
        assert!(pde != 0 || none);
    }

    /// Returns the page that the card reaches at `va`.
    pub(crate) fn shadow_page(&self, va: u64) -> Option<world::Page> {
        world::walk((false, self.directories().0), va, &|ram, at| {
            assert!(!ram, "the directory is in host memory");
            Some(self.card.read64(at))
        })
    }

    /// For several addresses that a directory entry maps, compares walks through the card's tables, the guest's tables,
    /// and the mirrors.
    fn check_walks(&self, index: u64, pde: u64) {
        for offset in (0..24).map(|page| page * PAGE).chain((0..12).map(|page| page * LARGE + 3 * PAGE)) {
            let va = (index << 27) + offset;
            let found = self.shadow_page(va);
            let wanted = self.wanted(pde, offset);
            assert_eq!(
                found.map(|page| (page.aperture, page.address, page.read_only, page.privileged)),
                wanted,
                "{va:#x}"
            );
            self.check_resolved(va, found);
        }
    }

    /// Returns the aperture, the address, and the read-only and privileged flags of the memory to which the guest maps
    /// an address.
    fn wanted(&self, pde: u64, offset: u64) -> Option<(u64, u64, bool, bool)> {
        let [large, small] = halves(pde);
        let page = |raw: u64, within: u64| {
            let address = ((raw >> 4) & 0xfff_ffff) * PAGE + (offset & within);
            (raw != 0).then_some(((raw >> 33) & 3, address, raw & 4 != 0, raw & 2 != 0))
        };
        if offset >> 17 >= large.2 as u64 {
            return None;
        }
        let guest = self.raw(large, offset >> 17);
        page(spec::entry(guest, true, self.grants), 0x1_f000).or_else(|| {
            let at = offset >> 12;
            page(spec::small(at, guest, self.raw(small, at), self.grants), 0)
        })
    }

    /// Checks that the mirrors agree with the card's tables.
    fn check_resolved(&self, va: u64, found: Option<world::Page>) {
        let resolved = self.spaces.resolve(self.id, GpuVa(va + 0x123));
        let resolved = resolved.map(|mapping| {
            assert_eq!(mapping.bytes, PAGE - 0x123);
            let (address, system) = match mapping.place {
                Place::Vram(at) => {
                    let home = self.grants.home(at.0);
                    (home.map(|(_, at)| at), home.is_some_and(|(host, _)| host))
                }
                Place::Ram(at) => {
                    (self.grants.ram.get(&(at.0 / PAGE)).map(|(page, _)| page * PAGE + at.0 % PAGE), true)
                }
            };
            (system, address.expect("the resolved memory is not granted"), mapping.writable)
        });
        assert_eq!(resolved, found.map(|page| (page.aperture != 0, page.address + 0x123, !page.read_only)), "{va:#x}");
    }
}
