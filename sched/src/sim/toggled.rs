//! Tests a vGPU whose guest disables and enables its channel while work is on the card. Another vGPU, its neighbour,
//! always has work. The test generates the events that a card manager would send for a non-preemptive engine.

use crate::{Channel, Config, Decision, Engine, Event, Nanos, PolicyKind, Scheduler, TenantId, Ticket, VgpuParams};
use std::collections::{BTreeMap, VecDeque};

/// Length of the neighbour's kernels, in ns.
const NEIGHBOUR_KERNEL_NS: u64 = 9_900_000;
/// Length of the toggled vGPU's kernels, in ns.
const OTHER_KERNEL_NS: u64 = 50_000_000;
/// Time between two toggles in each case, in ns.
const TOGGLES: [u64; 5] = [200_000, 600_000, 3_000_000, 11_000_000, 31_000_000];
/// Delay from the end of a submission to its observation, in ns.
const COMPLETION_DELAY_NS: u64 = 100_000;
/// Simulated time, in ns.
const SIMULATED_NS: u64 = 30_000_000_000;
/// Initial time for which the toggled vGPU has the engine to itself, in ns. It then has more work in flight when the
/// neighbour starts.
const SOLO_NS: u64 = 300_000_000;
/// Number of submissions that each vGPU keeps queued.
const QUEUE_DEPTH: u64 = 16;
const NEIGHBOUR: TenantId = TenantId(0);
const OTHER: TenantId = TenantId(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Parked,
    Queued,
    Started,
    Descheduled,
    Again,
}

struct World {
    scheduler: Scheduler,
    now: Nanos,
    next: u64,
    held: BTreeMap<Ticket, (TenantId, Stage)>,
    /// Submissions that the engine has received but not started, in order. It skips those of a disabled channel.
    fetched: VecDeque<Ticket>,
    /// Running submission and its end time.
    works: Option<(Ticket, Nanos)>,
    enabled: bool,
}

impl World {
    fn new(policy: PolicyKind) -> Self {
        let config = Config { policy, strikes: 0, ..Config::default() };
        let scheduler = Scheduler::new(config, Nanos(0)).unwrap();
        let (held, fetched) = Default::default();
        let mut world = Self { scheduler, now: Nanos(0), next: 0, held, fetched, works: None, enabled: true };
        for vgpu in [NEIGHBOUR, OTHER] {
            world.feed(vec![Event::Added { vgpu, params: VgpuParams::default() }]);
        }
        world
    }

    fn arrival(ticket: Ticket, vgpu: TenantId) -> Event {
        Event::Arrival { vgpu, channel: Channel(vgpu.0), engine: Engine::Compute, ticket }
    }

    fn submit(&mut self, vgpu: TenantId) {
        let ticket = Ticket(self.next);
        self.next += 1;
        let runs = vgpu == NEIGHBOUR || self.enabled && !self.any(Stage::Descheduled) && !self.any(Stage::Again);
        self.held.insert(ticket, (vgpu, if runs { Stage::Queued } else { Stage::Parked }));
        if runs {
            self.feed(vec![Self::arrival(ticket, vgpu)]);
        }
    }

    fn any(&self, stage: Stage) -> bool {
        self.held.values().any(|held| *held == (OTHER, stage))
    }

    fn feed(&mut self, events: Vec<Event>) {
        let mut events = VecDeque::from(events);
        while let Some(event) = events.pop_front() {
            let mut decisions = Vec::new();
            self.scheduler.event(self.now, event, &mut decisions);
            for decision in decisions {
                let Decision::Start(ticket) = decision else { continue };
                let (vgpu, stage) = self.held[&ticket];
                self.held.insert(ticket, (vgpu, Stage::Started));
                if stage == Stage::Again {
                    for (ticket, held) in &mut self.held {
                        if *held == (OTHER, Stage::Descheduled) {
                            held.1 = Stage::Started;
                            events.push_back(Event::Resumed { ticket: *ticket });
                        }
                    }
                } else {
                    self.fetched.push_back(ticket);
                }
            }
        }
        self.work();
    }

    /// Starts the engine's next submission.
    fn work(&mut self) {
        if self.works.is_some() {
            return;
        }
        let may = |ticket: &Ticket| {
            let (vgpu, stage) = self.held[ticket];
            stage == Stage::Started && (vgpu == NEIGHBOUR || self.enabled)
        };
        let Some(at) = self.fetched.iter().position(may) else { return };
        let ticket = self.fetched.remove(at).unwrap();
        let length = if self.held[&ticket].0 == NEIGHBOUR { NEIGHBOUR_KERNEL_NS } else { OTHER_KERNEL_NS };
        self.works = Some((ticket, self.now.after(length)));
    }

    fn toggle(&mut self) {
        self.enabled = !self.enabled;
        let works = self.works.is_some_and(|(ticket, _)| self.held[&ticket].0 == OTHER);
        let mut events = Vec::new();
        let first = self.held.iter().find(|(_, held)| **held == (OTHER, Stage::Descheduled)).map(|(ticket, _)| *ticket);
        for (ticket, held) in &mut self.held {
            match *held {
                (OTHER, Stage::Parked) if self.enabled && first.is_none() => {
                    held.1 = Stage::Queued;
                    events.push(Self::arrival(*ticket, OTHER));
                }
                (OTHER, Stage::Started) if !self.enabled && !works => {
                    held.1 = Stage::Descheduled;
                    events.push(Event::Waiting { ticket: *ticket });
                }
                _ => {}
            }
        }
        if let Some(ticket) = first.filter(|_| self.enabled && !self.any(Stage::Again)) {
            self.held.insert(ticket, (OTHER, Stage::Again));
            events.push(Event::Requeued { ticket });
        }
        self.feed(events);
    }

    fn run(&mut self, until: Nanos, toggle: u64) {
        let (mut toggles, mut seen): (Nanos, VecDeque<(Nanos, Ticket, Nanos)>) = (Nanos(toggle), VecDeque::new());
        while self.now < until {
            let ends = self.works.map(|(_, end)| end);
            let sees = seen.front().map(|(at, ..)| *at);
            let wakes = self.scheduler.next_wakeup();
            let next = [Some(toggles), ends, sees, wakes].into_iter().flatten().min().unwrap().max(self.now);
            self.now = next;
            if let Some((ticket, end)) = self.works.filter(|(_, end)| *end <= next) {
                self.works = None;
                seen.push_back((end.after(COMPLETION_DELAY_NS), ticket, end));
                self.work();
            } else if let Some((_, ticket, end)) = seen.front().copied().filter(|(at, ..)| *at <= next) {
                seen.pop_front();
                let (vgpu, _) = self.held.remove(&ticket).unwrap();
                self.feed(vec![Event::Completed { ticket, ended: Some(end) }]);
                self.submit(vgpu);
            } else if toggles <= next {
                toggles = toggles.after(toggle);
                self.toggle();
            } else {
                self.feed(vec![Event::Tick]);
            }
        }
    }

    fn used(&self, vgpu: TenantId) -> f64 {
        self.scheduler.account(vgpu, Engine::Compute).unwrap().used as f64
    }
}

#[test]
fn vm_toggling_its_channel_takes_no_neighbour_share() {
    for policy in [PolicyKind::Credit, PolicyKind::Band] {
        for (toggle, alone) in TOGGLES.into_iter().flat_map(|toggle| [(toggle, 0), (toggle, SOLO_NS)]) {
            let mut world = World::new(policy);
            (0..QUEUE_DEPTH).for_each(|_| world.submit(OTHER));
            world.run(Nanos(alone), toggle);
            (0..QUEUE_DEPTH).for_each(|_| world.submit(NEIGHBOUR));
            let before = [NEIGHBOUR, OTHER].map(|vgpu| world.used(vgpu));
            world.run(Nanos(alone + SIMULATED_NS), toggle);
            let [neighbour, other] =
                [(NEIGHBOUR, before[0]), (OTHER, before[1])].map(|(vgpu, was)| world.used(vgpu) - was);
            let kept = 2.0 * neighbour / (neighbour + other);
            println!(
                "{policy:?}, toggled every {toggle} ns, alone for {alone} ns: the neighbour keeps {kept:.4} of its share"
            );
            assert!(
                kept >= 0.96,
                "{policy:?}, toggled every {toggle} ns, alone for {alone} ns: the neighbour keeps only {kept} of its share"
            );
        }
    }
}
