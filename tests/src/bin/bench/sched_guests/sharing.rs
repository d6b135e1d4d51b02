//! Unequal weights, bursts beside batches, one VM alone, and sixteen.

use anyhow::Result;
use sched::Engine;
use tests::bench::{Metric, Target};
use tests::contest::Load;
use tests::crowd::{Crowd, ROUND_NS};

use super::{
    BAND, CREDIT, DIRECT, FIFO, LONG_MADD, MADD, MEASURED, SCALE, VMS, common, equal, errors, percent, play, steady,
};

/// Times that one VM alone is measured under each of two policies, in turn: its guest's moods are larger than what is lost.
const ALONE_RUNS: usize = 2;

/// Unequal weights.
pub fn weights(crowd: &Crowd) -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for of in [&[1u32, 3][..], &[10, 90], &[1, 15, 84]] {
        let row = format!("sched.guests.weights.{}", of.iter().map(u32::to_string).collect::<Vec<_>>().join("_"));
        let sum: u32 = of.iter().sum();
        let wanted: Vec<f64> = of.iter().map(|weight| f64::from(*weight) / f64::from(sum)).collect();
        for (vm, weight) in of.iter().enumerate() {
            crowd.set_vm(vm, &["--weight", &weight.to_string()])?;
        }
        let outcome = play(crowd, &row, BAND, MEASURED, (0..of.len()).map(|vm| steady(vm, MADD)).collect());
        for vm in 0..of.len() {
            crowd.set_vm(vm, &["--weight", "100"])?;
        }
        let outcome = outcome?;
        let shares = outcome.uses.shares(Engine::Compute, 0, outcome.length);
        let wrong = shares.iter().zip(&wanted).map(|(share, wanted)| (share / wanted - 1.0).abs()).fold(0.0, f64::max);
        metrics.extend(errors(&row, &outcome, BAND, &wanted));
        let wrong = percent(format!("{row}.wrong_by"), wrong);
        metrics.push(if of == [10, 90] { wrong.beside("HAMi: 11-33 %") } else { wrong });
        metrics.extend(common(&row, &outcome, &wanted));
    }
    Ok(metrics)
}

/// A VM that wants 2 ms each 16 ms or so, beside three that always have work. Its wait is the mediator's, from doorbell to
/// start; `each` is the guest's own, from the launch to its return.
pub fn interactive(crowd: &Crowd) -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    let mut row = |name: &str, policy, class: &str, batch: usize| -> Result<()> {
        let row = format!("sched.guests.interactive.{name}");
        crowd.set_vm(0, &["--class", class])?;
        let mut loads = vec![Load::bursts(0, 4 * MADD, 14 * SCALE)];
        loads.extend((1..=batch).map(|vm| steady(vm, LONG_MADD)));
        let outcome = play(crowd, &row, policy, MEASURED, loads);
        crowd.set_vm(0, &["--class", "normal"])?;
        let outcome = outcome?;
        for permille in [500, 990] {
            let wait = outcome.wait_ns(std::iter::once(0), permille) as f64 / 1e3;
            let name = format!("p{}", permille / 10);
            metrics.push(Metric::plain(format!("{row}.wait_{name}_at_most"), wait, "us"));
            let each = outcome.reported(0, &format!("each_{name}_us"))?;
            metrics.push(Metric::plain(format!("{row}.each_{name}"), each, "us"));
        }
        Ok(())
    };
    row("alone", BAND, "normal", 0)?;
    row("fifo", FIFO, "normal", 3)?;
    row("credit", CREDIT, "normal", 3)?;
    row("band", BAND, "normal", 3)?;
    row("band.class_interactive", BAND, "interactive", 3)?;
    Ok(metrics)
}

/// One VM, against the same without a scheduler: work done in the same time, by the number of kernels that the guest has
/// had done.
pub fn alone(crowd: &Crowd) -> Result<Vec<Metric>> {
    let mut rates = [0.0; 2];
    for _ in 0..ALONE_RUNS {
        for (rate, policy) in rates.iter_mut().zip([BAND, DIRECT]) {
            let row = format!("sched.guests.alone.{}", policy.0);
            let outcome = play(crowd, &row, policy, MEASURED, vec![Load::kernels(0, 1, 64)])?;
            *rate += outcome.reported(0, "iterations")? / outcome.reported(0, "looped_us")? * 1e6;
        }
    }
    let [band, direct] = rates.map(|rate| rate / ALONE_RUNS as f64);
    Ok(vec![
        Metric::ratio("sched.guests.alone.band", band, "1/s", direct, Target::AtLeast(0.995)),
        percent("sched.guests.alone.direct.utilisation".to_owned(), direct * ROUND_NS as f64 / 1e9),
        percent("sched.guests.alone.lost".to_owned(), 1.0 - band / direct).target(Target::AtMost(0.5)),
    ])
}

/// All VMs, against one.
pub fn sixteen(crowd: &Crowd) -> Result<Vec<Metric>> {
    let one = play(crowd, "sched.guests.one_vm", BAND, MEASURED, vec![steady(0, MADD)])?;
    let row = format!("sched.guests.{VMS}vms");
    let outcome = play(crowd, &row, BAND, MEASURED, (0..VMS).map(|vm| steady(vm, MADD)).collect())?;
    let rate = |used: f64| used * 1e9 / (u64::from(MADD) * ROUND_NS) as f64;
    let throughput = Metric::ratio(
        format!("{row}.throughput"),
        rate(outcome.utilisation(Engine::Compute)),
        "1/s",
        rate(one.utilisation(Engine::Compute)),
        Target::AtLeast(0.95),
    );
    let mut metrics = vec![throughput];
    metrics.extend(errors(&row, &outcome, BAND, &equal(VMS)));
    metrics.extend(common(&row, &outcome, &equal(VMS)));
    Ok(metrics)
}
