//! Guests that mean harm, beside three that do not: what the worst off of these had of the time that it is entitled to.

use std::time::Duration;

use anyhow::Result;
use tests::bench::{Metric, Target};
use tests::crowd::Crowd;
use tests::rogues::{Rogue, stretched};

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
        let stretched = (0..).zip(neighbours).map(|(place, rounds)| stretched(&outcome, place, rounds));
        let stretched = stretched.collect::<Result<Vec<_>>>()?.into_iter().fold(0.0, f64::max);
        let account = &outcome.after[neighbours.len()];
        metrics.extend([
            // One percent of the whole time is the target of a share of 25 %.
            percent(format!("{row}.neighbours"), received / entitled).target(Target::AtLeast(96.0)),
            // By how much longer a kernel was on the card than it takes: the rogue had it in between.
            Metric::plain(format!("{row}.neighbours_stretched"), stretched, "x").target(Target::AtMost(1.1)),
            Metric::plain(format!("{row}.strikes"), account.strikes as f64, "strikes"),
        ]);
    }
    Ok(metrics)
}
