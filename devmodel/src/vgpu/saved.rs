//! A vGPU as it is saved. What its registers stand for (channels, page tables, memory) is in other parts.
//!
//! Blocks without anything to refuse are written down as they are; a field more in one of them is another version of the part.

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

/// One VM's GPU.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SavedVGpu {
    identity: SavedIdentity,
    /// Configuration space.
    pub(crate) pci: Vec<u8>,
    /// Plain registers: byte offset in BAR0 and value of those that are not 0, in their order.
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

/// Origin of a vGPU, as far as a guest can see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedIdentity {
    boot0: u32,
    vram_bytes: u64,
    channels: u32,
    bars: [u64; 3],
    vendor_capability: Vec<u8>,
}

impl SavedIdentity {
    fn of(config: &VGpuConfig) -> Self {
        // The VBIOS is read once, by the firmware of a machine; another release may have another.
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
    /// Writes the vGPU down.
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
            identity: SavedIdentity::of(config),
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

    /// The vGPU as it was, of a description that a guest cannot tell from the one that it was made from. What the backend was
    /// told is not told again.
    ///
    /// # Errors
    /// When it is none that there can be, or is another one.
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
        let own = SavedIdentity::of(&config);
        Invalid::unless(identity == own, || {
            format!("it is a vGPU of another kind: {identity:x?}, and this one is {own:x?}")
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

    /// The channels that the guest has bound: each is bound, or refused, in what the backend keeps.
    pub fn bound_channels(&self) -> impl Iterator<Item = VirtualChannelId> {
        let bound = self.pfifo.bound_bits();
        let numbers = (0u8..).take(CHANNELS as usize);
        numbers.filter(move |number| bound.checked_shr(u32::from(*number)).unwrap_or(0) & 1 == 1).map(VirtualChannelId)
    }

    /// Engines that the guest holds back, one bit each: for these its channels are paused.
    #[must_use]
    pub fn blocked_engines(&self) -> u32 {
        self.pfifo.blocked()
    }
}

#[cfg(test)]
#[path = "../tests/saved.rs"]
mod tests;
