//! Tests of a card behind a fake VFIO that is stricter than the kernel's: mistakes that the kernel accepts cause a
//! panic.

mod card;
mod fake;
mod open;
