use super::MAX_POLLS_PER_CHANNEL;
use crate::TenantId;
use crate::tests::fake::{A, B, Did, World};
use nvspec::fifo::VirtualChannelId;
use nvspec::regs::pfifo;

const CH: VirtualChannelId = VirtualChannelId(0);

fn preempt(world: &mut World, vm: TenantId) {
    world.preempt(vm, CH.0);
}

fn preempting(world: &mut World, vm: TenantId) -> bool {
    world.channels.preempting(&mut world.card, vm, CH)
}

#[test]
fn preemption_ends_at_once_when_card_releases_channel() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    for _ in 0..2 {
        world.card.did.clear();
        preempt(&mut world, A);
        world.card.when(pfifo::PREEMPT::OFFSET, physical.0.into());
        assert!(!preempting(&mut world, A));
    }
}

#[test]
fn hung_channel_does_not_block_preemption_of_others() {
    let mut world = World::new();
    let (a, b) = (world.run(A, 0), world.run(B, 0));
    world.card.hung.insert(a.0);
    let reads = world.card.reads;
    preempt(&mut world, A);
    preempt(&mut world, A);
    assert!(preempting(&mut world, A));
    preempt(&mut world, B);
    let looks = (0..10 * MAX_POLLS_PER_CHANNEL).take_while(|_| preempting(&mut world, B)).count();
    assert!(looks <= MAX_POLLS_PER_CHANNEL as usize, "{looks} looks");
    // The cost of each poll is bounded.
    assert!(world.card.reads - reads < 24 * (looks as u32 + 8));
    assert!(preempting(&mut world, A));
    // Both channels hang, and both are polled repeatedly, so that the departure of either one is detected.
    world.card.hung.insert(b.0);
    preempt(&mut world, B);
    assert!((0..3 * MAX_POLLS_PER_CHANNEL).all(|_| preempting(&mut world, B)));
    world.card.hung.clear();
    assert!((0..3 * MAX_POLLS_PER_CHANNEL).any(|_| !preempting(&mut world, A) && !preempting(&mut world, B)));
}

#[test]
fn pending_preempt_is_rewritten_after_host_uses_register() {
    let mut world = World::new();
    let (a, b) = (world.run(A, 0), world.run(B, 0));
    world.card.hung.insert(a.0);
    preempt(&mut world, A);
    world.channels.unbind(&mut world.card, B, CH).unwrap();
    world.card.did.clear();
    assert!(preempting(&mut world, A));
    world.card.when(pfifo::PREEMPT::OFFSET, a.0.into());
    assert_ne!(a, b);
}

#[test]
fn a_channel_that_is_unbound_is_not_waited_for_under_its_number() {
    let mut world = World::new();
    let a = world.run(A, 0);
    world.card.hung.insert(a.0);
    preempt(&mut world, A);
    assert!(world.channels.unbind(&mut world.card, A, CH).is_err());
    assert!(!preempting(&mut world, A));
    world.run(A, 0);
    assert!(!preempting(&mut world, A));
}

#[test]
fn a_vm_vacates_the_engines_once_all_of_its_channels_have_left() {
    let mut world = World::new();
    let (first, second, other) = (world.run(A, 0), world.run(A, 1), world.run(B, 0));
    world.card.loaded.extend([first.0, second.0, other.0]);
    world.card.hung.insert(second.0);
    world.channels.pause(&mut world.card, A, crate::Pause::Memory, true);
    world.channels.vacate(&mut world.card, A);
    assert_eq!(world.channels.vacating(&mut world.card, A), [VirtualChannelId(1)]);
    assert!(world.channels.vacating(&mut world.card, B).is_empty(), "the VM's channels were not asked to leave");
    world.card.hung.clear();
    assert!((0..3).any(|_| world.channels.vacating(&mut world.card, A).is_empty()));
    for physical in [first, second] {
        world.card.when(pfifo::PREEMPT::OFFSET, physical.0.into());
    }
    let asked = Did::Register(pfifo::PREEMPT::OFFSET, other.0.into());
    assert!(!world.card.did.contains(&asked));
}
