//! Tests the domain's pages under its BARs. A guest must find the device's data with and without pages, and after a
//! move.

use super::*;

/// Start addresses of the areas of both BARs.
const AREA_STARTS: [u64; 2] = [PLACE0 + AREA.offset, PLACE1 + AREA.offset];
const HIGH_OFFSET: u64 = 0x10_0000_0000;

/// Creates a domain for which the host has two spare pages.
fn roomy(rig: &Rig) -> FakeDomain {
    rig.domain(FakeSpec { spare: 2, ..FakeSpec::new(1, "guest") })
}

fn frames(places: &[u64]) -> Vec<u64> {
    places.iter().map(|place| place / PAGE).collect()
}

/// Makes a read request, as Xen does for guest accesses to addresses without a page.
fn ask(domain: &FakeDomain, address: u64) -> u64 {
    let request = Request { kind: kind::MEMORY, address, size: 8, count: 1, read: true, ..Request::default() };
    domain.request(0, &request).unwrap()
}

#[test]
fn pages_come_when_a_bar_answers_and_follow_it() {
    let rig = Rig::new();
    let domain = roomy(&rig);
    assert_eq!(domain.all_given(), frames(&AREA_STARTS));
    rig.take_accesses();
    domain.write(0, AREA_STARTS[1] + 8, 8, 0x1234);
    assert_eq!(domain.read(0, AREA_STARTS[1] + 8, 8), 0x1234);
    assert!(rig.take_accesses().is_empty(), "page accesses are not requests");
    assert_eq!(ask(&domain, AREA_STARTS[1] + 8), 0x1234, "a request returns the same data");
    // Accesses before the area must still be trapped.
    domain.write(0, PLACE1 + 8, 8, 7);
    assert_eq!(rig.take_accesses().len(), 2);
    // Move the BAR, with decoding on and off.
    domain.config_write(0x18, 0x10);
    assert_eq!(domain.all_given(), frames(&[AREA_STARTS[0], HIGH_OFFSET + AREA_STARTS[1]]));
    assert_eq!(domain.read(0, HIGH_OFFSET + AREA_STARTS[1] + 8, 8), 0x1234);
    assert_eq!(domain.read(0, AREA_STARTS[1] + 8, 8), u64::MAX);
    domain.config_write(0x04, 0);
    domain.config_write(0x18, 0);
    assert_eq!(domain.all_given(), frames(&[AREA_STARTS[0], HIGH_OFFSET + AREA_STARTS[1]]), "no address responds");
    domain.config_write(0x04, 6);
    assert_eq!(domain.all_given(), frames(&AREA_STARTS));
    assert_eq!(domain.read(0, AREA_STARTS[1] + 8, 8), 0x1234);
    rig.end();
}

#[test]
fn bars_that_change_places_are_served_by_requests() {
    let rig = Rig::new();
    let domain = roomy(&rig);
    domain.write(0, AREA_STARTS[0] + 8, 8, 10);
    domain.write(0, AREA_STARTS[1] + 8, 8, 11);
    domain.config_write(0x04, 0);
    domain.config_write(0x10, PLACE1 as u32);
    domain.config_write(0x14, PLACE0 as u32);
    domain.config_write(0x04, 6);
    assert!(domain.all_given().is_empty());
    assert_eq!((domain.read(0, AREA_STARTS[1] + 8, 8), domain.read(0, AREA_STARTS[0] + 8, 8)), (10, 11));
    domain.write(0, AREA_STARTS[0] + 8, 8, 12);
    assert_eq!(domain.read(0, AREA_STARTS[0] + 8, 8), 12);
    rig.end();
}

#[test]
fn host_without_memory_and_device_that_wants_none_have_requests() {
    for (spare, refuses) in [(1, false), (0, false), (2, true)] {
        let rig = Rig::new();
        rig.seen.lock().refuses = refuses;
        let domain = rig.domain(FakeSpec { spare, ..FakeSpec::new(1, "guest") });
        let given = if refuses { 0 } else { spare as usize };
        assert_eq!(domain.all_given().len(), given, "{spare} {refuses}");
        for place in AREA_STARTS {
            domain.write(0, place, 8, place);
            assert_eq!(domain.read(0, place, 8), place);
        }
        // The server must not retry adding pages.
        domain.config_write(0x04, 0);
        domain.config_write(0x04, 6);
        assert_eq!(domain.all_given().len(), given);
        rig.end();
    }
}

#[test]
fn pages_that_do_not_move_or_are_given_back_lose_nothing() {
    let rig = Rig::new();
    let domain = roomy(&rig);
    domain.write(0, AREA_STARTS[0], 8, 5);
    domain.write(0, AREA_STARTS[1], 8, 6);
    domain.drop_given(AREA_STARTS[0] / PAGE);
    assert_eq!(domain.read(0, AREA_STARTS[0], 8), 5);
    domain.write(0, AREA_STARTS[0], 8, 7);
    assert_eq!(ask(&domain, AREA_STARTS[0]), 7);
    domain.stick();
    domain.config_write(0x18, 0x10);
    assert!(domain.all_given().is_empty());
    assert_eq!(domain.read(0, HIGH_OFFSET + AREA_STARTS[1], 8), 6);
    rig.end();
}

#[test]
fn domain_that_is_no_longer_served_keeps_none() {
    let rig = Rig::new();
    let domain = roomy(&rig);
    assert_eq!(domain.all_given().len(), 2);
    rig.link.disconnect();
    domain.wait_left();
    assert!(domain.all_given().is_empty());
    domain.destroy();
    // Adding pages is attempted again for the next domain with this name.
    let next = rig.domain(FakeSpec { spare: 2, ..FakeSpec::new(2, "guest") });
    assert_eq!(next.all_given(), frames(&AREA_STARTS));
    next.destroy();
    rig.end();
}

#[test]
fn bar_that_a_guest_puts_over_its_own_memory_takes_none_of_it() {
    const RAM: u64 = 0x40_0000;
    let rig = Rig::new();
    let domain = rig.xen.create(FakeSpec { spare: 2, ..FakeSpec::new(1, "guest") });
    domain.wait_served();
    write_memory(&domain, RAM + AREA.offset, b"still here");
    // Place one BAR over guest RAM when it is enabled, and move the other BAR over guest RAM later.
    domain.config_write(0x10, RAM as u32);
    domain.config_write(0x14, PLACE1 as u32);
    domain.config_write(0x04, 6);
    assert_eq!(domain.all_given(), frames(&AREA_STARTS[1..]));
    domain.config_write(0x14, RAM as u32 + 0x10_0000);
    assert!(domain.all_given().is_empty());
    assert_eq!(read_memory(&domain, RAM + AREA.offset, 10), b"still here");
    rig.end();
}
