//! A SPANK plugin for Slurm: a job with shards of a GPU (`--gres=shard:N`) becomes a tenant of the node's `mediatord`, or has a
//! vGPU, with the limits that it asked for; when it ends, what it used is written down and what it had is free.
//!
//! Parts: the entry points that Slurm calls (`spank`), the options of jobs ([`options`]), the shards that the controller says a job
//! has ([`granted`], [`nodes`]), the tenant or VM for them ([`claim`]), and
//! what that program does which the plugin runs ([`work`]): the plugin itself only reads options, starts it, and sets variables.
//!
//! Slurm keeps the count: it hands out no more shards than a card has, on whichever node and card. The daemon holds each job to
//! what it has. The plugin decides nothing but what a number of shards means.
//!
//! What it does not do: schedule, or trust a job: nothing in the job's environment raises its part.
//!
//! Sources: `spank(7)`, `gres.conf(5)`, `prolog_epilog`, `plugstack.conf`.

pub mod claim;
pub mod granted;
pub mod nodes;
pub mod options;
mod spank;
pub mod work;

pub use spank::MARK;
