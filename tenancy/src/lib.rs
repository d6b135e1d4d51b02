//! State machine that shares a card among its tenants.
//!
//! A card has one of two executors: `card-manager` owns cards for virtual machines, and `cuda-owner` owns cards for
//! CUDA programs. Both report the card's events and execute the resulting actions. This crate makes decisions without
//! I/O, threads, or a clock of its own. Callers pass the time.
//!
//! [`Residency`] divides the card's memory. It returns the chunks to move, and the tenants to hold during another
//! tenant's memory quantum. It is based on [`vram::Balancer`] and [`vram::Quanta`].
//!
//! [`relocation::Relocations`] controls the moves. It returns the steps of each move, and the executor reports their
//! results. [`Machine`] combines both.
//!
//! [`Machine::wait_reason`] returns the reason why a tenant waits. [`MemoryView`] and [`TimeView`] describe a card of
//! either kind to operators.
//!
//! [`Deadlines`] contains the timers of a CUDA card's owner, and [`Indices`] contains the indices that it assigns.
//! [`SavedTenancy`] and [`SavedAccounts`] are the saved state for the card's next owner.
//!
//! `sched` divides the time. This crate does not copy memory, and does not depend on channels or processes.

mod deadlines;
mod indices;
mod machine;
pub mod relocation;
mod residency;
mod saved;
mod view;
mod wait;

pub use deadlines::{Deadline, Deadlines};
pub use indices::Indices;
pub use machine::{Changes, Machine, Report, Traffic};
pub use residency::{Demand, Holds, Planned, Residency};
pub use saved::{RestoredAccounts, SavedAccounts, SavedTenancy};
pub use saved_state::{ReadError, WriteError};
pub use view::{EngineTime, Entitled, MemoryView, TenantTime, TimeView, Window};
pub use wait::{Standing, Wait};
