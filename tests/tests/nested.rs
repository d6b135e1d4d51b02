//! A card behind VFIO, in a machine that has machines of its own.

#[path = "nested/card.rs"]
mod card;
