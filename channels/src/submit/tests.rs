use super::*;
use crate::tests::fake::{A, B, Did, World};
use crate::{Place, Pulled};
use nvspec::addr::VramAddr;
use nvspec::instance::ramfc;
use nvspec::mmu::Rights;

const CH: VirtualChannelId = VirtualChannelId(0);

#[test]
fn a_doorbell_reaches_the_hosts_userd() {
    let mut world = World::new();
    world.bind(B, 0);
    let physical = world.run(A, 0);
    assert_eq!(world.ring(A, 0, 3), Ok(Pulled { submission: None, taken: 3, words: 0, left: 0 }));
    assert_eq!(
        world.card.did.last(),
        Some(&Did::Doorbell(physical.0, 4)),
        "the doorbell covers three entries and a record"
    );
    let before = world.card.did.iter().rev().nth(1);
    assert_eq!(before, Some(&Did::Flush), "the data is written before the card is notified");
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
    let doorbell = world.check(A, 0, 5).unwrap();
    // All other channels are in use, so the same physical channel is bound again.
    world.channels.add_vm(TenantId(3), 128);
    for channel in 0..127 {
        world.bind(TenantId(3), channel);
    }
    world.channels.unbind(&mut world.card, A, CH).unwrap();
    assert_eq!(world.bind(B, 0), doorbell.channel);
    assert_eq!(world.pull(doorbell), Ok(Pulled::default()));
    assert!(!world.card.did.iter().any(|did| matches!(did, Did::Doorbell(..))));
}

#[test]
fn userd_is_found_by_the_guests_address_and_read_from_the_host() {
    let mut world = World::new();
    let physical = world.run(A, 2);
    world.card.set_userd(physical, userd::REF, 77);
    let at = GuestVramAddr(World::userd_of(2) + userd::REF);
    assert_eq!(world.channels.userd_at(A, at), Some((VirtualChannelId(2), userd::REF)));
    assert_eq!(world.channels.userd_at(B, at), None);
    assert_eq!(world.channels.userd_at(A, GuestVramAddr(World::userd_of(3))), None);
    assert_eq!(world.userd(A, 2, userd::REF), 77);
    assert_eq!(world.userd(A, 2, userd::REF + 2), 77, "the dword that contains the byte");
    assert_eq!(world.userd(A, 2, 0x1000), 0);
    assert_eq!(world.userd(B, 2, userd::REF), 0);
}

#[test]
fn gp_put_reads_as_written_before_it_is_pulled() {
    let mut world = World::new();
    world.run(A, 0);
    world.check(A, 0, 5).unwrap();
    assert_eq!(world.userd(A, 0, userd::GP_PUT), 5);
    assert_eq!(world.userd(A, 0, userd::GP_GET), 0);
}

#[test]
fn gp_get_is_the_guests_index_entry_by_entry() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    let mut seen = Vec::new();
    for gp_put in [2, 5] {
        world.ring(A, 0, gp_put).unwrap();
    }
    loop {
        seen.push(world.userd(A, 0, userd::GP_GET));
        if !world.card.fetch(physical) {
            break;
        }
    }
    // The host's ring has a record after the second and the fifth guest entry.
    assert_eq!(seen, [0, 1, 2, 2, 3, 4, 5, 5]);
}

#[test]
fn gp_get_wraps_with_the_guests_ring() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    for round in 0..40u32 {
        let gp_put = (round + 1) * 100 % 1024;
        world.ring(A, 0, gp_put).unwrap();
        world.card.run(physical);
        assert_eq!(world.userd(A, 0, userd::GP_GET), gp_put);
        assert_eq!(world.completed().len(), 1);
    }
}

#[test]
fn get_in_a_record_is_the_end_of_the_range_before() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    let ring = World::ring_of(A, 0);
    world.guest.entries.insert(ring, 3 << 42 | 0xab_cdef_0000);
    world.guest.entries.insert(ring + 8, 0);
    assert_eq!((world.userd(A, 0, userd::GET), world.userd(A, 0, userd::GET_HI)), (0, 0));
    world.ring(A, 0, 2).unwrap();
    let get = |world: &mut World| (world.userd(A, 0, userd::GET_HI), world.userd(A, 0, userd::GET));
    while world.card.fetch(physical) {}
    world.card.execute(physical);
    assert_eq!(get(&mut world), (0xab, 0xcdef_0000));
    world.card.execute(physical);
    assert_eq!(get(&mut world), (0xab, 0xcdef_000c));
    // Start and end the entry without a range, and then the record.
    world.card.execute(physical);
    world.card.execute(physical);
    for _ in 0..2 {
        assert!(world.card.execute(physical));
        assert_eq!(get(&mut world), (0xab, 0xcdef_000c));
    }
    assert!(!world.card.execute(physical));
    world.card.set_userd(physical, userd::TOP_LEVEL_GET, 0xf801_1000);
    world.card.set_userd(physical, userd::TOP_LEVEL_GET_HI, 0xff);
    assert_eq!(world.userd(A, 0, userd::TOP_LEVEL_GET), 0, "no host address is shown");
    let own = crate::work_va(physical).0 + 0x1000;
    world.card.set_userd(physical, userd::TOP_LEVEL_GET, own as u32);
    assert_eq!(world.userd(A, 0, userd::TOP_LEVEL_GET), 0xcdef_000c);
    assert_eq!(world.userd(A, 0, userd::TOP_LEVEL_GET_HI), 0xab);
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

/// Checks the sequence of a guest that suspends: it unbinds the channel, keeps the block, and binds the channel again.
#[test]
fn rebound_channel_resumes_at_saved_position() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 1000).unwrap();
    for _ in 0..300 {
        world.card.fetch(physical);
        world.card.execute(physical);
    }
    let live = world.channels.saved_words(&mut world.card, A, CH).unwrap();
    assert_eq!(live, [(ramfc::GP_GET, 300), (ramfc::GP_FETCH, 300), (ramfc::GP_PUT, 1000)]);
    world.channels.unbind(&mut world.card, A, CH).unwrap();
    assert_eq!(
        world.channels.saved_words(&mut world.card, A, CH),
        Some(live),
        "the saved dwords are kept after the unbind"
    );
    for (offset, value) in live {
        world.guest.put(World::instance_of(0) + offset, value);
    }
    let physical = world.bind_block(A, 0).unwrap();
    assert_eq!((world.userd(A, 0, userd::GP_GET), world.userd(A, 0, userd::GP_PUT)), (300, 1000));
    assert!(world.channels.pending_pull().is_empty(), "the guest has not started the channel");
    world.start(A, 0);
    for _ in 0..4 {
        for doorbell in world.channels.pending_pull() {
            world.pull(doorbell).unwrap();
        }
        world.card.run(physical);
        world.completed();
    }
    assert_eq!(world.userd(A, 0, userd::GP_GET), 1000);
    let given = &world.card.units[&physical.0].given;
    assert_eq!(given.len(), 700);
    assert_eq!(given[0], world.guest.entry(World::ring_of(A, 0) + 8 * 300));
}

#[test]
fn saved_indices_beyond_the_ring_are_zero() {
    let mut world = World::new();
    world.try_bind(A, 0).unwrap();
    world.guest.put(World::instance_of(0) + ramfc::GP_GET, 1024);
    world.guest.put(World::instance_of(0) + ramfc::GP_PUT, u32::MAX);
    world.bind_block(A, 0).unwrap();
    assert_eq!((world.userd(A, 0, userd::GP_GET), world.userd(A, 0, userd::GP_PUT)), (0, 0));
    assert_eq!(world.channels.saved_words(&mut world.card, B, CH), None);
}

#[test]
fn refused_channel_is_reported_once() {
    let mut world = World::new();
    let instance = Place::Vram(GuestVramAddr(World::instance_of(9)));
    let refused = VirtualChannelId(9);
    let userd = GuestVramAddr(World::userd_of(9));
    world.channels.refuse(A, refused, instance, Some(userd));
    assert_eq!(world.channels.userd_at(A, userd.offset(userd::GP_PUT)), Some((refused, userd::GP_PUT)));
    assert_eq!(world.channels.userd_at(B, userd), None);
    assert_eq!(world.channels.by_guest_instance(A, instance), Some(refused));
    assert_eq!(world.channels.refused(A, refused), Some(instance));
    assert_eq!(world.check(A, 9, 1), Err(DoorbellError::Refused));
    assert_eq!(world.check(A, 9, 1), Err(DoorbellError::Unbound));
    world.channels.refuse(A, refused, instance, None);
    assert_eq!(world.check(A, 9, 1), Err(DoorbellError::Refused), "the bind was rejected again");
    world.channels.refuse(A, refused, instance, Some(userd));
    world.channels.unbind(&mut world.card, A, refused).unwrap();
    assert_eq!(world.check(A, 9, 1), Err(DoorbellError::Unbound));
    assert_eq!(world.channels.userd_at(A, userd), None);
    world.channels.refuse(A, refused, instance, None);
    world.run(A, 9);
    assert_eq!(world.ring(A, 9, 1), Ok(Pulled { submission: None, taken: 1, words: 0, left: 0 }));
    world.channels.refuse(A, refused, instance, None);
    assert_eq!(world.channels.refused(A, refused), None, "a bound channel is not listed as rejected");
}

#[test]
fn a_vm_has_at_most_128_refused_channels() {
    let mut world = World::new();
    for channel in 0..=255 {
        world.channels.refuse(A, VirtualChannelId(channel), Place::Vram(GuestVramAddr(0)), None);
    }
    assert_eq!(world.channels.vms[&A].refused.len(), 128);
    world.channels.refuse(TenantId(9), CH, Place::Vram(GuestVramAddr(0)), None);
    assert_eq!(world.channels.refused(TenantId(9), CH), None);
    world.channels.card_reset();
    assert_eq!(world.channels.refused(A, CH), None);
}

#[test]
fn the_work_area_is_mapped_read_only_but_for_the_semaphores() {
    let mut world = World::new();
    world.bind(A, 0);
    let physical = world.bind(A, 1);
    assert_eq!(physical.0, 1);
    let at = |page: u64| VramAddr(0x40_4000 + 0x1000 * page);
    let pages = crate::tests::fake::LAYOUT.work_pages(physical, physical.into());
    let (read, write) = (Rights::ReadOnly, Rights::ReadWrite);
    assert_eq!(pages, [(32, at(0), read), (33, at(1), read), (34, at(2), read), (35, at(3), write)]);
    assert_eq!(crate::work_va(physical).0, 0xff_f802_0000);
}
