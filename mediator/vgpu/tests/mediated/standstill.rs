//! Tests a quiesced card whose guests keep running.

use super::oversubscribe::eventually;
use super::relocate::{driver_of, free_settings, rig_of, work_until};
use super::stuck::{hang, works};
use super::{MIB, driver, rig};
use card::Card;
use card_manager::overdue::Awaited;
use card_state::{RestoredCard, RestoredVm, SavedCard, SavedTenancy, SavedVm, Surroundings, VmSurroundings};
use devmodel::VGpuConfig;
use fastrand::Rng;
use nvspec::addr::VramAddr;
use nvspec::fifo::{VirtualChannelId, engine};
use nvspec::regs::pfifo;
use rig::Rig;
use rig::driver::{CE0, Driver, ce_copy, object};
use saved_state::{SavedState, Writer};
use shadow_pt::Limits;
use simgpu::EngineId;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;
use vram::TenantId;

const STANDSTILL_TIMEOUT: Duration = Duration::from_secs(20);

/// Returns true if all engines are idle.
fn is_idle(rig: &Rig) -> bool {
    (0..engine::COUNT).all(|unit| !pfifo::ENGINE_STATUS::BUSY.is_set(rig.card.read32(pfifo::ENGINE_STATUS::at(unit))))
}

#[test]
fn guests_lose_no_work_while_card_is_quiesced_repeatedly() {
    let rig = rig_of(2 * MIB, 96, 0);
    let drivers: Vec<Driver> = (0..3).map(|vm| driver_of(&rig, vm, 16)).collect();
    let (done, working) = (AtomicBool::new(false), AtomicU32::new(3));
    let mut stood = 0;
    std::thread::scope(|scope| {
        for (vm, mut driver) in (0u64..).zip(drivers) {
            let (done, working) = (&done, &working);
            scope.spawn(move || {
                let enough = |round| round >= 60 && done.load(Ordering::SeqCst);
                let worked =
                    catch_unwind(AssertUnwindSafe(|| work_until(&mut driver, enough, &mut Rng::with_seed(vm))));
                working.fetch_sub(1, Ordering::SeqCst);
                worked.unwrap_or_else(|error| resume_unwind(error));
            });
        }
        while stood < 50 && working.load(Ordering::SeqCst) == 3 {
            let still = rig.host.stand_still(STANDSTILL_TIMEOUT).expect("the card can be quiesced");
            assert!(is_idle(&rig));
            // No channel is on an engine, so the card itself can be saved.
            rig.card.halt().expect("the quiesced card can be halted");
            assert!(rig.card.save().is_some());
            rig.card.go_on();
            std::thread::sleep(Duration::from_millis(1));
            assert!(is_idle(&rig), "the card stays quiesced no matter which doorbells ring");
            drop(still);
            stood += 1;
            std::thread::sleep(Duration::from_millis(1));
        }
        done.store(true, Ordering::SeqCst);
    });
    assert_eq!(stood, 50);
}

#[test]
fn work_submitted_before_or_during_quiesce_completes_after_it() {
    for clear in [true, false] {
        does_nothing_until_it_goes_on(clear);
    }
}

/// Checks that work submitted while the card is quiesced runs only afterwards. If `clear` is true, the card clears
/// PGRAPH between VMs, and admits no VM to PGRAPH while it is quiesced.
fn does_nothing_until_it_goes_on(clear: bool) {
    let config = simgpu::Config { vram_mib: super::CARD_MIB, ..Default::default() };
    let rig = Rig::made(&config, &card_manager::Sharing { clear, ..rig::sharing() }, |card| card);
    let mut driver = driver(&rig, 0);
    let mut channel = driver.channel(1);
    let still = rig.host.stand_still(STANDSTILL_TIMEOUT).unwrap();
    driver.buffer(&channel, super::A, 1, 5);
    let to = driver.buffer(&channel, super::B, 1, 9);
    driver.submit(&mut channel, &[object(CE0), ce_copy(super::A, super::B, 1)].concat());
    std::thread::sleep(Duration::from_millis(1100));
    assert!(driver.vram_holds(to, 1, 9), "nothing runs");
    let usage = rig.host.lock().scheduler_usage(1);
    let waits = &usage.overdue[&TenantId(0)];
    assert!(waits.iter().any(|waits| waits.awaited == Awaited::Standstill), "{waits:?}");
    // A VM that is added now is also quiesced, without a further request.
    let mut late = super::driver(&rig, 1);
    let mut other = late.channel(1);
    late.buffer(&other, super::A, 1, 6);
    let there = late.buffer(&other, super::B, 1, 8);
    late.submit(&mut other, &[object(CE0), ce_copy(super::A, super::B, 1)].concat());
    std::thread::sleep(Duration::from_millis(20));
    assert!(late.vram_holds(there, 1, 8) && is_idle(&rig));
    drop(still);
    driver.wait(&channel);
    late.wait(&other);
    assert!(driver.vram_holds(to, 1, 5) && late.vram_holds(there, 1, 6));
}

#[test]
fn channel_that_misses_quiesce_limit_hangs_and_others_continue() {
    for engine in [EngineId::Copy0, EngineId::Graph] {
        let rig = rig();
        let (mut bad, mut good) = (driver(&rig, 0), driver(&rig, 1));
        let mut channel = good.channel(1);
        works(&mut good, &mut channel, 3);
        hang(&rig, &mut bad, engine);
        let still = rig.host.stand_still(Duration::from_millis(50)).expect("resetting the engine quiesces the card");
        assert!(is_idle(&rig));
        rig.card.halt().expect("the quiesced card can be halted");
        rig.card.go_on();
        drop(still);
        eventually("its guest is notified", || bad.guest.counter("hangs") == 1);
        let channel_of_card = rig.host.lock().channels().physical(TenantId(0), VirtualChannelId(1));
        assert_eq!(channel_of_card, None, "a second hang would delay the card again");
        works(&mut good, &mut channel, 4);
        // The guest can continue on another channel.
        let mut next = bad.channel(2);
        works(&mut bad, &mut next, 5);
    }
}

/// The rig's card as the target for restoring its own saved state.
struct Same<'a> {
    rig: &'a Rig,
    own: u32,
    origins: Vec<VGpuConfig>,
    /// Number of directories written.
    written: usize,
}

impl Surroundings for Same<'_> {
    fn layout(&self) -> channels::Layout {
        *self.rig.host.layout()
    }

    fn own(&self) -> (u32, u32) {
        (0, self.own)
    }

    fn now_ns(&self) -> u64 {
        self.rig.host.lock().card_time().0
    }

    fn vm(&self, vm: TenantId) -> Option<VmSurroundings> {
        let config = self.origins.get(vm.0 as usize)?.clone();
        let limits = Limits { table_bytes: 128 * MIB };
        Some(VmSurroundings { config, mode: free_settings(16).shadow, limits, table_bytes: 4 * MIB })
    }

    fn write(&mut self, _: VramAddr, _: &[u8]) {
        self.written += 1;
    }
}

fn file_of(saved: &SavedCard) -> Vec<u8> {
    let mut file = Writer::new([7; 16]);
    saved.write(&mut file).expect("the card can be saved");
    file.finish()
}

fn read(file: &[u8]) -> SavedCard {
    let mut sections = SavedState::parse(file, &SavedCard::known()).expect("the file can be parsed");
    let saved = SavedCard::read(&mut sections).expect("the file contains all parts");
    sections.finish().expect("the file contains nothing else");
    saved
}

/// Saves a quiesced card whose guests have work. One guest has freed a channel. The file must restore the same state.
#[test]
fn card_that_was_at_work_is_written_down_and_read_as_it_was() {
    // The file does not contain the state of PGRAPH clearing yet.
    let sharing = card_manager::Sharing { chunk_bytes: 2 * MIB, clear: false, ..rig::sharing() };
    let rig = Rig::made(&simgpu::Config { vram_mib: 96, ..Default::default() }, &sharing, |card| card);
    let own = rig.usage().0.mediator;
    let mut drivers: Vec<Driver> = (0..3).map(|vm| driver_of(&rig, vm, 16)).collect();
    for (vm, driver) in drivers.iter_mut().enumerate() {
        let mut channel = driver.channel(3);
        works(driver, &mut channel, vm as u32);
        if vm == 1 {
            driver.unbind(&channel);
        }
    }
    let mut channels: Vec<_> = drivers.iter_mut().map(|driver| driver.channel(1)).collect();
    let mut places = Vec::new();
    for (driver, channel) in drivers.iter_mut().zip(&mut channels) {
        driver.buffer(channel, super::A, 1, 5);
        places.push(driver.buffer(channel, super::B, 1, 9));
    }
    let still = rig.host.stand_still(STANDSTILL_TIMEOUT).unwrap();
    for (driver, channel) in drivers.iter_mut().zip(&mut channels) {
        driver.submit(channel, &[object(CE0), ce_copy(super::A, super::B, 1)].concat());
    }
    let vms: Vec<_> = drivers.iter().map(|driver| driver.guest.vm()).collect();
    let parts = || vms.iter().map(|vm| vm.save().map(|(saved, _)| saved)).collect();
    let saved = still.save(parts).expect("the quiesced card can be saved").card;
    let file = file_of(&saved);

    let mut same = Same { rig: &rig, own, origins: vms.iter().map(|vm| vm.origin()).collect(), written: 0 };
    let restored = read(&file).restore(&mut same).expect("the saved card is valid");
    assert!(same.written >= 3, "a directory of each VM");
    let RestoredCard { chunks, balancer, quanta, channels: bound, scheduler, pool, segments, vms: guests } = restored;
    assert_eq!(guests.len(), 3);
    let again = SavedCard {
        chunks: chunks.save(),
        balancer: balancer.save(),
        tenancy: SavedTenancy { scheduler: scheduler.save(), quanta: quanta.save() },
        channels: bound.save(),
        pool: pool.save(),
        segments: segments.into_iter().map(|(vm, pool)| (vm, pool.save())).collect(),
        vms: guests.into_iter().map(|(vm, guest)| of_guest(vm, &guest)).collect(),
    };
    let text = |value: &dyn std::fmt::Debug| format!("{value:?}");
    assert_eq!(again.chunks, saved.chunks);
    assert_eq!(again.channels, saved.channels);
    assert_eq!(text(&again.tenancy), text(&saved.tenancy));
    assert_eq!(text(&(again.balancer, again.pool)), text(&(saved.balancer, saved.pool)));
    for (again, saved) in again.vms.iter().zip(&saved.vms) {
        assert_eq!(text(&(again.vm, &again.gpu, &again.tables)), text(&(saved.vm, &saved.gpu, &saved.tables)));
        // Shadow tables are rebuilt on demand. Until then, their pages are free, including pages of old tables that
        // TLBs may have cached.
        let directories = |vm: &SavedVm| text(&vm.spaces).split("old").next().map(str::to_owned);
        assert_eq!(directories(again), directories(saved));
    }

    // The file of another card must be rejected.
    let mut other = Same { rig: &rig, own: own + 1, origins: same.origins, written: 0 };
    assert!(read(&file).restore(&mut other).is_err());
    drop(still);
    for ((driver, channel), to) in drivers.iter_mut().zip(&channels).zip(places) {
        driver.wait(channel);
        assert!(driver.vram_holds(to, 1, 5), "saving did not change the card");
    }
}

fn of_guest(vm: TenantId, guest: &RestoredVm) -> SavedVm {
    let RestoredVm { gpu, spaces, tables, pool } = guest;
    let tables = tables.as_ref().map(pv::Tables::save);
    SavedVm { vm, gpu: gpu.save(), spaces: spaces.save(), tables, pool: pool.save() }
}
