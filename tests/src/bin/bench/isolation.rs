//! A real guest that computes beside one that attacks: what it gets of the time that it has beside a well-behaved guest which
//! always has work. Both are measured in the same run, by the mediator's accounts and the card's clock.

use std::time::Duration;

use anyhow::{Context, Result};
use tests::bench::{Metric, Target, write};
use tests::contest::{Contest, Load, Outcome};
use tests::crowd::{Crowd, name_of};
use tests::guest;
use tests::rogues::{Rogue, stretched};

use super::Request;

/// Time that each attack is measured, unless told otherwise.
const MEASURED: Duration = Duration::from_secs(10);
/// Time that is left out at the start.
const WARM: Duration = Duration::from_millis(700);
/// Rounds of the neighbour's kernels, 10 ms of the card's time, and how many are on their way: the guest may be late by as much.
const ROUNDS: u32 = 20;
const IN_FLIGHT: u32 = 32;
/// The VM that computes, and the one that does not let it.
const NEIGHBOUR: usize = 0;
const OTHER: usize = 1;
/// MiB of RAM of each.
const MEMORY_MIB: u32 = 512;
/// Part of its share that the neighbour must keep.
const KEPT: f64 = 0.96;

/// Measures under one policy; what is there is written to the file as soon as it is known.
pub fn run(policy: &str, request: &Request) -> Result<Vec<Metric>> {
    let measured = request.seconds.map_or(MEASURED, Duration::from_secs);
    let wanted = |rogue: &Rogue| request.only.as_ref().is_none_or(|only| rogue.name.contains(only));
    let mut crowd = Crowd::boot("isolation", 2, MEMORY_MIB, Rogue::KEYS)?;
    crowd.set(&["--policy", policy])?;
    let mut metrics = Vec::new();
    let steady = |vm| Load::kernels(vm, ROUNDS, IN_FLIGHT);
    let play = |crowd: &Crowd, loads: Vec<Load>| Contest { loads, warm: WARM, measured }.run(crowd, |_| Ok(()));
    let alone = rate(&play(&crowd, vec![steady(NEIGHBOUR)])?);
    let share = rate(&play(&crowd, vec![steady(NEIGHBOUR), steady(OTHER)])?);
    let row = |what: &str| format!("isolation.{policy}.{what}");
    eprintln!("bench: {}: {alone:.1} submissions/s alone, {share:.1} beside a well-behaved guest", row("neighbour"));
    metrics.push(Metric::plain(row("idle_neighbour"), alone, "1/s"));
    metrics.push(Metric::plain(row("share"), share, "1/s"));
    for rogue in Rogue::ATTACKS.into_iter().filter(wanted) {
        let row = row(rogue.name);
        Rogue::unpunished(&crowd)?;
        let mut found = match rogue.beside(&crowd, &[ROUNDS], measured) {
            Ok(outcome) => attacked(&mut crowd, &row, &outcome, share)?,
            Err(error) => {
                eprintln!("bench: {row}: {error:#}");
                vec![Metric::plain(format!("{row}.failed"), 1.0, "runs").target(Target::AtMost(0.0))]
            }
        };
        metrics.append(&mut found);
        request.file.as_deref().map_or(Ok(()), |file| write(&metrics, file))?;
    }
    if !crowd.daemon().alive() {
        anyhow::bail!("mediatord has ended\n{}", crowd.daemon().log_tail());
    }
    Ok(metrics)
}

/// Submissions of the neighbour that ended in a second of the card's time.
fn rate(outcome: &Outcome) -> f64 {
    outcome.completed(NEIGHBOUR) as f64 * 1e9 / outcome.length.max(1) as f64
}

/// Compares the neighbour under an attack with its share.
fn attacked(crowd: &mut Crowd, row: &str, outcome: &Outcome, share: f64) -> Result<Vec<Metric>> {
    let (before, after) = (&outcome.before[NEIGHBOUR], &outcome.after[NEIGHBOUR]);
    let shown = guest::show(crowd.daemon(), &name_of(NEIGHBOUR))?;
    let counter = |name: &str| shown["counters"][name].as_u64().with_context(|| format!("no {name} in {shown}"));
    let lost = after.killed - before.killed + counter("faults")? + counter("hangs")?;
    let strikes = after.strikes - before.strikes;
    let stretched = stretched(outcome, NEIGHBOUR, ROUNDS)?;
    let writes = outcome.reported(OTHER, "writes")?;
    let rate = rate(outcome);
    eprintln!(
        "bench: {row}: {rate:.1} submissions/s, {:.3} of its share; {writes} attempts; charged {:.3} of the time, the other {:.3} \
         with {} strikes",
        rate / share,
        outcome.received(NEIGHBOUR),
        outcome.received(OTHER),
        outcome.after[OTHER].strikes - outcome.before[OTHER].strikes,
    );
    Ok(vec![
        Metric::plain(format!("{row}.charged"), outcome.received(NEIGHBOUR) * 100.0, "%"),
        Metric::plain(format!("{row}.other_charged"), outcome.received(OTHER) * 100.0, "%"),
        Metric::ratio(format!("{row}.neighbour"), rate, "1/s", share, Target::AtLeast(KEPT)),
        Metric::plain(format!("{row}.strikes"), strikes as f64, "strikes").target(Target::AtMost(0.0)),
        Metric::plain(format!("{row}.lost"), lost as f64, "channels").target(Target::AtMost(0.0)),
        Metric::plain(format!("{row}.stretched"), stretched, "x"),
        Metric::plain(format!("{row}.attempts"), writes, "times").target(Target::AtLeast(1.0)),
    ])
}
