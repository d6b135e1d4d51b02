//! Tests that modified saved tables are either rejected or valid.

use super::super::moves::To;
use super::super::stock::SavedPiece;
use super::*;
use crate::{CHUNK_BYTES_MIN, Contents, GuestVramAddr, Place, VramAddr};
use proptest::prelude::*;

const CHUNK: u64 = CHUNK_BYTES_MIN;
const VM: TenantId = TenantId(1);

/// Creates a table of 12 chunks. It has a VM with chunks in both memories and the reserve, a frozen VM, a mediator
/// chunk, two moves in flight (one of them from the reserve), a dirty chunk, and a quarantined chunk.
fn table() -> ChunkTable {
    let mut table = ChunkTable::new(12 * CHUNK, CHUNK, Contents::Zeroed).unwrap();
    table.set_host_budget(8);
    table.set_reserve(2).unwrap();
    table.reserve_mediator(1, 1).unwrap();
    table.create_vm(VM, 8 * CHUNK, Limits { guarantee: 3, ..Limits::default() }).unwrap();
    table.create_vm(TenantId(2), 2 * CHUNK, Limits::default()).unwrap();
    for index in 0..6 {
        table.place(VM, GuestVramAddr(index * CHUNK)).unwrap();
    }
    table.place(TenantId(2), GuestVramAddr(0)).unwrap();
    for index in 0..2 {
        table.start(crate::Step { vm: VM, index, to: To::Reserve }).unwrap();
    }
    table.begin_move(VM, 1, To::Host).unwrap();
    let there = table.begin_move(VM, 2, To::Host).unwrap();
    table.commit_move(there.id);
    table.begin_move(VM, 3, To::Host).unwrap();
    table.quarantine(Place::Card(VramAddr(6 * CHUNK)));
    table.unplace(VM, GuestVramAddr(5 * CHUNK)).unwrap();
    table.freeze(TenantId(2));
    table
}

fn refused(edit: impl FnOnce(&mut SavedChunks)) -> String {
    let mut saved = table().save();
    edit(&mut saved);
    ChunkTable::try_from(saved).expect_err("restoring succeeded").to_string()
}

#[test]
fn a_table_is_as_it_was() {
    let (before, after) = (table(), ChunkTable::try_from(table().save()).unwrap());
    assert_eq!(after.summary(), before.summary());
    assert_eq!(after.moves().collect::<Vec<_>>(), before.moves().collect::<Vec<_>>());
    assert_eq!(after.parked().collect::<Vec<_>>(), before.parked().collect::<Vec<_>>());
    assert!(after.is_frozen(TenantId(2)) && !after.is_frozen(VM));
    for chunk in 0..12 {
        assert_eq!(after.state(crate::ChunkId::numbered(chunk)), before.state(crate::ChunkId::numbered(chunk)));
    }
}

#[test]
fn interrupted_scrub_is_repeated_after_restore() {
    let mut table = table();
    let work = table.take_scrub_work().unwrap();
    let mut restored = ChunkTable::try_from(table.save()).unwrap();
    assert_eq!(restored.take_scrub_work(), Some(work), "the interrupted scrub is repeated first");
}

#[test]
fn owners_that_disagree_are_refused() {
    let piece = |saved: &SavedChunks, wanted: &dyn Fn(SavedPiece) -> bool| {
        saved.card.states.iter().position(|piece| wanted(*piece)).unwrap()
    };
    let of_vm = |vm: u32| move |piece: SavedPiece| matches!(piece, SavedPiece::Vm { vm: of, .. } if of == vm);
    // Test a duplicate chunk, a chunk outside the guest's VRAM, a chunk of an unknown VM, and a move with a free source
    // chunk.
    assert!(
        refused(|saved| {
            let at = piece(saved, &of_vm(2));
            saved.card.states[at] = SavedPiece::Vm { vm: 1, index: 0 };
        })
        .contains("guest chunk 0 of VM 1 has two places")
    );
    assert!(
        refused(|saved| {
            let at = piece(saved, &of_vm(2));
            saved.card.states[at] = SavedPiece::Vm { vm: 2, index: 2 };
        })
        .contains("VM 2 has no guest chunk 2")
    );
    assert!(
        refused(|saved| {
            let at = piece(saved, &of_vm(2));
            saved.card.states[at] = SavedPiece::Vm { vm: 7, index: 0 };
        })
        .contains("VM 7 owns chunks, but does not exist")
    );
    assert!(
        refused(|saved| {
            let at = piece(saved, &|piece| piece == SavedPiece::Vm { vm: 1, index: 3 });
            saved.card.states[at] = SavedPiece::Free;
        })
        .contains("the chunk of move")
    );
    assert!(refused(|saved| saved.vms.truncate(1)).contains("VM 2 owns chunks"));
    assert!(refused(|saved| saved.host.states[0] = SavedPiece::Mediator).contains("belongs to the mediator"));
}

#[test]
fn scrub_list_that_differs_from_dirty_chunks_is_rejected() {
    assert!(refused(|saved| saved.card.to_scrub.clear()).contains("the queued units differ"));
    assert!(refused(|saved| saved.card.to_scrub.push(saved.card.to_scrub[0])).contains("the queued units differ"));
    // Otherwise, the next owner could read the VM's data.
    assert!(
        refused(|saved| {
            let at = saved.card.to_scrub[0] as usize;
            saved.card.states[at] = SavedPiece::Free;
        })
        .contains("the queued units differ")
    );
}

#[test]
fn moves_that_lead_elsewhere_are_refused() {
    assert!(refused(|saved| saved.flights.truncate(1)).contains("refers to a move that does not exist"));
    assert!(refused(|saved| saved.flights[1].to = saved.flights[0].to).contains("has another use"));
    assert!(refused(|saved| saved.flights[0].to = SavedSpot::Host(u32::MAX)).contains("has another use"));
    assert!(refused(|saved| saved.flights[1].from = SavedSpot::Card(0)).contains("the chunk of move"));
    assert!(refused(|saved| saved.flights[1].drains = true).contains("the chunk of move"));
    assert!(refused(|saved| saved.flights[1].vm = 9).contains("the chunk of move"));
    assert!(refused(|saved| saved.next_move = 0).contains("numbers of moves"));
    assert!(refused(|saved| saved.flights.swap(0, 1)).contains("moves are not in order"));
}

#[test]
fn numbers_out_of_bounds_are_refused() {
    assert!(refused(|saved| saved.shift = 99).contains("2^99 bytes is not a valid chunk size"));
    assert!(refused(|saved| saved.shift = 16).contains("2^16 bytes is not a valid chunk size"));
    assert!(refused(|saved| saved.card.limit = 0).contains("0 is not a valid number of chunks"));
    assert!(refused(|saved| saved.card.limit = 3).contains("beyond its end"));
    assert!(refused(|saved| saved.card.limit = u32::MAX).contains("is not a valid number of chunks"));
    assert!(refused(|saved| saved.reserve = 13).contains("the reserve are 13"));
    assert!(refused(|saved| saved.borrowed = 13).contains("borrowed are 13"));
    assert!(refused(|saved| saved.set_aside = 13).contains("set aside are 13"));
    assert!(refused(|saved| saved.vms[0].bytes = 0).contains("has 0x0 bytes"));
    assert!(refused(|saved| saved.vms[0].bytes = u64::MAX).contains("all VMs together"));
    assert!(refused(|saved| saved.vms[0].limits.weight = 0).contains("no weight"));
    assert!(refused(|saved| saved.vms[0].limits.quota = 2).contains("beyond its quota"));
    assert!(refused(|saved| saved.vms[0].peak = 0).contains("has more chunks than its peak"));
    assert!(refused(|saved| saved.vms[0].parked.push(7)).contains("not on the card"));
    assert!(refused(|saved| saved.vms[0].parked.reverse()).contains("is not in order"));
    assert!(refused(|saved| saved.vms.reverse()).contains("VMs are not in order"));
    let many = |saved: &mut SavedChunks| {
        let vm = SavedVm { bytes: ADVERTISED_BYTES_MAX, ..saved.vms[1].clone() };
        saved.vms.extend((3..70).map(|number| SavedVm { vm: number, ..vm.clone() }));
    };
    assert!(refused(many).contains("all VMs together"));
    let promised = |saved: &mut SavedChunks| {
        saved.vms[0].limits = SavedLimits { guarantee: 8, ..saved.vms[0].limits };
        let limits = SavedLimits { guarantee: 2, ..saved.vms[1].limits };
        saved.vms[1].limits = limits;
        saved.vms.push(SavedVm {
            vm: 3,
            bytes: 3 * CHUNK,
            limits: SavedLimits { guarantee: 3, ..limits },
            ..saved.vms[1].clone()
        });
    };
    assert!(refused(promised).contains("13 chunks of a card of 12 are guaranteed"));
}

/// Applies operations to a table as its owner does, and ignores their errors.
fn exercise(table: &mut ChunkTable, steps: &[(u8, u32, u32)]) {
    let mut works = Vec::new();
    for &(what, vm, index) in steps {
        let (vm, at) = (TenantId(vm), GuestVramAddr(u64::from(index) * CHUNK));
        match what % 14 {
            0 => drop(table.place(vm, at)),
            1 => drop(table.unplace(vm, at)),
            2 => drop(table.begin_move(vm, index, if what < 128 { To::Card } else { To::Host })),
            3 => {
                let first = table.moves().next();
                first.map(|flight| table.commit_move(flight.id));
            }
            4 => table.moves().last().map(|flight| flight.id).into_iter().for_each(|id| table.abort_move(id)),
            5 => works.extend(table.take_scrub_work()),
            6 => works.pop().into_iter().for_each(|work| table.scrubbed(work.place)),
            7 => drop(table.start(crate::Step { vm, index, to: To::Reserve })),
            8 => drop(table.start(crate::Step { vm, index, to: To::Card })),
            9 => drop(table.destroy_vm(vm)),
            10 => drop(table.reserve_mediator(1, 1)),
            11 => drop(table.create_vm(vm, at.0, Limits { guarantee: index % 4, ..Limits::default() })),
            12 => table.set_host_budget(index),
            _ => table.quarantine(Place::Card(VramAddr(u64::from(index % 12) * CHUNK))),
        }
        let _ = (table.summary(), table.for_vms(), table.kept_for_mediator(), table.host_room(), table.drainable());
    }
}

proptest! {
    /// Checks that a corrupted saved table is either rejected or restored to a usable table.
    #[test]
    fn edited_bytes_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        steps in prop::collection::vec((any::<u8>(), 0u32..4, 0u32..9), 0..60),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = postcard::to_allocvec(&table().save()).unwrap();
        prop_assert!(postcard::from_bytes::<SavedChunks>(&bytes[..cut.index(bytes.len())]).is_err());
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let Ok((saved, _)) = postcard::take_from_bytes::<SavedChunks>(&bytes) else { return Ok(()) };
        let Ok(mut table) = ChunkTable::try_from(saved) else { return Ok(()) };
        exercise(&mut table, &steps);
        let saved = table.save();
        let again = ChunkTable::try_from(saved.clone()).map_err(|why| TestCaseError::fail(why.to_string()))?;
        prop_assert_eq!(again.save(), saved);
    }
}
