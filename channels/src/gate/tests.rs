use super::*;
use crate::tests::fake::{A, B, World};
use nvspec::instance::context;
use nvspec::regs::pfifo::CHANNEL_STATE;

fn scheduled(world: &World, physical: ChannelId) -> bool {
    let state = world.card.registers.get(&CHANNEL_STATE::at(physical.0.into())).copied().unwrap_or(0);
    CHANNEL_STATE::ENABLED.is_set(state)
}

#[test]
fn only_graphics_channels_of_admitted_vm_are_scheduled() {
    let mut world = World::new();
    for channel in [0, 1] {
        world.guest.put(World::instance_of(channel) + context::GR, 0x40_0000 | context::VALID);
    }
    let (a, b) = (world.run(A, 0), world.run(B, 0));
    assert!(scheduled(&world, a) && scheduled(&world, b), "all channels may run initially");
    assert_eq!((world.channels.admitted(), world.channels.on_graphics(A)), (None, vec![a]));
    for admitted in [Some(A), Some(B), None, Some(A)] {
        world.channels.admit(&mut world.card, admitted);
        assert_eq!((scheduled(&world, a), scheduled(&world, b)), (admitted == Some(A), admitted == Some(B)));
        assert_eq!(world.channels.admitted(), admitted);
    }
    // A channel without a PGRAPH context runs even while another VM is admitted.
    let copies = world.run(B, 2);
    assert!(scheduled(&world, copies));
    // The gate also applies to channels that are started later.
    let later = world.run(B, 1);
    assert!(!scheduled(&world, later));
    world.channels.pause(&mut world.card, A, crate::Pause::Memory, true);
    world.channels.admit(&mut world.card, Some(B));
    world.channels.admit(&mut world.card, Some(A));
    assert!(!scheduled(&world, a), "its VM is paused");
    world.channels.pause(&mut world.card, A, crate::Pause::Memory, false);
    assert!(scheduled(&world, a));
    world.channels.trust(B);
    world.channels.admit(&mut world.card, None);
    assert!(scheduled(&world, b) && !scheduled(&world, a), "the host's own channels always may run");
}

/// Starts a VM's channel with a PGRAPH context.
fn graphics(world: &mut World, vm: TenantId, channel: u8) -> ChannelId {
    world.guest.put(World::instance_of(channel) + context::GR, 0x40_0000 | context::VALID);
    world.run(vm, channel)
}

fn pointer(world: &World, physical: ChannelId) -> bool {
    world.card.block_word(physical, context::GR) & context::VALID != 0
}

#[test]
fn copy_only_channel_runs_while_its_vm_is_not_admitted() {
    let mut world = World::new();
    let (a, copies) = (graphics(&mut world, A, 0), world.run(A, 2));
    world.channels.admit(&mut world.card, Some(B));
    assert!(!scheduled(&world, a) && pointer(&world, a));
    assert!(world.channels.set_only_copies(&mut world.card, a, true));
    assert!(scheduled(&world, a) && !pointer(&world, a) && world.channels.only_copies(a));
    assert_eq!((world.channels.contexts(a)[0], world.channels.has_graphics(a)), (false, true));
    assert_eq!((world.channels.on_graphics(A), world.channels.is_shut_out(a)), (vec![], false));
    assert!(world.channels.set_only_copies(&mut world.card, a, false));
    assert!(!scheduled(&world, a) && pointer(&world, a) && !world.channels.only_copies(a));
    // The channel has no PGRAPH state to lose.
    assert!(world.channels.set_only_copies(&mut world.card, copies, true));
    assert!(scheduled(&world, copies) && !world.channels.only_copies(copies));
}

#[test]
fn hung_channel_keeps_its_pgraph_context_state() {
    let mut world = World::new();
    let a = graphics(&mut world, A, 0);
    world.channels.admit(&mut world.card, Some(A));
    world.card.hung.insert(a.0);
    assert!(!world.channels.set_only_copies(&mut world.card, a, true));
    assert!(pointer(&world, a) && scheduled(&world, a));
    world.card.hung.clear();
    assert!(world.channels.set_only_copies(&mut world.card, a, true));
    world.card.hung.insert(a.0);
    assert!(!world.channels.set_only_copies(&mut world.card, a, false));
    assert!(!pointer(&world, a), "the channel still works on PGRAPH, regardless of the admitted VM");
}

#[test]
fn withdrawn_pgraph_context_returns_when_vm_is_admitted() {
    let mut world = World::new();
    let (a, b) = (graphics(&mut world, A, 0), graphics(&mut world, B, 1));
    world.channels.admit(&mut world.card, None);
    world.card.hung.insert(a.0);
    world.channels.ask_to_leave(&mut world.card, a);
    world.channels.withdraw_graphics(&mut world.card, a);
    assert_eq!(world.channels.vacating(&mut world.card, A), [], "no channel has to leave");
    world.channels.admit(&mut world.card, Some(B));
    assert_eq!(
        [a, b].map(|channel| (scheduled(&world, channel), pointer(&world, channel))),
        [(false, false), (true, true)]
    );
    world.channels.admit(&mut world.card, Some(A));
    assert_eq!(
        [a, b].map(|channel| (scheduled(&world, channel), pointer(&world, channel))),
        [(true, true), (false, true)]
    );
}

#[test]
fn graphics_context_returns_after_restore_or_guest_change() {
    let mut world = World::new();
    let a = graphics(&mut world, A, 0);
    world.channels.admit(&mut world.card, Some(B));
    assert!(world.channels.set_only_copies(&mut world.card, a, true));
    world.channels.restore_graphics(&mut world.card);
    assert!(pointer(&world, a) && !scheduled(&world, a));
    assert!(world.channels.set_only_copies(&mut world.card, a, true));
    world.guest.put(World::instance_of(0) + context::CE0, 0x50_0000 | context::VALID);
    world.enable(A, 0, true);
    assert!(pointer(&world, a) && !scheduled(&world, a) && world.channels.contexts(a)[1]);
}
