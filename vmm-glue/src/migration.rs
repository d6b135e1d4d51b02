//! The interface of a migratable device.
//!
//! The client moves the device from state to state ([`State`]), reads the device's state, and loads it into another
//! device. Each device defines the format of its state. A loaded state is untrusted. The client also queries the memory
//! that the device has written ([`vmm_memory::memory::WriteLog`] contains this process's writes).

use std::ops::Range;

use rustix::io::Errno;
use thiserror::Error;

use crate::protocol::{STATE_ERROR, STATE_RESUMING, STATE_RUNNING, STATE_STOP, STATE_STOP_COPY};

/// Migration state of a device, as reported to its client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// The device has failed. Only a reset ends this state.
    Error,
    /// The device changes neither its own state nor client memory.
    Stop,
    /// The device runs.
    #[default]
    Running,
    /// The device is stopped, and its state can be read.
    StopCopy,
    /// The device is stopped and loads another state.
    Resuming,
}

impl State {
    /// Returns the state with this wire number, or `None` if clients cannot request it.
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

    /// Returns the next state on the way to `to`, which must differ from `self`. The shortest path between two states
    /// leads through [`Self::Stop`].
    pub(crate) fn toward(self, to: Self) -> Self {
        if self == Self::Stop { to } else { Self::Stop }
    }
}

/// Reason for rejecting a request. The client receives the error number.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{why}")]
pub struct MigrationError {
    /// Error number in the reply to the client.
    pub errno: Errno,
    /// Text for the operator.
    pub why: String,
}

impl MigrationError {
    /// Creates the error for a received state that is invalid for this device.
    pub fn invalid(why: impl std::fmt::Display) -> Self {
        Self { errno: Errno::INVAL, why: why.to_string() }
    }

    /// Creates the error for a device that currently cannot fulfil the request.
    pub fn failed(why: impl std::fmt::Display) -> Self {
        Self { errno: Errno::IO, why: why.to_string() }
    }
}

/// A migratable device. The server calls these methods only in an order that the transitions between the states allow.
/// A device reset or the client's disconnection aborts any operation in progress.
pub trait Migration {
    /// Moves from running to stopped. Once this call has returned, the device no longer changes any state.
    ///
    /// # Errors
    /// Returns an error if the device cannot stop. It then keeps running.
    fn stop(&mut self) -> Result<(), MigrationError>;

    /// Moves from stopped to running.
    fn start(&mut self);

    /// Begins saving the state of the stopped device.
    ///
    /// # Errors
    /// Returns an error if the state cannot be saved. The device then remains stopped.
    fn begin_saving(&mut self) -> Result<(), MigrationError>;

    /// Writes the next bytes of the state into `data`. Fills `data` completely except at the end of the state.
    ///
    /// # Errors
    /// Returns an error if the state cannot be read.
    fn save(&mut self, data: &mut [u8]) -> Result<usize, MigrationError>;

    /// Ends saving. The device remains stopped.
    fn end_saving(&mut self);

    /// Drops the state of the stopped device, so that another state can be loaded.
    ///
    /// # Errors
    /// Returns an error if no other state can be loaded. The device has then failed.
    fn begin_loading(&mut self) -> Result<(), MigrationError>;

    /// Accepts the next bytes of the new state, which are untrusted.
    ///
    /// # Errors
    /// Returns an error if the bytes are invalid for this device.
    fn load(&mut self, data: &[u8]) -> Result<(), MigrationError>;

    /// Applies the complete state. The device remains stopped.
    ///
    /// # Errors
    /// Returns an error if the state is invalid. The device has then failed.
    fn end_loading(&mut self) -> Result<(), MigrationError>;

    /// Starts or stops logging the device's own writes to client memory.
    fn log_writes(&mut self, on: bool);

    /// Calls `each` with ranges of client memory that contain all of the device's own writes in `range` since the last
    /// call. A reported range inside `range` is not reported again unless it is written again.
    fn take_written(&mut self, range: Range<u64>, each: &mut dyn FnMut(Range<u64>));
}
