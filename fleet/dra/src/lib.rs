//! The Kubernetes driver for dynamic resource allocation (DRA): one program per node, next to `mediatord`.
//!
//! The driver publishes the node's cards and their capacities to the cluster ([`device`], [`slices`]). After the
//! scheduler has allocated a part of a card to a claim, the kubelet asks the driver to prepare the claim. The driver
//! then creates a tenant on a CUDA card, or a vGPU on another kind of card ([`share`], with optional [`parameters`]
//! from the claim's author), and writes a CDI file with the container edits ([`driver`]). [`store`] records prepared
//! claims so that they survive a restart. [`plugin`] is the interface to the kubelet.
//!
//! The driver does not choose or enforce allocations: the scheduler chooses them, and `mediatord` enforces them.

pub mod claim;
pub mod device;
pub mod driver;
pub mod events;
pub mod metrics;
pub mod parameters;
pub mod plugin;
pub mod quantity;
pub mod share;
pub mod slices;
pub mod store;

/// Name of the driver in Kubernetes objects, and in its registration with the kubelet.
pub const DRIVER: &str = cdi_spec::VENDOR;
/// Name of a device's memory capacity, which is in bytes.
pub const MEMORY: &str = "memory";
/// Name of a device's time capacity, which is in thousandths.
pub const TIME: &str = "time";
/// A card's total time, in thousandths.
pub const WHOLE_CARD_PERMILLE: u32 = 1000;
