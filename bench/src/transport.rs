//! Measures the cost of a trapped access, in comparison with the same VM's access to an echo server on the same type of
//! socket, and the number of messages caused by loading nouveau.

use anyhow::{Context, Result};
use serde_json::json;
use tests::guest::{self, card_toml, vm_toml};
use tests::{Daemon, Vm, VmConfig};
use vmm_glue::echo::EchoDevice;
use vmm_glue::{IrqCounts, Link, Server, ServerOptions, SocketOptions, StopHandle};

use crate::report::{Metric, Target, median};

/// Number of measurements of each kind. The report contains the median.
const ROUNDS: usize = 7;
/// Number of reads per measurement.
const READS: u32 = 3_000;
const WRITES: u32 = 30_000;

/// An echo server in its own thread. It is stopped on drop.
struct Echo {
    stop: StopHandle,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Echo {
    fn start(path: &std::path::Path) -> Result<Self> {
        let stop = StopHandle::new()?;
        let link = Link::new(IrqCounts { intx: 1, ..IrqCounts::default() })?;
        let server = Server::bind(path, &SocketOptions::default(), ServerOptions::default())?;
        let handle = stop.clone();
        let thread = std::thread::spawn(move || {
            if let Err(error) = server.run(&link, &mut EchoDevice::new(16 << 20, 0x1b36, 0x0005), &handle) {
                eprintln!("bench: the echo server has exited: {error}");
            }
        });
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            // The thread has already reported its error.
            let _ = thread.join();
        }
    }
}

/// Runs the benchmark.
pub fn run() -> Result<Vec<Metric>> {
    let images = tests::images()?;
    let daemon = Daemon::start("bench", |paths| card_toml(paths, 512) + &vm_toml("bench", 256))?;
    let echo_socket = daemon.paths().folder.join("echo.sock");
    let sync_socket = daemon.paths().folder.join("sync.sock");
    let _echoes = [Echo::start(&echo_socket)?, Echo::start(&sync_socket)?];
    let mut config = VmConfig::new("bench", images, "6.12")?.with_gpu(daemon.vm_socket("bench"));
    for (id, socket, posted) in [("echo", &echo_socket, true), ("sync", &sync_socket, false)] {
        let device = json!({
            "driver": "vfio-user-pci", "id": id, "rombar": 0, "x-no-posted-writes": !posted,
            "socket": {"type": "unix", "path": socket},
            "addr": if posted { "10.0" } else { "11.0" },
        });
        config.extra_args.extend(["-device".to_owned(), device.to_string()]);
    }
    let vm = Vm::launch(&config)?;
    vm.wait_ready()?;
    let (echo, sync) = ("0000:00:10.0", "0000:00:11.0");

    // Interleave the measurements, so that changes in the host's speed affect all of them equally.
    let mut reads = [Vec::new(), Vec::new()];
    let mut writes = [Vec::new(), Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        eprintln!("bench: transport, round {} of {ROUNDS}", round + 1);
        reads[0].push(measure(&vm, "reads", READS, None)?);
        reads[1].push(measure(&vm, "reads", READS, Some(echo))?);
        writes[0].push(measure(&vm, "writes", WRITES, None)?);
        writes[1].push(measure(&vm, "writes", WRITES, Some(echo))?);
        writes[2].push(measure(&vm, "writes", READS, Some(sync))?);
    }
    let middle = |values: &[f64]| median(values).context("no measurement");
    let [read, read_echo] = [middle(&reads[0])?, middle(&reads[1])?];
    let [write, write_echo, write_sync] = [middle(&writes[0])?, middle(&writes[1])?, middle(&writes[2])?];
    let rate = |nanoseconds: f64| 1e9 / nanoseconds;

    let before = guest::show(&daemon, "bench")?["transport"].clone();
    guest::load_driver(&vm)?;
    let after = guest::show(&daemon, "bench")?["transport"].clone();
    let grown = |key: &str| (after[key].as_u64().unwrap_or(0) - before[key].as_u64().unwrap_or(0)) as f64;
    Ok(vec![
        Metric::ratio("transport.read32", read, "ns", read_echo, Target::AtMost(1.2)),
        Metric::ratio("transport.posted_write_rate", rate(write), "1/s", rate(write_sync), Target::AtLeast(3.0)),
        Metric::ratio("transport.posted_write_rate_vs_echo", rate(write), "1/s", rate(write_echo), Target::None),
        Metric::ratio("transport.echo_posted_write_rate", rate(write_echo), "1/s", rate(write_sync), Target::None),
        Metric::plain(
            "nouveau_load.messages",
            (guest::messages_in(&after) - guest::messages_in(&before)) as f64,
            "messages",
        ),
        Metric::plain("nouveau_load.region_writes", grown("region_writes"), "writes"),
        Metric::plain("nouveau_load.batched_writes", grown("batched_writes"), "writes"),
        Metric::plain("nouveau_load.region_reads", grown("region_reads"), "reads"),
    ])
}

/// Returns the mean duration of `count` accesses in nanoseconds, measured with the guest's clock.
fn measure(vm: &Vm, what: &str, count: u32, pci: Option<&str>) -> Result<f64> {
    let pci = pci.map(|address| format!(" --pci={address}")).unwrap_or_default();
    let output = vm.run_ok(&format!("run /bin/gpu-workloads bar bench {what} --count={count} --offset=0x1100{pci}"))?;
    let text = output.text();
    let value = text.split_whitespace().find_map(|word| word.strip_prefix("ns_per_op="));
    value.context("no ns_per_op")?.parse().with_context(|| format!("what gpu-workloads printed:\n{text}"))
}
