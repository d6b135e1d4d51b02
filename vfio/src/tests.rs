//! Tests a card behind a fake VFIO. The fake is stricter than the kernel: mistakes that the kernel accepts cause a
//! panic.

mod card;
mod fake;
mod open;
