//! Compares a group's members with programs that run concurrently without gates, as with MPS alone.
//!
//! A program is either a loop that submits work, waits until the work ends, and pauses on the host, or a job that
//! always has work. The gains from concurrency, the lengths, and the pauses are those of decode loops on an H200.

use super::{GROUP, MS, id};
use crate::groups::{GroupConfig, GroupTurns, Sharing};
use crate::turns::{Order, TurnsConfig, scheduler_defaults};
use crate::{LatencyClass, Nanos, TenantId, VgpuParams};
use std::collections::BTreeMap;

const US: u64 = 1_000;
/// Time step of the simulation, in ns.
const STEP: u64 = 50 * US;
/// Delay from an order to its effect, and from the end of work to its observation, in ns.
const NOTICE: u64 = 100 * US;
/// Total speed of one to four concurrent loops, in thousandths of a single loop's speed.
const GAINS: [u64; 4] = [1000, 1570, 2000, 2400];
/// Like [`GAINS`], for programs that each fill the card.
const NO_GAIN: [u64; 4] = [1000; 4];

/// A program whose submissions take `length` ns on an otherwise idle card.
#[derive(Clone, Copy, Debug)]
struct Program {
    length: u64,
    /// Time on the host between the end of a submission and the next submission, in ns.
    pause: u64,
    /// Idle time after which the program returns the card, in ns.
    idle: u64,
    /// Interval between reports, in ns.
    report: u64,
    /// Progress while other programs run, relative to that on an equal share of the card, in thousandths.
    speed: u64,
}

const LOOP: Program = Program { length: 1900 * US, pause: 60 * US, idle: 300 * US, report: 2 * MS, speed: 1000 };
const PACED: Program = Program { pause: 4 * MS, idle: 150 * US, ..LOOP };
const JOB: Program = Program { length: 230 * US, pause: 0, ..LOOP };
/// A program in its start phase, which submits short work.
const STARTS: Program = Program { length: 20 * US, pause: 0, ..LOOP };

#[derive(Debug)]
struct Runner {
    program: Program,
    active: bool,
    open: bool,
    /// Time at which a pending recall or grant takes effect, and a flag that is true for a grant.
    changes: Option<(u64, bool)>,
    asked: bool,
    /// Remaining work of the submission in flight, in ns.
    left: u64,
    begun: u64,
    /// Time of the next submission, in ns.
    next: u64,
    /// End of the last submission, in ns.
    ended: u64,
    busy: u64,
    launches: u64,
    reported: u64,
    opened: u64,
    /// End of each submission, and the time since the previous end (including the pause), both in ns.
    gaps: Vec<(u64, u64)>,
    random: u64,
}

impl Runner {
    fn new(program: Program, seed: u64) -> Self {
        Self {
            program,
            active: true,
            open: false,
            changes: None,
            asked: false,
            left: 0,
            begun: 0,
            next: 0,
            ended: 0,
            busy: 0,
            launches: 0,
            reported: 0,
            opened: 0,
            gaps: Vec::new(),
            random: seed,
        }
    }

    /// Returns the length of the next submission in ns, which varies by up to 2 %.
    fn length(&mut self) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.program.length * (980 + (self.random >> 33) % 41) / 1000
    }
}

struct Card {
    turns: GroupTurns,
    /// False if the programs run without gates.
    gated: bool,
    gains: [u64; 4],
    runners: BTreeMap<TenantId, Runner>,
    now: u64,
}

impl Card {
    fn new(gains: [u64; 4], gated: bool, programs: &[(Program, VgpuParams)]) -> Self {
        let turns = GroupTurns::new(scheduler_defaults(), TurnsConfig::default(), GroupConfig::default(), Nanos(0));
        let mut card =
            Self { turns: turns.expect("the defaults are in bounds"), gated, gains, runners: BTreeMap::new(), now: 0 };
        for (number, &(program, params)) in (0..).zip(programs) {
            card.turns.add(id(number), params, Nanos(0));
            card.turns.set_group(id(number), Some((GROUP, Sharing::Together)), Nanos(0));
            card.turns.set_concurrent(id(number), true, Nanos(0));
            card.runners.insert(id(number), Runner::new(program, number.into()));
        }
        card
    }

    /// Starts the programs one after the other, lets each submit short work, and stops them again.
    fn start_programs(&mut self) {
        let programs: Vec<(TenantId, Program)> =
            self.runners.iter().map(|(&tenant, runner)| (tenant, runner.program)).collect();
        self.runners.values_mut().for_each(|runner| runner.active = false);
        for (tenant, program) in programs {
            self.with(tenant, |runner| (runner.program, runner.active) = (STARTS, true));
            self.run(60 * MS);
            self.with(tenant, |runner| runner.program = program);
            self.run(30 * MS);
            self.with(tenant, |runner| runner.active = false);
            self.run(200 * MS);
        }
        for runner in self.runners.values_mut() {
            runner.active = true;
            runner.gaps.clear();
            (runner.next, runner.ended) = (self.now, self.now);
        }
    }

    fn with(&mut self, tenant: TenantId, change: impl FnOnce(&mut Runner)) {
        change(self.runners.get_mut(&tenant).expect("the tenant exists"));
    }

    fn run(&mut self, ns: u64) {
        let until = self.now + ns;
        while self.now < until {
            let now = Nanos(self.now);
            if self.turns.next_wakeup().is_some_and(|at| at <= now) {
                self.turns.tick(now);
            }
            self.take_orders();
            self.submit();
            let working = self.runners.values().filter(|runner| runner.left > 0).count();
            let total = working.checked_sub(1).map_or(0, |at| self.gains[at]);
            self.now += STEP;
            for runner in self.runners.values_mut().filter(|runner| runner.left > 0) {
                let speed = if working > 1 { runner.program.speed } else { 1000 };
                let mut work = STEP * total * speed / 1_000_000 / working as u64;
                while work >= runner.left {
                    // Submissions that are shorter than a step run back to back.
                    work -= runner.left;
                    runner.busy += self.now.saturating_sub(runner.begun);
                    runner.launches += 1;
                    runner.gaps.push((self.now, self.now - runner.ended));
                    (runner.ended, runner.begun, runner.left) = (self.now, self.now, 0);
                    runner.next = self.now + runner.program.pause;
                    if runner.program.pause > 0 || runner.changes.is_some() || !runner.active {
                        break;
                    }
                    runner.left = runner.length();
                }
                runner.left = runner.left.saturating_sub(work);
            }
            self.report();
        }
    }

    fn take_orders(&mut self) {
        for order in self.turns.take_orders() {
            let (tenant, opens) = match order {
                Order::Grant(tenant) => (tenant, true),
                Order::Recall(tenant) => (tenant, false),
                Order::Overdue { .. } | Order::Yield(_) | Order::Quarantined(_) => continue,
            };
            let now = self.now;
            self.with(tenant, |runner| {
                // If the recall closely follows the grant, the gate is not open yet. Open it first.
                if !opens && !runner.open {
                    (runner.open, runner.asked, runner.reported, runner.opened) = (true, false, now, now);
                }
                runner.changes = Some((now + NOTICE, opens));
            });
        }
        for runner in self.runners.values_mut() {
            if runner.changes.is_some_and(|(at, opens)| opens && at <= self.now) {
                (runner.open, runner.asked, runner.changes) = (true, false, None);
                (runner.reported, runner.opened) = (self.now, self.now);
            }
        }
    }

    /// Submits the next work of each program that is due, or requests a turn for it.
    fn submit(&mut self) {
        let mut wants = Vec::new();
        for (&tenant, runner) in &mut self.runners {
            if !runner.active || runner.left > 0 || runner.next > self.now {
                continue;
            }
            if !self.gated || runner.open && runner.changes.is_none() {
                runner.left = runner.length();
                runner.begun = self.now;
            } else if !runner.open && !runner.asked {
                runner.asked = true;
                wants.push(tenant);
            }
        }
        for tenant in wants {
            self.turns.wants(tenant, Nanos(self.now));
        }
    }

    /// Sends the reports that are due, and ends the turns of recalled and idle programs.
    fn report(&mut self) {
        let tenants: Vec<TenantId> = self.runners.keys().copied().collect();
        for tenant in tenants {
            let Some(runner) = self.runners.get_mut(&tenant).filter(|runner| runner.open) else { continue };
            let is_recalled = runner.changes.is_some_and(|(at, opens)| !opens && at <= self.now);
            let since = runner.ended.max(runner.opened);
            let is_idle = runner.left == 0 && (!runner.active || self.now >= since + runner.program.idle);
            let ends = runner.left == 0 && (is_recalled || is_idle);
            if !ends && self.now - runner.reported < runner.program.report {
                continue;
            }
            let (busy, launches) = (std::mem::take(&mut runner.busy), std::mem::take(&mut runner.launches));
            runner.reported = self.now;
            let more = runner.active && runner.next <= self.now;
            if ends {
                (runner.open, runner.changes, runner.asked) = (false, None, more);
            }
            let now = Nanos(self.now);
            self.turns.used(tenant, busy, launches, now);
            if ends {
                self.turns.ended(tenant, now, more, now);
            }
            self.take_orders();
        }
    }

    /// Returns the number of submissions of each program that ended in the last `ns`.
    fn ended_in(&self, ns: u64) -> Vec<u64> {
        let since = self.now - ns;
        let count = |runner: &Runner| runner.gaps.iter().filter(|(at, _)| *at > since).count() as u64;
        self.runners.values().map(count).collect()
    }

    /// Returns the 99th percentile of a program's gaps in the last `ns`, in ns.
    fn p99(&self, number: u32, ns: u64) -> u64 {
        let since = self.now - ns;
        let gaps = self.runners[&id(number)].gaps.iter().filter(|(at, _)| *at > since).map(|(_, gap)| *gap);
        let mut gaps: Vec<u64> = gaps.collect();
        gaps.sort_unstable();
        gaps[gaps.len() * 99 / 100]
    }
}

/// Runs the programs for 4 s after their start, with and without gates.
fn both(gains: [u64; 4], programs: &[(Program, VgpuParams)]) -> [Card; 2] {
    [true, false].map(|gated| {
        let mut card = Card::new(gains, gated, programs);
        if gated {
            card.start_programs();
        }
        card.run(4_000 * MS);
        card
    })
}

/// Returns loops of equal weight whose speeds differ by up to 0.7 % when they run concurrently.
fn loops(count: usize) -> Vec<(Program, VgpuParams)> {
    [1000, 1004, 997, 1001][..count].iter().map(|&speed| (Program { speed, ..LOOP }, VgpuParams::default())).collect()
}

#[test]
fn loops_of_equal_weight_do_the_work_of_mps() {
    // A report is sent at the next poll, so its interval is longer, and some reports contain two submissions.
    for (count, report) in [(2, 2_000), (2, 2_200), (4, 2_000), (4, 2_400)] {
        let mut programs = loops(count);
        programs.iter_mut().for_each(|(program, _)| program.report = report * US);
        let [group, mps] = both(GAINS, &programs);
        let work = |card: &Card| card.ended_in(4_000 * MS).iter().sum::<u64>() as f64;
        let p99 = |card: &Card| (0..count as u32).map(|number| card.p99(number, 4_000 * MS)).max().unwrap_or(0) as f64;
        let (of_work, of_p99) = (work(&group) / work(&mps), p99(&group) / p99(&mps));
        println!("{count} loops: {of_work:.3} of the work of MPS, {of_p99:.2} of its p99");
        assert!(of_work >= 0.97, "{count} loops do {of_work} of the work of MPS");
        assert!(of_p99 <= 1.3, "the p99 of {count} loops is {of_p99} of that of MPS");
    }
}

#[test]
fn weights_of_loops_hold_within_five_percent() {
    for (first, due) in [(300, 0.75), (100, 0.5), (200, 2.0 / 3.0)] {
        let mut programs = loops(2);
        programs[0].1 = VgpuParams::weight(first);
        let mut card = Card::new(GAINS, true, &programs);
        card.start_programs();
        for window in 0..3 {
            card.run(2_000 * MS);
            let ended = card.ended_in(2_000 * MS);
            let found = ended[0] as f64 / ended.iter().sum::<u64>() as f64;
            println!("weight {first}: ratio {found:.3} in window {window}");
            assert!((found / due - 1.0).abs() <= 0.05, "{found} instead of {due} in window {window}");
        }
    }
}

#[test]
fn length_measured_while_others_waited_is_corrected_by_sample() {
    let mut programs = loops(2);
    programs[0].1 = VgpuParams::weight(300);
    let mut card = Card::new(GAINS, true, &programs);
    card.start_programs();
    // While the second loop waits, the first one is slower than in a sample. This was measured on an H200.
    card.with(id(0), |runner| runner.program.length = LOOP.length * 111 / 100);
    card.run(4_000 * MS);
    card.with(id(0), |runner| runner.program.length = LOOP.length);
    card.turns.change(id(0), VgpuParams::default(), Nanos(card.now));
    card.run(2_000 * MS);
    card.run(4_000 * MS);
    let ended = card.ended_in(4_000 * MS);
    let found = ended[0] as f64 / ended.iter().sum::<u64>() as f64;
    println!("ratio {found:.3}, p99 {} us", card.p99(1, 4_000 * MS) / US);
    assert!((found / 0.5 - 1.0).abs() <= 0.01, "{found}");
    let most = 2 * LOOP.length;
    assert!((0..2).all(|number| card.p99(number, 4_000 * MS) <= most), "members that are not ahead wait");
}

#[test]
fn guarantee_next_to_three_jobs_holds_within_three_percent() {
    let half = VgpuParams { guarantee_permille: 500, ..VgpuParams::default() };
    let mut programs = vec![(JOB, VgpuParams::default()); 4];
    programs[0].1 = half;
    let mut card = Card::new(NO_GAIN, true, &programs);
    card.start_programs();
    card.run(4_000 * MS);
    let ended = card.ended_in(4_000 * MS);
    let found = ended[0] as f64 / ended.iter().sum::<u64>() as f64;
    println!("guarantee: {found:.3}");
    assert!((found / 0.5 - 1.0).abs() <= 0.03, "{found}");
}

#[test]
fn interactive_loop_runs_before_job_that_fills_card() {
    let interactive = VgpuParams { class: LatencyClass::Interactive, ..VgpuParams::default() };
    // A loop with short pauses demands more than its share.
    for program in [PACED, Program { idle: 150 * US, ..LOOP }] {
        let job = Program { report: MS / 2, ..JOB };
        let mut card = Card::new(NO_GAIN, true, &[(program, interactive), (job, VgpuParams::default())]);
        card.start_programs();
        card.run(4_000 * MS);
        let ended = card.ended_in(4_000 * MS);
        let p99 = card.p99(0, 4_000 * MS) - if program.pause > MS { program.pause } else { 0 };
        let of_alone = p99 as f64 / LOOP.length as f64;
        let used = (ended[0] * LOOP.length) as f64 / (4_000 * MS) as f64;
        let trained = (ended[1] * JOB.length) as f64 / (4_000 * MS) as f64 / (1.0 - used);
        println!(
            "pause {}: p99 {of_alone:.2} of alone, loop uses {used:.3}, job gets {trained:.3} of the rest",
            program.pause
        );
        assert!(of_alone <= 2.5, "p99 is {of_alone} of alone");
        assert!(trained >= 0.9, "the job gets {trained} of the rest");
    }
}
