//! VMs that share the card's time, on a card whose work takes time of its own.

use super::super::rig::driver::{At, Channel, Driver, M2MF, PAGE, m2mf_copy, methods, object, release};
use super::super::rig::{Rig, settings};
use super::{A, B, MIB, VM_MIB};
use crate::host::{Feeder, time};
use nvspec::regs::pfifo;
use sched::{Config, Engine, Pipeline, PolicyKind, VgpuId, VgpuParams};
use simgpu::{ComputeTiming, EngineId, EngineTiming, Fault, FaultKind, TimeModel};
use std::time::{Duration, Instant};
use vram::VmId;

/// What a copy of a page takes.
const COPY_NS: u64 = 400_000;
/// Nothing takes that long.
const LONG: Duration = Duration::from_secs(60);

/// A card whose copies by M2MF take [`COPY_NS`] each.
fn rig(scheduler: Config) -> Rig {
    let graph = EngineTiming { bytes_per_second: 0, launch_ns: COPY_NS };
    let copy = EngineTiming { bytes_per_second: 0, launch_ns: 0 };
    let time = TimeModel { graph, compute: ComputeTiming::default(), copy, switch_ns: 0, bus_bytes_per_second: 0 };
    Rig::timed(super::CARD_MIB, time, scheduler)
}

fn driver(rig: &Rig, vm: u32, time: VgpuParams) -> Driver {
    let mut limits = settings(VM_MIB, 8);
    limits.share.time = time;
    let mut guest = rig.guest_with(vm, &limits);
    assert!(guest.map_ram(0, MIB, true));
    Driver::new(guest)
}

/// A channel with something to copy.
fn worker(driver: &mut Driver, id: u8) -> Channel {
    let channel = driver.channel(id);
    driver.buffer(&channel, A, 1, 5);
    driver.buffer(&channel, B, 1, 6);
    channel
}

/// Submits so many copies as one submission.
fn copies(driver: &mut Driver, channel: &mut Channel, count: usize) {
    let copy = m2mf_copy(A, B, PAGE as u32);
    driver.submit(channel, &[object(M2MF), copy.repeat(count)].concat());
}

fn used(rig: &Rig, vm: u32) -> u64 {
    let state = rig.host.lock();
    let scheduler = state.schedule.scheduler();
    Engine::ALL.iter().filter_map(|engine| scheduler.account(VgpuId(vm), *engine)).map(|account| account.used).sum()
}

/// Keeps each of the VMs supplied with submissions of so many copies, until the card has worked for `ns`.
fn compete(rig: &Rig, drivers: &mut [(Driver, Channel, usize)], ns: u64) {
    let began = Instant::now();
    let total = |rig: &Rig, count: usize| -> u64 { (0..count).map(|vm| used(rig, vm as u32)).sum() };
    let before = total(rig, drivers.len());
    while total(rig, drivers.len()) - before < ns {
        assert!(began.elapsed() < LONG, "the card gets on");
        for (driver, channel, size) in &mut *drivers {
            // Many at a time, so that there is always one that waits.
            while channel.fences - driver.guest.peek(channel.fence) < 24 {
                copies(driver, channel, *size);
            }
            driver.service();
        }
    }
}

#[test]
fn vms_get_the_card_by_their_weights_whatever_the_size_of_their_submissions() {
    let rig = rig(Config::default());
    let mut drivers: Vec<_> = [(300, 1), (100, 3)]
        .into_iter()
        .zip(0..)
        .map(|((weight, size), vm)| {
            let mut driver = driver(&rig, vm, VgpuParams::weight(weight));
            let channel = worker(&mut driver, 1);
            (driver, channel, size)
        })
        .collect();
    compete(&rig, &mut drivers, 100_000_000);
    let before = [used(&rig, 0), used(&rig, 1)];
    compete(&rig, &mut drivers, 900_000_000);
    let got = [used(&rig, 0) - before[0], used(&rig, 1) - before[1]];
    let part = got[0] as f64 / (got[0] + got[1]) as f64;
    // Half without weights, a quarter by the size of submissions; on a host without time to spare not exactly 0.75.
    assert!((0.65..=0.85).contains(&part), "{part} instead of 0.75: {got:?}");
}

#[test]
fn what_is_charged_is_what_the_engine_was_busy_and_no_less_than_its_work() {
    let rig = rig(Config::default());
    let mut drivers: Vec<_> = (0..2)
        .map(|vm| {
            let mut driver = driver(&rig, vm, VgpuParams::default());
            let channel = worker(&mut driver, 1);
            (driver, channel, 2)
        })
        .collect();
    let before = time::now_ns(&*rig.card);
    compete(&rig, &mut drivers, 300_000_000);
    for (driver, channel, _) in &mut drivers {
        driver.wait(channel);
    }
    // The last completion has been seen when nothing is in flight any more.
    let began = Instant::now();
    while rig.host.lock().schedule.scheduler().in_flight() > 0 {
        assert!(began.elapsed() < LONG);
        std::thread::yield_now();
    }
    let work: u64 = drivers.iter().map(|(_, channel, size)| u64::from(channel.fences) * *size as u64 * COPY_NS).sum();
    let (busy, charged) = {
        let state = rig.host.lock();
        let scheduler = state.schedule.scheduler();
        let charged: u64 =
            (0..2).filter_map(|vm| scheduler.account(VgpuId(vm), Engine::Compute)).map(|account| account.used).sum();
        (scheduler.busy(Engine::Compute), charged)
    };
    assert_eq!(busy, charged);
    assert!(busy >= work, "{busy} ns for work of {work} ns");
    // An engine is not busy for longer than time goes on, however many there are that wait for it.
    let passed = time::now_ns(&*rig.card) - before;
    assert!(busy <= passed, "{busy} ns in {passed} ns");
}

#[test]
fn a_submission_that_waits_for_one_behind_it_gives_way() {
    let one = Config { pipeline: Pipeline::ONE, ..Config::default() };
    let rig = rig(one);
    let mut busy = driver(&rig, 1, VgpuParams::default());
    let mut other = worker(&mut busy, 1);
    let mut driver = driver(&rig, 0, VgpuParams::default());
    let (mut first, mut second) = (worker(&mut driver, 1), worker(&mut driver, 2));
    // One semaphore in both address spaces.
    let shared = driver.vram(1);
    for channel in [&first, &second] {
        driver.map(channel.space, SEMAPHORE, At::Vram(shared), 1);
    }
    driver.flush();
    copies(&mut busy, &mut other, 4);
    // The first acquires what the second releases, which comes behind it in the VM's queue.
    driver.submit(&mut first, &acquire(SEMAPHORE, 0x77));
    driver.submit(&mut second, &release(SEMAPHORE, 0x77));
    copies(&mut busy, &mut other, 4);
    driver.wait(&second);
    driver.wait(&first);
    busy.wait(&other);
}

#[test]
fn channels_that_wait_and_give_nothing_up_cost_others_little() {
    let rig = rig(Config::default());
    let mut busy = driver(&rig, 1, VgpuParams::default());
    let mut other = worker(&mut busy, 1);
    let mut guest = driver(&rig, 0, VgpuParams::default());
    let mut waiting: Vec<_> = (1..=4).map(|id| worker(&mut guest, id)).collect();
    let page = guest.vram(1);
    for channel in &waiting {
        guest.map(channel.space, SEMAPHORE, At::Vram(page), 1);
    }
    guest.flush();
    // More than once, so that what has rested has to look again; the best counts, for a host that is late is charged too.
    const COPIES: u64 = 300;
    let mut best = u64::MAX;
    for payload in [0x77, 0x78, 0x79, 0x7a] {
        waiting.iter_mut().for_each(|channel| guest.submit(channel, &acquire(SEMAPHORE, payload)));
        let before = used(&rig, 1);
        for _ in 0..COPIES {
            copies(&mut busy, &mut other, 1);
        }
        busy.wait(&other);
        best = best.min(used(&rig, 1) - before);
        assert!(waiting.iter().all(|channel| guest.guest.peek(channel.fence) < channel.fences), "they still wait");
        guest.guest.vram_write(page, &u32::to_le_bytes(payload));
        waiting.iter().for_each(|channel| guest.wait(channel));
    }
    // Four channels with a time slice each before the copies have one: five times as long.
    assert!(best < COPIES * COPY_NS * 5 / 2, "{best} ns for {COPIES} copies of {COPY_NS} ns");
}

/// Where the semaphore of two channels lies.
const SEMAPHORE: u64 = 0x300_0000;

/// Waits until the semaphore is that.
fn acquire(va: u64, payload: u32) -> Vec<u32> {
    methods(0, 0x10, &[(va >> 32) as u32, va as u32, payload, 1])
}

#[test]
fn a_doorbell_of_a_channel_that_may_not_run_holds_up_nobody() {
    let rig = rig(Config { pipeline: Pipeline::ONE, ..Config::default() });
    let mut other = driver(&rig, 1, VgpuParams::default());
    let mut channel = worker(&mut other, 1);
    let mut lazy = driver(&rig, 0, VgpuParams::default());
    let mut stopped = worker(&mut lazy, 1);
    lazy.guest.wr(pfifo::CHANNEL_STATE::at(1), 0x001f_0000);
    for _ in 0..8 {
        copies(&mut lazy, &mut stopped, 1);
        copies(&mut other, &mut channel, 1);
    }
    other.wait(&channel);
    assert_eq!(rig.host.lock().schedule.scheduler().queued(), 0);
    assert_eq!(lazy.guest.peek(stopped.fence), 0);
    // Started while it runs, and stopped on its way.
    lazy.guest.wr(pfifo::CHANNEL_STATE::at(1), 0x001f_0001);
    lazy.guest.wr(pfifo::CHANNEL_STATE::at(1), 0x001f_0000);
    for _ in 0..8 {
        copies(&mut other, &mut channel, 1);
    }
    other.wait(&channel);
    lazy.guest.wr(pfifo::CHANNEL_STATE::at(1), 0x001f_0001);
    lazy.wait(&stopped);
}

#[test]
fn a_submission_beyond_its_limit_is_killed_and_the_third_brings_quarantine() {
    let rig = rig(Config::default());
    let limit = VgpuParams { max_run_ns: Some(50_000_000), ..VgpuParams::default() };
    let mut good = driver(&rig, 1, VgpuParams::default());
    let mut other = worker(&mut good, 1);
    let mut bad = driver(&rig, 0, limit);
    for strike in 1..=3 {
        let mut channel = worker(&mut bad, strike);
        assert!(rig.card.inject(Fault { engine: EngineId::Graph, kind: FaultKind::Hang, after: 0, count: 1 }));
        copies(&mut bad, &mut channel, 1);
        let began = Instant::now();
        while bad.guest.counter("hangs") < u64::from(strike) {
            assert!(began.elapsed() < LONG, "it is killed");
            std::thread::sleep(Duration::from_millis(1));
        }
        bad.service();
        bad.unbind(&channel);
        copies(&mut good, &mut other, 1);
        good.wait(&other);
    }
    assert_eq!(rig.host.lock().schedule.scheduler().strikes(VgpuId(0)).map(|(strikes, _)| strikes), Some(3));
    // Nothing of it starts until the operator lets it.
    let mut channel = worker(&mut bad, 5);
    copies(&mut bad, &mut channel, 1);
    copies(&mut good, &mut other, 1);
    good.wait(&other);
    assert!(!bad.is_done(&channel));
    assert_eq!(rig.host.lock().schedule.scheduler().queued(), 1);
    rig.host.lock().release_vm(VmId(0));
    bad.wait(&channel);
}

#[test]
fn the_policy_changes_under_load_and_nothing_is_lost() {
    let rig = rig(Config::default());
    let mut drivers: Vec<_> = (0..3)
        .map(|vm| {
            let mut driver = driver(&rig, vm, VgpuParams::default());
            let channel = worker(&mut driver, 1);
            (driver, channel, 1)
        })
        .collect();
    for policy in PolicyKind::ALL.into_iter().cycle().take(15) {
        compete(&rig, &mut drivers, 10_000_000);
        rig.host.lock().set_scheduler(Config { policy, ..Config::default() });
    }
    for (driver, channel, _) in &mut drivers {
        driver.wait(channel);
    }
    let state = rig.host.lock();
    assert_eq!(state.schedule.scheduler().queued(), 0);
}

#[test]
fn a_guest_that_forges_its_ends_pays_for_its_work_all_the_same() {
    let rig = rig(Config::default());
    let mut drivers: Vec<_> = (0..2)
        .map(|vm| {
            let mut driver = driver(&rig, vm, VgpuParams::default());
            let channel = worker(&mut driver, 1);
            (driver, channel, 4)
        })
        .collect();
    // The first one's records say at once that everything has ended.
    let physical = {
        let state = rig.host.lock();
        state.channels.physical(channels::VmId(0), nvspec::fifo::VirtualChannelId(1)).unwrap()
    };
    let area = rig.host.layout().work_area(physical);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let state = &mut *rig.host.lock();
                for slot in 0..256u32 {
                    let at = area.offset(3 * PAGE + u64::from(slot) * 16);
                    let mut forged = [0; 16];
                    forged[..4].copy_from_slice(&(slot + 1).to_le_bytes());
                    state.vram.memory.write(at, &forged).unwrap();
                }
            }
        });
        // Few enough that the numbers of submissions are those of their slots.
        compete(&rig, &mut drivers, 150_000_000);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    for (driver, channel, _) in &mut drivers {
        driver.wait(channel);
    }
    let used = [used(&rig, 0), used(&rig, 1)];
    let work = |(_, channel, size): &(Driver, Channel, usize)| u64::from(channel.fences) * *size as u64 * COPY_NS;
    assert!(used[0] * 10 >= work(&drivers[0]) * 8, "{} ns for work of {} ns", used[0], work(&drivers[0]));
}
