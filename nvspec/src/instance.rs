//! The instance block (with RAMFC, a channel's saved PBDMA state) and USERD, the page through which a channel's owner
//! submits work. The constants are byte offsets of dwords.
//!
//! Sources: rnndb `fifo/gf100_pfifo.xml` and `memory/gf100_mem.xml`; nouveau's `gpfifogf100.c`; NVIDIA's published
//! RAMFC layout of the next generation, which agrees with both for all dwords named here.

/// Size of an instance block in bytes.
pub const INSTANCE_BYTES: u64 = 0x1000;

/// RAMFC, the first 0x200 bytes of the instance block. Unnamed dwords are saved PBDMA state.
pub mod ramfc {
    /// Size of RAMFC in bytes.
    pub const BYTES: u64 = 0x200;
    /// Index just past the last GPFIFO entry that the host unit has seen (saved state).
    pub const GP_PUT: u64 = 0x000;
    /// USERD's physical address, low dword: target in bits 1:0, address in bits 31:9.
    pub const USERD_LO: u64 = 0x008;
    /// USERD's physical address, bits 39:32.
    pub const USERD_HI: u64 = 0x00c;
    /// Signature that the host unit expects (0xface).
    pub const SIGNATURE: u64 = 0x010;
    /// Index of the next GPFIFO entry to consume (saved state).
    pub const GP_GET: u64 = 0x014;
    /// Address of the next dword in the current push buffer range, low dword (saved state).
    pub const PB_GET_LO: u64 = 0x018;
    /// Address of the next dword in the current push buffer range, high dword.
    pub const PB_GET_HI: u64 = 0x01c;
    /// Address of the top-level push buffer, low dword.
    pub const TOP_LEVEL_GET_LO: u64 = 0x020;
    /// Address of the top-level push buffer, high dword.
    pub const TOP_LEVEL_GET_HI: u64 = 0x024;
    /// Reference counter (saved state).
    pub const REF: u64 = 0x028;
    /// Timeout and retry settings of semaphore acquires.
    pub const ACQUIRE: u64 = 0x030;
    /// Last data of the four semaphore methods (saved state).
    pub const SEMAPHORE: [u64; 4] = [0x038, 0x03c, 0x040, 0x044];
    /// GPFIFO ring's GPU virtual address, low dword.
    pub const GP_BASE_LO: u64 = 0x048;
    /// GPFIFO ring's address bits 39:32 in bits 7:0, and log2 of its number of entries in bits 31:16.
    pub const GP_BASE_HI: u64 = 0x04c;
    /// Index of the next GPFIFO entry to fetch (saved state).
    pub const GP_FETCH: u64 = 0x050;
    /// Address of the next push buffer dword to fetch, low dword (saved state).
    pub const PB_FETCH_LO: u64 = 0x054;
    /// Address of the next push buffer dword to fetch, high dword.
    pub const PB_FETCH_HI: u64 = 0x058;
    /// End address of the current push buffer range, low dword (saved state).
    pub const PB_PUT_LO: u64 = 0x05c;
    /// End address of the current push buffer range, high dword.
    pub const PB_PUT_HI: u64 = 0x060;
    /// Push buffer header state. See [`pb_header`].
    pub const PB_HEADER: u64 = 0x084;
    /// Number of data dwords still expected after the current header (saved state).
    pub const PB_COUNT: u64 = 0x088;
    /// Subdevice mask and device ID.
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
    /// Privilege and method configuration, first dword.
    pub const CONFIG0: u64 = 0x0f8;
    /// Privilege and method configuration, second dword.
    pub const CONFIG1: u64 = 0x0fc;
    /// Value of [`SIGNATURE`].
    pub const SIGNATURE_VALUE: u32 = 0x0000_face;
    /// Constant dwords that a driver writes: the offset and value of each.
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
        /// Opcode, as in a method header.
        pub const TYPE: Field = Field::new(31, 29);
        /// Set if no data has been consumed since the header.
        pub const FIRST: Field = Field::new(22, 22);
        /// Subchannel.
        pub const SUBCHANNEL: Field = Field::new(18, 16);
        /// Byte address of the method divided by 4.
        pub const METHOD: Field = Field::new(13, 2);
    }
    /// Objects bound to the subchannels, in the format of the binding method's data (saved state).
    // GUESS: no public source specifies the location of these dwords on GF100. Drivers do not use them.
    pub const OBJECTS: u64 = 0x180;
    /// Log2 of the maximum number of entries in a GPFIFO ring. Larger values are rejected.
    pub const GP_ENTRIES_LOG2_MAX: u32 = 20;
}

/// Page directory and limit of the address space.
pub mod vm {
    /// Page directory's address, low dword: target in bits 1:0, volatile flag in bit 2, address in bits 31:12.
    pub const PDB_LO: u64 = 0x200;
    /// Page directory's address, bits 39:32.
    pub const PDB_HI: u64 = 0x204;
    /// Last valid virtual address, low dword.
    pub const LIMIT_LO: u64 = 0x208;
    /// Last valid virtual address, bits 39:32.
    pub const LIMIT_HI: u64 = 0x20c;

    use crate::Field;
    /// Field of [`PDB_LO`]: the directory's memory target, encoded as [`crate::addr::Target`].
    pub const PDB_TARGET: Field = Field::new(1, 0);
    /// Field of [`PDB_LO`]: set if accesses to the directory are not cached.
    pub const PDB_VOLATILE: Field = Field::new(2, 2);
    /// Field of [`PDB_LO`]: address bits 31:12, in place.
    pub const PDB_ADDRESS_LO: Field = Field::new(31, 12);
    /// Field of [`PDB_HI`]: address bits 39:32.
    pub const PDB_ADDRESS_HI: Field = Field::new(7, 0);
    /// Field of [`LIMIT_HI`]: address bits 39:32.
    pub const LIMIT_ADDRESS_HI: Field = Field::new(7, 0);
}

/// Engine context pointers, each a GPU virtual address (low dword with a valid flag in bit 2, then the high dword).
pub mod context {
    /// PGRAPH.
    pub const GR: u64 = 0x210;
    /// Copy engine 0.
    pub const CE0: u64 = 0x230;
    /// Copy engine 1.
    pub const CE1: u64 = 0x240;
    /// Valid flag in the low dword.
    pub const VALID: u32 = 1 << 2;
}

/// PGRAPH context image, as read by nouveau's FECS program on a context load (`hub.fuc`, `ctx_mmio_exec`).
pub mod graph_image {
    /// Number of registers to write. The program clears this dword afterwards.
    pub const REGISTERS: u64 = 0;
    /// Address of the register list in units of 256 bytes, in one dword.
    pub const LIST: u64 = 4;
    /// Total size of both dwords in bytes.
    pub const HEAD_BYTES: u64 = 8;
    /// Size of a list entry in bytes. An entry consists of a register's BAR0 offset and its value.
    pub const ENTRY_BYTES: u64 = 8;
}

/// USERD, one page per channel.
pub mod userd {
    /// Size of a channel's USERD in bytes.
    pub const BYTES: u64 = 0x1000;
    /// DMA_PUT of the non-GPFIFO mode.
    pub const PUT: u64 = 0x40;
    /// Address from which the PBDMA fetches, low dword.
    pub const GET: u64 = 0x44;
    /// Last value of the reference method.
    pub const REF: u64 = 0x48;
    /// DMA_PUT, high dword.
    pub const PUT_HI: u64 = 0x4c;
    /// Address of the top-level push buffer, low dword.
    pub const TOP_LEVEL_GET: u64 = 0x58;
    /// Address of the top-level push buffer, high dword.
    pub const TOP_LEVEL_GET_HI: u64 = 0x5c;
    /// Address from which the PBDMA fetches, high dword.
    pub const GET_HI: u64 = 0x60;
    /// Index of the next GPFIFO entry that the host unit will consume.
    pub const GP_GET: u64 = 0x88;
    /// Doorbell: index just past the last GPFIFO entry written by the owner.
    pub const GP_PUT: u64 = 0x8c;
}
