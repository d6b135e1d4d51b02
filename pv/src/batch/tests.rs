use super::*;
use crate::model::wire::{self, Raw};
use crate::operation::{Control, Kind, Question, TableId};
use nvspec::addr::GuestVramAddr;

const ALL: u32 = u32::MAX;

/// Returns an example of each form of each operation.
fn each() -> Vec<Raw> {
    let mut each = vec![
        Raw::new(op::TABLE_CREATE, 7, &[3, 0]),
        Raw::new(op::TABLE_DESTROY, 7, &[]),
        Raw::new(op::DIRECTORY_SET, 1, &[5, 2, 0, 0]),
        Raw::new(op::ENTRIES_RUN, 2, &[1, 2, 3, 4, 5, 6]),
        Raw::new(op::ENTRIES_LIST, 2, &[1, 2, 3, 4, 5, 6]),
        Raw::new(op::ENTRIES_LIST, 2, &[1, 0]),
        Raw::new(op::ENTRIES_ZERO, 2, &[1, 2]),
        Raw::new(op::DIRECTORY_BIND, 1, &[0x1000, 1]),
        Raw::new(op::FLUSH, 0, &[]),
        Raw::new(op::CHANNEL_CREATE, 3, &[]),
        Raw::new(op::CHANNEL_BIND, 3, &[0x1000, 1]),
        Raw::new(op::CHANNEL_ENABLE, 3, &[]),
        Raw::new(op::CHANNEL_DISABLE, 3, &[]),
        Raw::new(op::CHANNEL_DESTROY, 3, &[]),
        Raw::new(op::RUNLIST, 0, &[0, 0]),
        Raw::new(op::RUNLIST, 0, &[3, 0, 4, 5, 6, 0]),
        Raw::new(op::MEMORY_FILL, 0, &[0x1000, 0, 0x100, 0, 7, 0]),
        Raw::new(op::MEMORY_COPY, 0, &[0x1000, 0, 0x1100, 0, 0x100, 0]),
        Raw::new(op::BUFFER_PRIORITY, 0, &[0x1000, 0, 0x100, 0, 0xffff_fffe, 0]),
        Raw::new(op::SHARE_GET, 0, &[1, 2, 3, 4, 3, 1]),
        Raw::new(op::SHARE_ATTACH, 9, &[3, 8]),
        Raw::new(op::SHARE_DETACH, 9, &[3, 0]),
        Raw::new(op::SHARE_CONTROL, 9, &[4, 2]),
    ];
    each.extend((1..=5).map(|command| Raw::new(op::SHARE_CONTROL, 9, &[command, 0])));
    each.extend((1..=10).map(|question| Raw::new(op::QUERY, question, &[])));
    each
}

fn problem(bytes: &[u8]) -> Option<Malformed> {
    Batch::parse(bytes).err()
}

/// Returns the statuses of a batch's operations.
fn statuses(bytes: &[u8], features: u32) -> Vec<Status> {
    let ops = Batch::parse(bytes).unwrap().ops(features).collect::<Vec<_>>();
    ops.into_iter().map(|op| op.err().unwrap_or(Status::Done)).collect()
}

#[test]
fn each_operation_is_read_as_it_was_written() {
    let each = each();
    let bytes = wire::batch(&each);
    let ops: Vec<_> = Batch::parse(&bytes).unwrap().ops(ALL).map(Result::unwrap).collect();
    assert_eq!(ops.iter().map(wire::encode).collect::<Vec<_>>(), each);
}

#[test]
fn fields_are_where_the_interface_has_them() {
    let bytes = wire::batch(&each());
    let ops: Vec<_> = Batch::parse(&bytes).unwrap().ops(ALL).map(Result::unwrap).collect();
    let table = |handle| TableId::new(handle).unwrap();
    let list = [4 << 32 | 3, 6 << 32 | 5].map(zerocopy::little_endian::U64::new);
    let expected = [
        Op::TableCreate { table: table(7), kind: Kind::Large },
        Op::DirectorySet { directory: table(1), index: 5, small: Some(table(2)), large: None },
        Op::EntriesRun { table: table(2), first: 1, count: 2, entry: 4 << 32 | 3, step: 6 << 32 | 5 },
        Op::EntriesList { table: table(2), first: 1, entries: &list },
        Op::DirectoryBind { directory: Some(table(1)), instance: GuestVramAddr(1 << 32 | 0x1000) },
        Op::Flush { directory: None },
        Op::Runlist { channels: &[4, 5, 6].map(zerocopy::little_endian::U32::new) },
        Op::MemoryCopy { to: GuestVramAddr(0x1000), from: GuestVramAddr(0x1100), bytes: 0x100 },
        Op::BufferPriority { address: GuestVramAddr(0x1000), bytes: 0x100, priority: -2 },
        Op::ShareGet {
            key: 2 << 32 | 1,
            bytes: 4 << 32 | 3,
            create: true,
            exclusive: true,
            abroad: false,
            mode: share::mode::READ,
        },
        Op::ShareAttach { segment: 9, channel: 3, read_only: true },
        Op::ShareControl { segment: 9, control: Control::SetMode(share::mode::WRITE) },
        Op::Query { question: Question::TableBytesLeft },
    ];
    for op in expected {
        assert!(ops.contains(&op), "{op:?}");
    }
}

/// Changes each byte of a batch to each value, and truncates the batch to each length. The results must match the
/// specification.
#[test]
fn each_change_of_a_byte_is_seen_as_the_specification_sees_it() {
    let whole = wire::batch(&each());
    let agree = |bytes: &[u8]| {
        let (ours, raws) = (Batch::parse(bytes), wire::parse(bytes));
        assert_eq!(ours.is_ok(), raws.is_some(), "{ours:?}");
        for (op, raw) in ours.iter().flat_map(|batch| batch.ops(ALL)).zip(raws.iter().flatten()) {
            let refused = wire::refusals(raw);
            match op {
                Ok(op) => assert_eq!((wire::encode(&op), refused), (raw.clone(), vec![])),
                Err(status) => assert!(refused.contains(&status), "{raw:?}: {status:?} is not in {refused:?}"),
            }
        }
    };
    for at in 0..whole.len() {
        agree(&whole[..at]);
        let mut bytes = whole.clone();
        for value in 0..=u8::MAX {
            bytes[at] = value;
            agree(&bytes);
        }
    }
}

#[test]
fn bytes_after_batch_are_ignored() {
    let mut bytes = wire::batch(&[Raw::new(op::FLUSH, 0, &[])]);
    bytes.extend([0xff; 100]);
    assert_eq!(statuses(&bytes, ALL), [Status::Done]);
}

#[test]
fn malformed_batch_error_names_operation_and_problem() {
    let flush = || Raw::new(op::FLUSH, 0, &[]);
    let cases = [
        (vec![0; 7], "the batch: has no header"),
        (vec![0; 8], "the batch: declares 0 operations; must be from 1 to 1024"),
        (wire::batch(&vec![flush(); 1025]), "the batch: declares 1025 operations; must be from 1 to 1024"),
        (
            wire::batch(&[flush()])[..15].to_vec(),
            "the batch: declares 8 bytes of operations, which exceeds its size or the maximum",
        ),
        (
            wire::batch(&[flush(), Raw::new(0x99, 0, &[])]),
            "operation 1: has code 0x99, which version 1 does not define",
        ),
        (
            wire::batch(&[flush(), flush(), Raw::new(op::FLUSH, 0, &[0, 0])]),
            "operation 2: has a body of 8 bytes, which does not match code 0x8 or its count",
        ),
    ];
    for (bytes, expected) in cases {
        assert_eq!(problem(&bytes).unwrap().to_string(), expected);
    }
    let with = |ops: u32, mut bytes: Vec<u8>| {
        bytes[..4].copy_from_slice(&ops.to_le_bytes());
        problem(&bytes).unwrap()
    };
    let two = || wire::batch(&[flush(), flush()]);
    assert_eq!(with(1, two()), Malformed { op: None, problem: Problem::Rest(8) });
    assert_eq!(with(3, two()), Malformed { op: Some(2), problem: Problem::Missing });
}

#[test]
fn a_batch_is_as_long_as_it_may_be() {
    let list = |entries: u32| {
        let words = [vec![0, entries], vec![0; entries as usize * 2]].concat();
        wire::batch(&[Raw::new(op::ENTRIES_LIST, 1, &words)])
    };
    let longest = list(8189);
    assert_eq!((longest.len(), problem(&longest)), (MAX_BATCH_BYTES as usize, None));
    let longer = list(8190);
    assert_eq!(problem(&longer).unwrap().problem, Problem::Bytes(longer.len() as u32 - 8));
}

#[test]
fn unaccepted_features_are_rejected_before_values_are_checked() {
    let ops = [
        (Raw::new(op::TABLE_CREATE, 0, &[9, 9]), feature::TABLES),
        (Raw::new(op::CHANNEL_BIND, 0, &[1, 0]), feature::CHANNELS),
        (Raw::new(op::MEMORY_COPY, 1, &[1, 0, 0, 0, 0, 0]), feature::MEMORY),
        (Raw::new(op::BUFFER_PRIORITY, 1, &[0; 6]), feature::PRIORITY),
        (Raw::new(op::SHARE_CONTROL, 1, &[0; 2]), feature::SHARE),
        (Raw::new(op::QUERY, 0, &[]), feature::QUERY),
    ];
    for (raw, needed) in ops {
        let bytes = wire::batch(std::slice::from_ref(&raw));
        assert_eq!(feature_of(raw.code), Some(needed));
        assert_eq!(statuses(&bytes, !needed), [Status::Unsupported]);
        assert_eq!(statuses(&bytes, needed), [Status::Invalid]);
    }
    assert_eq!(feature_of(0), None);
}

#[test]
fn segments_of_others_are_a_feature_of_their_own() {
    let get = |flags| wire::batch(&[Raw::new(op::SHARE_GET, 0, &[1, 0, 0, 0, flags, 0])]);
    assert_eq!(statuses(&get(share::CREATE), feature::SHARE), [Status::Done]);
    assert_eq!(statuses(&get(share::ABROAD), feature::SHARE), [Status::Unsupported]);
    assert_eq!(statuses(&get(share::ABROAD), feature::SHARE_ABROAD), [Status::Unsupported]);
    assert_eq!(statuses(&get(share::ABROAD), feature::SHARE | feature::SHARE_ABROAD), [Status::Done]);
}

#[test]
fn operations_after_failed_one_are_not_started() {
    let bytes = wire::batch(&[1, 2, 3, 4].map(|channel| Raw::new(op::CHANNEL_ENABLE, channel, &[])));
    let mut begun = Vec::new();
    let mut work = Begun::new(bytes).unwrap();
    while let Some(op) = work.current(ALL) {
        begun.push(wire::encode(&op.unwrap()).handle);
        // Continue with a copy, as when a suspended batch is resumed.
        work = work.clone();
        work.answer(if begun.len() < 3 { Ok(begun.len() as u64 * 10) } else { Err(Status::NoObject) });
    }
    let answers = work.into_answers();
    assert_eq!((begun, answers.status(), answers.done()), (vec![1, 2, 3], Status::NoObject, 2));
    let word = |status: Status| (status as u64).to_le_bytes();
    let header = [Status::NoObject as u32, 2].map(u32::to_le_bytes).concat();
    let expected = [
        header,
        [word(Status::Done), 10u64.to_le_bytes()].concat(),
        [word(Status::Done), 20u64.to_le_bytes()].concat(),
        [word(Status::NoObject), [0; 8]].concat(),
        [word(Status::NotBegun), [0; 8]].concat(),
    ];
    assert_eq!(answers.bytes(1000), expected.concat());
    assert_eq!(answers.bytes(8 + 31), expected[..2].concat(), "a partial answer was returned");
    assert_eq!(answers.bytes(7), []);
}

#[test]
fn a_malformed_batch_is_answered_as_a_whole() {
    assert_eq!(Answers::malformed().bytes(1000), [2, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn answers_do_not_grow_beyond_the_operations() {
    let mut answers = Answers::new(u32::MAX);
    assert_eq!((0..2000).filter(|_| answers.push(Ok(0))).count(), 1024);
    assert_eq!(answers.bytes(usize::MAX).len(), 8 + 16 * 1024);
}
