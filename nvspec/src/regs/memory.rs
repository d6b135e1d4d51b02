//! PFB, the memory controllers, the L2 cache (LTC) and the flush registers. Sources: rnndb `memory/gf100_*.xml`;
//! nouveau's `fb`, `ltc`, `mmu`, `bar` units.

regs! {
    /// Flushes between CPU, cache and memory.
    mod pflush @ 0x070000 .. 0x071000 {
        /// Flushes posted writes: BAR writes to memory, and engine writes to system memory (through the page at
        /// [`NISO_ADDRESS`](super::pfb::NISO_ADDRESS)).
        BAR_FLUSH @ 0x070000 Rw { 1:1 BUSY; 0:0 TRIGGER; }
        /// Invalidates cached system memory.
        L2_INVALIDATE @ 0x070004 Rw { 1:1 BUSY; 0:0 TRIGGER; }
        /// Writes back the cache.
        L2_FLUSH @ 0x070010 Rw { 1:1 BUSY; 0:0 TRIGGER; }
    }

    /// Frame buffer hub: partitions and TLB control.
    mod pfb @ 0x100000 .. 0x101000 {
        /// Frame buffer hub interrupts.
        INTR @ 0x100210 Rw {}
        /// Memory configuration, probed by drivers.
        CONFIG[2; 4] @ 0x100200 Rw {}
        /// Memory type and timing, probed by drivers.
        MEM_TYPE @ 0x100474 Rw {}
        /// Partition mask.
        PARTITIONS @ 0x100800 Rw = 0x00000001 {}
        /// System memory page for barriers, in units of 256 bytes.
        NISO_ADDRESS @ 0x100c10 Rw {}
        /// TLB control and state.
        MMU_CTRL @ 0x100c80 Rw = 0x00ff8000 { 23:16 FLUSH_SLOTS_FREE; 15:15 FLUSH_DONE; 0:0 LARGE_PAGE_64K; }
        /// Address for single-page invalidation.
        MMU_INVALIDATE_VA @ 0x100cb4 Rw {}
        /// Target and address bits 39:12 of the page directory to invalidate.
        MMU_INVALIDATE_PDB @ 0x100cb8 Rw { 31:4 ADDRESS; 1:0 TARGET; }
        /// Invalidates the TLB.
        MMU_INVALIDATE @ 0x100cbc Rw { 31:31 TRIGGER; 2:2 HUB_ONLY; 1:1 ALL_PDB; 0:0 ALL_VA; }
        /// Address bits 39:8 of the debug mode's write sink.
        MMU_DEBUG_WR @ 0x100cc8 Rw {}
        /// Read source of the debug mode.
        MMU_DEBUG_RD @ 0x100ccc Rw {}
        /// Debug mode of the hub's MMU.
        MMU_DEBUG_CTRL @ 0x100cc4 Rw {}
    }

    /// Straps that configure the board.
    mod pstraps @ 0x101000 .. 0x101100 {
        /// Board straps: crystal and memory configuration.
        STRAPS @ 0x101000 Rw = 0x00400000 { 22:22 CRYSTAL_1; 6:6 CRYSTAL_0; 5:2 RAMCFG; }
    }

    /// Memory controllers, 0x1000 apart.
    mod pbfb @ 0x110000 .. 0x118000 {
        /// Partition memory in MiB.
        MEM_AMOUNT[8; 0x1000] @ 0x11020c Rw {}
    }

    /// Memory controller broadcast.
    mod pbfb_bcast @ 0x10f000 .. 0x110000 {
        /// Memory per partition in MiB.
        MEM_AMOUNT @ 0x10f20c Rw {}
    }

    /// L2 cache broadcast.
    mod ltc @ 0x17e000 .. 0x17f000 {
        /// First compression tag line to clear.
        CBC_CLEAR_START @ 0x17e8cc Rw {}
        /// Last compression tag line to clear.
        CBC_CLEAR_END @ 0x17e8d0 Rw {}
        /// Triggers the clearing of compression tags.
        CBC_CLEAR @ 0x17e8c8 Rw {}
        /// Base of the compression tag memory.
        CBC_BASE @ 0x17e8d4 Rw {}
        /// Number of compression tag lines.
        CBC_SIZE @ 0x17e8d8 Rw {}
        /// Number of slices per cache unit.
        CBC_PARAM @ 0x17e8dc Ro { 31:28 SLICES; }
        /// Control dwords.
        CONTROL[2; 4] @ 0x17e8c0 Rw {}
        /// Interrupt control.
        INTR_CONTROL @ 0x17e820 Rw {}
        /// Index for zero-bandwidth clears.
        ZBC_INDEX @ 0x17ea44 Rw {}
        /// Colors for zero-bandwidth clears.
        ZBC_COLOR[4; 4] @ 0x17ea48 Rw {}
        /// Depths for zero-bandwidth clears.
        ZBC_DEPTH @ 0x17ea58 Rw {}
        /// Stencil values for zero-bandwidth clears on later chips.
        ZBC_STENCIL @ 0x17ea5c Rw {}
    }

    /// L2 cache interrupt summary.
    mod ltc_intr @ 0x17c000 .. 0x17d000 {
        /// Cache units with a pending interrupt.
        SUMMARY @ 0x17c000 Rw {}
    }
}
