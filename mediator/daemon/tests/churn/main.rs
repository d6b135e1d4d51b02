//! Adds and removes virtual machines at random on a real daemon's card, with 2 to 16 guests at a time, and checks for
//! leaks.
//!
//! Each guest is a thread without a VMM: a client of the daemon's sockets with a small driver.
//! `GPU_MEDIATOR_CHURN_SEED` is the random seed. Each number of guests runs for `GPU_MEDIATOR_CHURN_SECONDS` (5 by
//! default; minutes in manual runs). `GPU_MEDIATOR_CHURN_VMS` selects a single number of guests. Every byte of every
//! copy is verified.

mod guest;
#[path = "../../../../tests/src/holdings.rs"]
mod holdings;
mod ledger;
#[path = "../support/mod.rs"]
mod support;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use guest::{Guest, Tally};
use holdings::setting;
use ledger::{Ledger, audit};
use mediatorctl::client::Client;
use rustix::process::Signal;
use support::{Place, Running, WAIT_TIMEOUT};

/// VRAM size of each guest in MiB; the minimum for a VM.
const VM_MIB: u64 = 16;
/// Maximum number of channels per guest. All guests together use fewer channels than the card has.
const MAX_CHANNELS_PER_VM: u32 = 5;
/// Numbers of concurrent guests to test.
const CROWDS: [usize; 4] = [2, 4, 8, 16];
/// VRAM size of the card in MiB, sufficient for all guests and their shadow tables.
const CARD_MIB: u64 = 352;
const RESERVE_MIB: u64 = 64;
/// glibc tunables that return the memory and stacks of exited threads immediately, because cached memory would look
/// like a leak.
const TUNABLES: &str = "glibc.pthread.stack_cache_size=0:glibc.malloc.arena_max=1:\
                        glibc.malloc.mmap_threshold=65536:glibc.malloc.trim_threshold=65536";

/// State shared by all guests.
struct Crowd<'a> {
    place: &'a Place,
    size: usize,
    end: Instant,
    /// Set once all guests have run concurrently.
    met: AtomicBool,
    /// Set when a guest has failed, so that the others stop.
    failed: AtomicBool,
}

impl Crowd<'_> {
    fn is_over(&self) -> bool {
        self.failed.load(Ordering::Relaxed) || Instant::now() >= self.end
    }

    /// Waits until all guests are running, so that all of them run concurrently at least once.
    fn meet(&self) {
        let all = || self.met.load(Ordering::Relaxed) || self.failed.load(Ordering::Relaxed);
        until("all guests to be running", || all().then_some(()));
    }
}

/// Sets the flag if it is dropped by a panicking thread.
struct Alarm<'a>(&'a AtomicBool);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

/// Waits until `condition` returns a value. Panics after a time limit.
fn until<T>(what: &str, condition: impl FnMut() -> Option<T>) -> T {
    until_told(|| what.to_owned(), condition)
}

/// Like [`until`], but adds the description from `tell` to the panic message.
fn until_told<T>(tell: impl Fn() -> String, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "timed out after {} s waiting for {}", WAIT_TIMEOUT.as_secs(), tell());
        thread::sleep(Duration::from_millis(5));
    }
}

/// Runs `size` guests until the time is up. Returns the counts of their actions.
fn run(place: &Place, size: usize, time: Duration, seed: u64) -> Tally {
    let (met, failed) = (AtomicBool::new(false), AtomicBool::new(false));
    let crowd = Crowd { place, size, end: Instant::now() + time, met, failed };
    let total = Mutex::new(Tally::default());
    let finished = AtomicUsize::new(0);
    thread::scope(|scope| {
        for number in 0..size {
            let (crowd, total, finished) = (&crowd, &total, &finished);
            scope.spawn(move || {
                let _alarm = Alarm(&crowd.failed);
                let mut guest = Guest::new(crowd, number, seed);
                while guest.live() {}
                total.lock().unwrap().add(&guest.tally);
                finished.fetch_add(1, Ordering::Relaxed);
            });
        }
        watch(&crowd, || finished.load(Ordering::Relaxed) >= size);
    });
    total.into_inner().unwrap()
}

/// Polls the daemon's status as an operator would while guests are added and removed. Sets the flag `met` once all
/// guests run at the same time.
fn watch(crowd: &Crowd<'_>, over: impl Fn() -> bool) {
    let _alarm = Alarm(&crowd.failed);
    let size = crowd.size;
    let admin = Client::new(crowd.place.path("admin.sock")).unwrap();
    while !over() && !crowd.failed.load(Ordering::Relaxed) {
        let card: api::Card = admin.get("/v1/cards/card0").unwrap();
        assert!(card.channels_used <= size as u32 * MAX_CHANNELS_PER_VM, "{card:?}");
        assert!(card.vms.len() <= size, "{card:?}");
        let list: api::VmList = admin.get("/v1/vms").unwrap();
        let failed =
            list.vms.iter().find(|vm| vm.state == api::VmState::Failed || vm.channels_used > MAX_CHANNELS_PER_VM);
        assert_eq!(failed, None);
        let works = |vm: &&api::Vm| vm.state == api::VmState::Connected && vm.channels_used > 0;
        if list.vms.iter().filter(works).count() == size {
            crowd.met.store(true, Ordering::Relaxed);
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Checks that the daemon's log contains no errors, because guests must not be able to cause them.
fn check_log(place: &Place) {
    let log = std::fs::read_to_string(place.path("log")).unwrap();
    let bad: Vec<_> = log.lines().filter(|line| line.contains(" ERROR ") || line.contains("panicked")).collect();
    assert!(bad.is_empty(), "the daemon logged errors:\n{}", bad.join("\n"));
}

fn ledger(place: &Place, running: &Running) -> Ledger {
    Ledger::read(place, running.child.id())
}

/// Returns the current resources, and their differences from `before`. Retries for up to [`WAIT_TIMEOUT`], because
/// threads exit and connections close asynchronously.
fn compared(before: &Ledger, look: impl Fn() -> Ledger) -> (Ledger, Vec<String>) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    loop {
        let after = look();
        let lost = before.lost(&after);
        if lost.is_empty() || Instant::now() >= deadline {
            return (after, lost);
        }
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn vms_that_come_and_go_at_random_leave_nothing() {
    let time = Duration::from_secs(setting("GPU_MEDIATOR_CHURN_SECONDS", 5));
    let seed = setting("GPU_MEDIATOR_CHURN_SEED", 1);
    let card = format!("vram_mib = {CARD_MIB}\nreserve_mib = {RESERVE_MIB}\n");
    let place = Place::new(&format!("[[card]]\nname = \"card0\"\nkind = \"simgpu\"\n{card}"));
    let running = place.start(place.daemon().env("GLIBC_TUNABLES", TUNABLES));

    // Warm up, so that all objects that are created only once exist.
    println!("warm-up: {}", run(&place, 16, time, seed));
    audit(&place);
    // Wait for the connections above to close. Otherwise, resources freed later would hide a leak.
    thread::sleep(Duration::from_millis(500));
    let before = ledger(&place, &running);
    println!("initially: {before}");

    let only = setting("GPU_MEDIATOR_CHURN_VMS", 0);
    let chosen = [usize::try_from(only).unwrap()];
    for size in if only == 0 { CROWDS.iter() } else { chosen.iter() }.copied() {
        println!("{size} VMs: {}", run(&place, size, time, seed + size as u64));
        check_log(&place);
        audit(&place);
        let (after, lost) = compared(&before, || ledger(&place, &running));
        println!("after {size} VMs: {after}");
        assert!(lost.is_empty(), "leaked by {size} VMs:\n{}", lost.join("\n"));
    }
    check_log(&place);
    running.end(Signal::TERM);
}
