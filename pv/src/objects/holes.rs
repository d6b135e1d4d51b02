//! Tests for the holes in GPUvm's paravirtual interface, with the numbers from our study of its code.

use super::*;
use crate::abi::{BatchHeader, Entries, MAX_BATCH_OPS, OpHeader, op};
use crate::batch::Batch;
use crate::raw::Problem;
use zerocopy::IntoBytes;

const MIB: u64 = 1 << 20;
const BASE: GuestVramAddr = GuestVramAddr(64 * MIB);
const DIRECTORY: u32 = 1;
const SMALL_TABLE: u32 = 2;
const LARGE_TABLE: u32 = 3;
const PTE: u64 = 0x1234_5678_9abc_def1;

fn id(handle: u32) -> TableId {
    TableId::new(handle).unwrap()
}

/// Creates one table of each type, with the handles above. `spare` bytes remain below the limit.
fn tables(spare: u64) -> Tables {
    let limit = Kind::ALL.map(Kind::bytes).iter().sum::<u64>() + spare;
    let mut tables = Tables::new(BASE, limit);
    tables.create(id(DIRECTORY), Kind::Directory).unwrap();
    tables.create(id(SMALL_TABLE), Kind::Small).unwrap();
    tables.create(id(LARGE_TABLE), Kind::Large).unwrap();
    tables.take_written(|_, _| {});
    tables
}

fn entry(tables: &Tables, table: GuestVramAddr, index: u64) -> Result<u64, NoTable> {
    let mut bytes = [0xaa; 8];
    tables.read(table.offset(index * 8), &mut bytes).map(|()| u64::from_le_bytes(bytes))
}

fn pde(tables: &Tables, index: u64) -> Pde {
    entry(tables, tables.address(id(DIRECTORY)).unwrap(), index).unwrap().into()
}

fn written(tables: &mut Tables) -> Vec<(u64, u64)> {
    let mut ranges = Vec::new();
    tables.take_written(|address, bytes| ranges.push((address.0 - BASE.0, bytes)));
    ranges
}

/// Hole 13: a directory could be bound to any address given by the guest.
#[test]
fn hole_13_a_directory_is_bound_to_blocks_in_guest_vram_only() {
    let mut tables = tables(0);
    let last = GuestVramAddr(BASE.0 - 0x1000);
    assert_eq!(tables.bind(id(DIRECTORY), last), Ok(()));
    for beyond in [BASE, GuestVramAddr(BASE.0 + 0x1000), GuestVramAddr(!0xfff)] {
        assert_eq!(tables.bind(id(DIRECTORY), beyond), Err(Status::Range));
        assert_eq!(tables.directory_of(beyond), None);
    }
    assert_eq!(tables.directory_of(last), tables.address(id(DIRECTORY)).ok());
}

/// Hole 13: the number of bindings was unlimited.
#[test]
fn hole_13_bindings_are_limited() {
    let mut tables = tables(0);
    for nth in 0..MAX_BINDINGS as u64 {
        tables.bind(id(DIRECTORY), GuestVramAddr(nth * 0x1000)).unwrap();
    }
    let next = GuestVramAddr(MAX_BINDINGS as u64 * 0x1000);
    assert_eq!(tables.bind(id(DIRECTORY), next), Err(Status::Limit));
    assert_eq!(tables.bind(id(DIRECTORY), GuestVramAddr(0)), Ok(()), "a bound block must accept another directory");
    assert!(tables.unbind(GuestVramAddr(0)));
    assert_eq!(tables.bind(id(DIRECTORY), next), Ok(()));
}

/// Hole 14: entries beyond the end of a table could be written.
#[test]
fn hole_14_writes_past_table_end_are_rejected() {
    let mut tables = tables(0);
    for (table, entries) in [(SMALL_TABLE, 32768), (LARGE_TABLE, 1024)] {
        assert_eq!(tables.run(id(table), entries - 1, 1, PTE, 0), Ok(()));
        written(&mut tables);
        assert_eq!(tables.run(id(table), entries, 1, PTE, 0), Err(Status::Range));
        assert_eq!(tables.run(id(table), entries - 1, 2, PTE, 0), Err(Status::Range));
        assert_eq!(tables.run(id(table), 1, entries, PTE, 0), Err(Status::Range));
        assert_eq!(tables.list(id(table), entries, &[U64::new(PTE)]), Err(Status::Range));
        assert_eq!(tables.zero(id(table), entries - 1, 2), Err(Status::Range));
        assert_eq!(written(&mut tables), [], "part of the entries were written");
    }
    assert_eq!(tables.set(id(DIRECTORY), 8192, None, None), Err(Status::Range));
    assert_eq!(tables.set(id(DIRECTORY), 8192, Some(id(SMALL_TABLE)), None), Err(Status::Range));
    assert_eq!(tables.set(id(DIRECTORY), u32::MAX, Some(id(SMALL_TABLE)), None), Err(Status::Range));
}

/// Hole 15: a table could be used as a directory, and vice versa.
#[test]
fn hole_15_types_are_not_confused() {
    let mut tables = tables(0);
    for table in [SMALL_TABLE, LARGE_TABLE] {
        assert_eq!(tables.bind(id(table), GuestVramAddr(0)), Err(Status::WrongType));
        assert_eq!(tables.set(id(table), 0, None, None), Err(Status::WrongType));
        assert_eq!(tables.address(id(table)), Err(Status::WrongType));
    }
    for (small, large) in [
        (Some(DIRECTORY), None),
        (Some(LARGE_TABLE), None),
        (None, Some(DIRECTORY)),
        (None, Some(SMALL_TABLE)),
        (Some(SMALL_TABLE), Some(SMALL_TABLE)),
    ] {
        let named = tables.set(id(DIRECTORY), 0, small.map(id), large.map(id));
        assert_eq!(named, Err(Status::WrongType));
        assert_eq!(pde(&tables, 0), Pde::new());
    }
    assert_eq!(tables.run(id(DIRECTORY), 0, 1, PTE, 0), Err(Status::WrongType));
    assert_eq!(tables.list(id(DIRECTORY), 0, &[U64::new(PTE)]), Err(Status::WrongType));
    assert_eq!(tables.zero(id(DIRECTORY), 0, 1), Err(Status::WrongType));
    assert_eq!(written(&mut tables), []);
}

/// Hole 15: a directory entry must refer to exactly the tables given in the request.
#[test]
fn hole_15_entry_refers_to_the_given_tables() {
    let mut tables = tables(0);
    tables.run(id(SMALL_TABLE), 7, 1, PTE, 0).unwrap();
    tables.run(id(LARGE_TABLE), 8, 1, !PTE, 0).unwrap();
    tables.set(id(DIRECTORY), 5, Some(id(SMALL_TABLE)), Some(id(LARGE_TABLE))).unwrap();
    let set = pde(&tables, 5);
    assert_eq!((set.small_target(), set.large_target(), set.large_size()), (TableTarget::Vram, TableTarget::Vram, 0));
    assert_eq!(entry(&tables, GuestVramAddr(set.small_address()), 7), Ok(PTE));
    assert_eq!(entry(&tables, GuestVramAddr(set.large_address()), 8), Ok(!PTE));
    tables.set(id(DIRECTORY), 5, None, Some(id(LARGE_TABLE))).unwrap();
    assert_eq!(pde(&tables, 5).small_target(), TableTarget::None);
}

/// Hole 16: a table was freed while a directory still referred to it.
#[test]
fn hole_16_table_lives_while_a_directory_refers_to_it() {
    let mut tables = tables(0);
    tables.run(id(SMALL_TABLE), 0, 1, PTE, 0).unwrap();
    tables.set(id(DIRECTORY), 0, Some(id(SMALL_TABLE)), None).unwrap();
    tables.set(id(DIRECTORY), 1, Some(id(SMALL_TABLE)), None).unwrap();
    let table = GuestVramAddr(pde(&tables, 0).small_address());
    tables.destroy(id(SMALL_TABLE)).unwrap();
    assert_eq!(tables.destroy(id(SMALL_TABLE)), Err(Status::NoObject));
    assert_eq!(tables.run(id(SMALL_TABLE), 0, 1, PTE, 0), Err(Status::NoObject));
    assert_eq!((entry(&tables, table, 0), tables.bytes_left()), (Ok(PTE), 0));
    tables.set(id(DIRECTORY), 0, None, None).unwrap();
    assert_eq!(entry(&tables, table, 0), Ok(PTE), "another entry still refers to the table");
    written(&mut tables);
    tables.set(id(DIRECTORY), 1, None, None).unwrap();
    assert_eq!((entry(&tables, table, 0), tables.bytes_left()), (Err(NoTable), Kind::Small.bytes()));
    let gone = (table.0 - BASE.0, Kind::Small.bytes());
    assert!(written(&mut tables).contains(&gone), "the removal was not reported as a write");
}

/// Hole 16: a directory was freed while an address space still used it.
#[test]
fn hole_16_bound_directory_and_tables_survive_destroy() {
    let mut tables = tables(0);
    let [first, second] = [GuestVramAddr(0x1000), GuestVramAddr(0x2000)];
    tables.set(id(DIRECTORY), 0, Some(id(SMALL_TABLE)), Some(id(LARGE_TABLE))).unwrap();
    tables.bind(id(DIRECTORY), first).unwrap();
    tables.bind(id(DIRECTORY), second).unwrap();
    for handle in [DIRECTORY, SMALL_TABLE, LARGE_TABLE] {
        tables.destroy(id(handle)).unwrap();
    }
    let directory = tables.directory_of(first).unwrap();
    let small = Pde::from(entry(&tables, directory, 0).unwrap()).small_address();
    assert_eq!(entry(&tables, GuestVramAddr(small), 0), Ok(0));
    assert!(tables.unbind(first));
    assert!(!tables.unbind(first));
    assert_eq!(entry(&tables, GuestVramAddr(small), 0), Ok(0), "another block is still bound");
    assert!(tables.unbind(second));
    assert_eq!(entry(&tables, directory, 0), Err(NoTable));
    assert_eq!(entry(&tables, GuestVramAddr(small), 0), Err(NoTable));
    assert_eq!(tables.counts(), Counts::default());
}

/// Hole 16: setting an entry to its previous value must be possible.
#[test]
fn hole_16_naming_table_again_does_not_free_it() {
    let mut tables = tables(0);
    tables.set(id(DIRECTORY), 0, Some(id(SMALL_TABLE)), None).unwrap();
    tables.destroy(id(SMALL_TABLE)).unwrap();
    let small = GuestVramAddr(pde(&tables, 0).small_address());
    tables.bind(id(DIRECTORY), GuestVramAddr(0)).unwrap();
    tables.bind(id(DIRECTORY), GuestVramAddr(0)).unwrap();
    tables.destroy(id(DIRECTORY)).unwrap();
    assert_eq!(entry(&tables, small, 0), Ok(0));
    assert!(tables.unbind(GuestVramAddr(0)));
    assert_eq!(entry(&tables, small, 0), Err(NoTable));
    let mut tables = self::tables(0);
    tables.set(id(DIRECTORY), 0, Some(id(SMALL_TABLE)), None).unwrap();
    tables.set(id(DIRECTORY), 0, Some(id(SMALL_TABLE)), None).unwrap();
    tables.set(id(DIRECTORY), 0, None, None).unwrap();
    assert_eq!(tables.run(id(SMALL_TABLE), 0, 1, PTE, 0), Ok(()), "the table still has a handle");
}

/// Hole 16: the size of tables was unlimited.
#[test]
fn hole_16_tables_count_at_full_size_against_limit() {
    let mut tables = tables(Kind::Large.bytes());
    assert_eq!(tables.create(id(10), Kind::Small), Err(Status::Limit));
    assert_eq!(tables.create(id(10), Kind::Large), Ok(()));
    assert_eq!(tables.create(id(11), Kind::Large), Err(Status::Limit));
    assert_eq!((tables.bytes_left(), tables.counts().resident_bytes), (0, 0), "empty tables use no memory");
    tables.destroy(id(10)).unwrap();
    assert_eq!(tables.create(id(SMALL_TABLE), Kind::Large), Err(Status::Exists));
    assert_eq!(tables.create(id(11), Kind::Large), Ok(()));
}

/// Hole 16: the addresses of tables were unlimited.
#[test]
fn hole_16_table_space_ends_where_entries_of_directories_end() {
    let mut tables = Tables::new(GuestVramAddr((1 << 40) - SLOT_BYTES), u64::MAX);
    tables.create(id(1), Kind::Directory).unwrap();
    assert_eq!(tables.create(id(2), Kind::Large), Err(Status::Limit));
    for base in [1 << 40, u64::MAX - 0x1000, u64::MAX] {
        let mut tables = Tables::new(GuestVramAddr(base), u64::MAX);
        assert_eq!(tables.create(id(1), Kind::Large), Err(Status::Limit));
        assert_eq!((tables.bytes_left(), tables.counts()), (u64::MAX, Counts::default()));
    }
}

/// Hole 17: new tables contained entries of previous tables.
#[test]
fn hole_17_a_new_table_is_empty() {
    let mut tables = tables(0);
    tables.run(id(SMALL_TABLE), 0, 32768, PTE, 0x1001).unwrap();
    tables.set(id(DIRECTORY), 0, Some(id(SMALL_TABLE)), None).unwrap();
    let place = GuestVramAddr(pde(&tables, 0).small_address());
    tables.set(id(DIRECTORY), 0, None, None).unwrap();
    tables.destroy(id(SMALL_TABLE)).unwrap();
    written(&mut tables);
    tables.create(id(SMALL_TABLE), Kind::Small).unwrap();
    tables.set(id(DIRECTORY), 0, Some(id(SMALL_TABLE)), None).unwrap();
    assert_eq!(pde(&tables, 0).small_address(), place.0, "the slot must be reused");
    let mut all = vec![0xaa; 256 << 10];
    tables.read(place, &mut all).unwrap();
    assert!(all.iter().all(|byte| *byte == 0));
    assert!(written(&mut tables).contains(&(place.0 - BASE.0, 256 << 10)));
}

/// Hole 17: a smaller table reuses the slot of a larger table.
#[test]
fn hole_17_shorter_table_exposes_no_old_entries_past_its_end() {
    let mut tables = tables(0);
    tables.run(id(SMALL_TABLE), 0, 32768, PTE, 0).unwrap();
    tables.set(id(DIRECTORY), 0, Some(id(SMALL_TABLE)), None).unwrap();
    let place = GuestVramAddr(pde(&tables, 0).small_address());
    tables.set(id(DIRECTORY), 0, None, None).unwrap();
    tables.destroy(id(SMALL_TABLE)).unwrap();
    tables.create(id(SMALL_TABLE), Kind::Large).unwrap();
    assert_eq!(entry(&tables, place, 1023), Ok(0));
    assert_eq!(entry(&tables, place, 1024), Err(NoTable));
    assert_eq!(tables.read(GuestVramAddr(place.0 + 1023 * 8), &mut [0; 9]), Err(NoTable));
}

/// Hole 17: tables kept their contents across a reset.
#[test]
fn hole_17_a_reset_leaves_nothing() {
    let mut tables = tables(0);
    tables.run(id(SMALL_TABLE), 0, 32768, PTE, 0).unwrap();
    tables.set(id(DIRECTORY), 0, Some(id(SMALL_TABLE)), Some(id(LARGE_TABLE))).unwrap();
    tables.bind(id(DIRECTORY), GuestVramAddr(0)).unwrap();
    let directory = tables.address(id(DIRECTORY)).unwrap();
    let before = tables.limit;
    written(&mut tables);
    tables.clear();
    assert_eq!((tables.counts(), tables.bytes_left()), (Counts::default(), before));
    assert_eq!((tables.directory_of(GuestVramAddr(0)), entry(&tables, directory, 0)), (None, Err(NoTable)));
    assert_eq!(
        written(&mut tables),
        [(0, 0x1_0000), (0x4_0000, 0x4_2000)],
        "the ranges of two tables must be reported"
    );
    tables.create(id(SMALL_TABLE), Kind::Small).unwrap();
    tables.create(id(DIRECTORY), Kind::Directory).unwrap();
    tables.set(id(DIRECTORY), 0, Some(id(SMALL_TABLE)), None).unwrap();
    assert_eq!(entry(&tables, GuestVramAddr(pde(&tables, 0).small_address()), 0), Ok(0));
}

/// Hole 18: indices could overflow.
#[test]
fn hole_18_indices_and_counts_do_not_wrap() {
    let mut tables = tables(0);
    for (first, count) in [(0x1fff_ffff, 1), (0x2000_0000, 1), (u32::MAX, 1), (1, u32::MAX), (u32::MAX, u32::MAX)] {
        assert_eq!(tables.run(id(SMALL_TABLE), first, count, PTE, 0), Err(Status::Range));
        assert_eq!(tables.zero(id(SMALL_TABLE), first, count), Err(Status::Range));
    }
    for index in [0x1fff_ffff, 0x2000_0000, u32::MAX] {
        assert_eq!(tables.set(id(DIRECTORY), index, Some(id(SMALL_TABLE)), None), Err(Status::Range));
    }
    assert_eq!(tables.list(id(SMALL_TABLE), u32::MAX, &[U64::new(PTE); 2]), Err(Status::Range));
    assert_eq!((written(&mut tables), tables.counts().resident_bytes), (vec![], 0));
}

/// Hole 18: a count could exceed the size of the request.
#[test]
fn hole_18_a_list_ends_where_the_batch_ends() {
    let list = |units: u16, count: u32| {
        let mut batch = BatchHeader { ops: 1, bytes: 32 }.as_bytes().to_vec();
        batch.extend_from_slice(OpHeader { code: op::ENTRIES_LIST, units, handle: SMALL_TABLE }.as_bytes());
        batch.extend_from_slice(Entries { first: 0, count }.as_bytes());
        batch.extend_from_slice(&[PTE; 64].map(u64::to_le_bytes).concat());
        Batch::parse(&batch).map(|_| ()).map_err(|malformed| malformed.problem)
    };
    assert_eq!(list(4, 2), Ok(()));
    for count in [0, 1, 3, 128, 0x1fff_ffff, 0x2000_0000, 0x2000_0002, u32::MAX] {
        assert_eq!(list(4, count), Err(Problem::Size { code: op::ENTRIES_LIST, bytes: 24 }));
    }
    assert_eq!(list(5, 3), Err(Problem::Outside(5)));
    assert_eq!(list(u16::MAX, u32::MAX), Err(Problem::Outside(u16::MAX)));
    assert_eq!(list(0, 0), Err(Problem::Outside(0)));
    assert_eq!(MAX_BATCH_OPS, 1024);
}

/// Hole 19: a channel could be used without a bound directory.
#[test]
fn hole_19_a_block_that_was_not_bound_has_no_directory() {
    let mut tables = tables(0);
    assert_eq!(tables.directory_of(GuestVramAddr(0x1000)), None);
    tables.bind(id(DIRECTORY), GuestVramAddr(0x1000)).unwrap();
    assert_eq!(tables.directory_of(GuestVramAddr(0x2000)), None);
    tables.unbind(GuestVramAddr(0x1000));
    assert_eq!(tables.directory_of(GuestVramAddr(0x1000)), None);
}
