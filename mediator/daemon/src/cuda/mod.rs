//! Cards behind NVIDIA's driver: each has an owner, a process of its own, that the daemon starts, tells its tenants, and
//! starts again when it ends.
//!
//! Parts: this file (the card as the daemon sees it), `process` (the owner's process), `show` (what it says, as the admin API
//! has it). Decision 040 says why the owner is no part of the daemon.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use cuda_control::{Answer, Card, MemoryShare, Request, Settings, Tenant, TimeShare};
use vmm_glue::Link;

use super::account;
use super::backend::{BackendError, Built, CardBackend, CardStatus};
use super::error::DaemonError;
use config::{CardSpec, CudaSpec, OnStuck, TenantSpec, VmSpec};

mod process;
pub mod show;

use process::{Command, Supervisor};

/// Bytes of a MiB.
const MIB: u64 = 1 << 20;
/// Time that an owner has to answer.
// TIMEOUT: it answers at once; one that does not is stuck in the driver.
const ANSWER: Duration = Duration::from_secs(10);

/// A card with its owner.
pub(super) struct CudaCard {
    spec: CardSpec,
    commands: Sender<Command>,
    thread: Option<JoinHandle<()>>,
}

impl CudaCard {
    /// Starts the owner of a card; `folder` is where it writes down which programs it serves.
    ///
    /// # Errors
    /// When there is no such program or card.
    pub fn open(spec: &CardSpec, folder: &Path) -> Result<Self, BackendError> {
        let settings = settings(spec, folder);
        let (commands, requests) = channel();
        let mut supervisor = Supervisor::new(&spec.name, settings);
        let name = supervisor.start().map_err(BackendError::failed)?;
        tracing::info!(card = spec.name, model = name, "the owner of the CUDA card is ready");
        let thread = std::thread::Builder::new().name("cuda-owner".to_owned());
        let thread = thread.spawn(move || supervisor.run(&requests)).map_err(BackendError::failed)?;
        Ok(Self { spec: spec.clone(), commands, thread: Some(thread) })
    }

    /// Configuration of the card.
    pub fn spec(&self) -> &CardSpec {
        &self.spec
    }

    /// Asks the owner.
    ///
    /// # Errors
    /// What it says, or that it does not answer.
    pub fn ask(&self, request: Request) -> Result<Answer, String> {
        let (reply, answer) = channel();
        let gone = || format!("the owner of card `{}` does not answer: it is started again", self.spec.name);
        self.commands.send(Command::Ask(Box::new(request), reply)).map_err(|_| gone())?;
        match answer.recv_timeout(2 * ANSWER).map_err(|_| gone())? {
            Answer::Failed(what) => Err(what),
            answer => Ok(answer),
        }
    }

    /// The card with the parts of the last `window_ns`.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn view(&self, window_ns: u64) -> Result<Card, String> {
        match self.ask(Request::View { window_ns })? {
            Answer::View(view) => Ok(*view),
            other => Err(format!("the owner of card `{}` answers {other:?}", self.spec.name)),
        }
    }
}

impl Drop for CudaCard {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The card where virtual machines' cards are asked.
pub(super) struct Backend(pub(super) Arc<CudaCard>);

impl CardBackend for Backend {
    fn status(&self) -> CardStatus {
        let view = self.0.view(0).ok();
        let placed = view.iter().flat_map(|view| &view.tenants).map(|tenant| tenant.on_card_bytes).sum::<u64>();
        CardStatus {
            // The owner is started again; the card is not lost with it.
            failed: None,
            vram_free_mib: view.as_ref().map(|view| view.spare_bytes / MIB),
            vram_placed_mib: placed / MIB,
            ..CardStatus::default()
        }
    }

    fn build(&self, vm: &VmSpec, _link: &Link) -> Result<Built, BackendError> {
        let what =
            format!("card `{}` is of kind = \"cuda\" and serves tenants, not VM `{}`", self.0.spec.name, vm.name);
        Err(BackendError::failed(what))
    }
}

fn settings(spec: &CardSpec, folder: &Path) -> Settings {
    let CudaSpec { device, driver, chunk_mib, host_ready_mib, slice_ms, run_ahead_us } = spec.cuda();
    let quanta = spec.memory.quanta;
    Settings {
        driver,
        device,
        card_bytes: spec.vram_mib * MIB,
        host_bytes: spec.memory.host_mib * MIB,
        host_ready_bytes: host_ready_mib.min(spec.memory.host_mib) * MIB,
        chunk_bytes: chunk_mib * MIB,
        slice_ns: slice_ms * 1_000_000,
        run_ahead_us,
        quanta: quanta.mode.to_string(),
        quantum_min_ns: quanta.min_ms * 1_000_000,
        quantum_max_ns: quanta.max_ms * 1_000_000,
        journal: folder.join(format!("{}.programs", spec.name)),
    }
}

/// A tenant as its card's owner is told of it.
///
/// # Errors
/// When a user or a group of its socket does not exist.
pub fn tenant(spec: &TenantSpec, card: &CardSpec, socket_dir: &Path) -> Result<Tenant, DaemonError> {
    let rights = account::socket_options(spec.mode, spec.owner.as_deref(), spec.group.as_deref())?;
    let (memory, time) = (&spec.memory, spec.time.params(None));
    let class = serde_json::to_value(time.class).ok().and_then(|name| name.as_str().map(str::to_owned));
    Ok(Tenant {
        name: spec.name.clone(),
        memory_bytes: spec.vram_mib * MIB,
        memory: MemoryShare {
            quota: memory.quota_mib.map(|mib| mib * MIB),
            guarantee: memory.guarantee_mib.unwrap_or(0) * MIB,
            swap_cap: memory.swap_cap_mib.map(|mib| mib * MIB),
            weight: memory.weight.unwrap_or(vram::Limits::default().weight),
            on_full: memory.policy(card).to_string(),
        },
        time: TimeShare {
            weight: time.weight,
            guarantee_permille: time.guarantee_permille,
            cap_permille: time.cap_permille,
            class: class.unwrap_or_default(),
            max_run_ns: time.max_run_ns,
        },
        suspends: spec.on_stuck == OnStuck::Suspend,
        socket: spec.socket_path(socket_dir),
        mode: spec.mode.0,
        uid: rights.uid,
        gid: rights.gid,
    })
}
