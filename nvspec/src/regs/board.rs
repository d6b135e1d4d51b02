//! Registers outside the engines: thermal, fuses, GPIO, PCI mirror, PMU, clocks, privileged ring, counters, and the
//! display registers that drivers access on a card without outputs. Sources: rnndb `pm/`, `bus/`, `io/`, `display/`;
//! nouveau's `therm`, `fuse`, `gpio`, `i2c`, `pci`, `pmu`, `clk`, `privring`, `devinit` units.

regs! {
    /// Fan and PWM control next to the GPIO unit.
    mod pnvio @ 0x00e000 .. 0x00f000 {
        /// GPIO interrupts.
        GPIO_INTR[2; 4] @ 0x00e050 W1c {}
        /// Second bank of GPIO interrupts.
        GPIO_INTR_HI[2; 4] @ 0x00e070 W1c {}
        /// I2C pad interrupts.
        AUX_INTR @ 0x00e060 W1c {}
        /// I2C pad interrupt enable.
        AUX_INTR_EN @ 0x00e068 Rw {}
        /// I2C pad interrupt state.
        AUX_INTR_STATE @ 0x00e06c Rw {}
        /// Fan PWM divider.
        PWM_DIV[2; 4] @ 0x00e114 Rw {}
        /// Fan PWM duty cycle.
        PWM_DUTY[2; 4] @ 0x00e11c Rw {}
        /// Thermal PWM.
        THERM_PWM @ 0x00e720 Rw {}
        /// Period and count of the fan speed measurement.
        TACHOMETER[2; 4] @ 0x00e724 Rw {}
        /// Host clock PLL control and coefficients.
        PLL_VCLK[2; 4] @ 0x00e800 Rw {}
        /// Crystal reference PLL control and coefficients.
        PLL_SPLL[2; 4] @ 0x00e820 Rw {}
    }

    /// Thermal sensor and power management.
    mod ptherm @ 0x020000 .. 0x021000 {
        /// Sensor control.
        SENSOR_CTRL[4; 4] @ 0x020000 Rw {}
        /// Pending interrupts.
        INTR @ 0x020100 W1c {}
        /// Enabled interrupts.
        INTR_EN @ 0x020140 Rw {}
        /// Clock gating, per engine.
        GATE_CTRL[64; 4] @ 0x020200 Rw {}
        /// Clock gating idle filter.
        GATE_FILTER[64; 4] @ 0x020300 Rw {}
        /// Measured temperature in degrees Celsius.
        TEMPERATURE @ 0x020400 Ro = 0x00000028 {}
        /// Clock reduction threshold.
        THRESHOLD_CLOCK @ 0x020414 Rw {}
        /// Temperature thresholds.
        THRESHOLD[18; 4] @ 0x020480 Rw {}
    }

    /// Fuses.
    mod pfuse @ 0x021000 .. 0x022000 {
        /// Fuse words.
        FUSE[179; 4] @ 0x021000 Rw {}
        /// Speed grade of the die, which drivers use for voltage lookup. Drivers report an error if it is 0.
        SPEEDO @ 0x0212cc Rw = 0x00000420 {}
        /// Further fuse words.
        FUSE_HI[844; 4] @ 0x0212d0 Rw {}
    }

    /// Unit capabilities and device initialisation state.
    mod ptop @ 0x022400 .. 0x023000 {
        /// Fuse access control.
        FUSE_CTRL @ 0x022400 Rw {}
        /// Device initialisation state.
        DEVINIT_STATUS @ 0x02240c Rw = 0x00000002 { 1:1 DONE; }
        /// PCI straps.
        PCI_STRAPS @ 0x02241c Rw {}
        /// Number of GPCs.
        GPC_COUNT @ 0x022430 Ro {}
        /// Number of TPCs per GPC.
        TPC_PER_GPC @ 0x022434 Ro {}
        /// Number of memory partitions.
        FBP_COUNT @ 0x022438 Ro = 0x00000001 {}
        /// Fused-off engines.
        ENGINES_DISABLED @ 0x022500 Ro { 9:9 CE1; 8:8 CE0; 2:2 MSVLD; 1:1 MSPDEC_MSPPP; 0:0 PDISP; }
        /// Fused-off GPCs.
        GPC_DISABLED @ 0x022504 Ro {}
        /// Memory partitions with fused-off counters.
        PART_DISABLED @ 0x022548 Ro {}
        /// Fused-off memory partitions.
        FBP_DISABLED @ 0x022554 Ro {}
        /// Disabled GPCs.
        GPC_OFF @ 0x022584 Ro {}
        /// Memory partitions with disabled counters.
        PART_OFF @ 0x0225c8 Ro {}
    }

    /// PCI configuration space, mirrored in BAR0.
    mod ppci @ 0x088000 .. 0x089000 {
        /// Configuration dwords 0x00 to 0x4c.
        CONFIG[20; 4] @ 0x088000 Rw {}
        /// ROM shadow control.
        ROM_CONTROL @ 0x088050 Rw { 0:0 PROM_DISABLE; }
        /// Capability dwords.
        CAPABILITIES[14; 4] @ 0x088054 Rw {}
        /// Link status, as in the PCI Express capability.
        LINK_STATUS[4; 4] @ 0x08808c Rw {}
        /// Private dwords.
        PRIVATE[256; 4] @ 0x088100 Rw {}
        /// Re-arms MSI: writing 0xff to the low byte permits the next message.
        MSI_REARM @ 0x088704 Rw { 7:0 REARM; }
        /// Further private dwords.
        PRIVATE_2[64; 4] @ 0x088a00 Rw {}
    }

    /// Power management unit, a falcon.
    #[doc(alias = "PDAEMON")]
    mod pmu @ 0x10a000 .. 0x10b000 {
        /// Sets pending interrupts.
        INTR_SET @ 0x10a000 Wo {}
        /// Clears pending interrupts.
        INTR_CLEAR @ 0x10a004 Wo {}
        /// Pending interrupts.
        INTR @ 0x10a008 Rw {}
        /// Sets interrupt enable bits.
        INTR_EN_SET @ 0x10a010 Rw {}
        /// Clears interrupt enable bits.
        INTR_EN_CLEAR @ 0x10a014 Rw {}
        /// Enabled interrupts.
        INTR_EN @ 0x10a018 Rw {}
        /// Interrupt routing.
        INTR_DISPATCH @ 0x10a01c Rw {}
        /// Scratch registers.
        SCRATCH[2; 4] @ 0x10a040 Rw {}
        /// Enabled interfaces.
        ITFEN @ 0x10a048 Rw {}
        /// Idle state.
        IDLE_STATE @ 0x10a04c Ro {}
        /// Starts and halts the processor.
        CPU_CONTROL @ 0x10a100 Rw { 1:1 START; }
        /// Entry point.
        BOOT_VECTOR @ 0x10a104 Rw {}
        /// Sizes of the code and data memory, in units of 256 bytes.
        HWCFG @ 0x10a108 Ro = 0x00081060 {}
        /// DMA control.
        DMA_CONTROL @ 0x10a10c Rw { 2:2 IMEM_SCRUBBING; 1:1 DMEM_SCRUBBING; }
        /// Address and status of the unit's last access fault.
        ACCESS_FAULT[2; 4] @ 0x10a168 Rw {}
        /// Code upload address.
        IMEM_CONTROL[4; 16] @ 0x10a180 Rw {}
        /// Code upload data.
        IMEM_DATA[4; 16] @ 0x10a184 Rw {}
        /// Code upload tag.
        IMEM_TAG[4; 16] @ 0x10a188 Rw {}
        /// Data upload address.
        DMEM_CONTROL[8; 8] @ 0x10a1c0 Rw { 25:25 READ_INCREMENT; 24:24 WRITE_INCREMENT; 15:0 ADDRESS; }
        /// Dword to upload to data memory.
        DMEM_DATA[8; 8] @ 0x10a1c4 Rw {}
        /// DMA instance and target dwords.
        DMA_TARGET[16; 4] @ 0x10a600 Rw {}
        /// Head pointers of the host's queues.
        QUEUE_HEAD[4; 4] @ 0x10a4a0 Rw {}
        /// Tail pointers of the host's queues.
        QUEUE_TAIL[4; 4] @ 0x10a4b0 Rw {}
        /// Host-to-PMU interrupt lines.
        QUEUE_DOORBELL[2; 4] @ 0x10a4c0 Rw {}
        /// Message queue head.
        MESSAGE_HEAD @ 0x10a4c8 Rw {}
        /// Message queue tail.
        MESSAGE_TAIL @ 0x10a4cc Rw {}
        /// Description of the host's queue, set by the firmware.
        QUEUE_INFO @ 0x10a4d0 Rw {}
        /// Queue dwords between the two descriptions.
        QUEUE_MISC[2; 4] @ 0x10a4d4 Rw {}
        /// Description of the message queue, set by the firmware.
        MESSAGE_INFO @ 0x10a4dc Rw {}
        /// Idle counters.
        COUNTER[31; 4] @ 0x10a504 Rw {}
        /// Mutexes.
        MUTEX[16; 4] @ 0x10a584 Rw {}
        /// Mutex that the driver acquires before it writes data memory.
        MUTEX_DMEM @ 0x10a580 Rw {}
        /// Engine power dwords.
        POWER[16; 4] @ 0x10a780 Rw {}
    }

    /// Hub of the privileged ring.
    mod privring_hub @ 0x120000 .. 0x124000 {
        /// Unit interrupts, first dword.
        INTR_0 @ 0x121c58 Rw {}
        /// Unit interrupts, second dword.
        INTR_1 @ 0x121c5c Rw {}
        /// Ring command.
        COMMAND @ 0x121c4c Rw { 5:0 COMMAND; }
        /// Number of hub units.
        HUB_COUNT @ 0x121c70 Ro = 0x00000001 {}
        /// Number of ROP units (memory partitions).
        ROP_COUNT @ 0x121c74 Ro = 0x00000001 {}
        /// Number of GPC units.
        GPC_COUNT @ 0x121c78 Ro = 0x00000001 {}
        /// Hub timeouts and decoding.
        DECODE[64; 4] @ 0x122300 Rw {}
        /// Details of the last error.
        ERROR[8; 4] @ 0x122120 Rw {}
    }

    /// Clock PLLs.
    mod pclock @ 0x130000 .. 0x138000 {
        /// PLL dwords of the first group.
        PLL_A[64; 4] @ 0x132000 Rw {}
        /// Memory clock PLL dwords.
        PLL_MEM[256; 4] @ 0x137000 Rw {}
        /// Memory clock dwords.
        MEM[64; 4] @ 0x137400 Rw {}
    }

    /// Performance counters.
    mod pcounter @ 0x1b0000 .. 0x1c0000 {
        /// Hub counter dwords.
        WORD[1024; 4] @ 0x1bc000 Rw {}
    }

    /// VGA byte registers that drivers access on a card without outputs.
    mod pvga @ 0x601000 .. 0x602000 {
        /// CRTC index and data bytes of head 0.
        CRTC @ 0x6013d4 Rw {}
        /// Sequencer and graphics index bytes.
        SEQUENCER[8; 4] @ 0x6013b4 Rw {}
        /// Status byte.
        STATUS @ 0x6013d8 Rw {}
    }

    /// Display engine.
    mod pdisp @ 0x610000 .. 0x620000 {
        /// Instance memory of the display.
        INSTANCE @ 0x610010 Rw {}
        /// Pending interrupts of the display.
        INTR[8; 4] @ 0x610020 Rw {}
        /// Capabilities of the card's display outputs.
        CAPS[128; 4] @ 0x610080 Rw {}
        /// VBIOS in VRAM.
        VBIOS_IN_VRAM @ 0x619f04 Rw {}
    }
}

/// Sizes and addresses of the two queues in PMU data memory, as reported by the running firmware.
pub mod pmu_queue {
    /// Value of `pmu::QUEUE_INFO`, for host commands.
    pub const COMMANDS: u32 = 0x0080_0400;
    /// Value of `pmu::MESSAGE_INFO`, for messages to the host.
    pub const MESSAGES: u32 = 0x0080_0500;
}
