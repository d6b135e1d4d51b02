//! Tests that a VM gets no interrupts for completions that no VM awaits, or for completions of another VM's work.

use super::{A, B, COPY_NS, WAIT_TIMEOUT, copies, driver, nothing_in_flight, rig_of, time_of, used, worker};
use crate::CARD_MIB;
use card::Card as _;
use card_manager::Sharing;
use nvspec::addr::SMALL_PAGE;
use nvspec::fifo::engine;
use nvspec::regs::pfifo;
use rig::Rig;
use rig::altered::{Alter, Altered};
use rig::driver::{Channel, Driver, FENCE_VA, M2MF, m2mf_copy, methods, object, release};
use sched::{Config, Engine, TenantId, VgpuParams};
use simgpu::SimGpu;
use std::time::{Duration, Instant};

/// Number of copies per submission. The copies take long enough that a guest would wait for their completion.
const COPIES_PER_SUBMISSION: usize = 12;

/// Maximum delay from the scheduler's detection of a completion to the notification of its guest. Tests repeat rounds
/// in which the host was slower.
const MAX_NOTIFICATION_DELAY: Duration = Duration::from_millis(20);

/// Handles all pending interrupts of the guest.
fn drain(driver: &mut Driver) {
    driver.service();
    while driver.guest.take_msi() {
        driver.service();
    }
}

/// Submits copies without requesting a completion interrupt.
fn untold_copies(driver: &mut Driver, channel: &mut Channel) {
    let copy = m2mf_copy(A, B, SMALL_PAGE as u32);
    let put = driver.queue(channel, &[object(M2MF), copy.repeat(COPIES_PER_SUBMISSION)].concat());
    driver.ring(channel, put);
}

/// Returns the number of a VM's submissions whose completion the scheduler has noticed.
fn ended(rig: &Rig, vm: u32) -> u64 {
    let state = rig.host.lock();
    let accounts = Engine::ALL.iter().filter_map(|engine| state.scheduler().account(TenantId(vm), *engine));
    accounts.map(|account| account.completed).sum()
}

/// Waits until the scheduler has noticed the completion of `count` submissions of a VM.
fn wait_ended(rig: &Rig, vm: u32, count: u64) {
    let began = Instant::now();
    while ended(rig, vm) < count {
        assert!(began.elapsed() < WAIT_TIMEOUT, "completed work was not noticed");
        std::thread::yield_now();
    }
}

/// Submits a copy without requesting an interrupt, and waits until the scheduler has noticed its completion. Returns
/// true if an interrupt arrived anyway.
fn is_told(rig: &Rig, driver: &mut Driver, channel: &mut Channel) -> bool {
    drain(driver);
    channel.fences += 1;
    let fence = release(FENCE_VA, channel.fences);
    let put = driver.queue(channel, &[object(M2MF), m2mf_copy(A, B, SMALL_PAGE as u32), fence].concat());
    driver.ring(channel, put);
    nothing_in_flight(rig);
    assert!(driver.is_done(channel));
    driver.guest.take_msi()
}

#[test]
fn completion_without_waiter_raises_no_interrupt() {
    let rig = rig_of(Config::default(), COPY_NS / 20);
    let mut alone = driver(&rig, 0, VgpuParams::default());
    let mut channel = worker(&mut alone, 1);
    // After a few short submissions, the scheduler no longer expects long ones, unless the host is busy.
    let untold = (0..2000).any(|_| !is_told(&rig, &mut alone, &mut channel));
    assert!(untold, "each of 2,000 completions was reported");
    let charged = used(&rig, 0);
    // While another VM has work, all completions must be reported.
    let mut other = driver(&rig, 1, VgpuParams::default());
    let mut busy = worker(&mut other, 1);
    for _ in 0..3 {
        (0..20).for_each(|_| copies(&mut other, &mut busy, 50));
        channel.fences += 1;
        let fence = release(FENCE_VA, channel.fences);
        let put = alone.queue(&mut channel, &[object(M2MF), m2mf_copy(A, B, SMALL_PAGE as u32), fence].concat());
        alone.ring(&channel, put);
        alone.wait(&channel);
        other.wait(&busy);
    }
    assert!(used(&rig, 0) > charged);
}

/// Submits work, followed by a semaphore wait with `words` extra words. Returns true if the guest is notified of the
/// work's completion before the semaphore is released.
fn is_told_of_work(rig: &Rig, driver: &mut Driver, channel: &mut Channel, words: usize) -> bool {
    const SEMAPHORE: u64 = FENCE_VA + 0x20;
    const ACQUIRE_EQUAL: u32 = 1;
    drain(driver);
    let before = ended(rig, 0);
    driver.guest.poke(channel.fence + 0x20, 0);
    untold_copies(driver, channel);
    let acquire = methods(0, 0x10, &[(SEMAPHORE >> 32) as u32, SEMAPHORE as u32, 1, ACQUIRE_EQUAL]);
    let put = driver.queue(channel, &[acquire, methods(0, 0x8, &[0]).repeat(words / 2)].concat());
    driver.ring(channel, put);
    wait_ended(rig, 0, before + 1);
    std::thread::sleep(MAX_NOTIFICATION_DELAY);
    let told = driver.guest.take_msi();
    driver.guest.poke(channel.fence + 0x20, 1);
    wait_ended(rig, 0, before + 2);
    told
}

#[test]
fn one_interrupt_covers_work_and_its_fence() {
    let rig = rig_of(Config::default(), COPY_NS);
    let mut alone = driver(&rig, 0, VgpuParams::default());
    let mut channel = worker(&mut alone, 1);
    // On a busy host, the work may complete before the wait is queued.
    assert!((0..20).any(|_| !is_told_of_work(&rig, &mut alone, &mut channel, 0)), "each completion is reported");
    assert!(
        (0..20).any(|_| is_told_of_work(&rig, &mut alone, &mut channel, 20)),
        "no completion is reported for work that precedes other work"
    );
}

/// A card that, like hardware, starts submitted work before its host reads which channel is on an engine.
struct Prompt;

impl Alter for Prompt {
    fn read32(&self, card: &SimGpu, offset: u32) -> u32 {
        if offset == pfifo::ENGINE_STATUS::at(engine::GR) {
            std::thread::sleep(Duration::from_millis(1));
        }
        card.read32(offset)
    }
}

#[test]
fn vm_starting_at_end_of_other_work_gets_no_interrupt_for_it() {
    let config = simgpu::Config { vram_mib: CARD_MIB, time: Some(time_of(COPY_NS)), ..simgpu::Config::default() };
    // Do not clear PGRAPH between VMs, because this work would start before the second VM's.
    let sharing = Sharing { scheduler: Config::default(), clear: false, ..rig::sharing() };
    let rig = Rig::made(&config, &sharing, |card| Altered::over(card, Prompt));
    let mut vms = [0, 1].map(|vm| driver(&rig, vm, VgpuParams::default()));
    let mut channels = vms.each_mut().map(|vm| worker(vm, 1));
    let (mut told, mut untold) = (0, 0);
    for _ in 0..40 {
        nothing_in_flight(&rig);
        // Earlier completions are reported within this time.
        std::thread::sleep(MAX_NOTIFICATION_DELAY);
        vms.iter_mut().for_each(drain);
        let before = ended(&rig, 1);
        let first = ended(&rig, 0);
        for (vm, channel) in vms.iter_mut().zip(&mut channels) {
            untold_copies(vm, channel);
        }
        wait_ended(&rig, 0, first + 1);
        // Wait for the interrupt that reports the first VM's completion. One for the second VM would arrive at the same
        // time.
        vms[0].guest.wait_msi();
        let is_told = vms[1].guest.take_msi();
        // If the second VM's own work has ended, an interrupt may have reported that completion, so the round does not
        // count.
        if ended(&rig, 1) == before {
            *(if is_told { &mut told } else { &mut untold }) += 1;
        }
    }
    println!("told in {told} rounds, not told in {untold}");
    assert!(untold > told, "a VM is notified of another VM's completions: in {told} rounds, not in {untold}");
}
