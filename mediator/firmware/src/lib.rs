//! Firmware for cards' falcons.
//!
//! The PGRAPH and copy engines of a real card need programs on their falcons, and these programs control the card.
//! Therefore, the mediator loads only images approved by the operator, and a guest's images are confined to its virtual
//! falcons. Firmware is not shipped; instead, images from stock guest drivers are stored as candidates.
//!
//! Modules: [`Image`] (one falcon's code and data, with its own file format), [`Set`] (a card's images), [`Store`] (a
//! folder of images and the list of approved ones), [`Inbox`] (a queue for guests' images to the store).
//!
//! The crate does not interpret, modify or load programs; `bringup` loads them.

mod image;
mod inbox;
mod store;

pub use image::{Digest, Image, ImageError, Set};
pub use inbox::Inbox;
pub use store::{Entry, Missing, Store, StoreError};
