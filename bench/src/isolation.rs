//! Measures a stock guest that computes alongside an attacking guest. Compares the stock guest's share of GPU time with
//! its share alongside a well-behaved guest that always has work. Both shares are measured in the same run, with the
//! mediator's accounting and the card's clock.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tests::contention::{Contest, Load, Outcome};
use tests::daemon::Daemon;
use tests::many_vms::{Crowd, name_of};
use tests::rogues::{Rogue, stretched};
use tests::{guest, http};

use super::Request;
use crate::report::{Metric, Record, Target};

/// Default measured time per attack.
const MEASURED_TIME: Duration = Duration::from_secs(10);
/// Time before the measurement starts.
const WARM_UP: Duration = Duration::from_millis(700);
/// Number of rounds of each kernel. A kernel takes 10 ms of card time.
const ROUNDS_PER_KERNEL: u32 = 20;
const IN_FLIGHT: u32 = 32;
/// Index of the computing VM.
const NEIGHBOUR: usize = 0;
/// Index of the attacker or the reference VM.
const OTHER: usize = 1;
/// Size of each guest's RAM in MiB.
const MEMORY_MIB: u32 = 512;
/// Maximum measured time of the computing guest, both alone and alongside a well-behaved guest.
const REFERENCE: Duration = Duration::from_secs(20);
/// Admin API paths to request during an attack.
const PATHS: [&str; 3] = ["/v1/vms", "/metrics", "/v1/cards"];
/// Pause after each request.
const PAUSE: Duration = Duration::from_millis(100);
/// Timeout of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Target for the 99th percentile of the request latency in ms.
const ANSWERED_MS: f64 = 50.0;
/// Minimum fraction of its share that the computing guest must retain.
const MIN_SHARE_KEPT: f64 = 0.96;

/// Name of the benchmark that measures all policies.
pub const ALL: &str = "isolation";
/// Policies under test.
pub const POLICIES: [&str; 5] = ["direct", "fifo", "credit", "band", "disengaged"];

/// Measures several policies with a single boot of the guests, and records each result immediately. Skips rows that are
/// already complete.
pub fn run(policies: &[&str], request: &Request, record: &mut Record) -> Result<Vec<Metric>> {
    let wanted: Vec<Rogue> = Rogue::ATTACKS.into_iter().filter(|rogue| request.wants(rogue.name)).collect();
    let missing = |metrics: &[Metric], policy: &str| -> Vec<Rogue> {
        let has =
            |rogue: &Rogue| metrics.iter().any(|it| it.name == format!("isolation.{policy}.{}.attempts", rogue.name));
        wanted.iter().copied().filter(|rogue| !has(rogue)).collect()
    };
    if policies.iter().all(|policy| missing(record.metrics(), policy).is_empty()) {
        return Ok(Vec::new());
    }
    let mut crowd = Crowd::boot("isolation", 2, MEMORY_MIB, Rogue::KEYS)?;
    for policy in policies {
        let rogues = missing(record.metrics(), policy);
        if !rogues.is_empty() {
            under(&mut crowd, policy, &rogues, request, record)?;
        }
    }
    if !crowd.daemon().alive() {
        anyhow::bail!("mediatord has exited\n{}", crowd.daemon().log_tail());
    }
    Ok(Vec::new())
}

/// Measures the computing VM under one policy: alone, next to a well-behaved guest, and next to each attacker.
fn under(crowd: &mut Crowd, policy: &str, rogues: &[Rogue], request: &Request, record: &mut Record) -> Result<()> {
    let measured = request.seconds.map_or(MEASURED_TIME, Duration::from_secs);
    crowd.set(&["--policy", policy])?;
    let steady = |vm| Load::kernels(vm, ROUNDS_PER_KERNEL, IN_FLIGHT);
    let reference = measured.min(REFERENCE);
    let play =
        |crowd: &Crowd, loads: Vec<Load>| Contest { loads, warm: WARM_UP, measured: reference }.run(crowd, |_| Ok(()));
    let alone = rate(&play(crowd, vec![steady(NEIGHBOUR)])?);
    let share = rate(&play(crowd, vec![steady(NEIGHBOUR), steady(OTHER)])?);
    let row = |what: &str| format!("isolation.{policy}.{what}");
    eprintln!("bench: {}: {alone:.1} submissions/s alone, {share:.1} next to a well-behaved guest", row("neighbour"));
    let plain = |what: &str, value| Metric::plain(row(what), value, "1/s");
    record.put(vec![plain("idle_neighbour", alone), plain("share", share)])?;
    for rogue in rogues {
        let row = row(rogue.name);
        Rogue::unpunished(crowd)?;
        let asking = Asking::start(crowd.daemon());
        let outcome = rogue.beside(crowd, &[ROUNDS_PER_KERNEL], measured);
        let answers = asking.end();
        let found = match outcome {
            Ok(outcome) => attacked(crowd, &row, &outcome, share, &answers)?,
            Err(error) => {
                eprintln!("bench: {row}: {error:#}");
                vec![Metric::plain(format!("{row}.failed"), 1.0, "runs").target(Target::AtMost(0.0))]
            }
        };
        record.forget(&format!("{row}.failed"));
        record.put(found)?;
    }
    Ok(())
}

/// A thread that sends sequential requests to the admin API, with pauses.
struct Asking {
    ends: Arc<AtomicBool>,
    thread: JoinHandle<Vec<f64>>,
}

impl Asking {
    fn start(daemon: &Daemon) -> Self {
        let ends = Arc::<AtomicBool>::default();
        let (socket, over) = (daemon.paths().admin_socket.clone(), Arc::clone(&ends));
        let thread = std::thread::spawn(move || {
            let mut times = Vec::new();
            for path in PATHS.iter().cycle() {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                let began = Instant::now();
                let answer = UnixStream::connect(&socket).map_err(Into::into).and_then(|stream| {
                    stream.set_read_timeout(Some(REQUEST_TIMEOUT))?;
                    http::get(stream, path)
                });
                // Record a failed request as an infinite latency.
                times.push(answer.map_or(f64::INFINITY, |_| began.elapsed().as_secs_f64() * 1e3));
                std::thread::sleep(PAUSE);
            }
            times
        });
        Self { ends, thread }
    }

    /// Stops the thread. Returns the request latencies in ms, in ascending order.
    fn end(self) -> Vec<f64> {
        self.ends.store(true, Ordering::Relaxed);
        let mut times = self.thread.join().unwrap_or_default();
        times.sort_by(f64::total_cmp);
        times
    }
}

/// Returns the number of submissions that the computing guest completes per second of card time.
fn rate(outcome: &Outcome) -> f64 {
    outcome.completed(NEIGHBOUR) as f64 * 1e9 / outcome.length.max(1) as f64
}

/// Compares the computing guest's throughput during an attack with its share.
fn attacked(crowd: &mut Crowd, row: &str, outcome: &Outcome, share: f64, answers: &[f64]) -> Result<Vec<Metric>> {
    let (before, after) = (&outcome.before[NEIGHBOUR], &outcome.after[NEIGHBOUR]);
    let shown = guest::show(crowd.daemon(), &name_of(NEIGHBOUR))?;
    let counter = |name: &str| shown["counters"][name].as_u64().with_context(|| format!("no {name} in {shown}"));
    let lost = after.killed - before.killed + counter("faults")? + counter("hangs")?;
    let strikes = after.strikes - before.strikes;
    let stretched = stretched(outcome, NEIGHBOUR, ROUNDS_PER_KERNEL)?;
    let writes = outcome.reported(OTHER, "writes")?;
    let rate = rate(outcome);
    let within = answers.get((answers.len() * 99).div_ceil(100).saturating_sub(1)).copied().unwrap_or(f64::INFINITY);
    let (within, asked) = (within.min(1e6), answers.len() as f64);
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
        Metric::ratio(format!("{row}.neighbour"), rate, "1/s", share, Target::AtLeast(MIN_SHARE_KEPT)),
        Metric::plain(format!("{row}.strikes"), strikes as f64, "strikes").target(Target::AtMost(0.0)),
        Metric::plain(format!("{row}.lost"), lost as f64, "channels").target(Target::AtMost(0.0)),
        Metric::plain(format!("{row}.stretched"), stretched, "x"),
        Metric::plain(format!("{row}.admin_p99"), within, "ms").target(Target::AtMost(ANSWERED_MS)),
        Metric::plain(format!("{row}.admin_requests"), asked, "requests"),
        Metric::plain(format!("{row}.attempts"), writes, "times").target(Target::AtLeast(1.0)),
    ])
}
