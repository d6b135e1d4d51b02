//! Tests handovers of a card to another owner while its VMs work.

pub(super) mod edited;

use super::oversubscribe::eventually;
use super::relocate::{free_settings, in_host, move_all, still, work};
use super::{A, B, MIB, usage};
use card_manager::Sharing;
use fastrand::Rng;
use nvspec::class::compute90c0 as class;
use rig::driver::{CE0, CE1, Channel, Driver, M2MF, PAGE, ce_copy, m2mf_copy, methods, object};
use rig::{Guest, Handover, Rig, sharing};
use sched::{Engine, PolicyKind};
use simgpu::{ComputeTiming, Config, EngineTiming, TimeModel};
use vgpu::Settings;
use vram::{TenantId, To};

/// Number of pages per copy.
const PAGES: u64 = 20;

/// Returns the settings of a card that supports handover, with `host_mib` MiB of host memory for chunks.
pub(super) fn handover(host_mib: u64) -> Handover {
    let sharing = Sharing { host_bytes: host_mib * MIB, division: still(), shared: true, ..sharing() };
    Handover { config: Config { vram_mib: 96, shared: true, ..Config::default() }, sharing }
}

/// Returns the time model of a card that is so slow that some work is always in progress.
pub(super) fn slow() -> TimeModel {
    let engine = EngineTiming { bytes_per_second: 20_000_000, launch_ns: 1_000_000 };
    let compute = ComputeTiming::default();
    TimeModel { graph: engine, compute, copy: engine, switch_ns: 10_000, bus_bytes_per_second: 0 }
}

fn driver(rig: &Rig, vm: u32, settings: &Settings) -> Driver {
    let mut guest = rig.guest_with(vm, settings);
    assert!(guest.map_ram(0, MIB, true));
    Driver::new(guest)
}

fn guests(drivers: &mut [Driver]) -> Vec<&mut Guest> {
    drivers.iter_mut().map(|driver| &mut driver.guest).collect()
}

fn hand_over(handover: &Handover, rig: &mut Rig, drivers: &mut [Driver]) {
    handover.hand_over(rig, &mut guests(drivers));
}

/// Submits a copy of a buffer to one of the engines.
pub(super) fn copy(driver: &mut Driver, channel: &mut Channel, by: u32) {
    let words = match by % 3 {
        0 => [object(M2MF), m2mf_copy(A, B, (PAGES * PAGE) as u32)].concat(),
        1 => [object(CE0), ce_copy(A, B, PAGES as u32)].concat(),
        _ => [object(CE1), ce_copy(A, B, PAGES as u32)].concat(),
    };
    driver.submit(channel, &words);
}

/// Hands the card over in each round, with work in progress and queued, and with memory on the card and in host memory.
fn work_goes_on(handover: &Handover, rounds: u32) {
    let mut rig = handover.rig();
    let mut drivers: Vec<Driver> = (0..3).map(|vm| driver(&rig, vm, &free_settings(16))).collect();
    let mut channels: Vec<[Channel; 2]> = drivers.iter_mut().map(|it| [it.channel(1), it.channel(2)]).collect();
    let host = handover.sharing.host_bytes != 0;
    for round in 0..rounds {
        let mut places = Vec::new();
        for (vm, (driver, channels)) in (0..).zip(drivers.iter_mut().zip(&mut channels)) {
            let both = channels.each_mut().map(|channel| {
                driver.buffer(channel, A, PAGES, 100 * round + vm);
                driver.buffer(channel, B, PAGES, 7)
            });
            if host && (vm + round) % 2 == 0 {
                move_all(&rig, vm, To::Host);
            }
            for by in 0..4 {
                channels.iter_mut().for_each(|channel| copy(driver, channel, by + vm));
            }
            places.push(both);
        }
        hand_over(handover, &mut rig, &mut drivers);
        for (vm, ((driver, channels), places)) in (0..).zip(drivers.iter_mut().zip(&channels).zip(places)) {
            for (channel, to) in channels.iter().zip(places) {
                driver.wait(channel);
                assert!(driver.vram_holds(to, PAGES, 100 * round + vm), "VM {vm} in round {round}");
            }
            assert_eq!((driver.faults.len(), driver.guest.counter("faults")), (0, 0));
        }
        if host {
            assert!(in_host(&rig) > 0, "swapped memory is at its previous location");
            for vm in 0..3 {
                move_all(&rig, vm, To::Card);
            }
            assert_eq!(in_host(&rig), 0);
        }
    }
}

#[test]
fn guests_in_mid_work_continue_after_hand_over() {
    work_goes_on(&handover(0), 6);
}

#[test]
fn swapped_memory_returns_under_another_owner() {
    work_goes_on(&handover(64), 6);
}

#[test]
fn long_work_is_descheduled_and_resumes_after_hand_over() {
    let mut handover = handover(0);
    handover.config.time = Some(slow());
    for policy in PolicyKind::ALL {
        handover.sharing.scheduler.policy = policy;
        work_goes_on(&handover, 2);
    }
}

#[test]
fn accounts_survive_hand_over_and_vms_can_arrive_and_leave() {
    let handover = handover(64);
    let mut rig = handover.rig();
    let before = usage(&rig);
    let mut drivers = vec![driver(&rig, 0, &free_settings(16)), driver(&rig, 1, &free_settings(16))];
    for (vm, driver) in drivers.iter_mut().enumerate() {
        work(driver, 20, &mut Rng::with_seed(vm as u64));
    }
    let accounts = |rig: &Rig| {
        let used = rig.host.lock().scheduler_usage(1);
        let of = |vm| {
            let engines = &used.time.tenants[&TenantId(vm)].engines;
            Engine::ALL.map(|engine| (engines[&engine].account.completed, engines[&engine].account.used))
        };
        [of(0), of(1)]
    };
    eventually("all work has completed and was checked", || {
        let used = rig.host.lock().scheduler_usage(1);
        used.time.in_flight + used.time.queued == 0
    });
    let (submitted, had) = (drivers[0].guest.counter("submissions"), accounts(&rig));
    hand_over(&handover, &mut rig, &mut drivers);
    assert_eq!((drivers[0].guest.counter("submissions"), accounts(&rig)), (submitted, had));
    // A VM can be added after the handover.
    let mut late = driver(&rig, 2, &free_settings(16));
    work(&mut late, 20, &mut Rng::with_seed(9));
    for (vm, driver) in drivers.iter_mut().enumerate() {
        work(driver, 20, &mut Rng::with_seed(vm as u64));
    }
    assert!(accounts(&rig).iter().zip(had).all(|(now, before)| now > &before));
    drivers.push(late);
    hand_over(&handover, &mut rig, &mut drivers);
    for driver in drivers {
        driver.guest.remove().expect("the VM can be removed");
    }
    let after = usage(&rig);
    assert_eq!((after.2, after.3, after.4), (before.2, before.3, before.4), "all their resources are free: {after:?}");
}

#[test]
fn card_after_failed_hand_over_continues_unchanged() {
    let handover = handover(64);
    let mut rig = handover.rig();
    let mut drivers = vec![driver(&rig, 0, &free_settings(16)), driver(&rig, 1, &free_settings(16))];
    for round in 0..5 {
        for (vm, driver) in (0..).zip(&mut drivers) {
            let mut channel = driver.channel(3);
            driver.buffer(&channel, A, PAGES, 50 + vm);
            let to = driver.buffer(&channel, B, PAGES, 7);
            move_all(&rig, vm, To::Host);
            copy(driver, &mut channel, round);
            handover.offer(&rig, &mut [&mut driver.guest], |_| ()).expect_err("a VM is missing");
            driver.wait(&channel);
            assert!(driver.vram_holds(to, PAGES, 50 + vm));
            driver.unbind(&channel);
            driver.submit_runlist();
        }
        handover.offer(&rig, &mut guests(&mut drivers), |_| ()).expect("the card can be taken over");
        for (part, bit) in [(3, 1), (5, 0x80), (50, 4)] {
            let cut = |file: &mut Vec<u8>| file.truncate(file.len() - file.len() / part);
            assert!(handover.offer(&rig, &mut guests(&mut drivers), cut).is_err());
            let edited = |file: &mut Vec<u8>| {
                let at = file.len() / part;
                file[at] ^= bit;
            };
            assert!(handover.offer(&rig, &mut guests(&mut drivers), edited).is_err());
        }
    }
    for (vm, driver) in drivers.iter_mut().enumerate() {
        work(driver, 10, &mut Rng::with_seed(vm as u64));
    }
    hand_over(&handover, &mut rig, &mut drivers);
    for (vm, driver) in drivers.iter_mut().enumerate() {
        work(driver, 10, &mut Rng::with_seed(vm as u64));
    }
}

/// Submits a kernel in which each of 256 threads stores `number` in its own word of the page at `found`.
fn kernel(driver: &mut Driver, channel: &mut Channel, number: u32, found: u64) {
    const CODE: u64 = 0x300_0000;
    let source = format!(
        ".kernel k\nS2R R0, SR_TID.X\nSHL R0, R0, 2\nMOV32I R1, {found:#x}\nIADD R0, R0, R1\nMOV32I R2, {number:#x}\n\
         ST [R0], R2\nEXIT\n"
    );
    let program = sm20::assemble(&source).expect("the source is valid");
    let code = driver.buffer(channel, CODE, 1, 0);
    driver.guest.vram_write(code, &program.bytes());
    let words = [
        object((1, 0x90c0)),
        methods(1, class::CODE_ADDRESS_HIGH, &[0, CODE as u32]),
        methods(1, class::PROGRAM_START, &[program.kernels[0].entry_offset]),
        methods(1, class::REGISTERS, &[16]),
        methods(1, class::SHARED_SIZE, &[0]),
        methods(1, class::BLOCK_YX, &[1 << 16 | 256, 1]),
        methods(1, class::GRID_YX, &[1 << 16 | 1, 1]),
        methods(1, class::LAUNCH, &[0]),
    ];
    driver.submit(channel, &words.concat());
}

#[test]
fn kernels_in_flight_of_several_vms_survive_hand_over() {
    const FOUND: u64 = 0x500_0000;
    let handover = handover(0);
    let mut rig = handover.rig();
    let mut drivers: Vec<Driver> = (0..3).map(|vm| driver(&rig, vm, &free_settings(16))).collect();
    let mut channels: Vec<Channel> = drivers.iter_mut().map(|it| it.channel(1)).collect();
    let pages: Vec<u64> = drivers.iter_mut().zip(&channels).map(|(it, of)| it.buffer(of, FOUND, 1, 0)).collect();
    for round in 0..5 {
        let number = |vm: usize| 0x1000 * (vm as u32 + 1) + round;
        for (vm, (driver, channel)) in drivers.iter_mut().zip(&mut channels).enumerate() {
            kernel(driver, channel, number(vm), FOUND);
        }
        hand_over(&handover, &mut rig, &mut drivers);
        for (vm, ((driver, channel), page)) in drivers.iter_mut().zip(&channels).zip(&pages).enumerate() {
            driver.wait(channel);
            let found: Vec<u32> = (0..256).map(|thread| driver.guest.peek(page + 4 * thread)).collect();
            assert_eq!(found, vec![number(vm); 256], "VM {vm} in round {round}");
        }
    }
    assert!(rig.host.lock().tenancy_counts().expect("PGRAPH is cleared").cleared > 0);
}

#[test]
fn settings_that_are_others_are_refused() {
    let handover = handover(64);
    let rig = handover.rig();
    let mut drivers = vec![driver(&rig, 0, &free_settings(16))];
    let mut refused = |edit: &dyn Fn(&mut Handover)| {
        let mut other = handover.clone();
        edit(&mut other);
        let offered = other.offer(&rig, &mut guests(&mut drivers), |_| ());
        offered.expect_err("the handover is rejected").to_string()
    };
    let said = refused(&|other| other.sharing.chunk_bytes = MIB);
    assert!(said.contains("chunks"), "{said}");
    let said = refused(&|other| other.config.vram_mib = 128);
    assert!(said.contains("handed over in a file of"), "{said}");
    refused(&|other| other.config.bar1_size = 64 << 20);
    refused(&|other| other.sharing.division.reserve = 4096);
}

#[test]
fn obstacle_to_hand_over_is_named() {
    let mut handover = handover(64);
    handover.sharing.shared = false;
    let rig = handover.rig();
    let said = rig.host.check_movable().expect_err("the handover is rejected").to_string();
    assert!(said.contains("host memory"), "{said}");
}
