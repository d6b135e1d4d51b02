//! Records the mediator's register writes while a guest writes one word to every location that it can reach. The
//! mediator must never write this word to a register. It may write only a few registers, and all addresses in them must
//! be in its own memory.

use super::{
    A, B, CARD_MIB, CE0, CE1, CHUNK, EVIL, GOOD, ID, IDLE, M2MF, PAGE, Scene, blocks, ce_copy, m2mf_copy, object, pfb,
    pfifo, stops,
};
use card::Card;
use firmware::Image;
use nvspec::falcon::Falcon;
use nvspec::instance::INSTANCE_BYTES;
use nvspec::regs::{fecs, lookup, windows};
use parking_lot::Mutex;
use rig::Rig;
use rig::altered::{Alter, Altered};
use rig::driver::{RING_ENTRIES, methods, release};
use simgpu::SimGpu;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use vmm_glue::RegionIndex;

/// Word that the guest writes. No value that the mediator writes shares sixteen consecutive bits with it.
const MARK: u32 = 0xb5c9_b5c9;
/// Distance between writes in the sweep over undeclared offsets, in bytes.
const STRIDE: u32 = 0x100;
/// Size of configuration space in bytes.
const CONFIG_BYTES: u64 = 4096;

/// Registers that the mediator writes while guests run. Addresses in them are page numbers of card memory.
const WRITTEN: [(&str, &str); 23] = [
    ("pmc", "ENABLE"),
    ("pmc", "ELPG_GATE"),
    ("ppci", "MSI_REARM"),
    ("pfifo", "INTR"),
    ("pfifo", "RUNLIST_BASE"),
    ("pfifo", "RUNLIST"),
    ("pfifo", "RUNLIST_INTR"),
    ("pfifo", "NON_STALL_INTR"),
    ("pfifo", "MMU_FAULT_ID"),
    ("pfifo", "PBDMA_INTR_ID"),
    ("pfifo", "SCHED_DISABLE"),
    ("pfifo", "SCHED_ENABLE_ACK"),
    ("pfifo", "PREEMPT"),
    ("pfifo", "CHANNEL"),
    ("pfifo", "CHANNEL_STATE"),
    ("pbdma", "INTR_0"),
    ("pbdma", "METHOD_0"),
    ("pfb", "MMU_INVALIDATE_PDB"),
    ("pfb", "MMU_INVALIDATE"),
    ("pflush", "BAR_FLUSH"),
    ("pgraph", "INTR"),
    ("pgraph", "INTR_EN"),
    ("pgraph", "CONTROL"),
];
/// Units whose falcon is restarted after a reset of their engine.
const FALCONS: [&str; 4] = ["ce0", "ce1", "fecs", "gpccs"];
/// Registers of a falcon that the mediator writes to restart it.
const STARTED: [&str; 9] = [
    "ITFEN",
    "CPU_CONTROL",
    "BOOT_VECTOR",
    "DMA_CONTROL",
    "IMEM_CONTROL",
    "IMEM_TAG",
    "IMEM_DATA",
    "DMEM_CONTROL",
    "DMEM_DATA",
];

/// Values written to each register.
type Map = BTreeMap<u32, BTreeSet<u32>>;

/// A recorder of register writes.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Map>>);

impl Alter for Recorder {
    fn write32(&self, card: &SimGpu, offset: u32, value: u32) {
        self.0.lock().entry(offset).or_default().insert(value);
        card.write32(offset, value);
    }
}

/// Returns true if `value` contains sixteen consecutive bits of the guest's word, at any position.
fn is_marked(value: u32) -> bool {
    let seen = |shift| (value >> shift) as u16;
    (0..=16).any(|shift| (0..16).any(|turn| seen(shift) == (MARK as u16).rotate_left(turn)))
}

/// Returns the names of a register's block and of the register, or "none" for both if no register is at `offset`.
fn named(offset: u32) -> (&'static str, &'static str) {
    lookup(offset).map_or(("none", "none"), |(block, register, _)| (block, register.name))
}

/// Returns the number of the card memory page to which a register's value refers, if the value contains an address.
fn page_of(offset: u32, value: u32) -> Option<u32> {
    match named(offset) {
        ("pfifo", "CHANNEL") if pfifo::CHANNEL::VALID.is_set(value) => Some(pfifo::CHANNEL::ADDRESS.get(value)),
        ("pfifo", "RUNLIST_BASE") => Some(pfifo::RUNLIST_BASE::ADDRESS.get(value)),
        ("pfb", "MMU_INVALIDATE_PDB") => Some(pfb::MMU_INVALIDATE_PDB::ADDRESS.get(value)),
        _ => None,
    }
}

/// Writes [`MARK`] to all registers, to offsets between registers, and to all of configuration space.
fn mark_registers(scene: &mut Scene) {
    let guest = &mut scene.evil.guest;
    let declared = blocks().flat_map(|(_, _, _, info)| *info);
    let declared =
        declared.flat_map(|register| (0..register.count).map(|index| register.offset + index * register.stride));
    for offset in declared.chain((0..windows::BAR0_BYTES as u32).step_by(STRIDE as usize)) {
        guest.wr(offset, MARK);
    }
    for at in (0..CONFIG_BYTES).step_by(4) {
        guest.write(RegionIndex::Config, at, &MARK.to_le_bytes());
    }
}

/// Fills a channel's structures with [`MARK`], either before the channel is bound or while it runs.
fn mark_channel(scene: &mut Scene, bound: bool) {
    let evil = &mut scene.evil;
    let channel = if bound { evil.channel(ID) } else { evil.prepare(ID) };
    let [ring, _, image] = channel.memory();
    let places = [(channel.instance, INSTANCE_BYTES), (ring, u64::from(RING_ENTRIES) * 8), (image, PAGE)];
    for (at, bytes) in places {
        (0..bytes).step_by(4).for_each(|offset| evil.guest.poke(at + offset, MARK));
    }
    if !bound {
        evil.bind(&channel);
        evil.list(&[ID]);
    }
    for offset in (0..0x100).step_by(4) {
        evil.guest.write(RegionIndex::Bar1, u64::from(ID) * PAGE + offset, &MARK.to_le_bytes());
    }
    scene.good.work("a channel filled with the word");
    scene.evil.unbind(&channel);
    scene.evil.rewind();
}

/// Makes the card use [`MARK`] as data, as an address, as an object, and as a table entry.
fn mark_work(scene: &mut Scene) {
    let va = u64::from(MARK & 0xffff_f000);
    let work = [
        methods(1, 0x180, &[MARK; 4]),
        object((1, MARK)),
        [object(M2MF), m2mf_copy(va, A, PAGE as u32)].concat(),
        [object(M2MF), m2mf_copy(A, va, PAGE as u32), methods(2, 0x100, &[MARK])].concat(),
        [object(CE0), ce_copy(va, A, 1)].concat(),
        [object(CE1), ce_copy(A, va, 1)].concat(),
        [object(CE0), ce_copy(A, B, 1)].concat(),
        release(A, MARK),
        release(va, MARK),
        methods(6, 0x100, &[MARK; 3]),
    ];
    for (round, words) in work.iter().enumerate() {
        let what = format!("the word in work, {round}");
        let evil = &mut scene.evil;
        let mut channel = evil.channel(ID);
        evil.buffer(&channel, A, 1, 1);
        evil.pte(channel.space, B, MARK, MARK);
        evil.flush();
        evil.submit(&mut channel, words);
        evil.guest.wr(pfb::MMU_INVALIDATE_PDB::OFFSET, MARK);
        evil.guest.wr(pfb::MMU_INVALIDATE::OFFSET, MARK);
        scene.good.work(&what);
        scene.evil.service();
        scene.good.work(&what);
        scene.evil.guest.poke(channel.space.directory, MARK);
        scene.evil.flush();
        scene.evil.unbind(&channel);
        scene.evil.rewind();
    }
}

/// Returns a description of each violation among the written values.
fn wrong(map: &Map, guests: &BTreeSet<u64>) -> Vec<String> {
    let images = Falcon::ALL.map(Image::stand_in);
    let firmware: BTreeSet<u32> = images.iter().flat_map(|image| [image.code(), image.data()].concat()).collect();
    let mut wrong = Vec::new();
    for (&offset, values) in map {
        let (block, name) = named(offset);
        let started = FALCONS.contains(&block) && STARTED.contains(&name);
        if !started && !WRITTEN.contains(&(block, name)) {
            wrong.push(format!("{block} {name} at {offset:#08x} was written: {values:x?}"));
        }
        // A falcon may receive only approved firmware.
        if started && name.ends_with("_DATA") && !values.iter().all(|value| firmware.contains(value)) {
            wrong.push(format!("{block} {name} at {offset:#08x} has other firmware: {values:x?}"));
        }
        for &value in values {
            if is_marked(value) {
                wrong.push(format!("{block} {name} at {offset:#08x} has the guest's word: {value:#010x}"));
            }
            let chunk = page_of(offset, value).map(|page| u64::from(page) * PAGE / CHUNK);
            if chunk.is_some_and(|chunk| guests.contains(&chunk) || chunk >= u64::from(CARD_MIB) * super::MIB / CHUNK) {
                wrong
                    .push(format!("{block} {name} at {offset:#08x} has an address in a guest's memory: {value:#010x}"));
            }
        }
    }
    wrong
}

#[test]
fn registers_of_the_card_are_given_nothing_that_a_guest_chose() {
    let recorder = Recorder::default();
    let mut scene = Scene::on(Rig::wrapped(CARD_MIB, |card| Altered::over(card, recorder.clone())));
    let map = || std::mem::take(&mut *recorder.0.lock());
    map();
    mark_registers(&mut scene);
    scene.good.work("the word in every register");
    scene.fresh();
    mark_channel(&mut scene, false);
    mark_channel(&mut scene, true);
    scene.fresh();
    mark_work(&mut scene);
    scene.settle();
    assert!(stops(&scene.evil.guest) > 4, "the effects of the guest's work are checked: {}", stops(&scene.evil.guest));
    let (written, guests) = (map(), scene.blocks_of(&[EVIL, GOOD, IDLE]));
    let text = written.iter().map(|(offset, values)| format!("{offset:#08x} {:?}: {values:x?}\n", named(*offset)));
    println!("{}", text.collect::<String>());
    assert_eq!(wrong(&written, &guests), [""; 0]);
    assert!(written.contains_key(&pfifo::RUNLIST::OFFSET) && written.contains_key(&pfb::MMU_INVALIDATE_PDB::OFFSET));

    // Each of the four kinds of violation must be detected.
    let on_card = scene.on_card(EVIL, 0);
    let card = scene.rig.host.card();
    for (offset, value) in [
        (pfifo::CHANNEL_STATE::at(100), MARK >> 5),
        (pfifo::TIMESLICE::OFFSET, 1),
        (fecs::IMEM_DATA::OFFSET, 1),
        (pfb::MMU_INVALIDATE_PDB::OFFSET, pfb::MMU_INVALIDATE_PDB::ADDRESS.encode((on_card >> 12) as u32)),
    ] {
        map();
        card.write32(offset, value);
        assert_eq!(wrong(&map(), &guests).len(), 1, "{:?}", named(offset));
    }
}
