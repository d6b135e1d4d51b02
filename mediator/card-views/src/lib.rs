//! Converts cards of both kinds to the form of the admin API: their memory ([`memory`]), their time ([`scheduler`],
//! [`history`]), and the tenants of CUDA cards ([`tenant`]).
//!
//! Both owners describe memory and time with the same types, [`tenancy::MemoryView`] and [`tenancy::TimeView`]. The
//! caller adds the values that only one kind of card has.
//!
//! The crate does not send requests to an owner, and keeps no state.

#![forbid(unsafe_code)]

mod memory;
mod tenant;
mod time;

pub use memory::memory;
pub use tenant::{add_guest_programs, stranger, tenant};
pub use time::{history, scheduler};

use std::collections::BTreeMap;
use vram::TenantId;

/// Names of a card's tenants.
pub type Names = BTreeMap<TenantId, String>;

/// Number of nanoseconds in a millisecond.
const MS: u64 = 1_000_000;
/// Size of a MiB in bytes.
const MIB: u64 = 1 << 20;
