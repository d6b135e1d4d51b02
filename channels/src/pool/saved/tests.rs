//! Tests that saved channels are either restored unchanged or rejected.

use super::*;
use crate::Completion;
use crate::tests::fake::{A, B, LAYOUT, World};
use nvspec::instance::userd;
use proptest::prelude::*;

/// Creates channels of two VMs: with started and unstarted work in flight, with a rejected bind, unbound, and hung.
fn world() -> World {
    let mut world = World::new();
    for (vm, channel) in [(A, 0), (A, 1), (B, 0)] {
        world.bind(vm, channel);
        world.enable(vm, channel, true);
    }
    world.list(A, &[0, 1]);
    world.list(B, &[0]);
    for put in [3, 7] {
        world.ring(A, 0, put).unwrap();
    }
    let doorbell = world.check(A, 1, 5).unwrap();
    world.stage(doorbell).unwrap();
    world.bind(A, 2);
    world.channels.unbind(&mut world.card, A, VirtualChannelId(2)).unwrap();
    world.channels.refuse(B, VirtualChannelId(5), Place::Vram(GuestVramAddr(0x1000)), None);
    let hung = world.bind(B, 1);
    world.card.hung.insert(hung.0);
    world.channels.unbind(&mut world.card, B, VirtualChannelId(1)).unwrap_err();
    world.channels.pause(&mut world.card, B, Pause::Guest, true);
    world
}

fn refused(edit: impl FnOnce(&mut SavedChannels)) -> String {
    let mut saved = world().channels.save();
    edit(&mut saved);
    Channels::restored(saved, LAYOUT).expect_err("restoring succeeded").to_string()
}

fn bound(saved: &mut SavedChannels, vm: TenantId, channel: u8) -> &mut SavedBound {
    let found = saved.slots.iter_mut().find_map(|slot| match slot {
        SavedSlot::Bound(bound) if (bound.vm, bound.channel) == (vm.0, channel) => Some(bound),
        _ => None,
    });
    found.expect("the channel is bound")
}

#[test]
fn work_in_flight_ends_after_a_restore() {
    let mut world = world();
    let saved = world.channels.save();
    let read = postcard::from_bytes(&postcard::to_allocvec(&saved).unwrap()).unwrap();
    world.channels = Channels::restored(read, LAYOUT).unwrap();
    assert_eq!(world.channels.save(), saved);
    assert_eq!(world.userd(A, 0, userd::GP_PUT), 7);
    assert_eq!(world.channels.run_state(world.channels.physical(B, VirtualChannelId(0)).unwrap()), RunState::Stopped);
    let physical = world.channels.physical(A, VirtualChannelId(0)).unwrap();
    world.card.run(physical);
    let ended: Vec<Completion> = world.completed();
    assert_eq!(ended.iter().map(|end| (end.vm, end.sequence, end.entries)).collect::<Vec<_>>(), [(A, 1, 3), (A, 2, 4)]);
    assert_eq!(world.channels.in_flight(A, VirtualChannelId(1)), 1, "the submission was not started");
    assert_eq!(world.channels.stuck(), 1);
}

#[test]
fn directories_are_listed_with_their_vms() {
    let world = world();
    let mut directories: Vec<_> = world.channels.directories().collect();
    directories.sort();
    directories.dedup();
    assert_eq!(directories, [(A, World::directory_of(A)), (B, World::directory_of(B))]);
}

#[test]
fn owners_that_disagree_are_refused() {
    assert!(refused(|saved| bound(saved, A, 1).channel = 0).contains("channel 0 of VM 1 is bound twice"));
    assert!(
        refused(|saved| {
            bound(saved, A, 1).vm = 9;
            saved.vms[0].list = vec![0];
        })
        .contains("bound for VM 9, which does not exist")
    );
    assert!(refused(|saved| bound(saved, A, 1).channel = 200).contains("channel 200 does not exist"));
    assert!(refused(|saved| bound(saved, A, 0).channel = 3).contains("runlist contains a channel"));
    assert!(refused(|saved| saved.vms[0].list = vec![0, 0]).contains("runlist contains a channel"));
    assert!(refused(|saved| bound(saved, A, 0).permit = SavedPermit::Ended).contains("runlist contains a channel"));
    assert!(refused(|saved| saved.vms[0].cap = 1).contains("VM 1: more channels are bound"));
    assert!(refused(|saved| saved.vms[0].trusted = true).contains("must not be trusted"));
    assert!(refused(|saved| saved.vms[0].paused = 0x80).contains("for an unknown reason"));
    assert!(refused(|saved| saved.vms[0].saved[0].0 = 1).contains("both bound and unbound"));
    assert!(refused(|saved| saved.vms[1].refused[0].0 = 0).contains("both bound and unbound"));
    assert!(refused(|saved| saved.vms[1].refused[0].0 = 128).contains("not in order"));
    assert!(refused(|saved| saved.vms[0].unlisted = vec![128]).contains("an unlisted channel does not exist"));
    assert!(refused(|saved| saved.vms.reverse()).contains("VMs are not in order"));
}

#[test]
fn rings_that_cannot_be_are_refused() {
    let ring = |edit: &dyn Fn(&mut SavedRing)| refused(|saved| edit(&mut bound(saved, A, 0).ring));
    assert!(ring(&|ring| ring.entries = 0).contains("0 is not a valid number of ring entries"));
    assert!(ring(&|ring| ring.entries = 1 << 31).contains("entries"));
    assert!(ring(&|ring| ring.gp_put = ring.entries).contains("beyond the end of its ring"));
    assert!(ring(&|ring| ring.next = ring.entries).contains("beyond the end of its ring"));
    assert!(ring(&|ring| ring.target.1 = 99).contains("beyond the end of its ring"));
    assert!(ring(&|ring| ring.gp_base = 4).contains("ring address 0x4"));
    assert!(ring(&|ring| ring.records[0].entries = 600).contains("more entries are in flight than a ring can contain"));
    assert!(ring(&|ring| ring.records[0].entries = 0).contains("more entries are in flight than a ring can contain"));
    assert!(ring(&|ring| ring.started = 3).contains("more entries are in flight than a ring can contain"));
    assert!(ring(&|ring| ring.put = 2).contains("than were submitted"));
    assert!(ring(&|ring| ring.submitted = 1).contains("than were submitted"));
    assert!(ring(&|ring| ring.get += 100).contains("the card is at position 100 of a ring"));
    assert!(ring(&|ring| ring.ends[3] = HOST_END + 1).contains("address of the host"));
    assert!(ring(&|ring| ring.ends.truncate(9)).contains("address of the host"));
    assert!(ring(&|ring| ring.doorbells = u64::MAX).contains("counters of a ring"));
    assert!(ring(&|ring| ring.records[0].submission = ring.records[1].submission).contains("the same number"));
}

/// End of the guest's addresses.
const HOST_END: u64 = nvspec::mmu::HOST_VA_BASE.0;

#[test]
fn other_cards_and_numbers_are_refused() {
    assert!(refused(|saved| saved.layout.instances += 4096).contains("have other addresses"));
    assert!(refused(|saved| drop(saved.slots.pop())).contains("the number of channels is not 128"));
    assert!(refused(|saved| saved.next_slot = 128).contains("channel 128 does not exist"));
    assert!(refused(|saved| saved.golden = vec![0; 1 << 20]).contains("too long"));
    // PGRAPH's firmware would write the registers that such an image lists.
    assert!(refused(|saved| saved.golden[0] = 1).contains("lists registers"));
    assert!(refused(|saved| saved.serial = 0).contains("not assigned yet"));
    assert!(refused(|saved| saved.submissions = 0).contains("not assigned yet"));
    assert!(refused(|saved| saved.submissions = u64::MAX).contains("submissions is too large"));
    assert!(refused(|saved| bound(saved, A, 0).directory = 7).contains("not page-aligned"));
    assert!(refused(|saved| bound(saved, A, 0).userd = 7).contains("not page-aligned"));
    assert!(refused(|saved| bound(saved, A, 0).contexts[0] = Some(1 << 40)).contains("not page-aligned"));
    assert!(refused(|saved| saved.episodes.truncate(1)).contains("number of engines"));
    assert!(refused(|saved| saved.preemptions.waiting = vec![1, 1]).contains("pending preemptions"));
    assert!(
        refused(|saved| saved.preemptions = SavedPreemptions { waiting: vec![], asked: true, looks: 0 })
            .contains("pending preemptions")
    );
}

proptest! {
    /// Checks that corrupt saved channels are either rejected or restored as harmless channels.
    #[test]
    fn edited_bytes_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
        puts in prop::collection::vec((any::<bool>(), 0u8..3, 0u32..20), 0..20),
    ) {
        let mut world = world();
        let mut bytes = postcard::to_allocvec(&world.channels.save()).unwrap();
        prop_assert!(postcard::from_bytes::<SavedChannels>(&bytes[..cut.index(bytes.len())]).is_err());
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let Ok((saved, _)) = postcard::take_from_bytes::<SavedChannels>(&bytes) else { return Ok(()) };
        let Ok(channels) = Channels::restored(saved.clone(), LAYOUT) else { return Ok(()) };
        prop_assert!(channels.save() == saved);
        world.channels = channels;
        for (second, channel, put) in puts {
            let vm = if second { B } else { A };
            let id = VirtualChannelId(channel);
            if let Ok(doorbell) = world.check(vm, channel, put) {
                let _ = world.stage(doorbell);
            }
            for offset in [userd::GP_GET, userd::GET, userd::GP_PUT] {
                world.userd(vm, channel, offset);
            }
            let _ = world.completed();
            let _ = world.channels.saved_words(&mut world.card, vm, id);
            let _ = world.channels.pending_pull();
            let _ = world.channels.look(&mut world.card, u64::from(put));
            let _ = world.channels.vacating(&mut world.card, vm);
        }
        let _ = world.channels.destroy_vm(&mut world.card, A);
        world.channels.card_reset();
    }
}
