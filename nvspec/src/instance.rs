//! The instance block (with RAMFC, a channel's saved PBDMA state) and USERD, the page through which a channel's owner
//! submits. The constants are byte offsets of 32-bit words.
//!
//! Sources: rnndb `fifo/gf100_pfifo.xml` and `memory/gf100_mem.xml`; nouveau's `gpfifogf100.c`; NVIDIA's published
//! RAMFC layout of the next generation, which agrees with both of these sources in all words that have a name here.

/// Size of an instance block in bytes.
pub const INSTANCE_BYTES: u64 = 0x1000;

/// RAMFC, the first 0x200 bytes of the instance block. Words without a name here are saved PBDMA state.
pub mod ramfc {
    /// Size of RAMFC in bytes.
    pub const BYTES: u64 = 0x200;
    /// Index after the last GPFIFO entry that the host has seen as written (saved state).
    pub const GP_PUT: u64 = 0x000;
    /// Low word of USERD's physical address, with the target in bits 1:0 and the address in bits 31:9.
    pub const USERD_LO: u64 = 0x008;
    /// Bits 39:32 of USERD's physical address.
    pub const USERD_HI: u64 = 0x00c;
    /// Signature that the host expects, which is 0xface.
    pub const SIGNATURE: u64 = 0x010;
    /// Index of the next GPFIFO entry to consume (saved state).
    pub const GP_GET: u64 = 0x014;
    /// Low word of the address of the next dword in the current push buffer range (saved state).
    pub const PB_GET_LO: u64 = 0x018;
    /// High word of the address of the next dword in the current push buffer range.
    pub const PB_GET_HI: u64 = 0x01c;
    /// Low word of the address of the top-level push buffer.
    pub const TOP_LEVEL_GET_LO: u64 = 0x020;
    /// High word of the address of the top-level push buffer.
    pub const TOP_LEVEL_GET_HI: u64 = 0x024;
    /// Reference counter (saved state).
    pub const REF: u64 = 0x028;
    /// Timeout and retry of acquires.
    pub const ACQUIRE: u64 = 0x030;
    /// Last data of the four semaphore methods (saved state).
    pub const SEMAPHORE: [u64; 4] = [0x038, 0x03c, 0x040, 0x044];
    /// Low word of the GPFIFO ring's GPU virtual address.
    pub const GP_BASE_LO: u64 = 0x048;
    /// Bits 39:32 of the GPFIFO ring's address in bits 7:0, and log2 of its number of entries in bits 31:16.
    pub const GP_BASE_HI: u64 = 0x04c;
    /// Next GPFIFO entry to fetch (saved state).
    pub const GP_FETCH: u64 = 0x050;
    /// Low word of the address of the next push buffer dword to fetch (saved state).
    pub const PB_FETCH_LO: u64 = 0x054;
    /// High word of the address of the next push buffer dword to fetch.
    pub const PB_FETCH_HI: u64 = 0x058;
    /// Low word of the end of the current push buffer range (saved state).
    pub const PB_PUT_LO: u64 = 0x05c;
    /// High word of the end of the current push buffer range.
    pub const PB_PUT_HI: u64 = 0x060;
    /// Push buffer header state, see [`pb_header`].
    pub const PB_HEADER: u64 = 0x084;
    /// Number of dwords of data that the current header still expects (saved state).
    pub const PB_COUNT: u64 = 0x088;
    /// Subdevice mask and device.
    pub const SUBDEVICE: u64 = 0x094;
    /// Host target flags.
    pub const TARGET: u64 = 0x09c;
    /// Timeslice of engine 0's runlist.
    pub const ENG_TIMESLICE: u64 = 0x0a4;
    /// Timeslice of the PBDMA.
    pub const PB_TIMESLICE: u64 = 0x0a8;
    /// Copy engine timeslice.
    pub const CE_TIMESLICE: u64 = 0x0ac;
    /// Host CRC control.
    pub const HCE_CTRL: u64 = 0x0b8;
    /// Privilege and method configuration.
    pub const CONFIG0: u64 = 0x0f8;
    /// Privilege and method configuration.
    pub const CONFIG1: u64 = 0x0fc;
    /// Value of [`SIGNATURE`].
    pub const SIGNATURE_VALUE: u32 = 0x0000_face;
    /// Values that a driver writes to the constant words, each with the word's offset.
    pub const DEFAULTS: [(u64, u32); 11] = [
        (SIGNATURE, SIGNATURE_VALUE),
        (ACQUIRE, 0xffff_f902),
        (PB_HEADER, 0x2040_0000),
        (SUBDEVICE, 0x3000_0001),
        (TARGET, 0x0000_0100),
        (ENG_TIMESLICE, 0x1f1f_1f1f),
        (PB_TIMESLICE, 0x1f1f_1f1f),
        (CE_TIMESLICE, 0x0000_001f),
        (HCE_CTRL, 0xf800_0000),
        (CONFIG0, 0x1000_3080),
        (CONFIG1, 0x1000_0010),
    ];
    /// Fields of [`PB_HEADER`].
    pub mod pb_header {
        use crate::Field;
        /// Opcode as in a method header.
        pub const TYPE: Field = Field::new(31, 29);
        /// No datum was consumed since the header.
        pub const FIRST: Field = Field::new(22, 22);
        /// Subchannel.
        pub const SUBCHANNEL: Field = Field::new(18, 16);
        /// Method divided by 4.
        pub const METHOD: Field = Field::new(13, 2);
    }
    /// Objects bound to the subchannels, as data of the method that bound them (saved state).
    // GUESS: no public source gives the location of these words on GF100. Drivers do not use these words.
    pub const OBJECTS: u64 = 0x180;
    /// Log2 of the number of entries in the largest accepted GPFIFO ring; a larger code is rejected.
    pub const GP_ENTRIES_LOG2_MAX: u32 = 20;
}

/// Page directory of the address space.
pub mod vm {
    /// Low word of the page directory's address, with the target in bits 1:0, the volatile flag in bit 2, and the
    /// address in bits 31:12.
    pub const PDB_LO: u64 = 0x200;
    /// Bits 39:32 of the page directory's address.
    pub const PDB_HI: u64 = 0x204;
    /// Low word of the last valid virtual address.
    pub const LIMIT_LO: u64 = 0x208;
    /// Bits 39:32 of the last valid virtual address.
    pub const LIMIT_HI: u64 = 0x20c;

    use crate::Field;
    /// Field of [`PDB_LO`]: memory of the directory, in the encoding of [`crate::addr::Target`].
    pub const PDB_TARGET: Field = Field::new(1, 0);
    /// Field of [`PDB_LO`]: accesses to the directory are not cached.
    pub const PDB_VOLATILE: Field = Field::new(2, 2);
    /// Field of [`PDB_LO`]: address bits 31:12, in place.
    pub const PDB_ADDRESS_LO: Field = Field::new(31, 12);
    /// Field of [`PDB_HI`]: address bits 39:32.
    pub const PDB_ADDRESS_HI: Field = Field::new(7, 0);
    /// Field of [`LIMIT_HI`]: address bits 39:32.
    pub const LIMIT_ADDRESS_HI: Field = Field::new(7, 0);
}

/// Engine context pointers, each a GPU virtual address whose bit 2 is set if it is valid, followed by its high word.
pub mod context {
    /// PGRAPH.
    pub const GR: u64 = 0x210;
    /// Copy engine 0.
    pub const CE0: u64 = 0x230;
    /// Copy engine 1.
    pub const CE1: u64 = 0x240;
    /// Valid flag in the low word.
    pub const VALID: u32 = 1 << 2;
}

/// A context image of PGRAPH, as nouveau's FECS program reads it when it loads the context (`hub.fuc`,
/// `ctx_mmio_exec`).
pub mod graph_image {
    /// Number of registers to write, in one word; the program clears it afterwards.
    pub const REGISTERS: u64 = 0;
    /// Address of the list of registers in units of 256 bytes, in one word.
    pub const LIST: u64 = 4;
    /// Size in bytes of both words.
    pub const HEAD_BYTES: u64 = 8;
    /// Size in bytes of an entry of the list, which contains a register's offset in BAR0 and its value.
    pub const ENTRY_BYTES: u64 = 8;
}

/// USERD, one page for each channel.
pub mod userd {
    /// Size of a channel's USERD in bytes.
    pub const BYTES: u64 = 0x1000;
    /// DMA_PUT of the non-GPFIFO mode.
    pub const PUT: u64 = 0x40;
    /// Low word of the address at which the PBDMA fetches.
    pub const GET: u64 = 0x44;
    /// Last value of the reference method.
    pub const REF: u64 = 0x48;
    /// High word of DMA_PUT.
    pub const PUT_HI: u64 = 0x4c;
    /// Low word of the address of the top-level push buffer.
    pub const TOP_LEVEL_GET: u64 = 0x58;
    /// High word of the address of the top-level push buffer.
    pub const TOP_LEVEL_GET_HI: u64 = 0x5c;
    /// High word of the address at which the PBDMA fetches.
    pub const GET_HI: u64 = 0x60;
    /// Index of the next GPFIFO entry that the host has not consumed.
    pub const GP_GET: u64 = 0x88;
    /// Doorbell: the index after the last GPFIFO entry that the owner has written.
    pub const GP_PUT: u64 = 0x8c;
}
