use crate::tests::fake::{A, B, World};
use crate::{DoorbellError, RunState, Stuck};
use nvspec::fifo::VirtualChannelId;

const CH: VirtualChannelId = VirtualChannelId(0);

#[test]
fn retired_channel_stays_off_card_for_any_guest_action() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    let doorbell = world.check(A, 0, 2).unwrap();
    assert_eq!(world.channels.retire(&mut world.card, A, CH), Ok(()));
    assert!(world.card.runlist().is_empty());
    assert!(world.enable(A, 0, true));
    assert_eq!(world.list(A, &[0]).listed, 0);
    assert!(!world.card.enabled(physical));
    assert_eq!(world.check(A, 0, 3), Err(DoorbellError::Unbound));
    assert_eq!(world.pull(doorbell).unwrap().taken, 0);
    assert_eq!(world.channels.pending_pull(), []);
}

#[test]
fn retired_channel_number_is_not_reused_before_unbind() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.channels.retire(&mut world.card, A, CH).unwrap();
    assert_eq!(world.channels.by_physical(physical), Some((A, CH)));
    assert_ne!(world.run(B, 0), physical);
    assert!(world.channels.is_retired(A, CH) && !world.channels.is_retired(B, CH));
    world.channels.unbind(&mut world.card, A, CH).unwrap();
    assert_eq!(world.channels.run_state(physical), RunState::Free);
    // After being bound again, the channel works like any other.
    let again = world.run(A, 0);
    assert!(world.card.enabled(again));
    assert!(!world.channels.is_retired(A, CH));
    assert_eq!(world.ring(A, 0, 1).unwrap().taken, 1);
}

#[test]
fn stuck_channel_is_attributed_to_its_vm() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.run(B, 0);
    world.card.hung.insert(physical.0);
    assert_eq!(world.channels.retire(&mut world.card, A, CH), Err(Stuck { channel: physical }));
    assert!(!world.channels.has_stuck(A), "the channel is still bound");
    world.channels.unbind(&mut world.card, A, CH).unwrap_err();
    assert!(world.channels.has_stuck(A));
    assert!(!world.channels.has_stuck(B));
}

#[test]
fn stranded_channel_number_is_not_reused_before_unstrand() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.channels.strand(A, CH);
    assert_eq!(world.channels.stuck(), 0, "the channel is still bound");
    world.channels.unbind(&mut world.card, A, CH).unwrap();
    assert_eq!(world.channels.run_state(physical), RunState::Stuck);
    assert!(world.channels.has_stuck(A) && world.channels.stuck() == 1);
    assert!(!world.channels.let_go(&mut world.card, physical));
    assert_ne!(world.run(B, 0), physical);
    // The caller removes the channel's work area from the address space, and then permits reuse of the number.
    world.channels.unstrand(physical);
    assert!(world.channels.let_go(&mut world.card, physical));
    assert_eq!(world.channels.run_state(physical), RunState::Free);
}
