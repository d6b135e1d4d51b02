//! The Fermi MMU's memory formats: page directory entries (PDE) and page table entries (PTE).
//!
//! A 40-bit virtual address contains the directory index in bits 39:27. The lower bits are the table index and the
//! offset: 26:17 and 16:0 for large pages, or 26:12 and 11:0 for small pages. Each directory entry refers to both a
//! large-page and a small-page table.
//!
//! Source: rnndb `memory/gf100_vm.xml`, and nouveau's `vmmgf100.c`.

use crate::addr::{GpuVa, LARGE_PAGE, SMALL_PAGE, VA_BITS};
use bitfield_struct::bitfield;

/// Right shift of the barrier page's address in its register.
pub const BARRIER_SHIFT: u32 = 8;
/// Size of a directory or table entry in bytes.
pub const ENTRY_BYTES: u64 = 8;
/// Number of entries in a page directory.
pub const PD_ENTRIES: u32 = 8192;
/// Size of a page directory in bytes.
pub const PD_BYTES: u64 = PD_ENTRIES as u64 * ENTRY_BYTES;
/// Number of address bits covered by a directory entry.
pub const PDE_SHIFT: u32 = 27;
/// Size of the virtual range covered by a directory entry, in bytes.
pub const PDE_SPAN: u64 = 1 << PDE_SHIFT;
/// Number of entries in a full small-page table.
pub const SPT_ENTRIES: u32 = (PDE_SPAN / SMALL_PAGE) as u32;
/// Number of entries in a full large-page table.
pub const LPT_ENTRIES: u32 = (PDE_SPAN / LARGE_PAGE) as u32;
/// Size of a full small-page table in bytes.
pub const SPT_BYTES: u64 = SPT_ENTRIES as u64 * ENTRY_BYTES;
/// Size of a full large-page table in bytes.
pub const LPT_BYTES: u64 = LPT_ENTRIES as u64 * ENTRY_BYTES;

/// First virtual address covered by the last directory entry, which a mediating host reserves for itself in every
/// address space. This project chose the address. It is not a hardware constant.
pub const HOST_VA_BASE: GpuVa = GpuVa((PD_ENTRIES as u64 - 1) << PDE_SHIFT);
const _: () = assert!(HOST_VA_BASE.0 + PDE_SPAN == 1 << VA_BITS);

/// Memory target of a directory entry's page table. The encoding differs from that of [`crate::addr::Target`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableTarget {
    /// No table.
    None,
    /// The card's VRAM.
    Vram,
    /// Host memory, snooped.
    SysCoherent,
    /// Host memory, not snooped.
    SysNonCoherent,
}

impl TableTarget {
    const fn from_bits(bits: u8) -> Self {
        match bits & 3 {
            0 => Self::None,
            1 => Self::Vram,
            2 => Self::SysCoherent,
            _ => Self::SysNonCoherent,
        }
    }

    const fn into_bits(self) -> u8 {
        self as u8
    }
}

/// Page directory entry.
#[bitfield(u64)]
#[derive(PartialEq, Eq, Hash)]
pub struct Pde {
    /// Memory target of the large-page table.
    #[bits(2)]
    pub large_target: TableTarget,
    /// Size code of the large-page table: 0 for full size, 1 for a half, 2 for a quarter, and 3 for an eighth.
    #[bits(2)]
    pub large_size: u8,
    /// Address of the large-page table in 4 KiB units.
    #[bits(28)]
    pub large_frame: u32,
    /// Memory target of the small-page table.
    #[bits(2)]
    pub small_target: TableTarget,
    /// Set if accesses to the small-page table are not cached.
    pub small_volatile: bool,
    /// Set if accesses to the large-page table are not cached.
    pub large_volatile: bool,
    /// Address of the small-page table in 4 KiB units.
    #[bits(28)]
    pub small_frame: u32,
}

impl Pde {
    /// Returns the byte address of the large-page table in the `large_target` space.
    #[must_use]
    pub const fn large_address(self) -> u64 {
        (self.large_frame() as u64) << 12
    }

    /// Returns the byte address of the small-page table in the `small_target` space.
    #[must_use]
    pub const fn small_address(self) -> u64 {
        (self.small_frame() as u64) << 12
    }

    /// Returns the number of entries in the large-page table, based on the size code.
    #[must_use]
    pub const fn large_entries(self) -> u32 {
        LPT_ENTRIES >> self.large_size()
    }

    /// Returns the number of entries in the small-page table, based on the size code.
    #[must_use]
    pub const fn small_entries(self) -> u32 {
        // GUESS: the size code is documented to shorten the range that the entry covers, so it is assumed to shorten
        // both tables.
        SPT_ENTRIES >> self.large_size()
    }
}

/// Memory target of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PteAperture {
    /// The card's VRAM.
    Vram,
    /// Another card's VRAM.
    Peer,
    /// Host memory, snooped.
    SysCoherent,
    /// Host memory, not snooped.
    SysNonCoherent,
}

impl PteAperture {
    const fn from_bits(bits: u8) -> Self {
        match bits & 3 {
            0 => Self::Vram,
            1 => Self::Peer,
            2 => Self::SysCoherent,
            _ => Self::SysNonCoherent,
        }
    }

    const fn into_bits(self) -> u8 {
        self as u8
    }

    /// Returns true if the target is host memory.
    #[must_use]
    pub const fn is_system(self) -> bool {
        matches!(self, Self::SysCoherent | Self::SysNonCoherent)
    }
}

/// Page table entry of a small or large page.
#[bitfield(u64)]
#[derive(PartialEq, Eq, Hash)]
pub struct Pte {
    /// Set if the page is mapped.
    pub valid: bool,
    /// Set if only privileged accesses (context switching and firmware) are permitted.
    pub privileged: bool,
    /// Set if writes fault.
    pub read_only: bool,
    /// Set if the page's contents are encrypted.
    pub encrypted: bool,
    /// Address in 4 KiB units, in the `aperture` space.
    #[bits(28)]
    pub frame: u32,
    /// Set if accesses are not cached.
    pub volatile: bool,
    /// Memory target of the page.
    #[bits(2)]
    pub aperture: PteAperture,
    #[bits(1)]
    __: u8,
    /// Storage kind. 0 is pitch-linear. The other kinds are block-linear, compressed or depth formats.
    pub kind: u8,
    /// Compression tag line.
    #[bits(17)]
    pub comp_tag: u32,
    #[bits(3)]
    __: u8,
}

/// Access permissions of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rights {
    /// Channels may read the page.
    ReadOnly,
    /// Channels may read and write the page.
    ReadWrite,
    /// Only context switching and firmware may access the page. Channel accesses fault.
    Privileged,
}

impl Pte {
    /// Returns a valid entry for frame 0 of VRAM with these permissions.
    #[must_use]
    pub const fn granting(rights: Rights) -> Self {
        Self::new()
            .with_valid(true)
            .with_read_only(matches!(rights, Rights::ReadOnly))
            .with_privileged(matches!(rights, Rights::Privileged))
    }

    /// Returns the byte address of the page in the `aperture` space.
    #[must_use]
    pub const fn address(self) -> u64 {
        (self.frame() as u64) << 12
    }
}

/// Storage kinds without compression tags.
pub mod kind {
    /// Pitch-linear.
    pub const PITCH: u8 = 0x00;
    /// Generic block-linear, 16 bytes by 2 rows.
    pub const GENERIC_16BX2: u8 = 0xfe;

    /// Returns the kind with the same memory layout as `kind` but without compression tags, or `None` for a kind that
    /// does not exist on GF100. Source: nouveau's table of GF100 kinds (`mmu/gf100.c`).
    #[must_use]
    pub const fn uncompressed(kind: u8) -> Option<u8> {
        Some(match kind {
            PITCH => PITCH,
            0x01..=0x05 | 0x07..=0x0a => 0x01,
            0x11 | 0x17..=0x1a => 0x11,
            0x26..=0x29 => kind,
            0x3a..=0x3d => kind - 0x14,
            0x3e..=0x41 => kind - 0x18,
            0x46 | 0x51..=0x54 => 0x46,
            0x7b | 0x86..=0x89 => 0x7b,
            0x8b..=0x8e => kind,
            0xa3..=0xa6 => kind - 0x18,
            0xa7..=0xaa => kind,
            0xbf..=0xc2 => kind - 0x18,
            0xc3 | 0xce..=0xd1 => 0xc3,
            0xfd => kind,
            0xcc | 0xcd | 0xd8 | 0xdb | 0xdd | 0xdf | 0xe0 | 0xe2..=0xe6 | 0xe9 | 0xeb | 0xed | 0xee => GENERIC_16BX2,
            0xf0..=0xfb | GENERIC_16BX2 => GENERIC_16BX2,
            _ => return None,
        })
    }
}

/// Fault reason codes in the fault registers. Source: rnndb `fifo/gf100_pfifo.xml`, nouveau's fault reason table.
pub mod fault {
    /// The directory entry has no table.
    pub const PDE: u32 = 0x0;
    /// The address is beyond the end of a shortened table.
    pub const PDE_SIZE: u32 = 0x1;
    /// The page table entry is invalid.
    pub const PTE: u32 = 0x2;
    /// The address is beyond the instance block's limit.
    pub const VA_LIMIT: u32 = 0x3;
    /// No channel is bound.
    pub const UNBOUND_INST: u32 = 0x4;
    /// The page is privileged.
    pub const PRIVILEGE: u32 = 0x5;
    /// The access writes to a read-only page.
    pub const READ_ONLY: u32 = 0x6;
    /// A compressed page is in host memory.
    pub const COMPRESSED_SYSRAM: u32 = 0xa;
    /// The storage kind is not supported.
    pub const KIND: u32 = 0xc;

    /// Fault unit numbers, which index the fault registers.
    pub mod unit {
        /// PGRAPH.
        pub const GR: u32 = 0x00;
        /// Peephole.
        pub const PEEPHOLE: u32 = 0x03;
        /// BAR1 accesses.
        pub const BAR1: u32 = 0x04;
        /// BAR3 accesses.
        pub const BAR3: u32 = 0x05;
        /// PBDMA and host unit accesses.
        pub const FIFO: u32 = 0x07;
        /// Copy engine 0.
        pub const CE0: u32 = 0x15;
        /// Copy engine 1.
        pub const CE1: u32 = 0x16;
    }

    /// Hub client numbers in the fault type's client field (hub bit set). Source: nouveau's table of hub clients.
    pub mod hub_client {
        /// Copy engine 0.
        pub const CE0: u32 = 0x01;
        /// Copy engine 1.
        pub const CE1: u32 = 0x02;
        /// PGRAPH's front end, including M2MF.
        pub const DISPATCH: u32 = 0x04;
        /// PGRAPH's context switching.
        pub const CTXCTL: u32 = 0x05;
        /// The host unit: PBDMA fetches and semaphores.
        pub const FIFO: u32 = 0x06;
        /// CPU reads through an aperture.
        pub const BAR_READ: u32 = 0x07;
        /// CPU writes through an aperture.
        pub const BAR_WRITE: u32 = 0x08;
    }

    /// GPC client numbers (hub bit clear; the fault type's GPC field contains the GPC number). Source: nouveau's table
    /// of GPC clients.
    pub mod gpc_client {
        /// Texture unit and L1, for shader memory accesses.
        pub const TEX: u32 = 0x01;
    }
}

const _: () = assert!(size_of::<Pte>() == ENTRY_BYTES as usize && size_of::<Pde>() == ENTRY_BYTES as usize);
