//! Domain pages under the BARs, for device memory that a client can map.
//!
//! A vfio-user client maps a file for this memory. A domain cannot do so, because it can access only its own memory
//! without an exit. Instead, one page for each page of the device's area is added to the domain, at the addresses that
//! the guest assigns to the BAR. The device stores the area's data in these pages. An access that does not reach these
//! pages, for any reason, arrives as a request and reaches the same memory. The pages only speed up accesses.
//!
//! The pages are added when the BAR is first enabled, and follow the BAR when it moves. While the BAR is disabled, they
//! stay at their addresses.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use vmm_glue::device::{Device, NUM_REGIONS, RegionIndex, RegionInfo};
use vmm_glue::mappable::MmapArea;
use vmm_glue::memory::PAGE_SIZE;

use crate::hypervisor::{self, Target};

/// An enabled BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub region: RegionIndex,
    pub range: hypervisor::Range,
}

/// State of an area's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pages {
    /// The area has no pages yet.
    Wanted,
    /// First guest frame number of the pages.
    At(u64),
    /// The area has no pages. Accesses arrive as requests until the domain is destroyed.
    Without,
}

/// A part of a region that should be backed by domain pages.
#[derive(Debug)]
struct Area {
    region: RegionIndex,
    area: MmapArea,
    pages: Pages,
}

impl Area {
    fn count(&self) -> u64 {
        self.area.size / PAGE_SIZE
    }

    /// Returns the guest frames of the area's pages, if the area has pages.
    fn frames(&self) -> Option<Range<u64>> {
        match self.pages {
            Pages::At(first) => Some(first..first.saturating_add(self.count())),
            Pages::Wanted | Pages::Without => None,
        }
    }

    /// Returns the guest frames that the area should have, if its BAR is enabled and the area's address is
    /// page-aligned.
    fn wanted(&self, windows: &[Window]) -> Option<Range<u64>> {
        let window = windows.iter().find(|window| window.region == self.region)?;
        let first = window.range.first.checked_add(self.area.offset)?;
        let whole = first.is_multiple_of(PAGE_SIZE).then_some(first / PAGE_SIZE)?;
        Some(whole..whole.checked_add(self.count())?)
    }
}

/// Areas under the BARs of a function.
#[derive(Debug)]
pub(crate) struct BarBacking(Vec<Area>);

impl BarBacking {
    /// Creates the areas of `regions`, initially without pages.
    pub fn new(regions: &[RegionInfo; NUM_REGIONS]) -> Self {
        let areas = RegionIndex::ALL.into_iter().zip(regions).flat_map(|(region, info)| {
            let areas = info.mappable().map(|mappable| mappable.areas().to_vec()).unwrap_or_default();
            areas.into_iter().map(move |area| Area { region, area, pages: Pages::Wanted })
        });
        Self(areas.collect())
    }

    /// Adds or moves pages, so that they are at the addresses of the enabled BARs.
    pub fn follow(&mut self, windows: &[Window], target: &dyn Target, device: &mut dyn Device) {
        let wanted: Vec<_> = self.0.iter().map(|area| area.wanted(windows)).collect();
        // If a guest swaps two BARs, the old pages of one BAR occupy the new location of the other BAR. Each address
        // can hold only one page.
        for (at, area) in self.0.iter_mut().enumerate() {
            let in_the_way = |frames: &Range<u64>| {
                let others = wanted.iter().enumerate().filter(|(other, _)| *other != at);
                others.filter_map(|(_, range)| range.as_ref()).any(|range| overlap(range, frames))
            };
            if area.frames().as_ref().is_some_and(in_the_way) {
                give_up(area, target, &io::Error::other("another BAR is at this address"));
            }
        }
        for (area, wanted) in self.0.iter_mut().zip(wanted) {
            let Some(frames) = wanted else { continue };
            match area.pages {
                Pages::Wanted => match lend(area, &frames, target, device) {
                    Ok(()) => area.pages = Pages::At(frames.start),
                    Err(error) => {
                        area.pages = Pages::Without;
                        tracing::warn!(
                            error, region = ?area.region, bytes = area.area.size,
                            "a BAR is not backed by domain memory: each access to it is a request; provide host \
                             memory for it and restart the domain"
                        );
                    }
                },
                Pages::At(first) if first != frames.start => {
                    match room(&frames, target).and_then(|()| target.move_frames(first, frames.start, area.count())) {
                        Ok(()) => area.pages = Pages::At(frames.start),
                        Err(error) => give_up(area, target, &error),
                    }
                }
                Pages::At(_) | Pages::Without => {}
            }
        }
    }

    /// Removes all pages from the domain. The device may keep them.
    pub fn leave(&mut self, target: &dyn Target) {
        for area in &mut self.0 {
            take(area, target);
            area.pages = Pages::Wanted;
        }
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

/// Checks that the guest has no memory at these addresses. Otherwise, Xen would remove that memory when pages are
/// placed there.
fn room(frames: &Range<u64>, target: &dyn Target) -> io::Result<()> {
    let count = usize::try_from(frames.end.saturating_sub(frames.start)).unwrap_or(usize::MAX);
    match target.present(frames.start, count)?.contains(&true) {
        true => Err(io::Error::other("the guest has memory at this address")),
        false => Ok(()),
    }
}

/// Adds pages to the domain and passes the same pages to the device.
fn lend(area: &Area, frames: &Range<u64>, target: &dyn Target, device: &mut dyn Device) -> Result<(), String> {
    let count = area.count();
    let refused = |what: &str, error: &dyn std::fmt::Display| format!("{what}: {error}");
    room(frames, target)
        .and_then(|()| target.add_frames(frames.start, count))
        .map_err(|error| refused("Xen does not add pages to the domain", &error))?;
    let lent = target
        .map(frames.start, usize::try_from(count).unwrap_or(usize::MAX))
        .map_err(|error| refused("they are not mapped here", &error))
        .and_then(|mapping| {
            let lent = device.lend_area(area.region, area.area, &Arc::new(mapping));
            lent.map_err(|error| refused("the device rejects them", &error))
        });
    // On failure, remove the pages from the domain: guest writes to pages that the device does not use would be lost.
    lent.inspect_err(|_| report(target.take_frames(frames.start, count)))
}

/// Stops using an area's pages, because they cannot follow the BAR.
fn give_up(area: &mut Area, target: &dyn Target, error: &dyn std::fmt::Display) {
    tracing::warn!(%error, region = ?area.region, "the memory backing a BAR cannot be moved with it: from now on, \
        each access to it is a request");
    take(area, target);
    area.pages = Pages::Without;
}

fn take(area: &Area, target: &dyn Target) {
    if let Some(frames) = area.frames() {
        report(target.take_frames(frames.start, area.count()));
    }
}

fn report(taken: io::Result<()>) {
    if let Err(error) = taken {
        tracing::debug!(%error, "a domain keeps pages that backed a BAR: it no longer exists, or has released them \
            itself");
    }
}
