//! PMC, PBUS, PFIFO and PTIMER. Sources: rnndb `bus/pmc.xml`, `bus/pbus.xml`, `fifo/gf100_pfifo.xml`, `bus/ptimer.xml`;
//! nouveau's `mc`, `bus`, `fifo`, `timer` units.

regs! {
    /// Master control: chip identification, interrupt tree, and unit enables.
    mod pmc @ 0x000000 .. 0x001000 {
        /// Chip identification.
        BOOT_0 @ 0x000000 Ro { 28:20 CHIPSET; 7:0 REVISION; }
        /// Byte order of BAR0. 0 means little-endian.
        BOOT_1 @ 0x000004 Ro {}
        /// Pending interrupts, one bit per unit that asserts its level interrupt.
        INTR_0 @ 0x000100 Ro { 30:30 PRIVRING; 28:28 PBUS; 26:26 PDISP; 25:25 LTC; 24:24 PMU; 21:21 GPIO; 20:20 PTIMER;
            18:18 THERM; 17:17 MSPDEC; 15:15 MSVLD; 13:13 PFB; 12:12 PGRAPH; 8:8 PFIFO; 6:6 CE1; 5:5 CE0; 0:0 MSPPP; }
        /// Pending interrupts of the second tree.
        INTR_1 @ 0x000104 Ro {}
        /// Interrupt line enable.
        INTR_EN_0 @ 0x000140 Rw { 0:0 ENABLE; }
        /// Interrupt line enable of the second tree.
        INTR_EN_1 @ 0x000144 Rw { 0:0 ENABLE; }
        /// Interrupt line state of the first tree.
        INTR_LINE_0 @ 0x000160 Ro {}
        /// Cache units with a pending interrupt, which are the sources of the tree's LTC bit.
        INTR_LTC @ 0x00017c Ro {}
        /// Unit enables. Writing 0 to a bit resets its unit.
        ENABLE @ 0x000200 Rw { 30:30 PDISP; 28:28 MSPDEC_B; 20:20 LTC; 17:17 MSPDEC; 15:15 MSVLD; 13:13 PMU; 12:12 PGRAPH;
            8:8 PFIFO; 7:7 CE1; 6:6 CE0; 5:5 PRIVRING; 2:2 PXBAR; 1:1 MSPPP; }
        /// PBDMA enables, one bit each. Bits of missing units read as zero.
        PBDMA_ENABLE @ 0x000204 Rw {}
        /// ELPG gate. The bit must be 0 while falcon code is uploaded.
        ELPG_GATE @ 0x000260 Rw = 0x00000001 {}
        /// Mask of the pending units that drive the interrupt line.
        INTR_MASK_0 @ 0x000640 Rw = 0xffffffff {}
        /// Mask of the second tree's pending units that drive the interrupt line.
        INTR_MASK_1 @ 0x000644 Rw = 0xffffffff {}
    }

    /// Bus interface: access faults, the PRAMIN window, and the BAR instance blocks.
    mod pbus @ 0x001000 .. 0x002000 {
        /// Pending interrupts.
        INTR @ 0x001100 W1c { 3:3 MMIO_TIMEOUT; 2:2 MMIO_RING_ERR; 1:1 MMIO_FAULT; }
        /// Enabled interrupts.
        INTR_EN @ 0x001140 Rw { 3:3 MMIO_TIMEOUT; 2:2 MMIO_RING_ERR; 1:1 MMIO_FAULT; }
        /// Hardware sequencer and debug bits written by drivers.
        DEBUG_1 @ 0x001084 Rw {}
        /// Debug bits.
        DEBUG_4 @ 0x001098 Rw {}
        /// Engine power gating of the bus.
        HWSQ_SLEEP @ 0x001304 Rw {}
        /// Hardware sequencer storage.
        HWSQ_STATE[16; 4] @ 0x001400 Rw {}
        /// Backlight and PWM registers probed by drivers.
        PWM[2; 4] @ 0x001588 Rw {}
        /// Target and address bits 39:16 of the PRAMIN window base.
        PRAMIN_WINDOW @ 0x001700 Rw { 25:24 TARGET; 23:0 BASE; }
        /// Address bits 39:12 of BAR1's instance block.
        BAR1_BLOCK @ 0x001704 Rw { 31:31 VALID; 29:28 TARGET; 27:0 ADDRESS; }
        /// Bind status.
        BIND_STATUS @ 0x001710 Ro {}
        /// BAR3's instance block (BAR2 in NVIDIA's numbering).
        #[doc(alias = "BAR2_BLOCK")]
        BAR3_BLOCK @ 0x001714 Rw { 31:31 VALID; 30:30 HALVE; 29:28 TARGET; 27:0 ADDRESS; }
        /// Instance block of the peephole.
        PEEPHOLE_BLOCK @ 0x001718 Rw { 31:31 VALID; 29:28 TARGET; 27:0 ADDRESS; }
    }

    /// Channel scheduler. envytools calls the runlist PLAYLIST and the PBDMA SUBFIFO.
    mod pfifo @ 0x002000 .. 0x004000 {
        /// Pending interrupts.
        INTR @ 0x002100 W1c { 31:31 NON_STALL; 30:30 RUNLIST; 29:29 PBDMA; 28:28 MMU_FAULT; 24:24 INTR_24; 23:23 INTR_23;
            16:16 INTR_16; 8:8 SCHED_ERROR; 0:0 INTR_0; }
        /// Enabled interrupts.
        INTR_EN @ 0x002140 Rw { 31:31 NON_STALL; 30:30 RUNLIST; 29:29 PBDMA; 28:28 MMU_FAULT; 24:24 INTR_24; 23:23 INTR_23;
            16:16 INTR_16; 8:8 SCHED_ERROR; 0:0 INTR_0; }
        /// Mask of the stalling interrupts.
        INTR_STALL @ 0x002144 Rw {}
        /// Scheduler enable.
        SCHED_EN @ 0x002200 Rw { 0:0 ENABLE; }
        /// Mask of the present PBDMAs.
        PBDMA_PRESENT @ 0x002204 Rw {}
        /// For each engine, the mask of PBDMAs that must not serve it.
        ENGINE_PBDMA_MASK[6; 4] @ 0x002208 Rw {}
        /// Idle filter.
        IDLE_FILTER @ 0x002224 Rw {}
        /// USERD's virtual address in BAR1, bits 39:12.
        USERD_BASE @ 0x002254 Rw { 28:28 VALID; 27:0 ADDRESS; }
        /// Runlist address bits 39:12.
        #[doc(alias = "PLAYLIST")]
        RUNLIST_BASE @ 0x002270 Rw { 29:28 TARGET; 27:0 ADDRESS; }
        /// Runlist length. A write submits the runlist.
        RUNLIST @ 0x002274 Rw { 24:20 ENGINES; 11:0 LENGTH; }
        /// Runlist submission state.
        RUNLIST_STATUS @ 0x00227c Ro { 20:20 PENDING; }
        /// Addresses of the active runlists.
        ENG_RUNLIST_BASE[7; 8] @ 0x002280 Ro {}
        /// Lengths of the active runlists.
        ENG_RUNLIST[7; 8] @ 0x002284 Ro { 20:20 PENDING; }
        /// Timeslice scale.
        TIMESLICE @ 0x002310 Rw {}
        /// Reason for INTR_0 (channel table).
        INTR_0_REASON @ 0x00252c Ro {}
        /// Scheduler error code.
        SCHED_ERROR_REASON @ 0x00254c Ro { 7:0 CODE; }
        /// Reason for INTR_16.
        INTR_16_REASON @ 0x00256c Rw {}
        /// Reason for INTR_24.
        INTR_24_REASON @ 0x00258c Rw {}
        /// MMU fault units with a pending fault.
        MMU_FAULT_ID @ 0x00259c W1c {}
        /// PBDMA units with an interrupt.
        PBDMA_INTR_ID @ 0x0025a0 W1c {}
        /// Engines with a non-stall interrupt.
        NON_STALL_ID @ 0x0025a4 Ro {}
        /// Non-stall interrupts of the engines: bit 0 of each of eight nibbles.
        NON_STALL_INTR[6; 4] @ 0x0025a8 W1c {}
        /// Non-stall interrupt enables: the effective bits of each nibble of `NON_STALL_INTR`, for all engines.
        NON_STALL_EN @ 0x002628 Rw { 3:0 NIBBLE; }
        /// Engines that stopped on an error. Writing a one re-enables scheduling of that engine.
        SCHED_ENABLE_ACK @ 0x00262c W1c {}
        /// Engines with scheduling disabled.
        SCHED_DISABLE @ 0x002630 Rw {}
        /// Preempts (kicks off) a channel.
        #[doc(alias = "CHAN_KILL")]
        PREEMPT @ 0x002634 Rw { 20:20 PENDING; 11:0 CHANNEL; }
        /// State of each engine. To detect an incomplete context switch, Linux 6.1 checks BUSY, LOAD and SWITCHING
        /// together, and Linux 6.12 checks BUSY_2 with SWITCHING or the middle bit of CTX_STATUS. Both versions read
        /// the channel from CHANNEL.
        ENGINE_STATUS[6; 4] @ 0x002640 Ro { 31:31 BUSY; 28:28 BUSY_2; 20:20 SAVE; 18:18 LOAD; 15:13 CTX_STATUS; 12:12 SWITCHING;
            6:0 CHANNEL; }
        /// Runlist events.
        RUNLIST_INTR @ 0x002a00 W1c { 28:28 DONE; }
        /// Runlist events, second dword.
        RUNLIST_INTR_2 @ 0x002a04 Rw {}
        /// Fault injection, one register per engine.
        FAULT_TRIGGER[6; 4] @ 0x002a30 Rw { 8:8 TRIGGER; 4:0 UNIT; }
        /// Faulting instance block, per unit.
        FAULT_INST[32; 16] @ 0x002800 Ro { 27:0 ADDRESS; }
        /// Faulting address, low dword.
        FAULT_VA_LO[32; 16] @ 0x002804 Ro {}
        /// Faulting address, high dword.
        FAULT_VA_HI[32; 16] @ 0x002808 Ro {}
        /// Fault type.
        FAULT_TYPE[32; 16] @ 0x00280c Ro { 28:24 GPC; 12:8 CLIENT; 7:7 WRITE; 6:6 HUB; 3:0 REASON; }
        /// Instance block of each channel.
        CHANNEL[128; 8] @ 0x003000 Rw { 31:31 VALID; 30:30 POLL_USERD; 29:28 TARGET; 27:0 ADDRESS; }
        /// State of each channel.
        CHANNEL_STATE[128; 8] @ 0x003004 Rw { 28:28 PENDING; 20:16 ENGINES; 12:12 LOADED; 4:4 ACQUIRE_PENDING; 0:0 ENABLED; }
    }

    /// Timer, a nanosecond clock with 32 ns resolution.
    mod ptimer @ 0x009000 .. 0x00a000 {
        /// Address of the last faulting access.
        MMIO_FAULT_ADDRESS @ 0x009084 Rw {}
        /// Data of the last faulting access.
        MMIO_FAULT_DATA @ 0x009088 Rw {}
        /// Pending interrupts.
        INTR @ 0x009100 W1c { 0:0 ALARM; }
        /// Enabled interrupts.
        INTR_EN @ 0x009140 Rw { 0:0 ALARM; }
        /// Clock ratio numerator.
        NUMERATOR @ 0x009200 Rw {}
        /// Clock ratio denominator.
        DENOMINATOR @ 0x009210 Rw {}
        /// Clock input selection.
        CLOCK_MUL @ 0x009220 Rw {}
        /// Time in ns, low dword, a multiple of 32.
        TIME_0 @ 0x009400 Rw { 31:5 NSEC; }
        /// Time in ns, high dword.
        TIME_1 @ 0x009410 Rw { 28:0 NSEC; }
        /// Alarm time, low dword.
        ALARM_0 @ 0x009420 Rw {}
    }

    /// PBDMA units (SUBFIFO in envytools), 0x2000 apart.
    mod pbdma @ 0x040000 .. 0x046000 {
        /// GPFIFO base address, low dword.
        GP_BASE_LO[3; 0x2000] @ 0x040048 Ro {}
        /// GPFIFO base address, high dword.
        GP_BASE_HI[3; 0x2000] @ 0x04004c Ro {}
        /// Method header state.
        PB_HEADER[3; 0x2000] @ 0x040084 Ro {}
        /// Subchannel and method that raised an interrupt.
        METHOD_0[3; 0x2000] @ 0x0400c0 Rw { 31:31 VALID; 18:16 SUBCHANNEL; 13:2 METHOD; }
        /// Data of the method that raised an interrupt.
        DATA_0[3; 0x2000] @ 0x0400c4 Rw {}
        /// Pending interrupts.
        INTR_0[3; 0x2000] @ 0x040108 W1c { 31:31 SIGNATURE; 30:30 SEMAPHORE; 29:29 SYNCPOINT_ILLEGAL; 28:28 ACQUIRE_TIMEOUT; 27:27 DEVICE;
            26:26 ENGINE_TIMEOUT; 25:25 XBAR_CONNECT; 24:24 EMPTY_SUBC_24; 23:23 EMPTY_SUBC; 22:22 METHOD_CRC; 21:21 METHOD_SIZE; 20:20 CACHE;
            18:18 PB_CRC; 17:17 PB_ENTRY; 16:16 GP_PTR; 15:15 PB_HEADER; 14:14 GP_PB; 13:13 GP_FIFO_CRC; 12:12 GP_ENTRY; 11:11 LB_ERR;
            6:6 MEM_ACK_EXTRA; 5:5 MEM_ACK_TIMEOUT; 4:4 MEM_DATA; 3:3 MEM_REQ_TIMEOUT; 2:2 MEM_UNBOUND; 1:1 MEM_BAD_ADDRESS; 0:0 MEM_FAULT; }
        /// Enabled interrupts.
        INTR_EN_0[3; 0x2000] @ 0x04010c Rw {}
        /// Current channel of the unit.
        CHANNEL[3; 0x2000] @ 0x040120 Ro { 6:0 CHANNEL; }
        /// Stall control.
        INTR_STALL[3; 0x2000] @ 0x04013c Rw {}
        /// Memory access timeout.
        TIMEOUT[3; 0x2000] @ 0x04012c Rw {}
    }
}
