//! Converts the state of cards to the form of the admin API: memory ([`memory`]) and time ([`scheduler`], [`history`])
//! of both kinds of cards, and the tenants of CUDA cards ([`tenant`]).
//!
//! The owners of both kinds describe memory and time with the same types, [`tenancy::MemoryView`] and
//! [`tenancy::TimeView`]. The caller adds values that only one kind of card has.
//!
//! The crate does not send requests to owners, and keeps no state.

#![forbid(unsafe_code)]

mod memory;
mod tenant;
mod time;

pub use memory::memory;
pub use tenant::{add_guest_programs, stranger, tenant};
pub use time::{history, scheduler};

use std::collections::BTreeMap;
use vram::TenantId;

/// Names of a card's tenants, by ID.
pub type Names = BTreeMap<TenantId, String>;

/// Nanoseconds per millisecond.
const MS: u64 = 1_000_000;
/// Size of a MiB in bytes.
const MIB: u64 = 1 << 20;
