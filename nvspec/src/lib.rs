//! Hardware definitions of NVIDIA's Fermi GPUs: registers, bits, fields and constants, without behaviour.
//!
//! Hardware offsets and bits are defined only in this crate. The software card, the virtual device model and the
//! mediation crates all use it.
//!
//! Modules:
//! - [`regs`]: BAR0 registers by block, in address order, declared with `regs!`;
//! - [`addr`]: address newtypes, one per address space;
//! - [`mmu`]: page directory and page table entries;
//! - [`instance`]: the instance block with RAMFC, and USERD;
//! - [`fifo`]: GPFIFO entries, method headers, runlist entries, host methods;
//! - [`class`]: object classes and their methods;
//! - [`chip`]: table of known chips.
//!
//! Not included: Kepler (its registers are declared with its card), display registers that drivers do not access on a
//! card without outputs, video decoding engines, and textures.
//!
//! Sources: the register database and documentation of envytools (`rnndb`, `hwdocs`), the behaviour of Linux's nouveau
//! driver (6.1 and 6.12), and NVIDIA's published class headers. Only facts were taken from these sources. Names are
//! NVIDIA's where public.

#![no_std]
#![forbid(unsafe_code)]

pub mod addr;
pub mod chip;
pub mod class;
pub mod falcon;
pub mod fifo;
pub mod instance;
pub mod mmu;
#[macro_use]
mod declare;
pub mod regs;

pub use declare::{Access, Field, NamedField, RegInfo};

#[cfg(test)]
mod tests {
    use super::regs::{self, pfifo, pmc};
    use super::{Field, fifo, mmu};

    #[test]
    fn field_with_replaces_only_its_bits() {
        let field = Field::new(11, 4);
        assert_eq!(field.with(0xffff_ffff, 0x12), 0xffff_f12f);
        assert_eq!(field.get(0xffff_f12f), 0x12);
        assert_eq!(Field::new(31, 0).mask(), u32::MAX);
    }

    #[test]
    fn decode_finds_interleaved_arrays() {
        assert_eq!(pfifo::decode(0x3000 + 8 * 5), Some((pfifo::Reg::CHANNEL, 5)));
        assert_eq!(pfifo::decode(0x3004 + 8 * 127), Some((pfifo::Reg::CHANNEL_STATE, 127)));
        assert_eq!(pfifo::decode(0x3400), None);
        assert_eq!(pmc::decode(0x100), Some((pmc::Reg::INTR_0, 0)));
        assert_eq!(pmc::decode(0xffc), None);
    }

    #[test]
    fn lookup_names_every_declared_register() {
        for (block, _, _, info) in regs::blocks() {
            for reg in *info {
                let last = reg.offset + (reg.count - 1) * reg.stride;
                let (found, named, index) = regs::lookup(last).expect("declared");
                assert_eq!((found, named.name, index), (*block, reg.name, reg.count - 1));
            }
        }
    }

    #[test]
    fn page_table_entry_fields_stand_where_the_hardware_has_them() {
        let pte = mmu::Pte::new()
            .with_valid(true)
            .with_frame(0x123_4567)
            .with_aperture(mmu::PteAperture::SysCoherent)
            .with_volatile(true)
            .with_kind(0xfe);
        assert_eq!(u64::from(pte), 1 | (0x123_4567 << 4) | (1 << 32) | (2 << 33) | (0xfe << 36));
        assert_eq!(pte.address(), 0x12_3456_7000);
        let pde = mmu::Pde::from((u64::from(1u32 | (2 << 4))) | (3 << 32) | (5 << 36));
        assert_eq!((pde.large_target(), pde.large_address()), (mmu::TableTarget::Vram, 0x2000));
        assert_eq!((pde.small_target(), pde.small_address()), (mmu::TableTarget::SysNonCoherent, 0x5000));
    }

    #[test]
    fn the_hosts_addresses_are_those_of_the_last_directory_entry() {
        assert_eq!(mmu::HOST_VA_BASE.0, 0xff_f800_0000);
        assert_eq!(mmu::HOST_VA_BASE.0 >> mmu::PDE_SHIFT, 8191);
    }

    #[test]
    fn fifo_formats_stand_where_the_hardware_has_them() {
        let entry = fifo::GpEntry::from(0x8000_1234_5678_9abcu64 & !3);
        assert_eq!(entry.address(), 0x34_5678_9abc);
        assert_eq!(entry.dwords(), (0x8000_1234u32 >> 10) & 0x1f_ffff);
        assert!(entry.sync());
        let flags = |bits: u64| {
            let entry = fifo::GpEntry::from(bits);
            (entry.conditional(), entry.no_context_switch(), entry.privileged(), entry.not_main())
        };
        assert_eq!(flags(1), (true, false, false, false));
        assert_eq!(flags(2), (false, true, false, false));
        assert_eq!(flags(1 << 40), (false, false, true, false));
        assert_eq!(flags(1 << 41), (false, false, false, true));
        assert_eq!(fifo::GpEntry::from(3 << 32).opcode(), fifo::gp_opcode::PB_CRC);
        assert_eq!(fifo::GpEntry::from(0x80_0000_0000).opcode(), 0x80);
        let header = fifo::MethodHeader::from(0x2001_8048);
        assert_eq!(
            (header.op(), header.count(), header.subchannel(), header.method()),
            (fifo::HeaderOp::Increasing, 1, 4, 0x120)
        );
        assert_eq!(header, fifo::MethodHeader::to(fifo::HeaderOp::Increasing, 4, 0x120, 1));
    }
}
