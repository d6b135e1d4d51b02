//! Events that the mediator reports to a vGPU, in the guest's own terms.

use crate::backend::Place;
use nvspec::addr::GpuVa;
use nvspec::fifo::VirtualChannelId;
use serde::{Deserialize, Serialize};

/// The GPU's MMU refused an access of this guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MmuFault {
    /// Fault unit, `nvspec::mmu::fault::unit`; below 32.
    pub unit: u32,
    /// Instance block of the channel or aperture, as the guest named it.
    pub instance: Option<Place>,
    /// The address that faulted.
    pub va: GpuVa,
    /// Why, `nvspec::mmu::fault`.
    pub reason: u32,
    /// Client within the hub or cluster.
    pub client: u32,
    /// The client is behind the hub, not in a GPC.
    pub hub: bool,
    /// It was a write.
    pub write: bool,
    /// The cluster, for a client that is not behind the hub.
    pub gpc: u32,
}

impl MmuFault {
    /// The fault that a driver asks for to get a hung engine back: no access stands behind it.
    #[must_use]
    pub fn triggered(unit: u32) -> Self {
        Self { unit, instance: None, va: GpuVa(0), reason: 0, client: 0, hub: true, write: false, gpc: 0 }
    }
}

/// A PBDMA stopped on something in this guest's push buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PbdmaError {
    /// Number of the PBDMA; below the chip's count.
    pub unit: u32,
    /// The guest's channel.
    pub channel: VirtualChannelId,
    /// Bits as in `pbdma::INTR_0`.
    pub intr: u32,
    /// Subchannel of the method.
    pub subchannel: u32,
    /// Byte address of the method.
    pub method: u32,
    /// Its data.
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

/// A copy engine's firmware refused a method of this guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyError {
    /// Number of the copy engine: 0 or 1.
    pub engine: u32,
    /// Bits as in `ce0::INTR`.
    pub intr: u32,
    /// Instance block of the channel, as the guest named it.
    pub instance: Option<Place>,
    /// Report of the firmware about the method, word as `nvspec::class::ce90b5::error`: code, subchannel, method.
    pub report: u32,
    /// The method's data.
    pub data: u32,
}

/// PGRAPH stopped on a method of this guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GraphError {
    /// Bits as in `pgraph::INTR`.
    pub intr: u32,
    /// Code of a data error.
    pub code: u32,
    /// Instance block of the channel, as the guest named it.
    pub instance: Option<Place>,
    /// Subchannel of the method.
    pub subchannel: u32,
    /// Class bound to it.
    pub class: u32,
    /// Byte address of the method.
    pub method: u32,
    /// Its data.
    pub data: u32,
    /// Units that trapped, bits as in `pgraph::TRAP`.
    pub trap: u32,
    /// Report of a multiprocessor, if one trapped.
    pub sm: Option<SmError>,
}

/// A multiprocessor stopped on something that a kernel of this guest did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SmError {
    /// Number of the cluster; the first is named if the guest's GPU has no such one.
    pub gpc: u32,
    /// Number of the TPC in it; as above.
    pub tpc: u32,
    /// Error of the warp, a number of `compute90c0::warp_error`.
    pub warp: u32,
    /// Bits of errors that are no warp's.
    pub global: u32,
}
