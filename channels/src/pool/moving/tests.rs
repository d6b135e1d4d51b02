//! Tests channels of a VM that migrates to another card.

use crate::tests::fake::{A, B, World};
use crate::{BindError, MoveError, Pause, Place, Presence, RunState, SavedMoving, Span, work_va};
use nvspec::addr::{GuestVramAddr, VramAddr};
use nvspec::fifo::{ChannelId, VirtualChannelId};
use nvspec::instance::{ramfc, vm};

const CH: VirtualChannelId = VirtualChannelId(0);
/// VRAM address of A's shadow directory on the other card.
const THERE: VramAddr = VramAddr(0x77_0000);

/// Creates a card with two channels of A, one of which has fetched and unfetched work, and a third channel whose bind
/// was rejected.
fn here() -> World {
    let mut world = World::new();
    for channel in [0, 1] {
        world.bind(A, channel);
        world.enable(A, channel, true);
    }
    world.list(A, &[0, 1]);
    world.ring(A, 0, 3).unwrap();
    let doorbell = world.check(A, 0, 5).unwrap();
    world.stage(doorbell).unwrap();
    world.channels.refuse(A, VirtualChannelId(5), Place::Vram(GuestVramAddr(0x1000)), None);
    world
}

/// Creates a card on which another VM has the first channel numbers, and A is paused.
fn there() -> World {
    let mut world = World::new();
    for channel in [0, 1, 2] {
        world.bind(B, channel);
    }
    world.channels.pause(&mut world.card, A, Pause::Standstill, true);
    world
}

fn arrived(here: &mut World, there: &mut World) -> Vec<crate::Arrived> {
    here.channels.pause(&mut here.card, A, Pause::Standstill, true);
    let moving = here.channels.moving(&mut here.card, A).unwrap();
    let place = |left: VramAddr| (left == World::directory_of(A)).then_some(THERE);
    there.channels.arrive(&mut there.card, A, moving, place).unwrap()
}

#[test]
fn migrated_channels_keep_addresses_and_get_new_numbers() {
    let (mut here, mut there) = (here(), there());
    let before = here.channels.physical(A, CH).unwrap();
    let all = arrived(&mut here, &mut there);
    let [first, second] = &all[..] else { panic!("two channels: {all:?}") };
    assert_eq!((first.channel, first.physical, second.physical), (CH, ChannelId(3), ChannelId(4)));
    assert_eq!(there.channels.span(first.physical), Some(Span::from(before)));
    // The submissions get this card's next numbers, and the card may have started the first one.
    assert_eq!(
        first.flights.iter().map(|(number, began)| (number.0, *began)).collect::<Vec<_>>(),
        [(0, true), (1, false)]
    );
    assert_eq!(second.flights, []);
    let word = |offset| there.card.block_word(first.physical, offset);
    assert_eq!(word(ramfc::GP_BASE_LO), work_va(before).0 as u32, "the ring's virtual address has not changed");
    let userd = there.channels.layout().userd(first.physical);
    assert_eq!((word(ramfc::USERD_LO), word(vm::PDB_LO)), (userd.0 as u32, THERE.0 as u32));
    assert_eq!(there.channels.refused(A, VirtualChannelId(5)), Some(Place::Vram(GuestVramAddr(0x1000))));
    // No channel runs before the VM is resumed, and started work does not continue before its slice.
    assert_eq!(there.channels.run_state(first.physical), RunState::Stopped);
    there.channels.pause(&mut there.card, A, Pause::Standstill, false);
    let states = [first, second].map(|one| there.channels.run_state(one.physical));
    assert_eq!(states, [RunState::Stopped, RunState::Running]);
    there.channels.withhold(&mut there.card, first.physical, false);
    assert_eq!(there.channels.run_state(first.physical), RunState::Running);
    assert_eq!(there.channels.presence(&mut there.card, second.physical), Presence::Off);
    // The source is unchanged.
    assert_eq!((here.channels.physical(A, CH), here.channels.in_flight(A, CH)), (Some(before), 2));
}

#[test]
fn channel_bound_after_migration_gets_unused_addresses() {
    let (mut here, mut there) = (here(), there());
    arrived(&mut here, &mut there);
    there.channels.pause(&mut there.card, A, Pause::Standstill, false);
    for channel in [0, 1, 2] {
        there.channels.unbind(&mut there.card, B, VirtualChannelId(channel)).unwrap();
    }
    // All channel numbers are used, including those of the spans.
    let mut numbers = std::collections::BTreeSet::new();
    for _ in 0..130 {
        let physical = there.bind(A, 3);
        let span = there.channels.span(physical).unwrap();
        assert!(![Span(0), Span(1)].contains(&span), "two channels have the same span");
        numbers.insert(physical.0);
        there.channels.unbind(&mut there.card, A, VirtualChannelId(3)).unwrap();
    }
    assert!(numbers.contains(&0) && numbers.contains(&1));
}

#[test]
fn channel_that_has_moved_is_saved_with_its_addresses() {
    let (mut here, mut there) = (here(), there());
    arrived(&mut here, &mut there);
    let layout = there.channels.layout();
    let restored = crate::Channels::restored(there.channels.save(), layout).unwrap();
    assert_eq!(restored.save(), there.channels.save());
}

#[test]
fn channels_that_cannot_come_change_nothing() {
    let mut here = here();
    here.channels.pause(&mut here.card, A, Pause::Standstill, true);
    let mut moving = || here.channels.moving(&mut here.card, A).unwrap();
    let mut full = there();
    full.channels.add_vm(crate::TenantId(3), 128);
    for channel in 0..125 {
        full.bind(crate::TenantId(3), channel);
    }
    let saved = full.channels.save();
    let refused = full.channels.arrive(&mut full.card, A, moving(), |_| Some(THERE));
    assert_eq!(refused, Err(MoveError::Bind(BindError::Full)));
    assert_eq!(full.channels.save(), saved);
    let mut there = there();
    let saved = there.channels.save();
    let refused = there.channels.arrive(&mut there.card, A, moving(), |_| None).unwrap_err().to_string();
    assert!(refused.contains("address space of a channel is missing"), "{refused}");
    there.channels.pause(&mut there.card, A, Pause::Standstill, false);
    let refused = there.channels.arrive(&mut there.card, A, moving(), |_| Some(THERE)).unwrap_err().to_string();
    assert!(refused.contains("is not paused"), "{refused}");
    there.channels.pause(&mut there.card, A, Pause::Standstill, true);
    assert_eq!(there.channels.save(), saved);
    // A channel that is on an engine cannot migrate.
    here.channels.pause(&mut here.card, A, Pause::Standstill, false);
    assert!(here.channels.moving(&mut here.card, A).is_none());
}

/// Returns the dwords that the card stores for a channel, except for GP_PUT in the instance block, which differs from
/// GP_PUT in USERD.
fn held(world: &World, channel: ChannelId) -> Vec<u32> {
    let layout = world.channels.layout();
    let areas =
        [(layout.instance(channel), 0x1000), (layout.userd(channel), 0x1000), (layout.work_area(channel), 0x4000)];
    let images = layout.images_of(channel);
    let words = |(at, bytes): (VramAddr, u64)| (0..bytes / 4).map(move |word| world.card.word(at.0 + word * 4));
    areas.into_iter().chain(images).flat_map(words).skip(1).collect()
}

fn saved(here: &mut World) -> SavedMoving {
    here.channels.pause(&mut here.card, A, Pause::Standstill, true);
    here.channels.moving(&mut here.card, A).unwrap().save().unwrap()
}

#[test]
fn channels_that_were_saved_come_as_those_that_were_not() {
    let (mut one, mut other) = (there(), there());
    let first = arrived(&mut here(), &mut one);
    let bytes = postcard::to_allocvec(&saved(&mut here())).unwrap();
    let moving = postcard::from_bytes::<SavedMoving>(&bytes).unwrap().restored().unwrap();
    assert_eq!(moving.save().unwrap(), saved(&mut here()), "saving restored channels changes nothing");
    let second = other.channels.arrive(&mut other.card, A, moving, |_| Some(THERE)).unwrap();
    assert_eq!(first, second);
    for channel in first {
        assert!(held(&one, channel.physical) == held(&other, channel.physical));
    }
    assert_eq!(one.channels.save(), other.channels.save());
}

#[test]
fn flipped_bits_in_saved_channels_are_rejected_or_harmless() {
    let bytes = postcard::to_allocvec(&saved(&mut here())).unwrap();
    let mut refused = 0;
    // Skip uniform ranges of bytes, such as most of the images.
    let counts =
        |at: &usize| bytes.get(at.saturating_sub(8)..at + 8).is_none_or(|near| near.iter().any(|one| *one != near[0]));
    for at in (0..bytes.len()).filter(counts) {
        for bit in 0..8 {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1 << bit;
            let Ok(saved) = postcard::from_bytes::<SavedMoving>(&bytes) else { continue };
            let mut there = there();
            let came = saved
                .restored()
                .map_err(MoveError::from)
                .and_then(|moving| there.channels.arrive(&mut there.card, A, moving, |_| Some(THERE)));
            let Ok(came) = came else {
                refused += 1;
                continue;
            };
            for one in came {
                let word = |offset| there.card.block_word(one.physical, offset);
                let userd = there.channels.layout().userd(one.physical);
                assert_eq!((word(ramfc::USERD_LO), word(ramfc::USERD_HI)), (userd.0 as u32, 0));
                assert_eq!((word(vm::PDB_LO), word(vm::PDB_HI)), (THERE.0 as u32, 0));
                let span = there.channels.span(one.physical).unwrap();
                assert_eq!(word(ramfc::GP_BASE_LO), work_va(span).0 as u32);
                assert_eq!(
                    (word(ramfc::CONFIG0), word(ramfc::CONFIG1)),
                    (0x1000_3080, 0x1000_0010),
                    "the channel has no privileges"
                );
                let [(graph, _), ..] = there.channels.layout().images_of(one.physical);
                assert_eq!(
                    (there.card.word(graph.0), there.card.word(graph.0 + 4)),
                    (0, 0),
                    "the image lists no registers"
                );
            }
            let again = crate::Channels::restored(there.channels.save(), there.channels.layout());
            assert!(again.is_ok(), "{:?}", again.err());
        }
    }
    assert!(refused > 100, "only {refused} were rejected");
}
