use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

const CHUNK: u64 = CHUNK_BYTES_MIN;

fn table(chunks: u64) -> ChunkTable {
    ChunkTable::new(chunks * CHUNK, CHUNK, Contents::Zeroed).unwrap()
}

fn scrub_all(table: &mut ChunkTable) -> u32 {
    let mut done = 0;
    while let Some(work) = table.take_scrub_work() {
        table.scrubbed(work.chunk);
        done += 1;
    }
    done
}

#[test]
fn sizes_that_make_no_sense_are_refused() {
    for bytes in [0, 4096, 3 << 20, 128 << 20] {
        assert_eq!(ChunkTable::new(1 << 30, bytes, Contents::Zeroed).unwrap_err(), Error::ChunkSize(bytes));
    }
    assert_eq!(ChunkTable::new(CHUNK - 1, CHUNK, Contents::Zeroed).unwrap_err(), Error::CardSize(CHUNK - 1));
    assert!(matches!(ChunkTable::new(u64::MAX, CHUNK, Contents::Zeroed), Err(Error::CardSize(_))));
}

#[test]
fn only_the_listed_steps_are_legal() {
    let vm = ChunkState::Vm { vm: VmId(1), index: 0 };
    let states = [ChunkState::Free, ChunkState::NeedsScrub, ChunkState::Scrubbing, ChunkState::Mediator, vm];
    let legal: Vec<(usize, usize)> = vec![(0, 3), (0, 4), (3, 1), (4, 1), (1, 2), (2, 0)];
    for (i, from) in states.iter().enumerate() {
        for (j, to) in states.iter().enumerate() {
            assert_eq!(from.can_go(*to), legal.contains(&(i, j)), "{from:?} to {to:?}");
        }
    }
}

#[test]
fn the_last_chunk_is_cut_to_what_the_guest_has() {
    let mut table = table(8);
    table.create_vm(VmId(1), CHUNK + 0x1000).unwrap();
    assert_eq!(table.translate(VmId(1), GuestAddr(CHUNK)), Some(Run { address: CardAddr(CHUNK), bytes: 0x1000 }));
    assert_eq!(table.translate(VmId(1), GuestAddr(CHUNK + 0x1000)), None);
    assert_eq!(table.translate_range(VmId(1), GuestAddr(CHUNK), 0x1001), None);
    assert_eq!(table.translate_range(VmId(1), GuestAddr(u64::MAX), 2), None);
    assert_eq!(table.translate_range(VmId(1), GuestAddr(0x10), u64::MAX), None);
    assert_eq!(table.summary().vms[&VmId(1)], 2);
}

#[test]
fn a_range_over_chunks_that_are_no_neighbours_is_not_one_piece() {
    let mut table = table(4);
    table.create_vm(VmId(1), CHUNK).unwrap();
    table.create_vm(VmId(2), CHUNK).unwrap();
    table.destroy_vm(VmId(1)).unwrap();
    scrub_all(&mut table);
    // Chunk 0, then chunk 2.
    table.create_vm(VmId(3), 2 * CHUNK).unwrap();
    assert_eq!(table.translate_range(VmId(3), GuestAddr(CHUNK - 0x1000), 0x1000), Some(CardAddr(CHUNK - 0x1000)));
    assert_eq!(table.translate_range(VmId(3), GuestAddr(CHUNK - 0x1000), 0x2000), None);
    assert_eq!(table.translate(VmId(3), GuestAddr(0)), Some(Run { address: CardAddr(0), bytes: CHUNK }));
    assert_eq!(table.translate(VmId(3), GuestAddr(CHUNK)), Some(Run { address: CardAddr(2 * CHUNK), bytes: CHUNK }));
    assert_eq!(table.owner(CardAddr(2 * CHUNK + 8)), Some((VmId(3), GuestAddr(CHUNK + 8))));
    assert_eq!(table.owner(CardAddr(4 * CHUNK)), None);
}

#[test]
fn unscrubbed_chunks_are_named_as_such_and_not_given_away() {
    let mut table = table(4);
    table.create_vm(VmId(1), 4 * CHUNK).unwrap();
    assert_eq!(table.create_vm(VmId(2), CHUNK), Err(Error::Full { wanted: 1, free: 0, to_scrub: 0 }));
    assert_eq!(table.destroy_vm(VmId(1)), Ok(4));
    assert_eq!(table.destroy_vm(VmId(1)), Err(Error::NoSuchVm(VmId(1))));
    assert_eq!(table.create_vm(VmId(2), 3 * CHUNK), Err(Error::NeedsScrub { short: 3 }));
    let work = table.take_scrub_work().unwrap();
    assert_eq!(table.create_vm(VmId(2), CHUNK), Err(Error::NeedsScrub { short: 1 }), "half scrubbed is not scrubbed");
    table.scrubbed(work.chunk);
    table.create_vm(VmId(2), CHUNK).unwrap();
    assert_eq!(table.create_vm(VmId(2), CHUNK), Err(Error::Exists(VmId(2))));
    assert_eq!(table.create_vm(VmId(3), 4 * CHUNK), Err(Error::Full { wanted: 4, free: 0, to_scrub: 3 }));
}

#[test]
fn unknown_contents_are_scrubbed_before_first_use() {
    let mut table = ChunkTable::new(3 * CHUNK, CHUNK, Contents::Unknown).unwrap();
    assert_eq!(table.create_vm(VmId(1), CHUNK), Err(Error::NeedsScrub { short: 1 }));
    assert_eq!(table.reserve_mediator(1, 1), Err(Error::NeedsScrub { short: 1 }));
    assert_eq!(scrub_all(&mut table), 3);
    assert_eq!(table.create_vm(VmId(1), CHUNK), Ok(()));
    assert_eq!(table.summary().scrubbed, 3);
}

#[test]
fn a_mediator_run_is_aligned_and_refused_without_room() {
    let mut table = table(8);
    table.create_vm(VmId(1), CHUNK).unwrap();
    let run = table.reserve_mediator(4, 4).unwrap();
    assert_eq!(table.address(run), CardAddr(4 * CHUNK));
    assert!(matches!(table.reserve_mediator(4, 4), Err(Error::Full { wanted: 4, .. })));
    assert!(matches!(table.reserve_mediator(u32::MAX, 1), Err(Error::Full { .. })));
    table.release_mediator(run, 4);
    assert_eq!(table.reserve_mediator(4, 4), Err(Error::NeedsScrub { short: 4 }));
}

#[derive(Clone, Debug)]
enum Op {
    Create(u32, u64),
    Destroy(u32),
    Reserve(u32),
    Release(usize),
    TakeScrub,
    FinishScrub(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0u32..4, 0u64..6 * CHUNK).prop_map(|(vm, bytes)| Op::Create(vm, bytes)),
        2 => (0u32..4).prop_map(Op::Destroy),
        1 => (1u32..3).prop_map(Op::Reserve),
        1 => any::<usize>().prop_map(Op::Release),
        3 => Just(Op::TakeScrub),
        3 => any::<usize>().prop_map(Op::FinishScrub),
    ]
}

/// Who has written into a chunk last; `None` is zeroed. The model knows nothing of the table's own states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writer {
    Vm(u32),
    Mediator,
}

proptest! {
    /// Invariant 3: one owner, one place, and no owner sees what another left.
    #[test]
    fn every_chunk_has_one_owner_and_arrives_clean(ops in prop::collection::vec(op(), 1..120)) {
        const CHUNKS: u64 = 12;
        let mut table = table(CHUNKS);
        let mut contents: Vec<Option<Writer>> = vec![None; CHUNKS as usize];
        let mut vms: HashMap<u32, u64> = HashMap::new();
        let mut held: Vec<(ChunkId, u32)> = Vec::new();
        let mut scrubbing: Vec<ScrubWork> = Vec::new();
        for op in ops {
            match op {
                Op::Create(vm, bytes) => {
                    if table.create_vm(VmId(vm), bytes).is_ok() {
                        prop_assert!(vms.insert(vm, bytes).is_none() && bytes > 0);
                        for page in (0..bytes).step_by(0x1000) {
                            let run = table.translate(VmId(vm), GuestAddr(page)).unwrap();
                            let chunk = (run.address.0 / CHUNK) as usize;
                            if page % CHUNK == 0 {
                                prop_assert_eq!(contents[chunk], None, "chunk {} is not clean", chunk);
                                contents[chunk] = Some(Writer::Vm(vm));
                            }
                        }
                    }
                }
                Op::Destroy(vm) => {
                    let known = vms.remove(&vm);
                    prop_assert_eq!(table.destroy_vm(VmId(vm)).is_ok(), known.is_some());
                    prop_assert_eq!(table.translate(VmId(vm), GuestAddr(0)), None);
                }
                Op::Reserve(count) => if let Ok(first) = table.reserve_mediator(count, 1) {
                    for step in 0..u64::from(count) {
                        let chunk = (table.address(first).0 / CHUNK + step) as usize;
                        prop_assert_eq!(contents[chunk], None);
                        contents[chunk] = Some(Writer::Mediator);
                    }
                    held.push((first, count));
                },
                Op::Release(which) => if !held.is_empty() {
                    let (first, count) = held.swap_remove(which % held.len());
                    table.release_mediator(first, count);
                },
                Op::TakeScrub => scrubbing.extend(table.take_scrub_work()),
                Op::FinishScrub(which) => if !scrubbing.is_empty() {
                    let work = scrubbing.swap_remove(which % scrubbing.len());
                    contents[(work.address.0 / CHUNK) as usize] = None;
                    table.scrubbed(work.chunk);
                },
            }
            // One owner, one place: no card page is reached from two guest pages.
            let mut reached = vec![false; CHUNKS as usize];
            for (&vm, &bytes) in &vms {
                for index in 0..bytes.div_ceil(CHUNK) {
                    let run = table.translate(VmId(vm), GuestAddr(index * CHUNK)).unwrap();
                    let chunk = (run.address.0 / CHUNK) as usize;
                    prop_assert!(!std::mem::replace(&mut reached[chunk], true));
                    prop_assert_eq!(contents[chunk], Some(Writer::Vm(vm)));
                    prop_assert_eq!(table.owner(run.address), Some((VmId(vm), GuestAddr(index * CHUNK))));
                }
                prop_assert_eq!(table.translate(VmId(vm), GuestAddr(bytes)), None);
            }
            for (first, count) in &held {
                for step in 0..u64::from(*count) {
                    let chunk = (table.address(*first).0 / CHUNK + step) as usize;
                    prop_assert!(!std::mem::replace(&mut reached[chunk], true));
                }
            }
            let summary = table.summary();
            let owned: u32 = summary.vms.values().sum();
            prop_assert_eq!(summary.free + summary.to_scrub + summary.mediator + owned, summary.total);
            prop_assert_eq!(owned + summary.mediator, reached.iter().filter(|&&taken| taken).count() as u32);
        }
    }

    /// `translate` and `translate_range` agree with a byte-wise look at the map.
    #[test]
    fn ranges_are_in_one_piece_as_the_runs_say(address in 0u64..5 * CHUNK, len in 0u64..5 * CHUNK, hole in 0u32..4) {
        let mut table = table(8);
        table.create_vm(VmId(9), u64::from(hole + 1) * CHUNK).unwrap();
        table.create_vm(VmId(8), CHUNK).unwrap();
        table.destroy_vm(VmId(9)).unwrap();
        scrub_all(&mut table);
        table.create_vm(VmId(1), 3 * CHUNK + 0x800).unwrap();
        let run = table.translate(VmId(1), GuestAddr(address));
        let range = table.translate_range(VmId(1), GuestAddr(address), len);
        if len > 0 {
            prop_assert_eq!(range, run.filter(|run| run.bytes >= len).map(|run| run.address));
        }
    }
}
