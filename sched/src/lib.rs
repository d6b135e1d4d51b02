//! GPU scheduler: a state machine without I/O that maps events and the time to decisions.
//!
//! [`Scheduler`] uses no hardware, threads, or clock. A feeder sends events to it and executes its decisions. A test
//! can therefore simulate hours of many vGPUs in seconds, and [`sim`] can evaluate a policy before real guests use it.
//!
//! Parts:
//! - [`Event`] and [`Decision`] are the interface, and [`trace`] records events and decisions for replay;
//! - [`Config`] and [`VgpuParams`] are the operator's settings of a card and of a vGPU, which may change at any time;
//! - [`Scheduler`] contains everything that does not depend on the policy: queues of submissions in lanes (one for each
//!   engine, or one for all), work on the card, accounts, caps, run time limits, strikes, and quarantine;
//! - `policy` selects the next vGPU, with one file per policy: `direct`, `fifo`, `credit`, `band`, `disengaged`;
//! - [`shares`](shares()) computes each vGPU's share of the time;
//! - [`Account`], [`History`], and [`Histogram`] record the use of the engines;
//! - [`turns`] grants a whole card to one tenant at a time, for cards on which single submissions cannot be delayed
//!   (the `gang` crate coordinates the turns of several cards);
//! - [`groups`] contains sets of tenants that use such a card at the same time and take turns as one party;
//! - [`sim`] is a deterministic simulation of a card with guests. Their workloads are described as data.
//!
//! The feeder sends events and executes decisions. For each doorbell, it sends an [`Event::Arrival`] with a ticket.
//! After [`Decision::Start`], it submits the channel's new work to the card. For each completion record, it sends an
//! [`Event::Completed`] with the card's time. At [`Scheduler::next_wakeup`], it sends an [`Event::Tick`]. The feeder
//! must limit each vGPU's number of queued tickets.
//!
//! An engine executes its work in order. A submission is therefore charged for the time from its start or the previous
//! end, whichever is later, to its own end. The sum of all charges is the engine's busy time. The feeder must not
//! derive the end of a submission from guest-writable memory alone.
//!
//! This crate does not preempt running work. Its memory use is bounded by the numbers of vGPUs and queued submissions.
//!
//! Sources: Gdev (Kato et al., USENIX ATC 2012), sections 5.1, 5.2 and figure 2, and GPUvm (Suzuki et al., USENIX ATC
//! 2014), section 3.5. Each policy's file lists its own sources.

#![forbid(unsafe_code)]

mod account;
mod checks;
mod config;
mod engine;
mod flight;
pub mod groups;
mod lane;
mod member;
mod params;
mod policy;
mod scheduler;
mod shares;
pub mod sim;
pub mod trace;
pub mod turns;
mod types;

pub use account::{Account, Histogram, History, Sample};
pub use config::{
    BandParams, Config, ConfigError, DisengagedParams, LatencyClass, PERMILLE, Pipeline, PolicyKind, Queues,
};
pub use params::{CopyShare, VgpuParams, WEIGHT_MAX};
pub use policy::Standing;
pub use scheduler::{Quarantine, SavedScheduler, Scheduler};
pub use shares::{WHOLE_SHARE_PPM, shares};
pub use types::{Channel, Decision, Engine, Event, Nanos, Place, TenantId, Ticket};

#[cfg(test)]
mod tests;
