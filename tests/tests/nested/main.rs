//! Tests a card behind VFIO in an emulated machine.

mod card;
mod vms;
