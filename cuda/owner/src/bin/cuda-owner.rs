//! Owns a card without the daemon: serves tenants given on the command line, or measures the card. Prints results as
//! JSON.
//!
//! ```sh
//! cuda-owner serve --socket /run/cuda.sock --card-mib 40960 --tenant a:40960 --tenant b:40960:300 --seconds 60
//! cuda-owner measure --gib 20 --chunk-mib 16
//! ```

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use cuda_owner::core::{CardConfig, CardView, Core, OnStranger, OnStuck, ShareGroup, TenantSpec};
use cuda_owner::server::{MpsOptions, Rights, Server};
use owner_driver::{Driver, Real, measure, nvml_uuid};
use sched::LatencyClass;
use sched::groups::Sharing;
use serde::Deserialize;
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing_subscriber::EnvFilter;

#[derive(Debug, Parser)]
#[command(about = "Owns an NVIDIA card for CUDA tenants, without the daemon")]
struct Arguments {
    /// Path of NVIDIA's `libcuda.so.1`.
    #[arg(long, global = true, default_value = "libcuda.so.1")]
    driver: PathBuf,
    /// Index of the card.
    #[arg(long, global = true, default_value_t = 0)]
    device: u32,
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Serves tenants until the time limit or end of file on standard input. Prints their accounts at the end and for
    /// each input line. A line with a JSON object first changes a tenant's settings, for example `{"tenant": "a",
    /// "weight": 300}`; the other keys are `guarantee_permille`, `class` and `sharing`.
    Serve(Box<Serve>),
    /// Serves mediatord's requests from standard input.
    #[command(hide = true)]
    Work,
    /// Compares copies of chunks with NVIDIA's own checkpoint of a process.
    Measure(Measure),
    /// Holds an allocation until end of file on standard input. NVIDIA's checkpoint is measured on this process.
    Hold {
        /// Amount of memory to allocate, in GiB.
        #[arg(long)]
        gib: u64,
    },
}

#[derive(Debug, Args)]
struct Serve {
    /// Socket that programs connect to.
    #[arg(long)]
    socket: PathBuf,
    /// Card memory that tenants share, in MiB.
    #[arg(long)]
    card_mib: u64,
    /// Pinned host memory for chunks, in MiB. Defaults to `--card-mib`.
    #[arg(long)]
    host_mib: Option<u64>,
    /// Chunk size in MiB.
    #[arg(long, default_value_t = 16)]
    chunk_mib: u64,
    /// Host memory to pin in advance, in MiB.
    #[arg(long)]
    host_ready_mib: Option<u64>,
    /// A tenant's name, memory in MiB, weight, latency class and share group.
    #[arg(long = "tenant", value_name = "NAME:MIB[:WEIGHT[:CLASS[:GROUP]]]", required = true)]
    tenants: Vec<String>,
    /// Path of NVIDIA's `nvidia-cuda-mps-control`, for share groups.
    #[arg(long, requires = "mps_folder")]
    mps_control: Option<PathBuf>,
    /// Folder for the MPS servers of share groups.
    #[arg(long, requires = "mps_control")]
    mps_folder: Option<PathBuf>,
    /// Length of a slice in milliseconds.
    #[arg(long, default_value_t = 15)]
    slice_ms: u64,
    /// Mode of memory quanta, which are long turns for tenants whose memory does not fit on the card together: `auto`,
    /// `off` or `forced`.
    #[arg(long, default_value = "auto")]
    quanta: String,
    /// Minimum length of a memory quantum, in milliseconds.
    #[arg(long)]
    quantum_min_ms: Option<u64>,
    /// Maximum length of a memory quantum, in milliseconds.
    #[arg(long)]
    quantum_max_ms: Option<u64>,
    /// Limit on a tenant's work in flight while other tenants use the card, in microseconds.
    #[arg(long)]
    run_ahead_us: Option<u32>,
    /// Idle time after which a turn ends, in microseconds. Also the advance notice to the next tenant before the last
    /// work of an ending turn completes.
    #[arg(long)]
    idle_us: Option<u32>,
    /// Time limit for a program to reply to an order about its memory, in milliseconds.
    #[arg(long)]
    patience_ms: Option<u64>,
    /// Time limit for a tenant's work on the card while other tenants wait, in milliseconds.
    #[arg(long)]
    max_run_ms: Option<u64>,
    /// Suspends unresponsive programs through the driver, if possible, instead of killing them.
    #[arg(long)]
    suspend: bool,
    /// Memory in MiB that a process, and the whole card, may use beyond the accounts without being charged.
    #[arg(long)]
    margin_mib: Option<u64>,
    /// Kills processes that use the card without the owner, and processes whose unaccounted memory exceeds their
    /// tenant's limit.
    #[arg(long)]
    kill_strangers: bool,
    /// File where the owner records its processes for its successor.
    #[arg(long)]
    journal: Option<PathBuf>,
    /// Maximum time to serve, in seconds.
    #[arg(long, default_value_t = 3600)]
    seconds: u64,
}

#[derive(Debug, Args)]
struct Measure {
    /// Amount of memory to move, in GiB.
    #[arg(long, default_value_t = 20)]
    gib: u64,
    /// Chunk size in MiB.
    #[arg(long, default_value_t = 16)]
    chunk_mib: u64,
    /// Skips the measurement of NVIDIA's checkpoint.
    #[arg(long)]
    no_checkpoint: bool,
    /// Time limit for the checkpoint, in seconds.
    #[arg(long, default_value_t = 120)]
    patience_s: u64,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let filter = EnvFilter::try_from_env("MEDIATORD_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    if let What::Work = arguments.what {
        return Ok(cuda_owner::control::serve(std::io::stdin().lock(), std::io::stdout().lock())?);
    }
    let driver = Real::open(&arguments.driver, arguments.device)?;
    match arguments.what {
        What::Work => Ok(()),
        What::Serve(ref options) => serve(Arc::new(driver), &arguments.driver, options),
        What::Measure(ref options) => measure(&driver, &arguments, options),
        What::Hold { gib } => Ok(measure::hold(&driver, gib << 30).map_err(anyhow::Error::msg)?),
    }
}

fn tenant(text: &str) -> Result<TenantSpec> {
    let mut parts = text.split(':');
    let (name, mib) =
        (parts.next().unwrap_or_default(), parts.next().context("a tenant is NAME:MIB[:WEIGHT[:CLASS[:GROUP]]]")?);
    let mib: u64 = mib.parse().with_context(|| format!("`{mib}` is not a number of MiB"))?;
    let weight = parts.next().map_or(Ok(100), str::parse).with_context(|| format!("`{text}` has no weight"))?;
    let class = parts.next().map_or(Ok(LatencyClass::default()), |name| {
        serde_json::from_value(Value::from(name)).with_context(|| format!("`{name}` is not a latency class"))
    })?;
    let group = |name: &str| ShareGroup { name: name.to_owned(), sharing: Sharing::Together, user: None };
    let share_group = parts.next().map(group);
    Ok(TenantSpec {
        name: name.into(),
        uid: None,
        memory_bytes: mib << 20,
        window_bytes: 0,
        limits: vram::Limits { weight, ..vram::Limits::default() },
        time: sched::VgpuParams { class, ..sched::VgpuParams::weight(weight) },
        on_stuck: OnStuck::Kill,
        share_group,
        gang: None,
    })
}

/// New settings for a tenant. Omitted settings stay unchanged.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Change {
    tenant: String,
    weight: Option<u32>,
    guarantee_permille: Option<u32>,
    class: Option<LatencyClass>,
    sharing: Option<Sharing>,
}

impl Change {
    fn apply(self, core: &mut Core) -> Result<()> {
        let id = core.tenant(&self.tenant).with_context(|| format!("there is no tenant `{}`", self.tenant))?;
        let mut spec = core.spec(id).context("the tenant was removed")?.clone();
        spec.time.weight = self.weight.unwrap_or(spec.time.weight);
        spec.time.guarantee_permille = self.guarantee_permille.unwrap_or(spec.time.guarantee_permille);
        spec.time.class = self.class.unwrap_or(spec.time.class);
        if let Some(sharing) = self.sharing {
            let group = spec.share_group.as_mut();
            group.with_context(|| format!("tenant `{}` has no share group", self.tenant))?.sharing = sharing;
        }
        Ok(core.change_tenant(id, &spec)?)
    }
}

/// Changes a tenant's settings if the line is a JSON object.
fn obey(server: &Server, line: &str) -> Result<()> {
    if !line.starts_with('{') {
        return Ok(());
    }
    let change: Change = serde_json::from_str(line).with_context(|| format!("`{line}` is not a change of a tenant"))?;
    server.call(move |core| change.apply(core)).context("the owner has exited")?
}

fn serve(driver: Arc<Real>, library: &Path, options: &Serve) -> Result<()> {
    let mut config = CardConfig::new(options.card_mib << 20);
    config.host_bytes = options.host_mib.unwrap_or(options.card_mib) << 20;
    config.chunk_bytes = options.chunk_mib << 20;
    config.turns.slice_ns = options.slice_ms * 1_000_000;
    config.host_ready_bytes = options.host_ready_mib.map_or(config.host_ready_bytes, |mib| mib << 20);
    config.run_ahead_us = options.run_ahead_us.unwrap_or(config.run_ahead_us);
    config.idle_us = options.idle_us.unwrap_or(config.idle_us);
    config.patience_ns = options.patience_ms.map_or(config.patience_ns, |ms| ms * 1_000_000);
    config.quanta.min_ns = options.quantum_min_ms.map_or(config.quanta.min_ns, |ms| ms * 1_000_000);
    config.quanta.max_ns = options.quantum_max_ms.map_or(config.quanta.max_ns, |ms| ms * 1_000_000);
    config.quanta.mode = options.quanta.parse().map_err(anyhow::Error::msg)?;
    let tenants = options.tenants.iter().map(|text| tenant(text)).collect::<Result<Vec<_>>>()?;
    config.margin_bytes = options.margin_mib.map_or(config.margin_bytes, |mib| mib << 20);
    if options.kill_strangers {
        config.on_stranger = OnStranger::Kill;
    }
    let uuid = driver.device().uuid;
    let mut server = Server::start_closed(config, driver, options.journal.as_deref())?;
    // Poll once before programs can connect.
    server.watch_users(library, uuid)?;
    server.listen(None, &options.socket, &Rights::default())?;
    if let (Some(program), Some(folder)) = (options.mps_control.clone(), options.mps_folder.clone()) {
        server.serve_mps(MpsOptions { program, folder, card: nvml_uuid(uuid) });
    }
    for mut spec in tenants {
        if let Some(ms) = options.max_run_ms {
            spec.time.max_run_ns = Some(ms * 1_000_000);
        }
        if options.suspend {
            spec.on_stuck = OnStuck::Suspend;
        }
        server.call(move |core| core.add_tenant(spec)).context("the owner has exited")??;
    }
    let (ask, asked) = std::sync::mpsc::channel();
    // The process exits when its standard input is closed.
    std::thread::spawn(move || std::io::stdin().lines().map_while(Result::ok).try_for_each(|line| ask.send(line)));
    println!("{}", json!({ "ready": options.socket }));
    std::io::stdout().flush()?;
    let end = Instant::now() + Duration::from_secs(options.seconds);
    loop {
        let line = asked.recv_timeout(end.saturating_duration_since(Instant::now())).ok();
        if let Some(Err(error)) = line.as_deref().map(|line| obey(&server, line)) {
            println!("{}", json!({ "error": format!("{error:#}") }));
            std::io::stdout().flush()?;
            continue;
        }
        let (view, clock_ns) =
            server.call(|core| (core.view(u64::MAX), core.clock_ns())).context("the owner has exited")?;
        println!("{}", describe(&view, clock_ns));
        std::io::stdout().flush()?;
        if line.is_none() {
            return Ok(());
        }
    }
}

fn describe(view: &CardView, clock_ns: u64) -> Value {
    let tenants: Vec<Value> = view
        .tenants
        .iter()
        .map(|tenant| {
            let memory = view.memory.summary.vms.get(&tenant.id).copied().unwrap_or_default();
            let time = view.time.tenants.get(&tenant.id).and_then(|time| time.engines.values().next());
            let account = time.map(|time| time.account.clone()).unwrap_or_default();
            json!({
                "name": tenant.spec.name,
                "weight": tenant.spec.time.weight,
                "charged_ns": account.used,
                "busy_ns": tenant.busy_ns,
                "copy_ns": tenant.copy_ns,
                "wait_p99_ns": account.waits.quantile(990),
                "chunks_on_card": memory.placed,
                "chunks_in_host": memory.host,
                "moved_out": memory.moved_out,
                "moved_in": memory.moved_in,
                "programs": tenant.programs.len(),
                "killed": tenant.killed,
                "kill_failures": tenant.kill_failures,
                "suspended": tenant.suspended,
                "unaccounted": tenant.unaccounted.iter().map(|one| json!([one.pid, one.bytes])).collect::<Vec<_>>(),
                "kept_bytes": tenant.kept_bytes,
                "over_quota_bytes": tenant.over_quota_bytes,
                "launches": tenant.launches,
                "group": tenant.membership.map(|group| json!({
                    "sharing": group.sharing.name(),
                    "together": group.together,
                    "joined": group.joined,
                    "lack_ns": group.lack_ns,
                })),
            })
        })
        .collect();
    json!({
        "clock_ns": clock_ns,
        "turns": view.turns,
        "turns_ns": view.time.busy.values().sum::<u64>(),
        "relocations": view.relocations,
        "declined": view.declined,
        "looks": view.looks,
        "unexplained_bytes": view.unexplained_bytes,
        "chunk_bytes": view.memory.summary.chunk_bytes,
        "tenants": tenants,
    })
}

fn measure(driver: &Real, arguments: &Arguments, options: &Measure) -> Result<()> {
    let mut holder = Command::new(std::env::current_exe()?);
    holder.arg("--driver").arg(&arguments.driver).arg("--device").arg(arguments.device.to_string());
    holder.args(["hold", "--gib", &options.gib.to_string()]);
    let checkpoint = (!options.no_checkpoint).then_some((holder, Duration::from_secs(options.patience_s)));
    let result = measure::report(driver, options.gib << 30, options.chunk_mib << 20, checkpoint);
    println!("{}", result.map_err(anyhow::Error::msg)?);
    Ok(())
}
