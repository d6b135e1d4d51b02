//! Firmware of a card's falcons.
//!
//! A real card's PGRAPH and copy engines do nothing before programs run on their falcons, and what runs there has the card
//! in its hands. So the mediator loads what the operator approved and nothing else, and what a guest loads stays in its
//! virtual falcons. It is not shipped: what a stock guest's driver brings is written down as a candidate.
//!
//! Parts: [`Image`] (one falcon's code and data, a file of its own form), [`Set`] (those of a card), [`Store`] (a folder with images, and which are
//! approved), [`Inbox`] (what guests bring, on its way there).
//!
//! What it does not do: read or change a program; load it, which `bringup` does.

mod image;
mod inbox;
mod store;

pub use image::{Digest, Image, ImageError, Set};
pub use inbox::Inbox;
pub use store::{Entry, Missing, Store, StoreError};
