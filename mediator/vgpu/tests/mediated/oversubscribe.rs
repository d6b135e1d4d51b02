//! Tests guests that together use more memory than their card has.

use super::relocate::in_host_at_rest;
use super::{A, B, MIB};
use card::{Card, DmaError, DmaMemory};
use card_manager::usage::{TenantTime, Wait};
use card_manager::{Division, GuestEvent, GuestEvents, Sharing};
use rig::altered::{Alter, Altered};
use rig::driver::{At, CE0, Channel, Driver, M2MF, PAGE, ce_copy, m2mf_copy, object, pattern};
use rig::{Rig, settings, sharing};
use sched::VgpuParams;
use simgpu::{Config, EngineId, Fault, FaultKind, SimGpu};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vgpu::Settings;
use vram::victim::VictimPolicy;
use vram::{GuestVramAddr, Limits, Lookup, Mode, OnFull, Step, TenantId, To, VmSummary};

/// Time limit for each step.
pub(super) const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Size of a chunk in bytes.
const CHUNK: u64 = 2 * MIB;
/// Memory that the mediator reserves for itself, in MiB.
const OWN_MIB: u32 = 16;

/// Creates a card with `card_mib` MiB for VMs and `host_mib` MiB of host memory.
pub(super) fn rig_with(card_mib: u32, host_mib: u64, division: Division) -> Rig {
    let sharing = Sharing { host_bytes: host_mib * MIB, division, ..sharing() };
    Rig::made(&Config { vram_mib: card_mib + OWN_MIB, ..Config::default() }, &sharing, |card| card)
}

/// Returns settings without quanta, and with almost no delay between moves.
pub(super) fn fast() -> Division {
    let mut division = Division::default();
    (division.balance.return_interval_ns, division.balance.settle_ns) = (2_000_000, 4_000_000);
    division.quanta.mode = Mode::Off;
    division
}

pub(super) fn driver_with(rig: &Rig, vm: u32, vram_mib: u64, limits: Limits) -> Driver {
    let mut settings = settings(vram_mib, 8);
    settings.share.memory = limits;
    let mut guest = rig.guest_with(vm, &Settings { queue_limit: WAIT_TIMEOUT, ..settings });
    assert!(guest.map_ram(0, MIB, true));
    Driver::new(guest)
}

fn account(rig: &Rig, vm: u32) -> VmSummary {
    rig.usage().0.vms[&TenantId(vm)]
}

/// Waits until a condition holds.
pub(super) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < WAIT_TIMEOUT, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Maps buffers of 64 pages, one in each chunk from chunk 4 on, at contiguous addresses from `A` on, and fills them
/// with a pattern. Returns their VRAM addresses.
fn spread(driver: &mut Driver, channel: &Channel, chunks: u64, seed: u32) -> Vec<u64> {
    let first = 4;
    (0..chunks)
        .map(|chunk| {
            let at = (first + chunk) * CHUNK;
            driver.map(channel.space, A + chunk * 64 * PAGE, At::Vram(at), 64);
            for page in 0..64 {
                driver.guest.vram_write(at + page * PAGE, &pattern(seed + chunk as u32, page));
            }
            at
        })
        .collect()
}

/// Makes the GPU copy each buffer to the next one, in descending order, and verifies all bytes.
fn rotate(driver: &mut Driver, channel: &mut Channel, buffers: &[u64], seed: u32) {
    let count = buffers.len() as u64;
    for chunk in (1..count).rev() {
        let (from, to) = (A + (chunk - 1) * 64 * PAGE, A + chunk * 64 * PAGE);
        let words = if chunk % 2 == 0 {
            [object(CE0), ce_copy(from, to, 64)].concat()
        } else {
            [object(M2MF), m2mf_copy(from, to, 64 * PAGE as u32)].concat()
        };
        driver.submit(channel, &words);
        driver.wait(channel);
    }
    for (chunk, at) in (0u32..).zip(buffers) {
        assert!(driver.vram_holds(*at, 64, seed + chunk.saturating_sub(1)), "buffer {chunk}");
    }
    assert_eq!(driver.guest.counter("faults"), 0);
}

#[test]
fn guest_uses_four_times_memory_of_card() {
    let rig = rig_with(32, 160, fast());
    let mut driver = driver_with(&rig, 0, 144, Limits::default());
    let mut channel = driver.channel(1);
    let buffers = spread(&mut driver, &channel, 64, 7);
    rotate(&mut driver, &mut channel, &buffers, 7);
    let all = account(&rig, 0);
    assert!(all.placed + all.host >= 64 && all.host >= 48, "{all:?}");
    driver.guest.remove().unwrap();
    assert_eq!(in_host_at_rest(&rig), 0);
}

#[test]
fn without_memory_pressure_no_chunk_moves() {
    let rig = rig_with(96, 96, fast());
    let mut drivers = [0, 1].map(|vm| driver_with(&rig, vm, 48, Limits::default()));
    for driver in &mut drivers {
        let mut channel = driver.channel(1);
        let buffers = spread(driver, &channel, 12, 3);
        rotate(driver, &mut channel, &buffers, 3);
    }
    std::thread::sleep(Duration::from_millis(20));
    let state = rig.host.lock();
    assert!(state.memory().moved(TenantId(0)).is_none() && state.memory().moved(TenantId(1)).is_none());
    assert_eq!(state.vram().chunks.summary().host.used, 0);
}

#[test]
fn two_guests_share_card_evenly_and_last_regains_memory() {
    let rig = rig_with(64, 128, fast());
    let [mut first, mut second] = [0, 1].map(|vm| driver_with(&rig, vm, 64, Limits::default()));
    let mut one = first.channel(1);
    let buffers = spread(&mut first, &one, 26, 50);
    assert_eq!(account(&rig, 0).host, 0, "the VM is alone");
    let mut two = second.channel(1);
    let others = spread(&mut second, &two, 26, 90);
    rotate(&mut second, &mut two, &others, 90);
    let even = || {
        let [a, b] = [0, 1].map(|vm| account(&rig, vm));
        a.placed.abs_diff(b.placed) <= 1 && a.moving == 0 && b.moving == 0 && rig.host.lock().vram().chunks.spare() == 0
    };
    eventually("both have as much of the card", even);
    rotate(&mut first, &mut one, &buffers, 50);
    // The remaining VM must get all of its memory back.
    second.guest.remove().unwrap();
    eventually("evicted chunks return", || account(&rig, 0).host == 0);
    for (chunk, at) in (0u32..).zip(&buffers) {
        assert!(first.vram_holds(*at, 64, 50 + chunk.saturating_sub(1)));
    }
}

#[test]
fn lowered_quota_evicts_excess_while_guest_works() {
    let rig = rig_with(64, 128, fast());
    let mut driver = driver_with(&rig, 0, 64, Limits::default());
    let mut channel = driver.channel(1);
    let mut buffers = spread(&mut driver, &channel, 20, 11);
    let mut seed = 11;
    for quota in [20, 10, 3, 30] {
        rig.host.lock().memory_mut().set_limits(TenantId(0), Limits { quota, ..Limits::default() }).unwrap();
        rotate(&mut driver, &mut channel, &buffers, seed);
        buffers = spread(&mut driver, &channel, 20, seed + 100);
        seed += 100;
        eventually("within its quota", || account(&rig, 0).placed <= quota);
        assert!(account(&rig, 0).placed + account(&rig, 0).host >= 20);
    }
}

#[test]
fn guarantee_evicts_memory_of_others_beyond_theirs() {
    let rig = rig_with(64, 64, fast());
    let mut first = driver_with(&rig, 0, 64, Limits::default());
    let mut one = first.channel(1);
    let buffers = spread(&mut first, &one, 26, 40);
    assert_eq!(account(&rig, 0).host, 0, "the VM is alone");
    let mut second = driver_with(&rig, 1, 32, Limits { guarantee: 16, ..Limits::default() });
    assert!(account(&rig, 0).placed <= 16, "{:?}", account(&rig, 0));
    let mut two = second.channel(1);
    let others = spread(&mut second, &two, 10, 70);
    assert_eq!(account(&rig, 1).host, 0, "guaranteed memory is available immediately");
    rotate(&mut first, &mut one, &buffers, 40);
    rotate(&mut second, &mut two, &others, 70);
}

#[test]
fn work_waits_for_memory_and_resumes_when_other_vm_frees_it() {
    let rig = rig_with(48, 0, fast());
    let queue = Limits { on_full: OnFull::Queue, ..Limits::default() };
    let [mut first, mut second] = [0, 1].map(|vm| driver_with(&rig, vm, 44, queue));
    let one = first.channel(1);
    spread(&mut first, &one, 16, 1);
    let mut two = second.channel(1);
    let from = second.buffer(&two, A, 4, 5);
    let to = 40 * MIB;
    // The first VM uses all remaining memory, so the GPU's next access finds none.
    let ones = vec![0xff; MIB as usize];
    for mib in 4..44 {
        first.guest.vram_try_write(mib * MIB, &ones);
    }
    second.map(two.space, B, At::Vram(to), 4);
    second.submit(&mut two, &[object(M2MF), m2mf_copy(A, B, 4 * PAGE as u32)].concat());
    std::thread::sleep(Duration::from_millis(150));
    assert!(!second.is_done(&two) && second.faults.is_empty());
    assert_eq!(second.guest.counter("memory_waits"), 1);
    first.guest.remove().unwrap();
    second.wait(&two);
    assert!(second.vram_holds(to, 4, 5) && second.vram_holds(from, 4, 5));
    assert_eq!((second.guest.counter("faults"), second.guest.counter("memory_denied")), (0, 0));
    assert!(second.guest.counter("memory_waited_ns") > 0);
    // The VM requests the memory repeatedly, but the denial is counted only once.
    let refused = rig.host.lock().holdings().refusals.counts_for(TenantId(1));
    assert_eq!(refused, BTreeMap::from([("card", 1)]));
}

/// Creates two VMs on a card without host memory. The first VM occupies the whole card, and neither VM frees memory.
fn full_card(queue_limit: Duration) -> (Rig, [Driver; 2]) {
    let rig = rig_with(48, 0, fast());
    let drivers = [0, 1].map(|vm| {
        let mut settings = settings(44, 8);
        settings.share.memory = Limits { on_full: OnFull::Queue, ..Limits::default() };
        Driver::new(rig.guest_with(vm, &Settings { queue_limit, ..settings }))
    });
    let ones = vec![0xff; MIB as usize];
    for mib in 4..44 {
        drivers[0].guest.vram_try_write(mib * MIB, &ones);
    }
    (rig, drivers)
}

#[test]
fn cpu_write_waits_for_memory_and_arrives_once() {
    let (_rig, [first, mut second]) = full_card(WAIT_TIMEOUT);
    let at = 40 * MIB + 0x1230;
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            second.guest.poke(at, 0x1234_5678);
            (second.guest.peek(at), second.guest.counter("memory_writes_waited"))
        });
        std::thread::sleep(Duration::from_millis(60));
        first.guest.remove().unwrap();
        assert_eq!(writing.join().unwrap(), (0x1234_5678, 1));
    });
    assert_eq!(second.guest.counter("memory_writes_lost"), 0);
}

#[test]
fn cpu_write_without_memory_is_lost_and_later_ones_skip_wait() {
    let (_rig, [first, mut second]) = full_card(Duration::from_millis(20));
    for word in 0..100 {
        second.guest.poke(40 * MIB + 4 * word, 1);
    }
    let counts = ["memory_writes_waited", "memory_writes_lost"].map(|name| second.guest.counter(name));
    assert!(counts[0] >= 1 && counts[0] < 50 && counts[1] == 100, "{counts:?}");
    // A write beyond the guest's VRAM must not wait.
    second.guest.poke(60 * MIB, 1);
    assert_eq!(second.guest.counter("memory_writes_lost"), 100);
    drop(first);
}

#[test]
fn waiting_work_gets_memory_of_others_beyond_their_share() {
    let mut division = fast();
    // A VM that writes only with its CPU must not count as idle, no matter how slow the host is.
    division.balance.idle_after_ns = u64::MAX;
    let rig = rig_with(48, 64, division);
    let mut second = driver_with(&rig, 1, 44, Limits { on_full: OnFull::Queue, ..Limits::default() });
    let mut two = second.channel(1);
    second.buffer(&two, A, 4, 5);
    // The first VM uses all remaining memory, and neither VM frees any.
    let mut first = driver_with(&rig, 0, 64, Limits::default());
    let mut one = first.channel(1);
    let buffers = spread(&mut first, &one, 26, 20);
    for chunk in 0..6 {
        let to = (8 + 2 * chunk) * MIB;
        second.map(two.space, B + chunk * 4 * PAGE, At::Vram(to), 4);
        // The mover may report free memory at any time. Here, it does so after the flush that finds no memory, and
        // before the work that needs the memory.
        second.guest.vm().deliver(GuestEvent::Memory);
        second.submit(&mut two, &[object(M2MF), m2mf_copy(A, B + chunk * 4 * PAGE, 4 * PAGE as u32)].concat());
        second.wait(&two);
        assert_eq!(second.faults, [], "chunk {chunk}");
        assert!(second.vram_holds(to, 4, 5), "chunk {chunk}");
    }
    assert_eq!((second.guest.counter("faults"), second.guest.counter("memory_denied")), (0, 0));
    assert!(account(&rig, 0).host > 0 && account(&rig, 1).host == 0);
    rotate(&mut first, &mut one, &buffers, 20);
}

/// A card that rejects mappings of host memory while the flag is set.
struct Stingy(Arc<AtomicBool>);

impl Alter for Stingy {
    fn map_dma(&self, card: &SimGpu, iova: u64, memory: DmaMemory) -> Result<(), DmaError> {
        if self.0.load(Ordering::SeqCst) {
            return Err(DmaError::Host(std::io::ErrorKind::OutOfMemory.into()));
        }
        card.map_dma(iova, memory)
    }
}

#[test]
fn unpinnable_host_memory_keeps_chunks_resident_and_work_waits() {
    let refuses = Arc::new(AtomicBool::new(false));
    let sharing = Sharing { host_bytes: 64 * MIB, division: fast(), ..sharing() };
    let config = Config { vram_mib: 32 + OWN_MIB, ..Config::default() };
    let wrapped = Arc::clone(&refuses);
    let rig = Rig::made(&config, &sharing, |card| Altered::over(card, Stingy(wrapped)));
    let mut driver = driver_with(&rig, 0, 48, Limits::default());
    let mut channel = driver.channel(1);
    let buffers = spread(&mut driver, &channel, 8, 60);
    refuses.store(true, Ordering::SeqCst);
    rig.host.lock().memory_mut().set_limits(TenantId(0), Limits { quota: 2, ..Limits::default() }).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(account(&rig, 0).host, 0);
    rotate(&mut driver, &mut channel, &buffers, 60);
    // New memory does not fit, so work that needs it must wait.
    let from = driver.buffer(&channel, B, 4, 61);
    let to = 40 * MIB;
    driver.map(channel.space, B + 0x10_0000, At::Vram(to), 4);
    driver.submit(&mut channel, &[object(M2MF), m2mf_copy(B, B + 0x10_0000, 4 * PAGE as u32)].concat());
    std::thread::sleep(Duration::from_millis(50));
    assert!(!driver.is_done(&channel));
    refuses.store(false, Ordering::SeqCst);
    driver.wait(&channel);
    assert!(driver.vram_holds(to, 4, 61) && driver.vram_holds(from, 4, 61));
    eventually("the quota holds now", || account(&rig, 0).placed <= 2);
}

#[test]
fn memory_named_by_submission_stays_resident_under_clock() {
    let mut division = fast();
    division.balance.policy = VictimPolicy::Clock;
    let rig = rig_with(48, 96, division);
    let mut driver = driver_with(&rig, 0, 64, Limits::default());
    let mut channel = driver.channel(1);
    let buffers = spread(&mut driver, &channel, 16, 20);
    let limit =
        |quota| rig.host.lock().memory_mut().set_limits(TenantId(0), Limits { quota, ..Limits::default() }).unwrap();
    let on_card = || {
        let state = rig.host.lock();
        let chunks = &state.vram().chunks;
        let is_there = |at: &u64| matches!(chunks.lookup(TenantId(0), GuestVramAddr(*at), 1), Lookup::Placed(place) if place.card().is_some());
        buffers.iter().map(is_there).collect::<Vec<_>>()
    };
    let evict = |count| {
        let gone = account(&rig, 0).host + count;
        limit(account(&rig, 0).placed - count);
        let rests = || rig.host.lock().vram().chunks.moves().count() == 0;
        eventually("the chunks are gone", || account(&rig, 0).host == gone && rests());
    };
    // During these evictions, the clock hand passes all memory that the CPU has written.
    evict(6);
    let hot: Vec<usize> = (0..16).filter(|at| on_card()[*at]).step_by(3).take(3).collect();
    let va = |buffer: usize| A + buffer as u64 * 64 * PAGE;
    let words = [
        [object(CE0), ce_copy(va(hot[0]), va(hot[1]), 64)].concat(),
        [object(M2MF), m2mf_copy(va(hot[1]), va(hot[2]), 64 * PAGE as u32)].concat(),
    ];
    driver.submit(&mut channel, &words.concat());
    driver.wait(&channel);
    evict(6);
    assert!(hot.iter().all(|buffer| on_card()[*buffer]), "{hot:?} of {:?}", on_card());
    for buffer in &hot[1..] {
        assert!(driver.vram_holds(buffers[*buffer], 64, 20 + hot[0] as u32));
    }
}

#[test]
fn engines_that_hang_do_not_keep_memory_from_moving() {
    let rig = rig_with(32, 64, fast());
    let mut driver = driver_with(&rig, 0, 48, Limits::default());
    let mut channel = driver.channel(1);
    let buffers = spread(&mut driver, &channel, 8, 30);
    for engine in [EngineId::Copy0, EngineId::Copy1] {
        rig.card.inject(Fault { engine, kind: FaultKind::Hang, after: 0, count: 1 });
    }
    rig.host.lock().memory_mut().set_limits(TenantId(0), Limits { quota: 2, ..Limits::default() }).unwrap();
    eventually("the quota holds", || account(&rig, 0).placed <= 2);
    for (chunk, at) in (0u32..).zip(&buffers) {
        assert!(driver.vram_holds(*at, 64, 30 + chunk));
    }
    driver.submit(&mut channel, &[object(M2MF), m2mf_copy(A, A + 64 * PAGE, 64 * PAGE as u32)].concat());
    driver.wait(&channel);
    assert!(driver.vram_holds(buffers[1], 64, 30));
}

#[test]
fn engines_that_have_hung_once_move_memory_again() {
    let rig = super::relocate::rig_of(CHUNK, 64, 64);
    let driver = driver_with(&rig, 0, 32, Limits::default());
    driver.guest.vram_write(8 * MIB, &[7; 4096]);
    let mut there = To::Host;
    let mut swing = || {
        let done = rig.host.relocate(TenantId(0), &[Step { vm: TenantId(0), index: 4, to: there }]);
        there = if there == To::Host { To::Card } else { To::Host };
        assert_eq!(done.moved, 1);
        rig.host.pieces_moved()
    };
    let before = swing();
    for engine in [EngineId::Copy0, EngineId::Copy1] {
        rig.card.inject(Fault { engine, kind: FaultKind::Hang, after: 0, count: 1 });
    }
    assert_eq!(swing(), before, "the CPU has copied it");
    assert!((0..8).any(|_| swing() > before), "the engines copy again");
    let mut data = [0; 4096];
    driver.guest.vram_read(8 * MIB, &mut data);
    assert_eq!(data, [7; 4096]);
}

#[test]
fn a_vm_that_goes_while_its_memory_moves_leaves_nothing() {
    let rig = rig_with(48, 96, fast());
    let before = (rig.usage().0.mediator, rig.usage().2);
    for round in 0..12 {
        let mut driver = driver_with(&rig, round, 64, Limits::default());
        let channel = driver.channel(1);
        spread(&mut driver, &channel, 26, 1);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for quota in (1..12).cycle() {
                    let limits = Limits { quota, ..Limits::default() };
                    if stop.load(Ordering::SeqCst)
                        || rig.host.lock().memory_mut().set_limits(TenantId(round), limits).is_err()
                    {
                        return;
                    }
                    std::thread::sleep(Duration::from_micros(300));
                }
            });
            std::thread::sleep(Duration::from_millis(u64::from(round) * 3));
            if round % 2 == 0 {
                driver.guest.remove().unwrap();
            } else {
                driver.guest.reconnect();
                stop.store(true, Ordering::SeqCst);
                driver.guest.remove().unwrap();
            }
        });
    }
    let used = in_host_at_rest(&rig);
    let after = rig.usage();
    assert_eq!((used, after.0.vms.len()), (0, 0));
    assert_eq!((after.0.mediator, after.2), before);
}

/// Returns true if VMs currently take turns. Checks that the quantum's holder competes with the combined weight of all
/// members, so that other VMs keep their shares, and that all other VMs compete with their own settings.
fn holder_competes_for_all(rig: &Rig) -> bool {
    let state = rig.host.lock();
    let turn = state.memory().divider().residency().turn();
    for vm in state.scheduler().vgpus() {
        let members = turn.filter(|turn| turn.holder == vm).map_or(1, |turn| turn.members.len() as u32);
        let expected = (members > 1).then(|| members * VgpuParams::default().weight);
        assert_eq!(state.scheduler().competing(vm).map(|params| params.weight), expected);
    }
    turn.is_some_and(|turn| turn.members.len() > 1)
}

#[test]
fn guests_that_do_not_fit_together_take_turns() {
    let mut division = fast();
    division.quanta.mode = Mode::Forced;
    (division.quanta.min_ns, division.quanta.max_ns) = (5_000_000, 20_000_000);
    let rig = rig_with(48, 128, division);
    let drivers = [0, 1].map(|vm| driver_with(&rig, vm, 48, Limits::default()));
    let turns = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (vm, mut driver) in (0u32..).zip(drivers) {
            let (rig, turns) = (&rig, &turns);
            scope.spawn(move || {
                let mut channel = driver.channel(1);
                let mut seed = 1000 * vm;
                for _ in 0..3 {
                    seed += 100;
                    let buffers = spread(&mut driver, &channel, 18, seed);
                    rotate(&mut driver, &mut channel, &buffers, seed);
                    turns.fetch_or(holder_competes_for_all(rig), Ordering::SeqCst);
                }
                driver.guest.remove().unwrap();
            });
        }
    });
    assert!(turns.load(Ordering::SeqCst), "turns were taken");
    assert_eq!(in_host_at_rest(&rig), 0);
}

/// Runs [`take_turns_over_the_bus`] on a card that counts accesses.
#[test]
fn guests_copying_over_bus_get_quanta_if_card_counts_accesses() {
    take_turns_over_the_bus(true);
}

/// Runs [`take_turns_over_the_bus`] on a card that does not count accesses, like real hardware.
#[test]
fn guests_copying_over_bus_get_quanta_without_access_counts() {
    take_turns_over_the_bus(false);
}

fn take_turns_over_the_bus(profile: bool) {
    /// Time over which the detector sums traffic.
    const WINDOW: Duration = Duration::from_millis(300);
    let mut division = fast();
    (division.quanta.window_ns, division.quanta.min_ns) = (WINDOW.as_nanos() as u64, 5_000_000);
    // Make any traffic count as thrashing, because copies take almost no time here.
    division.quanta.on_permille = 1;
    let config = Config { vram_mib: 48 + OWN_MIB, profile, ..Config::default() };
    let rig = Rig::made(&config, &Sharing { host_bytes: 128 * MIB, division, ..sharing() }, |card| card);
    let drivers = [0, 1].map(|vm| driver_with(&rig, vm, 48, Limits::default()));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (vm, mut driver) in (0u32..).zip(drivers) {
            let stop = &stop;
            scope.spawn(move || {
                let mut channel = driver.channel(1);
                let seed = 1000 * vm;
                let buffers = spread(&mut driver, &channel, 18, seed);
                while !stop.load(Ordering::SeqCst) {
                    // Copy the data onto itself, so that it does not change although all of it is accessed.
                    for buffer in 0..18 {
                        let at = A + buffer * 64 * PAGE;
                        driver.submit(&mut channel, &[object(M2MF), m2mf_copy(at, at, 64 * PAGE as u32)].concat());
                        if buffer % 6 == 5 {
                            driver.wait(&channel);
                        }
                    }
                }
                for (chunk, at) in (0u32..).zip(buffers) {
                    assert!(driver.vram_holds(at, 64, seed + chunk), "buffer {chunk} of VM {vm}");
                }
            });
        }
        // Wait until each VM has its share of the memory, and the detector's window has passed, because the moves until
        // then must not be counted.
        let moved = || [0, 1].map(|vm| rig.host.lock().memory().moved(TenantId(vm)).map(|moved| moved.sum.bytes));
        let (mut before, mut since) = (moved(), Instant::now());
        eventually("each VM has its share", || {
            let now = moved();
            if now != before {
                (before, since) = (now, Instant::now());
            }
            account(&rig, 0).host > 0 && account(&rig, 1).host > 0 && since.elapsed() > 2 * WINDOW
        });
        division.quanta.mode = Mode::Auto;
        rig.host.lock().memory_mut().set_division(&division).unwrap();
        let (mut holders, mut told, mut by_traffic) = (std::collections::BTreeSet::new(), false, None);
        let began = Instant::now();
        while holders.len() < 2 && began.elapsed() < WAIT_TIMEOUT {
            let state = rig.host.lock();
            let quanta = state.memory().divider().residency().quanta();
            if quanta.turn().is_some() {
                by_traffic.get_or_insert(!quanta.tries());
            }
            holders.extend(state.memory().divider().residency().turn().map(|turn| turn.holder));
            let is_told = |vm: &TenantTime| matches!(vm.wait, Some(Wait::MemoryQuantum { .. }));
            told |= state.scheduler_usage(0).time.tenants.values().any(is_told);
            drop(state);
            std::thread::sleep(Duration::from_millis(1));
        }
        // With this quota, the first VM leaves enough memory for the other one. Quanta would not help the first VM, so
        // the VMs must not take turns.
        rig.host.lock().memory_mut().set_limits(TenantId(0), Limits { quota: 1, ..Limits::default() }).unwrap();
        let takes_turns = || rig.host.lock().memory().divider().residency().turn().is_some();
        let (began, mut without_since) = (Instant::now(), None);
        let lasts = |since: &Option<Instant>| since.is_some_and(|since| since.elapsed() > Duration::from_millis(500));
        while !lasts(&without_since) && began.elapsed() < WAIT_TIMEOUT {
            without_since = if takes_turns() { None } else { without_since.or(Some(Instant::now())) };
            std::thread::sleep(Duration::from_millis(1));
        }
        stop.store(true, Ordering::SeqCst);
        assert_eq!(holders.len(), 2, "each VM has had its turn");
        assert_eq!(by_traffic, Some(true), "quanta begin with a probe, which takes two windows");
        assert!(told, "a VM waits for the other's quantum");
        assert!(lasts(&without_since), "a VM that is limited by its quota takes turns");
    });
}
