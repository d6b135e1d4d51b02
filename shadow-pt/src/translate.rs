//! Translates guest entries to shadow entries, or denies them.

use crate::{Denial, Frame, Frames};
use nvspec::addr::{Gpa, GuestVramAddr, LARGE_PAGE, SMALL_PAGE};
use nvspec::mmu::{self, Pte, PteAperture};

/// Number of bits of the frame number in an entry.
pub(crate) const FRAME_BITS: u32 = 28;

/// Number of 4 KiB pages in a large page.
pub(crate) const LARGE_PAGES: u32 = 1 << (LARGE_PAGE.trailing_zeros() - SMALL_PAGE.trailing_zeros());

/// Page size of one of a directory entry's two tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum PageSize {
    Small,
    Large,
}

impl PageSize {
    /// Returns the base-2 logarithm of the page size in bytes.
    pub(crate) const fn shift(self) -> u32 {
        self.bytes().trailing_zeros()
    }

    /// Returns the page size in bytes.
    pub(crate) const fn bytes(self) -> u64 {
        match self {
            Self::Small => SMALL_PAGE,
            Self::Large => LARGE_PAGE,
        }
    }
}

/// The small entries that replace a large entry.
pub(crate) type Pieces = [u64; LARGE_PAGES as usize];
/// Total size of the small entries that replace a large entry, in bytes.
pub(crate) const PIECES_BYTES: u64 = size_of::<Pieces>() as u64;

/// The shadow of a guest entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Shadow {
    /// A single entry, at the same index as the guest entry.
    Entry(u64),
    /// Valid small entries for all pages of a split large entry. The large entry itself is 0.
    Split(Box<Pieces>),
}

impl Shadow {
    /// Returns the card's entry at the index of the guest entry.
    pub(crate) const fn entry(&self) -> u64 {
        match self {
            Self::Entry(entry) => *entry,
            Self::Split(_) => 0,
        }
    }
}

/// Returns the shadow of the guest entry `raw` in a table with page size `size`. The shadow is a single entry, or small
/// entries if a large page must be split. If any part of a large page is not granted, the whole page is denied.
pub(crate) fn translate(raw: u64, size: PageSize, frames: &mut impl Frames) -> Result<Shadow, Denial> {
    match whole(raw, size, frames) {
        Ok(entry) => Ok(Shadow::Entry(entry)),
        Err(Denial::Vram | Denial::Ram | Denial::Unaligned)
            if size == PageSize::Large && Pte::from(raw).address() & mask(size) == 0 =>
        {
            pieces(raw, frames).map(Shadow::Split)
        }
        Err(denial) => Err(denial),
    }
}

/// Returns the small entries that replace a large entry.
fn pieces(raw: u64, frames: &mut impl Frames) -> Result<Box<Pieces>, Denial> {
    let guest = Pte::from(raw);
    let mut pieces: Box<Pieces> = Box::new([0; LARGE_PAGES as usize]);
    for (at, piece) in (0u32..).zip(pieces.iter_mut()) {
        // The frame number of a large page is aligned, so its low bits can hold the small page's number.
        *piece = whole(guest.with_frame(guest.frame() | at).into(), PageSize::Small, frames)?;
    }
    Ok(pieces)
}

/// Returns the shadow of the guest entry `raw` as a single entry, which is 0 if `raw` is invalid.
///
/// Preserves the valid, privileged, read-only and volatile bits, and the layout of the storage kind. Clears unused
/// bits, and also the encryption and compression tags, because their keys and memory belong to the card. RAM that is
/// registered only for reading is mapped read-only. VRAM in host memory is mapped as snooped.
// GUESS: an uncompressed kind has the same layout in host memory as in VRAM.
fn whole(raw: u64, size: PageSize, frames: &mut impl Frames) -> Result<u64, Denial> {
    let guest = Pte::from(raw);
    if !guest.valid() {
        return Ok(0);
    }
    let kind = mmu::kind::uncompressed(guest.kind()).ok_or(Denial::Kind)?;
    if guest.address() & mask(size) != 0 {
        return Err(Denial::Unaligned);
    }
    let mut read_only = guest.read_only();
    let mut aperture = guest.aperture();
    let (address, outside) = match aperture {
        PteAperture::Vram => {
            let frame = frames.vram(GuestVramAddr(guest.address()), size.bytes()).ok_or(Denial::Vram)?;
            let address = match frame {
                Frame::Vram(address) => address.0,
                Frame::Host(address) => {
                    aperture = PteAperture::SysCoherent;
                    address.0
                }
            };
            (address, Denial::Vram)
        }
        PteAperture::Peer => return Err(Denial::Peer),
        PteAperture::SysCoherent | PteAperture::SysNonCoherent => {
            let gpa = Gpa(guest.address());
            let writable = if read_only { None } else { frames.ram(gpa, size.bytes(), true) };
            let address = match writable {
                Some(address) => address,
                None => {
                    read_only = true;
                    frames.ram(gpa, size.bytes(), false).ok_or(Denial::Ram)?
                }
            };
            (address.0, Denial::Ram)
        }
    };
    if address & mask(size) != 0 {
        return Err(Denial::Unaligned);
    }
    let frame = u32::try_from(address >> SMALL_PAGE.trailing_zeros()).ok().filter(|frame| frame >> FRAME_BITS == 0);
    let shadow = Pte::new()
        .with_valid(true)
        .with_privileged(guest.privileged())
        .with_read_only(read_only)
        .with_frame(frame.ok_or(outside)?)
        .with_volatile(guest.volatile())
        .with_aperture(aperture)
        .with_kind(kind);
    Ok(shadow.into())
}

/// Memory to which an entry refers, whether granted or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Named {
    /// True for guest RAM, false for VRAM.
    pub(crate) system: bool,
    /// Frame number of the first 4 KiB page.
    pub(crate) frame: u32,
}

/// Returns the memory to which the guest entry `raw` refers. Returns `None` if [`translate`] returns 0 for the entry,
/// or denies it regardless of the granted memory.
pub(crate) fn named(raw: u64, size: PageSize) -> Option<Named> {
    let guest = Pte::from(raw);
    let possible = guest.valid()
        && guest.aperture() != PteAperture::Peer
        && guest.address() & mask(size) == 0
        && mmu::kind::uncompressed(guest.kind()).is_some();
    possible.then(|| Named { system: guest.aperture().is_system(), frame: guest.frame() })
}

/// Returns true if `old` is valid, and either permits an access that `new` does not permit or differs in any other
/// field.
pub(crate) fn loses(old: u64, new: u64) -> bool {
    let (old, new) = (Pte::from(old), Pte::from(new));
    let same_frame = || {
        let bare = |pte: Pte| u64::from(pte.with_privileged(false).with_read_only(false));
        bare(old) == bare(new)
    };
    old.valid() && !(same_frame() && (old.read_only() || !new.read_only()) && (old.privileged() || !new.privileged()))
}

const fn mask(size: PageSize) -> u64 {
    size.bytes().wrapping_sub(1)
}

#[cfg(test)]
mod tests;
