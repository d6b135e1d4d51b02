//! Saved form of the apertures that the VMM maps: the records, and the I/O addresses of the memory. The memory itself
//! is in files, which are handed over separately. The client keeps the files mapped during the handover, and guest CPUs
//! may write to them at any time.

use super::{MappedWindow, PageTarget, Remap, Slot, Window};
use card_manager::{ManagedCard, ManagerError};
use nvspec::addr::{Iova, SMALL_PAGE};
use saved_state::{Invalid, ascend, only_version};
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;
use vm_device::WindowMemory;

/// Saved form of the apertures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedRemap {
    /// Windows in BAR1, BAR3 and PRAMIN, or `None` for a trapped window.
    windows: [Option<SavedWindow>; MappedWindow::ALL.len()],
    /// Guest VRAM pages that slots map, sorted by number.
    pages: Vec<SavedPage>,
    /// Slots that map guest RAM.
    ram: Vec<SavedSlot>,
    /// Set if the card's TLBs may still map memory that no table maps.
    stale: bool,
}

only_version!(SavedRemap, "vgpu.apertures", 2);

/// Saved I/O address of a window's memory, and the memory's range in the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedWindow {
    start: u64,
    bytes: u64,
    iova: u64,
}

/// Saved guest VRAM page with the slots that map it. The first slot is its home.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedPage {
    number: u32,
    places: Vec<SavedSlot>,
}

/// Saved slot: window number and page number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct SavedSlot(u8, u32);

impl From<Slot> for SavedSlot {
    fn from(Slot { window, page }: Slot) -> Self {
        Self(u8::try_from(window).unwrap_or(u8::MAX), page)
    }
}

impl From<SavedSlot> for Slot {
    fn from(SavedSlot(window, page): SavedSlot) -> Self {
        Self { window: window.into(), page }
    }
}

impl Remap {
    /// Saves the apertures, and the files that contain their memory, if any are mapped. Returns an error if the process
    /// has no free file descriptors.
    pub(crate) fn save(&self) -> Result<Option<(SavedRemap, Vec<OwnedFd>)>, ManagerError> {
        let Self {
            windows,
            homes,
            waiting,
            // Never set for a quiescent VM.
            closing: _,
            // The next process may repeat the warning.
            warned: _,
            stale,
            // Statistics restart at 0.
            counts: _,
        } = self;
        if !self.is_open() {
            return Ok(None);
        }
        let mut files = Vec::new();
        let mut saved = [None; MappedWindow::ALL.len()];
        let mut ram = Vec::new();
        for (at, (window, saved)) in windows.iter().zip(&mut saved).enumerate() {
            let Some(window) = window else { continue };
            let (file, area) = window.memory.area();
            files.push(
                file.try_clone()
                    .map_err(|error| ManagerError::host("no descriptor for the memory of an aperture", error))?,
            );
            *saved = Some(SavedWindow { start: area.offset, bytes: area.size, iova: window.memory.first().0 });
            let of_ram = (window.first..).zip(&window.wants).filter(|(_, want)| **want == PageTarget::Ram);
            ram.extend(of_ram.map(|(page, _)| SavedSlot::from(Slot { window: at, page })));
        }
        let mut pages: Vec<SavedPage> = homes
            .iter()
            .map(|(number, home)| {
                let others = waiting.get(number).into_iter().flatten();
                let places = std::iter::once(home).chain(others).map(|slot| SavedSlot::from(*slot)).collect();
                SavedPage { number: *number, places }
            })
            .collect();
        pages.sort_unstable_by_key(|page| page.number);
        Ok(Some((SavedRemap { windows: saved, pages, ram, stale: *stale }, files)))
    }

    /// Returns the numbers of the guest VRAM pages that are in host memory.
    pub(crate) fn homes(&self) -> impl Iterator<Item = u32> + '_ {
        self.homes.keys().copied()
    }

    /// Returns the I/O address ranges of the memory.
    pub(crate) fn ranges_of_card(&self) -> impl Iterator<Item = (Iova, u64)> + '_ {
        self.windows.iter().flatten().map(|window| (window.memory.first(), window.memory.area().1.size))
    }
}

impl SavedRemap {
    /// Restores apertures of `bar1` and `bar3` bytes for a VM with `vram_bytes` bytes of VRAM. The apertures' memory is
    /// in `files`. Maps the memory for the card at its old addresses. Returns an error if the saved state is invalid,
    /// if the files do not match, or if the host cannot map them.
    pub(crate) fn restored(
        self,
        host: &ManagedCard,
        bars: (u64, u64),
        files: Vec<OwnedFd>,
        vram_bytes: u64,
    ) -> Result<Remap, ManagerError> {
        let Self { windows, pages, ram, stale } = self;
        let mut remap = Remap { stale, ..Remap::default() };
        let mut files = files.into_iter();
        for ((window, saved), showing) in remap.windows.iter_mut().zip(windows).zip(MappedWindow::ALL) {
            let (name, start, end) = showing.extent(bars);
            let Some(SavedWindow { start: from, bytes, iova }) = saved else { continue };
            let whole = from == start && from.checked_add(bytes) == Some(end) && bytes != 0;
            Invalid::unless(whole, || format!("{bytes:#x} bytes at {from:#x} are not the mapped part of {name}"))?;
            let file = files.next().ok_or_else(|| Invalid::new(format_args!("the memory of {name} is missing")))?;
            *window = Some(Window::new(WindowMemory::of_file(host, file, start, end, Iova(iova))?));
        }
        Invalid::unless(files.next().is_none(), || "there is a file for an aperture that is not mapped".into())?;
        Invalid::unless(ascend(pages.iter().map(|page| page.number)), || "pages of apertures are not in order".into())?;
        for SavedPage { number, places } in pages {
            let there = u64::from(number) < vram_bytes / SMALL_PAGE;
            Invalid::unless(there, || {
                format!("guest page {number:#x} is mapped in an aperture, but does not belong to the VM")
            })?;
            let mut slots = places.into_iter().map(Slot::from);
            let home = slots.next().ok_or_else(|| Invalid::new(format_args!("guest page {number:#x} has no home")))?;
            remap.wants(home, PageTarget::Vram(number))?;
            remap.homes.insert(number, home);
            for slot in slots {
                remap.wants(slot, PageTarget::Vram(number))?;
                remap.waiting.entry(number).or_default().push(slot);
            }
        }
        ram.into_iter().try_for_each(|slot| remap.wants(slot.into(), PageTarget::Ram))?;
        Ok(remap)
    }
}

impl Remap {
    /// Records the target of a slot. Fails if the slot does not exist, or if an earlier saved entry has set its target.
    fn wants(&mut self, slot: Slot, want: PageTarget) -> Result<(), Invalid> {
        let window = self.windows.get_mut(slot.window).and_then(Option::as_mut);
        let place = window.and_then(|window| window.want_mut(slot.page)).filter(|place| **place == PageTarget::Nothing);
        let place = place
            .ok_or_else(|| Invalid::new(format_args!("{slot:?} is not a page of an aperture, or has two targets")))?;
        *place = want;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::TRAPPED_BAR1;
    use super::*;
    use rig::Rig;

    const BARS: (u64, u64) = (17 << 20, 1 << 20);
    const VRAM: u64 = 1 << 20;

    /// Creates apertures that map VRAM pages, some of them twice, and guest RAM.
    fn apertures(rig: &Rig) -> Remap {
        let mut remap = Remap::open(&rig.host, BARS).unwrap();
        let first = (TRAPPED_BAR1 / SMALL_PAGE) as u32;
        remap.book(MappedWindow::Bar3, &[(0, PageTarget::Vram(3)), (7, PageTarget::Vram(9)), (8, PageTarget::Ram)]);
        remap.book(MappedWindow::Bar1, &[(first, PageTarget::Vram(9)), (first + 1, PageTarget::Vram(4))]);
        remap.book(MappedWindow::Pramin, &[(0x7ff, PageTarget::Vram(4)), (0x700, PageTarget::Vram(0))]);
        remap
    }

    #[test]
    fn apertures_are_as_they_were_on_another_owners_card() {
        let (rig, other) = (Rig::new(64), Rig::new(64));
        let before = apertures(&rig);
        let slot = before.home(9).unwrap();
        before.write(slot, 5, b"here");
        let (saved, files) = before.save().unwrap().unwrap();
        let after = saved.clone().restored(&other.host, BARS, files, VRAM).unwrap();
        assert_eq!(after.save().unwrap().unwrap().0, saved);
        let mut data = [0; 4];
        after.read(slot, 5, &mut data);
        assert_eq!((&data, after.pages(), after.home(9)), (b"here", 4, Some(slot)));
        assert!(after.ranges_of_card().eq(before.ranges_of_card()));
        assert!(Remap::default().save().unwrap().is_none());
    }

    #[test]
    fn trapped_pramin_is_trapped_on_another_owners_card() {
        let rig = Rig::new(64);
        let (mut saved, mut files) = apertures(&rig).save().unwrap().unwrap();
        saved.windows[2] = None;
        saved.pages.retain_mut(|page| {
            page.places.retain(|place| place.0 != 2);
            !page.places.is_empty()
        });
        files.pop();
        let after = saved.restored(&Rig::new(64).host, BARS, files, VRAM).unwrap();
        assert!(after.area(MappedWindow::Pramin).is_none() && after.area(MappedWindow::Bar3).is_some());
        assert_eq!(after.pages(), 3);
    }

    #[test]
    fn books_that_cannot_be_are_refused() {
        let rig = Rig::new(64);
        let before = apertures(&rig);
        let refused = |edit: &dyn Fn(&mut SavedRemap), files: &dyn Fn(&mut Vec<OwnedFd>), said: &str| {
            let (mut saved, mut all) = before.save().unwrap().unwrap();
            edit(&mut saved);
            files(&mut all);
            let why = saved.restored(&Rig::new(64).host, BARS, all, VRAM).unwrap_err().to_string();
            assert!(why.contains(said), "{why}");
        };
        refused(&|_| (), &|files| drop(files.pop()), "is missing");
        refused(&|_| (), &|files| files.push(files[0].try_clone().unwrap()), "that is not mapped");
        refused(&|_| (), &|files| files.swap(0, 1), "in a file of");
        refused(&|saved| saved.windows[0].as_mut().unwrap().start = 0, &|_| (), "not the mapped part");
        refused(&|saved| saved.windows[1] = None, &|files| drop(files.remove(1)), "not a page of an aperture");
        refused(&|saved| saved.pages.swap(0, 1), &|_| (), "not in order");
        refused(&|saved| saved.pages[3].number = (VRAM / SMALL_PAGE) as u32, &|_| (), "does not belong to the VM");
        refused(&|saved| saved.pages[0].places.clear(), &|_| (), "has no home");
        refused(&|saved| saved.pages[0].places.push(SavedSlot(1, 7)), &|_| (), "has two targets");
        refused(&|saved| saved.pages[0].places.push(SavedSlot(1, 256)), &|_| (), "not a page of an aperture");
        refused(&|saved| saved.ram.push(SavedSlot(2, 0)), &|_| (), "not a page of an aperture");
        refused(&|saved| saved.ram.push(SavedSlot(3, 0)), &|_| (), "not a page of an aperture");
    }
}
