//! BAR0 ranges that are memory, or large areas of plain state registers.

/// PRAMIN: a 1 MiB window into memory, whose base is set in `pbus::PRAMIN_WINDOW`.
pub mod pramin {
    /// BAR0 byte offset.
    pub const BASE: u32 = 0x70_0000;
    /// BAR0 byte offset just past the window.
    pub const END: u32 = 0x80_0000;
    /// Size in bytes.
    pub const BYTES: u32 = END - BASE;
}

/// PROM: the VBIOS ROM.
pub mod prom {
    /// BAR0 byte offset.
    pub const BASE: u32 = 0x30_0000;
    /// BAR0 byte offset just past the ROM.
    pub const END: u32 = 0x31_0000;
    /// Size in bytes.
    pub const BYTES: u32 = END - BASE;
}

/// Size of BAR0 in bytes.
pub const BAR0_BYTES: u64 = 16 << 20;

/// Value read if no unit responds. Source: rnndb (PRIVRING's error value for accesses on a Fermi hub).
pub const UNCLAIMED: u32 = 0xbad0_da00;

/// BAR0 ranges with plain state registers, which are too numerous for individual names. Each range consists of its
/// name, its start offset, and the offset just past its last register.
pub const STATE_RANGES: &[(&str, u32, u32)] = &[
    ("PBFB broadcast", 0x10_f000, 0x11_0000),
    ("PBFB partitions", 0x11_0000, 0x11_8000),
    ("LTC units", 0x14_0000, 0x18_0000),
    ("PGRAPH front end", 0x40_0000, 0x40_9000),
    ("PGRAPH ROP", 0x41_0000, 0x41_8000),
    ("PGRAPH GPC broadcast", 0x41_8000, 0x42_0000),
    ("PGRAPH GPC units", 0x50_0000, 0x58_0000),
];

/// Registers that a PGRAPH reset affects, as ranges from the start offset to the offset just past the last register.
pub const PGRAPH_RANGES: [(u32, u32); 2] = [(0x40_0000, 0x42_0000), (0x50_0000, 0x58_0000)];
