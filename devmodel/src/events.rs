//! Events that the mediator reports to a vGPU, using guest addresses and numbers.

use crate::backend::Place;
use nvspec::addr::GpuVa;
use nvspec::fifo::VirtualChannelId;
use serde::{Deserialize, Serialize};

/// An access of this guest that the GPU's MMU rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MmuFault {
    /// Fault unit, a value in `nvspec::mmu::fault::unit` less than 32.
    pub unit: u32,
    /// Guest address of the instance block of the channel or aperture.
    pub instance: Option<Place>,
    /// Faulting GPU virtual address.
    pub va: GpuVa,
    /// Fault reason, a value in `nvspec::mmu::fault`.
    pub reason: u32,
    /// Client number within the hub or GPC.
    pub client: u32,
    /// True if the client is in the hub, false if it is in a GPC.
    pub hub: bool,
    /// True if the access was a write.
    pub write: bool,
    /// GPC number, if the client is in a GPC.
    pub gpc: u32,
}

impl MmuFault {
    /// Creates the fault that a driver triggers to recover a hung engine. No access has caused it.
    #[must_use]
    pub fn triggered(unit: u32) -> Self {
        Self { unit, instance: None, va: GpuVa(0), reason: 0, client: 0, hub: true, write: false, gpc: 0 }
    }
}

/// An error in a push buffer of this guest, which has stopped a PBDMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PbdmaError {
    /// PBDMA number, less than the chip's number of PBDMAs.
    pub unit: u32,
    /// Channel number in the guest.
    pub channel: VirtualChannelId,
    /// Interrupt cause in the format of `pbdma::INTR_0`.
    pub intr: u32,
    /// Subchannel of the method.
    pub subchannel: u32,
    /// Byte address of the method.
    pub method: u32,
    /// Method data.
    pub data: u32,
}

/// A method of this guest that has stopped an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineError {
    /// PGRAPH.
    Graph(GraphError),
    /// A copy engine.
    Copy(CopyError),
}

/// A method of this guest that a copy engine's firmware rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyError {
    /// Copy engine number: 0 or 1.
    pub engine: u32,
    /// Interrupt cause in the format of `ce0::INTR`.
    pub intr: u32,
    /// Guest address of the channel's instance block.
    pub instance: Option<Place>,
    /// Error report of the firmware (code, subchannel, method) in the format of `nvspec::class::ce90b5::error`.
    pub report: u32,
    /// Method data.
    pub data: u32,
}

/// A method of this guest that has stopped PGRAPH.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GraphError {
    /// Interrupt cause in the format of `pgraph::INTR`.
    pub intr: u32,
    /// Data error code.
    pub code: u32,
    /// Guest address of the channel's instance block.
    pub instance: Option<Place>,
    /// Subchannel of the method.
    pub subchannel: u32,
    /// Class that is bound to the subchannel.
    pub class: u32,
    /// Byte address of the method.
    pub method: u32,
    /// Method data.
    pub data: u32,
    /// Units that have trapped, in the format of `pgraph::TRAP`.
    pub trap: u32,
    /// Error of a multiprocessor, if one has trapped.
    pub sm: Option<SmError>,
}

/// An error in a kernel of this guest, which has stopped a multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SmError {
    /// GPC number. If the guest's GPU does not have this GPC, the error is shown for its first GPC.
    pub gpc: u32,
    /// TPC number within the GPC. If the guest's GPU does not have this TPC, the error is shown for its first TPC.
    pub tpc: u32,
    /// Warp error, a value in `compute90c0::warp_error`.
    pub warp: u32,
    /// Mask of errors that are unrelated to a warp.
    pub global: u32,
}
