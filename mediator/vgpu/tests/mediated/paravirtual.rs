//! Tests paravirtual guests, including hostile ones: page tables that the mediator keeps for them, channels, memory,
//! and segments.

mod hostile;
mod share;

use super::handover::handover;
use super::{A, B, CARD_MIB, MIB, VM_MIB, rig};
use nvspec::regs::pbus;
use pv::abi::{Status, feature, kind, op, query, register, status};
use rig::driver::{CE0, Channel, Driver, FENCE_VA, IMAGE_VA, M2MF, PAGE, PUSH_VA, RING_VA, ce_copy, object, pattern};
use rig::paravirtual::{Interface, Ops, RAM_BYTES, Reply};
use rig::{CHUNK, Guest, Rig, settings};
use vgpu::PvSettings;
use vgpu::Settings;
use vgpu::pv::OFFSET;
use vmm_glue::RegionIndex;
use vram::victim::VictimPolicy;
use vram::{Limits, To};

/// RAM address of the interface's structures, at the end of the RAM that the client lends.
const BASE: u64 = MIB - RAM_BYTES;

fn offered(group: Option<&str>) -> PvSettings {
    PvSettings { table_bytes: 8 * MIB, segment_bytes: 4 * MIB, group: group.map(Into::into) }
}

fn knowing(group: Option<&str>) -> Settings {
    Settings { paravirtual: Some(offered(group)), ..settings(VM_MIB, 16) }
}

/// Creates a guest with a driver and an initialized interface.
fn guest(rig: &Rig, vm: u32, group: Option<&str>) -> (Driver, Interface) {
    guest_with(rig, vm, &knowing(group))
}

/// Same as [`guest`], but with other settings.
fn guest_with(rig: &Rig, vm: u32, settings: &Settings) -> (Driver, Interface) {
    let mut guest = rig.guest_with(vm, settings);
    assert!(guest.map_ram(0, MIB, true));
    let mut driver = Driver::new(guest);
    let interface = Interface::open(&mut driver.guest, BASE);
    assert_eq!(Interface::status(&mut driver.guest), status::READY);
    (driver, interface)
}

fn pte(at: u64) -> u64 {
    at >> 8 | 1
}

/// Appends operations that map a channel's memory in a table.
fn entries(ops: Ops, table: u32, channel: &Channel) -> Ops {
    let [ring, push, image] = channel.memory();
    [(RING_VA, ring, 1), (PUSH_VA, push, 4), (FENCE_VA, channel.fence, 1), (IMAGE_VA, image, 16)]
        .into_iter()
        .fold(ops, |ops, (va, at, pages)| ops.run(table, (va / PAGE) as u32, pages, pte(at), PAGE >> 8))
}

/// Creates a channel in an address space whose tables the mediator keeps. `handle` is the handle of the directory, and
/// `handle + 1` the handle of the small-page table.
fn channel(driver: &mut Driver, interface: &mut Interface, id: u8, handle: u32) -> Channel {
    let channel = driver.prepare(id);
    let ops = Ops::new().create(handle, kind::DIRECTORY).create(handle + 1, kind::SMALL);
    let ops = entries(ops, handle + 1, &channel).set(handle, 0, handle + 1, 0).bind(handle, channel.instance);
    let ops = ops.flush(handle).channel(op::CHANNEL_CREATE, id.into()).bind_channel(id.into(), channel.instance);
    let ops = ops.channel(op::CHANNEL_ENABLE, id.into());
    assert_eq!(interface.call(&mut driver.guest, &ops).status, 0);
    // Write an invalid directory address to the instance block. It must be ignored.
    driver.guest.poke(channel.instance + 0x200, 0xdead_0000);
    channel
}

fn refused(reply: &Reply, done: u32, status: Status) {
    assert_eq!((reply.status, reply.done), (status as u32, done), "{reply:?}");
    assert_eq!(reply.answers[done as usize].0, status as u32);
    assert!(reply.answers[done as usize + 1..].iter().all(|answer| *answer == (Status::NotBegun as u32, 0)));
}

#[test]
fn interface_exists_only_where_it_is_offered() {
    let rig = rig();
    let mut stock = rig.guest(0, VM_MIB, 4);
    assert_eq!(capability(&mut stock), None);
    assert_ne!(stock.rd(OFFSET + register::SIGNATURE), pv::abi::SIGNATURE);
    let mut knowing = rig.guest_with(1, &knowing(None));
    let [bar, offset, features] = capability(&mut knowing).expect("the capability exists");
    assert_eq!((bar, offset), (0, OFFSET));
    assert_eq!(features & (feature::TABLES | feature::SHARE | feature::SHARE_ABROAD), feature::TABLES | feature::SHARE);
    assert_eq!(knowing.rd(offset + register::SIGNATURE), pv::abi::SIGNATURE);
}

/// Returns the BAR, offset and features in the interface's capability, or `None` if there is no such capability.
fn capability(guest: &mut Guest) -> Option<[u32; 3]> {
    let word = |guest: &mut Guest, at: u32| {
        let mut word = [0; 4];
        guest.read(RegionIndex::Config, at.into(), &mut word);
        u32::from_le_bytes(word)
    };
    let mut at = word(guest, 0x34) & 0xff;
    while at != 0 {
        let head = word(guest, at);
        if head & 0xff == 9 && word(guest, at + 4) == pv::abi::SIGNATURE {
            return Some([head >> 24, word(guest, at + 12), word(guest, at + 16)]);
        }
        at = head >> 8 & 0xff;
    }
    None
}

#[test]
fn channel_works_in_tables_that_the_mediator_keeps() {
    let rig = rig();
    let (mut driver, mut interface) = guest(&rig, 0, None);
    let mut work = channel(&mut driver, &mut interface, 3, 1);
    assert_eq!(interface.call(&mut driver.guest, &Ops::new().runlist(&[3])).status, 0);
    let (from, to) = (driver.vram(4), driver.vram(4));
    for page in 0..4 {
        driver.guest.vram_write(from + page * PAGE, &pattern(7, page));
    }
    let map = Ops::new()
        .run(2, (A / PAGE) as u32, 4, pte(from), PAGE >> 8)
        .list(2, (B / PAGE) as u32, &[pte(to), pte(to + PAGE), pte(to + 2 * PAGE), pte(to + 3 * PAGE)])
        .flush(1);
    assert_eq!(interface.call(&mut driver.guest, &map).status, 0);
    driver.submit(&mut work, &[object(CE0), ce_copy(A, B, 4)].concat());
    driver.wait(&work);
    assert!(driver.vram_holds(to, 4, 7));
    // Mappings that a batch removes must not be in effect after the batch has completed.
    assert_eq!(interface.call(&mut driver.guest, &Ops::new().zero(2, (B / PAGE) as u32, 4).flush(1)).status, 0);
    driver.submit(&mut work, &[object(CE0), ce_copy(A, B, 4)].concat());
    let fault = driver.wait_fault();
    assert_eq!((fault.instance, fault.va), (work.instance, B));
    let gone = Ops::new().channel(op::CHANNEL_DESTROY, 3).bind(0, work.instance).destroy(2).destroy(1);
    assert_eq!(interface.call(&mut driver.guest, &gone).status, 0);
    assert_eq!(driver.guest.counter("pv_tables"), 0);
}

#[test]
fn paravirtual_interface_and_tables_survive_hand_over() {
    let handover = handover(0);
    let mut rig = handover.rig();
    let (mut driver, mut interface) = guest(&rig, 0, None);
    let mut work = channel(&mut driver, &mut interface, 3, 1);
    assert_eq!(interface.call(&mut driver.guest, &Ops::new().runlist(&[3])).status, 0);
    let (from, to) = (driver.vram(4), driver.vram(4));
    let map =
        Ops::new().run(2, (A / PAGE) as u32, 4, pte(from), PAGE >> 8).run(2, (B / PAGE) as u32, 4, pte(to), PAGE >> 8);
    assert_eq!(interface.call(&mut driver.guest, &map.flush(1)).status, 0);
    let mut operations = driver.guest.counter("pv_operations");
    for round in 0..5 {
        for page in 0..4 {
            driver.guest.vram_write(from + page * PAGE, &pattern(round, page));
        }
        driver.submit(&mut work, &[object(CE0), ce_copy(A, B, 4)].concat());
        handover.hand_over(&mut rig, &mut [&mut driver.guest]);
        driver.wait(&work);
        assert!(driver.vram_holds(to, 4, round));
        assert_eq!(driver.guest.counter("pv_operations"), operations);
        // Batches can still modify the same tables.
        let again = Ops::new().run(2, (B / PAGE) as u32, 4, pte(to), PAGE >> 8).flush(1);
        assert_eq!(interface.call(&mut driver.guest, &again).status, 0);
        operations += 2;
    }
    assert_eq!(interface.call(&mut driver.guest, &Ops::new().zero(2, (B / PAGE) as u32, 4).flush(1)).status, 0);
    driver.submit(&mut work, &[object(CE0), ce_copy(A, B, 4)].concat());
    let fault = driver.wait_fault();
    assert_eq!((fault.instance, fault.va), (work.instance, B), "removed memory is gone");
}

#[test]
fn large_pages_and_ram_are_mapped_as_in_any_table() {
    let rig = rig();
    let (mut driver, mut interface) = guest(&rig, 0, None);
    let mut work = channel(&mut driver, &mut interface, 0, 1);
    // Map 128 KiB of aligned VRAM with one entry of a large-page table, and also pages of RAM.
    let large = driver.vram(64).next_multiple_of(128 << 10);
    let ram = 0x4_0000;
    driver.fill_ram(ram, 4, 9);
    let map = Ops::new()
        .create(5, kind::LARGE)
        .run(5, (A >> 17) as u32, 1, pte(large), 0)
        .set(1, 0, 2, 5)
        .run(2, (B / PAGE) as u32, 4, pte(ram) | 5 << 32, PAGE >> 8)
        .flush(1)
        .runlist(&[0]);
    assert_eq!(interface.call(&mut driver.guest, &map).status, 0);
    driver.submit(&mut work, &[object(CE0), ce_copy(B, A, 4)].concat());
    driver.wait(&work);
    assert!(driver.vram_holds(large, 4, 9));
}

#[test]
fn aperture_is_led_by_a_directory_that_the_mediator_keeps() {
    let rig = rig();
    let (mut driver, mut interface) = guest(&rig, 0, None);
    let (page, instance) = (driver.vram(1), driver.vram(1));
    // Only the limit of the address space is read from the instance block.
    for (offset, value) in [(0x208, 0xffff_ffff), (0x20c, 0xff)] {
        driver.guest.poke(instance + offset, value);
    }
    let ops = Ops::new().create(1, kind::DIRECTORY).create(2, kind::SMALL).set(1, 0, 2, 0).bind(1, instance);
    assert_eq!(interface.call(&mut driver.guest, &ops.run(2, 5, 1, pte(page), 0)).status, 0);
    driver.guest.wr(pbus::BAR3_BLOCK::OFFSET, 0x8000_0000 | (instance >> 12) as u32);
    let mut word = 0x1234_5678u32.to_le_bytes();
    driver.guest.write(RegionIndex::Bar3, 5 * PAGE + 8, &word);
    assert_eq!(driver.guest.peek(page + 8), 0x1234_5678);
    // Mapping another page takes effect after a flush, but binding another directory takes effect immediately.
    let other = driver.vram(1);
    driver.guest.poke(other + 8, 77);
    assert_eq!(interface.call(&mut driver.guest, &Ops::new().run(2, 5, 1, pte(other), 0).flush(1)).status, 0);
    driver.guest.read(RegionIndex::Bar3, 5 * PAGE + 8, &mut word);
    assert_eq!(u32::from_le_bytes(word), 77);
    assert_eq!(interface.call(&mut driver.guest, &Ops::new().create(3, kind::DIRECTORY).bind(3, instance)).status, 0);
    driver.guest.read(RegionIndex::Bar3, 5 * PAGE + 8, &mut word);
    assert_eq!(u32::from_le_bytes(word), u32::MAX);
}

#[test]
fn memory_is_filled_and_copied() {
    let rig = rig();
    let (mut driver, mut interface) = guest(&rig, 0, None);
    let (a, b) = (driver.vram(40), driver.vram(40));
    let ops = Ops::new().fill(a, 40 * PAGE, 0x5a5a_1234).copy(b + 4, a, 39 * PAGE).fill(a + PAGE, PAGE, 0);
    assert_eq!(interface.call(&mut driver.guest, &ops).status, 0);
    let mut data = vec![0; 40 * PAGE as usize];
    driver.guest.vram_read(b, &mut data);
    assert_eq!(data[..4], [0; 4]);
    assert!(data[4..39 * PAGE as usize].chunks_exact(4).all(|word| word == 0x5a5a_1234u32.to_le_bytes()));
    assert_eq!((driver.guest.peek(a + PAGE), driver.guest.peek(a + 2 * PAGE)), (0, 0x5a5a_1234));
    let end = VM_MIB * MIB;
    refused(&interface.call(&mut driver.guest, &Ops::new().fill(end - PAGE, 2 * PAGE, 1)), 0, Status::Range);
    refused(&interface.call(&mut driver.guest, &Ops::new().copy(a, end, 4)), 0, Status::Range);
    refused(&interface.call(&mut driver.guest, &Ops::new().copy(a, a + PAGE, 2 * PAGE)), 0, Status::Invalid);
    refused(&interface.call(&mut driver.guest, &Ops::new().fill(u64::MAX - 3, 4, 0)), 0, Status::Range);
}

#[test]
fn long_batch_releases_vm_lock_between_parts_and_answers_once() {
    const BYTES: u64 = 4 * MIB;
    let rig = rig();
    let (mut driver, mut interface) = guest(&rig, 0, None);
    let (a, b) = (driver.vram(BYTES / PAGE), driver.vram(BYTES / PAGE));
    let held = driver.guest.counter("pv_holds");
    let ops = Ops::new().fill(a, BYTES, 0x5a5a_1234).copy(b, a, BYTES).query(query::VRAM).fill(a, 4, 7);
    let reply = interface.call(&mut driver.guest, &ops);
    assert_eq!((reply.status, reply.done), (0, 4));
    assert_eq!(reply.answers[2], (0, VM_MIB * MIB));
    // Each critical section covers at most 256 KiB.
    assert!(
        driver.guest.counter("pv_holds") - held >= 2 * BYTES / (256 << 10),
        "the VM's lock was held for the whole batch"
    );
    assert_eq!((driver.guest.peek(a), driver.guest.peek(a + BYTES - 4)), (7, 0x5a5a_1234));
    let mut data = vec![0; BYTES as usize];
    driver.guest.vram_read(b, &mut data);
    assert!(data.chunks_exact(4).all(|word| word == 0x5a5a_1234u32.to_le_bytes()));
    // The progress of the last batch must not carry over to the next one. Each flush uses its own critical section.
    let held = driver.guest.counter("pv_holds");
    assert_eq!(interface.call(&mut driver.guest, &Ops::new().flush(0).flush(0).flush(0)).status, 0);
    assert_eq!(driver.guest.counter("pv_holds") - held, 3);
    assert_eq!(interface.used(&driver.guest), 2);
    refused(
        &interface.call(&mut driver.guest, &Ops::new().fill(a, BYTES, 1).fill(VM_MIB * MIB, 4, 1)),
        1,
        Status::Range,
    );
}

#[test]
fn channels_are_set_aside_within_the_limit_and_once() {
    let rig = rig();
    let mut settings = knowing(None);
    settings.share.channels = 2;
    let mut guest = rig.guest_with(0, &settings);
    assert!(guest.map_ram(0, MIB, true));
    let mut driver = Driver::new(guest);
    let mut interface = Interface::open(&mut driver.guest, BASE);
    let create = |id| Ops::new().channel(op::CHANNEL_CREATE, id);
    assert_eq!(interface.call(&mut driver.guest, &create(7)).status, 0);
    refused(&interface.call(&mut driver.guest, &create(7)), 0, Status::Exists);
    refused(&interface.call(&mut driver.guest, &create(128)), 0, Status::Range);
    assert_eq!(interface.call(&mut driver.guest, &create(8)).status, 0);
    refused(&interface.call(&mut driver.guest, &create(9)), 0, Status::Limit);
    for code in [op::CHANNEL_ENABLE, op::CHANNEL_DISABLE, op::CHANNEL_DESTROY] {
        refused(&interface.call(&mut driver.guest, &Ops::new().channel(code, 9)), 0, Status::NoObject);
    }
    refused(&interface.call(&mut driver.guest, &Ops::new().bind_channel(7, VM_MIB * MIB)), 0, Status::Range);
    refused(&interface.call(&mut driver.guest, &Ops::new().runlist(&[7, 128])), 0, Status::Range);
    assert_eq!(interface.call(&mut driver.guest, &Ops::new().channel(op::CHANNEL_DESTROY, 7)).status, 0);
    assert_eq!(interface.call(&mut driver.guest, &create(9)).status, 0);
}

#[test]
fn questions_are_answered() {
    let rig = rig();
    let (mut driver, mut interface) = guest(&rig, 0, None);
    let mut ask = |question| interface.call(&mut driver.guest, &Ops::new().query(question)).value();
    assert_eq!(ask(query::VRAM), VM_MIB * MIB);
    assert_eq!((ask(query::QUOTA), ask(query::GUARANTEE)), (u64::MAX, VM_MIB * MIB));
    let placed = ask(query::PLACED);
    assert!(placed > 0 && placed <= VM_MIB * MIB);
    assert_eq!((ask(query::HOST), ask(query::PRESSURE)), (0, 0));
    assert_eq!((ask(query::TIME_SHARE), ask(query::TABLE_BYTES_LEFT)), (1_000_000, 8 * MIB));
    assert!(ask(query::FREE) > 0 && ask(query::FREE) < u64::from(CARD_MIB) * MIB);
    let tables = Ops::new().create(1, kind::SMALL).query(query::TABLE_BYTES_LEFT);
    assert_eq!(interface.call(&mut driver.guest, &tables).value(), 8 * MIB - 0x4_0000);
    let base = driver.vram(1);
    assert_eq!(interface.call(&mut driver.guest, &Ops::new().priority(base, PAGE, -5)).status, 0);
    refused(&interface.call(&mut driver.guest, &Ops::new().priority(base, VM_MIB * MIB, 0)), 0, Status::Range);
}

#[test]
fn end_of_a_batch_interrupts_if_that_is_wanted() {
    let rig = rig();
    let (mut driver, mut interface) = guest(&rig, 0, None);
    while driver.guest.take_msi() {}
    driver.service();
    interface.call(&mut driver.guest, &Ops::new().query(query::VRAM));
    assert!(!driver.guest.take_msi());
    driver.guest.wr(OFFSET + register::INTERRUPT_ENABLE, 1);
    interface.call(&mut driver.guest, &Ops::new().query(query::VRAM));
    assert!(driver.guest.take_msi());
    assert_eq!(driver.guest.rd(OFFSET + register::INTERRUPT), 1);
    driver.guest.wr(OFFSET + register::INTERRUPT, 1);
    assert_eq!(driver.guest.rd(OFFSET + register::INTERRUPT), 0);
    driver.service();
    assert!(!driver.guest.take_msi());
    // Set the flag in the available ring that suppresses interrupts.
    driver.guest.ram_write(BASE + 0x800, &1u16.to_le_bytes());
    interface.call(&mut driver.guest, &Ops::new().query(query::VRAM));
    assert!(!driver.guest.take_msi());
}

#[test]
fn features_that_were_not_accepted_are_refused() {
    let rig = rig();
    let (mut driver, mut interface) = guest(&rig, 0, None);
    driver.guest.wr(OFFSET + register::FEATURES, 0);
    assert_eq!(
        interface.call(&mut driver.guest, &Ops::new().query(query::VRAM)).status,
        0,
        "the setup is constant once the queue is in use"
    );
    refused(&interface.call(&mut driver.guest, &Ops::new().share_get(1, PAGE, 5, 0)), 0, Status::Unsupported);
    driver.guest.wr(OFFSET + register::STATUS, status::RESET);
    driver.guest.wr(OFFSET + register::FEATURES, feature::QUERY);
    let mut interface = reopen(&mut driver, feature::QUERY);
    assert_eq!(interface.call(&mut driver.guest, &Ops::new().query(query::VRAM)).status, 0);
    refused(&interface.call(&mut driver.guest, &Ops::new().create(1, kind::SMALL)), 0, Status::Unsupported);
}

/// Sets up the interface again, and accepts only `features`.
fn reopen(driver: &mut Driver, features: u32) -> Interface {
    Interface::open_with(&mut driver.guest, BASE, features)
}

#[test]
fn mediator_tables_follow_moved_memory() {
    let rig = super::relocate::rig_of(2 * MIB, CARD_MIB, 64);
    let settings = Settings { paravirtual: Some(offered(None)), ..super::relocate::free_settings(VM_MIB) };
    let mut guest = rig.guest_with(0, &settings);
    assert!(guest.map_ram(0, MIB, true));
    let mut driver = Driver::new(guest);
    let mut interface = Interface::open(&mut driver.guest, BASE);
    let mut work = channel(&mut driver, &mut interface, 0, 1);
    assert_eq!(interface.call(&mut driver.guest, &Ops::new().runlist(&[0])).status, 0);
    let (from, to) = (driver.vram(4), driver.vram(4));
    let map =
        Ops::new().run(2, (A / PAGE) as u32, 4, pte(from), PAGE >> 8).run(2, (B / PAGE) as u32, 4, pte(to), PAGE >> 8);
    assert_eq!(interface.call(&mut driver.guest, &map.flush(1)).status, 0);
    for round in 0..4u32 {
        for page in 0..4 {
            driver.guest.vram_write(from + page * PAGE, &pattern(round, page));
        }
        assert!(super::relocate::move_all(&rig, 0, if round % 2 == 0 { To::Host } else { To::Card }).moved > 0);
        driver.submit(&mut work, &[object(CE0), ce_copy(A, B, 4)].concat());
        driver.wait(&work);
        assert!(driver.vram_holds(to, 4, round), "round {round}");
    }
}

#[test]
fn buffers_of_low_priority_leave_the_card_first() {
    let mut division = super::oversubscribe::fast();
    division.balance.policy = VictimPolicy::Priority;
    let rig = super::oversubscribe::rig_with(64, 64, division);
    let mut settings = Settings { paravirtual: Some(offered(None)), ..super::relocate::free_settings(64) };
    settings.share.memory = Limits::default();
    let mut guest = rig.guest_with(0, &settings);
    assert!(guest.map_ram(0, MIB, true));
    let mut driver = Driver::new(guest);
    let mut interface = Interface::open(&mut driver.guest, BASE);
    // Use one page in each of 24 chunks. Chunks 12 to 15 get the lowest priority.
    let page = |chunk: u64| chunk * CHUNK;
    for chunk in 4..28 {
        driver.guest.vram_write(page(chunk), &pattern(chunk as u32, 0));
    }
    let ops = Ops::new().priority(0, page(32), 50).priority(page(12), 4 * CHUNK, -50);
    assert_eq!(interface.call(&mut driver.guest, &ops).status, 0);
    // Guarantee the remaining memory plus four chunks to another VM.
    let left = rig.usage().0.spare();
    let limits = Limits { guarantee: left + 4, ..Limits::default() };
    super::oversubscribe::driver_with(&rig, 1, u64::from(left + 4) * CHUNK / MIB, limits);
    let in_host: Vec<u64> = (0..32).filter(|chunk| rig.in_host(0, page(*chunk))).collect();
    assert!(in_host.len() >= 4 && [12, 13, 14, 15].iter().all(|chunk| in_host.contains(chunk)), "{in_host:?}");
    for chunk in 4..28 {
        assert!(driver.vram_holds(page(chunk), 1, chunk as u32), "chunk {chunk}");
    }
}

#[test]
fn reset_takes_everything_that_the_interface_made() {
    let rig = rig();
    let (mut driver, mut interface) = guest(&rig, 0, None);
    let mut work = channel(&mut driver, &mut interface, 0, 1);
    assert_eq!(interface.call(&mut driver.guest, &Ops::new().runlist(&[0])).status, 0);
    driver.submit(&mut work, &object(M2MF));
    driver.wait(&work);
    driver.guest.wr(OFFSET + register::STATUS, status::RESET);
    assert_eq!(driver.guest.counter("pv_tables"), 0);
    assert_eq!(driver.guest.status().channels_used, 0);
    let mut interface = reopen(&mut driver, u32::MAX);
    assert_eq!(interface.call(&mut driver.guest, &Ops::new().create(1, kind::DIRECTORY)).status, 0);
    driver.guest.reset();
    assert_eq!(driver.guest.counter("pv_tables"), 0);
    assert_eq!(Interface::status(&mut driver.guest), status::RESET);
}
