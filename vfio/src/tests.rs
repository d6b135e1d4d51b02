//! A card behind a fake VFIO that is stricter than the kernel's: mistakes that the kernel accepts panic here.

mod card;
mod fake;
mod open;
