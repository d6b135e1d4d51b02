//! Policy table of a GF100 vGPU, in address order.
//!
//! Lists register names by block and policy. All registers that are not listed are denied. A `Store` register has no
//! effect that a driver can observe, except for its value. A `Model` register has side effects within the vGPU. A
//! `Translate` register contains a guest-physical address, or controls a resource that all VMs on a card share.

use super::{Line, Policy, Range, RangeKind};
use nvspec::RegInfo;
use nvspec::regs::{self, windows};

macro_rules! policies {
    ($( $variant:ident = $block:ident { $( $policy:ident: $($name:ident)*; )* } )*) => {
        /// A declared register in its block.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Register { $(
            #[doc = concat!("Register of `", stringify!($block), "`.")]
            $variant(regs::$block::Reg),
        )* }

        /// Table entries of declared registers.
        pub static REGISTERS: &[Line] = &[$($($( Line {
            block: stringify!($block),
            name: stringify!($name),
            offset: regs::$block::$name::OFFSET,
            policy: Policy::$policy,
        }, )*)*)*];

        impl Register {
            /// Returns the register at byte `offset` of BAR0, and its array index.
            #[must_use]
            pub fn decode(offset: u32) -> Option<(Self, u32)> {
                match offset {
                    $( regs::$block::BASE..=regs::$block::LAST => {
                        regs::$block::decode(offset).map(|(reg, index)| (Self::$variant(reg), index))
                    } )*
                    _ => None,
                }
            }

            /// Returns the register's policy.
            #[must_use]
            pub fn policy(self) -> Policy {
                match self { $(
                    Self::$variant(reg) => {
                        #[allow(unreachable_patterns, reason = "registers that are declared later are denied")]
                        match reg {
                            $($( regs::$block::Reg::$name => Policy::$policy, )*)*
                            _ => Policy::Deny,
                        }
                    }
                )* }
            }

            /// Returns the register's name, offset, access mode, reset value, and fields.
            #[must_use]
            pub fn info(self) -> &'static RegInfo {
                match self { $( Self::$variant(reg) => reg.info(), )* }
            }
        }
    };
}

policies! {
    Pmc = pmc {
        Model: BOOT_0 BOOT_1 INTR_0 INTR_1 INTR_LINE_0 ENABLE PBDMA_ENABLE;
        Store: INTR_LTC INTR_EN_0 INTR_EN_1 ELPG_GATE INTR_MASK_0 INTR_MASK_1;
    }
    Pbus = pbus {
        Store: INTR INTR_EN DEBUG_1 DEBUG_4 HWSQ_SLEEP HWSQ_STATE PWM BIND_STATUS;
        Translate: PRAMIN_WINDOW BAR1_BLOCK BAR3_BLOCK PEEPHOLE_BLOCK;
    }
    Pfifo = pfifo {
        Model: INTR INTR_EN PBDMA_PRESENT RUNLIST_STATUS SCHED_ERROR_REASON MMU_FAULT_ID PBDMA_INTR_ID NON_STALL_ID
            NON_STALL_INTR NON_STALL_EN RUNLIST_INTR FAULT_INST FAULT_VA_LO FAULT_VA_HI FAULT_TYPE SCHED_ENABLE_ACK
            FAULT_TRIGGER;
        Store: INTR_STALL SCHED_EN ENGINE_PBDMA_MASK IDLE_FILTER ENG_RUNLIST_BASE ENG_RUNLIST TIMESLICE INTR_0_REASON
            INTR_16_REASON INTR_24_REASON RUNLIST_INTR_2;
        Translate: USERD_BASE RUNLIST_BASE RUNLIST SCHED_DISABLE PREEMPT ENGINE_STATUS CHANNEL CHANNEL_STATE;
    }
    Ptimer = ptimer {
        Model: INTR INTR_EN ALARM_0;
        Store: MMIO_FAULT_ADDRESS MMIO_FAULT_DATA NUMERATOR DENOMINATOR CLOCK_MUL;
        Translate: TIME_0 TIME_1;
    }
    Pnvio = pnvio {
        Store: GPIO_INTR GPIO_INTR_HI AUX_INTR AUX_INTR_EN AUX_INTR_STATE PWM_DIV PWM_DUTY THERM_PWM TACHOMETER
            PLL_VCLK PLL_SPLL;
    }
    Ptherm = ptherm {
        Store: SENSOR_CTRL INTR INTR_EN GATE_CTRL GATE_FILTER TEMPERATURE THRESHOLD_CLOCK THRESHOLD;
    }
    Pfuse = pfuse {
        Store: FUSE SPEEDO FUSE_HI;
    }
    Ptop = ptop {
        Model: GPC_COUNT TPC_PER_GPC FBP_COUNT ENGINES_DISABLED FBP_DISABLED;
        Store: FUSE_CTRL DEVINIT_STATUS PCI_STRAPS GPC_DISABLED PART_DISABLED GPC_OFF PART_OFF;
    }
    Pbdma = pbdma {
        Model: METHOD_0 DATA_0 INTR_0 INTR_EN_0 CHANNEL;
        Store: GP_BASE_LO GP_BASE_HI PB_HEADER INTR_STALL TIMEOUT;
    }
    Pflush = pflush {
        Model: L2_FLUSH L2_INVALIDATE;
        Translate: BAR_FLUSH;
    }
    Ppci = ppci {
        Model: CONFIG CAPABILITIES LINK_STATUS MSI_REARM;
        Store: ROM_CONTROL PRIVATE PRIVATE_2;
    }
    Pfb = pfb {
        Model: PARTITIONS MMU_CTRL;
        // On hardware, these registers contain system memory addresses, and addresses for debugging the unit. The
        // guest's values are not used.
        Store: INTR CONFIG MEM_TYPE NISO_ADDRESS MMU_INVALIDATE_VA MMU_INVALIDATE_PDB MMU_DEBUG_WR MMU_DEBUG_RD
            MMU_DEBUG_CTRL;
        Translate: MMU_INVALIDATE;
    }
    Pstraps = pstraps {
        Store: STRAPS;
    }
    Ce0 = ce0 {
        Model: INTR_SET INTR_CLEAR INTR INTR_EN_SET INTR_EN_CLEAR INTR_EN CHANNEL_CURRENT CPU_CONTROL DMEM_CONTROL
            DMEM_DATA IMEM_CONTROL IMEM_DATA;
        Store: INTR_MODE INTR_DISPATCH SCRATCH ITFEN IDLE_STATE CHANNEL_NEXT CHANNEL_COMMAND METHOD UNIT BOOT_VECTOR
            HWCFG DMA_CONTROL DMA_BASE VERSION IMEM_TAG;
    }
    Ce1 = ce1 {
        Model: INTR_SET INTR_CLEAR INTR INTR_EN_SET INTR_EN_CLEAR INTR_EN CHANNEL_CURRENT CPU_CONTROL DMEM_CONTROL
            DMEM_DATA IMEM_CONTROL IMEM_DATA;
        Store: INTR_MODE INTR_DISPATCH SCRATCH ITFEN IDLE_STATE CHANNEL_NEXT CHANNEL_COMMAND METHOD UNIT BOOT_VECTOR
            HWCFG DMA_CONTROL DMA_BASE VERSION IMEM_TAG;
    }
    Pmu = pmu {
        Model: INTR_SET INTR_CLEAR INTR INTR_EN_SET INTR_EN_CLEAR INTR_EN CPU_CONTROL DMEM_CONTROL DMEM_DATA QUEUE_HEAD
            DMA_CONTROL;
        Store: INTR_DISPATCH SCRATCH ITFEN IDLE_STATE BOOT_VECTOR HWCFG ACCESS_FAULT IMEM_CONTROL IMEM_DATA IMEM_TAG
            DMA_TARGET QUEUE_TAIL QUEUE_DOORBELL MESSAGE_HEAD MESSAGE_TAIL QUEUE_INFO QUEUE_MISC MESSAGE_INFO COUNTER
            MUTEX MUTEX_DMEM POWER;
    }
    PbfbBcast = pbfb_bcast {
        Model: MEM_AMOUNT;
    }
    Pbfb = pbfb {
        Model: MEM_AMOUNT;
    }
    PrivringHub = privring_hub {
        Model: COMMAND HUB_COUNT ROP_COUNT GPC_COUNT;
        Store: INTR_0 INTR_1 DECODE ERROR;
    }
    Pclock = pclock {
        Store: PLL_A PLL_MEM MEM;
    }
    LtcIntr = ltc_intr {
        Store: SUMMARY;
    }
    Ltc = ltc {
        Model: CBC_CLEAR CBC_PARAM;
        // A vGPU has no compression tags, so the address of the tags' memory is not used.
        Store: CBC_CLEAR_START CBC_CLEAR_END CBC_BASE CBC_SIZE CONTROL INTR_CONTROL ZBC_INDEX ZBC_COLOR ZBC_DEPTH
            ZBC_STENCIL;
    }
    Pcounter = pcounter {
        Store: WORD;
    }
    Pgraph = pgraph {
        Model: INTR TRAP TRAP_GPCS INTR_EN TRAPPED_ADDRESS TRAPPED_DATA_LO SUBCHANNEL_CLASS DATA_ERROR PWR_HANDSHAKE;
        // Direct context writes (ICMD, MTHD) have no effect, because they would modify context state, which belongs to
        // the host.
        Store: TRAP_EN ICMD_COMMAND ICMD_DATA ICMD_ENABLE CONTROL ACTIVITY STATUS TRAPPED_DATA_HI MTHD_COMMAND
            MTHD_DATA CTX_CONTROL;
    }
    Fecs = fecs {
        Model: INTR_SET CPU_CONTROL DMEM_CONTROL DMEM_DATA IMEM_CONTROL IMEM_DATA COMMAND_DATA COMMAND UNITS MAILBOX
            MAILBOX_SET MAILBOX_CLEAR CURRENT NEXT;
        Store: INTR_CLEAR INTR INTR_MISC BOOT_VECTOR HWCFG DMA_CONTROL VERSION IMEM_TAG CHANNEL_SWITCH RESET_LINES UCODE_INTR UCODE_ERROR;
    }
    Gpccs = gpccs {
        Model: DMEM_CONTROL DMEM_DATA IMEM_CONTROL IMEM_DATA;
        Store: CPU_CONTROL BOOT_VECTOR HWCFG DMA_CONTROL VERSION IMEM_TAG;
    }
    GpcUnits = gpc_units {
        Model: TPC_COUNT;
    }
    // The vGPU has no outputs. Display registers only store values, so that a driver detects no active display.
    Pvga = pvga {
        Store: CRTC SEQUENCER STATUS;
    }
    Pdisp = pdisp {
        Store: INSTANCE INTR CAPS VBIOS_IN_VRAM;
    }
}

/// Table entries of ranges without declared registers.
pub static RANGES: &[Range] = &[
    state(0),
    state(1),
    state(2),
    Range {
        name: "PROM",
        base: windows::prom::BASE,
        end: windows::prom::END,
        policy: Policy::Model,
        kind: RangeKind::Prom,
    },
    state(3),
    state(4),
    state(5),
    state(6),
    Range {
        name: "PRAMIN",
        base: windows::pramin::BASE,
        end: windows::pramin::END,
        policy: Policy::Translate,
        kind: RangeKind::Pramin,
    },
];

#[expect(clippy::indexing_slicing, reason = "evaluated at compile time")]
const fn state(index: usize) -> Range {
    let (name, base, end) = windows::STATE_RANGES[index];
    Range { name, base, end, policy: Policy::Store, kind: RangeKind::State }
}
