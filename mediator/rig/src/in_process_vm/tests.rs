//! Tests kernels whose memory is scarce, or is moved while they run. Results are compared byte by byte.

use card_manager::Chaos;
use workloads::{Options, by_name};

use super::*;

/// Runs `name` concurrently in two guests, each with 64 MiB of VRAM. Returns the number of moved chunks.
fn two(config: &CardConfig, name: &str, options: Options) -> u32 {
    let rig = config.open().expect("a card");
    let gpus = [0, 1].map(|vm| gpu(&rig, vm, 64, Limits::default()).expect("a guest"));
    std::thread::scope(|scope| {
        let run = |mut gpu: LightGpu, seed| {
            let workload = by_name(name, Options { seed, ..options }).expect("a workload");
            let report = workloads::run(&*workload, &mut gpu).unwrap_or_else(|error| panic!("{name}: {error:#}"));
            assert!(report.verified > 0, "no output of {name} was verified");
        };
        let runs = gpus.into_iter().zip(1..).map(|(gpu, seed)| scope.spawn(move || run(gpu, seed)));
        runs.collect::<Vec<_>>().into_iter().for_each(|run| run.join().expect("a guest"));
    });
    let state = rig.host.lock();
    [0, 1].map(|vm| state.memory().moved(TenantId(vm)).map_or(0, |moved| moved.sum.moved)).iter().sum()
}

/// Returns a card of `card_mib` MiB on which copies and kernels take no time.
fn card(card_mib: u64, chunk_bytes: u64, chaos: Chaos) -> CardConfig {
    let mut division = Division { chaos, ..Division::default() };
    division.quanta.mode = vram::Mode::Off;
    CardConfig { chunk_bytes, division, ..CardConfig::new(card_mib, 192) }
}

#[test]
fn kernels_compute_the_same_while_their_data_is_relocated() {
    for (chunk_bytes, seed) in [(128 << 10, 1), (2 * MIB, 2)] {
        let config = card(64, chunk_bytes, Chaos { every: 1, seed });
        let round = || ["memory", "hotspot", "backprop"].map(|name| two(&config, name, Options::default()));
        // On a busy host, all runs of a round can finish before the thread that moves memory is scheduled.
        let moved = (0..50).any(|_| round().iter().sum::<u32>() > 0);
        assert!(moved, "no chunk of {chunk_bytes} bytes was moved");
    }
}

/// Runs a program in two guests on a card with `card_mib` MiB, whose bus is 25 times slower than its memory. Stops
/// after `runs` runs per guest, or when `enough` returns true for the number of quanta so far. Returns the number of
/// quanta.
fn turns_of_two(card_mib: u64, runs: u64, enough: impl Fn(u64) -> bool + Sync) -> u64 {
    let mut division = Division::default();
    division.quanta.window_ns = 200_000_000;
    let time = Some(timing(800 * MIB, 32 * MIB));
    let config = CardConfig { division, time, chunk_bytes: 512 << 10, ..CardConfig::new(card_mib, 128) };
    let rig = config.open().expect("a card");
    let gpus = [0, 1].map(|vm| gpu(&rig, vm, 64, Limits::default()).expect("a guest"));
    let turns = || rig.host.lock().memory().divider().residency().begun();
    std::thread::scope(|scope| {
        let run = |mut gpu: LightGpu, seed| {
            for run in 0..runs {
                if enough(turns()) {
                    break;
                }
                let options = Options { scale: 40, seed: runs * seed + run, ..Options::default() };
                let workload = by_name("srad", options).expect("a workload");
                let report = workloads::run(&*workload, &mut gpu).unwrap_or_else(|error| panic!("{error:#}"));
                assert!(report.verified > 0, "no output was verified");
            }
        };
        let runs = gpus.into_iter().zip(1..).map(|(gpu, seed)| scope.spawn(move || run(gpu, seed)));
        runs.collect::<Vec<_>>().into_iter().for_each(|run| run.join().expect("a guest"));
    });
    turns()
}

#[test]
fn a_working_set_of_four_times_the_card_is_right() {
    let options = Options { working_set: Some(16 * MIB), rounds: Some(2), ..Options::default() };
    two(&card(8, 2 * MIB, Chaos::default()), "memory", options);
}

/// Tests the smallest card that can run the workloads. While the second guest runs its first kernels, memory returns to
/// the card. Meanwhile, the kernels' channel is loaded on an engine but not on a PBDMA, and its context must not be
/// saved to the memory's old location.
#[test]
fn a_card_of_one_mebibyte_is_enough_for_two_guests() {
    for _ in 0..12 {
        two(&card(1, 128 << 10, Chaos::default()), "lud", Options::default());
    }
    two(&card(1, 128 << 10, Chaos::default()), "memory", Options::default());
}

#[test]
fn job_that_runs_again_takes_no_more_vram() {
    let rig = card(64, 2 * MIB, Chaos::default()).open().expect("a card");
    let mut gpu = gpu(&rig, 0, 64, Limits::default()).expect("a guest");
    let mut run = |seed| {
        let workload = by_name("madd", Options { seed, ..Options::default() }).expect("a workload");
        workloads::run(&*workload, &mut gpu).expect("a run");
        // Each run loads its own code.
        gpu.backend().peak_vram_bytes()
    };
    let (first, last) = (run(1), (2..9).map(&mut run).last().expect("a run"));
    assert!((1..64 * MIB).contains(&first) && last < first + 8 * (16 << 10), "{first} {last}");
}

/// A probe compares the durations of submissions. A busy host can hide the difference, so the default run skips this
/// test.
mod full {
    use super::*;

    #[test]
    fn pointer_kernels_get_quanta_only_when_guests_do_not_fit() {
        // A probe gives each guest one turn. More turns follow only if they increase throughput. A probe can fail
        // because the guests' work changed in the meantime. The next probe would begin only after this run, so the test
        // retries on another card.
        let found = (0..3).any(|_| turns_of_two(11, 30, |turns| turns > 3) > 3);
        assert!(found, "alternating turns are not kept without access counters");
        assert_eq!(turns_of_two(64, 12, |turns| turns > 0), 0, "both fit");
    }
}
