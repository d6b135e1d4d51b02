//! Tests groups on a simulated card that does more work per unit of time when programs run concurrently.

use super::*;
use crate::turns::scheduler_defaults;
use proptest::prelude::*;
use std::collections::BTreeSet;

const MS: u64 = 1_000_000;
/// Time step of the simulation, in ns.
const STEP: u64 = MS / 4;
const GROUP: &str = "group";

fn id(number: u32) -> TenantId {
    TenantId(number)
}

/// A tenant's program, which submits work of a fixed length, continuously or in bursts.
#[derive(Clone, Copy, Debug)]
struct Program {
    /// Length of a submission on an otherwise idle card, in ns.
    length: u64,
    /// Work in a burst, and the pause after the burst, in ns.
    burst: Option<(u64, u64)>,
    /// True if the program never returns the card.
    hangs: bool,
}

const FLOOD: Program = Program { length: MS / 10, burst: None, hangs: false };

#[derive(Clone, Debug)]
struct Runner {
    program: Program,
    open: bool,
    recalled: bool,
    /// Total work done, in ns on an otherwise idle card.
    done: u64,
    /// Work done since the last report, in ns on an otherwise idle card.
    unreported: u64,
    busy: u64,
    reported: u64,
    left: u64,
    wakes: u64,
    asked: bool,
    longest_gap: u64,
    last_ran: u64,
}

/// A card on which `k` concurrent programs do `gain[k - 1]` thousandths of the work of a single program.
struct Card {
    turns: GroupTurns,
    gain: Vec<u64>,
    runners: BTreeMap<TenantId, Runner>,
    now: u64,
    overdue: BTreeSet<TenantId>,
    /// Maximum number of gates that were open at the same time, excluding those of overdue tenants.
    most_open: usize,
    /// Time for which at least one gate was open, in ns.
    used: u64,
    /// Returns the party of a tenant. Only one party may have open gates at a time.
    parties: fn(TenantId) -> u32,
}

impl Card {
    fn new(gain: &[u64]) -> Self {
        let config = GroupConfig::default();
        let turns = GroupTurns::new(scheduler_defaults(), TurnsConfig::default(), config, Nanos(0));
        Self {
            turns: turns.expect("the defaults are valid"),
            gain: gain.to_vec(),
            runners: BTreeMap::new(),
            now: 0,
            overdue: BTreeSet::new(),
            most_open: 0,
            used: 0,
            parties: |_| 0,
        }
    }

    fn add(&mut self, number: u32, params: VgpuParams, group: Option<(&str, Sharing)>, program: Program) {
        let now = Nanos(self.now);
        self.turns.add(id(number), params, now);
        self.turns.set_group(id(number), group, now);
        self.turns.set_concurrent(id(number), true, now);
        let runner = Runner {
            program,
            open: false,
            recalled: false,
            done: 0,
            unreported: 0,
            busy: 0,
            reported: self.now,
            left: program.burst.map_or(u64::MAX, |(work, _)| work),
            wakes: self.now,
            asked: false,
            longest_gap: 0,
            last_ran: self.now,
        };
        self.runners.insert(id(number), runner);
    }

    fn report(&mut self, tenant: TenantId) {
        let Some(runner) = self.runners.get_mut(&tenant) else { return };
        let launches = runner.unreported / runner.program.length;
        // A submission's time in flight is reported after the submission has ended.
        let ended = launches * runner.program.length;
        let busy = (runner.busy * ended).checked_div(runner.unreported).unwrap_or(0);
        (runner.unreported, runner.busy) = (runner.unreported - ended, runner.busy - busy);
        runner.reported = self.now;
        self.turns.used(tenant, busy, launches, Nanos(self.now));
    }

    fn take_orders(&mut self) {
        for order in self.turns.take_orders() {
            match order {
                Order::Grant(tenant) => {
                    let runner = self.runners.get_mut(&tenant).expect("the tenant exists");
                    assert!(!runner.open, "{tenant:?}'s gate is already open");
                    (runner.open, runner.recalled, runner.asked, runner.reported) = (true, false, false, self.now);
                }
                Order::Recall(tenant) => {
                    let runner = self.runners.get_mut(&tenant).expect("the tenant exists");
                    assert!(!runner.open || !runner.recalled, "{tenant:?} is recalled twice");
                    // The program may have returned the card before it read the order.
                    runner.recalled = runner.open;
                }
                Order::Overdue { tenant, .. } => {
                    self.overdue.insert(tenant);
                }
                Order::Yield(_) | Order::Quarantined(_) => {}
            }
        }
    }

    fn run(&mut self, ns: u64) {
        let until = self.now + ns;
        while self.now < until {
            let tenants: Vec<TenantId> = self.runners.keys().copied().collect();
            for &tenant in &tenants {
                let runner = self.runners.get_mut(&tenant).expect("the tenant exists");
                if !runner.open && !runner.asked && runner.wakes <= self.now {
                    runner.asked = true;
                    self.turns.wants(tenant, Nanos(self.now));
                }
            }
            if self.turns.next_wakeup().is_some_and(|at| at.0 <= self.now) {
                self.turns.tick(Nanos(self.now));
            }
            self.take_orders();
            self.step();
            self.now += STEP;
            for tenant in tenants {
                self.after_step(tenant);
                self.take_orders();
            }
        }
    }

    /// Runs all programs with open gates for one time step.
    fn step(&mut self) {
        let open: Vec<TenantId> =
            self.runners.iter().filter(|(_, runner)| runner.open).map(|(&tenant, _)| tenant).collect();
        let gates = open.iter().filter(|tenant| !self.overdue.contains(tenant)).count();
        self.most_open = self.most_open.max(gates);
        self.used += if open.is_empty() { 0 } else { STEP };
        let Some(total) = open.len().checked_sub(1).and_then(|at| self.gain.get(at).or(self.gain.last())) else {
            return;
        };
        let parties: BTreeSet<u32> = open.iter().map(|&tenant| (self.parties)(tenant)).collect();
        assert!(parties.len() == 1 || !self.overdue.is_empty(), "{open:?} run at the same time");
        let each = STEP * total / 1000 / open.len() as u64;
        for tenant in &open {
            let runner = self.runners.get_mut(tenant).expect("the tenant exists");
            (runner.done, runner.unreported) = (runner.done + each, runner.unreported + each);
            runner.busy += STEP;
            runner.left = runner.left.saturating_sub(each);
            runner.longest_gap = runner.longest_gap.max(self.now - runner.last_ran);
            runner.last_ran = self.now + STEP;
        }
    }

    fn after_step(&mut self, tenant: TenantId) {
        let runner = self.runners.get_mut(&tenant).expect("the tenant exists");
        if !runner.open || runner.program.hangs {
            return;
        }
        let rests = runner.left == 0;
        if rests || runner.recalled {
            runner.open = false;
            if let Some((work, pause)) = runner.program.burst.filter(|_| rests) {
                (runner.left, runner.wakes) = (work, self.now + pause);
            }
            runner.asked = !rests;
            self.report(tenant);
            self.turns.ended(tenant, Nanos(self.now), !rests, Nanos(self.now));
        } else if self.now - runner.reported >= 2 * MS {
            self.report(tenant);
        }
    }

    fn done(&self, number: u32) -> f64 {
        self.runners[&id(number)].done as f64
    }
}

fn together() -> Option<(&'static str, Sharing)> {
    Some((GROUP, Sharing::Together))
}

fn part(card: &Card, number: u32, of: &[u32]) -> f64 {
    card.done(number) / of.iter().map(|&other| card.done(other)).sum::<f64>()
}

#[test]
fn members_of_equal_weight_run_together_for_most_of_time() {
    let mut card = Card::new(&[1000, 1200]);
    card.add(1, VgpuParams::default(), together(), FLOOD);
    card.add(2, VgpuParams::default(), together(), FLOOD);
    card.run(10_000 * MS);
    let sum = (card.done(1) + card.done(2)) / (10_000 * MS) as f64;
    assert!(sum > 0.97 * 1.2, "{sum} of the work of one program");
    assert!((part(&card, 1, &[1, 2]) - 0.5).abs() < 0.02);
    assert!(card.runners.values().all(|runner| runner.longest_gap <= 12 * MS));
}

#[test]
fn weights_within_group_divide_work_and_not_time_in_flight() {
    for (weights, gain) in [([300, 100], [1000, 1200]), ([100, 200], [1000, 1700]), ([100, 700], [1000, 1000])] {
        let mut card = Card::new(&gain);
        for (number, weight) in (1..).zip(weights) {
            card.add(number, VgpuParams::weight(weight), together(), Program { length: 70_000, ..FLOOD });
        }
        card.run(2_000 * MS);
        let due = f64::from(weights[0]) / f64::from(weights[0] + weights[1]);
        let found = part(&card, 1, &[1, 2]);
        assert!((found / due - 1.0).abs() < 0.05, "{weights:?}: {found} instead of {due}");
    }
}

/// A program's submissions during its preparation.
const PREPARES: Program = Program { length: MS / 50, ..FLOOD };
/// The same program's submissions after its preparation.
const WORKS: Program = Program { length: 3 * MS / 2, ..FLOOD };

impl Card {
    /// Runs the card for `ns` ns, and returns the first member's share of the work done.
    fn part_from_now(&mut self, ns: u64) -> f64 {
        let before = [self.done(1), self.done(2)];
        self.run(ns);
        let work = [self.done(1) - before[0], self.done(2) - before[1]];
        work[0] / (work[0] + work[1])
    }

    fn change(&mut self, number: u32, program: Program) {
        self.report(id(number));
        self.runners.get_mut(&id(number)).expect("the tenant exists").program = program;
    }
}

#[test]
fn weights_hold_after_a_start_with_short_submissions() {
    let mut card = Card::new(&[1000, 1300]);
    card.add(1, VgpuParams::weight(300), together(), PREPARES);
    card.run(150 * MS);
    card.change(1, WORKS);
    card.run(150 * MS);
    card.add(2, VgpuParams::weight(100), together(), WORKS);
    let found = card.part_from_now(2_000 * MS);
    assert!((found - 0.75).abs() < 0.04, "{found}");
}

#[test]
fn weights_hold_if_only_short_submissions_were_measured() {
    let mut card = Card::new(&[1000, 1300]);
    card.add(1, VgpuParams::weight(300), together(), PREPARES);
    card.run(40 * MS);
    card.change(1, WORKS);
    card.add(2, VgpuParams::weight(100), together(), WORKS);
    card.run(1_500 * MS);
    let found = card.part_from_now(2_000 * MS);
    assert!((found - 0.75).abs() < 0.04, "{found}");
}

#[test]
fn weights_hold_after_members_change_their_work_together() {
    let mut card = Card::new(&[1000, 1300]);
    card.add(1, VgpuParams::weight(300), together(), PREPARES);
    card.add(2, VgpuParams::weight(100), together(), PREPARES);
    card.run(500 * MS);
    card.change(1, WORKS);
    // The scheduler notices the change and measures the length again.
    card.run(1_500 * MS);
    let found = card.part_from_now(2_000 * MS);
    assert!((found - 0.75).abs() < 0.04, "{found}");
}

#[test]
fn guarantee_holds_next_to_three_flooding_members() {
    let mut card = Card::new(&[1000, 1200, 1500, 1700]);
    let half = VgpuParams { guarantee_permille: 500, ..VgpuParams::default() };
    card.add(1, half, together(), FLOOD);
    (2..5).for_each(|number| card.add(number, VgpuParams::default(), together(), FLOOD));
    card.run(3_000 * MS);
    let found = part(&card, 1, &[1, 2, 3, 4]);
    assert!((found - 0.5).abs() < 0.03, "{found}");
    for number in 2..5 {
        assert!((part(&card, number, &[2, 3, 4]) - 1.0 / 3.0).abs() < 0.03);
    }
}

#[test]
fn group_takes_turns_with_sum_of_its_weights() {
    let mut card = Card::new(&[1000, 1500]);
    card.parties = |tenant| u32::from(tenant.0 == 3);
    card.add(1, VgpuParams::weight(100), together(), FLOOD);
    card.add(2, VgpuParams::weight(200), together(), FLOOD);
    card.add(3, VgpuParams::weight(100), None, FLOOD);
    card.run(4_000 * MS);
    // Tenant 3 runs alone, so its work equals its time on the card.
    let alone = card.done(3) / card.used as f64;
    assert!((alone - 0.25).abs() < 0.02, "{alone}");
    let first = part(&card, 1, &[1, 2]);
    assert!((first - 1.0 / 3.0).abs() < 0.02, "{first}");
}

#[test]
fn only_parties_of_one_program_get_long_slices() {
    let turns_in_4_s = |members: u32| {
        let mut card = Card::new(&[1000, 1500]);
        card.parties = |tenant| tenant.0 / 10;
        for (party, name) in [(1, "one"), (2, "two")] {
            for member in 0..members {
                let group = Some((name, Sharing::Together));
                card.add(10 * party + member, VgpuParams::default(), group, FLOOD);
            }
        }
        card.run(4_000 * MS);
        card.turns.switches()
    };
    // Slices last 15 ms, or 30 ms if two programs always have queued work.
    let (single, double) = (turns_in_4_s(1), turns_in_4_s(2));
    assert!((120..=150).contains(&single), "{single} turns of single programs");
    assert!((230..=280).contains(&double), "{double} turns of groups of two");
}

#[test]
fn weight_of_idle_member_does_not_count_for_its_group() {
    let mut card = Card::new(&[1000, 1500]);
    card.parties = |tenant| u32::from(tenant.0 == 3);
    card.add(1, VgpuParams::weight(100), together(), FLOOD);
    card.turns.add(id(2), VgpuParams::weight(900), Nanos(0));
    card.turns.set_group(id(2), together(), Nanos(0));
    card.turns.set_concurrent(id(2), true, Nanos(0));
    card.add(3, VgpuParams::weight(100), None, FLOOD);
    card.run(2_000 * MS);
    assert!((part(&card, 3, &[1, 3]) - 0.5).abs() < 0.02);
}

#[test]
fn program_that_cannot_run_concurrently_has_exclusive_turns() {
    let mut card = Card::new(&[1000, 1500]);
    card.parties = |tenant| u32::from(tenant.0 == 3);
    for number in 1..4 {
        card.add(number, VgpuParams::default(), together(), FLOOD);
    }
    card.turns.set_concurrent(id(3), false, Nanos(0));
    card.run(3_000 * MS);
    let third = card.done(3) / card.used as f64;
    assert!((third - 1.0 / 3.0).abs() < 0.03, "{third}");
    assert!(!card.turns.membership(id(3)).expect("the tenant is a member").joined);
}

#[test]
fn members_change_between_turns_and_concurrent_work() {
    let mut card = Card::new(&[1000, 1500]);
    card.add(1, VgpuParams::default(), together(), FLOOD);
    card.add(2, VgpuParams::default(), together(), FLOOD);
    card.run(100 * MS);
    assert_eq!(card.most_open, 2);
    card.turns.set_group(id(1), Some((GROUP, Sharing::Turns)), Nanos(card.now));
    card.take_orders();
    card.run(50 * MS);
    card.most_open = 0;
    card.run(500 * MS);
    assert_eq!(card.most_open, 1, "each member takes its own turns");
    card.turns.set_group(id(1), together(), Nanos(card.now));
    card.run(100 * MS);
    assert_eq!(card.most_open, 2);
    // A tenant without a group is a separate party.
    card.turns.set_group(id(2), None, Nanos(card.now));
    card.run(50 * MS);
    card.most_open = 0;
    card.run(500 * MS);
    assert_eq!((card.most_open, card.turns.membership(id(2))), (1, None));
}

#[test]
fn paused_member_stops_and_others_continue() {
    let mut card = Card::new(&[1000, 1500]);
    card.add(1, VgpuParams::default(), together(), FLOOD);
    card.add(2, VgpuParams::default(), together(), FLOOD);
    card.run(100 * MS);
    let switches = card.turns.switches();
    card.turns.pause(id(1), true, Nanos(card.now));
    card.take_orders();
    card.run(MS);
    let before = (card.done(1), card.done(2));
    card.run(100 * MS);
    assert_eq!(card.done(1), before.0);
    assert!(card.done(2) - before.1 >= (99 * MS) as f64, "the other member has the card");
    assert_eq!(card.turns.switches(), switches, "no turn of the group has ended");
    card.turns.pause(id(1), false, Nanos(card.now));
    card.run(10 * MS);
    assert!(card.done(1) > before.0);
}

#[test]
fn member_that_does_not_end_is_overdue_and_delays_nothing() {
    let mut card = Card::new(&[1000, 1200]);
    card.parties = |tenant| u32::from(tenant.0 == 3);
    let limit = VgpuParams { max_run_ns: Some(200 * MS), ..VgpuParams::default() };
    card.add(1, limit, together(), Program { hangs: true, ..FLOOD });
    card.add(2, VgpuParams { weight: 1000, ..limit }, together(), FLOOD);
    card.run(100 * MS);
    let before = card.done(2);
    card.run(100 * MS);
    assert!(card.done(2) - before >= (59 * MS) as f64, "the other member has the card");
    card.run(500 * MS);
    assert_eq!(card.overdue, BTreeSet::from([id(1)]));
    // Another party also gets turns.
    card.add(3, limit, None, FLOOD);
    card.run(200 * MS);
    assert!(card.done(3) > (20 * MS) as f64);
    card.turns.remove(id(1), Nanos(card.now));
    card.runners.remove(&id(1));
    card.run(100 * MS);
    assert!(card.done(2) > before);
}

#[test]
fn cap_holds_within_group() {
    let mut card = Card::new(&[1000, 1500]);
    card.add(1, VgpuParams { cap_permille: 200, ..VgpuParams::default() }, together(), FLOOD);
    card.add(2, VgpuParams::default(), together(), FLOOD);
    card.run(2_000 * MS);
    let capped = card.done(1) / card.now as f64;
    assert!((0.17..0.22).contains(&capped), "{capped} of the card's time");
    // The cap also applies while no other member works.
    let mut card = Card::new(&[1000]);
    card.add(1, VgpuParams { cap_permille: 300, ..VgpuParams::default() }, together(), FLOOD);
    card.run(2_000 * MS);
    let capped = card.done(1) / card.now as f64;
    assert!((0.25..0.33).contains(&capped), "{capped} of the card's time");
}

#[test]
fn charges_of_concurrent_members_may_exceed_clock() {
    let mut card = Card::new(&[1000, 1600]);
    card.add(1, VgpuParams::default(), together(), FLOOD);
    card.add(2, VgpuParams::default(), together(), FLOOD);
    card.run(2_000 * MS);
    let charged: u64 =
        [1, 2].map(|number| card.turns.account(id(number)).expect("the tenant exists").used).iter().sum();
    let sum = charged as f64 / card.now as f64;
    assert!((sum - 1.6).abs() < 0.05, "charged {sum} of the clock");
    let recent: u64 = card.turns.used_since(id(1), Nanos(0)).iter().map(|sample| sample.used[ENGINE.index()]).sum();
    assert_eq!(recent, card.turns.account(id(1)).expect("the tenant exists").used);
}

#[test]
fn idle_member_returns_without_claim_to_the_past() {
    let mut card = Card::new(&[1000, 1200]);
    card.add(1, VgpuParams::default(), together(), FLOOD);
    card.add(2, VgpuParams::default(), together(), Program { burst: Some((5 * MS, 500 * MS)), ..FLOOD });
    card.run(5_000 * MS);
    assert!(card.runners[&id(1)].longest_gap <= 12 * MS, "{}", card.runners[&id(1)].longest_gap);
    let sum = card.done(1) / card.now as f64;
    assert!(sum > 0.98, "{sum}");
}

#[test]
fn auto_finds_the_better_mode() {
    for (gain, expected) in [([1000, 1300], true), ([1000, 900], false)] {
        let mut card = Card::new(&gain);
        card.add(1, VgpuParams::default(), Some((GROUP, Sharing::Auto)), FLOOD);
        card.add(2, VgpuParams::default(), Some((GROUP, Sharing::Auto)), FLOOD);
        card.run(3_000 * MS);
        let found = card.turns.membership(id(1)).expect("the tenant is a member");
        assert_eq!((found.sharing, found.together), (Sharing::Auto, expected));
    }
}

#[test]
fn quarantined_member_stops_and_group_continues() {
    let mut card = Card::new(&[1000, 1200]);
    card.add(1, VgpuParams::default(), together(), FLOOD);
    card.add(2, VgpuParams::default(), together(), FLOOD);
    card.run(10 * MS);
    for _ in 0..3 {
        card.turns.strike(id(1), Nanos(card.now));
    }
    card.take_orders();
    card.run(10 * MS);
    let before = (card.done(1), card.done(2));
    card.run(100 * MS);
    assert_eq!(card.done(1), before.0);
    assert!(card.done(2) > before.1);
    card.turns.release(id(1), Nanos(card.now));
    card.run(50 * MS);
    assert!(card.done(1) > before.0);
}

fn programs() -> impl Strategy<Value = Program> {
    let burst = proptest::option::of((MS..20 * MS, 0..60 * MS));
    (20_000..2 * MS, burst).prop_map(|(length, burst)| Program { length, burst, hangs: false })
}

const NAMES: [&str; 2] = ["one", "two"];

/// A tenant's weight, guarantee, group, ability to run concurrently, and program.
type Tenant = (u32, u32, Option<usize>, bool, Program);

fn tenants() -> impl Strategy<Value = Vec<Tenant>> {
    let group = proptest::option::of(0..2usize);
    proptest::collection::vec((1..20u32, 0..200u32, group, any::<bool>(), programs()), 1..6)
}

mod loops;

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Checks that every tenant makes progress and that lags are bounded, after tenants have paused and have changed
    /// their groups and their ability to run concurrently.
    #[test]
    fn every_tenant_makes_progress_whatever_changes(
        tenants in tenants(), changes in proptest::collection::vec((0..6u32, 0..7u8), 0..40),
    ) {
        let mut card = Card::new(&[1000, 1200, 1400]);
        for (number, &(weight, guarantee, group, concurrent, program)) in (0..).zip(&tenants) {
            let params = VgpuParams { weight: weight * 10, guarantee_permille: guarantee, ..VgpuParams::default() };
            let group = group.map(|group| (NAMES[group], Sharing::Together));
            card.add(number, params, group, program);
            card.turns.set_concurrent(id(number), concurrent, Nanos(0));
        }
        let count = tenants.len() as u32;
        for (number, change) in changes {
            let (tenant, now) = (id(number % count), Nanos(card.now));
            match change {
                0 => card.turns.pause(tenant, true, now),
                1 => card.turns.pause(tenant, false, now),
                2 => card.turns.set_concurrent(tenant, true, now),
                3 => card.turns.set_concurrent(tenant, false, now),
                4 => card.turns.set_group(tenant, None, now),
                5 => card.turns.set_group(tenant, Some((NAMES[0], Sharing::Together)), now),
                _ => card.turns.set_group(tenant, Some((NAMES[1], Sharing::Auto)), now),
            }
            card.take_orders();
            card.run(7 * MS);
        }
        for number in 0..count {
            card.turns.pause(id(number), false, Nanos(card.now));
        }
        card.take_orders();
        card.run(100 * MS);
        let before: Vec<u64> = card.runners.values().map(|runner| runner.done).collect();
        // The smallest weight is 10 out of at most 1,000, and a turn lasts 15 ms.
        card.run(4_000 * MS);
        for (runner, before) in card.runners.values().zip(before) {
            prop_assert!(runner.done > before, "{:?} starves", runner.program);
        }
        prop_assert!(card.turns.members.values().all(|member| member.balance.lack().abs() <= 200 * MS as i64));
    }

    /// Checks that members that always have work get shares in proportion to their weights, regardless of the lengths
    /// of their submissions and the card's gain from concurrency.
    #[test]
    fn flooding_members_share_by_weight(
        weights in proptest::collection::vec(1..6u32, 2..5),
        lengths in proptest::collection::vec(20_000..500_000u64, 4),
        gain in 1000..1900u64,
    ) {
        let gains: Vec<u64> = (0..4).map(|more| 1000 + (gain - 1000) * more / 3).collect();
        let mut card = Card::new(&gains);
        for (number, (&weight, &length)) in (0..).zip(weights.iter().zip(&lengths)) {
            card.add(number, VgpuParams::weight(weight * 100), together(), Program { length, ..FLOOD });
        }
        card.run(500 * MS);
        let before: Vec<u64> = card.runners.values().map(|runner| runner.done).collect();
        card.run(2_000 * MS);
        let done: Vec<f64> = card.runners.values().zip(before).map(|(runner, was)| (runner.done - was) as f64).collect();
        let (all, sum) = (done.iter().sum::<f64>(), weights.iter().sum::<u32>());
        for (&weight, done) in weights.iter().zip(&done) {
            let due = f64::from(weight) / f64::from(sum);
            prop_assert!((done / all - due).abs() < 0.03, "{} instead of {due}", done / all);
        }
    }
}
