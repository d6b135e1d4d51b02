//! Guests that mean harm, beside three that do not: what the worst off of these had of the time that it is entitled to.

use std::time::Duration;

use anyhow::Result;
use tests::bench::{Metric, Target};
use tests::crowd::Crowd;
use tests::rogues::{Rogue, worked};

use super::{BAND, LONG_MADD, MADD, percent};

const MEASURED: Duration = Duration::from_secs(6);

/// Measures.
pub fn run(crowd: &mut Crowd) -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    crowd.set(BAND.1)?;
    let neighbours = [MADD, MADD, LONG_MADD];
    let entitled = 1.0 / (neighbours.len() + 1) as f64;
    for rogue in Rogue::ALL {
        eprintln!("bench: sched.guests.rogue.{}", rogue.name);
        let outcome = rogue.beside(crowd, &neighbours, MEASURED)?;
        let row = format!("sched.guests.rogue.{}", rogue.name);
        let received = (0..neighbours.len()).map(|place| outcome.received(place)).fold(1.0, f64::min);
        let worked = (0..).zip(neighbours).map(|(place, rounds)| worked(&outcome, place, rounds));
        let worked = worked.collect::<Result<Vec<_>>>()?.into_iter().fold(1.0, f64::min);
        let account = &outcome.after[neighbours.len()];
        metrics.extend([
            // One percent of the whole time is the target of a share of 25 %.
            percent(format!("{row}.neighbours"), received / entitled).target(Target::AtLeast(96.0)),
            percent(format!("{row}.neighbours_kernels"), worked / entitled),
            Metric::plain(format!("{row}.strikes"), account.strikes as f64, "strikes"),
        ]);
    }
    Ok(metrics)
}
