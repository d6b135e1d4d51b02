//! Virtual channels for guests on a card's physical channels.
//!
//! A guest has its own channel numbers (0 to 127), while all VMs share the card's 128 channels. All structures of
//! running channels belong to the host, which builds an instance block field by field from the guest's block. The USERD
//! pages, the runlist and the GPFIFO rings that the card fetches are in VRAM that no guest can write.
//!
//! A guest's doorbell does not itself start work on the card. [`Channels::pull`] validates the guest's ring entries up
//! to the doorbell, and copies them to the host's ring, followed by a completion record. The record is a push buffer
//! range. Once all earlier work has ended, it releases a semaphore with a number and the card's time, and raises the
//! non-stall interrupt. [`Channels::start`] permits the card to fetch the entries during the VM's slice.
//! [`Channels::completed`] returns the submissions that have ended. The guest sees its progress in terms of its own
//! indices and addresses, and never sees the host's ring.
//!
//! The GPU reads a channel's work area (ring, records), so the pages of [`Layout::work_pages`] are mapped at
//! [`work_va`] in the channel's address space. Only the semaphores are writable there. A work area must be mapped only
//! in the address space to which its channel is bound. Otherwise, another VM could write its semaphores.
//!
//! Context images also belong to the host. Guest work must never access them, because they list registers that the
//! card's firmware writes. A guest's context pointers only determine whether the card gets a context
//! ([`Layout::image_pages`]).
//!
//! Modules and types:
//! - [`Channels`]: the physical channels, their owners, and their life cycle from bind to unbind;
//! - [`GuestInstance`]: the validated fields of a guest's instance block, and the card's block;
//! - [`RunState`]: the states of a channel, and their transitions;
//! - [`Watchdog`]: detects engines without progress;
//! - `gate`: controls access to PGRAPH ([`Channels::admit`]);
//! - the traits that the caller implements, on one object: [`Host`] for the card, [`GuestMemory`] for rereading engine
//!   context pointers, [`GuestRing`] for the guest's rings.
//!
//! A guest's instance block is read only at defined points: the whole block at bind (the caller copies it once), and
//! its engine context pointers at enable, disable, runlist submission, preemption, and doorbell. Linux 6.1 writes those
//! pointers to the block of a running channel and then rings its doorbell. Linux 6.12 stops and preempts the channel,
//! writes the pointers, and enables the channel again. Other guest writes to the block after bind have no effect.
//!
//! Limits:
//! - only the ring indices of the PBDMA's state survive an unbind, so the position within a fetched range is lost;
//! - a record's methods are inserted between a guest's methods, so each submission must set the address and payload for
//!   its own host semaphore methods, and must not end within a method's data or after 510 entries (drivers comply with
//!   this);
//! - control entries other than NOPs are rejected.
//!
//! The crate does not decide when to pull or to poll for completions, or how to handle a hang.
//!
//! The crate never waits: a channel that does not leave its engines immediately is [`Stuck`], and its owner retries
//! ([`Channels::kick`]). The crate uses no locks or threads, and its callers provide the current time.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)
)]

mod block;
mod card;
mod complete;
mod entry;
mod episode;
mod gate;
mod image;
mod instance;
mod parts;
mod pool;
mod preempt;
mod pull;
mod refuse;
mod retire;
mod ring;
mod state;
mod submit;
mod types;
mod watchdog;
mod work;

#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    dead_code,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    reason = "a test harness: failed checks must panic, and the fuzz target uses a part of it"
)]
mod tests {
    pub(crate) mod fake;
    pub(crate) mod model;
}

pub use episode::{HANG_LIMIT_NS, Watchdog};
#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::fuzz;
pub use image::GRAPH_IMAGE_MAX;
pub use instance::{GuestInstance, InstanceError};
pub use nvspec::addr::Place;
pub use parts::Parts;
pub use pool::{Arrived, Channels, MoveError, Moving, SavedChannels, SavedMoving, SavedPlace};
pub use state::{Presence, RunState};
pub use types::{
    Bind, BindError, Completion, Doorbell, DoorbellError, Hang, HardwareState, Hindrance, Layout, Pause, PullError,
    Pulled, RingFault, Stall, Stuck, Submission, Submitted,
};
pub use work::{Span, WORK_BYTES, work_va};

use nvspec::addr::{GpuVa, VramAddr};
use nvspec::fifo::ChannelId;

pub use tenant::TenantId;

/// Interface to the card for channels. Implementers must record card failures.
pub trait Host {
    /// Reads the BAR0 register at byte offset `offset`.
    fn read32(&mut self, offset: u32) -> u32;

    /// Writes the BAR0 register at byte offset `offset`.
    fn write32(&mut self, offset: u32, value: u32);

    /// Fills `data` from VRAM at `address`.
    fn vram_read(&mut self, address: VramAddr, data: &mut [u8]);

    /// Writes `data` to VRAM at `address`.
    fn vram_write(&mut self, address: VramAddr, data: &[u8]);

    /// Makes all VRAM writes visible to the card's units. Called before a command that makes the card read written
    /// data.
    fn vram_flush(&mut self);

    /// Reads the dword at byte offset `offset` in a physical channel's USERD page.
    fn userd_read(&mut self, channel: ChannelId, offset: u64) -> u32;

    /// Writes the dword at byte offset `offset` in a physical channel's USERD page, as a doorbell.
    fn userd_write(&mut self, channel: ChannelId, offset: u64, value: u32);
}

/// Error for unreadable guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the guest has no memory at this address")]
pub struct Unreadable;

/// Access to the guest's instance blocks.
pub trait GuestMemory {
    /// Fills `data` from `place`.
    ///
    /// # Errors
    /// Returns an error if any byte is outside the guest's memory.
    fn read(&mut self, place: Place, data: &mut [u8]) -> Result<(), Unreadable>;
}

/// Error for a GPU virtual address that is unmapped, or that is mapped to unreadable memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no readable memory is mapped at this GPU virtual address")]
pub struct Unmapped;

/// Access to a guest's GPFIFO ring by its virtual address in the channel's address space.
pub trait GuestRing {
    /// Fills `data` from `va`. A read never crosses a 4 KiB page boundary.
    ///
    /// # Errors
    /// Returns an error if nothing is mapped at this address or the memory cannot be read.
    fn read(&mut self, va: GpuVa, data: &mut [u8]) -> Result<(), Unmapped>;

    /// Records that a push buffer range of `dwords` dwords at `va` was pulled. Implementers can use this to track
    /// memory to which work refers.
    fn taken(&mut self, va: GpuVa, dwords: u32) {
        let _ = (va, dwords);
    }
}
