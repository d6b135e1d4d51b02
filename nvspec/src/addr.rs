//! Address newtypes, which keep bare `u64` addresses out of function signatures.

macro_rules! address {
    ($( $(#[$doc:meta])* $name:ident; )*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        pub struct $name(pub u64);

        impl $name {
            /// Returns the address plus `bytes`, or `None` on 64-bit overflow.
            #[must_use]
            pub const fn checked_add(self, bytes: u64) -> Option<Self> {
                match self.0.checked_add(bytes) { Some(v) => Some(Self(v)), None => None }
            }
            /// Returns the address plus `bytes`, wrapping on overflow.
            #[must_use]
            pub const fn offset(self, bytes: u64) -> Self { Self(self.0.wrapping_add(bytes)) }
            /// Returns the start of the 4 KiB page that contains the address.
            #[must_use]
            pub const fn page(self) -> Self { Self(self.0 & !0xfff) }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    )*};
}

address! {
    /// 40-bit GPU virtual address in the address space of a channel or aperture.
    GpuVa;
    /// Byte address in the card's VRAM.
    VramAddr;
    /// Byte address in a guest's VRAM, which starts at 0 in every vGPU.
    GuestVramAddr;
    /// System memory bus address emitted by a card: in a guest, a guest physical address.
    Gpa;
    /// System memory bus address emitted by the physical card, 40 bits on Fermi.
    Iova;
}

/// Number of bits of a Fermi GPU virtual address.
pub const VA_BITS: u32 = 40;
/// Number of bits of a bus address in a Fermi page table entry.
pub const BUS_BITS: u32 = 40;
/// Size of a small page in bytes.
pub const SMALL_PAGE: u64 = 4 << 10;
/// Default size of a large page in bytes.
pub const LARGE_PAGE: u64 = 128 << 10;

/// Memory target of an address in an instance block, directory register or runlist register. The encoding differs from
/// that of a directory entry. Source: rnndb `memory/gf100_mem.xml`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Target {
    /// The card's VRAM.
    Vram,
    /// Encoding 1, which is not modelled.
    Reserved,
    /// Host memory, snooped.
    SysCoherent,
    /// Host memory, not snooped.
    SysNonCoherent,
}

impl Target {
    /// Converts from the two-bit encoding.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Self {
        match bits & 3 {
            0 => Self::Vram,
            1 => Self::Reserved,
            2 => Self::SysCoherent,
            _ => Self::SysNonCoherent,
        }
    }

    /// Returns the two-bit encoding.
    #[must_use]
    pub const fn bits(self) -> u32 {
        match self {
            Self::Vram => 0,
            Self::Reserved => 1,
            Self::SysCoherent => 2,
            Self::SysNonCoherent => 3,
        }
    }

    /// Returns true if the target is host memory.
    #[must_use]
    pub const fn is_system(self) -> bool {
        matches!(self, Self::SysCoherent | Self::SysNonCoherent)
    }
}

/// Location of a guest structure (instance block, page directory or table, runlist), as a target and an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Place {
    /// An address in the guest's VRAM, not checked against the VRAM's size.
    Vram(GuestVramAddr),
    /// An address in the guest's RAM, not checked against the RAM's size.
    Ram(Gpa),
}

impl Place {
    /// Combines a target and its byte address. Returns `None` for the reserved target.
    #[must_use]
    pub const fn new(target: Target, address: u64) -> Option<Self> {
        match target {
            Target::Vram => Some(Self::Vram(GuestVramAddr(address))),
            Target::Reserved => None,
            Target::SysCoherent | Target::SysNonCoherent => Some(Self::Ram(Gpa(address))),
        }
    }

    /// Returns the byte address in either space.
    #[must_use]
    pub const fn address(self) -> u64 {
        match self {
            Self::Vram(address) => address.0,
            Self::Ram(address) => address.0,
        }
    }

    /// Returns the address plus `bytes`, or `None` on 64-bit overflow.
    #[must_use]
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self {
            Self::Vram(address) => match address.checked_add(bytes) {
                Some(address) => Some(Self::Vram(address)),
                None => None,
            },
            Self::Ram(address) => match address.checked_add(bytes) {
                Some(address) => Some(Self::Ram(address)),
                None => None,
            },
        }
    }
}

impl core::fmt::Display for Place {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Vram(address) => write!(f, "VRAM {address}"),
            Self::Ram(address) => write!(f, "RAM {address}"),
        }
    }
}
