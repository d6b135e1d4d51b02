//! Tests moving VMs with mapped apertures to another card, saving and restoring them, and migrating them through their
//! client.

use super::super::migration::{state_of, take_in};
use super::super::moving::card;
use super::super::relocate::free_settings;
use super::super::saving::ram_of;
use super::*;
use vgpu::Settings;

/// Offset in BAR3 at which the guest's CPU writes the channel's doorbell. BAR3 shows USERD at offset 0.
const DOORBELL: u64 = 2 * PAGE + userd::GP_PUT;

fn remapped() -> Settings {
    Settings { apertures: Apertures::Remapped, ..free_settings(16) }
}

/// A VM with four pages in the mapped part of BAR1, GPU copies of these pages, and a doorbell that causes no message.
struct Scene {
    driver: Driver,
    channel: Channel,
    /// VRAM address of the four pages.
    from: u64,
    /// VRAM address of the GPU's copies.
    to: u64,
}

impl Scene {
    fn new(rig: &Rig, vm: u32) -> Self {
        let mut guest = rig.guest_with(vm, &remapped());
        assert!(guest.map_ram(0, MIB, true));
        let mut driver = Driver::new(guest);
        let channel = driver.channel(2);
        let from = driver.buffer(&channel, A, 4, 1);
        let to = driver.buffer(&channel, B, 4, 2);
        show(&mut driver, 0, BAR1_MAPPED_AT, from, 4);
        Self { driver, channel, from, to }
    }

    /// Makes the GPU copy the pages, with a doorbell that the CPU writes through the mapped BAR3, and verifies all
    /// bytes.
    fn check(&mut self, cpu3: &Cpu, seed: u32) {
        let Self { driver, channel, to, .. } = self;
        let put = driver.queue_fenced(channel, &[object(CE0), ce_copy(A, B, 4)].concat());
        cpu3.write(DOORBELL, &put.to_le_bytes());
        driver.wait(channel);
        assert!(driver.vram_holds(*to, 4, seed), "seed {seed}");
        assert_eq!((driver.guest.counter("faults"), driver.guest.counter("aperture_aliases")), (0, 0));
    }

    fn cpus(&self) -> [Cpu; 2] {
        [Bar1, Bar3].map(|region| Cpu::for_region(&self.driver.guest, region))
    }
}

#[test]
fn on_another_card_the_client_has_the_same_memory_mapped() {
    let cards = [card(64), card(64)];
    let mut one = Scene::new(&cards[0], 1);
    let [cpu, cpu3] = one.cpus();
    for (seed, to) in [(10, 1), (20, 0), (30, 1)] {
        // The guest's CPU writes while the memory is copied ahead, and after the VM has resumed.
        let meanwhile = |_: &mut Guest| cpu.write(BAR1_MAPPED_AT, &pages(seed, 4));
        one.driver.guest.move_beside(&cards[to], 100 + seed, true, meanwhile, |_, left| drop(left)).unwrap();
        assert!(one.driver.vram_holds(one.from, 4, seed));
        one.check(&cpu3, seed);
        cpu.write(BAR1_MAPPED_AT, &pages(seed + 1, 4));
        one.check(&cpu3, seed + 1);
        assert!(cards[1 - to].usage().0.vms.is_empty(), "none of its resources are left");
    }
    // Pages can still be mapped and unmapped.
    hide(&mut one.driver, 0, BAR1_MAPPED_AT, 4);
    assert!(one.driver.vram_holds(one.from, 4, 31) && cpu.is_zero(BAR1_MAPPED_AT, 4 * PAGE));
    show(&mut one.driver, 0, BAR1_MAPPED_AT + 0x10_0000, one.to, 4);
    assert_eq!(cpu.read(BAR1_MAPPED_AT + 0x10_0000, 4 * PAGE), pages(31, 4));
}

#[test]
fn aperture_contents_are_saved_and_restored_into_mappings() {
    let cards = [card(64), card(64)];
    let mut one = Scene::new(&cards[0], 1);
    let [cpu, cpu3] = one.cpus();
    cpu.write(BAR1_MAPPED_AT, &pages(3, 4));
    let saved = one.driver.guest.save().unwrap();
    let ram = ram_of(&one.driver.guest);
    // The VM continues undisturbed, and the restore undoes its later changes.
    cpu.write(BAR1_MAPPED_AT, &pages(4, 4));
    let channel = one.channel;
    assert!(one.driver.vram_holds(one.from, 4, 4));
    one.check(&cpu3, 4);
    cpu.write(BAR1_MAPPED_AT + 0x20_0000, b"nobody's");
    one.driver.guest.ram_write(0, &ram);
    one.driver.guest.restore(&cards[1], 9, &saved).unwrap();
    one.channel = channel;
    assert_eq!(cpu.read(BAR1_MAPPED_AT, 4 * PAGE), pages(3, 4));
    assert!(one.driver.vram_holds(one.from, 4, 3));
    assert!(cpu.is_zero(BAR1_MAPPED_AT + 0x20_0000, 8), "no page has its home there");
    one.check(&cpu3, 3);
    cpu.write(BAR1_MAPPED_AT, &pages(5, 4));
    one.check(&cpu3, 5);
}

#[test]
fn rejected_state_leaves_mapped_apertures_unchanged() {
    let cards = [card(64), card(64)];
    let mut one = Scene::new(&cards[0], 1);
    let [cpu, cpu3] = one.cpus();
    cpu.write(BAR1_MAPPED_AT, &pages(3, 4));
    let saved = one.driver.guest.save().unwrap();
    cpu.write(BAR1_MAPPED_AT, &pages(4, 4));
    // The client lends more memory now. The restore checks the lent memory last.
    assert!(one.driver.guest.map_ram(MIB, MIB, true));
    let refused = one.driver.guest.restore(&cards[1], 9, &saved).unwrap_err().to_string();
    assert!(refused.contains("the client now lends"), "{refused}");
    assert_eq!(cpu.read(BAR1_MAPPED_AT, 4 * PAGE), pages(4, 4));
    one.check(&cpu3, 4);
    assert!(cards[1].usage().0.vms.is_empty(), "none of its resources are left there");
}

#[test]
fn client_moves_to_device_with_or_without_mapped_apertures() {
    let cards = [card(64), card(64)];
    for (mapped, vm) in [(true, 101), (false, 102)] {
        let mut one = Scene::new(&cards[0], 1);
        let [cpu, cpu3] = one.cpus();
        cpu.write(BAR1_MAPPED_AT, &pages(6, 4));
        let state = state_of(&mut one.driver.guest);
        let settings = if mapped { remapped() } else { free_settings(16) };
        let mut there = cards[1].guest_with(vm, &settings);
        assert!(there.map_ram(0, MIB, true));
        there.ram_write(0, &ram_of(&one.driver.guest));
        take_in(&mut there, &state).unwrap();
        if mapped {
            // The client has mapped other memory, which now shows the first VM's pages.
            let theirs = Cpu::for_region(&there, Bar1);
            assert_eq!(theirs.read(BAR1_MAPPED_AT, 4 * PAGE), pages(6, 4));
            theirs.write(BAR1_MAPPED_AT, &pages(7, 4));
        }
        there.migration().start();
        let before = std::mem::replace(&mut one.driver.guest, there);
        assert_eq!(cpu.read(BAR1_MAPPED_AT, 4 * PAGE), pages(6, 4), "the memory is a copy");
        drop(cpu3);
        before.remove().unwrap();
        if mapped {
            let [_, cpu3] = one.cpus();
            one.check(&cpu3, 7);
        } else {
            assert!(one.driver.vram_holds(one.from, 4, 6));
            let Scene { driver, channel, to, .. } = &mut one;
            copy(driver, channel, A, B, 4);
            assert!(driver.vram_holds(*to, 4, 6));
        }
        one.driver.guest.remove().unwrap();
    }
}

#[test]
fn resumed_client_finds_mapped_apertures_unchanged() {
    let card = card(64);
    let mut one = Scene::new(&card, 1);
    let [cpu, cpu3] = one.cpus();
    cpu.write(BAR1_MAPPED_AT, &pages(8, 4));
    let state = state_of(&mut one.driver.guest);
    assert!(!state.is_empty());
    one.driver.guest.migration().start();
    assert_eq!(cpu.read(BAR1_MAPPED_AT, 4 * PAGE), pages(8, 4));
    one.check(&cpu3, 8);
    // Load a state into a device that was used before. The client's earlier mappings must show the loaded contents.
    cpu.write(BAR1_MAPPED_AT, &pages(9, 4));
    cpu.write(BAR1_MAPPED_AT + 0x20_0000, b"before");
    take_in(&mut one.driver.guest, &state).unwrap();
    one.driver.guest.migration().start();
    assert_eq!(cpu.read(BAR1_MAPPED_AT, 4 * PAGE), pages(8, 4));
    assert!(cpu.is_zero(BAR1_MAPPED_AT + 0x20_0000, 8));
}
