//! Firmware for a card's falcons.
//!
//! The PGRAPH and copy engines of a real card do nothing until programs run on their falcons, and these programs
//! control the card. Therefore the mediator loads only images that the operator has approved, and a guest's images are
//! confined to its virtual falcons. Firmware is not shipped: images from a stock guest driver are stored as candidates.
//!
//! Parts: [`Image`] (one falcon's code and data, with its own file format), [`Set`] (a card's images), [`Store`] (a
//! folder with images and the list of approved ones), [`Inbox`] (a queue of guests' images for the store).
//!
//! The crate does not interpret, change or load a program; `bringup` loads it.

mod image;
mod inbox;
mod store;

pub use image::{Digest, Image, ImageError, Set};
pub use inbox::Inbox;
pub use store::{Entry, Missing, Store, StoreError};
