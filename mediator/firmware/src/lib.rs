//! Firmware of a card's falcons.
//!
//! The PGRAPH and copy engines of a real card do nothing until programs run on their falcons, and these programs
//! control the card. So the mediator loads only the images that the operator approved, and a guest's images stay in its
//! virtual falcons. The firmware is not shipped: images from a stock guest driver are stored as candidates.
//!
//! Parts: [`Image`] (one falcon's code and data, a file with its own format), [`Set`] (a card's images), [`Store`] (a
//! folder with images and the list of approved ones), [`Inbox`] (a queue of guests' images for the store).
//!
//! The crate does not interpret, change or load a program; `bringup` loads it.

mod image;
mod inbox;
mod store;

pub use image::{Digest, Image, ImageError, Set};
pub use inbox::Inbox;
pub use store::{Entry, Missing, Store, StoreError};
