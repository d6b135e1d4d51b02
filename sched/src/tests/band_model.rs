//! A second implementation of BAND as published. It follows Gdev's figure 2 line by line, divides GPUvm's budgets among
//! the competitors, and uses plain integer arithmetic. The policy must make the same decisions as this model for each
//! event.

use super::harness::Harness;
use crate::{BandParams, Config, Decision, Engine, Event, Nanos, Pipeline, TenantId, VgpuParams};
use proptest::prelude::*;
use std::collections::{BTreeMap, VecDeque};

const PERIOD_NS: i128 = 30_000_000;
const WAIT_NS: u64 = 500_000;
/// Bandwidth of 100 %, in parts per million.
const WHOLE_SHARE_PPM: i128 = 1_000_000;

struct VirtualGpu {
    id: u32,
    weight: i128,
    bgt: i128,
    used: i128,
    /// Total time debited from the virtual GPU's budget in this period, in ns.
    debited: i128,
    /// Time at which the virtual GPU's last completion was observed.
    seen: Option<u64>,
    competes: bool,
    /// True if the virtual GPU was dispatched on an overdrawn budget, because no virtual GPU with a remaining budget
    /// had suspended work.
    fills_in: bool,
    suspended: VecDeque<u64>,
}

/// The published scheduler. `bw` is a virtual GPU's weight divided by the sum of the competitors' weights, and `utl` is
/// its share of the total use in this period.
struct Published {
    queue: Vec<VirtualGpu>,
    current: Option<u32>,
    total: i128,
    /// Time used by overdrawn virtual GPUs in this period while no virtual GPU with a remaining budget had work, in ns.
    filled_in: i128,
    period: i128,
    /// End of a short wait, and the virtual GPU that was selected before the wait.
    waiting: Option<(u64, u32)>,
    /// Time since which the device has been idle although work was available.
    idle_since: Option<u64>,
    own_time: bool,
}

impl Published {
    fn vgpu_mut(&mut self, id: u32) -> &mut VirtualGpu {
        self.queue.iter_mut().find(|vgpu| vgpu.id == id).unwrap()
    }

    fn exceeds(&self, id: u32) -> bool {
        let weights: i128 = self.queue.iter().filter(|vgpu| vgpu.competes).map(|vgpu| vgpu.weight).sum();
        let vgpu = self.queue.iter().find(|vgpu| vgpu.id == id).unwrap();
        let bw = if vgpu.competes { WHOLE_SHARE_PPM * vgpu.weight / weights } else { 0 };
        // Condition: utl > bw.
        vgpu.used * WHOLE_SHARE_PPM > self.total * bw
    }

    fn replenish(&mut self, now: u64) {
        let period = i128::from(now) / PERIOD_NS;
        if period == self.period {
            return;
        }
        let weights: i128 = self.queue.iter().map(|vgpu| vgpu.weight).sum();
        let passed = (period - self.period) * PERIOD_NS;
        // Bound of the budget, and debited time, of each competitor that has not reached its bound.
        let mut loose = BTreeMap::new();
        let current = self.current;
        let wants = |vgpu: &VirtualGpu| {
            let near = vgpu.seen.is_some_and(|seen| now - seen <= WAIT_NS);
            near || current == Some(vgpu.id) || !vgpu.suspended.is_empty()
        };
        let alone = self.queue.iter().filter(|vgpu| vgpu.debited > 0 || wants(vgpu)).count() == 1;
        for vgpu in &mut self.queue {
            let wants = wants(vgpu);
            let debited = std::mem::take(&mut vgpu.debited).min(PERIOD_NS);
            vgpu.competes = wants || debited > 0;
            (vgpu.used, vgpu.fills_in) = (0, false);
            if vgpu.competes {
                loose.insert(vgpu.id, (if wants { i128::MAX } else { debited }, debited));
            } else {
                vgpu.bgt = (vgpu.bgt + passed * vgpu.weight / weights).min(0);
            }
        }
        let filled_in = std::mem::take(&mut self.filled_in);
        (self.total, self.period) = (0, period);
        let weights: i128 = self.queue.iter().filter(|vgpu| vgpu.competes).map(|vgpu| vgpu.weight).sum();
        let deepest = PERIOD_NS * i128::try_from(loose.len()).unwrap();
        for (id, (most, _)) in &mut loose {
            let vgpu = self.queue.iter_mut().find(|vgpu| vgpu.id == *id).unwrap();
            let share = PERIOD_NS * vgpu.weight / weights;
            *most = (*most).max(share);
            // More than the virtual GPU's share remained, but the virtual GPU did not use it although the device was
            // available.
            if (filled_in > 0 || alone) && vgpu.bgt > share {
                *most = (*most).min(share.max(if alone { 0 } else { vgpu.bgt - filled_in }));
            }
            vgpu.bgt = vgpu.bgt.min(deepest).min(*most).max(-deepest);
        }
        // The budgets of the unbounded virtual GPUs and the expected use of the bounded ones add up to one period.
        let mut to_be = PERIOD_NS;
        loop {
            let filled = || self.queue.iter().filter(|vgpu| loose.contains_key(&vgpu.id));
            let weights: i128 = filled().map(|vgpu| vgpu.weight).sum();
            let lacking = (to_be - filled().map(|vgpu| vgpu.bgt).sum::<i128>()).max(0);
            let full: Vec<_> = filled()
                .filter(|vgpu| vgpu.bgt + lacking * vgpu.weight / weights > loose[&vgpu.id].0)
                .map(|vgpu| vgpu.id)
                .collect();
            if full.is_empty() {
                for vgpu in self.queue.iter_mut().filter(|vgpu| loose.contains_key(&vgpu.id)) {
                    vgpu.bgt += lacking * vgpu.weight / weights;
                }
                return;
            }
            for id in full {
                let (most, debited) = loose.remove(&id).unwrap();
                self.vgpu_mut(id).bgt = most;
                to_be -= debited;
            }
        }
    }

    fn debit(&mut self, id: u32, ns: u64) {
        let vgpu = self.vgpu_mut(id);
        vgpu.bgt -= i128::from(ns);
        vgpu.debited += i128::from(ns);
    }

    fn dispatch(&mut self, id: u32, now: u64) -> u64 {
        let gap = self.idle_since.take().map_or(0, |since| now - since);
        let others = self.queue.iter().any(|vgpu| vgpu.id != id && vgpu.bgt > 0 && !vgpu.suspended.is_empty());
        let vgpu = self.vgpu_mut(id);
        vgpu.fills_in = vgpu.bgt < 0 && !others;
        if self.own_time {
            self.debit(id, gap);
        }
        (self.current, self.waiting) = (Some(id), None);
        self.vgpu_mut(id).suspended.pop_front().unwrap()
    }

    fn on_arrival(&mut self, id: u32, ticket: u64, now: u64) -> Vec<u64> {
        self.vgpu_mut(id).suspended.push_back(ticket);
        self.replenish(now);
        self.vgpu_mut(id).competes = true;
        // Like the policy, the model runs only one context of a virtual GPU at a time.
        if self.current.is_some() { Vec::new() } else { vec![self.dispatch(id, now)] }
    }

    fn on_completion(&mut self, id: u32, used: u64, late: u64, now: u64) -> Vec<u64> {
        self.current = None;
        self.vgpu_mut(id).seen = Some(now);
        self.replenish(now);
        self.total += i128::from(used);
        let others = self.queue.iter().any(|vgpu| vgpu.id != id && !vgpu.suspended.is_empty());
        let own = if self.own_time && others { late } else { 0 };
        self.vgpu_mut(id).used += i128::from(used);
        if self.vgpu_mut(id).fills_in {
            self.filled_in += i128::from(used);
        }
        self.debit(id, used + own);
        if self.vgpu_mut(id).bgt < 0 && self.exceeds(id) {
            let at = self.queue.iter().position(|vgpu| vgpu.id == id).unwrap();
            let vgpu = self.queue.remove(at);
            self.queue.push(vgpu);
        }
        let Some(next) = self.queue.iter().find(|vgpu| !vgpu.suspended.is_empty()).map(|vgpu| vgpu.id) else {
            return Vec::new();
        };
        self.idle_since = Some(now);
        if next != id && self.exceeds(next) {
            self.waiting = Some((now + WAIT_NS, next));
            return Vec::new();
        }
        vec![self.dispatch(next, now)]
    }

    fn on_tick(&mut self, now: u64) -> Vec<u64> {
        self.replenish(now);
        match self.waiting {
            Some((until, next)) if now >= until => vec![self.dispatch(next, now)],
            _ => Vec::new(),
        }
    }
}

/// Returns the tickets of the started submissions.
fn started(decisions: &[Decision]) -> Vec<u64> {
    let start = |decision: &Decision| match decision {
        Decision::Start(ticket) => Some(ticket.0),
        _ => None,
    };
    decisions.iter().filter_map(start).collect()
}

const WEIGHTS: [&[u32]; 6] = [&[1, 1], &[1, 4], &[1, 1, 2], &[1, 15, 84], &[1, 1, 1, 1, 1], &[3, 1, 1, 3, 1, 1, 3, 3]];

/// Processes all events until `limit`, and compares the policy with the model. Returns the number of waits.
fn compare(harness: &mut Harness, model: &mut Published, limit: u64, started_at: &mut BTreeMap<u64, u64>) -> u32 {
    let mut waits = 0;
    loop {
        let Some((event, decisions)) = harness.step(limit) else { return waits };
        let now = harness.now;
        let expected = match event {
            Event::Completed { ticket, ended } => {
                let (_, work) = harness.fates[&ticket];
                let ended = ended.unwrap().0;
                model.on_completion(work.vgpu.0, ended - started_at[&ticket.0], now - ended, now)
            }
            _ => model.on_tick(now),
        };
        assert_eq!(started(&decisions), expected, "at {now} after {event:?}");
        waits += u32::from(model.waiting.is_some());
        for ticket in expected {
            started_at.insert(ticket, now);
        }
    }
}

fn agree(weights: &[u32], own_time: bool, latency: u64, arrivals: &[(u64, usize, u64)]) -> u32 {
    let band = BandParams { own_time, ..BandParams::published() };
    let config = Config { band, pipeline: Pipeline::ONE, ..Config::default() };
    let mut harness = Harness::new(config);
    harness.latency = latency;
    let mut queue = Vec::new();
    for (id, weight) in (0..).zip(weights) {
        harness.add(id, VgpuParams { max_run_ns: None, ..VgpuParams::weight(*weight) });
        let weight = i128::from(*weight);
        let suspended = VecDeque::new();
        queue.push(VirtualGpu {
            id,
            weight,
            bgt: 0,
            used: 0,
            debited: 0,
            seen: None,
            competes: false,
            fills_in: false,
            suspended,
        });
    }
    let mut model = Published {
        queue,
        current: None,
        total: 0,
        filled_in: 0,
        period: 0,
        waiting: None,
        idle_since: None,
        own_time,
    };
    let mut started_at = BTreeMap::new();
    let mut waits = 0;
    for (ticket, (pause, vgpu, length)) in (1..).zip(arrivals) {
        let vgpu = u32::try_from(vgpu % weights.len()).unwrap();
        let at = harness.now + pause;
        waits += compare(&mut harness, &mut model, at, &mut started_at);
        harness.now = at;
        let decisions = harness.arrive(vgpu, 0, Engine::Compute, *length);
        let expected = model.on_arrival(vgpu, ticket, harness.now);
        assert_eq!(started(&decisions), expected, "at {} after an arrival", harness.now);
        for ticket in expected {
            started_at.insert(ticket, harness.now);
        }
        for vgpu in &model.queue {
            let credit = i128::from(harness.scheduler.standing(TenantId(vgpu.id), Engine::Compute).credit);
            assert_eq!(credit, vgpu.bgt, "budget of {} at {:?}", vgpu.id, Nanos(harness.now));
        }
    }
    waits += compare(&mut harness, &mut model, u64::MAX, &mut started_at);
    harness.drain();
    waits
}

/// Generates the time between two arrivals in ns, which is occasionally a few periods.
fn pause() -> impl Strategy<Value = u64> {
    prop_oneof![20 => 0u64..1_500_000, 1 => 0u64..200_000_000]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn band_decides_as_published(
        weights in 0..WEIGHTS.len(),
        own_time: bool,
        latency in prop::sample::select(vec![0u64, 7_000]),
        arrivals in prop::collection::vec((pause(), 0usize..8, 1_000u64..4_000_000), 1..200),
    ) {
        agree(WEIGHTS[weights], own_time, latency, &arrivals);
    }
}

#[test]
fn band_waits_for_the_short_ones_as_published() {
    // Alternate long and short submissions, because the wait was designed for this case.
    let arrivals: Vec<_> =
        (0..200).map(|at| (600_000, at % 2, if at % 2 == 0 { 200_000 } else { 1_000_000 })).collect();
    assert!(agree(&[1, 1], true, 7_000, &arrivals) > 20);
}
