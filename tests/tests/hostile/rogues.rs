//! Tests guests that try to obtain more than their share of the card's time. Each runs at the same time as two guests
//! that compute continuously.

use std::time::Duration;

use anyhow::Result;
use tests::contention::Outcome;
use tests::many_vms::{Crowd, ROUND_NS, name_of};
use tests::rogues::{Rogue, stretched};

/// Number of rounds per kernel, for each of the other guests. The kernels take 2 and 10 ms. Enough kernels are in
/// flight to keep each guest busy even if the host delays it.
const NEIGHBOURS: [u32; 2] = [4, 20];
const MEASURED_TIME: Duration = Duration::from_secs(3);
/// Maximum number of measurements per rogue. A guest that the host schedules late has no work for some time, and the
/// other guests receive its share. A bug in the mediator would show up in every measurement.
const ROUNDS: usize = 3;

/// Describes the harm that a rogue does to the other guests. The test reports all rogues together.
fn complaints(crowd: &mut Crowd, rogue: Rogue) -> Result<Vec<String>> {
    let outcome = rogue.beside(crowd, &NEIGHBOURS, MEASURED_TIME)?;
    let charged: f64 = (0..=NEIGHBOURS.len()).map(|place| outcome.received(place)).sum();
    let mut complaints = Vec::new();
    for (place, rounds) in NEIGHBOURS.into_iter().enumerate() {
        let (received, stretched) = (outcome.received(place), stretched(&outcome, place, rounds)?);
        println!("{}: neighbour {place} {received:.3} of {charged:.3}, stretched {stretched:.3}", rogue.name);
        // The share is relative to all charges instead of the time, because a busy host delays the guests' submissions.
        // A rogue that traps constantly also takes CPU time from the other guests, so it is exempt from this check.
        if received < 0.9 / 3.0 * charged && !Rogue::BY_REGISTERS.contains(&rogue) {
            complaints.push(format!("{}: neighbour {place} had {received:.3} of {charged:.3}", rogue.name));
        }
        // A rogue must not use the card during another guest's kernels. A busy host delays the detection of the rogue.
        // Without detection, the factor would be ten times as large.
        if stretched > 3.0 {
            complaints.push(format!("{}: neighbour {place}'s kernels took {stretched:.3} times as long", rogue.name));
        }
    }
    complaints.extend(paid_for_others(rogue, &outcome));
    let account = &outcome.after[NEIGHBOURS.len()];
    if account.quarantined != rogue.quarantined {
        complaints.push(format!("{}: {account:?}", rogue.name));
    }
    if rogue.quarantined {
        let log = crowd.daemon().log();
        if !(log.contains("a submission exceeds its time limit") && log.contains("a VM is quarantined")) {
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

/// Lists guests that were charged for more than their own kernels while a rogue toggles its channel. Host delays also
/// add to the charges, but the rogue's kernels would add 5 to 25 times the time of a guest's own kernels.
fn paid_for_others(rogue: Rogue, outcome: &Outcome) -> Vec<String> {
    if !Rogue::BY_REGISTERS.contains(&rogue) {
        return Vec::new();
    }
    let complaint = |(place, rounds): (usize, u32)| {
        // Each kernel consists of two submissions: the launch, and the fence after it.
        let work_ns = outcome.completed(place) as f64 / 2.0 * f64::from(rounds) * ROUND_NS as f64;
        let part = work_ns / (outcome.received(place) * outcome.length as f64).max(1.0);
        println!("{}: {part:.3} of neighbour {place}'s charges were for its own work", rogue.name);
        (part < 0.2).then(|| format!("{}: {part:.3} of neighbour {place}'s charges were for its own work", rogue.name))
    };
    (0..).zip(NEIGHBOURS).filter_map(complaint).collect()
}

#[test]
fn neighbours_of_rogues_keep_their_share() -> Result<()> {
    // Boot one guest and the rogue with paravirtual drivers, which must not affect their shares.
    let mut crowd = Crowd::boot_with("rogues", NEIGHBOURS.len() + 1, 512, "", 1)?;
    let mut wrong = Vec::new();
    for rogue in Rogue::ALL.into_iter().chain(Rogue::BY_REGISTERS) {
        let mut found = complaints(&mut crowd, rogue)?;
        for round in 1..ROUNDS {
            if found.is_empty() {
                break;
            }
            println!("{}: measured again after round {round}: {found:?}", rogue.name);
            found = complaints(&mut crowd, rogue)?;
        }
        wrong.extend(found);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(crowd.daemon().alive());
    Ok(())
}
