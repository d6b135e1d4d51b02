//! Guests that try to take more than their share of the card's time, each beside two that compute all the while.

use std::time::Duration;

use anyhow::Result;
use tests::crowd::{Crowd, name_of};
use tests::rogues::{Rogue, stretched};

/// Rounds of the neighbours' kernels: `madd` and `long-madd` of GPUvm's figures.
const NEIGHBOURS: [u32; 2] = [1, 5];
const MEASURED: Duration = Duration::from_secs(3);

/// What is wrong with how a rogue's neighbours fared; in words, for a look at all of them.
fn complaints(crowd: &mut Crowd, rogue: Rogue) -> Result<Vec<String>> {
    let outcome = rogue.beside(crowd, &NEIGHBOURS, MEASURED)?;
    let charged: f64 = (0..=NEIGHBOURS.len()).map(|place| outcome.received(place)).sum();
    let mut complaints = Vec::new();
    for (place, rounds) in NEIGHBOURS.into_iter().enumerate() {
        let (received, stretched) = (outcome.received(place), stretched(&outcome, place, rounds)?);
        println!("{}: neighbour {place} {received:.3} of {charged:.3}, stretched {stretched:.3}", rogue.name);
        // Parts of what was charged, not of the time: a host that is busy keeps guests from submitting.
        if received < 0.9 / 3.0 * charged {
            complaints.push(format!("{}: neighbour {place} had {received:.3} of {charged:.3}", rogue.name));
        }
        // What it paid for is its own work, and not a rogue's. A look at who holds the card is late on a busy host; without
        // any, it would be ten times as long.
        if stretched > 3.0 {
            complaints.push(format!("{}: neighbour {place}'s kernels took {stretched:.3} times as long", rogue.name));
        }
    }
    let account = &outcome.after[NEIGHBOURS.len()];
    if account.quarantined != rogue.quarantined {
        complaints.push(format!("{}: {account:?}", rogue.name));
    }
    if rogue.quarantined {
        let log = crowd.daemon().log();
        if !(log.contains("a submission runs for longer than it may") && log.contains("a VM is quarantined")) {
            complaints.push(format!("{}: the daemon has not said what it did", rogue.name));
        }
    }
    for neighbour in 0..NEIGHBOURS.len() {
        let shown = tests::guest::show(crowd.daemon(), &name_of(neighbour))?;
        let counters = &shown["counters"];
        if (&counters["faults"], &counters["hangs"]) != (&0.into(), &0.into()) {
            complaints.push(format!("{}: neighbour {neighbour}: {counters}", rogue.name));
        }
    }
    Ok(complaints)
}

#[test]
fn neighbours_of_rogues_keep_their_share() -> Result<()> {
    // One neighbour and the rogue know the mediator: neither takes more nor gets less by that.
    let mut crowd = Crowd::boot_with("rogues", NEIGHBOURS.len() + 1, 512, "", 1)?;
    let mut wrong = Vec::new();
    for rogue in Rogue::ALL {
        wrong.extend(complaints(&mut crowd, rogue)?);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(crowd.daemon().alive());
    Ok(())
}
