//! A SPANK plugin for Slurm. A job with GPU shards (`--gres=shard:N`) becomes a tenant of the node's `mediatord`, or
//! gets a vGPU, with the requested limits. When the job ends, the plugin records its usage and frees its part of the
//! card.
//!
//! The crate contains the entry points that Slurm calls (`spank`), job options ([`options`]), a job's shards as
//! reported by the controller ([`granted`], [`nodes`]), the tenant or VM for these shards ([`claim`]), and the
//! operations on a job ([`work`]), which run in Slurm's processes.
//!
//! Slurm tracks the shards and never allocates more than a card has. The daemon limits each job to its part. The plugin
//! only defines the size of a shard.
//!
//! The plugin does not schedule or trust jobs: a job's environment cannot increase its part.
//!
//! Sources: `spank(7)`, `gres.conf(5)`, `prolog_epilog`, `plugstack.conf`.

pub mod claim;
pub mod granted;
pub mod nodes;
pub mod options;
mod spank;
pub mod work;

pub use spank::MARK;
