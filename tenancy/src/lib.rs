//! The state machine that shares a card between its tenants.
//!
//! A card has one of two executors: the owner of a card for virtual machines (`card-manager`), or the owner of a card
//! for CUDA programs (`cuda-owner`). Both report events of the card, and execute the resulting actions. This crate
//! decides without I/O, threads or a clock of its own, because each call gets the time as an argument.
//!
//! [`Residency`] divides the card's memory: it returns the chunks to move, and the tenants to hold while another tenant
//! has a quantum of the memory. Its parts are [`vram::Balancer`] and [`vram::Quanta`].
//!
//! [`relocation::Relocations`] executes the moves: it returns the steps of each move, and the executor reports their
//! results. [`Machine`] combines both.
//!
//! [`Machine::wait_reason`] returns the reason why a tenant waits. [`MemoryView`] and [`TimeView`] describe a card of
//! either kind for operators.
//!
//! [`Deadlines`] contains the timers of a CUDA card's owner.
//!
//! The crate does not divide time: `sched` does. It does not copy memory, and depends neither on channels nor on
//! processes.

mod deadlines;
mod machine;
pub mod relocation;
mod residency;
mod view;
mod wait;

pub use deadlines::{Deadline, Deadlines};
pub use machine::Machine;
pub use residency::{Demand, Holds, Planned, Residency};
pub use view::{EngineTime, Entitled, MemoryView, TenantTime, TimeView, Window};
pub use wait::{Standing, Wait};
