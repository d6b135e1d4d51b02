//! A card behind a fake VFIO, that is stricter than the kernel's: what the kernel would let pass panics here.

mod card;
mod fake;
mod open;
