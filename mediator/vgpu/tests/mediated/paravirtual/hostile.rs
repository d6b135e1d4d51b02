//! Tests guests that misuse the interface. The numbers of the holes (13 to 19) are those used by the study of GPUvm's
//! code.

use super::*;
use std::sync::atomic::{AtomicBool, Ordering};

/// A neighbour whose memory and work are checked after each attack.
struct Neighbour {
    driver: Driver,
    work: Channel,
    at: u64,
}

impl Neighbour {
    fn new(rig: &Rig) -> Self {
        let (mut driver, mut interface) = guest(rig, 1, None);
        let work = channel(&mut driver, &mut interface, 0, 1);
        let at = driver.vram(2);
        let ops = Ops::new().run(2, (A / PAGE) as u32, 2, pte(at), 16).flush(1).runlist(&[0]);
        assert_eq!(interface.call(&mut driver.guest, &ops).status, 0);
        for page in 0..2 {
            driver.guest.vram_write(at + page * PAGE, &pattern(3, page));
        }
        Self { driver, work, at }
    }

    /// Checks that the neighbour still works and its memory has not changed.
    fn check(&mut self) {
        self.driver.submit(&mut self.work, &[object(CE0), ce_copy(A, A + PAGE, 0)].concat());
        self.driver.wait(&self.work);
        assert!(self.driver.vram_holds(self.at, 2, 3));
        assert!(self.driver.faults.is_empty());
    }
}

#[test]
fn holes_of_gpuvms_interface_are_closed() {
    let rig = rig();
    let mut neighbour = Neighbour::new(&rig);
    let (mut evil, mut interface) = guest(&rig, 0, None);
    let mut call = |ops: &Ops| interface.call(&mut evil.guest, ops);
    let tables = Ops::new().create(1, kind::DIRECTORY).create(2, kind::SMALL).create(3, kind::LARGE);
    assert_eq!(call(&tables).status, 0);
    // Hole 13: bind a channel that does not exist, and bind a directory to instance blocks outside VRAM.
    refused(&call(&Ops::new().bind_channel(200, 0)), 0, Status::NoObject);
    refused(&call(&Ops::new().bind(1, u64::MAX - 0xfff)), 0, Status::Range);
    refused(&call(&Ops::new().bind(1, VM_MIB * MIB)), 0, Status::Range);
    // Holes 14 and 18: write entries beyond the end of a table, including indices for which 8 * (index + count) wraps
    // around.
    for (table, first, count) in
        [(2, 32768, 1), (2, 32767, 2), (3, 1024, 1), (2, 0x1fff_ffff, 1), (2, u32::MAX, u32::MAX)]
    {
        refused(&call(&Ops::new().zero(table, first, count)), 0, Status::Range);
        refused(&call(&Ops::new().run(table, first, count, 1, 1)), 0, Status::Range);
    }
    refused(&call(&Ops::new().set(1, 8192, 2, 0)), 0, Status::Range);
    // Hole 15: use objects of the wrong type.
    refused(&call(&Ops::new().set(1, 0, 3, 0)), 0, Status::WrongType);
    refused(&call(&Ops::new().set(1, 0, 0, 2)), 0, Status::WrongType);
    refused(&call(&Ops::new().set(1, 0, 1, 0)), 0, Status::WrongType);
    refused(&call(&Ops::new().set(2, 0, 2, 0)), 0, Status::WrongType);
    refused(&call(&Ops::new().run(1, 0, 1, 1, 0)), 0, Status::WrongType);
    refused(&call(&Ops::new().bind(2, 0)), 0, Status::WrongType);
    refused(&call(&Ops::new().flush(3)), 0, Status::WrongType);
    // Hole 16: exceed the quota. 8 MiB are enough for 30 more small-page tables.
    let many = (10..50).fold(Ops::new(), |ops, handle| ops.create(handle, kind::SMALL));
    refused(&call(&many), 30, Status::Limit);
    let back = (10..40).fold(Ops::new(), |ops, handle| ops.destroy(handle));
    assert_eq!(call(&back).status, 0);
    // Hole 18: submit lists with wrong counts.
    let mut list = Ops::new().list(2, 0, &[1, 2, 3]).bytes();
    for count in [2u32, 4, 0x1000, u32::MAX] {
        list[20..24].copy_from_slice(&count.to_le_bytes());
        let reply = interface.send(&mut evil.guest, &list);
        assert_eq!((reply.status, reply.done, reply.answers), (Status::Malformed as u32, 0, Vec::new()), "{count}");
    }
    assert!(evil.guest.counter("pv_refused") >= 20);
    neighbour.check();
}

#[test]
fn tables_destroyed_in_use_stay_alive_and_new_ones_are_empty() {
    let rig = rig();
    let (mut driver, mut interface) = guest(&rig, 0, None);
    let mut work = channel(&mut driver, &mut interface, 0, 1);
    assert_eq!(interface.call(&mut driver.guest, &Ops::new().runlist(&[0])).status, 0);
    // Hole 16: destroy handles while the card uses their tables.
    assert_eq!(interface.call(&mut driver.guest, &Ops::new().destroy(2).destroy(1)).status, 0);
    driver.submit(&mut work, &object(M2MF));
    driver.wait(&work);
    assert_eq!(driver.guest.counter("pv_tables"), 2);
    // Hole 17: a new table must not contain data of an old one.
    let gone = Ops::new().channel(op::CHANNEL_DESTROY, 0).bind(0, work.instance).flush(0);
    assert_eq!(interface.call(&mut driver.guest, &gone).status, 0);
    assert_eq!(driver.guest.counter("pv_tables"), 0);
    let work = driver.prepare(1);
    let ops = Ops::new().create(1, kind::DIRECTORY).create(2, kind::SMALL).set(1, 0, 2, 0).bind(1, work.instance);
    let ops =
        ops.channel(op::CHANNEL_CREATE, 1).bind_channel(1, work.instance).channel(op::CHANNEL_ENABLE, 1).runlist(&[1]);
    assert_eq!(interface.call(&mut driver.guest, &ops).status, 0);
    driver.ring(&work, 1);
    assert_eq!(driver.wait_fault().va, RING_VA, "nothing is mapped in a new table");
}

#[test]
fn paravirtual_entries_reach_only_memory_of_their_vm() {
    let rig = rig();
    let mut neighbour = Neighbour::new(&rig);
    let (mut evil, mut interface) = guest(&rig, 0, None);
    let own = VM_MIB * MIB;
    let bad = [
        ("VRAM beyond the share", pte(own)),
        ("table space, which contains the VM's own tables", pte(own + 0x4_0000)),
        ("the end of VRAM", pte(u64::from(CARD_MIB) * MIB - PAGE)),
        ("RAM that was not lent", pte(64 * MIB) | 5 << 32),
        ("another card", pte(0) | 2 << 32),
        ("all ones", u64::MAX),
    ];
    for (name, entry) in bad {
        let mut work = channel(&mut evil, &mut interface, 2, 1);
        let ops = Ops::new().run(2, (B / PAGE) as u32, 1, entry, 0).flush(1).runlist(&[2]);
        assert_eq!(interface.call(&mut evil.guest, &ops).status, 0, "{name}");
        evil.submit(&mut work, &[object(CE0), ce_copy(RING_VA, B, 1)].concat());
        assert_eq!(evil.wait_fault().va, B, "{name}");
        let gone = Ops::new().channel(op::CHANNEL_DESTROY, 2).bind(0, work.instance).destroy(1).destroy(2);
        assert_eq!(interface.call(&mut evil.guest, &gone).status, 0);
        evil.rewind();
    }
    // The CPU must not be able to access the table space either.
    let instance = evil.vram(1);
    let ops = Ops::new().create(1, kind::DIRECTORY).create(2, kind::SMALL).set(1, 0, 2, 0).bind(1, instance);
    assert_eq!(interface.call(&mut evil.guest, &ops.run(2, 0, 64, pte(own), 16)).status, 0);
    evil.guest.poke(instance + 0x208, u32::MAX);
    evil.guest.wr(pbus::BAR3_BLOCK::OFFSET, 0x8000_0000 | (instance >> 12) as u32);
    let mut word = [0; 4];
    evil.guest.write(RegionIndex::Bar3, 0, &[0; 4]);
    evil.guest.read(RegionIndex::Bar3, 0, &mut word);
    assert_eq!(word, [0xff; 4]);
    assert_eq!(evil.guest.peek(own), u32::MAX);
    neighbour.check();
}

#[test]
fn wild_rings_and_descriptors_harm_no_neighbour() {
    let rig = rig();
    let mut neighbour = Neighbour::new(&rig);
    let (mut evil, mut interface) = guest(&rig, 0, None);
    let places = [0, BASE, MIB - 8, MIB, 1 << 40, u64::MAX - 15, u64::MAX];
    for at in places {
        for (bytes, flags, next) in
            [(8, 1, 0), (u32::MAX, 1, 1), (0, 0, 0), (64, 2, 0), (4096, 4, 0), (16, 7, 63), (u32::MAX, 2, 0)]
        {
            let at = at & !15;
            interface.descriptor(&evil.guest, 0, at, bytes, flags, next);
            interface.descriptor(&evil.guest, 1, at, bytes, flags ^ 2, next);
            interface.publish(&mut evil.guest, 0);
        }
    }
    // Publish a circular chain, a head that is not a valid descriptor index, and an index that is too far ahead.
    interface.descriptor(&evil.guest, 0, BASE + 0x2000, 8, 1, 0);
    interface.publish(&mut evil.guest, 0);
    interface.publish(&mut evil.guest, 60_000);
    assert_eq!(evil.guest.status().channels_used, 0);
    neighbour.check();
    let mut interface = reopen(&mut evil, u32::MAX);
    assert_eq!(interface.call(&mut evil.guest, &Ops::new().query(query::VRAM)).status, 0);
    evil.guest.ram_write(BASE + 0x800 + 2, &0x7fffu16.to_le_bytes());
    evil.guest.wr(OFFSET + register::DOORBELL, 0);
    assert_eq!(Interface::status(&mut evil.guest), status::FAILED);
    // A queue must be rejected if one of its addresses, its size or the features are invalid, or if bus mastering is
    // disabled.
    for (register, value) in [
        (register::QUEUE_DESCRIPTORS + 4, 0xffff),
        (register::QUEUE_USED, 0xffff_ffff),
        (register::QUEUE_AVAILABLE, 1),
        (register::QUEUE_SIZE, 3),
        (register::QUEUE_SIZE, 512),
        (register::QUEUE_SIZE, 0),
        (register::FEATURES, 1 << 31),
    ] {
        evil.guest.wr(OFFSET + register::STATUS, status::RESET);
        Interface::describe(&mut evil.guest, BASE, u32::MAX);
        evil.guest.wr(OFFSET + register, value);
        evil.guest.wr(OFFSET + register::STATUS, status::READY);
        assert_eq!(Interface::status(&mut evil.guest), status::FAILED, "{register:#x} {value:#x}");
        evil.guest.wr(OFFSET + register::DOORBELL, 0);
    }
    evil.guest.write(RegionIndex::Config, 4, &2u16.to_le_bytes());
    reopen(&mut evil, u32::MAX);
    assert_eq!(Interface::status(&mut evil.guest), status::FAILED);
    // Withdraw the RAM that contains the queue.
    evil.guest.write(RegionIndex::Config, 4, &6u16.to_le_bytes());
    let mut interface = reopen(&mut evil, u32::MAX);
    assert_eq!(interface.call(&mut evil.guest, &Ops::new().query(query::VRAM)).status, 0);
    evil.guest.unmap_ram(0);
    evil.guest.wr(OFFSET + register::DOORBELL, 0);
    assert_eq!(Interface::status(&mut evil.guest), status::FAILED);
    neighbour.check();
}

#[test]
fn ring_written_concurrently_by_other_cpu_harms_no_neighbour() {
    let rig = rig();
    let mut neighbour = Neighbour::new(&rig);
    let (mut evil, mut interface) = guest(&rig, 0, None);
    let base = evil.vram(1);
    let batch =
        Ops::new().create(1, kind::SMALL).list(1, 0, &[pte(base); 64]).zero(1, 0, 64).flush(0).destroy(1).bytes();
    let (file, over) = (evil.guest.ram_file(BASE), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = fastrand::Rng::with_seed(0x9876_5432_1234_5677);
            // Another thread overwrites the descriptors, the rings, and the start of the batch.
            while !over.load(Ordering::Relaxed) {
                let at = [0, 0x800, 0x1000, 0x2000][random.usize(..4)] + random.u64(..0x100);
                rustix::io::pwrite(&file, &random.u64(..).to_le_bytes(), BASE + at).expect("writing RAM succeeds");
            }
        });
        for _ in 0..2000 {
            interface.post(&mut evil.guest, &batch);
            if Interface::status(&mut evil.guest) != status::READY {
                interface = reopen(&mut evil, u32::MAX);
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    neighbour.check();
    let mut interface = reopen(&mut evil, u32::MAX);
    assert_eq!(interface.call(&mut evil.guest, &Ops::new().query(query::VRAM)).status, 0);
}

#[test]
fn batch_that_could_not_be_answered_is_not_begun() {
    let rig = rig();
    let (mut evil, mut interface) = guest(&rig, 0, None);
    let batch = Ops::new().create(1, kind::SMALL).bytes();
    for room in [0, 4, 7] {
        evil.guest.ram_write(BASE + 0x2000, &batch);
        interface.descriptor(&evil.guest, 0, BASE + 0x2000, batch.len() as u32, 1, 1);
        interface.descriptor(&evil.guest, 1, BASE + 0x1_8000, room, 2, 0);
        let used = interface.used(&evil.guest);
        interface.publish(&mut evil.guest, 0);
        assert_eq!(interface.used(&evil.guest), used.wrapping_add(1));
        assert_eq!(evil.guest.counter("pv_tables"), 0, "space for {room} bytes");
    }
}

#[test]
fn mutated_batches_are_handled_and_harm_no_neighbour() {
    let rig = rig();
    let mut neighbour = Neighbour::new(&rig);
    let (mut evil, mut interface) = guest(&rig, 0, None);
    let mut work = channel(&mut evil, &mut interface, 0, 1);
    assert_eq!(interface.call(&mut evil.guest, &Ops::new().runlist(&[0])).status, 0);
    let base = evil.vram(1);
    let valid = Ops::new()
        .create(9, kind::SMALL)
        .list(9, 5, &[pte(base), pte(base + PAGE)])
        .run(2, 0x2000, 64, pte(base), 16)
        .set(1, 3, 9, 0)
        .zero(9, 0, 64)
        .bind(1, work.instance)
        .fill(base, PAGE, 5)
        .copy(base, base + PAGE, 512)
        .priority(base, PAGE, 1)
        .share_get(1, PAGE, 1, 0)
        .attach(1, 0, 0)
        .control(1, 1, 0)
        .detach(1, 0)
        .query(1)
        .runlist(&[0])
        .flush(1)
        .destroy(9)
        .bytes();
    let mut random = fastrand::Rng::with_seed(0x1234_5678_9abc_def1);
    let mut statuses = std::collections::BTreeSet::new();
    for _ in 0..2000 {
        let mut batch = valid.clone();
        for _ in 0..random.u32(1..4) {
            let at = random.usize(..batch.len());
            batch[at] = if random.bool() { random.u8(..) } else { batch[at] ^ (1 << random.u32(..8)) };
        }
        statuses.insert(interface.send(&mut evil.guest, &batch).status);
    }
    assert!(statuses.len() > 5, "{statuses:?}");
    neighbour.check();
    // The guest can still recover.
    let mut interface = reopen(&mut evil, u32::MAX);
    evil.guest.wr(nvspec::regs::pfifo::CHANNEL::at(0), 0);
    work = channel(&mut evil, &mut interface, 1, 1);
    assert_eq!(interface.call(&mut evil.guest, &Ops::new().runlist(&[1])).status, 0);
    evil.submit(&mut work, &object(M2MF));
    evil.wait(&work);
}
