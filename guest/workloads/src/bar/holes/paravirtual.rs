//! Holes 31 to 38: requests through the paravirtual interface. Numbers in parentheses are those of the holes in the
//! reference code.
//!
//! If the card lacks the interface, these attempts count as denied.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, ensure};
use pv::abi::{Capability, MAX_BATCH_OPS, Status, feature, kind, op, query, register, share, status};
use pv::guest::{Ops, Reply};

use super::super::layout::{Aperture, CHANNELS, LARGE_PAGE, PAGE, page_entry};
use super::lab::{BRAND, Channel, Lab, MARKER, Ran, Verdict, copies, va};
use super::queue::{AVAILABLE, NEXT, Queue, USED, WRITE};
use gdev::mapping::Width;
use gdev::nouveau::push::Push;

/// Handle of a page directory.
const DIRECTORY: u32 = 1;
const SMALL: u32 = 2;
const LARGE: u32 = 3;
/// Number of entries in a page directory.
const DIRECTORY_ENTRIES: u32 = 8192;
/// Number of entries in a small-page table.
const SMALL_ENTRIES: u32 = 32768;
/// Number of entries in a large-page table.
const LARGE_ENTRIES: u32 = 1024;
/// Size of a small-page table in bytes.
const SMALL_BYTES: u64 = 256 << 10;
/// A key that a neighboring VM in another group might choose.
const ANY_KEY: u64 = 0x5e67;
/// Addresses at which test guests have neither RAM nor usable device memory.
const NO_RAM: [u64; 5] = [0xb000_0000, 0xfec0_0000, 1 << 40, 1 << 63, u64::MAX - 0xfff];

/// Returns the interface's capability. A missing capability counts as denied.
fn offered(config: &[u8], verdict: &mut Verdict) -> Option<Capability> {
    let found = pv::guest::capability(config);
    if found.is_none() {
        verdict.note("no interface", true, false);
    }
    found
}

/// Performs an attempt through an initialized interface, which must work again after a reset.
fn with_queue(
    lab: &mut Lab<'_>,
    verdict: &mut Verdict,
    attempt: impl FnOnce(&mut Lab<'_>, &mut Verdict, &mut Queue<'_>) -> Result<()>,
) -> Result<()> {
    let config = fs::read(lab.card.config_path()).context("configuration space")?;
    let Some(capability) = offered(&config, verdict) else { return Ok(()) };
    let mut queue = Queue::new(lab.card, &capability)?;
    queue.start()?;
    attempt(lab, verdict, &mut queue)?;
    queue.start()?;
    let reply = queue.call(&Ops::new().query(query::VRAM));
    verdict.check(&format!("after a reset: {reply:x?}"), reply.status == Status::Done as u32);
    Ok(())
}

/// Sends a batch. Its first `done` operations must succeed, and its next operation must be rejected with this status.
fn must_refuse(queue: &mut Queue<'_>, verdict: &mut Verdict, ops: &Ops, done: u32, expected: Status) {
    let reply = queue.call(ops);
    let right = (reply.status, reply.done) == (expected as u32, done);
    verdict.note(&format!("{ops:x?} is {reply:x?}, not {expected:?}"), true, !right);
}

/// Sends a legitimate batch, which must succeed.
fn must_do(queue: &mut Queue<'_>, ops: &Ops) -> Result<Reply> {
    let reply = queue.call(ops);
    ensure!(reply.status == Status::Done as u32, "{ops:x?} is {reply:x?}");
    Ok(reply)
}

fn entry(address: u64, aperture: Aperture) -> u64 {
    let [low, high] = page_entry(address, aperture).map(u64::from);
    high << 32 | low
}

/// Returns the index of the small page at `va`.
fn page(va: u64) -> u32 {
    (va / PAGE) as u32
}

/// Appends operations that map consecutive pages.
fn map(ops: Ops, table: u32, va: u64, address: u64, pages: u64) -> Ops {
    ops.run(table, page(va), pages as u32, entry(address, Aperture::Vram), PAGE >> 8)
}

/// Creates a channel in an address space whose tables the mediator maintains, with our own pages at `va::A` and
/// `va::C`. Returns the channel and the first page.
fn channel(lab: &mut Lab<'_>, queue: &mut Queue<'_>, id: u32) -> Result<(Channel, u64)> {
    let channel = lab.channel(id);
    let own = lab.take(2);
    lab.card.vram_write(own, MARKER);
    let ops = Ops::new().create(DIRECTORY, kind::DIRECTORY).create(SMALL, kind::SMALL).create(LARGE, kind::LARGE);
    let memory = channel.memory().into_iter().chain([(va::A, own, 1), (va::C, own + PAGE, 1)]);
    let ops = memory.fold(ops, |ops, (va, at, pages)| map(ops, SMALL, va, at, pages));
    let ops = ops.set(DIRECTORY, 0, SMALL, LARGE).bind(DIRECTORY, channel.instance).flush(DIRECTORY);
    must_do(queue, &ops)?;
    // The directory pointer in the instance block must not be used.
    lab.card.vram_write(channel.instance + 0x200, 0xdead_0000);
    Ok((channel, own))
}

/// Checks that reads and writes of `va` fault at that address.
fn must_fault(lab: &Lab<'_>, verdict: &mut Verdict, what: &str, channel: &mut Channel, va: u64) {
    for (verb, from, to) in [("reading", va, va::A), ("writing", va::A, va)] {
        let ran = lab.copy(channel, from, to);
        verdict.must_fault(&format!("{verb} {what}"), ran, va);
    }
}

/// Hole 31 (13): nonexistent channels, directories and instance blocks.
pub fn channels(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    with_queue(lab, verdict, |lab, verdict, queue| {
        let share = lab.share;
        must_do(queue, &Ops::new().create(DIRECTORY, kind::DIRECTORY).channel(op::CHANNEL_CREATE, 5))?;
        for id in [4, CHANNELS - 1, CHANNELS, 200, 1 << 16, u32::MAX] {
            must_refuse(queue, verdict, &Ops::new().bind_channel(id, 0), 0, Status::NoObject);
            for code in [op::CHANNEL_ENABLE, op::CHANNEL_DISABLE, op::CHANNEL_DESTROY] {
                must_refuse(queue, verdict, &Ops::new().channel(code, id), 0, Status::NoObject);
            }
            if id >= CHANNELS {
                must_refuse(queue, verdict, &Ops::new().channel(op::CHANNEL_CREATE, id), 0, Status::Range);
                must_refuse(queue, verdict, &Ops::new().runlist(&[5, id]), 0, Status::Range);
            }
        }
        must_refuse(queue, verdict, &Ops::new().channel(op::CHANNEL_CREATE, 5), 0, Status::Exists);
        for instance in [share, 1 << 32, 1 << 40, 1 << 63, u64::MAX - 0xfff] {
            must_refuse(queue, verdict, &Ops::new().bind_channel(5, instance), 0, Status::Range);
            must_refuse(queue, verdict, &Ops::new().bind(DIRECTORY, instance), 0, Status::Range);
        }
        for handle in [9, u32::MAX] {
            must_refuse(queue, verdict, &Ops::new().bind(handle, 0), 0, Status::NoObject);
            must_refuse(queue, verdict, &Ops::new().flush(handle), 0, Status::NoObject);
        }
        // Create all channels. The batch must stop at the limit.
        let all = (6..CHANNELS).fold(Ops::new(), |ops, id| ops.channel(op::CHANNEL_CREATE, id));
        let reply = queue.call(&all);
        let limited = reply.status == Status::Limit as u32 && reply.done > 0;
        verdict.note(&format!("all channels: {reply:x?}"), true, !limited);
        queue.start()?;
        // Test an address space without mappings.
        let mut empty = lab.channel(5);
        must_do(queue, &Ops::new().create(DIRECTORY, kind::DIRECTORY).bind(DIRECTORY, empty.instance))?;
        let ran = lab.try_run(&mut empty, &Push::default());
        verdict.must_not_run("a directory without tables", ran);
        Ok(())
    })
}

/// Hole 32 (14, 18): indices and counts beyond a table, including sums that overflow, and entries for other VMs'
/// memory.
pub fn entries(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    with_queue(lab, verdict, |lab, verdict, queue| {
        let (mut work, own) = channel(lab, queue, 6)?;
        for (table, first, count) in [
            (SMALL, SMALL_ENTRIES, 1),
            (SMALL, SMALL_ENTRIES - 1, 2),
            (SMALL, 0x1fff_ffff, 1),
            (SMALL, u32::MAX, 1),
            (SMALL, u32::MAX, u32::MAX),
            (SMALL, 1, u32::MAX),
            (LARGE, LARGE_ENTRIES, 1),
            (LARGE, 0, LARGE_ENTRIES + 1),
        ] {
            must_refuse(queue, verdict, &Ops::new().zero(table, first, count), 0, Status::Range);
            must_refuse(queue, verdict, &Ops::new().run(table, first, count, 1, 1), 0, Status::Range);
            must_refuse(
                queue,
                verdict,
                &Ops::new().list(table, first.max(SMALL_ENTRIES - 1), &[1; 2]),
                0,
                Status::Range,
            );
        }
        for index in [DIRECTORY_ENTRIES, 1 << 29, u32::MAX] {
            must_refuse(queue, verdict, &Ops::new().set(DIRECTORY, index, SMALL, 0), 0, Status::Range);
        }
        // The last two entries belong to the mediator, so writes to them must have no effect. Segments use the
        // second-to-last entry.
        let shared = DIRECTORY_ENTRIES - 2;
        must_do(
            queue,
            &Ops::new().set(DIRECTORY, shared, SMALL, LARGE).set(DIRECTORY, shared + 1, SMALL, LARGE).flush(0),
        )?;
        let va = u64::from(shared) * LARGE_PAGE * u64::from(LARGE_ENTRIES) + va::A;
        must_fault(lab, verdict, "an entry that is the mediator's", &mut work, va);
        // The table works, so the operations below are rejected only because of their arguments.
        let back = lab.take(1);
        must_do(queue, &map(Ops::new(), SMALL, va::B, back, 1).flush(DIRECTORY))?;
        let ran = lab.copy(&mut work, va::A, va::B);
        ensure!(ran == Ran::Done && lab.card.vram_read(back) == MARKER, "a page of our own: {ran:x?}");
        let share = lab.share;
        for (what, entry) in [
            ("VRAM beyond the share", entry(share, Aperture::Vram)),
            ("the location of our own tables", entry(share + (64 << 10), Aperture::Vram)),
            ("the end of VRAM", entry((1 << 40) - PAGE, Aperture::Vram)),
            ("RAM that was not lent", entry(0xb000_0000, Aperture::Coherent)),
            ("another card", entry(0, Aperture::Peer)),
            ("all ones", u64::MAX),
        ] {
            lab.card.vram_write(own, MARKER);
            // The step makes the addresses in the entries wrap around.
            must_do(queue, &Ops::new().run(SMALL, page(va::B), 2, entry, u64::MAX).flush(DIRECTORY))?;
            must_fault(lab, verdict, what, &mut work, va::B);
            verdict.check(&format!("{what}: data arrived"), lab.card.vram_read(own) == MARKER);
        }
        let index = (va::LARGE / LARGE_PAGE) as u32;
        for address in [share - LARGE_PAGE, share, 1 << 39] {
            must_do(queue, &Ops::new().list(LARGE, index, &[entry(address, Aperture::Vram)]).flush(DIRECTORY))?;
            if address >= share {
                must_fault(lab, verdict, &format!("a large page of {address:#x}"), &mut work, va::LARGE);
            } else {
                let ran = lab.copy(&mut work, va::LARGE, va::A);
                verdict.check(&format!("a large page of our own: {ran:x?}"), ran == Ran::Done);
            }
        }
        Ok(())
    })
}

/// Hole 33 (15): tables of one type used as another, and undefined types, handles and bits.
pub fn types(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    with_queue(lab, verdict, |lab, verdict, queue| {
        let (mut work, _) = channel(lab, queue, 7)?;
        for ops in [
            Ops::new().set(DIRECTORY, 1, LARGE, 0),
            Ops::new().set(DIRECTORY, 1, 0, SMALL),
            Ops::new().set(DIRECTORY, 1, DIRECTORY, 0),
            Ops::new().set(DIRECTORY, 1, 0, DIRECTORY),
            Ops::new().set(SMALL, 0, SMALL, 0),
            Ops::new().run(DIRECTORY, 0, 1, 1, 0),
            Ops::new().list(DIRECTORY, 0, &[1]),
            Ops::new().zero(DIRECTORY, 0, 1),
            Ops::new().bind(SMALL, work.instance),
            Ops::new().bind(LARGE, work.instance),
            Ops::new().flush(SMALL),
        ] {
            must_refuse(queue, verdict, &ops, 0, Status::WrongType);
        }
        for (ops, status) in [
            (Ops::new().create(9, 0), Status::Invalid),
            (Ops::new().create(9, 4), Status::Invalid),
            (Ops::new().create(9, u32::MAX), Status::Invalid),
            (Ops::new().create(0, kind::SMALL), Status::Invalid),
            (Ops::new().create(SMALL, kind::LARGE), Status::Exists),
            (Ops::new().destroy(0), Status::NoObject),
            (Ops::new().destroy(9), Status::NoObject),
            (Ops::new().set(9, 0, SMALL, 0), Status::NoObject),
            (Ops::new().set(DIRECTORY, 0, 9, 0), Status::NoObject),
            (Ops::new().zero(9, 0, 1), Status::NoObject),
            (Ops::new().bind(DIRECTORY, work.instance + 0x10), Status::Invalid),
            (Ops::new().query(0), Status::Invalid),
            (Ops::new().query(u32::MAX), Status::Invalid),
            (Ops::new().raw(op::TABLE_CREATE, 9, &[2, 0, 0, 0, 1, 0, 0, 0]), Status::Invalid),
        ] {
            must_refuse(queue, verdict, &ops, 0, status);
        }
        // The rejected operations must not have changed anything.
        let ran = lab.run(&mut work, &copies(&[(va::A, va::C)]));
        verdict.check(&format!("the address space is unchanged: {ran:x?}"), ran == Ran::Done);
        Ok(())
    })
}

/// Hole 34 (16, 17): tables whose handles are destroyed while a channel uses the tables, recreated tables, and limits.
pub fn freed_in_use(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    with_queue(lab, verdict, |lab, verdict, queue| {
        let own = lab.ram()?.gpa;
        let (mut work, _) = channel(lab, queue, 8)?;
        must_do(queue, &Ops::new().run(SMALL, page(va::B), 1, entry(own, Aperture::Coherent), 0).flush(DIRECTORY))?;
        lab.start(&mut work);
        for _ in 0..24 {
            lab.queue(&mut work, &copies(&[(va::A, va::B); 3]));
        }
        lab.ring(&work);
        // Unmap a page, and destroy the handles of all tables while they are in use.
        must_do(
            queue,
            &Ops::new().zero(SMALL, page(va::B), 1).flush(0).destroy(SMALL).destroy(LARGE).destroy(DIRECTORY),
        )?;
        lab.ram()?.set(BRAND);
        let ran = lab.wait(&work, true);
        let elsewhere = matches!(ran, Ran::Fault(at) if at & !0xfff != va::B);
        verdict.note(&format!("under work: {ran:x?}"), matches!(ran, Ran::Fault(_)), elsewhere || ran == Ran::Nothing);
        verdict.check("RAM was written after it was unmapped", lab.ram()?.word() == BRAND);
        lab.stop(&work);
        // The tables outlive their handles, and still work for their users.
        let ran = lab.run(&mut work, &copies(&[(va::A, va::C)]));
        verdict.check(&format!("without handles: {ran:x?}"), ran == Ran::Done);
        must_refuse(queue, verdict, &Ops::new().zero(SMALL, 0, 1), 0, Status::NoObject);
        // Reuse the handles and the memory. The old contents must be gone.
        let ops = Ops::new().bind(0, work.instance).flush(0);
        let ops = ops.create(DIRECTORY, kind::DIRECTORY).create(SMALL, kind::SMALL).create(LARGE, kind::LARGE);
        must_do(queue, &ops.set(DIRECTORY, 0, SMALL, LARGE).bind(DIRECTORY, work.instance))?;
        let ran = lab.try_run(&mut work, &Push::default());
        verdict.must_fault("a new table", ran, va::RING);

        let left = must_do(queue, &Ops::new().query(query::TABLE_BYTES_LEFT))?.value();
        let (mut made, mut handle) = (0, 100);
        let last = loop {
            let ops = (handle..handle + 100).fold(Ops::new(), |ops, handle| ops.create(handle, kind::SMALL));
            let reply = queue.call(&ops);
            made += u64::from(reply.done);
            handle += 100;
            if reply.status != Status::Done as u32 || made > left / SMALL_BYTES {
                break reply.status;
            }
        };
        let right = last == Status::Limit as u32 && made <= left / SMALL_BYTES;
        verdict.note(&format!("{made} tables in {left:#x} bytes, then {last}"), true, !right);
        queue.start()?;
        let again = must_do(queue, &Ops::new().query(query::TABLE_BYTES_LEFT))?.value();
        verdict.check(&format!("{again:#x} bytes of tables after a reset, {left:#x} before"), again > left);
        Ok(())
    })
}

/// Hole 35 (18): batches with invalid headers, and mutations of a valid batch.
pub fn malformed(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    with_queue(lab, verdict, |lab, verdict, queue| {
        let (mut work, own) = channel(lab, queue, 9)?;
        let mut not_read = |queue: &mut Queue<'_>, what: &str, batch: &[u8]| {
            let reply = queue.send(batch);
            let refused = Reply { status: Status::Malformed as u32, done: 0, answers: Vec::new() };
            verdict.note(&format!("{what}: {reply:x?}"), true, reply != refused);
        };
        let list = Ops::new().list(SMALL, 0, &[1, 2, 3]).bytes();
        // Change the numbers of operations and bytes in the header, and the units and count of an operation's list.
        for (what, at, width) in [("operations", 0, 4), ("bytes", 4, 4), ("units", 10, 2), ("a count", 20, 4)] {
            let now = list[at];
            for value in [0, 1, now.wrapping_sub(1).into(), u32::from(now) + 1, 0x1000, 0xffff, 1 << 31, u32::MAX] {
                if value == u32::from(now) {
                    continue;
                }
                let mut batch = list.clone();
                batch[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
                not_read(queue, &format!("{what} {value:#x}"), &batch);
            }
        }
        for code in [0, 9, 0x16, 0x23, 0x34, 0x41, 0x100, u16::MAX] {
            not_read(queue, "a code", &Ops::new().query(query::VRAM).raw(code, 1, &[]).bytes());
        }
        for length in 0..list.len() {
            not_read(queue, "a truncated batch", &list[..length]);
        }
        let mut many = vec![0; PAGE as usize];
        many[..4].copy_from_slice(&(MAX_BATCH_OPS + 1).to_le_bytes());
        not_read(queue, "too many operations", &many);
        // No operation may start unless there is memory for its reply.
        for room in [0, 1, 7] {
            let reply = queue.send_with(&Ops::new().destroy(SMALL).bytes(), room);
            verdict.note(&format!("{room} bytes for the reply: {reply:x?}"), true, reply.status != u32::MAX);
        }
        let reply = queue.call(&Ops::new().zero(SMALL, 0x7000, 1));
        verdict.check(&format!("the table still exists: {reply:x?}"), reply.status == 0);

        lab.start(&mut work);
        let segment = must_do(queue, &Ops::new().share_get(1, PAGE, share::CREATE, 0))?.value() as u32;
        let valid = Ops::new()
            .create(20, kind::SMALL)
            .list(20, 5, &[entry(own, Aperture::Vram); 2])
            .run(SMALL, 0x2000, 64, entry(own, Aperture::Vram), 16)
            .set(DIRECTORY, 3, 20, 0)
            .zero(20, 0, 64)
            .bind(DIRECTORY, work.instance)
            .fill(own, PAGE / 2, 5)
            .copy(own, own + PAGE / 2, 512)
            .priority(own, PAGE, 1)
            .share_get(1, PAGE, 1, 0)
            .attach(segment, work.id, 0)
            .control(segment, 1, 0)
            .detach(segment, work.id)
            .query(1)
            .runlist(&[work.id])
            .flush(DIRECTORY)
            .destroy(20);
        must_do(queue, &valid)?;
        let (valid, mut statuses) = (valid.bytes(), BTreeSet::new());
        for _ in 0..300 {
            let mut batch = valid.clone();
            for _ in 0..1 + lab.random.below(3) {
                let at = lab.random.below(batch.len() as u64) as usize;
                let bit = 1 << lab.random.below(8);
                batch[at] = if lab.random.below(2) == 0 { lab.random.next() as u8 } else { batch[at] ^ bit };
            }
            let reply = queue.send(&batch);
            verdict.note("a mutation", reply.status != 0, false);
            statuses.insert(reply.status);
            // Remove the table, or the next batch would end at its first operation.
            queue.call(&Ops::new().destroy(20));
        }
        verdict.check(&format!("all mutations had the same effect: {statuses:?}"), statuses.len() > 3);
        lab.stop(&work);
        cleared(lab, queue)
    })
}

/// Clears our VRAM after operations that may have written anywhere in it, and starts over.
fn cleared(lab: &mut Lab<'_>, queue: &mut Queue<'_>) -> Result<()> {
    queue.start()?;
    let (room, bytes) = lab.room();
    must_do(queue, &Ops::new().fill(room, bytes, 0))?;
    lab.renew()
}

/// Hole 36: rings and descriptors with invalid contents or arbitrary addresses, and impossible configurations.
pub fn rings(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    with_queue(lab, verdict, |lab, verdict, queue| {
        let command =
            OpenOptions::new().read(true).write(true).open(lab.card.config_path()).context("configuration")?;
        // The device may write only our own pages, because other RAM belongs to our kernel.
        for at in NO_RAM.into_iter().chain([queue.ring.gpa, queue.request.gpa]) {
            for (bytes, flags, next) in [
                (8, NEXT, 0),
                (u32::MAX, NEXT, 1),
                (0, 0, 0),
                (64, WRITE, 0),
                (PAGE as u32, 4, 0),
                (16, NEXT | WRITE | 4, 15),
                (16, NEXT, u16::MAX),
                (u32::MAX, WRITE, 0),
            ] {
                queue.descriptor(0, at, bytes, flags, next);
                queue.descriptor(1, at, bytes, flags ^ WRITE, next);
                queue.publish(0);
                if queue.status() != status::READY {
                    queue.start()?;
                }
                verdict.note("a descriptor", false, false);
            }
        }
        queue.start()?;
        // Test a cycle, and invalid heads.
        queue.descriptor(0, queue.request.gpa, 8, NEXT, 0);
        for head in [0, 16, 60_000, u16::MAX] {
            queue.publish(head);
            if queue.status() != status::READY {
                queue.start()?;
            }
            verdict.note("a head", false, false);
        }
        for ahead in [17, 0x7fff, u16::MAX] {
            queue.start()?;
            queue.ring.bytes.store(AVAILABLE + 2, Width::Word, ahead.into());
            queue.write(register::DOORBELL, 0);
            fails(queue, verdict, &format!("an index {ahead} ahead"));
        }
        for (register, value) in [
            (register::QUEUE_DESCRIPTORS + 4, 0xffff),
            (register::QUEUE_DESCRIPTORS, 8),
            (register::QUEUE_USED, 0xffff_fffc),
            (register::QUEUE_USED, 2),
            (register::QUEUE_AVAILABLE, 1),
            (register::QUEUE_AVAILABLE, 0xb000_0000),
            (register::QUEUE_SIZE, 3),
            (register::QUEUE_SIZE, 512),
            (register::QUEUE_SIZE, 0),
            (register::FEATURES, 1 << 31),
        ] {
            queue.describe(u32::MAX);
            queue.write(register, value);
            queue.write(register::STATUS, status::READY);
            queue.write(register::DOORBELL, 0);
            fails(queue, verdict, &format!("register {register:#x} of {value:#x}"));
        }
        // Test features that the driver has not accepted.
        queue.describe(0);
        queue.write(register::STATUS, status::READY);
        must_refuse(queue, verdict, &Ops::new().query(query::VRAM), 0, Status::Unsupported);
        must_refuse(queue, verdict, &Ops::new().fill(lab.room().0, 4, 0), 0, Status::Unsupported);
        // The configuration must not change while the queue is in use.
        queue.start()?;
        for register in [register::QUEUE_DESCRIPTORS, register::QUEUE_AVAILABLE, register::QUEUE_USED] {
            queue.write(register, 0);
            queue.write(register + 4, u32::MAX);
        }
        must_do(queue, &Ops::new().query(query::VRAM))?;
        // Without bus mastering, the device must not access our RAM, either before or while the queue is in use.
        let mut before = [0; 2];
        command.read_exact_at(&mut before, 4).context("the command register")?;
        for used in [false, true] {
            queue.describe(u32::MAX);
            if used {
                queue.write(register::STATUS, status::READY);
            }
            command.write_all_at(&[before[0] & !4, before[1]], 4).context("the command register")?;
            queue.write(if used { register::DOORBELL } else { register::STATUS }, status::READY);
            fails(queue, verdict, "without bus mastering");
            command.write_all_at(&before, 4).context("the command register")?;
        }
        Ok(())
    })
}

/// Checks that the interface has failed and executes no further operations.
fn fails(queue: &mut Queue<'_>, verdict: &mut Verdict, what: &str) {
    let now = queue.status();
    verdict.note(&format!("{what}: status {now:#x}"), true, now != status::FAILED);
    let reply = queue.call(&Ops::new().query(query::VRAM));
    verdict.check(&format!("{what}: {reply:x?} of an interface that has failed"), reply.status == u32::MAX);
}

/// Hole 37: rings, descriptors and a batch that change while the device reads them. The doorbell is a posted write, so
/// the device reads while we write.
pub fn raced(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    with_queue(lab, verdict, |lab, verdict, queue| {
        let own = lab.take(1);
        let batch = Ops::new()
            .create(20, kind::SMALL)
            .list(20, 0, &[entry(own, Aperture::Vram); 64])
            .zero(20, 0, 64)
            .flush(0)
            .destroy(20)
            .bytes();
        // Use only start addresses of our own pages or of absent RAM, so that the device's writes do not reach kernel
        // memory.
        let places: Vec<_> = [queue.ring.gpa, queue.request.gpa, queue.reply.gpa].into_iter().chain(NO_RAM).collect();
        let random = &mut lab.random;
        for _ in 0..1000 {
            queue.post(&batch, PAGE as u32);
            for _ in 0..random.below(24) {
                match random.below(4) {
                    0 => {
                        let at = places[random.below(places.len() as u64) as usize];
                        let [index, bytes, flags, next] = [16, PAGE + 1, 4, 18].map(|below| random.below(below));
                        queue.descriptor(index as u16, at, bytes as u32, flags as u16, next as u16);
                    }
                    1 => queue.ring.bytes.store(AVAILABLE + 2 * random.below(18) as usize, Width::Word, random.next()),
                    2 => queue.ring.bytes.store(USED + 4 * random.below(33) as usize, Width::Dword, random.next()),
                    _ => {
                        let at = random.below(batch.len() as u64 / 8) as usize * 8;
                        queue.request.bytes.store(at, Width::Qword, random.next());
                    }
                }
            }
            if queue.status() != status::READY {
                verdict.note("a failure", true, false);
                queue.start()?;
            } else {
                verdict.note("a race", false, false);
            }
        }
        cleared(lab, queue)
    })
}

/// Hole 38: segments of other VMs, nonexistent segments, and invalid sizes and permissions.
pub fn segments(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    with_queue(lab, verdict, |lab, verdict, queue| {
        let (mut work, own) = channel(lab, queue, 10)?;
        let segment = must_do(queue, &Ops::new().share_get(5, 2 * PAGE, share::CREATE, 0))?.value() as u32;
        for id in (0..16).chain([1 << 16, u32::MAX]).filter(|id| *id != segment) {
            must_refuse(queue, verdict, &Ops::new().attach(id, work.id, 0), 0, Status::NoObject);
            for command in [share::control::SIZE, share::control::SET_MODE, share::control::REMOVE] {
                must_refuse(queue, verdict, &Ops::new().control(id, command, 0), 0, Status::NoObject);
            }
        }
        // Test unused keys of this VM, and of its group, if it is in a group.
        let group = queue.read(register::FEATURES) & feature::SHARE_ABROAD != 0;
        let abroad = if group { Status::NoObject } else { Status::Unsupported };
        for key in [ANY_KEY, 1, u64::MAX] {
            must_refuse(queue, verdict, &Ops::new().share_get(key, PAGE, 0, 0), 0, Status::NoObject);
            must_refuse(queue, verdict, &Ops::new().share_get(key, PAGE, share::ABROAD, 0), 0, abroad);
        }
        for channel in [work.id, 4, CHANNELS - 1, CHANNELS, u32::MAX] {
            must_refuse(queue, verdict, &Ops::new().attach(segment, channel, 0), 0, Status::NoObject);
            must_refuse(queue, verdict, &Ops::new().detach(segment, channel), 0, Status::NoObject);
        }
        for (bytes, flags, mode, status) in [
            (0, share::CREATE, 0, Status::Range),
            (1 << 40, share::CREATE, 0, Status::Range),
            (u64::MAX, share::CREATE, 0, Status::Range),
            (64 << 20, share::CREATE, 0, Status::Limit),
            (PAGE, share::EXCLUSIVE, 0, Status::Invalid),
            (PAGE, 1 << 31, 0, Status::Invalid),
            (PAGE, share::CREATE, 4, Status::Invalid),
        ] {
            must_refuse(queue, verdict, &Ops::new().share_get(77, bytes, flags, mode), 0, status);
        }
        must_refuse(queue, verdict, &Ops::new().share_get(5, 1 << 20, 0, 0), 0, Status::Range);
        // The segment must not contain data of other VMs, and must be inaccessible once detached.
        lab.start(&mut work);
        let there = must_do(queue, &Ops::new().attach(segment, work.id, 0))?.value();
        let ran = lab.go(&mut work, &copies(&[(there, va::A)]), true);
        verdict.check(&format!("a segment is read: {ran:x?}"), ran == Ran::Done);
        let found = (0..PAGE).step_by(4).map(|at| lab.card.vram_read(own + at)).find(|word| *word != 0);
        verdict.note(&format!("a new segment holds {found:x?}"), false, found.is_some());
        must_do(queue, &Ops::new().detach(segment, work.id))?;
        let ran = lab.go(&mut work, &copies(&[(va::A, there)]), true);
        verdict.must_fault("writing a detached segment", ran, there);
        lab.stop(&work);
        must_do(queue, &Ops::new().control(segment, share::control::REMOVE, 0))?;
        must_refuse(queue, verdict, &Ops::new().control(segment, share::control::SIZE, 0), 0, Status::NoObject);
        // Map a segment read-only, at an address without adjacent mappings.
        let segment = must_do(queue, &Ops::new().share_get(6, PAGE, share::CREATE, 0))?.value() as u32;
        lab.start(&mut work);
        let there = must_do(queue, &Ops::new().attach(segment, work.id, share::READ_ONLY))?.value();
        must_refuse(queue, verdict, &Ops::new().attach(segment, work.id, 0), 0, Status::Exists);
        let ran = lab.go(&mut work, &copies(&[(va::A, there)]), true);
        verdict.must_fault("writing a read-only segment", ran, there);
        lab.stop(&work);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_interface_is_a_refusal() {
        let mut verdict = Verdict::default();
        assert_eq!(offered(&[0; 256], &mut verdict), None);
        assert_eq!((verdict.denied, verdict.contained, verdict.open.len()), (1, 0, 0));
    }
}
