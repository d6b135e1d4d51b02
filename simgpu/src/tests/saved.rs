//! Tests halting, saving and restoring a card, including a handover of its memory.

use super::driver::{CE0, Channel, Driver, ce_copy, methods, object, release, small, words};
use crate::{ComputeTiming, Config, EngineTiming, NotQuiescent, SavedCard, SimGpu, TimeModel};
use card::{Card, InterruptMode};
use nvspec::regs::{pmc, ptimer};
use proptest::prelude::*;
use simgpu_memory::memory::Vram;
use std::sync::Arc;
use vmm_sys_util::eventfd::EventFd;

const A: u64 = 0x100_0000;
const B: u64 = 0x200_0000;
const SEMAPHORE: u64 = 0x300_0000;

fn config() -> Config {
    Config { shared: true, ..small() }
}

/// Returns a driver, a channel for copies between two buffers, and the VRAM addresses of the semaphore and of the
/// second buffer.
fn copier(config: &Config) -> (Driver, Channel, u64, u64) {
    let mut driver = Driver::new(config);
    let mut channel = driver.only_channel(1);
    driver.buffer(&channel, A, 16, 1);
    let to = driver.buffer(&channel, B, 16, 2);
    let semaphore = driver.buffer(&channel, SEMAPHORE, 1, 3);
    driver.push(&mut channel, &object(CE0));
    driver.run_until_idle();
    (driver, channel, semaphore, to)
}

fn copy(round: u32) -> Vec<u32> {
    let (from, to) = if round.is_multiple_of(2) { (A, B) } else { (B, A) };
    words(&[ce_copy(from, to, 16), release(SEMAPHORE, round), methods(4, 0x20, &[0])])
}

fn encoded(card: &SimGpu) -> Vec<u8> {
    postcard::to_allocvec(&card.save().expect("it is halted")).expect("it can be encoded")
}

/// Encodes the saved card, except for the time of the save.
fn at_any_time(card: &SimGpu) -> Vec<u8> {
    let mut saved = card.save().expect("it is halted");
    saved.clock.host = 0;
    postcard::to_allocvec(&saved).expect("it can be encoded")
}

fn memory(card: &SimGpu, config: &Config) -> Vram {
    let file = card.vram_file().expect("it is shared").try_clone().expect("a descriptor");
    Vram::of_file(file, u64::from(config.vram_mib) << 20).expect("the card's own")
}

/// Hands the card over, as if to another process.
fn handed_over(card: &SimGpu, config: &Config) -> SimGpu {
    let bytes = encoded(card);
    let saved: SavedCard = postcard::from_bytes(&bytes).expect("it was just encoded");
    let next = SimGpu::restored_for_test(config, saved, memory(card, config)).expect("it was just saved");
    assert!(at_any_time(&next) == at_any_time(card));
    next
}

#[test]
fn handed_over_card_continues_queued_work() {
    let config = config();
    let (mut driver, mut channel, semaphore, to) = copier(&config);
    for round in 1..40 {
        driver.push(&mut channel, &copy(round));
        if round % 3 == 0 {
            let put = driver.userd(&channel, nvspec::instance::userd::GP_PUT);
            driver.card.halt().expect("it rests");
            let next = handed_over(&driver.card, &config);
            driver.card = Arc::new(next);
            // The queued work is not lost: the restored card executes it.
            assert_eq!(driver.userd(&channel, nvspec::instance::userd::GP_PUT), put);
            driver.card.go_on();
        }
        driver.run_until_idle();
        assert_eq!(driver.peek(semaphore), round);
    }
    assert!(driver.holds(to, 16, 2), "the first copy ran before the handover");
    assert!(driver.card.counters().fifo.methods > 100, "counters continue");
}

#[test]
fn halted_card_does_nothing_until_resumed() {
    let (driver, mut channel, semaphore, _) = copier(&config());
    assert!(driver.card.save().is_none(), "it is not halted");
    driver.card.halt().expect("it rests");
    driver.push(&mut channel, &copy(1));
    driver.run_until_idle();
    assert_ne!(driver.peek(semaphore), 1);
    driver.card.go_on();
    driver.run_until_idle();
    assert_eq!(driver.peek(semaphore), 1);
}

#[test]
fn an_engine_at_work_is_not_interrupted() {
    let (driver, mut channel, semaphore, _) = copier(&config());
    let timing = EngineTiming { bytes_per_second: 1_000_000, launch_ns: 1000 };
    let compute = ComputeTiming::default();
    let time = TimeModel { graph: timing, compute, copy: timing, switch_ns: 0, bus_bytes_per_second: 0 };
    driver.card.set_time_model(Some(time));
    driver.push(&mut channel, &copy(1));
    driver.run_until_idle();
    assert_eq!(driver.card.halt(), Err(NotQuiescent::Working(Some(1))));
    driver.advance(1_000_000_000);
    driver.card.halt().expect("it rests");
    assert_eq!(driver.peek(semaphore), 1);
}

#[test]
fn an_engine_that_hangs_is_to_be_reset() {
    let fault = crate::Fault { engine: crate::EngineId::Copy0, kind: crate::FaultKind::Hang, after: 0, count: 1 };
    let (driver, mut channel, ..) = copier(&config());
    assert!(driver.card.inject(fault));
    driver.push(&mut channel, &copy(1));
    driver.run_until_idle();
    assert_eq!(driver.card.halt(), Err(NotQuiescent::Stopped(4)));
    driver.reset_engine(pmc::ENABLE::CE0.mask());
    driver.card.halt().expect("it rests");
}

#[test]
fn restored_card_continues_time_and_repeats_no_interrupt() {
    let card = SimGpu::new(&config()).expect("a card");
    card.write32(ptimer::TIME_1::OFFSET, 5);
    card.write32(pmc::INTR_EN_0::OFFSET, 1);
    card.write32(ptimer::INTR_EN::OFFSET, 1);
    card.write32(ptimer::ALARM_0::OFFSET, 0);
    card.halt().expect("it rests");
    let before = card.read32(ptimer::TIME_1::OFFSET);
    let saved = card.save().expect("it is halted");
    let next = SimGpu::restored(&config(), saved, memory(&card, &config())).expect("it was just saved");
    assert!(next.read32(ptimer::TIME_1::OFFSET) >= before);
    let event = EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK).expect("event");
    next.set_interrupt(InterruptMode::Msi, Some(event.try_clone().expect("clone")));
    assert!(event.read().is_err(), "nothing was pending");
}

#[test]
fn other_memory_is_refused() {
    let (driver, ..) = copier(&config());
    driver.card.halt().expect("it rests");
    let bytes = u64::from(config().vram_mib) << 20;
    let file = || driver.card.vram_file().expect("it is shared").try_clone().expect("a descriptor");
    assert!(Vram::of_file(file(), bytes * 2).is_err());
    assert!(file().set_len(0).is_err(), "the file cannot be truncated");
    // Create a file of the same size, but without the seals that prevent truncation.
    let other = rustix::fs::memfd_create("other", rustix::fs::MemfdFlags::ALLOW_SEALING).expect("a file");
    let other = std::fs::File::from(other);
    other.set_len(bytes).expect("a length");
    assert!(Vram::of_file(other, bytes).is_err());
    assert!(SimGpu::new(&small()).expect("a card").vram_file().is_none());
}

#[test]
fn zeros_take_no_memory() {
    let vram = Vram::shared(64 << 20).expect("memory");
    let blocks = || std::os::unix::fs::MetadataExt::blocks(&vram.file().expect("shared").metadata().expect("a file"));
    let at = nvspec::addr::VramAddr;
    vram.write(at(0x1800), &vec![7; 0x10_0000]).expect("inside");
    assert!(blocks() > 0);
    vram.write(at(0x1000), &vec![0; 0x10_1000]).expect("inside");
    assert_eq!(blocks(), 0);
    // Partially zeroed pages must not become holes.
    vram.write(at(0x2000), &[7; 0x3000]).expect("inside");
    vram.write(at(0x2800), &[0; 0x2000]).expect("inside");
    let mut held = [1; 0x3000];
    vram.read(at(0x2000), &mut held).expect("inside");
    assert!(held[..0x800].iter().chain(&held[0x2800..]).all(|byte| *byte == 7));
    assert!(held[0x800..0x2800].iter().all(|byte| *byte == 0));
}

#[test]
fn cards_that_cannot_be_are_refused() {
    let (driver, ..) = copier(&config());
    driver.card.halt().expect("it rests");
    let refused = |edit: &dyn Fn(&mut SavedCard)| {
        let mut saved = driver.card.save().expect("it is halted");
        edit(&mut saved);
        let error = SimGpu::restored_for_test(&config(), saved, memory(&driver.card, &config())).expect_err("restored");
        std::error::Error::source(&error).expect("a reason").to_string()
    };
    assert!(refused(&|saved| saved.vram_bytes *= 2).contains("a different card"));
    assert!(refused(&|saved| saved.storage.push((3, 1))).contains("outside of BAR0"));
    assert!(refused(&|saved| saved.storage.push((u32::MAX - 3, 1))).contains("outside of BAR0"));
    assert!(refused(&|saved| saved.fifo.order.push(2)).contains("runlist does not match"));
    assert!(refused(&|saved| saved.fifo.channels.truncate(9)).contains("channels or PBDMAs differs"));
    assert!(refused(&|saved| saved.fifo.pbdmas.truncate(1)).contains("channels or PBDMAs differs"));
    assert!(refused(&|saved| saved.falcons[0].words.truncate(1)).contains("memory is wrong"));
    assert!(refused(&|saved| saved.context_writes = vec![(0, 0); 5000]).contains("too many registers"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// Edits a saved card. The card must be either rejected or restored. A restored card may misbehave but must not
    /// panic.
    #[test]
    fn edited_bytes_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let (mut driver, mut channel, ..) = copier(&config());
        driver.push(&mut channel, &copy(1));
        driver.card.halt().expect("it rests");
        let mut bytes = encoded(&driver.card);
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let Ok((saved, _)) = postcard::take_from_bytes::<SavedCard>(&bytes) else { return Ok(()) };
        let vram = memory(&driver.card, &config());
        let Ok(card) = SimGpu::restored_for_test(&config(), saved, vram) else { return Ok(()) };
        driver.card = Arc::new(card);
        driver.card.go_on();
        let mut gpu = driver.card.gpu();
        for _ in 0..2000 {
            gpu.step();
            gpu.advance(1000);
        }
    }
}
