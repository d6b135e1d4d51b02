use crate::mmu::fixture::{
    PTE_ENCRYPTED, PTE_PRIVILEGED, PTE_READ_ONLY, PTE_SYSTEM, PTE_VALID, SYSTEM_BASE, Tables, vram,
};
use crate::mmu::{Access, AddressSpace, CopyFault, MmuFault};
use nvspec::addr::{GpuVa, Target};

fn fault(reason: u32, va: u64, write: bool) -> MmuFault {
    MmuFault { reason, va: GpuVa(va), write }
}

#[test]
fn directory_entry_without_tables_faults_with_0() {
    let tables = Tables::new();
    assert_eq!(tables.translate(0x1234_5678, false), Err(fault(0, 0x1234_5678, false)));
    assert_eq!(tables.translate(0x1234_5678, true), Err(fault(0, 0x1234_5678, true)));
}

#[test]
fn directory_that_nothing_answers_for_faults_with_0() {
    let mut tables = Tables::new();
    tables.space.directory = vram(1 << 36);
    assert_eq!(tables.translate(0x1000, false), Err(fault(0, 0x1000, false)));
    assert_eq!(tables.memory.lost(), 1);
}

#[test]
fn address_past_shortened_table_faults_with_1() {
    for (code, span) in [(1u64, 64u64 << 20), (2, 32 << 20), (3, 16 << 20)] {
        let mut tables = Tables::new();
        tables.small(span - 0x1000, PTE_VALID | 0x80_0000 >> 8);
        tables.small(span, PTE_VALID | 0x80_0000 >> 8);
        tables.large(0, 0);
        let entry = tables.read64(tables.space.directory);
        tables.write64(tables.space.directory, entry | code << 2);
        assert!(tables.translate(span - 1, false).is_ok());
        assert_eq!(tables.translate(span, false), Err(fault(1, span, false)));
    }
}

#[test]
fn entry_that_is_not_valid_faults_with_2() {
    let mut tables = Tables::new();
    tables.small(0x5000, PTE_VALID | 0x80_0000 >> 8);
    tables.large(0x4000_0000, !PTE_VALID);
    assert_eq!(tables.translate(0x6123, true), Err(fault(2, 0x6123, true)));
    assert_eq!(tables.translate(0x4000_0000, false), Err(fault(2, 0x4000_0000, false)));
}

#[test]
fn address_past_limit_faults_with_3_even_if_page_is_cached() {
    let mut tables = Tables::new();
    tables.small(0x5000, PTE_VALID | 0x80_0000 >> 8);
    tables.translate(0x5800, false).expect("cached from now on");
    tables.space.limit = GpuVa(0x57ff);
    assert_eq!(tables.translate(0x5000, false).expect("below the limit").bytes, 0x800);
    assert_eq!(tables.translate(0x5800, true), Err(fault(3, 0x5800, true)));
    let mut data = [0; 0x900];
    let split = tables.session().read(GpuVa(0x5000), &mut data);
    assert_eq!(split, Err(fault(3, 0x5800, false)));
    tables.space.limit = GpuVa(u64::MAX);
    assert_eq!(tables.translate(1 << 40, false), Err(fault(3, 1 << 40, false)), "beyond 40 bits");
    assert_eq!(tables.translate(u64::MAX, false), Err(fault(3, u64::MAX, false)));
}

#[test]
fn instance_block_without_directory_faults_with_4() {
    let tables = Tables::new();
    let unbound = fault(4, 0, false);
    tables.memory.write32(vram(0x30_0200), 0x1_0001).expect("write");
    assert_eq!(AddressSpace::from_instance(&tables.memory, (Target::Vram, 0x30_0000)), Err(unbound));
    assert_eq!(AddressSpace::from_instance(&tables.memory, (Target::Reserved, 0x30_0000)), Err(unbound));
    assert_eq!(AddressSpace::from_instance(&tables.memory, (Target::Vram, 1 << 37)), Err(unbound));
    assert_eq!(AddressSpace::from_instance(&tables.memory, (Target::SysCoherent, 0)), Err(unbound));
}

#[test]
fn privileged_page_faults_with_5_for_users() {
    let mut tables = Tables::new();
    tables.small(0x5000, PTE_VALID | PTE_PRIVILEGED | 0x80_0000 >> 8);
    assert_eq!(tables.translate(0x5004, false), Err(fault(5, 0x5004, false)));
    let privileged = tables.mmu.translate(&tables.memory, &tables.space, GpuVa(0x5004), true, Access::PRIVILEGED);
    assert_eq!(privileged.expect("may").address, vram(0x80_0004));
    assert_eq!(tables.translate(0x5004, true), Err(fault(5, 0x5004, true)), "cached, but still rejected");
}

#[test]
fn write_to_a_read_only_page_faults_with_6() {
    let mut tables = Tables::new();
    tables.large(0, PTE_VALID | PTE_READ_ONLY | 0x80_0000 >> 8);
    assert!(tables.translate(0x1_2345, false).is_ok());
    assert_eq!(tables.translate(0x1_2345, true), Err(fault(6, 0x1_2345, true)));
}

#[test]
fn compressed_kind_in_host_memory_faults_with_0xa() {
    let mut tables = Tables::new();
    let frame = SYSTEM_BASE >> 8;
    tables.small(0x1000, PTE_VALID | PTE_SYSTEM | frame | 0xdb << 36);
    tables.small(0x2000, PTE_VALID | PTE_SYSTEM | frame | 0xfe << 36);
    tables.small(0x3000, PTE_VALID | 0x80_0000 >> 8 | 0xdb << 36);
    assert_eq!(tables.translate(0x1000, false), Err(fault(0xa, 0x1000, false)));
    assert!(tables.translate(0x2000, true).is_ok(), "the same kind without compression");
    assert!(tables.translate(0x3000, true).is_ok(), "in VRAM");
}

#[test]
fn memory_of_another_card_faults_with_0xa() {
    let mut tables = Tables::new();
    tables.small(0x1000, PTE_VALID | 1 << 33);
    assert_eq!(tables.translate(0x1000, true), Err(fault(0xa, 0x1000, true)));
}

#[test]
fn kind_that_does_not_exist_and_encryption_fault_with_0xc() {
    let mut tables = Tables::new();
    tables.small(0x1000, PTE_VALID | 0x80_0000 >> 8 | 0xff << 36);
    tables.small(0x2000, PTE_VALID | 0x80_0000 >> 8 | 0x06 << 36);
    tables.small(0x3000, PTE_VALID | PTE_ENCRYPTED | 0x80_0000 >> 8);
    for va in [0x1000, 0x2000, 0x3000] {
        assert_eq!(tables.translate(va, false), Err(fault(0xc, va, false)));
    }
}

#[test]
fn access_stops_at_the_first_byte_of_the_page_that_faults() {
    let mut tables = Tables::new();
    tables.small(0x1000, PTE_VALID | 0x80_0000 >> 8);
    tables.small(0x2000, PTE_VALID | PTE_READ_ONLY | 0x81_0000 >> 8);
    assert_eq!(tables.session().write(GpuVa(0x1f00), &[7; 0x200]), Err(fault(6, 0x2000, true)));
    assert_eq!(tables.bytes(0x1f00, 0x100), [7; 0x100]);
    assert_eq!(tables.bytes(0x2000, 0x100), [0; 0x100]);
    assert_eq!(tables.session().read(GpuVa(0x2ff0), &mut [0; 0x20]), Err(fault(2, 0x3000, false)));
    assert_eq!(tables.session().write32(GpuVa(0x1ffe), 0xffff_ffff), Err(fault(6, 0x2000, true)));
    let copied = CopyFault { copied: 0x80, fault: fault(6, 0x2000, true) };
    assert_eq!(tables.session().copy(GpuVa(0x1000), GpuVa(0x1f80), 0x100), Err(copied));
    let copied = CopyFault { copied: 0x10, fault: fault(2, 0x3000, false) };
    assert_eq!(tables.session().copy(GpuVa(0x2ff0), GpuVa(0x1000), 0x100), Err(copied));
}

#[test]
fn faults_are_not_kept() {
    let mut tables = Tables::new();
    assert!(tables.translate(0x1000, false).is_err());
    tables.small(0x1000, PTE_VALID | 0x80_0000 >> 8);
    assert_eq!(tables.translate(0x1000, false).expect("mapped now").address, vram(0x80_0000));
}
