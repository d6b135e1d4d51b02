//! A card behind VFIO, in an emulated machine.

#[path = "nested/card.rs"]
mod card;
#[path = "nested/vms.rs"]
mod vms;
