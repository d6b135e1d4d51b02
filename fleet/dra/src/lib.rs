//! The Kubernetes driver of dynamic resource allocation (DRA): one program a node, beside `mediatord`.
//!
//! It tells the cluster which cards there are, and what may be had of each ([`device`], [`slices`]); when the scheduler has
//! allocated a part of one to a claim, the kubelet has the driver prepare it: a tenant of a CUDA card, or a vGPU of another
//! ([`share`], with [`parameters`] that the claim's author may give), and a CDI file with what a container gets ([`driver`]).
//! [`store`] has what was prepared, so that a restart forgets nothing; [`plugin`] is what the kubelet sees.
//!
//! What it does not do: decide who gets what, which is the scheduler's, or enforce it, which is `mediatord`'s.

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

/// Name of the driver, in Kubernetes' objects and for the kubelet.
pub const DRIVER: &str = fleet_cdi::VENDOR;
/// Capacity of a device: memory, in bytes.
pub const MEMORY: &str = "memory";
/// Capacity of a device: time, in thousandths.
pub const TIME: &str = "time";
/// All of a card's time.
pub const WHOLE: u32 = 1000;
