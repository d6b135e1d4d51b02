use super::*;
use crate::Submission;
use crate::tests::fake::{A, B, World};
use nvspec::regs::pfifo;

const CH: VirtualChannelId = VirtualChannelId(0);
const CE0: u32 = 4;

fn sequences(world: &mut World) -> Vec<u32> {
    world.completed().iter().map(|completion| completion.sequence).collect()
}

fn told(world: &mut World, engine: u32) -> Vec<TenantId> {
    let working = world.channels.at_work(&mut world.card, engine);
    working.union(&world.channels.news(engine)).copied().collect()
}

fn busy(world: &mut World, engine: u32, physical: Option<ChannelId>) {
    let status = physical.map_or(0, |physical| 1 << 31 | u32::from(physical.0));
    world.card.registers.insert(pfifo::ENGINE_STATUS::at(engine), status);
}

#[test]
fn completion_reports_vm_channel_and_times() {
    let mut world = World::new();
    world.bind(B, 7);
    let physical = world.run(A, 3);
    world.now = 100;
    world.ring(A, 3, 5).unwrap();
    assert_eq!(world.completed(), []);
    world.card.time = 999;
    world.card.run(physical);
    world.now = 250;
    let expected = Completion {
        vm: A,
        channel: VirtualChannelId(3),
        physical,
        submission: Submission(0),
        sequence: 1,
        entries: 5,
        submitted_at: 100,
        completed_at: 250,
        card_time_ns: Some(1000),
    };
    assert_eq!(world.completed(), [expected]);
    assert_eq!(world.completed(), [], "once");
    assert_eq!(world.channels.in_flight(A, VirtualChannelId(3)), 0);
}

#[test]
fn several_are_in_flight_and_end_in_order() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    for gp_put in 1..=4 {
        world.ring(A, 0, gp_put).unwrap();
    }
    // Each entry and each record takes two steps: a start and an end.
    for _ in 0..2 {
        while world.card.fetch(physical) {}
        for _ in 0..8 {
            world.card.execute(physical);
        }
        assert!(matches!(sequences(&mut world)[..], [1, 2] | [3, 4]));
    }
    assert_eq!(world.channels.in_flight(A, CH), 0);
}

#[test]
fn forged_semaphore_before_record_fetch_is_ignored() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 1).unwrap();
    world.card.forge(physical, 0, 1);
    world.card.fetch(physical);
    assert_eq!(world.completed(), []);
    world.card.forge(physical, 0, 77);
    world.card.fetch(physical);
    assert_eq!(world.completed(), [], "only the expected payload is a release");
    world.card.run(physical);
    assert_eq!(sequences(&mut world), [1]);
}

#[test]
fn swallowed_record_completes_untimed_when_channel_is_idle() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 1).unwrap();
    world.card.units.get_mut(&physical.0).unwrap().swallow = true;
    while world.card.fetch(physical) {}
    assert_eq!(world.completed(), [], "the work was fetched but not executed");
    world.card.run(physical);
    busy(&mut world, CE0, Some(physical));
    assert_eq!(world.completed(), [], "an engine is running the channel");
    busy(&mut world, CE0, None);
    world.card.registers.insert(pfifo::CHANNEL_STATE::at(physical.0.into()), 1 | 1 << 4);
    assert_eq!(world.completed(), [], "the channel waits for a semaphore");
    world.card.registers.insert(pfifo::CHANNEL_STATE::at(physical.0.into()), 1);
    let completions = world.completed();
    assert_eq!(completions.len(), 1);
    assert_eq!((completions[0].sequence, completions[0].card_time_ns), (1, None));
    assert_eq!(world.completed(), []);
}

#[test]
fn a_channel_that_has_not_read_its_last_record_is_not_at_rest() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.card.coy = true;
    world.ring(A, 0, 2).unwrap();
    world.card.units.get_mut(&physical.0).unwrap().swallow = true;
    while world.card.fetch(physical) {}
    // Start and end the two ranges and the record.
    for _ in 0..6 {
        assert_eq!(world.completed(), []);
        assert!(world.card.execute(physical));
    }
    assert_eq!(sequences(&mut world), [1]);
}

#[test]
fn a_channel_that_is_not_scheduled_is_not_at_rest() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 1).unwrap();
    world.card.units.get_mut(&physical.0).unwrap().swallow = true;
    world.card.run(physical);
    world.channels.pause(&mut world.card, A, crate::Pause::Guest, true);
    assert_eq!(world.completed(), []);
    world.channels.pause(&mut world.card, A, crate::Pause::Guest, false);
    world.list(A, &[]);
    assert_eq!(world.completed(), []);
    world.list(A, &[0]);
    assert_eq!(sequences(&mut world), [1]);
}

#[test]
fn a_swallowed_record_ends_with_the_next_that_is_not() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 1).unwrap();
    world.ring(A, 0, 2).unwrap();
    world.ring(A, 0, 3).unwrap();
    world.card.units.get_mut(&physical.0).unwrap().swallow = true;
    while world.card.fetch(physical) {}
    for _ in 0..8 {
        world.card.execute(physical);
    }
    let times: Vec<_> =
        world.completed().iter().map(|completion| (completion.sequence, completion.card_time_ns)).collect();
    assert_eq!(times, [(1, None), (2, Some(1))]);
}

#[test]
fn rebound_channel_restarts_sequence_at_one() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 1).unwrap();
    world.ring(A, 0, 2).unwrap();
    world.card.run(physical);
    let physical = world.run(A, 0);
    assert_eq!(world.completed(), [], "the work in flight was dropped");
    world.ring(A, 0, 1).unwrap();
    world.card.run(physical);
    assert_eq!(sequences(&mut world), [1]);
}

#[test]
fn without_work_the_card_is_not_asked() {
    struct Silent;
    impl Host for Silent {
        fn read32(&mut self, offset: u32) -> u32 {
            panic!("unexpected read of register {offset:#x}")
        }
        fn write32(&mut self, offset: u32, _value: u32) {
            panic!("unexpected write of register {offset:#x}")
        }
        fn vram_read(&mut self, address: VramAddr, _data: &mut [u8]) {
            panic!("unexpected read at {address}")
        }
        fn vram_write(&mut self, address: VramAddr, _data: &[u8]) {
            panic!("unexpected write at {address}")
        }
        fn vram_flush(&mut self) {
            panic!("unexpected flush")
        }
        fn userd_read(&mut self, channel: ChannelId, _offset: u64) -> u32 {
            panic!("unexpected read of channel {}", channel.0)
        }
        fn userd_write(&mut self, channel: ChannelId, _offset: u64, _value: u32) {
            panic!("unexpected write of channel {}", channel.0)
        }
    }
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 1).unwrap();
    world.card.run(physical);
    assert_eq!(sequences(&mut world), [1]);
    assert_eq!(world.channels.completed(&mut Silent, 0, true), []);
    assert!(!world.channels.busy_directory(&mut Silent, World::directory_of(A)));
}

#[test]
fn a_directory_is_busy_while_its_channels_have_work() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.run(B, 0);
    let busy = |world: &mut World, vm| world.channels.busy_directory(&mut world.card, World::directory_of(vm));
    assert!(!busy(&mut world, A));
    world.ring(A, 0, 1000).unwrap();
    assert!(busy(&mut world, A) && !busy(&mut world, B));
    world.card.run(physical);
    assert!(busy(&mut world, A), "some entries have not been pulled yet");
    world.completed();
    for doorbell in world.channels.pending_pull() {
        world.pull(doorbell).unwrap();
    }
    while world.card.fetch(physical) {}
    assert!(busy(&mut world, A), "the work was fetched but not executed");
    world.card.run(physical);
    assert!(!busy(&mut world, A), "the work has ended, although it was not reported yet");
    world.completed();
    world.ring(A, 0, 1001).unwrap();
    world.card.forge(physical, 2, 3);
    assert_eq!(world.card.word(0x40_3020), 3);
    assert!(busy(&mut world, A), "a forged semaphore does not suffice");
}

#[test]
fn vm_without_work_is_not_notified() {
    let mut world = World::new();
    world.run(A, 0);
    let b = world.run(B, 0);
    assert_eq!(told(&mut world, CE0), []);
    world.ring(A, 0, 1).unwrap();
    assert_eq!(told(&mut world, CE0), [], "the work has not started");
    world.ring(B, 0, 1).unwrap();
    world.card.run(b);
    world.completed();
    assert_eq!(told(&mut world, CE0), [B]);
    world.completed();
    assert_eq!(told(&mut world, CE0), []);
}

#[test]
fn vm_is_notified_once_per_engine_per_round() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 1).unwrap();
    world.card.run(physical);
    world.completed();
    assert_eq!(told(&mut world, CE0), [A]);
    assert_eq!(told(&mut world, CE0), [], "each VM is notified only once");
    assert_eq!(told(&mut world, 0), [A]);
    world.completed();
    assert_eq!(told(&mut world, 5), [], "the VM was notified earlier");
    for engine in [6, 32, u32::MAX] {
        assert_eq!(told(&mut world, engine), []);
    }
}

#[test]
fn ended_work_stays_pending_until_vm_is_notified() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 1).unwrap();
    world.card.run(physical);
    for _ in 0..3 {
        world.completed();
    }
    assert_eq!(told(&mut world, 0), [A]);
}

#[test]
fn vm_with_progress_in_mid_submission_is_notified() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 3).unwrap();
    for _ in 0..3 {
        world.card.fetch(physical);
        world.card.loaded.clear();
        assert_eq!(told(&mut world, 0), [A]);
        assert_eq!(told(&mut world, 0), [], "no progress since then");
        world.card.execute(physical);
        assert_eq!(told(&mut world, 0), [A]);
        world.card.execute(physical);
        assert_eq!(told(&mut world, 0), [A]);
    }
}

#[test]
fn vm_with_work_in_pbdma_or_on_engine_is_notified() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 3).unwrap();
    world.card.fetch(physical);
    for _ in 0..10 {
        assert_eq!(told(&mut world, 0), [A]);
    }
    // No record is in flight, as after a forged semaphore, but the engine is still busy.
    world.card.run(physical);
    world.completed();
    assert_eq!(told(&mut world, 0), [A]);
    world.completed();
    assert_eq!(told(&mut world, 0), []);
    busy(&mut world, 0, Some(physical));
    assert_eq!(told(&mut world, 0), [A]);
    world.card.loaded.clear();
    assert_eq!(told(&mut world, 0), [], "the engine reports the channel number, but the channel is not loaded");
}

#[test]
fn unstarted_submission_stays_pending_when_earlier_one_ends() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 1).unwrap();
    let doorbell = world.check(A, 0, 3).unwrap();
    let submission = world.stage(doorbell).unwrap().submission.unwrap();
    // The first submission's record is not executed, so only the card's idle state shows that the submission has ended.
    world.card.units.get_mut(&physical.0).unwrap().swallow = true;
    world.card.run(physical);
    assert_eq!(world.completed().len(), 1);
    assert_eq!(world.completed(), []);
    assert_eq!(world.userd(A, 0, userd::GP_GET), 1);
    assert!(world.channels.start(&mut world.card, physical, submission));
    assert!(!world.channels.start(&mut world.card, physical, submission));
    world.card.run(physical);
    assert_eq!(world.completed()[0].submission, submission);
    assert_eq!(world.userd(A, 0, userd::GP_GET), 3);
}

#[test]
fn a_record_that_is_forged_ends_nothing_while_the_engine_works() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 1).unwrap();
    world.ring(A, 0, 2).unwrap();
    while world.card.fetch(physical) {}
    let busy = pfifo::ENGINE_STATUS::at(CE0);
    world.card.registers.insert(busy, 1 << 31 | u32::from(physical.0));
    world.card.forge(physical, 0, 1);
    world.card.forge(physical, 1, 2);
    assert_eq!(sequences(&mut world), [1], "the first submission is followed by another one");
    assert!(world.channels.is_deferred());
    assert!(sequences(&mut world).is_empty());
    world.card.registers.insert(busy, 0);
    assert_eq!(sequences(&mut world), [2]);
    assert!(!world.channels.is_deferred());
}

#[test]
fn many_channels_are_polled_in_bounded_rounds() {
    let mut world = World::new();
    world.channels.add_vm(A, 100);
    let b = world.run(B, 0);
    let many: Vec<u8> = (0..100).collect();
    let physical: Vec<ChannelId> = many.iter().map(|channel| world.run(A, *channel)).collect();
    for channel in &many {
        world.ring(A, *channel, 1).unwrap();
    }
    // Keep the first half's work in flight.
    physical.iter().skip(50).for_each(|channel| world.card.run(*channel));
    let mut ended = 0;
    for call in 0..4 {
        world.ring(B, 0, call + 1).unwrap();
        world.card.run(b);
        let found = world.completed();
        assert_eq!(found.iter().filter(|ended| ended.vm == B).count(), 1, "other VMs do not wait for these channels");
        assert!(found.len() <= MAX_POLLED_PER_VM + 1 && world.channels.is_deferred());
        ended += found.len() - 1;
    }
    assert_eq!(ended, 50, "channels after the busy ones are also polled");
}
