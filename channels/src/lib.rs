//! Virtual to physical channels.
//!
//! A guest's channel numbers (0 to 127) are its own; the card's 128 channels are shared by all VMs. What the card runs
//! belongs to the host: instance blocks are built field by field from what a guest's block says; USERD pages, the runlist
//! and the GPFIFO rings that the card fetches lie in card memory that no guest writes.
//!
//! A guest's doorbell gives the card nothing yet. [`Channels::pull`] copies what the guest's ring holds up to it into the
//! host's ring, each entry checked, and puts a completion record behind: a piece of push buffer that releases a semaphore
//! with a number and the card's time when all before it has ended, and raises the non-stall interrupt. [`Channels::start`]
//! lets the card fetch it, when its turn has come.
//! [`Channels::completed`] says which submissions have ended. What the guest sees of its progress is in its own indices and
//! addresses; that there is a host's ring it does not see.
//!
//! A channel's work area (ring, records) is read by the GPU, so it is mapped in the address space that the channel uses:
//! at [`work_va`], as [`Layout::work_pages`] says. Only the semaphores are writable there. A work area must be mapped
//! nowhere but where its channel is bound, or another VM could write its semaphores.
//!
//! Context images are the host's as well, and no guest's work reads or writes them: they name registers that the card's
//! firmware writes. Of a guest's context pointers the card learns only that there is a context ([`Layout::image_pages`]).
//!
//! Parts:
//! - [`Channels`]: the physical channels, who has which, their life from bind to unbind;
//! - [`GuestInstance`]: what is taken from a guest's instance block, checked; and the block that the card gets;
//! - [`RunState`]: a channel's states and the steps between them;
//! - [`Watchdog`]: engines on which nothing moves;
//! - `gate`: who may use PGRAPH ([`Channels::admit`]);
//! - the traits that a user implements, on one object: [`Host`] for the card, [`GuestMemory`] for re-reading engine context pointers,
//!   [`GuestRing`] for the guest's rings.
//!
//! Defined points at which a guest's instance block is read: all of it at bind (the caller copies it once), and its engine
//! context pointers again at enable, disable, runlist submission, preempt and doorbell. Linux 6.1 writes those pointers into
//! the block of a channel that runs already and then rings its doorbell; 6.12 stops and preempts the channel,
//! writes, and enables it again. Nothing else that a guest writes into its block after bind has any effect.
//!
//! Limits:
//! - of the PBDMA's state only the ring's indices go over from unbind to bind, not the place within a range that was
//!   fetched;
//! - a record's methods come between a guest's: each submission must set address and payload of its own host semaphore
//!   methods, and must not end within a method's data (nor after 510 entries), as is so with drivers;
//! - control entries of the ring other than NOPs are refused.
//!
//! Not here: policy; when to pull, to look for completions, and what to do about a hang.
//!
//! Nothing is waited for: a channel that does not leave its engines at once is [`Stuck`], and is asked again by whoever
//! drives it ([`Channels::kick`]). No locks, no threads; time is an argument.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)
)]

mod card;
mod complete;
mod entry;
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
pub use watchdog::{HANG_LIMIT_NS, Watchdog};
pub use work::{Span, WORK_BYTES, work_va};

use nvspec::addr::{GpuVa, VramAddr};
use nvspec::fifo::ChannelId;

pub use tenant::TenantId as VmId;

/// The card, as channels need it. A failure of the card is the implementer's to remember.
pub trait Host {
    /// Reads a register of BAR0.
    fn read32(&mut self, offset: u32) -> u32;

    /// Writes a register of BAR0.
    fn write32(&mut self, offset: u32, value: u32);

    /// Reads VRAM.
    fn vram_read(&mut self, address: VramAddr, data: &mut [u8]);

    /// Writes VRAM.
    fn vram_write(&mut self, address: VramAddr, data: &[u8]);

    /// Makes everything written to VRAM visible to the card's units: called before the card is told to look.
    fn vram_flush(&mut self);

    /// Reads the word at byte `offset` of the USERD page of a physical channel.
    fn userd_read(&mut self, channel: ChannelId, offset: u64) -> u32;

    /// Writes the word at byte `offset` of the USERD page of a physical channel, as a doorbell.
    fn userd_write(&mut self, channel: ChannelId, offset: u64, value: u32);
}

/// The guest's memory cannot be read there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no such guest memory")]
pub struct Unreadable;

/// Reads the guest's instance blocks.
pub trait GuestMemory {
    /// Fills `data` from `place` on.
    ///
    /// # Errors
    /// When any byte lies outside of what the guest has.
    fn read(&mut self, place: Place, data: &mut [u8]) -> Result<(), Unreadable>;
}

/// The guest's GPU virtual address space has no memory there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no memory at that GPU virtual address")]
pub struct Unmapped;

/// Reads a guest's GPFIFO ring at the virtual addresses that the guest's channel has it at.
pub trait GuestRing {
    /// Fills `data` from `va` on; never across a 4 KiB page.
    ///
    /// # Errors
    /// When nothing is mapped there, or what is mapped cannot be read.
    fn read(&mut self, va: GpuVa, data: &mut [u8]) -> Result<(), Unmapped>;

    /// Told of each push buffer that is taken over: `dwords` words from `va` on. For who wants to know what work names.
    fn taken(&mut self, va: GpuVa, dwords: u32) {
        let _ = (va, dwords);
    }
}
