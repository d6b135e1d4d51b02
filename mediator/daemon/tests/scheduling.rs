//! Changes the shares of a card's time while VMs run, and checks that no queued or running work is lost. The operator's
//! tools for shares run as processes.

mod support;

use std::fs;
use std::process::Output;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use config::VmSpec;
use mediatorctl::client::Client;
use nvspec::instance::context;
use rig::driver::{CE0, Channel, Driver, M2MF, PAGE, ce_copy, m2mf_copy, object};
use rig::{Machine, RemoteGuest};
use rustix::process::Signal;
use sched::{Engine, PolicyKind};
use support::Place;

/// Card with slow copies, so that a long queue builds up.
const CARD: &str = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 192\ntime = { copy_mib_per_s = 20 }\n";
/// VRAM size of each VM, in MiB.
const VM_MIB: u64 = 16;
const WEIGHTS: [u32; 3] = [100, 200, 400];
/// Number of submissions that a guest has in flight.
const SUBMISSIONS_IN_FLIGHT: u64 = 6;
/// Virtual address of the source buffer.
const FROM: u64 = 0x100_0000;
const TO: u64 = 0x200_0000;
/// Timeout of a wait.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

fn name(index: usize) -> String {
    format!("vm{index}")
}

/// A guest with one channel for PGRAPH and one for a copy engine.
struct Worker {
    driver: Driver<RemoteGuest>,
    channels: [Channel; 2],
    /// Virtual addresses of the copy targets.
    targets: [u64; 2],
}

impl Worker {
    fn new(place: &Place, vm: &str) -> Self {
        let guest = RemoteGuest::connect(&place.path(&format!("{vm}.sock")), VM_MIB << 20).unwrap();
        let mut driver = Driver::new(guest);
        let graph = driver.channel(1);
        let copy = driver.prepare(2);
        // The channel has no context for other engines, so its work is attributed to the copy engine.
        for pointer in [context::GR, context::CE1] {
            driver.guest.poke(copy.instance + pointer, 0);
        }
        driver.bind(&copy);
        driver.list(&[1, 2]);
        let channels = [graph, copy];
        let targets = channels.map(|channel| {
            driver.buffer(&channel, FROM, 1, u32::from(channel.id));
            driver.buffer(&channel, TO, 1, 99)
        });
        Self { driver, channels, targets }
    }

    /// Submits copies to both engines, waits for them, and verifies the results.
    fn work(&mut self) {
        let Self { driver, channels: [graph, copy], targets } = self;
        for _ in 0..SUBMISSIONS_IN_FLIGHT {
            driver.submit(graph, &[object(M2MF), m2mf_copy(FROM, TO, PAGE as u32)].concat());
            driver.submit(copy, &[object(CE0), ce_copy(FROM, TO, 1)].concat());
        }
        for (channel, target) in [(graph, targets[0]), (copy, targets[1])] {
            driver.wait(channel);
            assert!(driver.vram_holds(target, 1, u32::from(channel.id)), "channel {}", channel.id);
        }
        assert_eq!(driver.faults, []);
    }
}

fn good(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Sets the flag when dropped, even if the thread panics.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Calls `act` while each worker runs on its own thread. The flag is set when a worker fails, or when `act` returns.
fn while_at_work(workers: &mut [Worker], act: impl FnOnce(&AtomicBool)) {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for worker in workers {
            let over = &over;
            scope.spawn(move || {
                let _end = End(over);
                while !over.load(Ordering::Relaxed) {
                    worker.work();
                }
            });
        }
        let _end = End(&over);
        act(&over);
    });
}

/// Returns the status of the card's scheduler after all work has completed. A guest sees its fence earlier, because the
/// fence is written before the daemon receives its interrupt.
fn when_idle(admin: &Client) -> api::CardScheduler {
    let began = Instant::now();
    loop {
        let shown: api::CardScheduler = admin.get("/v1/cards/card0/scheduler").unwrap();
        if (shown.queued, shown.in_flight) == (0, 0) {
            return shown;
        }
        assert!(began.elapsed() < WAIT_TIMEOUT, "completed work is still accounted as running: {shown:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn nothing_is_lost_when_policies_and_shares_change_under_load() {
    let place = Place::new(CARD);
    let running = place.start(&mut place.daemon());
    let admin = Client::new(place.path("admin.sock")).unwrap();
    for (index, weight) in WEIGHTS.iter().enumerate() {
        // A busy host must not make a submission appear hung.
        let spec = VmSpec { hang_limit_ms: Some(600_000), ..VmSpec::new(&name(index), "card0", VM_MIB) };
        let _: api::Vm = admin.post("/v1/vms", &spec).unwrap();
        good(place.ctl(&["sched", "set-vm", &name(index), "--weight", &weight.to_string()]));
    }
    let mut workers: Vec<_> = (0..WEIGHTS.len()).map(|index| Worker::new(&place, &name(index))).collect();
    let mut busiest = 0;
    while_at_work(&mut workers, |over| {
        for round in 0..4 {
            for policy in PolicyKind::ALL {
                let queues = if round % 2 == 0 { "single" } else { "separate" };
                let set = ["sched", "set", "card0", "--policy", policy.name(), "--queues", queues];
                let shown = good(place.ctl(&[&["--json"], &set[..]].concat()));
                let shown: api::CardScheduler = serde_json::from_str(&shown).unwrap();
                assert_eq!(shown.settings.policy, policy);
                busiest = busiest.max(shown.queued + shown.in_flight);
                let weight = (100 + round * 50).to_string();
                good(place.ctl(&["sched", "set-vm", &name(round % 3), "--weight", &weight, "--cap", "80"]));
                assert!(!over.load(Ordering::Relaxed), "a guest has failed");
            }
        }
    });
    assert!(busiest > 0, "no work was in flight when the settings changed");

    let shown = when_idle(&admin);
    for vm in &shown.vms {
        for engine in [Engine::Compute, Engine::Copy0] {
            let used = &vm.engines[&engine];
            assert!(used.arrived > 0, "{vm:?}");
            assert_eq!((used.completed, used.dropped, used.killed), (used.arrived, 0, 0), "{vm:?}");
        }
    }
    for (engine, used) in &shown.engines {
        let charged: u64 = shown.vms.iter().map(|vm| vm.engines[engine].used_ns).sum();
        assert_eq!((used.busy_ns, used.departed_ns), (charged, 0), "{engine:?}");
    }
    running.end(Signal::TERM);
}

#[test]
fn a_record_of_a_run_is_replayed_to_the_same_decisions() {
    let place = Place::new(&format!("{CARD}memory.host_mib = 64\n"));
    let running = place.start(&mut place.daemon());
    let admin = Client::new(place.path("admin.sock")).unwrap();
    let file = place.path("run.jsonl");
    let path = file.display().to_string();
    let record = |time: &str| place.ctl(&["sched", "record", "card0", "--for", time, "--out", &path]);
    assert_eq!(record("1s").status.code(), Some(4), "a card without users cannot be recorded");
    for index in 0..WEIGHTS.len() {
        let spec = VmSpec { hang_limit_ms: Some(600_000), ..VmSpec::new(&name(index), "card0", VM_MIB) };
        let _: api::Vm = admin.post("/v1/vms", &spec).unwrap();
    }
    let mut workers: Vec<_> = (0..WEIGHTS.len()).map(|index| Worker::new(&place, &name(index))).collect();
    while_at_work(&mut workers, |_| {
        let timeline = place.path("run.json").display().to_string();
        let traced = ["sched", "record", "card0", "--for", "3s", "--format", "perfetto", "--out", &timeline];
        thread::scope(|scope| {
            let recorded = scope.spawn(|| record("2s"));
            thread::sleep(Duration::from_millis(500));
            assert_eq!(record("1s").status.code(), Some(4), "while another recording is running");
            // The recording contains both changes.
            good(place.ctl(&["sched", "set-vm", "vm1", "--weight", "300"]));
            good(place.ctl(&["sched", "set", "card0", "--policy", "credit"]));
            let told = good(recorded.join().unwrap());
            assert!(told.contains("events of card0's scheduler in "), "{told}");
            // Convert another recording to a Perfetto trace. During this recording, all VMs submit work, one after the
            // other.
            let recorded = scope.spawn(|| good(place.ctl(&traced)));
            thread::sleep(Duration::from_millis(200));
            good(place.ctl(&["memory", "evict", "vm0"]));
            recorded.join().unwrap();
            let trace: serde_json::Value = serde_json::from_str(&fs::read_to_string(&timeline).unwrap()).unwrap();
            let events = trace["traceEvents"].as_array().unwrap();
            for index in 0..WEIGHTS.len() {
                let is_named = |event: &&serde_json::Value| event["args"]["name"] == name(index).as_str();
                let vm = events.iter().find(is_named).map(|event| event["pid"].clone()).unwrap();
                let runs = events.iter().filter(|event| event["pid"] == vm && event["name"] == "runs");
                assert!(runs.clone().count() > 2, "{}: {events:?}", name(index));
                assert!(runs.clone().all(|event| event["ts"].as_f64().is_some_and(|ts| (0.0..60e6).contains(&ts))));
                // The trace shows the work by engine.
                for engine in ["compute", "copy0"] {
                    assert!(runs.clone().any(|event| event["cat"] == engine), "{}, {engine}: {events:?}", name(index));
                }
                let moved = events.iter().filter(|event| event["pid"] == vm && event["cat"] == "memory");
                let to_host = moved.clone().find(|event| event["name"] == "to host memory" && event["ph"] == "b");
                if index == 0 {
                    let mib = to_host.and_then(|event| event["args"]["MiB"].as_f64());
                    assert!(mib.is_some_and(|mib| mib >= 2.0), "{mib:?}: {events:?}");
                } else {
                    assert!(to_host.is_none(), "only the memory of VM 0 is moved: {to_host:?}");
                }
            }
        });
    });
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains("start") && text.contains("configured") && text.lines().count() > 50, "{text}");
    let told = good(place.ctl(&["sched", "replay", &path]));
    assert!(told.contains("all decisions match the recording") && told.contains("vm0"), "{told}");
    let told = good(place.ctl(&["--json", "sched", "replay", &path, "--policy", "fifo"]));
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    assert_eq!((&told["policy"], &told["recorded"]), (&"fifo".into(), &false.into()));
    let share = |engine: &str| -> f64 {
        let uses = told["uses"].as_array().unwrap().iter().filter(|one| one["engine"] == engine);
        uses.map(|one| one["share_percent"].as_f64().unwrap()).sum()
    };
    assert!((share("compute") - 100.0).abs() < 1e-6 && (share("copy0") - 100.0).abs() < 1e-6, "{told}");
    // Remove the decisions of one entry, which the replayed scheduler makes again.
    let (at, line) = text.lines().enumerate().skip(1).find(|(_, line)| line.contains("\"start\"")).unwrap();
    let cut = &line[..line.find(",\"decisions\"").unwrap()];
    fs::write(&file, text.replacen(line, &format!("{cut}}}"), 1)).unwrap();
    let failed = place.ctl(&["sched", "replay", &path]);
    let told = String::from_utf8_lossy(&failed.stderr);
    assert!(failed.status.code() == Some(1) && told.contains(&format!("first in line {}\n", at + 1)), "{told}");
    fs::write(&file, "{}\n").unwrap();
    assert_eq!(place.ctl(&["sched", "replay", &path]).status.code(), Some(2));
    running.end(Signal::TERM);
}

#[test]
fn tools_print_once_where_there_is_no_terminal() {
    let place = Place::new(&format!(
        "{CARD}[[vm]]\nname = \"vm0\"\ncard = \"card0\"\nvram_mib = 16\ntime = {{ weight = 7 }}\n"
    ));
    let running = place.start(&mut place.daemon());
    let mut worker = Worker::new(&place, "vm0");
    worker.work();
    let top = good(place.ctl(&["top"]));
    assert!(top.starts_with("card0: band; busy: compute "), "{top}");
    assert_eq!(
        top.lines().filter(|line| line.contains("vm0")).count(),
        4,
        "one line per engine, one for memory, and one for the VMM process: {top}"
    );
    let shown = good(place.ctl(&["sched", "show", "card0"]));
    assert!(shown.contains("band.period") && shown.contains("vm0"), "{shown}");
    let file = place.path("use.svg").display().to_string();
    for more in [&["--window", "100ms"][..], &["--stacked", "--engine", "copy0"]] {
        good(place.ctl(&[&["sched", "report", "card0", "--since", "10s", "--out", &file], more].concat()));
        let svg = fs::read_to_string(&file).unwrap();
        assert!(svg.starts_with("<svg ") && svg.contains("vm0: "), "{svg}");
    }
    let failed = place.ctl(&["sched", "release", "vm1"]);
    assert_eq!(failed.status.code(), Some(3));
    running.end(Signal::TERM);
}
