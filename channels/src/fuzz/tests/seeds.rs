//! Seed inputs for the fuzz target, which decode to hand-written operations. A test runs every input in the corpus.
//!
//! To rewrite them, run `UPDATE_SEEDS=1 cargo test -p channels seeds`. Files named `found_*` are inputs that have
//! failed in the past.

use super::*;
use crate::tests::fake::World;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Size in bytes of the part of an instance block that contains all used fields.
const BLOCK_HEAD: usize = 0x290;

/// Encodes `ops` as bytes.
fn encode(ops: &[Op]) -> Vec<u8> {
    let mut out = Vec::new();
    ops.iter().for_each(|op| encode_one(op, &mut out));
    out
}

fn encode_one(op: &Op, out: &mut Vec<u8>) {
    let on = |on: bool| u8::from(on);
    match *op {
        Op::Bind(second, channel, log2, gp_get, gp_put) => {
            head(out, 0, second, channel);
            out.push(log2);
            out.extend(gp_get.to_le_bytes());
            out.extend(gp_put.to_le_bytes());
        }
        Op::BindBytes(second, channel, ref bytes) => {
            head(out, 2, second, channel);
            some(out, bytes);
        }
        Op::Unbind(second, channel) => head(out, 3, second, channel),
        Op::Enable(second, channel, enabled) => {
            head(out, 4, second, channel);
            out.push(on(enabled));
        }
        Op::List(second, ref list) => {
            head(out, 5, second, 0);
            some(out, list);
        }
        Op::Preempt(second, channel) => head(out, 6, second, channel),
        Op::Pause(second, paused) => {
            head(out, 7, second, 0);
            out.push(on(paused));
        }
        Op::Refuse(second, channel) => head(out, 8, second, channel),
        Op::Ring(second, channel, gp_put @ 1100.., true) => {
            head(out, 11, second, channel);
            out.extend(gp_put.to_le_bytes());
        }
        Op::Ring(second, channel, gp_put, now) => {
            head(out, 9, second, channel);
            out.extend((gp_put as u16).to_le_bytes());
            out.push(on(now));
        }
        Op::Pull(which) => {
            head(out, 12, false, 0);
            out.push(which);
        }
        Op::Pending => head(out, 13, false, 0),
        Op::Write(second, channel, index, raw) => {
            head(out, 14, second, channel);
            out.extend(index.to_le_bytes());
            out.extend(raw.to_le_bytes());
        }
        Op::Unmap(second, channel, gone) => {
            head(out, 15, second, channel);
            out.push(on(!gone));
        }
        Op::Fetch(second, channel, count) => {
            head(out, 16, second, channel);
            out.push(count);
        }
        Op::Execute(second, channel, count) => {
            head(out, 17, second, channel);
            out.push(count);
        }
        Op::Forge(second, channel, slot, payload) => {
            head(out, 18, second, channel);
            out.push(slot);
            out.extend(payload.to_le_bytes());
        }
        Op::Swallow(second, channel) => head(out, 19, second, channel),
        Op::Completed => head(out, 20, false, 0),
        Op::NonStall(engine) => {
            head(out, 21, false, 0);
            out.push(engine);
        }
        Op::Look(now) => {
            head(out, 22, false, 0);
            out.extend(now.to_le_bytes());
        }
        Op::Hang(second, channel) => rare(out, 0, second, channel),
        Op::LetGo => rare(out, 1, false, 0),
        Op::Destroy(second) => rare(out, 2, second, 0),
        Op::Reset => rare(out, 3, false, 0),
        Op::Gate(on) => {
            rare(out, 4, false, 0);
            out.push(on.into());
        }
        Op::Start(which) => {
            rare(out, 5, false, 0);
            out.push(which);
        }
        Op::Restore => rare(out, 10, false, 0),
    }
}

/// Appends an operation's header, VM and channel, in the short form if possible.
fn head(out: &mut Vec<u8>, what: u8, second: bool, channel: u8) {
    let vm = u8::from(second) << 7;
    match (0..6).map(|low| vm | low).find(|who| who % 6 == channel) {
        Some(who) => out.extend([what, who]),
        None => out.extend([what, vm | 0x40, channel]),
    }
}

/// Appends one of the less frequent operations.
fn rare(out: &mut Vec<u8>, what: u8, second: bool, channel: u8) {
    head(out, 23, second, channel);
    out.push(what);
}

fn some(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u16).to_le_bytes());
    out.extend(bytes);
}

fn decode(bytes: &[u8]) -> Vec<Op> {
    let mut bytes = Bytes(bytes);
    std::iter::from_fn(|| (!bytes.0.is_empty()).then(|| bytes.op())).collect()
}

/// Returns a ring entry for a range of `dwords` dwords at `address`.
fn range(address: u64, dwords: u64) -> u64 {
    address | dwords << 42
}

/// Returns operations that bind a channel with a ring of 2^`log2` entries and enable it.
fn bound(second: bool, channel: u8, log2: u8) -> [Op; 2] {
    [Op::Bind(second, channel, log2, 0, 0), Op::Enable(second, channel, true)]
}

/// Returns an instance block as a driver writes it, with the given additional dwords.
fn block(words: &[(u64, u32)]) -> Vec<u8> {
    let mut world = World::new();
    let at = World::instance_of(1);
    world.guest.instance(at, World::userd_of(1));
    words.iter().for_each(|(offset, word)| world.guest.put(at + offset, *word));
    world.guest.bytes(at)[..BLOCK_HEAD].to_vec()
}

fn seeds() -> BTreeMap<&'static str, Vec<Op>> {
    use nvspec::instance::{context, ramfc, vm};
    let (one, both) = (bound(false, 1, 4), [bound(false, 1, 4), bound(true, 1, 4)].concat());
    let listed = [&one[..], &[Op::List(false, vec![1])]].concat();
    let fill = |second, channel, count: u16| -> Vec<Op> {
        (0..count).map(|index| Op::Write(second, channel, index, range(0x1000 * u64::from(index), 8))).collect()
    };
    let work = |second, channel, gp_put, count: u8| {
        [
            Op::Ring(second, channel, gp_put, true),
            Op::Fetch(second, channel, count),
            Op::Execute(second, channel, 2 * count),
            Op::Completed,
        ]
    };
    BTreeMap::from([
        ("submit", [&listed[..], &fill(false, 1, 8), &work(false, 1, 3, 4), &work(false, 1, 8, 6)].concat()),
        // The guest's ring wraps around, as does the host's smaller ring.
        (
            "wrap",
            [
                &[Op::Bind(false, 2, 10, 15, 15), Op::Enable(false, 2, true), Op::List(false, vec![2])][..],
                &[Op::Ring(false, 2, 1020, true), Op::Fetch(false, 2, 255), Op::Pending, Op::Fetch(false, 2, 255)],
                &[Op::Execute(false, 2, 255), Op::Execute(false, 2, 255), Op::Completed, Op::Pending],
                &work(false, 2, 14, 60),
                &work(false, 2, 3, 60),
            ]
            .concat(),
        ),
        // Doorbells of two VMs are stored, and pulled in a different order. One of them is pulled after its channel was
        // bound again.
        (
            "two_vms",
            [
                &both[..],
                &[Op::List(false, vec![1]), Op::List(true, vec![1, 1, 7])],
                &[Op::Ring(false, 1, 4, false), Op::Ring(true, 1, 9, false), Op::Ring(false, 1, 6, false)],
                &[Op::Pull(2), Op::Pull(0), Op::Bind(true, 1, 4, 3, 3), Op::Pull(0), Op::NonStall(0)],
                &[Op::Enable(true, 1, true), Op::List(true, vec![1])],
                &work(true, 1, 5, 9),
                &[Op::NonStall(4), Op::Destroy(false)],
                &work(true, 1, 6, 9),
            ]
            .concat(),
        ),
        ("doorbells", {
            let puts = [15, 16, 17, 1024, u32::MAX, 0x8000_0001, 2];
            let rings = puts.map(|gp_put| Op::Ring(false, 1, gp_put, true));
            let strange = [Op::Ring(false, 3, 1, true), Op::Ring(true, 200, 1, true), Op::Ring(false, 1, 1, false)];
            [&listed[..], &rings, &strange, &[Op::Unbind(false, 1), Op::Pull(0), Op::Ring(false, 1, 1, true)]].concat()
        }),
        // Ranges at and beyond the end of the guest's addresses, privileged entries, levels, control entries, and the
        // host's own records.
        ("entries", {
            let last = 0xff_f7ff_fff0;
            let raws = [
                range(last, 4) | 1 << 63,
                range(last, 4) | 3 | 1 << 40 | 1 << 41,
                0xff << 8,
                range(last, 5),
                range(0xff_f800_1000, 6) | 1 << 41,
                3 << 32,
                u64::MAX,
            ];
            let mut ops = listed.clone();
            for (index, raw) in (0..).zip(raws) {
                ops.extend([Op::Write(false, 1, index, raw), Op::Ring(false, 1, u32::from(index) + 1, true)]);
                ops.extend([Op::Fetch(false, 1, 4), Op::Execute(false, 1, 9)]);
                // A rejected entry faults the ring, so bind the channel again, at the next entry.
                ops.extend([Op::Bind(false, 1, 4, index + 1, index + 1), Op::Enable(false, 1, true)]);
                ops.push(Op::List(false, vec![1]));
            }
            ops
        }),
        (
            "unmapped",
            [
                &listed[..],
                &[Op::Unmap(false, 1, true), Op::Ring(false, 1, 5, true), Op::Unmap(false, 1, false), Op::Pending],
                &one,
                &work(false, 1, 5, 6),
            ]
            .concat(),
        ),
        // Rejected blocks, a ring at the end of the address space, and unusual saved dwords.
        ("blocks", {
            let blocks = [
                block(&[]),
                block(&[(ramfc::USERD_LO, 2)]),
                block(&[(ramfc::GP_BASE_HI, 31 << 16 | 0x12)]),
                block(&[(vm::PDB_LO, 1)]),
                block(&[(ramfc::GP_BASE_LO, 0xffff_f000), (ramfc::GP_BASE_HI, 9 << 16 | 0xff)]),
                block(&[(ramfc::GP_GET, u32::MAX), (ramfc::GP_PUT, 1024), (context::GR, !0), (context::GR + 4, !0)]),
            ];
            let each =
                |block| [Op::BindBytes(false, 1, block), Op::Enable(false, 1, true), Op::Ring(false, 1, 4, true)];
            blocks.into_iter().flat_map(each).chain([Op::List(false, vec![1]), Op::Pending]).collect()
        }),
        (
            "runlists",
            [
                &[0, 1, 2, 3, 4].map(|channel| bound(false, channel, 5)).concat()[..],
                &[
                    Op::List(false, vec![0, 1, 2, 3, 4, 5, 6, 0]),
                    Op::List(true, vec![0, 1]),
                    Op::List(false, vec![3, 3]),
                ],
                &[
                    Op::Enable(false, 3, false),
                    Op::Preempt(false, 3),
                    Op::Pause(false, true),
                    Op::Enable(false, 3, true),
                ],
                &[Op::Unbind(false, 3), Op::Bind(true, 130, 2, 0, 0), Op::List(false, vec![]), Op::Pause(false, false)],
                &[Op::List(false, vec![1, 2]), Op::Refuse(false, 5), Op::Ring(false, 5, 1, true), Op::Look(7)],
            ]
            .concat(),
        ),
        // A guest attacks completion records: it forges them, or makes them data of its own method.
        (
            "records",
            [
                &listed[..],
                &[Op::Ring(false, 1, 3, true), Op::Forge(false, 1, 1, 0), Op::Completed, Op::Forge(false, 1, 0, 5)],
                &work(false, 1, 6, 9),
                &[Op::Swallow(false, 1)],
                &work(false, 1, 9, 9),
                &work(false, 1, 12, 9),
                &[Op::NonStall(0), Op::NonStall(7)],
            ]
            .concat(),
        ),
        // A channel is unbound while its ring contains work, and is bound again at the same position.
        (
            "rebind",
            [
                &listed[..],
                &[Op::Ring(false, 1, 7, true), Op::Fetch(false, 1, 3), Op::Execute(false, 1, 3), Op::Preempt(false, 1)],
                &[Op::Enable(false, 1, false), Op::Unbind(false, 1), Op::Bind(false, 1, 4, 3, 7)],
                &[Op::Enable(false, 1, true), Op::List(false, vec![1]), Op::Pending],
                &work(false, 1, 9, 9),
            ]
            .concat(),
        ),
        // Submissions wait for a slice. Some belong to a channel that is unbound in the meantime.
        (
            "gated",
            [
                &both[..],
                &[Op::List(false, vec![1]), Op::Gate(true), Op::Ring(false, 1, 2, true), Op::Ring(false, 1, 5, true)],
                &[Op::Fetch(false, 1, 9), Op::Start(1), Op::Fetch(false, 1, 9), Op::Execute(false, 1, 20)],
                &[Op::Completed, Op::Ring(true, 1, 4, true), Op::Unbind(true, 1), Op::Bind(true, 1, 4, 0, 0)],
                &[Op::Start(0), Op::Start(0), Op::Completed],
                &work(false, 1, 9, 9),
            ]
            .concat(),
        ),
        // Channels that do not leave their engines are freed, and then the card is reset.
        (
            "stuck",
            [
                &both[..],
                &[Op::List(false, vec![1]), Op::Ring(false, 1, 2, true), Op::Fetch(false, 1, 1), Op::Hang(false, 1)],
                &[Op::Preempt(false, 1), Op::Unbind(false, 1), Op::Bind(false, 1, 4, 0, 0), Op::LetGo],
                &[Op::Hang(true, 1), Op::Destroy(true), Op::Reset, Op::Bind(true, 1, 4, 0, 0)],
                &work(true, 1, 3, 4),
            ]
            .concat(),
        ),
    ])
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus/channels")
}

fn corpus() -> BTreeMap<String, Vec<u8>> {
    let files = std::fs::read_dir(folder()).unwrap().map(|entry| {
        let entry = entry.unwrap();
        (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())
    });
    files.collect()
}

#[test]
fn seeds_in_the_repository_are_up_to_date() {
    let seeds = seeds();
    if std::env::var_os("UPDATE_SEEDS").is_some() {
        std::fs::create_dir_all(folder()).unwrap();
        for (name, ops) in &seeds {
            std::fs::write(folder().join(name), encode(ops)).unwrap();
        }
    }
    let mut corpus = corpus();
    corpus.retain(|name, _| !name.starts_with("found_"));
    assert_eq!(corpus.keys().collect::<Vec<_>>(), seeds.keys().collect::<Vec<_>>());
    for (name, ops) in &seeds {
        let bytes = encode(ops);
        assert!(ops.len() <= OPS, "{name} contains too many operations");
        assert_eq!(decode(&bytes), *ops, "{name}");
        assert!(corpus[*name] == bytes, "{name} is out of date; UPDATE_SEEDS=1 rewrites it");
    }
    let kinds: BTreeSet<_> =
        seeds.values().flatten().map(|op| format!("{op:?}").split('(').next().unwrap().to_owned()).collect();
    assert_eq!(kinds.len(), 26, "the seeds lack an operation: {kinds:?}");
}

#[test]
fn saved_inputs_keep_invariants() {
    let corpus = corpus();
    assert!(!corpus.is_empty());
    for (name, data) in corpus {
        assert!(!data.is_empty() && data.len() < 4096, "{name}");
        println!("{name}");
        fuzz(&data);
    }
}
