//! Tests whether a VM's kernels can find another VM's residue in registers and shared memory.

use super::schedule::acquire;
use super::{A, B};
use card_manager::Sharing;
use channels::Host;
use nvspec::class::compute90c0 as class;
use nvspec::fifo::VirtualChannelId;
use nvspec::instance::context;
use rig::driver::{CE0, CE1, Channel, Driver, M2MF, PAGE, ce_copy, m2mf_copy, methods, object};
use rig::{Rig, settings, sharing};
use sched::{Engine, TenantId};
use simgpu::{ComputeTiming, Config, EngineId, EngineTiming, Fault, FaultKind, TimeModel};
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const COMPUTE: (u32, u32) = (1, 0x90c0);
const CODE: u64 = 0x300_0000;
/// Address of the page for a kernel's result.
const FOUND: u64 = 0x500_0000;
/// Word left as residue. Immediate operands have only twenty bits.
const CANARY: u32 = 0x5a5a5;
/// Registers that are filled with the canary: all registers of a thread on a fully occupied multiprocessor, except
/// those that the kernels need.
const CANARY_REGISTERS: std::ops::Range<u32> = 8..32;

fn rig(clear: bool) -> Rig {
    let sharing = Sharing { clear, ..sharing() };
    Rig::made(&Config { vram_mib: 64, ..Config::default() }, &sharing, |card| card)
}

/// Duration of a one-page copy with PGRAPH, in ns.
const GRAPH_NS: u64 = 400_000;
/// Duration of a one-page copy with a copy engine, in ns.
const COPY_NS: u64 = 5_000_000;
/// Number of copies in each submission to a copy engine.
const COPIES: usize = 20;

/// Creates a card on which work takes simulated time.
fn timed(clear: bool) -> Rig {
    let timing = |launch_ns| EngineTiming { bytes_per_second: 0, launch_ns };
    let (graph, copy) = (timing(GRAPH_NS), timing(COPY_NS));
    let time = TimeModel { graph, compute: ComputeTiming::default(), copy, switch_ns: 0, bus_bytes_per_second: 0 };
    let sharing = Sharing { clear, ..sharing() };
    Rig::made(&Config { vram_mib: 64, time: Some(time), ..Config::default() }, &sharing, |card| card)
}

fn used(rig: &Rig, vm: u32, engine: Engine) -> u64 {
    let state = rig.host.lock();
    state.scheduler().account(TenantId(vm), engine).map_or(0, |account| account.used)
}

fn driver(rig: &Rig, vm: u32) -> Driver {
    let mut settings = settings(16, 8);
    settings.share.hang_limit = Some(Duration::from_millis(500));
    Driver::new(rig.guest_with(vm, &settings))
}

/// Returns a kernel that fills registers and shared memory.
fn leaves() -> String {
    let mut text = String::from(".kernel k\n.shared 0xc000\nS2R R0, SR_TID.X\nSHL R0, R0, 4\n");
    CANARY_REGISTERS.for_each(|register| writeln!(text, "MOV32I R{register}, {CANARY:#x}").unwrap());
    text + "STS.128 [R0], R8\nSTS.128 [R0+0x4000], R8\nSTS.128 [R0+0x8000], R8\nEXIT\n"
}

/// Returns a kernel that searches registers and shared memory for residue before it overwrites them.
fn looks() -> String {
    let mut text = String::from(".kernel k\n.shared 0xc000\nISETP.EQ.AND P0, PT, RZ, 1, PT\n");
    CANARY_REGISTERS.for_each(|register| writeln!(text, "ISETP.EQ.OR P0, PT, R{register}, {CANARY:#x}, P0").unwrap());
    writeln!(text, "MOV32I R0, {FOUND:#x}\nMOV32I R1, 1\n@P0 ST [R0], R1").unwrap();
    text.push_str("S2R R2, SR_TID.X\nSHL R2, R2, 4\nISETP.EQ.AND P0, PT, RZ, 1, PT\n");
    for at in (0..0xc000).step_by(0x4000) {
        writeln!(text, "LDS R3, [R2+{at:#x}]\nISETP.EQ.OR P0, PT, R3, {CANARY:#x}, P0").unwrap();
    }
    text + "@P0 ST [R0+4], R1\nEXIT\n"
}

/// Runs a kernel with the maximum number of threads on all multiprocessors, and waits for it to complete.
fn run(rig: &Rig, driver: &mut Driver, channel: &mut Channel, source: &str) {
    let program = sm20::assemble(source).expect("the source is valid");
    let code = driver.buffer(channel, CODE, 1, 0);
    driver.guest.vram_write(code, &program.bytes());
    let chip = rig.host.info().chip;
    let words = [
        object(COMPUTE),
        methods(1, class::CODE_ADDRESS_HIGH, &[0, CODE as u32]),
        methods(1, class::PROGRAM_START, &[program.kernels[0].entry_offset]),
        methods(1, class::REGISTERS, &[32]),
        methods(1, class::SHARED_SIZE, &[48 << 10]),
        methods(1, class::BLOCK_YX, &[1 << 16 | 1024, 1]),
        methods(1, class::GRID_YX, &[(1 << 16) | (chip.gpcs * chip.tpcs_per_gpc), 1]),
        methods(1, class::LAUNCH, &[0]),
    ];
    driver.submit(channel, &words.concat());
    driver.wait(channel);
}

/// Searches for another VM's residue. Returns two flags: true if residue was found in registers, and true if it was
/// found in shared memory.
fn found(rig: &Rig) -> [bool; 2] {
    let (mut one, mut other) = (driver(rig, 0), driver(rig, 1));
    let mut channel = one.channel(1);
    run(rig, &mut one, &mut channel, &leaves());
    found_by(rig, &mut other)
}

fn found_by(rig: &Rig, other: &mut Driver) -> [bool; 2] {
    let mut channel = other.channel(1);
    let page = other.vram(1);
    other.map(channel.space, FOUND, rig::driver::At::Vram(page), 1);
    other.guest.vram_write(page, &[0; PAGE as usize]);
    run(rig, other, &mut channel, &looks());
    [0, 4].map(|at| other.guest.peek(page + at) != 0)
}

fn cleared(rig: &Rig) -> u64 {
    rig.host.lock().tenancy_counts().expect("PGRAPH is cleared").cleared
}

#[test]
fn kernels_find_nothing_of_another_vms() {
    assert_eq!(found(&rig(false)), [true; 2], "the card keeps the data, so it is found unless the card clears it");
    let rig = rig(true);
    assert_eq!(found(&rig), [false; 2]);
    assert_eq!(cleared(&rig), 2, "PGRAPH is cleared for the first VM and between the two VMs");
}

#[test]
fn kernels_find_nothing_of_a_vm_that_had_their_number() {
    let rig = rig(true);
    let mut gone = driver(&rig, 0);
    let mut channel = gone.channel(1);
    run(&rig, &mut gone, &mut channel, &leaves());
    gone.guest.remove().expect("the VM can be removed");
    assert_eq!(found_by(&rig, &mut driver(&rig, 0)), [false; 2]);
}

#[test]
fn vm_that_has_the_card_alone_is_not_held_up() {
    let rig = rig(true);
    let (mut one, _other) = (driver(&rig, 0), driver(&rig, 1));
    let mut channel = one.channel(1);
    one.buffer(&channel, A, 1, 1);
    one.buffer(&channel, B, 1, 2);
    for _ in 0..50 {
        one.submit(&mut channel, &[object(M2MF), m2mf_copy(A, B, PAGE as u32)].concat());
        one.wait(&channel);
    }
    assert_eq!(cleared(&rig), 1);
}

#[test]
fn concurrent_vms_share_pgraph_and_complete_all_work() {
    let rig = rig(true);
    let drivers: Vec<Driver> = (0..3).map(|vm| driver(&rig, vm)).collect();
    std::thread::scope(|scope| {
        for mut driver in drivers {
            scope.spawn(move || {
                let mut channels = [driver.channel(1), driver.channel(2)];
                for channel in &channels {
                    driver.buffer(channel, A, 1, 1);
                }
                let to = channels.map(|channel| driver.buffer(&channel, B, 1, 2));
                for _ in 0..30 {
                    for channel in &mut channels {
                        driver.submit(channel, &[object(M2MF), m2mf_copy(A, B, PAGE as u32)].concat());
                    }
                    channels.iter().for_each(|channel| driver.wait(channel));
                }
                assert!(to.iter().all(|to| driver.vram_holds(*to, 1, 1)));
            });
        }
    });
    assert!(cleared(&rig) > 2);
}

#[test]
fn clearing_that_hangs_is_done_again_before_anybody_is_admitted() {
    let rig = rig(true);
    let (mut one, mut other) = (driver(&rig, 0), driver(&rig, 1));
    let mut channel = one.channel(1);
    run(&rig, &mut one, &mut channel, &leaves());
    assert!(rig.card.inject(Fault { engine: EngineId::Graph, kind: FaultKind::Hang, after: 0, count: 1 }));
    assert_eq!(found_by(&rig, &mut other), [false; 2]);
    let counts = rig.host.lock().tenancy_counts().expect("PGRAPH is cleared");
    assert_eq!(counts.cleared, 2);
    assert!(counts.failed >= 1);
}

#[test]
fn waiting_channel_off_pgraph_resumes_on_semaphore_release() {
    let rig = rig(true);
    let (mut waits, mut works) = (driver(&rig, 0), driver(&rig, 1));
    let (mut waiting, mut working) = (waits.channel(1), works.channel(1));
    let page = waits.buffer(&waiting, A, 1, 0);
    for payload in 1..4 {
        waits.guest.poke(page, 0);
        waits.submit(&mut waiting, &acquire(A, payload));
        for _ in 0..3 {
            works.submit(&mut working, &[]);
            works.wait(&working);
        }
        // The other VM is idle, so it cannot force the waiting VM back onto the engine.
        std::thread::sleep(Duration::from_millis(20));
        assert!(!waits.is_done(&waiting));
        waits.guest.poke(page, payload);
        waits.wait(&waiting);
    }
}

#[test]
fn waiting_channel_next_to_busy_vm_resumes_on_semaphore_release() {
    let rig = rig(true);
    let (mut waits, mut works) = (driver(&rig, 0), driver(&rig, 1));
    let (mut waiting, mut working) = (waits.channel(1), works.channel(1));
    let page = waits.buffer(&waiting, A, 1, 0);
    works.buffer(&working, A, 256, 1);
    works.buffer(&working, B, 256, 2);
    let done = AtomicBool::new(false);
    let copies = [object(M2MF), m2mf_copy(A, B, 256 * PAGE as u32)].concat();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Always keep several copies in progress.
            while !done.load(Ordering::SeqCst) {
                (0..8).for_each(|_| works.submit(&mut working, &copies));
                works.wait(&working);
            }
        });
        // The other thread must stop even after a panic.
        let waited = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for payload in 1..20 {
                waits.submit(&mut waiting, &acquire(A, payload));
                std::thread::sleep(Duration::from_millis(20));
                assert!(!waits.is_done(&waiting));
                waits.guest.poke(page, payload);
                waits.wait(&waiting);
            }
        }));
        done.store(true, Ordering::SeqCst);
        waited.unwrap_or_else(|error| std::panic::resume_unwind(error));
    });
}

/// Creates a driver whose hang limit exceeds all waits in these tests.
fn patient(rig: &Rig, vm: u32) -> Driver {
    let mut settings = settings(16, 8);
    settings.share.hang_limit = Some(Duration::from_secs(60));
    Driver::new(rig.guest_with(vm, &settings))
}

/// Creates a channel that has contexts only for copy engines.
fn channel_for_copies(driver: &mut Driver, id: u8) -> Channel {
    let channel = driver.prepare(id);
    driver.guest.poke(channel.instance + context::GR, 0);
    driver.bind(&channel);
    channel
}

/// A VM that is measured while another VM works. Only one of the measured VM's channels can use PGRAPH.
struct Pair {
    one: Driver,
    /// Channels of the measured VM.
    channels: [Channel; 2],
    neighbour: Driver,
    channel: Channel,
}

impl Pair {
    fn new(rig: &Rig) -> Self {
        let (mut one, mut neighbour) = (patient(rig, 0), patient(rig, 1));
        let channels = [channel_for_copies(&mut one, 1), one.prepare(2)];
        one.bind(&channels[1]);
        one.list(&[1, 2]);
        let channel = neighbour.channel(1);
        for (va, seed) in [(A, 1), (B, 2)] {
            channels.iter().for_each(|channel| _ = one.buffer(channel, va, 1, seed));
            neighbour.buffer(&channel, va, 1, seed);
        }
        Self { one, channels, neighbour, channel }
    }

    /// Submits `work` back to back `times` times on one of the measured VM's channels, while the neighbour continuously
    /// copies with PGRAPH. Returns the number of the neighbour's copies.
    fn run(&mut self, channel: usize, work: &[u32], times: usize) -> u64 {
        let Self { one, channels, neighbour, channel: own } = self;
        let other = &mut channels[channel];
        let copy = [object(M2MF), m2mf_copy(A, B, PAGE as u32)].concat();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let neighbour = scope.spawn(|| {
                let mut count = 0;
                while !done.load(Ordering::SeqCst) {
                    neighbour.submit(own, &copy);
                    neighbour.wait(own);
                    count += 1;
                }
                count
            });
            // The other thread must stop even after a panic.
            let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                for _ in 0..times {
                    one.submit(other, work);
                    while other.fences - one.guest.peek(other.fence) > 2 {
                        one.service();
                        std::thread::yield_now();
                    }
                }
                one.wait(other);
            }));
            done.store(true, Ordering::SeqCst);
            let count = neighbour.join().expect("the neighbour's work is done");
            worked.unwrap_or_else(|error| std::panic::resume_unwind(error));
            count
        })
    }

    /// Runs the two `works` alternately, each on its own channel, and counts the neighbour's copies during each.
    /// Returns the counts of the first round in which the second count is at least 96 % of the first, or else of the
    /// last round. A busy host may not run the neighbour in some rounds.
    fn compare(&mut self, works: [&[u32]; 2], times: usize) -> [u64; 2] {
        let mut counts = [0; 2];
        for _ in 0..12 {
            counts = [0, 1].map(|channel| self.run(channel, works[channel], times));
            if counts[1] * 100 >= counts[0] * 96 {
                break;
            }
        }
        counts
    }
}

/// Returns the methods for `count` copies with a copy engine, in one submission.
fn copies_of(count: usize) -> Vec<u32> {
    [object(CE0), ce_copy(A, B, 1).repeat(count)].concat()
}

fn copies() -> Vec<u32> {
    copies_of(COPIES)
}

/// Returns PGRAPH work that takes almost no time.
fn touch() -> Vec<u32> {
    [object(M2MF), methods(2, 0x100, &[0])].concat()
}

#[test]
fn copies_on_pgraph_channel_do_not_block_pgraph() {
    const TIMES: usize = 5;
    let rig = timed(true);
    let mut pair = Pair::new(&rig);
    let first = pair.run(0, &copies(), 1);
    let cleared_before = cleared(&rig);
    assert!(first > 0 && cleared_before <= 1, "only the neighbour uses PGRAPH");
    let [control, count] = pair.compare([&copies(); 2], TIMES);
    println!(
        "{count} copies of the neighbour next to copies on a channel with a PGRAPH context, {control} next to others"
    );
    assert_eq!(cleared(&rig), cleared_before, "no other VM uses PGRAPH");
    assert_eq!(used(&rig, 0, Engine::Compute), 0, "the VM is not charged for PGRAPH");
    assert!(count * 100 >= control * 96, "{count} copies of {control}");
    let took = COPIES as u64 * COPY_NS;
    // A busy host takes some time to start a submission that arrives at an idle engine.
    let charged = (0..8).map(|_| {
        let before = used(&rig, 0, Engine::Copy0);
        pair.run(1, &copies(), TIMES);
        (used(&rig, 0, Engine::Copy0) - before) / TIMES as u64
    });
    let charged = charged.inspect(|ns| println!("{ns} ns are charged for {took} ns of copies"));
    assert!(charged.into_iter().any(|ns| ns >= took && ns - took < took / 50), "copies are charged for their duration");
}

/// Returns the number of VM 0's submissions that have arrived for PGRAPH.
fn arrived_at_pgraph(rig: &Rig) -> u64 {
    let state = rig.host.lock();
    state.scheduler().account(TenantId(0), Engine::Compute).expect("the channel shares PGRAPH").arrived
}

/// Checks that a VM whose submissions use PGRAPH and a copy engine occupies PGRAPH only while it works there. Each time
/// the VM returns to PGRAPH within a submission, the neighbour must have used PGRAPH for a while.
#[test]
fn mixed_submission_leaves_pgraph_to_others_while_it_copies() {
    let rig = timed(true);
    let mut pair = Pair::new(&rig);
    let mixed = [touch(), copies()].concat();
    let alternating = [touch(), copies_of(1)].concat().repeat(COPIES);
    for work in [mixed, alternating] {
        let took = 3 * COPIES as u64 * COPY_NS;
        // A busy host may not run the neighbour in some rounds.
        let good = (0..8).any(|_| {
            let before = (cleared(&rig), used(&rig, 0, Engine::Copy0), arrived_at_pgraph(&rig));
            let count = pair.run(1, &work, 3);
            assert_eq!(arrived_at_pgraph(&rig) - before.2, 3, "each submission waits for a slice on PGRAPH");
            let (changes, charged) = (cleared(&rig) - before.0, used(&rig, 0, Engine::Copy0) - before.1);
            println!(
                "{count} copies of the neighbour, {changes} changes of the holder, {charged} ns charged for {took}"
            );
            assert!(changes >= 2, "the VM uses PGRAPH");
            count > 5 * changes
        });
        assert!(good, "the neighbour gets too little time on PGRAPH");
    }
}

/// Returns true if the card's instance block for one of VM 0's channels has a PGRAPH context.
fn reaches_pgraph(rig: &Rig, channel: u8) -> bool {
    let mut state = rig.host.lock();
    let (vram, channels) = state.parts();
    let physical = channels.physical(vram::TenantId(0), VirtualChannelId(channel)).expect("the channel is bound");
    let mut word = [0; 4];
    Host::vram_read(&mut vram.memory, channels.layout().instance(physical).offset(context::GR), &mut word);
    u32::from_le_bytes(word) & context::VALID != 0
}

/// Makes a copy engine hang in the submissions `works`, and checks that a neighbour can still use PGRAPH.
fn hangs(works: &[Vec<u32>]) {
    let rig = rig(true);
    let mut pair = Pair::new(&rig);
    let Pair { one, channels: [_, hung], neighbour, channel } = &mut pair;
    assert!(rig.card.inject(Fault { engine: EngineId::Copy0, kind: FaultKind::Hang, after: 0, count: 1 }));
    works.iter().for_each(|work| one.submit(hung, work));
    let copy = [object(M2MF), m2mf_copy(A, B, PAGE as u32)].concat();
    for _ in 0..20 {
        neighbour.submit(channel, &copy);
        neighbour.wait(channel);
        std::thread::sleep(Duration::from_millis(1));
    }
    // No work may be killed before the hang limit is reached.
    let killed = Engine::ALL.map(|engine| {
        let state = rig.host.lock();
        state.scheduler().account(TenantId(0), engine).map_or(0, |account| account.killed)
    });
    assert_eq!((killed, one.is_done(hung)), ([0; 3], false));
    assert!(!reaches_pgraph(&rig, hung.id), "its block has no PGRAPH context while another VM works there");
    // On a busy host, the scheduler may detect the end of the neighbour's last copy late.
    let deadline = Instant::now() + Duration::from_secs(10);
    while rig.host.lock().scheduler().is_busy(Engine::Compute) {
        assert!(Instant::now() < deadline, "the work counts for the copy engine");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn copy_engine_hang_leaves_pgraph_to_others() {
    hangs(&[copies()]);
}

#[test]
fn copy_engine_hang_with_pgraph_work_leaves_pgraph_to_others() {
    hangs(&[[touch(), copies()].concat()]);
    hangs(&[touch(), copies()]);
    hangs(&[copies(), touch()]);
}

#[test]
fn copies_changed_after_inspection_do_not_reach_pgraph() {
    let rig = timed(true);
    let mut pair = Pair::new(&rig);
    let Pair { one, channels: [_, channel], neighbour, channel: own } = &mut pair;
    let copy = [object(M2MF), m2mf_copy(A, B, PAGE as u32)].concat();
    neighbour.submit(own, &copy);
    neighbour.wait(own);
    let before = cleared(&rig);
    let target = one.buffer(channel, 0x600_0000, 1, 3);
    one.submit(channel, &copies());
    // While the first submission runs, overwrite words of the second one.
    let [_, push, _] = channel.memory();
    let mut words = copies_of(1);
    let bad = [object(M2MF), m2mf_copy(A, 0x600_0000, PAGE as u32)].concat();
    words.resize(words.len().max(bad.len()), 0);
    let fenced = copies().len() as u64 + 7;
    let at = (push..push + 0x4000).step_by(4).skip(fenced as usize - 2);
    one.submit(channel, &words);
    let mut at = at.filter(|at| one.guest.peek(*at) == words[0] && one.guest.peek(*at + 4) == words[1]);
    let at = at.next().expect("the second submission follows the first");
    for (word, offset) in bad.iter().zip((0..).step_by(4)) {
        one.guest.poke(at + offset, *word);
    }
    let fault = one.wait_or_fault(channel).expect("it has no PGRAPH context");
    assert_eq!(fault.instance, channel.instance);
    let struck =
        rig.host.lock().scheduler().account(TenantId(0), Engine::Compute).expect("the channel shares PGRAPH").killed;
    assert_eq!(struck, 1, "the work counts as an overrun");
    assert!(one.vram_holds(target, 1, 3), "PGRAPH has not copied anything for it");
    for _ in 0..5 {
        neighbour.submit(own, &copy);
        neighbour.wait(own);
    }
    assert_eq!((cleared(&rig), neighbour.guest.counter("faults")), (before, 0));
}

#[test]
fn alternating_copy_and_pgraph_work_completes_in_order() {
    const TARGET_AT: u64 = 0x600_0000;
    let rig = rig(true);
    let mut pair = Pair::new(&rig);
    let Pair { one, channels: [_, channel], neighbour, channel: own } = &mut pair;
    let copy = [object(M2MF), m2mf_copy(A, B, PAGE as u32)].concat();
    let targets = [0, 1].map(|index| one.buffer(channel, TARGET_AT + index * PAGE, 1, 9));
    for round in 0..20 {
        let seed = 20 + round;
        let from = one.buffer(channel, A, 1, seed);
        // Copy A to B with a copy engine, B to the target with PGRAPH, and the target to the next page with the other
        // copy engine.
        one.submit(channel, &[object(CE0), ce_copy(A, B, 1)].concat());
        one.submit(channel, &[object(M2MF), m2mf_copy(B, TARGET_AT, PAGE as u32)].concat());
        one.submit(channel, &[]);
        one.submit(channel, &[object(CE1), ce_copy(TARGET_AT, TARGET_AT + PAGE, 1)].concat());
        neighbour.submit(own, &copy);
        one.wait(channel);
        neighbour.wait(own);
        assert!([from, targets[0], targets[1]].iter().all(|at| one.vram_holds(*at, 1, seed)), "round {round}");
    }
    assert_eq!([&*one, &*neighbour].map(|driver| driver.guest.counter("faults")), [0; 2]);
}
