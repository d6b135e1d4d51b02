//! Places of a guest's structures, as they are saved.

use nvspec::addr::{Gpa, GuestVramAddr, Place};
use serde::{Deserialize, Serialize};

/// A place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SavedPlace {
    Vram(u64),
    Ram(u64),
}

impl From<Place> for SavedPlace {
    fn from(place: Place) -> Self {
        match place {
            Place::Vram(address) => Self::Vram(address.0),
            Place::Ram(address) => Self::Ram(address.0),
        }
    }
}

impl From<SavedPlace> for Place {
    fn from(saved: SavedPlace) -> Self {
        match saved {
            SavedPlace::Vram(address) => Self::Vram(GuestVramAddr(address)),
            SavedPlace::Ram(address) => Self::Ram(Gpa(address)),
        }
    }
}
