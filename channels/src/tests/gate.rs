use super::*;
use crate::tests::fake::{A, B, World};
use nvspec::instance::context;
use nvspec::regs::pfifo::CHANNEL_STATE;

fn scheduled(world: &World, physical: ChannelId) -> bool {
    let state = world.card.registers.get(&CHANNEL_STATE::at(physical.0.into())).copied().unwrap_or(0);
    CHANNEL_STATE::ENABLED.is_set(state)
}

#[test]
fn only_the_admitted_vms_channels_with_a_graphics_context_are_scheduled() {
    let mut world = World::new();
    for channel in [0, 1] {
        world.guest.put(World::instance_of(channel) + context::GR, 0x40_0000 | context::VALID);
    }
    let (a, b) = (world.run(A, 0), world.run(B, 0));
    assert!(scheduled(&world, a) && scheduled(&world, b), "all may, at first");
    assert_eq!((world.channels.admitted(), world.channels.on_graphics(A)), (None, vec![a]));
    for admitted in [Some(A), Some(B), None, Some(A)] {
        world.channels.admit(&mut world.card, admitted);
        assert_eq!((scheduled(&world, a), scheduled(&world, b)), (admitted == Some(A), admitted == Some(B)));
        assert_eq!(world.channels.admitted(), admitted);
    }
    // A channel without such a context runs even if another VM is admitted.
    let copies = world.run(B, 2);
    assert!(scheduled(&world, copies));
    // The gate also applies to channels that begin to run later.
    let later = world.run(B, 1);
    assert!(!scheduled(&world, later));
    world.channels.pause(&mut world.card, A, crate::Pause::Memory, true);
    world.channels.admit(&mut world.card, Some(B));
    world.channels.admit(&mut world.card, Some(A));
    assert!(!scheduled(&world, a), "it is paused");
    world.channels.pause(&mut world.card, A, crate::Pause::Memory, false);
    assert!(scheduled(&world, a));
    world.channels.trust(B);
    world.channels.admit(&mut world.card, None);
    assert!(scheduled(&world, b) && !scheduled(&world, a), "the host's own always may");
}
