use super::*;
use crate::image::image_vas;
use crate::tests::fake::{A, B, Did, LAYOUT, World};
use nvspec::instance::{context, userd};
use nvspec::regs::pfifo;
use proptest::prelude::*;
use std::collections::BTreeSet;

#[test]
fn every_illegal_step_is_refused() {
    use RunState::{Free, Running, Stopped, Stuck};
    let legal =
        [(Free, Stopped), (Stopped, Running), (Stopped, Free), (Stopped, Stuck), (Running, Stopped), (Stuck, Free)];
    for from in RunState::ALL {
        for to in RunState::ALL {
            assert_eq!(from.can_go(to), legal.contains(&(from, to)), "{from:?} to {to:?}");
            let taken = std::panic::catch_unwind(|| check(ChannelId(0), from, to));
            assert_eq!(taken.is_ok(), legal.contains(&(from, to)), "{from:?} to {to:?}");
        }
    }
}

#[test]
fn the_same_number_in_two_vms_is_two_channels() {
    let mut world = World::new();
    let (a, b) = (world.bind(A, 3), world.bind(B, 3));
    assert_ne!(a, b);
    assert_eq!(world.channels.by_physical(a), Some((A, VirtualChannelId(3))));
    assert_eq!(world.channels.by_physical(b), Some((B, VirtualChannelId(3))));
    assert_eq!(world.channels.physical(B, VirtualChannelId(3)), Some(b));
    assert_eq!(world.channels.physical(B, VirtualChannelId(4)), None);
    let instance = Place::Vram(GuestVramAddr(World::instance_of(3)));
    assert_eq!(world.channels.by_instance(LAYOUT.instance(b).offset(0x10)), Some((B, VirtualChannelId(3), instance)));
    assert_eq!(world.channels.by_guest_instance(A, instance), Some(VirtualChannelId(3)));
}

#[test]
fn a_directory_is_in_use_while_a_channel_is_bound_to_it() {
    let mut world = World::new();
    let directory = World::directory_of(A);
    assert!(!world.channels.uses_directory(directory));
    world.bind(A, 0);
    assert!(world.channels.uses_directory(directory) && !world.channels.uses_directory(World::directory_of(B)));
    world.channels.unbind(&mut world.card, A, VirtualChannelId(0)).unwrap();
    assert!(!world.channels.uses_directory(directory));
}

#[test]
fn addresses_that_are_no_instance_block_belong_to_no_one() {
    let mut world = World::new();
    world.bind(A, 0);
    let beyond = LAYOUT.instances.offset(128 * INSTANCE_BYTES);
    for address in
        [VramAddr(0), LAYOUT.instances.offset(u64::MAX), beyond, VramAddr(u64::MAX), LAYOUT.instance(ChannelId(1))]
    {
        assert_eq!(world.channels.by_instance(address), None, "{address}");
    }
}

#[test]
fn the_card_sees_the_hosts_instance_block_and_userd() {
    let mut world = World::new();
    let physical = world.bind(A, 7);
    let expected = 0xc000_0000 | (LAYOUT.instance(physical).0 >> 12) as u32;
    assert_eq!(world.card.bound(physical), expected);
    assert_eq!(world.card.block_word(physical, 0x08), LAYOUT.userd(physical).0 as u32);
    assert_eq!(world.card.block_word(physical, 0x200), 0x81_0000);
    let bound = world.card.when(pfifo::CHANNEL::at(physical.0.into()), expected);
    assert_eq!(world.card.did[bound - 1], Did::Flush, "the block is written before the card is notified");
    assert_eq!(world.channels.run_state(physical), RunState::Stopped);
}

#[test]
fn userd_of_an_earlier_owner_is_cleared() {
    let mut world = World::new();
    let physical = world.bind(A, 0);
    let at = LAYOUT.userd(physical).0 + userd::GP_GET;
    crate::Host::vram_write(&mut world.card, VramAddr(at), &[0x55]);
    world.channels.unbind(&mut world.card, A, VirtualChannelId(0)).unwrap();
    assert_eq!(world.card.word(at), 0);
    assert_eq!(world.card.block_word(physical, 0x200), 0);
}

#[test]
fn caps_and_bounds_hold() {
    let mut world = World::new();
    for channel in 0..4 {
        world.bind(A, channel);
    }
    assert_eq!(world.try_bind(A, 4), Err(BindError::Cap { cap: 4 }));
    assert!(world.try_bind(A, 3).is_ok(), "rebinding does not count as an additional channel");
    assert_eq!(world.try_bind(A, 128), Err(BindError::NoSuchChannel));
    assert_eq!(world.try_bind(TenantId(9), 0), Err(BindError::NoSuchVm));
    assert_eq!((world.channels.in_use(A), world.channels.in_use(B)), (4, 0));
}

#[test]
fn a_full_card_refuses_and_a_freed_channel_is_reused() {
    let mut world = World::new();
    let vm = TenantId(5);
    world.channels.add_vm(vm, 128);
    for channel in 0..128 {
        world.bind(vm, channel);
    }
    assert_eq!(world.try_bind(A, 0), Err(BindError::Full));
    world.channels.unbind(&mut world.card, vm, VirtualChannelId(77)).unwrap();
    assert_eq!(world.bind(A, 0), ChannelId(77));
}

#[test]
fn unbinding_goes_stop_kick_list_forget_clear() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.card.did.clear();
    world.channels.unbind(&mut world.card, A, VirtualChannelId(0)).unwrap();
    let stopped = world.card.when(pfifo::CHANNEL_STATE::at(physical.0.into()), 0x001f_0000);
    let listed = world.card.when(pfifo::RUNLIST::OFFSET, 0x01f0_0000);
    let kicked = world.card.when(pfifo::PREEMPT::OFFSET, physical.0.into());
    let forgotten = world.card.when(pfifo::CHANNEL::at(physical.0.into()), 0);
    let cleared = world.card.did.iter().position(|did| *did == Did::Vram(LAYOUT.instance(physical).0, BLOCK)).unwrap();
    assert!(stopped < kicked && kicked < listed && listed < forgotten && forgotten < cleared);
    assert_eq!(world.channels.run_state(physical), RunState::Free);
    assert_eq!(world.channels.physical(A, VirtualChannelId(0)), None);
    // A second unbind has no effect.
    world.card.did.clear();
    assert_eq!(world.channels.unbind(&mut world.card, A, VirtualChannelId(0)), Ok(()));
    assert_eq!(world.card.did, []);
}

#[test]
fn runlist_is_union_of_listed_bound_channels() {
    let mut world = World::new();
    let (a0, a1, b0) = (world.bind(A, 0), world.bind(A, 1), world.bind(B, 0));
    let submitted = world.list(A, &[1, 0, 1, 9, 127]);
    assert_eq!(submitted, Submitted { listed: 2, ignored: 3, taken: true });
    assert_eq!(world.card.runlist(), [u32::from(a1.0), u32::from(a0.0)]);
    let first = world.card.registers[&pfifo::RUNLIST_BASE::OFFSET];
    world.list(B, &[0]);
    assert_eq!(world.card.runlist(), [a1, a0, b0].map(|channel| u32::from(channel.0)));
    assert_ne!(world.card.registers[&pfifo::RUNLIST_BASE::OFFSET], first, "the page that the card reads is unchanged");
    world.list(A, &[]);
    assert_eq!(world.card.runlist(), [u32::from(b0.0)]);
    assert_eq!(world.list(TenantId(9), &[0]), Submitted::default());
}

#[test]
fn rebound_channel_is_not_in_runlist() {
    let mut world = World::new();
    world.run(A, 0);
    let b = world.run(B, 0);
    world.channels.unbind(&mut world.card, A, VirtualChannelId(0)).unwrap();
    world.bind(A, 0);
    world.list(B, &[0]);
    assert_eq!(world.card.runlist(), [u32::from(b.0)]);
}

#[test]
fn vm_cannot_list_enable_or_preempt_unbound_channel() {
    let mut world = World::new();
    world.run(B, 0);
    world.card.did.clear();
    assert!(!world.enable(A, 0, true));
    world.preempt(A, 0);
    assert!(!world.channels.preempting(&mut world.card, A, VirtualChannelId(0)));
    assert_eq!(world.channels.unbind(&mut world.card, A, VirtualChannelId(0)), Ok(()));
    assert_eq!(world.card.did, []);
}

/// Checks the sequence of Linux 6.1: it writes the context pointer to the block of a running channel, and the next
/// event that the host sees is a doorbell.
#[test]
fn context_pointers_written_before_a_doorbell_are_taken_over() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.guest.put(World::instance_of(0) + context::GR, 0x12_3000 | context::VALID);
    world.guest.put(World::instance_of(0) + context::GR + 4, 0x1);
    assert_eq!(world.card.block_word(physical, context::GR), 0);
    world.card.did.clear();
    world.ring(A, 0, 1).unwrap();
    let [image, ..] = image_vas(physical);
    assert_eq!(
        world.card.block_word(physical, context::GR),
        image.0 as u32 | context::VALID,
        "the pointer refers to the host's image"
    );
    assert_eq!(world.card.block_word(physical, context::GR + 4), (image.0 >> 32) as u32);
    let written = [Did::Vram(LAYOUT.instance(physical).0 + context::GR, 8), Did::Flush];
    assert!(matches!(world.card.did[0], Did::Vram(_, 0x2000)), "the image is initialized before it is referenced");
    assert_eq!(world.card.did[1..3], written);
    assert_eq!(
        world.card.did.last(),
        Some(&Did::Doorbell(physical.0, 2)),
        "the doorbell covers an entry and its record"
    );
}

/// Checks the sequence of Linux 6.12: it stops and preempts the channel, writes the pointer, and starts the channel.
#[test]
fn context_pointers_of_stopped_channel_apply_at_start() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.enable(A, 0, false);
    world.preempt(A, 0);
    assert!(!world.card.enabled(physical));
    world.guest.put(World::instance_of(0) + context::CE0, 0x5000 | context::VALID);
    world.card.did.clear();
    world.enable(A, 0, true);
    let [_, image, _] = image_vas(physical);
    assert_eq!(world.card.block_word(physical, context::CE0), image.0 as u32 | context::VALID);
    let started = world.card.when(pfifo::CHANNEL_STATE::at(physical.0.into()), 0x001f_0001);
    let written = Did::Vram(LAYOUT.instance(physical).0 + context::CE0, 8);
    assert!(world.card.did.iter().position(|did| *did == written).unwrap() < started);
    // Linux removes the context again: it preempts the channel, clears the pointer, and submits the list without the
    // channel.
    world.preempt(A, 0);
    world.guest.put(World::instance_of(0) + context::CE0, 0);
    world.list(A, &[0]);
    assert_eq!(world.card.block_word(physical, context::CE0), 0);
}

#[test]
fn other_words_written_after_bind_never_reach_the_card() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    let before = world.card.vram.clone();
    let at = World::instance_of(0);
    for offset in (0..0x1000).step_by(4).filter(|offset| !matches!(offset, 0x210..0x218 | 0x230..0x238 | 0x240..0x248))
    {
        world.guest.put(at + offset, 0xdead_beef);
    }
    world.enable(A, 0, false);
    world.preempt(A, 0);
    world.enable(A, 0, true);
    world.ring(A, 0, 1).unwrap();
    let block = LAYOUT.instance(physical).0 / 4096;
    assert_eq!(before[&block], world.card.vram[&block]);
}

#[test]
fn unreadable_instance_block_keeps_contexts_on_card() {
    let mut world = World::new();
    let guest = world.guest.instance(World::instance_of(0), 0x5000);
    let guest = crate::GuestInstance { contexts: [Some(GpuVa(0x1000)), None, None], ..guest };
    let instance = Place::Ram(nvspec::addr::Gpa(0x1000));
    let bind = Bind { instance, guest: &guest, directory: VramAddr(0) };
    let physical = world.channels.bind(&mut world.card, A, VirtualChannelId(0), bind).unwrap();
    world.enable(A, 0, true);
    assert_eq!(world.card.block_word(physical, context::GR), image_vas(physical)[0].0 as u32 | context::VALID);
}

#[test]
fn paused_vm_runs_no_channel_that_it_enables() {
    let mut world = World::new();
    let (a, b) = (world.run(A, 0), world.run(B, 0));
    world.channels.pause(&mut world.card, A, Pause::Guest, true);
    assert!(!world.card.enabled(a) && world.card.enabled(b));
    world.enable(A, 0, true);
    let late = world.bind(A, 1);
    world.enable(A, 1, true);
    assert!(!world.card.enabled(a) && !world.card.enabled(late));
    assert!(world.channels.hardware_state(&mut world.card, A, VirtualChannelId(0)).enabled, "the guest sees no pause");
    world.enable(A, 1, false);
    world.channels.pause(&mut world.card, A, Pause::Guest, false);
    assert!(world.card.enabled(a) && !world.card.enabled(late));
}

#[test]
fn vm_paused_for_two_reasons_resumes_when_both_clear() {
    let mut world = World::new();
    let a = world.run(A, 0);
    for why in [Pause::Guest, Pause::Memory] {
        world.channels.pause(&mut world.card, A, why, true);
    }
    world.channels.pause(&mut world.card, A, Pause::Guest, false);
    assert!(!world.card.enabled(a));
    world.channels.pause(&mut world.card, A, Pause::Memory, false);
    assert!(world.card.enabled(a));
}

#[test]
fn a_hung_channel_is_out_of_use_until_the_card_is_reset() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.card.hung.insert(physical.0);
    let error = Stuck { channel: physical };
    let reads = world.card.reads;
    assert_eq!(world.channels.unbind(&mut world.card, A, VirtualChannelId(0)), Err(error));
    // The card is locked during an unbind, so the unbind must not wait for the card.
    assert!(world.card.reads - reads < 24, "unbind must not wait");
    assert_eq!(world.channels.run_state(physical), RunState::Stuck);
    assert!(world.channels.uses_directory(VramAddr(0x81_0000)), "the engine may still walk the directory");
    assert_ne!(world.card.block_word(physical, 0x200), 0, "the engine may still save to the block");
    let vm = TenantId(5);
    world.channels.add_vm(vm, 128);
    let bound: BTreeSet<ChannelId> = (0..127).map(|channel| world.bind(vm, channel)).collect();
    assert!(!bound.contains(&physical));
    assert_eq!(world.try_bind(vm, 127), Err(BindError::Full));
    world.channels.card_reset();
    assert_eq!(world.channels.run_state(physical), RunState::Free);
    assert_eq!(world.channels.in_use(vm), 0);
}

#[test]
fn a_hung_channel_is_free_again_once_its_engine_was_reset() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    assert!(!world.channels.let_go(&mut world.card, physical), "the channel is not stuck");
    world.card.hung.insert(physical.0);
    assert_eq!(world.channels.unbind(&mut world.card, A, VirtualChannelId(0)), Err(Stuck { channel: physical }));
    world.card.hung.clear();
    assert!(world.channels.let_go(&mut world.card, physical));
    assert_eq!(world.channels.run_state(physical), RunState::Free);
    assert!(!world.channels.uses_directory(VramAddr(0x81_0000)));
    assert_eq!(world.card.block_word(physical, 0x200), 0, "nothing is left in its block");
}

#[test]
fn a_vm_that_goes_takes_all_its_channels_and_no_others() {
    let mut world = World::new();
    let (a0, b0) = (world.run(A, 0), world.run(B, 0));
    let a1 = world.run(A, 1);
    world.card.hung.insert(a1.0);
    assert_eq!(world.channels.destroy_vm(&mut world.card, A), [Stuck { channel: a1 }]);
    assert_eq!(world.card.runlist(), [u32::from(b0.0)]);
    assert!(world.card.enabled(b0) && !world.card.enabled(a0) && !world.card.enabled(a1));
    assert_eq!((world.card.bound(a0), world.card.bound(a1)), (0, 0));
    assert_eq!(world.channels.by_physical(a0), None);
    assert!(world.channels.destroy_vm(&mut world.card, A).is_empty());
    assert_eq!(world.try_bind(A, 0), Err(BindError::NoSuchVm));
}

#[derive(Clone, Debug)]
enum Op {
    Bind(u8),
    Unbind(u8),
    Enable(u8, bool),
    List(Vec<u8>),
    Preempt(u8),
    Pause(bool),
    Ring(u8, u32),
    Destroy,
}

fn op() -> impl Strategy<Value = Op> {
    let id = || prop_oneof![4 => 0u8..6, 1 => any::<u8>()];
    prop_oneof![
        4 => id().prop_map(Op::Bind),
        2 => id().prop_map(Op::Unbind),
        3 => (id(), any::<bool>()).prop_map(|(id, on)| Op::Enable(id, on)),
        3 => prop::collection::vec(id(), 0..8).prop_map(Op::List),
        1 => id().prop_map(Op::Preempt),
        1 => any::<bool>().prop_map(Op::Pause),
        2 => (id(), 0u32..2000).prop_map(|(id, put)| Op::Ring(id, put)),
        1 => Just(Op::Destroy),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Checks that, after any sequence of operations, each physical channel has one owner, the card's registers agree
    /// with the model, the runlist contains each bound channel at most once, and each operation by one VM leaves the
    /// other VM's state unchanged.
    #[test]
    fn any_sequence_keeps_vms_apart(ops in prop::collection::vec((any::<bool>(), op()), 1..60)) {
        let mut world = World::new();
        for (second, op) in ops {
            let vm = if second { B } else { A };
            let other = if second { A } else { B };
            let theirs: Vec<(ChannelId, u32, bool)> = world.channels.vms.get(&other).into_iter()
                .flat_map(|vm| vm.channels.values())
                .map(|channel| (*channel, world.card.bound(*channel), world.card.enabled(*channel)))
                .collect();
            let card = &mut world.card;
            match op {
                Op::Bind(id) => { let _ = world.try_bind(vm, id); }
                Op::Unbind(id) => world.channels.unbind(card, vm, VirtualChannelId(id)).unwrap(),
                Op::Enable(id, on) => { world.enable(vm, id, on); }
                Op::List(list) => { world.list(vm, &list); }
                Op::Preempt(id) => world.preempt(vm, id),
                Op::Pause(on) => world.channels.pause(card, vm, Pause::Guest, on),
                Op::Ring(id, put) => { let _ = world.ring(vm, id, put); }
                Op::Destroy => {
                    prop_assert!(world.channels.destroy_vm(card, vm).is_empty());
                    world.channels.add_vm(vm, 4);
                }
            }
            for (channel, bound, enabled) in theirs {
                prop_assert_eq!((world.card.bound(channel), world.card.enabled(channel)), (bound, enabled));
                prop_assert_eq!(world.channels.by_physical(channel).map(|(vm, _)| vm), Some(other));
            }
            let mut owned = BTreeSet::new();
            for (vm, record) in &world.channels.vms {
                prop_assert!(record.channels.len() <= 4);
                for (id, physical) in &record.channels {
                    prop_assert!(owned.insert(*physical), "the channel has two owners");
                    prop_assert_eq!(world.channels.by_physical(*physical), Some((*vm, VirtualChannelId(*id))));
                    prop_assert_eq!(world.card.bound(*physical), 0xc000_0000 | (LAYOUT.instance(*physical).0 >> 12) as u32);
                    let runs = world.channels.run_state(*physical) == RunState::Running;
                    prop_assert_eq!(world.card.enabled(*physical), runs);
                }
            }
            for index in 0..128 {
                let channel = ChannelId(index);
                if !owned.contains(&channel) {
                    prop_assert_eq!(world.card.bound(channel), 0);
                    prop_assert!(!world.card.enabled(channel));
                }
            }
            if world.card.registers.contains_key(&pfifo::RUNLIST::OFFSET) {
                let list = world.card.runlist();
                let unique: BTreeSet<u32> = list.iter().copied().collect();
                prop_assert_eq!(unique.len(), list.len());
                prop_assert!(list.iter().all(|id| owned.contains(&ChannelId(*id as u8))));
            }
        }
    }
}

const BLOCK: usize = 4096;

#[test]
fn runlist_change_waits_for_removed_channel_without_blocking() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.card.loaded.insert(physical.0);
    let reads = world.card.reads;
    for _ in 0..100 {
        world.list(A, &[0]);
        assert!(!world.list(A, &[]).taken);
        assert!(world.card.runlist().is_empty());
    }
    assert!(world.card.reads - reads < 100 * 24, "the host waited for the card");
    assert!(world.channels.runlists_taken(&mut world.card).is_empty());
    // Other VMs' lists take effect immediately.
    world.run(B, 0);
    assert!(world.list(B, &[]).taken);
    world.card.loaded.clear();
    assert_eq!(world.channels.runlists_taken(&mut world.card), [A]);
    assert!(world.channels.runlists_taken(&mut world.card).is_empty());
}
