//! Events that the mediator reports to a vGPU, in guest terms.

use crate::backend::Place;
use nvspec::addr::GpuVa;
use nvspec::fifo::VirtualChannelId;
use serde::{Deserialize, Serialize};

/// The GPU's MMU rejected an access of this guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MmuFault {
    /// Fault unit from `nvspec::mmu::fault::unit`, less than 32.
    pub unit: u32,
    /// Guest address of the channel's or aperture's instance block.
    pub instance: Option<Place>,
    /// Faulting GPU virtual address.
    pub va: GpuVa,
    /// Fault reason, a constant in `nvspec::mmu::fault`.
    pub reason: u32,
    /// Client number within the hub or GPC.
    pub client: u32,
    /// True if the client is in the hub, false if it is in a GPC.
    pub hub: bool,
    /// True if the access was a write.
    pub write: bool,
    /// GPC number of a client in a GPC.
    pub gpc: u32,
}

impl MmuFault {
    /// Creates the fault that a driver triggers to recover a hung engine, without an access.
    #[must_use]
    pub fn triggered(unit: u32) -> Self {
        Self { unit, instance: None, va: GpuVa(0), reason: 0, client: 0, hub: true, write: false, gpc: 0 }
    }
}

/// A PBDMA stopped on an error in this guest's push buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PbdmaError {
    /// PBDMA number, less than the chip's PBDMA count.
    pub unit: u32,
    /// The guest's channel.
    pub channel: VirtualChannelId,
    /// Interrupt cause, as bits of `pbdma::INTR_0`.
    pub intr: u32,
    /// Subchannel of the method.
    pub subchannel: u32,
    /// Byte address of the method.
    pub method: u32,
    /// Method data.
    pub data: u32,
}

/// An engine stopped on a method of this guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineError {
    /// PGRAPH.
    Graph(GraphError),
    /// A copy engine.
    Copy(CopyError),
}

/// A copy engine's firmware rejected a method of this guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyError {
    /// Copy engine number: 0 or 1.
    pub engine: u32,
    /// Interrupt cause, as bits of `ce0::INTR`.
    pub intr: u32,
    /// Guest address of the channel's instance block.
    pub instance: Option<Place>,
    /// The firmware's report on the method (code, subchannel, method), in the format of `nvspec::class::ce90b5::error`.
    pub report: u32,
    /// Method data.
    pub data: u32,
}

/// PGRAPH stopped on a method of this guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GraphError {
    /// Interrupt cause, as bits of `pgraph::INTR`.
    pub intr: u32,
    /// Data error code.
    pub code: u32,
    /// Guest address of the channel's instance block.
    pub instance: Option<Place>,
    /// Subchannel of the method.
    pub subchannel: u32,
    /// Class bound to the subchannel.
    pub class: u32,
    /// Byte address of the method.
    pub method: u32,
    /// Method data.
    pub data: u32,
    /// Units that trapped, as bits of `pgraph::TRAP`.
    pub trap: u32,
    /// Multiprocessor error, if a multiprocessor trapped.
    pub sm: Option<SmError>,
}

/// A multiprocessor stopped on an error in this guest's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SmError {
    /// GPC number. If the guest's GPU lacks this GPC, the first one is used.
    pub gpc: u32,
    /// TPC number within the GPC. If the guest's GPU lacks this TPC, the first one is used.
    pub tpc: u32,
    /// Warp error, a constant in `compute90c0::warp_error`.
    pub warp: u32,
    /// Mask of errors that are not specific to a warp.
    pub global: u32,
}
