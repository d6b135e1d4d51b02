//! The seam to a device whose state a client takes elsewhere.
//!
//! The client goes from state to state ([`State`]), reads what the device was, and has another one be it; what that is is the
//! device's own affair, and untrusted where it comes in. Beside it the client asks what of its memory the device has written
//! ([`crate::memory::WriteLog`] has the part of this process).

use std::ops::Range;

use rustix::io::Errno;
use thiserror::Error;

use crate::protocol::{STATE_ERROR, STATE_RESUMING, STATE_RUNNING, STATE_STOP, STATE_STOP_COPY};

/// State of a device, as its client sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// It has failed; a reset brings it back.
    Error,
    /// It changes nothing, of its own or of the client's.
    Stop,
    /// It works.
    #[default]
    Running,
    /// It is stopped, and its state can be read.
    StopCopy,
    /// It is stopped, and takes another state in.
    Resuming,
}

impl State {
    /// The state with a wire number that a client may ask for.
    pub(crate) fn from_wire(number: u32) -> Option<Self> {
        let all = [Self::Stop, Self::Running, Self::StopCopy, Self::Resuming];
        all.into_iter().find(|state| state.to_wire() == number)
    }

    pub(crate) fn to_wire(self) -> u32 {
        match self {
            Self::Error => STATE_ERROR,
            Self::Stop => STATE_STOP,
            Self::Running => STATE_RUNNING,
            Self::StopCopy => STATE_STOP_COPY,
            Self::Resuming => STATE_RESUMING,
        }
    }

    /// The next state on the way to `to`, which is another: from each state to each other the shortest way is by [`Self::Stop`].
    pub(crate) fn toward(self, to: Self) -> Self {
        if self == Self::Stop { to } else { Self::Stop }
    }
}

/// Reason that a device does not do what it is asked for; the client sees the number.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{why}")]
pub struct MigrationError {
    /// Number that the client is answered with.
    pub errno: Errno,
    /// Text for the operator.
    pub why: String,
}

impl MigrationError {
    /// A state has come that this device could not be.
    pub fn invalid(why: impl std::fmt::Display) -> Self {
        Self { errno: Errno::INVAL, why: why.to_string() }
    }

    /// The device cannot, now.
    pub fn failed(why: impl std::fmt::Display) -> Self {
        Self { errno: Errno::IO, why: why.to_string() }
    }
}

/// A device whose state can be taken elsewhere. The server calls these in the order of the states only; a reset of the device, and the
/// end of its client, end whatever has begun.
pub trait Migration {
    /// From running to stopped: when this returns the device changes nothing.
    ///
    /// # Errors
    /// What is in the way; it runs on.
    fn stop(&mut self) -> Result<(), MigrationError>;

    /// From stopped to running.
    fn start(&mut self);

    /// Begins to say what the device is, which is stopped.
    ///
    /// # Errors
    /// What is in the way; it is stopped as before.
    fn begin_saving(&mut self) -> Result<(), MigrationError>;

    /// Writes the next bytes of it; fewer than there is room for only at the end.
    ///
    /// # Errors
    /// When it cannot be read.
    fn save(&mut self, data: &mut [u8]) -> Result<usize, MigrationError>;

    /// It is stopped again.
    fn end_saving(&mut self);

    /// Forgets what the device is, which is stopped, to be another.
    ///
    /// # Errors
    /// What is in the way: the device has failed.
    fn begin_loading(&mut self) -> Result<(), MigrationError>;

    /// Takes the next bytes of what it is to be. Untrusted.
    ///
    /// # Errors
    /// When they are none of a device like this.
    fn load(&mut self, data: &[u8]) -> Result<(), MigrationError>;

    /// All has come: the device is what was said, and stopped.
    ///
    /// # Errors
    /// When it is none that there could be: the device has failed.
    fn end_loading(&mut self) -> Result<(), MigrationError>;

    /// Begins to note what the device writes of client memory by itself, or ends that.
    fn log_writes(&mut self, on: bool);

    /// Calls `each` with ranges of client memory, in which may lie what the device has written by itself in `range` since this was asked
    /// last; never too few. What lies wholly within `range` is not said again unless it is written again.
    fn take_written(&mut self, range: Range<u64>, each: &mut dyn FnMut(Range<u64>));
}
