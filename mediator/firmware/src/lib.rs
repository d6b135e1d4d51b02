//! Firmware for the falcons of cards.
//!
//! The PGRAPH and copy engines of a real card need firmware on their falcons, which then controls the card. Therefore,
//! the mediator loads only images approved by the operator, and runs a guest's images only on its virtual falcons. No
//! firmware is shipped; instead, the images that stock guest drivers load are stored as candidates.
//!
//! Contents: [`Image`] (code and data of a falcon, with a file format), [`Set`] (the images of a card), [`Store`] (a
//! folder of images and the list of approved ones), [`Inbox`] (a queue of guest images for the store).
//!
//! The crate does not interpret, modify or load firmware; `bringup` loads it.

mod image;
mod inbox;
mod store;

pub use image::{Digest, Image, ImageError, Set};
pub use inbox::Inbox;
pub use store::{Entry, Missing, Store, StoreError};
