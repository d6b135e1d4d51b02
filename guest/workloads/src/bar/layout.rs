//! Registers and memory formats used by the attacks. Sources: envytools' `rnndb`, and nouveau. [`gdev::nouveau::push`]
//! explains why they do not come from `nvspec`.

/// Offsets and values of the instance block dwords that are the same for every channel.
pub const RAMFC: [(u64, u32); 11] = [
    (0x10, 0x0000_face),
    (0x30, 0xffff_f902),
    (0x84, 0x2040_0000),
    (0x94, 0x3000_0001),
    (0x9c, 0x0000_0100),
    (0xa4, 0x1f1f_1f1f),
    (0xa8, 0x1f1f_1f1f),
    (0xac, 0x0000_001f),
    (0xb8, 0xf800_0000),
    (0xf8, 0x1000_3080),
    (0xfc, 0x1000_0010),
];

/// Register offsets in BAR0.
pub mod reg {
    /// Chip ID.
    pub const BOOT0: u32 = 0x000000;
    /// Mask of enabled engines.
    pub const PMC_ENABLE: u32 = 0x000200;
    /// Mask of enabled PBDMAs.
    pub const PBDMA_ENABLE: u32 = 0x000204;
    /// Bus interrupts. Write 1 to clear.
    pub const PBUS_INTR: u32 = 0x001100;
    /// Address of the PRAMIN window >> 16, with the target in bits 25:24.
    pub const PRAMIN_WINDOW: u32 = 0x001700;
    /// Instance block of BAR1: valid bit 31, target in bits 29:28, address >> 12 in the remaining bits.
    pub const BAR1_INSTANCE: u32 = 0x001704;
    /// Instance block of BAR3, in the same format.
    pub const BAR3_INSTANCE: u32 = 0x001714;
    /// Instance block of the peephole, in the same format.
    pub const PEEPHOLE_INSTANCE: u32 = 0x001718;
    /// PFIFO interrupts. Write 1 to clear.
    pub const PFIFO_INTR: u32 = 0x002100;
    /// Bit 0 enables the scheduler.
    pub const PFIFO_ENABLE: u32 = 0x002200;
    /// Mask of PBDMAs enabled in PFIFO.
    pub const PFIFO_PBDMAS: u32 = 0x002204;
    /// Mask of PBDMAs that do not serve an engine, one register for each of six engines.
    pub const PFIFO_ROUTE: u32 = 0x002208;
    /// BAR1 address of the USERD pages >> 12, with the valid flag in bit 28.
    pub const USERD_BASE: u32 = 0x002254;
    /// Address of a runlist >> 12, with the target in bits 29:28.
    pub const RUNLIST: u32 = 0x002270;
    /// Length of the runlist in entries. A write submits the runlist.
    pub const RUNLIST_SUBMIT: u32 = 0x002274;
    /// Mask of engines excluded from scheduling.
    pub const SCHED_DISABLE: u32 = 0x002630;
    /// Preempts a channel.
    pub const PREEMPT: u32 = 0x002634;
    /// Channel table, with two registers (8 bytes) per channel.
    pub const CHANNEL: u32 = 0x003000;
    /// State of channel 0, in the second register of its pair.
    pub const CHANNEL_STATE: u32 = 0x003004;
    /// Bit 0 enables the interrupt of PTIMER's alarm.
    pub const PTIMER_INTR_EN: u32 = 0x009140;
    /// Low half of the alarm time.
    pub const PTIMER_ALARM: u32 = 0x009420;
    /// Masks of the units that can interrupt the CPU. All units are enabled after POST.
    pub const INTR_MASKS: [u32; 2] = [0x000640, 0x000644];
    pub const PTIMER_LOW: u32 = 0x009400;
    /// High half of PTIMER's time.
    pub const PTIMER_HIGH: u32 = 0x009410;
    /// Number of memory partitions.
    pub const FBP_COUNT: u32 = 0x022438;
    /// Mask of disabled partitions.
    pub const FBP_DISABLED: u32 = 0x022554;
    /// Size of partition 0 in MiB. Partitions are 0x1000 apart.
    pub const FBP_MIB: u32 = 0x11020c;
    /// Interrupts of PBDMA 0. PBDMAs are 0x2000 apart.
    pub const PBDMA_INTR: u32 = 0x040108;
    /// Enabled interrupts of PBDMA 0.
    pub const PBDMA_INTR_ENABLE: u32 = 0x04010c;
    /// Peephole: high address, low address, and data.
    pub const PEEPHOLE: [u32; 3] = [0x06000c, 0x060010, 0x060014];
    /// Flushes CPU writes through a BAR.
    pub const BAR_FLUSH: u32 = 0x070000;
    /// Guest RAM address that the card's flushes write, >> 8.
    pub const SYSMEM_FLUSH: u32 = 0x100c10;
    /// Page directory to flush: (address >> 12) << 4, with the target in bits 1:0.
    pub const TLB_DIRECTORY: u32 = 0x100cb8;
    /// Triggers a TLB flush.
    pub const TLB_TRIGGER: u32 = 0x100cbc;
    /// Current channel of a copy engine.
    pub const CE_CHANNEL: [u32; 2] = [0x104050, 0x105050];
    /// DMA registers of the first copy engine's falcon: base >> 8, offset in the falcon's memory, command, and offset
    /// from the base.
    pub const CE_DMA: [u32; 4] = [0x104110, 0x104114, 0x104118, 0x10411c];
    /// Base address of the compression tag memory.
    pub const TAG_BASE: u32 = 0x17e8d4;
    /// FECS data register. Command 1 makes the channel in this register current.
    pub const FECS_DATA: u32 = 0x409500;
    /// FECS command register.
    pub const FECS_COMMAND: u32 = 0x409504;
    /// Current and next channels of FECS.
    pub const FECS_CHANNELS: [u32; 2] = [0x409b00, 0x409b04];
    /// Addresses to which invalid accesses are redirected, >> 8.
    pub const GPC_MMU_SINKS: [u32; 2] = [0x4188b4, 0x4188b8];
    /// The PRAMIN window to VRAM, 1 MiB.
    pub const PRAMIN: u32 = 0x700000;
}

/// Number of channels.
pub const CHANNELS: u32 = 128;
/// Size of a small page in bytes.
pub const PAGE: u64 = 4096;
/// Size of a large page in bytes.
pub const LARGE_PAGE: u64 = 128 << 10;

/// Memory type to which a page table entry or a pointer refers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aperture {
    /// The card's VRAM.
    Vram,
    /// Another card's memory.
    Peer,
    /// Guest RAM with snooping.
    Coherent,
    /// Guest RAM without snooping.
    Noncoherent,
}

impl Aperture {
    /// Returns bits 34:33 of a page table entry.
    fn of_page(self) -> u32 {
        self as u32
    }

    /// Returns bits 1:0 of a table pointer in a page directory entry. A pointer without a table is 0.
    fn of_table(self) -> u32 {
        match self {
            Self::Vram | Self::Peer => 1,
            Self::Coherent => 2,
            Self::Noncoherent => 3,
        }
    }
}

/// Returns the low and high dwords of a valid page table entry.
pub fn page_entry(address: u64, aperture: Aperture) -> [u32; 2] {
    // Map guest RAM as volatile, as nouveau does.
    let volatile = u32::from(aperture != Aperture::Vram);
    [(address >> 8) as u32 & 0xffff_fff0 | 1, volatile | aperture.of_page() << 1]
}

/// Returns the low and high dwords of a page directory entry with a large-page and a small-page table.
pub fn directory_entry(large: Option<(u64, Aperture)>, small: Option<(u64, Aperture)>) -> [u32; 2] {
    let half = |table: Option<(u64, Aperture)>| {
        table.map_or(0, |(address, aperture)| (address >> 8) as u32 & 0xffff_fff0 | aperture.of_table())
    };
    [half(large), half(small)]
}

/// Returns the value of a register that points to an instance block.
pub fn instance_pointer(address: u64, target: u32) -> u32 {
    0x8000_0000 | (target & 3) << 28 | (address >> 12) as u32 & 0x0fff_ffff
}

/// Offsets of the attacks' own structures, relative to a VRAM base address.
pub mod own {
    /// Instance block of BAR1.
    pub const BAR1_INSTANCE: u64 = 0x0000;
    /// Instance block of BAR3.
    pub const BAR3_INSTANCE: u64 = 0x1000;
    /// Instance block of the channel.
    pub const INSTANCE: u64 = 0x2000;
    /// The runlist.
    pub const RUNLIST: u64 = 0x3000;
    /// The GPFIFO ring.
    pub const RING: u64 = 0x4000;
    /// The push buffer.
    pub const PUSH: u64 = 0x5000;
    /// A data page.
    pub const DATA: u64 = 0x6000;
    /// USERD of the channel.
    pub const USERD: u64 = 0x7000;
    /// Page directories of BAR1, BAR3 and the channel, 64 KiB each.
    pub const DIRECTORIES: [u64; 3] = [0x1_0000, 0x2_0000, 0x3_0000];
    /// Small-page tables of BAR1, BAR3 and the channel, 256 KiB each.
    pub const TABLES: [u64; 3] = [0x4_0000, 0x8_0000, 0xc_0000];
    /// A large-page table of BAR1, 8 KiB.
    pub const LARGE_TABLE: u64 = 0x10_0000;
    /// End of all structures.
    pub const END: u64 = 0x11_0000;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_the_hardwares() {
        assert_eq!(page_entry(0x1234_5000, Aperture::Vram), [0x0012_3451, 0]);
        assert_eq!(page_entry(0xff_ffff_f000, Aperture::Coherent), [0xffff_fff1, 0b101]);
        assert_eq!(page_entry(0x1000, Aperture::Noncoherent), [0x11, 0b111]);
        assert_eq!(page_entry(0x1000, Aperture::Peer), [0x11, 0b011]);
        assert_eq!(directory_entry(None, Some((0x40_0000, Aperture::Vram))), [0, 0x4001]);
        let both = directory_entry(Some((0x1_0000, Aperture::Vram)), Some((0x2_0000, Aperture::Coherent)));
        assert_eq!(both, [0x101, 0x202]);
        assert_eq!(instance_pointer(0x40_0000, 0), 0x8000_0400);
        assert_eq!(instance_pointer(0x40_0000, 3), 0xb000_0400);
    }
}
