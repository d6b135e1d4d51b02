//! Tests Xen domains on a card. The same driver works through requests of a simulated hypervisor.

use super::{A, B, VM_MIB, rig};
use rig::driver::{At, CE0, Channel, Driver, M2MF, PAGE, ce_copy, m2mf_copy, object, pattern};
use rig::xen::{XenGuest, XenVm};
use rig::{Machine as _, Rig, settings};
use vgpu::{Apertures, Settings};
use vmm_glue::RegionIndex::Bar1;

/// Size of a domain's RAM in KiB.
const KIB: u64 = 4096;
/// Number of pages per buffer.
const PAGES: u64 = 8;
/// Address of a buffer in RAM.
const RAM: u64 = 0x10_0000;

fn vm(rig: &Rig, number: u32) -> XenVm {
    XenVm::new(rig, number, &settings(VM_MIB, 16), &format!("guest{number}"))
}

/// Returns an initialized driver with a buffer in VRAM at [`A`] and one in RAM at [`B`].
fn ready(vm: &XenVm, id: u16) -> (Driver<XenGuest>, Channel) {
    let mut driver = Driver::new(vm.domain(id, KIB));
    let channel = driver.channel(1);
    driver.buffer(&channel, A, PAGES, 0);
    driver.map(channel.space, B, At::Ram(RAM), PAGES);
    driver.flush();
    (driver, channel)
}

/// Copies RAM to VRAM and back, and verifies the bytes.
fn copies(driver: &mut Driver<XenGuest>, channel: &mut Channel, seed: u32) {
    for page in 0..PAGES {
        driver.guest.ram_write(RAM + page * PAGE, &pattern(seed, page));
    }
    let bytes = (PAGES * PAGE) as u32;
    driver.submit(channel, &[object(M2MF), m2mf_copy(B, A, bytes)].concat());
    assert_eq!(driver.wait_or_fault(channel), None);
    for page in 0..PAGES {
        driver.guest.ram_write(RAM + page * PAGE, &[0; PAGE as usize]);
    }
    driver.submit(channel, &[object(M2MF), m2mf_copy(A, B, bytes)].concat());
    assert_eq!(driver.wait_or_fault(channel), None);
    assert!(driver.ram_holds(RAM, PAGES, seed), "seed {seed}");
}

#[test]
fn domains_share_a_card_and_copy_at_the_same_time() {
    let rig = rig();
    let vms = [vm(&rig, 0), vm(&rig, 1)];
    std::thread::scope(|scope| {
        for (vm, seed) in vms.iter().zip([1000, 2000]) {
            scope.spawn(move || {
                let (mut driver, mut channel) = ready(vm, 1);
                (0..4).for_each(|round| copies(&mut driver, &mut channel, seed + round));
            });
        }
    });
    for vm in &vms {
        assert_eq!(vm.xen.breaches(), [""; 0]);
    }
}

#[test]
fn frames_returned_by_domain_are_unreachable_under_load() {
    let rig = rig();
    let vm = vm(&rig, 0);
    let (mut driver, mut channel) = ready(&vm, 1);
    copies(&mut driver, &mut channel, 3);
    // Keep the card writing to RAM while the domain releases other frames.
    let domain = driver.guest.domain.clone();
    let gone = RAM / PAGE + 2;
    std::thread::scope(|scope| {
        let others = scope.spawn(|| {
            for first in (600..900).step_by(50) {
                domain.give_back(first..first + 3);
            }
        });
        (0..3).for_each(|round| copies(&mut driver, &mut channel, 40 + round));
        others.join().expect("the other thread does not panic");
    });
    // The domain releases a page that the card uses. The page must contain earlier writes, but no later ones.
    domain.give_back(gone..gone + 1);
    let canary = [0x5a; PAGE as usize];
    driver.guest.ram_write(gone * PAGE, &canary);
    driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, PAGES as u32)].concat());
    let fault = driver.wait_fault();
    assert_eq!(fault.instance, channel.instance);
    let mut found = [0; PAGE as usize];
    driver.guest.ram_read(gone * PAGE, &mut found);
    assert!(found == canary, "the card wrote to a frame that now belongs to another domain");
    assert_eq!(vm.xen.breaches(), [""; 0]);
}

#[test]
fn domain_destroyed_in_mid_copy_leaves_clean_card() {
    let rig = rig();
    let (_, channels, ranges) = rig.usage();
    {
        let vm = vm(&rig, 0);
        let (mut driver, mut channel) = ready(&vm, 1);
        copies(&mut driver, &mut channel, 5);
        driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, PAGES as u32)].concat());
        let domain = driver.guest.domain.clone();
        domain.destroy();
        domain.wait_left();
        // The next domain with this name must work.
        let (mut driver, mut channel) = ready(&vm, 2);
        copies(&mut driver, &mut channel, 6);
        driver.guest.domain.destroy();
        driver.guest.domain.wait_left();
    }
    let (_, channels_after, ranges_after) = rig.usage();
    assert_eq!((channels_after, ranges_after), (channels, ranges));
}

/// An offset in the part of BAR1 that is backed by memory.
const BAR1_MAPPED_AT: u64 = 32 << 20;

fn remapped(rig: &Rig) -> XenVm {
    XenVm::new(rig, 0, &Settings { apertures: Apertures::Remapped, ..settings(VM_MIB, 16) }, "guest0")
}

/// Writes a page through an aperture with the guest's CPU, makes the card copy it to another page in the aperture, and
/// verifies the copy.
fn copies_through_an_aperture(driver: &mut Driver<XenGuest>, seed: u32) {
    let mut channel = driver.channel(1);
    let (from, to) = (driver.buffer(&channel, A, 1, 0), driver.buffer(&channel, B, 1, 0));
    for (at, vram) in [(BAR1_MAPPED_AT, from), (BAR1_MAPPED_AT + PAGE, to)] {
        driver.map(driver.apertures[0], at, At::Vram(vram), 1);
    }
    driver.flush();
    driver.guest.write(Bar1, BAR1_MAPPED_AT, &pattern(seed, 0));
    driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
    assert_eq!(driver.wait_or_fault(&channel), None);
    let mut read = [0; PAGE as usize];
    driver.guest.read(Bar1, BAR1_MAPPED_AT + PAGE, &mut read);
    assert!(read[..] == pattern(seed, 0)[..], "seed {seed}");
    // PRAMIN must show the page after BAR1 has unmapped it.
    let space = driver.apertures[0];
    driver.pte(space, BAR1_MAPPED_AT + PAGE, 0, 0);
    driver.flush();
    assert!(driver.vram_holds(to, 1, seed));
}

#[test]
fn domain_has_pages_of_its_own_under_its_apertures() {
    let rig = rig();
    let mut vm = remapped(&rig);
    let mut driver = Driver::new(vm.domain(1, KIB));
    assert!(!driver.guest.domain.all_given().is_empty());
    copies_through_an_aperture(&mut driver, 7);
    assert_eq!(vm.counter("aperture_messages"), 0, "no access arrived as a request");
    assert_eq!(vm.counter("aperture_aliases"), 0);
    // The next domain with this name receives new, zeroed pages. Without host memory, its apertures are trapped.
    driver.guest.domain.destroy();
    driver.guest.domain.wait_left();
    assert!(driver.guest.domain.all_given().is_empty());
    let mut driver = Driver::new(vm.domain(2, KIB));
    copies_through_an_aperture(&mut driver, 8);
    assert_eq!(vm.counter("aperture_messages"), 0);
    driver.guest.domain.destroy();
    driver.guest.domain.wait_left();
    vm.spare = 100;
    let mut driver = Driver::new(vm.domain(3, KIB));
    assert!(driver.guest.domain.all_given().is_empty());
    copies_through_an_aperture(&mut driver, 9);
    assert!(vm.counter("aperture_messages") > 0);
    assert_eq!(vm.xen.breaches(), [""; 0]);
}
