//! Tests the scheduler's code under thousands of schedules that a checker selects. The actors are guests that submit
//! work, a card that executes it, the interrupt thread, the timer, and an operator. The code under test is the
//! mediator's own [`Feeder`], [`Schedule`], [`serve_wakeup`] and [`Mailbox`]; the card is the model in [`card`].
//!
//! The checker reports a thread that nothing can wake as a deadlock, so a test that completes has not lost a wake-up.
//! These tests omit the poll that normally runs every 100 ms, because it would hide lost wake-ups.
//!
//! [`Feeder`]: crate::work::feeder::Feeder
//! [`Schedule`]: crate::work::schedule::Schedule

mod card;
mod mailbox;

use self::card::{Card, State, choose};
use crate::GuestEvent;
use crate::managed_card::interrupt_thread::{Served, Woken, serve_wakeup};
use crate::tenants::mailbox::{Mailbox, Recipient};
use locks::checked::{Checked, try_schedules};
use nvspec::fifo::ChannelId;
use sched::{Config, Engine, PolicyKind, Queues, VgpuParams};
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::Arc;
use shuttle::thread::{self, JoinHandle};
use std::io;
use vram::TenantId;

/// Number of schedules per test.
const SCHEDULES: usize = 1000;
const VMS: u32 = 3;
/// Number of submissions per VM in tests that count them.
const SUBMISSIONS: u32 = 4;
/// Submission lengths in ns, some shorter and some longer than both BAND's wait for a VM and the card's run-ahead.
const SUBMISSION_LENGTHS_NS: [u64; 3] = [20_000, 600_000, 3_000_000];

/// The mediator's state for the card, protected by the card's lock.
struct Host {
    state: locks::Mutex<locks::rank::Card, State, Checked>,
    card: Card,
}

impl Host {
    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock();
        let result = act(&mut state);
        state.check();
        result
    }
}

/// A vGPU, protected by its VM's lock.
struct Guest {
    vm: TenantId,
    host: Arc<Host>,
}

impl Recipient for Guest {
    fn take_up(&mut self, event: GuestEvent) {
        if let GuestEvent::Hang { channel, .. } = event {
            self.host.with(|state| state.end_channel(self.vm, ChannelId(channel.0)));
        }
        self.host.card.change(|hardware| hardware.interrupted.insert(self.vm));
    }
}

/// The card, its threads, and its guests.
struct Rig {
    host: Arc<Host>,
    guests: Vec<Mailbox<Guest, Checked>>,
}

impl Served for Rig {
    fn acknowledge(&self) -> io::Result<()> {
        self.host.card.change(|hardware| hardware.signalled = false);
        Ok(())
    }

    fn service(&self) -> (bool, Vec<(TenantId, GuestEvent)>) {
        self.host.with(State::service)
    }

    fn tick(&self) {
        self.host.with(|state| state.feeder().tick());
    }

    fn take_outbox(&self) -> Vec<(TenantId, GuestEvent)> {
        self.host.with(|state| state.schedule.take_outbox())
    }

    fn deliver(&self, vm: TenantId, event: GuestEvent) {
        if !self.host.card.look().is_removed(vm) {
            self.guests[vm.0 as usize].deliver(event);
        }
    }
}

/// Returns a VM's channels: the first one for compute, and the second one for copies.
fn channels(vm: TenantId) -> [(ChannelId, Engine); 2] {
    let first = vm.0 as u8 * 2;
    [(ChannelId(first), Engine::Compute), (ChannelId(first + 1), Engine::Copy0)]
}

fn any_channel(vm: TenantId) -> (ChannelId, Engine) {
    channels(vm)[thread_rng().gen_range(0..2)]
}

/// Returns a random configuration that charges all completions by the card's clock, even late ones.
fn any_config() -> Config {
    let policy = *choose(&PolicyKind::ALL).expect("the list is not empty");
    let queues = *choose(&[Queues::Separate, Queues::Single]).expect("the list is not empty");
    Config { policy, queues, stamp_slack_ns: u64::MAX, ..Config::default() }
}

fn any_share(max_run_ns: Option<u64>) -> VgpuParams {
    let mut rng = thread_rng();
    let cap_permille = if rng.gen_bool(0.25) { 300 } else { 1000 };
    VgpuParams { weight: rng.gen_range(1..=300), cap_permille, max_run_ns, ..VgpuParams::default() }
}

impl Rig {
    /// Creates a card with its threads, and VMs with two channels each.
    fn new(config: Config, max_run_ns: Option<u64>) -> (Arc<Self>, Vec<JoinHandle<()>>) {
        let card = Card::default();
        let state = locks::Mutex::new(State::new(config, card.clone()));
        let host = Arc::new(Host { state, card: card.clone() });
        for vm in (0..VMS).map(TenantId) {
            host.with(|state| state.feeder().schedule_vm(vm, any_share(max_run_ns)));
            card.change(|hardware| channels(vm).map(|(channel, engine)| hardware.bind(channel, vm, engine)));
        }
        let guest = |vm| Mailbox::new(Guest { vm: TenantId(vm), host: Arc::clone(&host) });
        let rig = Arc::new(Self { guests: (0..VMS).map(guest).collect(), host });
        let (work, expire, serve) = (card.clone(), card, Arc::clone(&rig));
        let threads = vec![
            thread::spawn(move || work.work()),
            thread::spawn(move || expire.expire()),
            thread::spawn(move || serve.serve()),
        ];
        (rig, threads)
    }

    /// Runs the interrupt thread.
    fn serve(&self) {
        let woken = || {
            self.host.card.wait(|hardware| {
                let woken = Woken { signalled: hardware.signalled, expired: hardware.expired };
                (woken.signalled || woken.expired).then_some(woken)
            })
        };
        while let Some(mut woken) = woken() {
            // Another thread may arm the timer again between the wake-up and the check for expiry.
            woken.expired |= thread_rng().gen_bool(0.1);
            serve_wakeup(self, woken).expect("reading the signal succeeds");
        }
    }

    /// Runs `act` with a VM's lock held, like a register access.
    fn access<T>(&self, vm: TenantId, act: impl FnOnce(&Host) -> T) -> T {
        let guest = self.guests[vm.0 as usize].lock();
        act(&guest.host)
    }

    /// Submits work that takes `length` ns on a guest channel, or endless work if `length` is `None`.
    fn submit(&self, vm: TenantId, channel: ChannelId, length: Option<u64>) {
        self.access(vm, |host| host.with(|state| state.ring(vm, channel, length)));
    }

    /// Waits until all of a guest's submissions have completed. Checks for this only after an interrupt.
    fn wait(&self, vm: TenantId) {
        let card = &self.host.card;
        while !card.look().is_done(vm) {
            card.wait(|hardware| (hardware.interrupted.remove(&vm) || hardware.is_removed(vm)).then_some(()));
        }
    }

    /// Waits for guests and operators, and stops the card's threads once the mediator has noticed that all work has
    /// completed.
    fn end(&self, actors: Vec<JoinHandle<()>>, threads: Vec<JoinHandle<()>>) {
        let join = |thread: JoinHandle<()>| thread.join().expect("the thread ends normally");
        actors.into_iter().for_each(join);
        self.host.card.wait(|hardware| hardware.is_seen().then_some(()));
        self.host.card.change(|hardware| hardware.stopped = true);
        threads.into_iter().for_each(join);
        self.host.with(|state| {
            assert!(state.schedule.counts().is_empty(), "a completed submission is still tracked");
            let scheduler = state.schedule.scheduler();
            assert_eq!((scheduler.queued(), scheduler.in_flight()), (0, 0));
            for vm in (0..VMS).map(TenantId) {
                // Arrivals are counted for the expected engine, and completions for the engine on which the work was
                // observed.
                let accounts = || Engine::ALL.iter().filter_map(|engine| scheduler.account(vm, *engine));
                let arrived: u64 = accounts().map(|account| account.arrived).sum();
                assert_eq!(arrived, accounts().map(|account| account.completed + account.dropped).sum::<u64>());
            }
            for engine in Engine::ALL {
                let accounts = (0..VMS).filter_map(|vm| scheduler.account(TenantId(vm), engine));
                let used: u64 = accounts.map(|account| account.used).sum();
                assert_eq!(used + scheduler.departed(engine), scheduler.busy(engine), "charged time equals used time");
            }
        });
    }
}

/// Starts a thread that uses the rig.
fn actor(rig: &Arc<Rig>, body: impl FnOnce(&Rig) + Send + 'static) -> JoinHandle<()> {
    let rig = Arc::clone(rig);
    thread::spawn(move || body(&rig))
}

/// Submits a guest's work, and sometimes waits for it. Each submission completes with probability `ends`.
fn busy(rig: &Rig, vm: TenantId, ends: f64) {
    for _ in 0..SUBMISSIONS {
        let length = choose(&SUBMISSION_LENGTHS_NS).copied().filter(|_| thread_rng().gen_bool(ends));
        rig.submit(vm, any_channel(vm).0, length);
        if thread_rng().gen_bool(0.5) {
            rig.wait(vm);
        }
    }
    rig.wait(vm);
}

/// Changes policies and shares as an operator would.
fn operator(rig: &Rig, max_run_ns: Option<u64>, fixed: Config) {
    for _ in 0..3 {
        let vm = TenantId(thread_rng().gen_range(0..VMS));
        match thread_rng().gen_range(0..3) {
            0 => {
                let Config { policy, queues, .. } = any_config();
                rig.host.with(|state| state.feeder().set_scheduler(Config { policy, queues, ..fixed }));
            }
            1 => rig.host.with(|state| state.feeder().set_share(vm, any_share(max_run_ns))),
            _ => rig.host.with(|state| state.feeder().release_vm(vm)),
        }
    }
}

#[test]
fn all_that_is_submitted_ends_and_is_charged_once() {
    try_schedules(SCHEDULES, || {
        let config = any_config();
        let (rig, threads) = Rig::new(config, None);
        let mut actors = vec![actor(&rig, move |rig| operator(rig, None, config))];
        actors.extend((0..VMS).map(TenantId).map(|vm| actor(&rig, move |rig| busy(rig, vm, 1.0))));
        rig.end(actors, threads);
        rig.host.with(|state| {
            let scheduler = state.schedule.scheduler();
            for engine in Engine::ALL {
                assert_eq!(scheduler.busy(engine), rig.host.card.look().busy(engine));
            }
            let accounts = (0..VMS).flat_map(|vm| Engine::ALL.map(|engine| scheduler.account(TenantId(vm), engine)));
            assert_eq!(accounts.flatten().map(|account| account.completed).sum::<u64>(), u64::from(VMS * SUBMISSIONS));
        });
    });
}

/// Stops a guest's channels, makes them wait for semaphores, and ends them even if they have work.
fn restless(rig: &Rig, vm: TenantId) {
    for _ in 0..6 {
        let (channel, engine) = any_channel(vm);
        let enable = |enabled| {
            rig.access(vm, |host| {
                // The card's lock is released between the two steps.
                host.with(|_| {
                    host.card.change(|hardware| {
                        hardware.rings.get_mut(&channel).into_iter().for_each(|ring| ring.enabled = enabled);
                    })
                });
                host.with(|state| state.feeder().look_at_waits(Some(vm)));
            });
        };
        let acquire = |acquires| {
            rig.host.card.change(|hardware| {
                hardware.rings.get_mut(&channel).into_iter().for_each(|ring| ring.acquires = acquires);
            });
        };
        match thread_rng().gen_range(0..8) {
            0 => enable(false),
            1 => enable(true),
            2 => acquire(true),
            3 => acquire(false),
            4 => rig.access(vm, |host| {
                host.with(|state| {
                    state.end_channel(vm, channel);
                    if !host.card.look().is_removed(vm) {
                        host.card.change(|hardware| hardware.bind(channel, vm, engine));
                    }
                });
            }),
            _ => rig.submit(vm, channel, choose(&SUBMISSION_LENGTHS_NS).copied()),
        }
    }
    rig.access(vm, |host| {
        host.card.change(|hardware| {
            for ring in hardware.rings.values_mut().filter(|ring| ring.vm == vm) {
                (ring.enabled, ring.acquires) = (true, false);
            }
        });
        host.with(|state| state.feeder().look_at_waits(Some(vm)));
    });
    rig.wait(vm);
}

#[test]
fn stopped_ended_or_removed_work_blocks_no_vm_and_never_starts() {
    try_schedules(SCHEDULES, || {
        let config = any_config();
        let (rig, threads) = Rig::new(config, None);
        let mut actors: Vec<_> = (0..VMS).map(|vm| actor(&rig, move |rig| restless(rig, TenantId(vm)))).collect();
        actors.push(actor(&rig, move |rig| operator(rig, None, config)));
        actors.push(actor(&rig, |rig| rig.access(TenantId(0), |host| host.with(|state| state.remove_vm(TenantId(0))))));
        rig.end(actors, threads);
    });
}

#[test]
fn work_waiting_for_semaphore_blocks_no_other_vm() {
    try_schedules(SCHEDULES, || {
        let (rig, threads) = Rig::new(any_config(), None);
        let others: Vec<_> = (1..VMS).map(TenantId).map(|vm| actor(&rig, move |rig| busy(rig, vm, 1.0))).collect();
        let waits = actor(&rig, |rig| {
            let (vm, (channel, _)) = (TenantId(0), any_channel(TenantId(0)));
            let acquire = |acquires| {
                rig.host.card.change(|hardware| {
                    hardware.rings.get_mut(&channel).expect("the channel is bound").acquires = acquires;
                });
            };
            acquire(true);
            // While the VM waits, later work on the channel receives slices.
            (0..3).for_each(|_| rig.submit(vm, channel, Some(SUBMISSION_LENGTHS_NS[0])));
            // The semaphore is released after all work of the other VMs has ended.
            others.into_iter().for_each(|other| other.join().expect("the thread ends normally"));
            acquire(false);
            rig.wait(vm);
        });
        rig.end(vec![waits], threads);
    });
}

#[test]
fn endless_work_is_killed_and_guest_is_notified() {
    try_schedules(SCHEDULES, || {
        let limit = Some(10_000_000);
        // Either every kill leads to a quarantine, which the timer ends, or none does.
        let strikes = thread_rng().gen_range(0..=1);
        let config = Config { strikes, quarantine_ns: 5_000_000, ..any_config() };
        let (rig, threads) = Rig::new(config, limit);
        let mut actors = vec![actor(&rig, move |rig| operator(rig, limit, config))];
        actors.extend((0..VMS).map(TenantId).map(|vm| actor(&rig, move |rig| busy(rig, vm, 0.8))));
        rig.end(actors, threads);
    });
}

/// Checks that a VM with endless work is blamed even if it repeatedly stops its channel, and that a well-behaved VM is
/// not.
#[test]
fn vm_that_keeps_engine_is_killed_and_waiting_vms_never_are() {
    try_schedules(SCHEDULES, || {
        let limit = Some(10_000_000);
        let config = Config { strikes: 0, ..any_config() };
        let (rig, threads) = Rig::new(config, limit);
        let bad = actor(&rig, |rig| {
            let (vm, (channel, engine)) = (TenantId(0), any_channel(TenantId(0)));
            for _ in 0..2 {
                rig.submit(vm, channel, None);
                for enabled in [false, true, false] {
                    rig.host.with(|state| {
                        let of = |hardware: &mut card::Hardware| {
                            hardware.rings.get_mut(&channel).into_iter().for_each(|ring| ring.enabled = enabled);
                        };
                        state.change(of);
                        state.feeder().look_at_waits(Some(vm));
                    });
                }
                // The engine's current work must be killed. Removing the channel also removes its other work.
                rig.host.with(|state| {
                    if !rig.host.card.look().has_begun(channel) {
                        state.end_channel(vm, channel);
                    }
                });
                rig.wait(vm);
                rig.host.with(|state| {
                    state.end_channel(vm, channel);
                    rig.host.card.change(|hardware| hardware.bind(channel, vm, engine));
                });
            }
        });
        let mut actors = vec![bad];
        actors.extend((1..VMS).map(TenantId).map(|vm| actor(&rig, move |rig| busy(rig, vm, 1.0))));
        rig.end(actors, threads);
        rig.host.with(|state| {
            let scheduler = state.schedule.scheduler();
            for vm in (1..VMS).map(TenantId) {
                let killed = Engine::ALL.iter().filter_map(|engine| scheduler.account(vm, *engine));
                assert_eq!(killed.map(|account| account.killed).sum::<u64>(), 0, "a well-behaved VM was struck");
            }
        });
    });
}

/// Tests a channel that has contexts for compute and copies, and uses the copy engine at the same time as another VM.
/// Each VM is charged for its own use of the copy engine, from the first poll in which the card reports this use.
#[test]
fn work_on_other_engine_than_booked_is_charged_there() {
    const LENGTH_NS: u64 = SUBMISSION_LENGTHS_NS[2];
    const FIRST_POLL_NS: u64 = 500_000;
    try_schedules(10, || {
        // The checker requires a second thread.
        let beside = thread::spawn(thread::yield_now);
        let card = Card::default();
        let mut state = State::new(Config { stamp_slack_ns: u64::MAX, ..Config::default() }, card.clone());
        let ([(several, _), _], [_, (other, _)]) = (channels(TenantId(0)), channels(TenantId(1)));
        (0..2).for_each(|vm| state.feeder().schedule_vm(TenantId(vm), VgpuParams::default()));
        card.change(|hardware| {
            hardware.bind(several, TenantId(0), Engine::Compute);
            hardware.bind(other, TenantId(1), Engine::Copy0);
            hardware.rings.get_mut(&several).expect("the channel is bound").works_on = Some(Engine::Copy0);
        });
        state.ring(TenantId(0), several, Some(LENGTH_NS));
        state.ring(TenantId(1), other, Some(LENGTH_NS));
        // The first VM's work starts and is observed on the copy engine.
        card.change(|hardware| {
            assert_eq!(hardware.run_one(), Some(()));
            hardware.pass(FIRST_POLL_NS);
        });
        state.feeder().tick();
        // This work completes first, and the other VM's work completes next.
        card.change(|hardware| while hardware.run_one().is_some() {});
        while !state.schedule.counts().is_empty() {
            state.feeder().complete();
        }
        let account = |state: &State, vm: u32, engine| {
            state.schedule.scheduler().account(TenantId(vm), engine).expect("the VM competes for the engine").clone()
        };
        let used = |vm, engine| account(&state, vm, engine).used;
        assert_eq!([used(0, Engine::Compute), used(0, Engine::Copy0)], [FIRST_POLL_NS, LENGTH_NS - FIRST_POLL_NS]);
        assert_eq!([used(1, Engine::Compute), used(1, Engine::Copy0)], [0, LENGTH_NS], "waiting is not charged");
        // The next submission is booked on the engine on which the previous one was observed.
        state.ring(TenantId(0), several, Some(LENGTH_NS));
        assert_eq!([Engine::Compute, Engine::Copy0].map(|engine| account(&state, 0, engine).arrived), [1, 1]);
        beside.join().expect("the thread ends normally");
    });
}
