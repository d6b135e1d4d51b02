//! Registers of PGRAPH, its two context-switching falcons, and the copy engines' falcons. PGRAPH's thousands of state
//! registers have no names here, and are covered by [`super::windows::STATE_RANGES`]. Sources: rnndb
//! `graph/gf100_pgraph/`, `falcon.xml`; nouveau's `gr`, `ce` units.

regs! {
    /// Copy engine 0's falcon.
    #[doc(alias = "PCOPY0")]
    mod ce0 @ 0x104000 .. 0x105000 {
        /// Sets pending interrupts.
        INTR_SET @ 0x104000 Wo {}
        /// Clears pending interrupts.
        INTR_CLEAR @ 0x104004 Wo {}
        /// Pending interrupts.
        INTR @ 0x104008 Rw {}
        /// Interrupt mode.
        INTR_MODE @ 0x10400c Rw {}
        /// Sets interrupt enable bits.
        INTR_EN_SET @ 0x104010 Rw {}
        /// Clears interrupt enable bits.
        INTR_EN_CLEAR @ 0x104014 Wo {}
        /// Enabled interrupts.
        INTR_EN @ 0x104018 Rw {}
        /// Interrupt routing.
        INTR_DISPATCH @ 0x10401c Rw {}
        /// Scratch and watchdog.
        SCRATCH[2; 4] @ 0x104040 Rw {}
        /// Enabled interfaces. Bit 0 is the FIFO, and bit 1 the context.
        ITFEN @ 0x104048 Rw {}
        /// Idle state.
        IDLE_STATE @ 0x10404c Ro {}
        /// Current channel's instance block.
        CHANNEL_CURRENT @ 0x104050 Rw { 30:30 VALID; 27:0 ADDRESS; }
        /// Next channel's instance block.
        CHANNEL_NEXT @ 0x104054 Rw { 30:30 VALID; 27:0 ADDRESS; }
        /// Context switch commands and state.
        CHANNEL_COMMAND[4; 4] @ 0x104058 Rw {}
        /// Subchannel and address of the method that raised the interrupt.
        METHOD[2; 4] @ 0x104068 Rw {}
        /// Unit number of the falcon.
        UNIT @ 0x104084 Rw {}
        /// Starts and halts the processor.
        CPU_CONTROL @ 0x104100 Rw { 1:1 START; }
        /// Entry point.
        BOOT_VECTOR @ 0x104104 Rw {}
        /// Sizes of the code and data memory, in units of 256 bytes.
        HWCFG @ 0x104108 Ro = 0x00002020 { 17:9 DMEM_BLOCKS; 8:0 IMEM_BLOCKS; }
        /// DMA control.
        DMA_CONTROL @ 0x10410c Rw {}
        /// DMA base.
        DMA_BASE[5; 4] @ 0x104110 Rw {}
        /// Falcon version.
        VERSION @ 0x10412c Ro = 0x00000003 { 3:0 VERSION; }
        /// Code upload address.
        IMEM_CONTROL @ 0x104180 Rw { 25:25 READ_INCREMENT; 24:24 WRITE_INCREMENT; 15:0 ADDRESS; }
        /// Code upload data.
        IMEM_DATA @ 0x104184 Rw {}
        /// Code upload tag.
        IMEM_TAG @ 0x104188 Rw {}
        /// Data upload address.
        DMEM_CONTROL @ 0x1041c0 Rw {}
        /// Dword to upload to data memory.
        DMEM_DATA @ 0x1041c4 Rw {}
    }

    /// Copy engine 1's falcon.
    #[doc(alias = "PCOPY1")]
    mod ce1 @ 0x105000 .. 0x106000 {
        /// Sets pending interrupts.
        INTR_SET @ 0x105000 Wo {}
        /// Clears pending interrupts.
        INTR_CLEAR @ 0x105004 Wo {}
        /// Pending interrupts.
        INTR @ 0x105008 Rw {}
        /// Interrupt mode.
        INTR_MODE @ 0x10500c Rw {}
        /// Sets interrupt enable bits.
        INTR_EN_SET @ 0x105010 Rw {}
        /// Clears interrupt enable bits.
        INTR_EN_CLEAR @ 0x105014 Wo {}
        /// Enabled interrupts.
        INTR_EN @ 0x105018 Rw {}
        /// Interrupt routing.
        INTR_DISPATCH @ 0x10501c Rw {}
        /// Scratch and watchdog.
        SCRATCH[2; 4] @ 0x105040 Rw {}
        /// Enabled interfaces. Bit 0 is the FIFO, and bit 1 the context.
        ITFEN @ 0x105048 Rw {}
        /// Idle state.
        IDLE_STATE @ 0x10504c Ro {}
        /// Current channel's instance block.
        CHANNEL_CURRENT @ 0x105050 Rw { 30:30 VALID; 27:0 ADDRESS; }
        /// Next channel's instance block.
        CHANNEL_NEXT @ 0x105054 Rw { 30:30 VALID; 27:0 ADDRESS; }
        /// Context switch commands and state.
        CHANNEL_COMMAND[4; 4] @ 0x105058 Rw {}
        /// Subchannel and address of the method that raised the interrupt.
        METHOD[2; 4] @ 0x105068 Rw {}
        /// Unit number of the falcon.
        UNIT @ 0x105084 Rw {}
        /// Starts and halts the processor.
        CPU_CONTROL @ 0x105100 Rw { 1:1 START; }
        /// Entry point.
        BOOT_VECTOR @ 0x105104 Rw {}
        /// Sizes of the code and data memory, in units of 256 bytes.
        HWCFG @ 0x105108 Ro = 0x00002020 { 17:9 DMEM_BLOCKS; 8:0 IMEM_BLOCKS; }
        /// DMA control.
        DMA_CONTROL @ 0x10510c Rw {}
        /// DMA base.
        DMA_BASE[5; 4] @ 0x105110 Rw {}
        /// Falcon version.
        VERSION @ 0x10512c Ro = 0x00000003 { 3:0 VERSION; }
        /// Code upload address.
        IMEM_CONTROL @ 0x105180 Rw { 25:25 READ_INCREMENT; 24:24 WRITE_INCREMENT; 15:0 ADDRESS; }
        /// Code upload data.
        IMEM_DATA @ 0x105184 Rw {}
        /// Code upload tag.
        IMEM_TAG @ 0x105188 Rw {}
        /// Data upload address.
        DMEM_CONTROL @ 0x1051c0 Rw {}
        /// Dword to upload to data memory.
        DMEM_DATA @ 0x1051c4 Rw {}
    }

    /// PGRAPH's front end: status, interrupts, and the side-band commands for context generation.
    mod pgraph @ 0x400000 .. 0x405000 {
        /// Pending interrupts.
        INTR @ 0x400100 W1c { 21:21 TRAP; 20:20 DATA_ERROR; 19:19 CTXCTL; 5:5 ILLEGAL_CLASS; 4:4 ILLEGAL_METHOD; 0:0 NOTIFY; }
        /// Units that trapped.
        TRAP @ 0x400108 W1c { 25:25 ROP; 24:24 GPC; 7:7 MACRO; 4:4 SHADER; 3:3 CCACHE; 1:1 M2MF; 0:0 DISPATCH; }
        /// Reason for a data error.
        DATA_ERROR @ 0x400110 Rw {}
        /// Mask of GPCs that trapped.
        TRAP_GPCS @ 0x400118 W1c {}
        /// Interrupt enables of the front-end units.
        TRAP_EN[7; 4] @ 0x400120 Rw {}
        /// Enabled interrupts.
        INTR_EN @ 0x40013c Rw {}
        /// Address of the ICMD side-band command. A write executes the command.
        ICMD_COMMAND @ 0x400200 Wo {}
        /// Data of the ICMD side-band command.
        ICMD_DATA @ 0x400204 Rw {}
        /// Enables ICMD side-band commands.
        ICMD_ENABLE @ 0x400208 Rw {}
        /// Enables methods, and resumes execution after a trap.
        CONTROL @ 0x400500 Rw { 16:16 FIFO_ACCESS; 0:0 METHODS; }
        /// Pending activity.
        ACTIVITY[4; 4] @ 0x400600 Ro {}
        /// Busy flags.
        STATUS @ 0x400700 Ro { 2:2 ICMD_BUSY; 0:0 BUSY; }
        /// Subchannel and method that trapped.
        TRAPPED_ADDRESS @ 0x400704 Ro { 18:16 SUBCHANNEL; 13:2 METHOD; }
        /// Trapped method's data, low dword.
        TRAPPED_DATA_LO @ 0x400708 Ro {}
        /// Trapped method's data, high dword.
        TRAPPED_DATA_HI @ 0x40070c Ro {}
        /// Classes bound to the subchannels.
        SUBCHANNEL_CLASS[8; 4] @ 0x404200 Ro {}
        /// Class and method of a side-band method. A write executes the method.
        MTHD_COMMAND @ 0x404488 Wo { 31:31 EXECUTE; 27:14 METHOD; 15:0 CLASS; }
        /// Data of a side-band method.
        MTHD_DATA @ 0x40448c Rw {}
        /// Power and reset handshake.
        PWR_HANDSHAKE @ 0x404170 Rw { 4:4 BUSY; }
        /// Context state control.
        CTX_CONTROL @ 0x404154 Rw {}
    }

    /// FECS, the hub's context-switching falcon.
    mod fecs @ 0x409000 .. 0x40a000 {
        /// Sets pending interrupts.
        INTR_SET @ 0x409000 Wo { 8:8 CONTEXT; }
        /// Clears pending interrupts.
        INTR_CLEAR @ 0x409004 Wo {}
        /// Pending interrupts.
        INTR @ 0x409008 Rw {}
        /// Interrupt dwords.
        INTR_MISC[4; 4] @ 0x409010 Rw {}
        /// Starts and halts the processor.
        CPU_CONTROL @ 0x409100 Rw { 1:1 START; }
        /// Entry point.
        BOOT_VECTOR @ 0x409104 Rw {}
        /// Sizes of the code and data memory, in units of 256 bytes.
        HWCFG @ 0x409108 Ro = 0x00081060 { 17:9 DMEM_BLOCKS; 8:0 IMEM_BLOCKS; }
        /// DMA control.
        DMA_CONTROL @ 0x40910c Rw {}
        /// Falcon version.
        VERSION @ 0x40912c Ro = 0x00000003 { 3:0 VERSION; }
        /// Code upload address.
        IMEM_CONTROL @ 0x409180 Rw { 25:25 READ_INCREMENT; 24:24 WRITE_INCREMENT; 15:0 ADDRESS; }
        /// Code upload data.
        IMEM_DATA @ 0x409184 Rw {}
        /// Code upload tag.
        IMEM_TAG @ 0x409188 Rw {}
        /// Data upload address.
        DMEM_CONTROL @ 0x4091c0 Rw { 25:25 READ_INCREMENT; 24:24 WRITE_INCREMENT; 15:0 ADDRESS; }
        /// Dword to upload to data memory.
        DMEM_DATA @ 0x4091c4 Rw {}
        /// Context switch request.
        CHANNEL_SWITCH @ 0x409400 Rw {}
        /// Command data: the address of an instance block.
        COMMAND_DATA @ 0x409500 Rw { 31:31 VALID; 27:0 ADDRESS; }
        /// Command. A write executes it.
        COMMAND @ 0x409504 Wo {}
        /// Numbers of GPCs and ROPs.
        UNITS @ 0x409604 Ro { 20:16 ROPS; 4:0 GPCS; }
        /// Reset lines of the GPCs' falcons.
        RESET_LINES @ 0x409614 Rw {}
        /// Mailboxes. Bit 31 of the first one indicates readiness. After FECS has started, the second one contains the
        /// context size in bytes.
        MAILBOX[8; 4] @ 0x409800 Rw { 31:31 READY; }
        /// Sets bits of the mailboxes.
        MAILBOX_SET[8; 4] @ 0x409820 Wo {}
        /// Clears bits of the mailboxes.
        MAILBOX_CLEAR[8; 4] @ 0x409840 Wo {}
        /// Instance block of PGRAPH's current context.
        CURRENT @ 0x409b00 Rw { 31:31 VALID; 27:0 ADDRESS; }
        /// Instance block of PGRAPH's next context.
        NEXT @ 0x409b04 Rw { 31:31 VALID; 27:0 ADDRESS; }
        /// Firmware error dword.
        UCODE_INTR @ 0x409c18 W1c {}
        /// Firmware error code.
        UCODE_ERROR[8; 4] @ 0x409c20 Rw {}
    }

    /// GPCCS, the GPCs' context-switching falcons, accessed by broadcast. Unnamed registers are plain state.
    mod gpccs @ 0x41a000 .. 0x41b000 {
        /// Starts and halts the processor.
        CPU_CONTROL @ 0x41a100 Rw { 1:1 START; }
        /// Entry point.
        BOOT_VECTOR @ 0x41a104 Rw {}
        /// Sizes of the code and data memory, in units of 256 bytes.
        HWCFG @ 0x41a108 Ro = 0x00041020 { 17:9 DMEM_BLOCKS; 8:0 IMEM_BLOCKS; }
        /// DMA control.
        DMA_CONTROL @ 0x41a10c Rw {}
        /// Falcon version.
        VERSION @ 0x41a12c Ro = 0x00000003 { 3:0 VERSION; }
        /// Code upload address.
        IMEM_CONTROL @ 0x41a180 Rw { 25:25 READ_INCREMENT; 24:24 WRITE_INCREMENT; 15:0 ADDRESS; }
        /// Code upload data.
        IMEM_DATA @ 0x41a184 Rw {}
        /// Code upload tag.
        IMEM_TAG @ 0x41a188 Rw {}
        /// Data upload address.
        DMEM_CONTROL @ 0x41a1c0 Rw { 25:25 READ_INCREMENT; 24:24 WRITE_INCREMENT; 15:0 ADDRESS; }
        /// Dword to upload to data memory.
        DMEM_DATA @ 0x41a1c4 Rw {}
    }

    /// Units of all GPCs, with a range of 0x8000 bytes for each GPC. Only capability registers are defined.
    mod gpc_units @ 0x500000 .. 0x580000 {
        /// Number of TPCs per GPC.
        TPC_COUNT[16; 0x8000] @ 0x502608 Ro { 4:0 TPCS; }
    }
}

/// FECS commands of nouveau's built-in firmware. Source: nouveau's `hub.fuc`.
pub mod fecs_command {
    /// Makes the channel in the command data current.
    pub const SET_CHANNEL: u32 = 1;
    /// Saves the current channel's context.
    pub const SAVE_CONTEXT: u32 = 2;
}

/// Error registers of a multiprocessor, which are state registers in the GPCs (see [`written`](sm_trap::written)).
/// Source: nouveau's `gr` unit.
pub mod sm_trap {
    use crate::Field;

    /// Number of GPCs with a register range.
    pub const GPCS: u32 = 16;
    /// Number of TPCs per GPC with a register range.
    pub const TPCS: u32 = 8;

    const UNITS: u32 = 0x50_0000;
    const GPC_BYTES: u32 = 0x8000;
    const TPC_BYTES: u32 = 0x800;
    /// Byte offset of the first TPC's range within that of its GPC.
    const TPC_BASE: u32 = 0x4000;
    const GPC_TRAP: u32 = 0x2c90;
    const TPC_TRAP: u32 = 0x508;
    const GLOBAL_ERROR: u32 = 0x650;

    const fn in_tpc(gpc: u32, tpc: u32, offset: u32) -> u32 {
        UNITS + gpc * GPC_BYTES + TPC_BASE + tpc * TPC_BYTES + offset
    }

    /// Returns the byte offset of a GPC's trap register.
    #[must_use]
    pub const fn gpc(gpc: u32) -> u32 {
        UNITS + gpc * GPC_BYTES + GPC_TRAP
    }

    /// Field with a bit for each TPC that trapped, starting with TPC 0.
    pub const TPC_MASK: Field = Field::new(23, 16);

    /// Returns the byte offset of a TPC's trap register.
    #[must_use]
    pub const fn tpc(gpc: u32, tpc: u32) -> u32 {
        in_tpc(gpc, tpc, TPC_TRAP)
    }

    /// Field that is set if the multiprocessor trapped.
    pub const SM: Field = Field::new(1, 1);

    /// Returns the byte offset of a multiprocessor's warp error register, which contains a value of
    /// [`warp_error`](crate::class::compute90c0::warp_error).
    #[must_use]
    pub const fn warp_error(gpc: u32, tpc: u32) -> u32 {
        in_tpc(gpc, tpc, 0x648)
    }

    /// Returns the byte offset of a multiprocessor's global error register.
    #[must_use]
    pub const fn global_error(gpc: u32, tpc: u32) -> u32 {
        in_tpc(gpc, tpc, GLOBAL_ERROR)
    }

    /// Returns the value of a PGRAPH state register after a write. This is the written value, except that ones clear
    /// bits of trap registers.
    #[must_use]
    pub const fn written(offset: u32, old: u32, value: u32) -> u32 {
        let inside = offset >= UNITS && offset < UNITS + GPCS * GPC_BYTES;
        let (in_gpc, in_tpc) = (offset % GPC_BYTES, offset % TPC_BYTES);
        let tpc = in_gpc >= TPC_BASE && (in_tpc == TPC_TRAP || in_tpc == GLOBAL_ERROR);
        if inside && (in_gpc == GPC_TRAP || tpc) { old & !value } else { value }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn registers_that_report_are_cleared_by_ones_and_others_store() {
            let cleared = [gpc(0), gpc(3), tpc(0, 0), tpc(1, 3), global_error(0, 2)];
            assert_eq!(cleared, [0x50_2c90, 0x51_ac90, 0x50_4508, 0x50_dd08, 0x50_5650]);
            assert!(cleared.iter().all(|offset| written(*offset, 0x3_0000, 0x1_0000) == 0x2_0000));
            let stored = [warp_error(0, 0), gpc(0) + 4, 0x50_0508, 0x41_9650, 0x58_2c90];
            assert_eq!(stored[0], 0x50_4648);
            assert!(stored.iter().all(|offset| written(*offset, 3, 1) == 1));
        }
    }
}
