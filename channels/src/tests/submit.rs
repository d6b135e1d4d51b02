use super::*;
use crate::tests::fake::{A, B, Did, World};

const CH: VirtualChannelId = VirtualChannelId(0);

fn finish(world: &mut World, physical: ChannelId, gp_get: u32) {
    world.card.userd.insert((physical.0, userd::GP_GET), gp_get);
}

fn progressed(world: &mut World) -> Vec<VmId> {
    world.channels.progressed(&mut world.card).into_iter().collect()
}

#[test]
fn a_doorbell_reaches_the_hosts_userd() {
    let mut world = World::new();
    world.bind(B, 0);
    let physical = world.run(A, 0);
    assert_eq!(world.ring(A, 0, 1023), Ok(true));
    assert_eq!(world.card.did.last(), Some(&Did::Doorbell(physical.0, 1023)));
}

#[test]
fn a_doorbell_beyond_the_ring_or_without_a_channel_is_refused() {
    let mut world = World::new();
    world.run(A, 0);
    for gp_put in [1024, u32::MAX] {
        assert_eq!(world.ring(A, 0, gp_put), Err(DoorbellError::BeyondRing { gp_put, entries: 1024 }));
    }
    assert_eq!(world.ring(B, 0, 0), Err(DoorbellError::Unbound));
    assert_eq!(world.ring(A, 200, 0), Err(DoorbellError::Unbound));
    assert!(!world.card.did.iter().any(|did| matches!(did, Did::Doorbell(..))));
}

#[test]
fn a_doorbell_of_an_earlier_binding_is_not_rung() {
    let mut world = World::new();
    world.run(A, 0);
    let doorbell = world.channels.doorbell(&mut world.card, &mut world.guest, A, CH, 5).unwrap();
    // All others are taken, so that the same physical channel is bound again.
    world.channels.add_vm(VmId(3), 128);
    for channel in 0..127 {
        world.bind(VmId(3), channel);
    }
    world.channels.unbind(&mut world.card, A, CH).unwrap();
    assert_eq!(world.bind(B, 0), doorbell.channel);
    assert!(!world.channels.ring(&mut world.card, doorbell));
}

#[test]
fn userd_is_found_by_the_guests_address_and_read_from_the_host() {
    let mut world = World::new();
    let physical = world.run(A, 2);
    world.card.userd.insert((physical.0, userd::REF), 77);
    let at = GuestVramAddr(World::userd_of(2) + userd::REF);
    assert_eq!(world.channels.userd_at(A, at), Some((VirtualChannelId(2), userd::REF)));
    assert_eq!(world.channels.userd_at(B, at), None);
    assert_eq!(world.channels.userd_at(A, GuestVramAddr(World::userd_of(3))), None);
    let read = |world: &mut World, offset| world.channels.userd_read(&mut world.card, A, VirtualChannelId(2), offset);
    assert_eq!(read(&mut world, userd::REF), 77);
    assert_eq!(read(&mut world, userd::REF + 2), 77, "the word that holds the byte");
    assert_eq!(read(&mut world, 0x1000), 0);
    assert_eq!(world.channels.userd_read(&mut world.card, B, VirtualChannelId(2), userd::REF), 0);
}

#[test]
fn gp_put_reads_as_written_before_it_is_rung() {
    let mut world = World::new();
    world.run(A, 0);
    world.channels.doorbell(&mut world.card, &mut world.guest, A, CH, 5).unwrap();
    assert_eq!(world.channels.userd_read(&mut world.card, A, CH, userd::GP_PUT), 5);
}

#[test]
fn the_cards_view_of_a_channel_is_translated() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.card.registers.insert(pfifo::CHANNEL_STATE::at(physical.0.into()), 1 << 28 | 1 << 12 | 1 << 4 | 1);
    let all = HardwareState { enabled: true, acquire_pending: true, loaded: true, pending: true };
    assert_eq!(world.channels.hardware_state(&mut world.card, A, CH), all);
    assert_eq!(world.channels.hardware_state(&mut world.card, B, CH), HardwareState::default());
}

#[test]
fn who_has_no_work_is_not_told() {
    let mut world = World::new();
    world.run(A, 0);
    world.run(B, 0);
    assert_eq!(progressed(&mut world), []);
    world.ring(A, 0, 1).unwrap();
    assert_eq!(progressed(&mut world), [A]);
}

#[test]
fn who_is_busy_is_told_each_time() {
    let mut world = World::new();
    world.run(A, 0);
    world.ring(A, 0, 1).unwrap();
    for _ in 0..10 {
        assert_eq!(progressed(&mut world), [A]);
    }
}

#[test]
fn who_has_finished_is_told_and_then_left_alone() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 1).unwrap();
    finish(&mut world, physical, 1);
    // The progress, and twice more for interrupts that were on their way.
    for _ in 0..3 {
        assert_eq!(progressed(&mut world), [A]);
    }
    assert_eq!(progressed(&mut world), []);
    world.ring(A, 0, 2).unwrap();
    assert_eq!(progressed(&mut world), [A]);
}

#[test]
fn an_engine_that_still_works_for_a_fetched_ring_counts() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 1).unwrap();
    finish(&mut world, physical, 1);
    world.card.registers.insert(pfifo::ENGINE_STATUS::at(4), 1 << 31 | u32::from(physical.0));
    for _ in 0..10 {
        assert_eq!(progressed(&mut world), [A]);
    }
    world.card.registers.insert(pfifo::ENGINE_STATUS::at(4), u32::from(physical.0));
    for _ in 0..2 {
        assert_eq!(progressed(&mut world), [A]);
    }
    assert_eq!(progressed(&mut world), []);
}

#[test]
fn a_channel_that_waits_for_a_semaphore_counts() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 1).unwrap();
    finish(&mut world, physical, 1);
    world.card.registers.insert(pfifo::CHANNEL_STATE::at(physical.0.into()), 1 << 4);
    for _ in 0..10 {
        assert_eq!(progressed(&mut world), [A]);
    }
}
