//! The GPU scheduler as a pure state machine: events and the time in, decisions out.
//!
//! [`Scheduler`] knows no hardware, no threads and no clock; whoever feeds it events carries its decisions out. So a test
//! runs hours of many vGPUs in seconds, and [`sim`] shows what a policy does before a guest meets it.
//!
//! Parts:
//! - [`Event`], [`Decision`]: the interface, and [`trace`]: a record of them that can be replayed;
//! - [`Config`], [`VgpuParams`]: what an operator sets, of a card and of a vGPU, at any time;
//! - [`Scheduler`]: queues of submissions in lanes (one for each engine, or one for all), what is on the card, accounts,
//!   caps, run time limits, strikes and quarantine: the same for every policy;
//! - `policy`: who goes next. One file each: `direct`, `fifo`, `credit`, `band`, `disengaged`;
//! - [`shares`](shares()): what part of the time belongs to whom;
//! - [`Account`], [`History`], [`Histogram`]: what was used;
//! - [`sim`]: a card, guests and their workloads as data, deterministic from a seed.
//!
//! How a feeder uses it: each doorbell is an [`Event::Arrival`] with a ticket; on [`Decision::Start`] the channel's new work
//! is given to the card; its completion record makes an [`Event::Completed`] with the card's time; at
//! [`Scheduler::next_wakeup`] comes an [`Event::Tick`]. The number of tickets of a vGPU that are queued is for the feeder
//! to bound.
//!
//! What is charged: an engine runs in order what it is given, so a submission has used the time from its start or from the
//! end before it, whichever is later, to its own end. The sum of what is charged is the time the engine was busy. That a
//! submission has ended is the feeder's word: it must not take it from what a guest can write alone.
//!
//! Not here: preemption of what runs. Memory is bounded by vGPUs and by what is queued.
//!
//! Sources: Gdev (Kato et al., USENIX ATC 2012), sections 5.1, 5.2 and figure 2; GPUvm (Suzuki et al., USENIX ATC 2014),
//! section 3.5; each policy's file has its own.

#![forbid(unsafe_code)]

mod account;
mod config;
mod flight;
mod lane;
mod params;
mod policy;
mod scheduler;
mod shares;
pub mod sim;
pub mod trace;
mod types;

pub use account::{Account, Histogram, History, Sample};
pub use config::{
    BandParams, Config, ConfigError, DisengagedParams, LatencyClass, PERMILLE, Pipeline, PolicyKind, Queues,
};
pub use params::{CopyShare, VgpuParams, WEIGHT_MAX};
pub use policy::Standing;
pub use scheduler::{Quarantine, SavedScheduler, Scheduler};
pub use shares::{WHOLE, shares};
pub use types::{Channel, Decision, Engine, Event, Nanos, Place, Ticket, VgpuId};

#[cfg(test)]
mod tests;
