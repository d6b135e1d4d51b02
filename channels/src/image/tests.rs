use super::*;
use crate::tests::fake::{A, B, GOLDEN, LAYOUT, World};
use nvspec::fifo::VirtualChannelId;
use nvspec::instance::context;
use std::collections::BTreeSet;

/// Returns the pages of a channel's PGRAPH image.
fn graph_pages(physical: ChannelId) -> Vec<u64> {
    let first = physical.0 as u32 * PAGE_STRIDE + GRAPH_PAGE;
    LAYOUT.image_pages(physical, physical.into()).filter(|(index, ..)| *index >= first).map(|(_, at, _)| at.0).collect()
}

fn is_golden(world: &World, physical: ChannelId) -> bool {
    let words = GOLDEN.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word));
    let [first, second] = graph_pages(physical)[..] else { panic!("PGRAPH's image has two pages") };
    words.enumerate().all(|(index, golden)| {
        let at = index as u64 * 4;
        let at = if at < SMALL_PAGE { first + at } else { second + at - SMALL_PAGE };
        world.card.word(at) == if index < 2 { 0 } else { golden }
    })
}

#[test]
fn images_are_for_privileged_accesses_and_overlap_nothing() {
    let mut pages = BTreeSet::new();
    let mut indexes = BTreeSet::new();
    for physical in (0..128).map(ChannelId) {
        let work = LAYOUT.work_pages(physical, physical.into());
        assert!(work.iter().all(|(_, _, rights)| *rights != Rights::Privileged));
        let images: Vec<_> = LAYOUT.image_pages(physical, physical.into()).collect();
        assert!(images.iter().all(|(_, _, rights)| *rights == Rights::Privileged));
        let vas = image_vas(physical).map(|va| ((va.0 - nvspec::mmu::HOST_VA_BASE.0) / SMALL_PAGE) as u32);
        assert!(vas.iter().all(|va| images.iter().any(|(index, ..)| index == va)));
        for (index, page, _) in work.into_iter().chain(images) {
            assert!(pages.insert(page) && indexes.insert(index), "{physical:?}");
        }
    }
    assert_eq!(indexes.len(), 128 * 8);
    let end = LAYOUT.images.0 + 128 * LAYOUT.images_stride();
    assert!(pages.iter().all(|page| page.0 < end));
}

#[test]
fn the_largest_image_ends_where_the_next_channels_span_begins() {
    let layout = Layout { graph_image: GRAPH_IMAGE_MAX, ..LAYOUT };
    let last = layout.image_pages(ChannelId(3), ChannelId(3).into()).map(|(index, ..)| index).max();
    assert_eq!(last, Some(4 * PAGE_STRIDE - 1));
}

#[test]
fn new_contexts_are_golden_and_name_no_registers() {
    let mut world = World::new();
    world.channels.add_vm(crate::TenantId(3), 128);
    world.guest.put(World::instance_of(0) + context::GR, 0x40_0000 | context::VALID);
    let physical = world.run(A, 0);
    world.ring(A, 0, 1).unwrap();
    assert!(is_golden(&world, physical));
    // Data that one owner leaves in an image must not reach the next owner.
    for page in graph_pages(physical) {
        crate::Host::vram_write(&mut world.card, VramAddr(page), &[0xee; 4096]);
    }
    world.channels.unbind(&mut world.card, A, VirtualChannelId(0)).unwrap();
    for channel in 0..127 {
        world.bind(crate::TenantId(3), channel);
    }
    world.guest.put(World::instance_of(0) + context::GR, 0x40_0000 | context::VALID);
    assert_eq!(world.run(B, 0), physical);
    world.ring(B, 0, 1).unwrap();
    assert!(is_golden(&world, physical));
}

#[test]
fn context_image_is_reset_only_when_its_pointer_changes() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    let [first, ..] = graph_pages(physical)[..] else { panic!("PGRAPH's image has two pages") };
    for (pointer, golden) in [(0x40_0000, true), (0x40_0000, false), (0x50_0000, true)] {
        world.enable(A, 0, false);
        world.guest.put(World::instance_of(0) + context::GR, pointer | context::VALID);
        world.enable(A, 0, true);
        assert_eq!(world.card.word(first + 0x100) == 0x6060_6060, golden, "{pointer:#x}");
        crate::Host::vram_write(&mut world.card, VramAddr(first + 0x100), &[0; 4]);
    }
}
