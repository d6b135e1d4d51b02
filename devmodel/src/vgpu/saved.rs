//! Saved form of a vGPU. Objects to which registers refer (channels, page tables, memory) are saved separately.
//!
//! Blocks without invalid states are serialized directly. Adding a field to such a block requires a new version of the
//! saved form.

use super::VGpu;
use crate::blocks::board::{CopyEngine, Pmu};
use crate::blocks::graph::Graph;
use crate::blocks::pbdma::Pbdma;
use crate::blocks::pbus::Pbus;
use crate::blocks::pfifo::Pfifo;
use crate::blocks::pmc::Pmc;
use crate::blocks::ptimer::Ptimer;
use crate::config::VGpuConfig;
use crate::denied::Denials;
use crate::interrupt::Interrupts;
use crate::storage::Storage;
use nvspec::fifo::{CHANNELS, VirtualChannelId};
use saved_state::{Invalid, first_version};
use serde::{Deserialize, Serialize};

/// Saved form of a vGPU.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SavedVGpu {
    identity: SavedIdentity,
    /// Contents of configuration space.
    pub(crate) pci: Vec<u8>,
    /// Byte offsets in BAR0 and values of nonzero plain registers, in ascending order of offset.
    pub(crate) storage: Vec<(u32, u32)>,
    denials: Denials,
    interrupts: Interrupts,
    pmc: Pmc,
    pbus: Pbus,
    pfifo: Pfifo,
    pbdma: Pbdma,
    ptimer: Ptimer,
    pmu: Pmu,
    copy: [CopyEngine; 2],
    graph: Graph,
    beside: bool,
}

first_version!(SavedVGpu, "devmodel");

/// Guest-visible parts of a vGPU's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedIdentity {
    boot0: u32,
    vram_bytes: u64,
    channels: u32,
    bars: [u64; 3],
    vendor_capability: Vec<u8>,
}

impl SavedIdentity {
    fn from_config(config: &VGpuConfig) -> Self {
        // A guest's firmware reads the VBIOS only once, so another release of the mediator may have a different VBIOS.
        let VGpuConfig { chip, pci, vram_bytes, channels, vbios: _, vendor_capability } = config;
        Self {
            boot0: chip.boot0,
            vram_bytes: *vram_bytes,
            channels: *channels,
            bars: [pci.bar0_bytes, pci.bar1_bytes, pci.bar3_bytes],
            vendor_capability: vendor_capability.clone(),
        }
    }
}

impl VGpu {
    /// Saves the vGPU.
    #[must_use]
    pub fn save(&self) -> SavedVGpu {
        let Self {
            config,
            pci,
            storage,
            denials,
            interrupts,
            pmc,
            pbus,
            pfifo,
            pbdma,
            ptimer,
            pmu,
            copy,
            graph,
            beside,
        } = self;
        SavedVGpu {
            identity: SavedIdentity::from_config(config),
            pci: pci.save(),
            storage: storage.save(),
            denials: denials.clone(),
            interrupts: *interrupts,
            pmc: pmc.clone(),
            pbus: pbus.clone(),
            pfifo: pfifo.clone(),
            pbdma: pbdma.clone(),
            ptimer: ptimer.clone(),
            pmu: pmu.clone(),
            copy: copy.clone(),
            graph: graph.clone(),
            beside: *beside,
        }
    }

    /// Restores the vGPU. The guest must not be able to distinguish `config` from the original configuration. Does not
    /// repeat backend calls.
    ///
    /// # Errors
    /// Returns an error if the saved form is invalid, or belongs to a different vGPU.
    pub fn restored(saved: SavedVGpu, config: VGpuConfig) -> Result<Self, Invalid> {
        let SavedVGpu {
            identity,
            pci,
            storage,
            denials,
            interrupts,
            pmc,
            pbus,
            pfifo,
            pbdma,
            ptimer,
            pmu,
            copy,
            graph,
            beside,
        } = saved;
        let own = SavedIdentity::from_config(&config);
        Invalid::unless(identity == own, || {
            format!("the saved vGPU has a different configuration: {identity:x?} instead of {own:x?}")
        })?;
        let channels = config.channels;
        let mut gpu = Self::new(config).map_err(Invalid::new)?;
        gpu.pci.restore(&pci)?;
        denials.check()?;
        pfifo.check(channels)?;
        pbdma.check()?;
        pmu.check()?;
        let [first, second] = &copy;
        first.check()?;
        second.check()?;
        graph.check()?;
        Ok(Self {
            storage: Storage::restored(&storage)?,
            denials,
            interrupts,
            pmc,
            pbus,
            pfifo,
            pbdma,
            ptimer,
            pmu,
            copy,
            graph,
            beside,
            ..gpu
        })
    }

    /// Returns the channels that the guest has bound. In the backend's state, each of them must be either bound or
    /// rejected.
    pub fn bound_channels(&self) -> impl Iterator<Item = VirtualChannelId> {
        let bound = self.pfifo.bound_bits();
        let numbers = (0u8..).take(CHANNELS as usize);
        numbers.filter(move |number| bound.checked_shr(u32::from(*number)).unwrap_or(0) & 1 == 1).map(VirtualChannelId)
    }

    /// Returns the mask of engines that the guest has blocked. The guest's channels are not scheduled on these engines.
    #[must_use]
    pub fn blocked_engines(&self) -> u32 {
        self.pfifo.blocked()
    }
}

#[cfg(test)]
mod tests;
