//! Operations on a job: creates its tenant or vGPU, records its usage, and removes the tenant or vGPU.
//!
//! All names are derived from the job, so that operations are idempotent. Other processes of a job find the tenant or
//! vGPU that its first process created. After a crash, [`reconcile`] finds leftover tenants and vGPUs by name.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use admin_client::sockets;
use api::ErrorCode;
use mediatorctl::client::{AskError, Client, ClientError};
use rustix::fs::OFlags;
use serde::Serialize;

use crate::claim::{self, Card};
use crate::granted::{self, Number};
use crate::options::{Arguments, Given};

/// Prefix of the names of jobs' tenants and virtual machines.
const PREFIX: &str = "slurm-";
/// Environment variable with the path of the socket of a job's vGPU.
pub const VGPU_VARIABLE: &str = "GPU_MEDIATOR_VFIO_USER_SOCKET";
/// Delay between two attempts to reach the daemon.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// NVIDIA's environment variable for the pipe folder of an MPS server.
const MPS_VARIABLE: &str = "CUDA_MPS_PIPE_DIRECTORY";
/// Maximum time that a job waits for the MPS server of its group. Without the server, the job's programs take turns.
// TIMEOUT: a server starts within a second.
const SERVER_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of a note to the controller.
// TIMEOUT: the controller responds immediately or not at all, and a job must not wait for it.
const NOTE: Duration = Duration::from_secs(10);

/// A job that starts a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// ID of the job.
    pub id: u32,
    /// User ID of the job's owner.
    pub uid: u32,
    /// Number of the job's array, and the job's index in the array, if the job is in an array.
    pub of_array: Option<(u32, u32)>,
}

/// A job's usage of a card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// ID of the job.
    pub job: u32,
    /// Name of the node.
    pub node: String,
    /// Name of the card, or names of the cards, separated by commas.
    pub card: String,
    /// `tenant` or `vgpu`.
    pub kind: &'static str,
    /// Weight of the job.
    pub weight: u32,
    /// Memory limit of the job in MiB.
    pub memory_mib: u64,
    /// Card time charged to the job, in ns.
    pub used_ns: u64,
    /// Part of this time during which the tenant had work in flight, in ns. Always 0 for vGPUs.
    pub busy_ns: u64,
    /// Number of the job's submissions.
    pub launches: u64,
    /// Number of the job's programs that were killed because they exceeded their limits or did not respond.
    pub killed: u64,
}

fn name(job: u32) -> String {
    format!("{PREFIX}{job}")
}

/// Returns the ID of the job to which the name of a tenant or vGPU belongs.
fn job_of(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.parse().ok()
}

fn told(error: &ClientError) -> String {
    match error {
        ClientError::Ask(AskError::Refused(error)) => format!("{}; {}", error.error, error.what_to_do),
        error => {
            let source = std::error::Error::source(error).map(|source| format!(": {source}"));
            format!("{error}{}", source.unwrap_or_default())
        }
    }
}

fn code(error: &ClientError) -> Option<ErrorCode> {
    match error {
        ClientError::Ask(AskError::Refused(error)) => Some(error.code),
        _ => None,
    }
}

/// Repeats a request until the daemon responds, for at most the configured time.
fn patiently<T>(
    arguments: &Arguments,
    ask: impl Fn(&Client) -> Result<T, ClientError>,
) -> Result<Result<T, ClientError>, String> {
    let client = Client::new(arguments.socket.clone()).map_err(|error| told(&error))?;
    let begin = Instant::now();
    loop {
        match ask(&client) {
            Err(error @ ClientError::Ask(AskError::Unreachable { .. })) => {
                if begin.elapsed() >= Duration::from_secs(arguments.patience_s) {
                    return Err(format!("{}; start mediatord, or name its socket in plugstack.conf", told(&error)));
                }
                thread::sleep(RETRY_INTERVAL);
            }
            answer => return Ok(answer),
        }
    }
}

fn cards(arguments: &Arguments) -> Result<Vec<Card>, String> {
    let list =
        patiently(arguments, |client| client.get::<api::CardList>("/v1/cards"))?.map_err(|error| told(&error))?;
    let card = |card: api::Card| Card {
        cuda: card.kind == "cuda",
        shared_mib: card.vram_mib.saturating_sub(card.vram_reserved_mib),
        name: card.name,
    };
    Ok(list.cards.into_iter().map(card).collect())
}

/// Creates a job's tenant or vGPU if it does not exist. Returns the environment variables for the job's processes, or
/// an empty list if the job has neither shards nor options.
///
/// # Errors
/// Returns an error if the tenant or vGPU cannot be created. The message is shown to the job's user.
pub fn begin(arguments: &Arguments, given: &Given, job: &Job) -> Result<Vec<(String, String)>, String> {
    let name = name(job.id);
    let folder = if given.vgpu { "vms" } else { "tenants" };
    let path = format!("/v1/{folder}/{name}");
    let there = patiently(arguments, |client| client.get::<serde_json::Value>(&path))?;
    let made = match there {
        Ok(there) => there,
        Err(error) if code(&error) == Some(ErrorCode::NotFound) => {
            let number = Number { id: job.id, of_array: job.of_array };
            let patience = Duration::from_secs(arguments.patience_s);
            let granted = granted::ask(&arguments.scontrol, &number, &arguments.node, patience)?;
            if granted.shards == 0 && given.is_silent() {
                return Ok(Vec::new());
            }
            let cards = cards(arguments)?;
            let of_job = claim::cards_of(arguments, given, &granted.gpus, &cards)?;
            let shards = claim::shards_per_card(&granted);
            let table = claim::table(arguments, given, shards, &of_job, &name, job.uid)?;
            let post = |client: &Client| client.post::<serde_json::Value>(&format!("/v1/{folder}"), &table);
            match patiently(arguments, post)? {
                Ok(made) => made,
                // Another process of the job has already created the tenant or vGPU.
                Err(error) if code(&error) == Some(ErrorCode::Conflict) => {
                    patiently(arguments, |client| client.get(&path))?.map_err(|_| told(&error))?
                }
                Err(error) => return Err(told(&error)),
            }
        }
        Err(error) => return Err(told(&error)),
    };
    // A tenant with several cards has a socket for each.
    let all: Vec<&str> = match made["sockets"].as_array() {
        Some(all) => all.iter().filter_map(serde_json::Value::as_str).collect(),
        None => made["socket"].as_str().into_iter().collect(),
    };
    if all.is_empty() {
        return Err("the daemon names no socket".to_owned());
    }
    for socket in &all {
        sockets::give(&arguments.sockets, Path::new(socket), job.uid).map_err(|error| {
            format!("{socket}: {error}; `sockets` in plugstack.conf names the daemon's folder of sockets")
        })?;
    }
    let socket = all.join(":");
    if given.vgpu {
        return Ok(vec![(VGPU_VARIABLE.to_owned(), socket)]);
    }
    let driver =
        arguments.driver.iter().map(|path| (cuda_protocol::DRIVER_VARIABLE.to_owned(), path.display().to_string()));
    let mps = pipes(arguments, given, &path)?.map(|pipes| (MPS_VARIABLE.to_owned(), pipes.display().to_string()));
    let variables = [
        (cuda_protocol::SOCKET_VARIABLE.to_owned(), socket),
        (cuda_protocol::TENANT_VARIABLE.to_owned(), name),
        ("LD_LIBRARY_PATH".to_owned(), arguments.library.display().to_string()),
    ];
    Ok(variables.into_iter().chain(driver).chain(mps).collect())
}

/// Returns the pipe folder of the MPS server in a job's group, if the group has such a server. Waits until the server
/// accepts clients, for at most [`SERVER_TIMEOUT`], because a program that starts earlier never becomes a client.
fn pipes(arguments: &Arguments, given: &Given, path: &str) -> Result<Option<PathBuf>, String> {
    if given.share_group.is_none() {
        return Ok(None);
    }
    let begin = Instant::now();
    loop {
        let tenant = patiently(arguments, |client| client.get::<api::Tenant>(path))?.map_err(|error| told(&error))?;
        // If the state is missing, the card's owner process is starting.
        let starts = tenant.group_state.as_ref().is_none_or(|state| state.mps == api::MpsState::Starting);
        if !starts || begin.elapsed() > SERVER_TIMEOUT {
            return Ok(tenant.group_state.and_then(|state| state.mps_pipes));
        }
        std::thread::sleep(RETRY_INTERVAL);
    }
}

/// Returns a job's usage so far, or `None` if the job has no tenant or vGPU.
fn usage(arguments: &Arguments, job: u32) -> Result<Option<Usage>, String> {
    let name = name(job);
    let node = arguments.node.clone();
    match patiently(arguments, |client| client.get::<api::Tenant>(&format!("/v1/tenants/{name}")))? {
        Ok(tenant) => {
            return Ok(Some(Usage {
                job,
                node,
                card: tenant.all_cards(),
                kind: "tenant",
                weight: tenant.time.weight,
                memory_mib: tenant.memory.quota_mib.unwrap_or(tenant.vram_mib),
                used_ns: tenant.used_ns,
                busy_ns: tenant.busy_ns,
                launches: tenant.launches,
                killed: tenant.killed,
            }));
        }
        Err(error) if code(&error) == Some(ErrorCode::NotFound) => {}
        Err(error) => return Err(told(&error)),
    }
    let vm = match patiently(arguments, |client| client.get::<api::Vm>(&format!("/v1/vms/{name}")))? {
        Ok(vm) => vm,
        Err(error) if code(&error) == Some(ErrorCode::NotFound) => return Ok(None),
        Err(error) => return Err(told(&error)),
    };
    let path = format!("/v1/cards/{}/scheduler", vm.card);
    let card = patiently(arguments, |client| client.get::<api::CardScheduler>(&path))?.map_err(|error| told(&error))?;
    let share = card.vms.iter().find(|share| share.vm == name);
    let engines = || share.into_iter().flat_map(|share| share.engines.values());
    Ok(Some(Usage {
        job,
        node,
        card: vm.card,
        kind: "vgpu",
        weight: share.map_or(0, |share| share.time.weight),
        memory_mib: vm.vram_mib,
        used_ns: engines().map(|engine| engine.used_ns).fold(0, u64::saturating_add),
        busy_ns: 0,
        launches: engines().map(|engine| engine.completed).fold(0, u64::saturating_add),
        killed: 0,
    }))
}

/// Stores a running job's usage in the controller, as the administrator's comment on the job.
///
/// # Errors
/// Returns an error if the daemon does not respond.
pub fn note(arguments: &Arguments, job: u32) -> Result<(), String> {
    let Some(usage) = usage(arguments, job)? else { return Ok(()) };
    let Usage { node, card, used_ns, launches, killed, .. } = usage;
    let seconds = format!("{}.{:03}", used_ns / 1_000_000_000, used_ns / 1_000_000 % 1000);
    let comment =
        format!("gpu-mediator node={node} card={card} gpu_seconds={seconds} launches={launches} killed={killed}");
    let mut command = Command::new(&arguments.scontrol);
    command.args(["update", &format!("jobid={job}"), &format!("admincomment={comment}")]);
    // Ignore errors. The controller rejects notes for finished jobs, but the ledger contains the usage.
    let _ = run(command.stdout(Stdio::null()).stderr(Stdio::null()));
    Ok(())
}

/// Runs a program within the time limit for notes. Returns true if it succeeds.
fn run(command: &mut Command) -> std::io::Result<bool> {
    let mut child = command.stdin(Stdio::null()).spawn()?;
    let begin = Instant::now();
    while begin.elapsed() < NOTE {
        if let Some(status) = child.try_wait()? {
            return Ok(status.success());
        }
        thread::sleep(Duration::from_millis(20));
    }
    child.kill()?;
    child.wait().map(|status| status.success())
}

/// Removes a job's tenant or vGPU, and records its usage.
///
/// # Errors
/// Returns an error if the ledger cannot be opened, or if the tenant or vGPU cannot be removed. It then remains
/// allocated. Returns an error with the record if the record cannot be written.
pub fn end(arguments: &Arguments, job: u32) -> Result<(), String> {
    let Some(usage) = usage(arguments, job)? else { return Ok(()) };
    let named = |error: std::io::Error| format!("{}: {error}", arguments.ledger.display());
    // Open the ledger before the removal, because a later call would find nothing to record.
    let mut ledger = opened(&arguments.ledger).map_err(named)?;
    let folder = if usage.kind == "vgpu" { "vms" } else { "tenants" };
    let path = format!("/v1/{folder}/{}", name(job));
    match patiently(arguments, |client| client.delete(&path))? {
        Ok(()) => {}
        // The health check has already removed the job's tenant or vGPU, and recorded its usage.
        Err(error) if code(&error) == Some(ErrorCode::NotFound) => return Ok(()),
        Err(error) => return Err(told(&error)),
    }
    let line = serde_json::to_string(&usage).map_err(|error| named(error.into()))? + "\n";
    // Write the line with a single call, so that lines of different processes are not interleaved.
    ledger.write_all(line.as_bytes()).map_err(|error| format!("{}, so it lacks this line: {line}", named(error)))
}

/// Opens the ledger for appending. Creates the file and its folder if they do not exist.
fn opened(ledger: &Path) -> std::io::Result<fs::File> {
    if let Some(folder) = ledger.parent() {
        // Set the mode, because the umask of Slurm's process may permit writes by other users.
        fs::DirBuilder::new().recursive(true).mode(0o755).create(folder)?;
    }
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).unwrap_or(0);
    let file = OpenOptions::new().create(true).append(true).mode(0o640).custom_flags(flags).open(ledger)?;
    let there = file.metadata()?;
    if !there.is_file() || there.nlink() != 1 || there.uid() != rustix::process::geteuid().as_raw() {
        return Err(std::io::Error::other(
            "it is not a regular file with a single link, owned by this user; move it away",
        ));
    }
    Ok(file)
}

/// Removes leftover tenants and vGPUs of finished jobs, for example after a failure of a node, a daemon or an epilog.
/// Returns the IDs of these jobs.
///
/// # Errors
/// Returns an error if the daemon does not respond, the running jobs cannot be listed, a tenant or vGPU cannot be
/// removed, or its usage cannot be recorded.
pub fn reconcile(
    arguments: &Arguments,
    running: impl FnOnce() -> Result<Vec<u32>, String>,
) -> Result<Vec<u32>, String> {
    let there = held(arguments)?;
    if there.is_empty() {
        return Ok(there);
    }
    // Query the running jobs after the tenants and vGPUs. A job that has a tenant or vGPU but is not running has then
    // finished.
    let running = running()?;
    let over: Vec<u32> = there.into_iter().filter(|job| !running.contains(job)).collect();
    over.iter().try_for_each(|job| end(arguments, *job))?;
    Ok(over)
}

/// Returns the IDs of the jobs that have a tenant or vGPU.
///
/// # Errors
/// Returns an error if the daemon does not respond.
pub fn held(arguments: &Arguments) -> Result<Vec<u32>, String> {
    let tenants =
        patiently(arguments, |client| client.get::<api::TenantList>("/v1/tenants"))?.map_err(|error| told(&error))?;
    let vms = patiently(arguments, |client| client.get::<api::VmList>("/v1/vms"))?.map_err(|error| told(&error))?;
    let names = tenants.tenants.iter().map(|tenant| &tenant.name).chain(vms.vms.iter().map(|vm| &vm.name));
    Ok(names.filter_map(|name| job_of(name)).collect())
}

#[cfg(test)]
mod tests;
