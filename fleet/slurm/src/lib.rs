//! A SPANK plugin for Slurm. A job with shards of a GPU (`--gres=shard:N`) becomes a tenant of the node's `mediatord`,
//! or gets a vGPU, with the limits that the job requested. At the end of the job, its use is recorded and its part is
//! freed.
//!
//! Parts: the entry points that Slurm calls (`spank`), the options of jobs ([`options`]), a job's shards as reported by
//! the controller ([`granted`], [`nodes`]), the tenant or VM for these shards ([`claim`]), and the operations for a job
//! ([`work`]). The plugin runs these operations in Slurm's processes.
//!
//! Slurm accounts for the shards: on each node and card, it allocates at most as many shards as the card has. The
//! daemon limits each job to its part. The plugin only defines the size of a shard.
//!
//! The plugin does not schedule, and does not trust jobs: nothing in a job's environment increases its part.
//!
//! Sources: `spank(7)`, `gres.conf(5)`, `prolog_epilog`, `plugstack.conf`.

pub mod claim;
pub mod granted;
pub mod nodes;
pub mod options;
mod spank;
pub mod work;

pub use spank::MARK;
