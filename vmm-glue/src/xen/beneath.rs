//! Pages of the domain beneath its BARs, where the device has memory that a client can map.
//!
//! A client of vfio-user maps a file there. A domain cannot: what it accesses without an exit is memory of its own. So it is given as many
//! pages as the device's area has, at the addresses that the guest gives the BAR, and the device has its memory in them. An access that
//! does not find them, for whatever reason, comes as a request and goes to the same memory: they make accesses quick, and decide nothing.
//!
//! They come when the BAR answers for the first time, and follow it. While it does not answer they stay where they were.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::function::Window;
use super::hypervisor::Target;
use crate::device::{Device, NUM_REGIONS, RegionIndex, RegionInfo};
use crate::mappable::MmapArea;
use crate::memory::PAGE_SIZE;

/// Pages of one area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pages {
    /// None yet.
    Wanted,
    /// From this frame on.
    At(u64),
    /// Accesses come as requests until the domain goes.
    Without,
}

/// A part of a region beneath which pages are to be.
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

    /// Its frames, wherever they are.
    fn frames(&self) -> Option<Range<u64>> {
        match self.pages {
            Pages::At(first) => Some(first..first.saturating_add(self.count())),
            Pages::Wanted | Pages::Without => None,
        }
    }

    /// The frames that it is to have, if its BAR answers.
    fn wanted(&self, windows: &[Window]) -> Option<Range<u64>> {
        let window = windows.iter().find(|window| window.region == self.region)?;
        let first = window.range.first.checked_add(self.area.offset)?;
        let whole = first.is_multiple_of(PAGE_SIZE).then_some(first / PAGE_SIZE)?;
        Some(whole..whole.checked_add(self.count())?)
    }
}

/// Areas beneath the BARs of one function.
#[derive(Debug)]
pub(super) struct Beneath(Vec<Area>);

impl Beneath {
    /// Nothing yet, for the areas of `regions`.
    pub fn new(regions: &[RegionInfo; NUM_REGIONS]) -> Self {
        let areas = RegionIndex::ALL.into_iter().zip(regions).flat_map(|(region, info)| {
            let areas = info.mappable().map(|mappable| mappable.areas().to_vec()).unwrap_or_default();
            areas.into_iter().map(move |area| Area { region, area, pages: Pages::Wanted })
        });
        Self(areas.collect())
    }

    /// Brings pages to where the BARs that answer are.
    pub fn follow(&mut self, windows: &[Window], target: &dyn Target, device: &mut dyn Device) {
        let wanted: Vec<_> = self.0.iter().map(|area| area.wanted(windows)).collect();
        // Of pages that lie where others are to be, which a guest makes that exchanges BARs, only one can be there.
        for (at, area) in self.0.iter_mut().enumerate() {
            let in_the_way = |frames: &Range<u64>| {
                let others = wanted.iter().enumerate().filter(|(other, _)| *other != at);
                others.filter_map(|(_, range)| range.as_ref()).any(|range| overlap(range, frames))
            };
            if area.frames().as_ref().is_some_and(in_the_way) {
                give_up(area, target, &io::Error::other("another BAR is there now"));
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
                            "no memory of the domain's beneath a BAR: each access there is a request; give the host memory for it and \
                             start the domain again"
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

    /// Takes all from the domain. The device has them for as long as it likes.
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

/// Checks that the guest has no memory there: of a guest that puts a BAR over its own, Xen would take that from it.
fn room(frames: &Range<u64>, target: &dyn Target) -> io::Result<()> {
    let count = usize::try_from(frames.end.saturating_sub(frames.start)).unwrap_or(usize::MAX);
    match target.present(frames.start, count)?.contains(&true) {
        true => Err(io::Error::other("the guest has memory there")),
        false => Ok(()),
    }
}

/// Gives the domain pages and the device the same.
fn lend(area: &Area, frames: &Range<u64>, target: &dyn Target, device: &mut dyn Device) -> Result<(), String> {
    let count = area.count();
    let refused = |what: &str, error: &dyn std::fmt::Display| format!("{what}: {error}");
    room(frames, target)
        .and_then(|()| target.add_frames(frames.start, count))
        .map_err(|error| refused("Xen gives the domain none", &error))?;
    let lent = target
        .map(frames.start, usize::try_from(count).unwrap_or(usize::MAX))
        .map_err(|error| refused("they are not mapped here", &error))
        .and_then(|mapping| {
            let lent = device.lend_area(area.region, area.area, &Arc::new(mapping));
            lent.map_err(|error| refused("the device does not take them", &error))
        });
    // A guest that wrote to pages that the device does not have would lose what it wrote.
    lent.inspect_err(|_| report(target.take_frames(frames.start, count)))
}

/// Does without pages from now on: they may be anywhere, or in part.
fn give_up(area: &mut Area, target: &dyn Target, error: &dyn std::fmt::Display) {
    tracing::warn!(%error, region = ?area.region, "memory beneath a BAR cannot follow it: each access there is a request from now on");
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
        tracing::debug!(%error, "a domain keeps pages that were beneath a BAR: it has gone, or has given them back itself");
    }
}
