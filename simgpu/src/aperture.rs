//! The windows through which the CPU accesses memory: BAR1, BAR3 and PRAMIN.
//!
//! The mappings are stored separately from the registers that set them, so that an access need not wait for the card
//! lock. The card's own work may hold this lock for a long time.

use crate::fifo::userd::Doorbells;
use card::Aperture;
use nvspec::addr::{GpuVa, Target, VramAddr};
use nvspec::regs::pbus;
use nvspec::regs::windows::pramin;
use parking_lot::RwLock;
use simgpu_memory::memory::{BusAddr, Memory};
use simgpu_memory::mmu::{Access, AddressSpace, Mmu, MmuFault};
use std::sync::atomic::{AtomicBool, Ordering};

/// Addressing mode of a BAR aperture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Offsets are VRAM addresses.
    Physical,
    /// Offsets are virtual addresses in the address space of an instance block.
    Virtual {
        instance: (Target, u64),
        /// The address space of the instance block, or a fault if the block is invalid.
        space: Result<AddressSpace, MmuFault>,
    },
}

/// An aperture access that faulted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ApertureFault {
    pub(crate) instance: (Target, u64),
    pub(crate) fault: MmuFault,
}

/// Mappings of the windows, and the state of the card's bus.
#[derive(Debug)]
pub(crate) struct Apertures {
    bars: RwLock<[Mode; 2]>,
    /// Bus address of the first byte of the PRAMIN window, or `None` if PRAMIN is unmapped.
    pramin: RwLock<Option<BusAddr>>,
    /// Set if the card has fallen off the bus: reads return all ones, and writes are ignored.
    gone: AtomicBool,
}

const fn index(aperture: Aperture) -> usize {
    match aperture {
        Aperture::Bar1 => 0,
        Aperture::Bar3 => 1,
    }
}

impl Apertures {
    pub(crate) fn new() -> Self {
        Self {
            bars: RwLock::new([Mode::Physical; 2]),
            pramin: RwLock::new(Some(BusAddr::Vram(VramAddr(0)))),
            gone: AtomicBool::new(false),
        }
    }

    /// Simulates a card that falls off the bus.
    pub(crate) fn vanish(&self) {
        self.gone.store(true, Ordering::Release);
    }

    /// Returns true if the card has fallen off the bus.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    pub(crate) fn reset(&self) {
        *self.bars.write() = [Mode::Physical; 2];
        *self.pramin.write() = Some(BusAddr::Vram(VramAddr(0)));
    }

    /// Maps `aperture` as specified by the value written to its register.
    pub(crate) fn bind(&self, aperture: Aperture, register: u32, memory: &Memory) {
        use pbus::BAR1_BLOCK::{ADDRESS, TARGET, VALID};
        let mode = if VALID.is_set(register) {
            let instance = (Target::from_bits(TARGET.get(register)), u64::from(ADDRESS.get(register)) << 12);
            Mode::Virtual { instance, space: AddressSpace::from_instance(memory, instance) }
        } else {
            Mode::Physical
        };
        self.bars.write()[index(aperture)] = mode;
    }

    /// Maps PRAMIN as specified by the value written to its base register.
    pub(crate) fn place_pramin(&self, register: u32) {
        use pbus::PRAMIN_WINDOW::{BASE, TARGET};
        let base = u64::from(BASE.get(register)) << 16;
        *self.pramin.write() = BusAddr::from_target(Target::from_bits(TARGET.get(register)), base);
    }

    fn mode(&self, aperture: Aperture) -> Mode {
        self.bars.read()[index(aperture)]
    }

    /// Reads through a BAR. If the range faults or, without an address space, extends beyond VRAM, all bytes read as
    /// 0xff.
    pub(crate) fn read(
        &self,
        aperture: Aperture,
        offset: u64,
        data: &mut [u8],
        memory: &Memory,
        mmu: &Mmu,
    ) -> Result<(), ApertureFault> {
        match self.mode(aperture) {
            Mode::Physical => {
                if let Err(error) = memory.read(BusAddr::Vram(VramAddr(offset)), data) {
                    memory.count_lost(error);
                    data.fill(0xff);
                }
                Ok(())
            }
            Mode::Virtual { instance, space } => space
                .and_then(|space| mmu.read(memory, &space, GpuVa(offset), data, Access::PRIVILEGED))
                .map_err(|fault| {
                    data.fill(0xff);
                    ApertureFault { instance, fault }
                }),
        }
    }

    /// Writes through a BAR. Returns true if a doorbell was rung.
    pub(crate) fn write(
        &self,
        aperture: Aperture,
        offset: u64,
        data: &[u8],
        memory: &Memory,
        mmu: &Mmu,
        doorbells: &Doorbells,
    ) -> Result<bool, ApertureFault> {
        match self.mode(aperture) {
            Mode::Physical => Ok(write_bus(BusAddr::Vram(VramAddr(offset)), data, memory, doorbells)),
            Mode::Virtual { instance, space } => {
                let fault = |fault| ApertureFault { instance, fault };
                let space = space.map_err(fault)?;
                let mut session = mmu.session(memory, &space, Access::PRIVILEGED);
                let (mut done, mut rang) = (0, false);
                while done < data.len() {
                    let va = GpuVa(offset.wrapping_add(done as u64));
                    let to = session.translate(va, true).map_err(fault)?;
                    let part = &data[done..];
                    let part = &part[..to.bytes.min(part.len() as u64) as usize];
                    // A doorbell is a dword. Write it in a single access to prevent torn reads.
                    match part {
                        [a, b, c, d] => session.write32(va, u32::from_le_bytes([*a, *b, *c, *d])),
                        _ => session.write(va, part),
                    }
                    .map_err(fault)?;
                    rang |= note(to.address, part.len(), doorbells);
                    done += part.len();
                }
                Ok(rang)
            }
        }
    }

    /// Reads a dword through PRAMIN at byte `offset` of BAR0.
    pub(crate) fn pramin_read(&self, offset: u32, memory: &Memory) -> u32 {
        let Some(base) = *self.pramin.read() else { return u32::MAX };
        memory.read32(base.offset(u64::from(offset - pramin::BASE))).unwrap_or_else(|error| {
            memory.count_lost(error);
            u32::MAX
        })
    }

    /// Writes a dword through PRAMIN. Returns true if a doorbell was rung.
    pub(crate) fn pramin_write(&self, offset: u32, value: u32, memory: &Memory, doorbells: &Doorbells) -> bool {
        let Some(base) = *self.pramin.read() else { return false };
        write_bus(base.offset(u64::from(offset - pramin::BASE)), &value.to_le_bytes(), memory, doorbells)
    }
}

fn write_bus(address: BusAddr, data: &[u8], memory: &Memory, doorbells: &Doorbells) -> bool {
    let result = match data {
        [a, b, c, d] => memory.write32(address, u32::from_le_bytes([*a, *b, *c, *d])),
        _ => memory.write(address, data),
    };
    match result {
        Ok(()) => note(address, data.len(), doorbells),
        Err(error) => {
            memory.count_lost(error);
            false
        }
    }
}

fn note(address: BusAddr, len: usize, doorbells: &Doorbells) -> bool {
    match address {
        BusAddr::Vram(address) => doorbells.note_write(address, len as u64),
        BusAddr::System(_) => false,
    }
}
