//! Tests the loads that a daemon reports for its cards, and the resulting moves.

use super::*;
use crate::fixture::{Fixture, Served, copy, guest};
use ::config::VmSpec;

#[test]
fn rebalance_tries_each_move_once_and_skips_drained_card() {
    let card = |name| format!("[[card]]\nname = \"{name}\"\nkind = \"simgpu\"\nvram_mib = 64\n");
    let served = Served::over(Fixture::real(&["card0", "card1", "card2"].map(card).concat()));
    let daemon = &served.fixture.daemon;
    daemon.mark("card2", true, None).unwrap();
    let mut guests = Vec::new();
    for name in ["x", "y"] {
        daemon.add(VmSpec::new(name, "card0", 16)).unwrap();
        let (mut driver, mut channel) = guest(&served, name);
        copy(&mut driver, &mut channel);
        driver.wait(&channel);
        guests.push(driver);
    }
    let (cards, vms) = daemon.loads(1000);
    let loads: Vec<_> = cards.iter().map(|card| (&*card.name, card.placed_mib > 0)).collect();
    assert_eq!(loads, [("card0", true), ("card1", false)], "a drained card takes no part");
    assert_eq!(vms.iter().map(|vm| vm.placed_mib).sum::<u64>(), cards[0].placed_mib);
    for (vm, name) in vms.iter().zip(["x", "y"]) {
        assert_eq!((&*vm.name, &*vm.card, &*vm.fits), (name, "card0", &["card1".to_owned()][..]));
    }
    let mut rebalancer = Rebalancer::new(RebalanceSpec { above_percent: 1, for_rounds: 1, ..RebalanceSpec::default() });
    let began = Instant::now();
    daemon.rebalance(&mut rebalancer, 1000, began);
    // After an attempted move, whether successful or not, the VM is not moved again for some time.
    let text = daemon.moves.text();
    let tried = |line: &str| text.lines().any(|found| found == line);
    let made = tried("gpu_mediator_moves_total{from=\"card0\",to=\"card1\"} 1");
    assert!(made || tried("gpu_mediator_move_failures_total 1"), "{text}");
    let (cards, vms) = daemon.loads(1000);
    let next = rebalancer.round(began.elapsed(), &cards, &vms);
    assert!(next.is_none_or(|advice| advice.vm != "x"), "x rests");
}
