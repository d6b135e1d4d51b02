//! Falcons for which a driver loads firmware before it uses channels.

/// A falcon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Falcon {
    /// The falcon of PGRAPH's hub.
    Fecs,
    /// The falcons of PGRAPH's GPCs.
    Gpccs,
    /// The falcon of copy engine 0.
    Copy0,
    /// The falcon of copy engine 1.
    Copy1,
}

impl Falcon {
    /// All falcons.
    pub const ALL: [Self; 4] = [Self::Fecs, Self::Gpccs, Self::Copy0, Self::Copy1];

    /// Returns the falcon's name, as used in file names and commands.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fecs => "fecs",
            Self::Gpccs => "gpccs",
            Self::Copy0 => "ce0",
            Self::Copy1 => "ce1",
        }
    }

    /// Returns the BAR0 offset of the falcon's registers. Relative to this offset, all falcons have the layout of
    /// [`regs::fecs`](crate::regs::fecs) and [`regs::gpccs`](crate::regs::gpccs).
    #[must_use]
    pub const fn base(self) -> u32 {
        match self {
            Self::Fecs => crate::regs::fecs::BASE,
            Self::Gpccs => crate::regs::gpccs::BASE,
            Self::Copy0 => crate::regs::ce0::BASE,
            Self::Copy1 => crate::regs::ce1::BASE,
        }
    }
}

impl core::fmt::Display for Falcon {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}

/// Number of dwords per code memory page. Each page has one tag.
pub const CODE_PAGE_WORDS: usize = 64;
/// Size of a code memory page in bytes.
pub const CODE_PAGE_BYTES: u32 = 256;
/// Maximum number of code dwords in an image. Source: the width of the size register's field. Real Fermi falcons have
/// less memory.
pub const CODE_WORDS_MAX: usize = 0x4000;
/// Maximum number of data dwords in an image.
pub const DATA_WORDS_MAX: usize = 0x4000;
