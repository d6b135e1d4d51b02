use super::*;
use crate::tests::fake::{A, B, Did, World};
use crate::{DoorbellError, Host};
use nvspec::addr::VramAddr;

const CH: VirtualChannelId = VirtualChannelId(0);

/// Runs the card and pulls until the guest's ring is empty. Returns the number of entries pulled.
fn drain(world: &mut World, physical: ChannelId) -> u32 {
    let mut taken = 0;
    for _ in 0..100 {
        world.card.run(physical);
        world.completed();
        let pending = world.channels.pending_pull();
        if pending.is_empty() {
            return taken;
        }
        for doorbell in pending {
            taken += world.pull(doorbell).unwrap().taken;
        }
    }
    panic!("some entries are never pulled");
}

#[test]
fn card_receives_sanitized_guest_entries_and_record() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    let ring = World::ring_of(A, 0);
    world.guest.entries.insert(ring + 8, 0xf_ffff << 42 | 1 << 40 | 0x4000_0003);
    world.ring(A, 0, 2).unwrap();
    let entries: Vec<u64> =
        world.card.unfetched(physical).into_iter().map(|at| world.card.ring_entry(physical, at)).collect();
    let record = 6 << 42 | 1 << 41 | 0xff_f800_1000;
    assert_eq!(entries, [world.guest.entry(ring), 0xf_ffff << 42 | 0x4000_0000, record]);
}

#[test]
fn next_owner_restores_the_fetch_limit_that_it_has_saved() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 2).unwrap();
    let started = world.card.userd(physical, userd::GP_PUT);
    // An earlier owner has pulled and started entries after the state was saved.
    world.card.set_userd(physical, userd::GP_PUT, started + 3);
    world.channels.allow_again(&mut world.card);
    assert_eq!(world.card.userd(physical, userd::GP_PUT), started);
}

#[test]
fn ring_larger_than_the_hosts_is_pulled_in_pieces() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    assert_eq!(world.ring(A, 0, 1023), Ok(Pulled { submission: None, taken: 510, words: 0, left: 513 }));
    assert_eq!(world.channels.backlog(A, CH), 513);
    assert_eq!(world.channels.pending_pull(), [], "the ring has no space");
    assert_eq!(drain(&mut world, physical), 513);
    assert_eq!(world.card.units[&physical.0].given.len(), 1023);
    assert_eq!(world.channels.backlog(A, CH), 0);
}

#[test]
fn a_little_room_is_not_worth_a_pull_when_much_is_left() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 1000).unwrap();
    for fetched in 1..=129 {
        assert!(world.card.fetch(physical));
        world.completed();
        assert_eq!(world.channels.pending_pull().is_empty(), fetched < 129, "{fetched}");
    }
}

#[test]
fn submissions_are_in_flight_until_records_run_out() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    let mut gp_put = 0;
    for submission in 1..=255u32 {
        gp_put = submission;
        assert_eq!(world.ring(A, 0, gp_put), Ok(Pulled { submission: None, taken: 1, words: 0, left: 0 }));
    }
    assert_eq!(
        world.ring(A, 0, gp_put + 1),
        Ok(Pulled { submission: None, taken: 0, words: 0, left: 1 }),
        "the maximum is 511 entries"
    );
    assert_eq!(world.channels.in_flight(A, CH), 255);
    // All entries were fetched, but none was executed, so the ring has free entries, but only one record is free.
    while world.card.fetch(physical) {}
    assert_eq!(world.ring(A, 0, gp_put + 2), Ok(Pulled { submission: None, taken: 2, words: 0, left: 0 }));
    assert_eq!(world.ring(A, 0, gp_put + 3), Ok(Pulled { submission: None, taken: 0, words: 0, left: 1 }));
    assert_eq!(drain(&mut world, physical), 1);
    assert_eq!(world.card.units[&physical.0].released, (1..=257).collect::<Vec<_>>());
}

#[test]
fn late_doorbell_pulls_nothing() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    let first = world.check(A, 0, 5).unwrap();
    let second = world.check(A, 0, 9).unwrap();
    assert_eq!(world.pull(second), Ok(Pulled { submission: None, taken: 9, words: 0, left: 0 }));
    assert_eq!(world.pull(first), Ok(Pulled::default()));
    assert_eq!(drain(&mut world, physical), 0);
    assert_eq!(world.card.units[&physical.0].given.len(), 9);
}

#[test]
fn doorbell_pulls_entries_up_to_its_own_gp_put() {
    let mut world = World::new();
    world.run(A, 0);
    let first = world.check(A, 0, 5).unwrap();
    let second = world.check(A, 0, 9).unwrap();
    assert_eq!(world.pull(first), Ok(Pulled { submission: None, taken: 5, words: 0, left: 0 }));
    assert_eq!(world.pull(second), Ok(Pulled { submission: None, taken: 4, words: 0, left: 0 }));
}

#[test]
fn an_entry_that_cannot_be_honoured_stops_the_ring_there() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    let raw = 1 << 42 | 0xff_f800_3000;
    world.guest.entries.insert(World::ring_of(A, 0) + 8 * 3, raw);
    let doorbell = world.check(A, 0, 6).unwrap();
    let fault = RingFault::Entry { index: 3, raw };
    assert_eq!(world.pull(doorbell), Err(fault));
    assert_eq!(world.pull(doorbell), Err(fault), "the fault persists");
    assert_eq!(world.channels.pending_pull(), []);
    world.card.run(physical);
    let completions = world.completed();
    assert_eq!(completions.iter().map(|completion| completion.entries).collect::<Vec<_>>(), [3]);
    world.bind(A, 0);
    assert_eq!(
        world.ring(A, 0, 3),
        Ok(Pulled { submission: None, taken: 3, words: 0, left: 0 }),
        "binding it again restarts it"
    );
}

#[test]
fn an_unmapped_page_of_the_ring_stops_there() {
    let mut world = World::new();
    world.run(A, 0);
    let page = World::ring_of(A, 0) + 0x1000;
    world.guest.unmapped.insert(page / 0x1000);
    let doorbell = world.check(A, 0, 600).unwrap();
    // Only 510 entries fit.
    assert_eq!(world.pull(doorbell), Ok(Pulled { submission: None, taken: 510, words: 0, left: 90 }));
    let physical = doorbell.channel;
    world.card.run(physical);
    assert_eq!(world.pull(doorbell), Err(RingFault::Unmapped { va: GpuVa(page) }));
    assert_eq!(world.userd(A, 0, userd::GP_GET), 510);
    world.card.run(physical);
    assert_eq!(world.userd(A, 0, userd::GP_GET), 512);
}

#[test]
fn a_ring_that_reaches_the_hosts_addresses_is_not_read_there() {
    use nvspec::instance::ramfc;
    let mut world = World::new();
    world.try_bind(A, 0).unwrap();
    world.guest.put(World::instance_of(0) + ramfc::GP_BASE_LO, 0xf7ff_fff0);
    world.guest.put(World::instance_of(0) + ramfc::GP_BASE_HI, 10 << 16 | 0xff);
    world.bind_block(A, 0).unwrap();
    world.start(A, 0);
    let doorbell = world.check(A, 0, 3).unwrap();
    assert_eq!(world.pull(doorbell), Err(RingFault::Unmapped { va: GpuVa(0xff_f800_0000) }));
    assert_eq!(world.channels.in_flight(A, CH), 1, "the two entries before the range were submitted");
}

#[test]
fn a_ring_of_one_entry_is_always_empty() {
    use nvspec::instance::ramfc;
    let mut world = World::new();
    world.try_bind(A, 0).unwrap();
    world.guest.put(World::instance_of(0) + ramfc::GP_BASE_HI, 0x12);
    world.bind_block(A, 0).unwrap();
    assert_eq!(world.ring(A, 0, 0), Ok(Pulled::default()));
    assert_eq!(world.ring(A, 0, 1), Err(DoorbellError::BeyondRing { gp_put: 1, entries: 1 }));
}

#[test]
fn the_record_is_cleared_before_it_is_used_again() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    let semaphore = VramAddr(0x40_3000);
    for round in 0..256u32 {
        world.ring(A, 0, round + 1).unwrap();
        world.card.run(physical);
        assert_eq!(world.completed().len(), 1);
    }
    assert_eq!(world.card.word(semaphore.0), 1);
    world.ring(A, 0, 257).unwrap();
    assert_eq!(world.card.word(semaphore.0), 0);
    let cleared = world.card.did.iter().rposition(|did| *did == Did::Vram(semaphore.0, 16)).unwrap();
    assert_eq!(world.card.did.len() - cleared, 3, "the record is followed by a flush and the doorbell");
    let mut time = [1; 16];
    world.card.vram_read(semaphore, &mut time);
    assert_eq!(time, [0; 16]);
}

#[test]
fn nothing_of_an_earlier_owner_is_in_the_work_area() {
    let mut world = World::new();
    world.channels.add_vm(TenantId(3), 128);
    let physical = world.run(A, 0);
    world.ring(A, 0, 100).unwrap();
    world.channels.unbind(&mut world.card, A, CH).unwrap();
    for channel in 0..127 {
        world.bind(TenantId(3), channel);
    }
    assert_eq!(world.bind(B, 0), physical);
    for (_, page, _) in crate::tests::fake::LAYOUT.work_pages(physical, physical.into()) {
        assert!((0..1024).all(|word| world.card.word(page.0 + 4 * word) == 0));
    }
}

#[test]
fn a_stopped_channel_is_not_pending() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 1000).unwrap();
    world.card.run(physical);
    world.completed();
    assert_eq!(world.channels.pending_pull().len(), 1);
    world.channels.pause(&mut world.card, A, crate::Pause::Guest, true);
    assert_eq!(world.channels.pending_pull(), []);
    world.channels.pause(&mut world.card, A, crate::Pause::Guest, false);
    assert_eq!(drain(&mut world, physical), 490);
}

#[test]
fn context_added_while_in_flight_applies_after_completion() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 1).unwrap();
    let before = world.channels.contexts(physical);
    world.guest.put(World::instance_of(0) + 0x230, 0x50_0004);
    let later = Pulled { submission: None, taken: 0, words: 0, left: 1 };
    assert_eq!(world.ring(A, 0, 2), Ok(later), "the engine of later work is not known yet");
    assert_eq!((world.channels.contexts(physical), world.channels.pending_pull()), (before, vec![]));
    assert_eq!(world.card.block_word(physical, 0x230), 0);
    world.card.run(physical);
    world.completed();
    let [doorbell] = world.channels.pending_pull()[..] else { panic!("the doorbell is not pending") };
    assert_eq!(world.pull(doorbell).map(|pulled| pulled.taken), Ok(1));
    assert_eq!(world.card.block_word(physical, 0x230), crate::image::image_vas(physical)[1].0 as u32 | 4);
    assert!(world.channels.contexts(physical)[1] && !before[1]);
}

#[test]
fn hushed_record_ends_as_others_do_and_raises_nothing() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 1).unwrap();
    let doorbell = world.check(A, 0, 2).unwrap();
    let submission = world.stage(doorbell).unwrap().submission.unwrap();
    assert!(world.channels.suppress_completion_irq(&mut world.card, physical, submission));
    assert!(world.channels.start(&mut world.card, physical, submission));
    world.ring(A, 0, 3).unwrap();
    world.card.run(physical);
    assert_eq!((world.completed().len(), world.card.raised), (3, 2));
    assert!(!world.channels.suppress_completion_irq(&mut world.card, physical, submission), "the submission has ended");
}

#[test]
fn channel_is_shallow_with_few_in_flight_and_no_backlog() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    for gp_put in 1..=8 {
        world.ring(A, 0, gp_put).unwrap();
    }
    let doorbell = world.check(A, 0, 9).unwrap();
    assert!(world.channels.is_shallow(physical));
    world.stage(doorbell).unwrap();
    assert!(!world.channels.is_shallow(physical), "many submissions are in flight");
    let physical = world.run(B, 0);
    let doorbell = world.check(B, 0, 1000).unwrap();
    world.stage(doorbell).unwrap();
    assert!(!world.channels.is_shallow(physical), "part of the work was not pulled");
}
