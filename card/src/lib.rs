//! The interface to a physical card for all higher layers, at the level of a PCI function.
//!
//! [`Card`] declares the functions used by `channels`, `mediator` and the passthrough path. A real card behind VFIO can
//! provide all of them except [`Card::access_counts`], which may return `None`. `simgpu` implements the trait in
//! software, and `vfio-card` implements it with mapped BARs, `VFIO_IOMMU_MAP_DMA` and `VFIO_DEVICE_SET_IRQS`.
//!
//! Contents: [`Card`], its [`Identity`], the two memory [`Aperture`]s, [`DmaMemory`] for host memory that the card may
//! access, [`InterruptMode`] and [`AccessCounts`].
//!
//! Not included: PCI configuration space (the card's is managed by the host's PCI core, and a vGPU's by `devmodel`),
//! power states, and features that need a driver.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use vm_memory::{MmapRegion, VolatileMemory, VolatileMemoryError, VolatileSlice};
use vmm_sys_util::eventfd::EventFd;

/// Identity and BAR sizes of a PCI function, as read from configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// PCI vendor ID.
    pub vendor: u16,
    /// PCI device ID.
    pub device: u16,
    /// PCI subsystem vendor ID.
    pub subsystem_vendor: u16,
    /// PCI subsystem ID.
    pub subsystem: u16,
    /// PCI revision ID.
    pub revision: u8,
    /// 24-bit PCI class code: base class, subclass, programming interface.
    pub class: u32,
    /// Size of BAR0, the register BAR, in bytes.
    pub bar0_size: u64,
    /// Size of BAR1, the VRAM aperture, in bytes.
    pub bar1_size: u64,
    /// Size of BAR3, the instance-memory aperture, in bytes.
    pub bar3_size: u64,
}

/// The two memory BARs. Page tables written by the driver translate offsets in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Aperture {
    /// BAR1: general VRAM access and the doorbells (USERD).
    Bar1,
    /// BAR3 (BAR2 in NVIDIA's numbering): instance memory.
    Bar3,
}

/// Interrupt signalling mode of the card. In both modes, the event descriptor is signalled on edges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterruptMode {
    /// One MSI message per edge. The driver permits the next message by writing to the card's rearm register.
    Msi,
    /// A level interrupt, which is signalled once and then masked until [`Card::unmask_intx`], as in VFIO.
    Intx,
}

/// Host memory from any source, mapped for the lifetime of the value.
pub trait HostMemory: Send + Sync + Debug {
    /// Returns the whole mapping.
    fn as_volatile_slice(&self) -> VolatileSlice<'_, ()>;

    /// Returns true if the card may access `len` bytes at `offset`. Must be called before each access. Otherwise, the
    /// first access to untouched memory would charge its allocation to this process instead of the memory's owner.
    fn may_touch(&self, _offset: usize, _len: usize) -> bool {
        true
    }
}

impl HostMemory for MmapRegion {
    fn as_volatile_slice(&self) -> VolatileSlice<'_, ()> {
        VolatileMemory::as_volatile_slice(self)
    }
}

/// A range of mapped host memory that the card may read and, if `writable` is true, write. This value keeps the mapping
/// alive.
#[derive(Clone, Debug)]
pub struct DmaMemory {
    region: Arc<dyn HostMemory>,
    offset: usize,
    len: usize,
    writable: bool,
}

impl DmaMemory {
    /// Creates a range of `len` bytes at `offset` in `region`.
    ///
    /// # Errors
    /// Returns an error if the range is outside the mapping.
    pub fn new(
        region: Arc<dyn HostMemory>,
        offset: usize,
        len: usize,
        writable: bool,
    ) -> Result<Self, VolatileMemoryError> {
        region.as_volatile_slice().subslice(offset, len)?;
        Ok(Self { region, offset, len, writable })
    }

    /// Returns the size of the range in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the range is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns true if the card may write to the range.
    #[must_use]
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// Returns the `len` bytes at `offset` in this range.
    ///
    /// # Errors
    /// Returns an error if the bytes are outside the range, or if the card may not access them.
    pub fn slice(&self, offset: usize, len: usize) -> Result<VolatileSlice<'_, ()>, VolatileMemoryError> {
        let end = offset.checked_add(len).ok_or(VolatileMemoryError::Overflow { base: offset, offset: len })?;
        if end > self.len {
            return Err(VolatileMemoryError::OutOfBounds { addr: end });
        }
        if !self.region.may_touch(self.offset + offset, len) {
            return Err(VolatileMemoryError::OutOfBounds { addr: offset });
        }
        self.region.as_volatile_slice().subslice(self.offset + offset, len)
    }

    /// Returns the host virtual address of the first byte, for an IOMMU mapping.
    #[must_use]
    pub fn host_address(&self) -> *const u8 {
        self.region.as_volatile_slice().ptr_guard().as_ptr().wrapping_add(self.offset)
    }
}

/// Reason why host memory cannot be mapped for the card or unmapped.
#[derive(Debug, thiserror::Error)]
pub enum DmaError {
    /// Part of the range is already mapped.
    #[error("I/O address range {iova:#x}+{len:#x} overlaps a mapping at {existing:#x}")]
    Overlap {
        /// Start of the requested I/O virtual address range.
        iova: u64,
        /// Size of the request in bytes.
        len: u64,
        /// Start of the existing mapping.
        existing: u64,
    },
    /// The card cannot generate all addresses in this range.
    #[error("I/O address range {iova:#x}+{len:#x} is beyond the card's {bits} address bits")]
    OutOfReach {
        /// Start of the requested I/O virtual address range.
        iova: u64,
        /// Size of the request in bytes.
        len: u64,
        /// Width of the card's DMA addresses in bits.
        bits: u32,
    },
    /// The address or the length is not a multiple of 4 KiB.
    #[error("I/O address range {iova:#x}+{len:#x} is not aligned to 4 KiB")]
    Unaligned {
        /// Start of the requested I/O virtual address range.
        iova: u64,
        /// Size of the request in bytes.
        len: u64,
    },
    /// No mapping has exactly this range.
    #[error("I/O address range {iova:#x}+{len:#x} does not match any mapping")]
    NotMapped {
        /// Start of the requested I/O virtual address range.
        iova: u64,
        /// Size of the request in bytes.
        len: u64,
    },
    /// Pinning would allocate more untouched memory than the limit permits.
    #[error(
        "I/O address range {iova:#x}+{len:#x} contains more untouched memory than `memory.ram.touch_mib` allows; \
         raise it, or have the VMM touch its memory first (QEMU: `prealloc=on`)"
    )]
    Untouched {
        /// Start of the requested I/O virtual address range.
        iova: u64,
        /// Size of the request in bytes.
        len: u64,
    },
    /// The host's IOMMU cannot map all addresses in this range.
    #[error(
        "I/O address range {iova:#x}+{len:#x} cannot be mapped by the host's IOMMU: it is reserved, for interrupts \
         for example, or has more address bits than the IOMMU"
    )]
    Reserved {
        /// Start of the requested I/O virtual address range.
        iova: u64,
        /// Size of the request in bytes.
        len: u64,
    },
    /// The process is not permitted to pin this amount of memory.
    #[error(
        "{len:#x} bytes for I/O address {iova:#x} cannot be pinned: this process may pin {limit:#x} bytes; raise \
         RLIMIT_MEMLOCK (LimitMEMLOCK=infinity in the daemon's unit)"
    )]
    MemoryLock {
        /// Start of the requested I/O virtual address range.
        iova: u64,
        /// Size of the request in bytes.
        len: u64,
        /// Maximum size of pinned memory in bytes.
        limit: u64,
    },
    /// The host accepts no further mappings for the card.
    #[error(
        "{len:#x} bytes at I/O address {iova:#x} would exceed the host's limit of mappings: there are {mappings}; \
         raise `dma_entry_limit` of the module vfio_iommu_type1, or have VMs lend larger chunks (huge pages)"
    )]
    Exhausted {
        /// Start of the requested I/O virtual address range.
        iova: u64,
        /// Size of the request in bytes.
        len: u64,
        /// Number of existing mappings.
        mappings: usize,
    },
    /// The host's IOMMU rejected the request.
    #[error("the host could not map memory for the card: {0}")]
    Host(#[source] std::io::Error),
}

/// Per-block counts of accesses to card memory and host memory by the card's engines and kernels. An access is a burst
/// of at most [`AccessCounts::BURST_BYTES`] bytes. CPU accesses through the BARs are not counted. The same applies to
/// the card's own accesses to page tables, context images, push buffers, semaphores, code, and cached constants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessCounts {
    /// One count per VRAM block, in address order.
    pub vram: Vec<u64>,
    /// One count per accessed block of host memory, by I/O virtual start address.
    pub system: BTreeMap<u64, u64>,
}

impl AccessCounts {
    /// Size of a block in bytes, which equals the card's large page size. Blocks are aligned to their size.
    pub const BLOCK_BYTES: u64 = 128 << 10;
    /// Maximum burst size in bytes, which is the transfer size of the memory.
    pub const BURST_BYTES: u64 = 128;
}

/// A card's PCI function. All methods may be called from any thread.
pub trait Card: Send + Sync {
    /// Returns the function's identity and BAR sizes, which never change.
    fn identity(&self) -> Identity;

    /// Reads the 32-bit register at byte offset `offset` in BAR0. `offset` must be a multiple of 4 within BAR0. Reads
    /// at other offsets return all ones, like an unclaimed access.
    fn read32(&self, offset: u32) -> u32;

    /// Writes the 32-bit register at byte offset `offset` in BAR0. `offset` must be a multiple of 4 within BAR0. A
    /// write at any other offset has no effect.
    fn write32(&self, offset: u32, value: u32);

    /// Reads bytes at `offset` in a memory BAR. Unmapped pages read as all ones.
    fn aperture_read(&self, aperture: Aperture, offset: u64, data: &mut [u8]);

    /// Writes bytes at `offset` in a memory BAR. Writes to unmapped pages are dropped.
    fn aperture_write(&self, aperture: Aperture, offset: u64, data: &[u8]);

    /// Maps `memory` for the card at the I/O virtual address `iova`, until [`Card::unmap_dma`] is called with the same
    /// range.
    ///
    /// # Errors
    /// Returns a [`DmaError`] if the memory cannot be mapped.
    fn map_dma(&self, iova: u64, memory: DmaMemory) -> Result<(), DmaError>;

    /// Removes a mapping. On return, accesses in flight have ended, and the card can no longer access the memory.
    ///
    /// # Errors
    /// Returns a [`DmaError`] if the mapping cannot be removed.
    fn unmap_dma(&self, iova: u64, len: u64) -> Result<(), DmaError>;

    /// Signals subsequent interrupts on `event`. `None` disables interrupts.
    fn set_interrupt(&self, mode: InterruptMode, event: Option<EventFd>);

    /// Unmasks the INTx line. Immediately signals an interrupt if the line is still asserted.
    fn unmask_intx(&self);

    /// Resets the function. Registers return to their power-on values, work is abandoned, and interrupts are disabled.
    /// DMA mappings persist. After the reset, VRAM contents are undefined.
    fn reset(&self);

    /// Returns a reason if the card must no longer be used, because the host needs it back or because it has failed on
    /// its bus. Callers poll this function.
    fn lost(&self) -> Option<&'static str> {
        None
    }

    /// Returns the I/O virtual addresses that [`Card::map_dma`] rejects. These are the addresses reserved by the host's
    /// IOMMU, for example for interrupts, and those beyond the card's address width. They never change.
    fn unmappable(&self) -> Vec<Range<u64>> {
        Vec::new()
    }

    /// Returns true if a context image from an untrusted source can do no more than a channel's methods, provided that
    /// it lists no registers. This is not known for real cards.
    fn takes_any_image(&self) -> bool {
        false
    }

    /// Returns per-block counts of accesses by engines and kernels since the last call with `reset`, or `None` if the
    /// card does not count accesses. Real cards do not count them, so an offline profile replaces the counts.
    ///
    /// Counts are stored by address, so read them before memory is moved or assigned to another tenant.
    fn access_counts(&self, reset: bool) -> Option<AccessCounts> {
        let _ = reset;
        None
    }
}
