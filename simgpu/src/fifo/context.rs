//! The state of a channel in a PBDMA, and its format in the instance block (RAMFC).

use super::decoder::Decoder;
use nvspec::addr::{GpuVa, Target};
use nvspec::fifo::SUBCHANNELS;
use nvspec::instance::{ramfc, userd};
use simgpu_memory::memory::{BusAddr, BusError, Memory};
use simgpu_memory::mmu::{AddressSpace, MmuFault};

/// Mask of the upper address bits in the dword that follows the low dword of a GPU virtual address.
const HIGH_MASK: u32 = 0xff;

/// Prefetched push buffer words, which are dropped at the end of a run.
#[derive(Clone, Debug)]
pub(crate) struct Fetched {
    pub(crate) words: [u32; Self::MAX],
    pub(crate) first: u64,
    pub(crate) count: usize,
}

impl Fetched {
    /// Maximum number of prefetched words.
    pub(crate) const MAX: usize = 64;

    pub(crate) const fn empty() -> Self {
        Self { words: [0; Self::MAX], first: 0, count: 0 }
    }
}

/// A channel that is loaded in a PBDMA.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    pub(crate) channel: u8,
    pub(crate) instance: (Target, u64),
    block: BusAddr,
    pub(crate) space: AddressSpace,
    pub(crate) userd: BusAddr,
    gp_base: u64,
    gp_entries: u32,
    /// Index of the next GPFIFO entry, less than `gp_entries`.
    pub(crate) gp_get: u32,
    /// Address of the next word of the current segment.
    pub(crate) pb_get: u64,
    /// End address of the current segment.
    pub(crate) pb_end: u64,
    pub(crate) top_level_get: u64,
    pub(crate) reference: u32,
    pub(crate) semaphore: [u32; 4],
    pub(crate) decoder: Decoder,
    /// SET_OBJECT data of each subchannel, or 0 if unbound.
    pub(crate) objects: [u32; SUBCHANNELS as usize],
    /// The engine that the channel has used last since it was loaded, if any.
    pub(crate) engine: Option<crate::faults::EngineId>,
    pub(crate) fetched: Fetched,
}

/// Reason why a channel could not be loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadError {
    /// The instance block, or memory that it references, is inaccessible.
    Unbound(MmuFault),
    /// The RAMFC signature is missing.
    Signature,
    /// The ring size is invalid.
    Ring,
}

impl From<MmuFault> for LoadError {
    fn from(fault: MmuFault) -> Self {
        Self::Unbound(fault)
    }
}

impl Context {
    /// Reads the state of `channel` from its instance block.
    pub(crate) fn load(channel: u8, instance: (Target, u64), memory: &Memory) -> Result<Self, LoadError> {
        let space = AddressSpace::from_instance(memory, instance)?;
        let unbound = MmuFault { reason: nvspec::mmu::fault::UNBOUND_INST, va: GpuVa(0), write: false };
        let block = BusAddr::from_target(instance.0, instance.1).ok_or(unbound)?;
        let mut words = [0u8; ramfc::BYTES as usize];
        memory.read(block, &mut words).map_err(|error| {
            memory.count_lost(error);
            unbound
        })?;
        let word = |offset: u64| {
            let at = offset as usize;
            u32::from_le_bytes([words[at], words[at + 1], words[at + 2], words[at + 3]])
        };
        let wide = |low: u64, high: u64| u64::from(word(high) & HIGH_MASK) << 32 | u64::from(word(low));
        if word(ramfc::SIGNATURE) != ramfc::SIGNATURE_VALUE {
            return Err(LoadError::Signature);
        }
        let log2 = word(ramfc::GP_BASE_HI) >> 16;
        if log2 > ramfc::GP_ENTRIES_LOG2_MAX {
            return Err(LoadError::Ring);
        }
        let gp_entries = 1 << log2;
        Ok(Self {
            channel,
            instance,
            block,
            space,
            userd: userd_page(word(ramfc::USERD_LO), word(ramfc::USERD_HI)).ok_or(unbound)?,
            gp_base: wide(ramfc::GP_BASE_LO, ramfc::GP_BASE_HI),
            gp_entries,
            gp_get: word(ramfc::GP_GET) & (gp_entries - 1),
            pb_get: wide(ramfc::PB_GET_LO, ramfc::PB_GET_HI) & !3,
            pb_end: wide(ramfc::PB_PUT_LO, ramfc::PB_PUT_HI) & !3,
            top_level_get: wide(ramfc::TOP_LEVEL_GET_LO, ramfc::TOP_LEVEL_GET_HI),
            reference: word(ramfc::REF),
            semaphore: ramfc::SEMAPHORE.map(word),
            decoder: Decoder::restore(word(ramfc::PB_HEADER), word(ramfc::PB_COUNT), word(ramfc::SUBDEVICE)),
            objects: std::array::from_fn(|index| word(ramfc::OBJECTS + 4 * index as u64)),
            engine: None,
            fetched: Fetched::empty(),
        })
    }

    /// Writes the state to the instance block.
    pub(crate) fn save(&self, memory: &Memory) {
        let (header, count, subdevice) = self.decoder.save();
        let words = [
            (ramfc::GP_GET, self.gp_get),
            (ramfc::GP_FETCH, self.gp_get),
            (ramfc::PB_GET_LO, self.pb_get as u32),
            (ramfc::PB_GET_HI, (self.pb_get >> 32) as u32),
            (ramfc::PB_PUT_LO, self.pb_end as u32),
            (ramfc::PB_PUT_HI, (self.pb_end >> 32) as u32),
            (ramfc::TOP_LEVEL_GET_LO, self.top_level_get as u32),
            (ramfc::TOP_LEVEL_GET_HI, (self.top_level_get >> 32) as u32),
            (ramfc::REF, self.reference),
            (ramfc::PB_HEADER, header),
            (ramfc::PB_COUNT, count),
            (ramfc::SUBDEVICE, subdevice),
        ];
        let semaphore = ramfc::SEMAPHORE.into_iter().zip(self.semaphore);
        let objects = (0u64..).map(|index| ramfc::OBJECTS + 4 * index).zip(self.objects);
        for (offset, value) in words.into_iter().chain(semaphore).chain(objects) {
            lost(memory, memory.write32(self.block.offset(offset), value));
        }
    }

    /// Publishes the channel's progress in its USERD page.
    pub(crate) fn publish(&self, memory: &Memory) {
        let words = [
            (userd::GET, self.pb_get as u32),
            (userd::GET_HI, (self.pb_get >> 32) as u32),
            (userd::REF, self.reference),
            (userd::TOP_LEVEL_GET, self.top_level_get as u32),
            (userd::TOP_LEVEL_GET_HI, (self.top_level_get >> 32) as u32),
            (userd::GP_GET, self.gp_get),
        ];
        for (offset, value) in words {
            lost(memory, memory.write32(self.userd.offset(offset), value));
        }
    }

    /// Returns GP_PUT, or `None` if it is not a valid ring index or cannot be read.
    pub(crate) fn gp_put(&self, memory: &Memory) -> Option<u32> {
        read_gp_put(self.userd, memory).filter(|put| *put < self.gp_entries)
    }

    /// Returns true if the current segment has unread words.
    pub(crate) fn in_segment(&self) -> bool {
        self.pb_get < self.pb_end
    }

    /// Returns the GPU virtual address of the next GPFIFO entry.
    pub(crate) fn gp_entry(&self) -> GpuVa {
        GpuVa(self.gp_base + 8 * u64::from(self.gp_get))
    }

    /// Marks the current GPFIFO entry as consumed.
    pub(crate) fn advance_gp(&mut self) {
        self.gp_get = (self.gp_get + 1) & (self.gp_entries - 1);
    }
}

fn lost(memory: &Memory, result: Result<(), BusError>) {
    if let Err(error) = result {
        memory.count_lost(error);
    }
}

/// Returns the address of the USERD page, given two dwords of RAMFC.
pub(crate) fn userd_page(low: u32, high: u32) -> Option<BusAddr> {
    let address = u64::from(high & HIGH_MASK) << 32 | u64::from(low) & !(userd::BYTES - 1);
    BusAddr::from_target(Target::from_bits(low), address)
}

/// Reads GP_PUT from the page at `userd`. Returns `None` if the page is inaccessible.
pub(crate) fn read_gp_put(userd: BusAddr, memory: &Memory) -> Option<u32> {
    memory.read32(userd.offset(userd::GP_PUT)).map_err(|error| memory.count_lost(error)).ok()
}
