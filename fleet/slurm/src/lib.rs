//! A SPANK plugin for Slurm. A job with shards of a GPU (`--gres=shard:N`) becomes a tenant of the node's `mediatord`,
//! or gets a vGPU, with the limits that it requested. When the job ends, its use is recorded and its part is freed.
//!
//! Parts: the entry points that Slurm calls (`spank`), the options of jobs ([`options`]), a job's shards as reported by
//! the controller ([`granted`], [`nodes`]), the tenant or VM for them ([`claim`]), and the work for a job ([`work`]).
//! The plugin does this work in Slurm's processes.
//!
//! Slurm accounts for the shards: it assigns at most a card's number of shards, on any node and card. The daemon limits
//! each job to its part. The plugin only defines the size of a shard.
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
