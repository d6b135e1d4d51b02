//! Events that the mediator reports to a vGPU, in the guest's own terms.

use crate::backend::Place;
use nvspec::addr::GpuVa;
use nvspec::fifo::VirtualChannelId;
use serde::{Deserialize, Serialize};

/// The GPU's MMU rejected an access of this guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MmuFault {
    /// Fault unit, from `nvspec::mmu::fault::unit`; below 32.
    pub unit: u32,
    /// Instance block of the channel or aperture, at the guest's address.
    pub instance: Option<Place>,
    /// The faulting address.
    pub va: GpuVa,
    /// Reason, a constant in `nvspec::mmu::fault`.
    pub reason: u32,
    /// Client within the hub or cluster.
    pub client: u32,
    /// True if the client is in the hub; false if it is in a GPC.
    pub hub: bool,
    /// True if the access was a write.
    pub write: bool,
    /// The cluster of a client in a GPC.
    pub gpc: u32,
}

impl MmuFault {
    /// Creates the fault that a driver triggers to recover a hung engine. No access caused it.
    #[must_use]
    pub fn triggered(unit: u32) -> Self {
        Self { unit, instance: None, va: GpuVa(0), reason: 0, client: 0, hub: true, write: false, gpc: 0 }
    }
}

/// A PBDMA stopped on an error in this guest's push buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PbdmaError {
    /// Number of the PBDMA; below the chip's count.
    pub unit: u32,
    /// The guest's channel.
    pub channel: VirtualChannelId,
    /// Cause of the interrupt, as bits of `pbdma::INTR_0`.
    pub intr: u32,
    /// Subchannel of the method.
    pub subchannel: u32,
    /// Byte address of the method.
    pub method: u32,
    /// The method's data.
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
    /// Number of the copy engine: 0 or 1.
    pub engine: u32,
    /// Cause of the interrupt, as bits of `ce0::INTR`.
    pub intr: u32,
    /// Instance block of the channel, at the guest's address.
    pub instance: Option<Place>,
    /// The firmware's report about the method (code, subchannel, method), in the format of
    /// `nvspec::class::ce90b5::error`.
    pub report: u32,
    /// The method's data.
    pub data: u32,
}

/// PGRAPH stopped on a method of this guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GraphError {
    /// Cause of the interrupt, as bits of `pgraph::INTR`.
    pub intr: u32,
    /// Code of a data error.
    pub code: u32,
    /// Instance block of the channel, at the guest's address.
    pub instance: Option<Place>,
    /// Subchannel of the method.
    pub subchannel: u32,
    /// Class bound to the subchannel.
    pub class: u32,
    /// Byte address of the method.
    pub method: u32,
    /// The method's data.
    pub data: u32,
    /// Units that trapped, as bits of `pgraph::TRAP`.
    pub trap: u32,
    /// Report of a multiprocessor, if a multiprocessor trapped.
    pub sm: Option<SmError>,
}

/// A multiprocessor stopped on an error of this guest's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SmError {
    /// Number of the cluster. If the guest's GPU does not have this cluster, the first cluster is used.
    pub gpc: u32,
    /// Number of the TPC in the cluster. If the guest's GPU does not have this TPC, the first TPC is used.
    pub tpc: u32,
    /// Error of the warp, a constant in `compute90c0::warp_error`.
    pub warp: u32,
    /// Mask of errors that do not belong to a warp.
    pub global: u32,
}
