//! Cards that use NVIDIA's driver. Each card has an owner: a separate process that the daemon starts, restarts and
//! configures.
//!
//! Parts: this file (the card as the daemon sees it), `function` (VMs on the card), `handing_over` (upgrades). The
//! crate `owner_process` runs the owner's process, and `cuda_status` stores its last status. [Decision
//! 119](../../../docs/decisions/119-cuda-owner-process.md) explains why the owner is not part of the daemon.
//!
//! Readers never wait for an owner. A change to a card waits for other changes to this card and for the card's owner.
//! While waiting, a change holds only this card's lock.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use cuda_control::{Answer, Request, Tenant};
use cuda_status::{Seen, StatusCell};
use events::Log;
use locks::{Guard, Mutex, rank};
use vmm_glue::{IrqCounts, Link};

use super::backend::{BackendError, Built, CardBackend, CardStatus};
use super::error::DaemonError;
use config::{CardSpec, Config, FunctionSpec, TenantSpec, VmSpec};
use listening::account;
use owner_process::{CardIdentity, Command, GUARANTEE_RETRY_INTERVAL, GUARANTEE_TIMEOUT, SavedOwner, Supervisor};
use owner_settings::settings;

pub(super) mod function;
mod handing_over;

pub(super) use handing_over::GivenOwner;

/// Bytes per MiB.
const MIB: u64 = 1 << 20;
/// Maximum number of pending changes to one card, so that changes to other cards still obtain a permit.
const CHANGES: usize = 16;

/// A CUDA card with its owner.
pub(super) struct CudaCard {
    spec: CardSpec,
    pub(super) identity: CardIdentity,
    commands: Sender<Command>,
    status_cell: Arc<StatusCell>,
    stop: Arc<AtomicBool>,
    thread: Mutex<rank::Threads, Option<JoinHandle<()>>>,
    /// The owner's supervisor and its commands, until [`Self::begin`] passes them to a thread.
    waiting: Mutex<rank::Threads, Option<(Supervisor, Receiver<Command>)>>,
    /// State of the owner if another daemon started it. Excludes tenants that this daemon has already confirmed.
    known: Mutex<rank::Threads, Option<SavedOwner>>,
    changing: Mutex<rank::CudaChanging, ()>,
    /// Number of pending or running changes.
    changes: AtomicUsize,
    /// User accounts of the card's VM workers.
    users: vcuda::users::Users,
}

/// The exclusive right to change a card.
pub(super) struct Change<'a> {
    card: &'a CudaCard,
    /// Must be dropped before the count is decremented.
    _turn: Guard<'a, rank::CudaChanging, ()>,
    _place: Place<'a>,
}

/// A unit of a card's change count; decrements the count when dropped.
struct Place<'a>(&'a AtomicUsize);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl CudaCard {
    /// Starts the owner of a card.
    ///
    /// # Errors
    /// Returns an error if the owner does not start, or if the driver does not open the card.
    pub fn open(spec: &CardSpec, config: &Config, events: &Arc<Log>) -> Result<Self, BackendError> {
        let settings = settings(spec, &config.cards, &config.daemon.socket_dir);
        let (status_cell, stop) = (Arc::new(StatusCell::new(&spec.name)), Arc::default());
        let mut supervisor = Supervisor::new(&spec.name, settings, &status_cell, (&stop, events));
        let identity = supervisor.start().map_err(BackendError::failed)?;
        let CardIdentity { model, uuid, .. } = &identity;
        tracing::info!(card = spec.name, model, uuid, "the owner of the CUDA card is ready");
        let card = Self::with(spec, identity, supervisor, status_cell, stop, None);
        card.begin().map_err(BackendError::failed)?;
        Ok(card)
    }

    fn with(
        spec: &CardSpec,
        identity: CardIdentity,
        supervisor: Supervisor,
        status_cell: Arc<StatusCell>,
        stop: Arc<AtomicBool>,
        known: Option<SavedOwner>,
    ) -> Self {
        let (commands, requests) = channel();
        Self {
            spec: spec.clone(),
            identity,
            commands,
            status_cell,
            stop,
            thread: Mutex::new(None),
            waiting: Mutex::new(Some((supervisor, requests))),
            known: Mutex::new(known),
            changing: Mutex::new(()),
            changes: AtomicUsize::new(0),
            users: vcuda::users::Users::new(spec.cuda().worker_users),
        }
    }

    /// Starts using the owner.
    ///
    /// # Errors
    /// Returns an error if the host cannot create a thread.
    pub fn begin(&self) -> std::io::Result<()> {
        let Some((supervisor, requests)) = self.waiting.lock().take() else { return Ok(()) };
        let thread = std::thread::Builder::new().name("cuda-owner".to_owned());
        let thread = thread.spawn(move || supervisor.run(&requests))?;
        *self.thread.lock() = Some(thread);
        Ok(())
    }

    /// Returns the configuration of the card.
    pub fn spec(&self) -> &CardSpec {
        &self.spec
    }

    /// Returns the last status of the card, without waiting for the card's owner.
    ///
    /// # Errors
    /// Returns an error if the owner is not responding.
    pub fn seen(&self) -> Result<Arc<Seen>, DaemonError> {
        self.status_cell.seen().map_err(DaemonError::Owner)
    }

    /// Waits until no other thread is changing the card, and returns the right to change it. The caller must not hold a
    /// lock that other threads need.
    ///
    /// # Errors
    /// Returns an error if the card's owner is not responding, or if too many changes are pending.
    pub fn change(&self) -> Result<Change<'_>, DaemonError> {
        self.status_cell.trouble().map_err(DaemonError::Owner)?;
        let place = Place(&self.changes);
        if self.changes.fetch_add(1, Ordering::Relaxed) >= CHANGES {
            return Err(DaemonError::Crowded(self.spec.name.clone()));
        }
        let turn = self.changing.lock();
        // An earlier change may have found that the owner is not running.
        self.status_cell.trouble().map_err(DaemonError::Owner)?;
        Ok(Change { card: self, _turn: turn, _place: place })
    }

    /// Requests a memory guarantee from the owner, and repeats the request until the owner grants or rejects it. `turn`
    /// is the right to change the card; it is released while the owner evicts other tenants' memory, so other changes
    /// may run. Returns the right to change the card.
    ///
    /// # Errors
    /// See [`Change::ask`] and [`Self::change`].
    pub fn promise<'a>(&'a self, mut turn: Change<'a>, of: &str, request: &Request) -> Result<Change<'a>, DaemonError> {
        let begin = Instant::now();
        while !turn.moved(of, request, begin)? {
            drop(turn);
            locks::sleep(GUARANTEE_RETRY_INTERVAL);
            turn = self.change()?;
        }
        Ok(turn)
    }
}

impl Change<'_> {
    /// Sends the owner a request, and waits for the response. `of` names the request's object in errors.
    ///
    /// # Errors
    /// Returns an error if the owner rejects the request, in which case nothing changes, or if the owner does not
    /// respond.
    pub fn ask(&self, of: &str, request: Request) -> Result<Answer, DaemonError> {
        let name = &self.card.spec.name;
        let gone = |why: String| DaemonError::Owner(format!("card `{name}` has no owner: {why}"));
        let (reply, answer) = channel();
        let sent = self.card.commands.send(Command::Ask(Box::new(request), reply));
        sent.map_err(|_| gone("the daemon is exiting".to_owned()))?;
        locks::may_wait();
        // The supervisor's thread always responds, because its wait for the owner has a time limit.
        let answer = answer.recv().map_err(|_| gone("the daemon is exiting".to_owned()))?;
        match answer.map_err(gone)? {
            Answer::Failed(what) => Err(DaemonError::Setting { of: of.to_owned(), what }),
            answer => Ok(answer),
        }
    }
}

impl Change<'_> {
    /// Requests a memory guarantee from the owner. `since` is the time of the first attempt. Returns false if the owner
    /// must first evict other tenants' memory; the caller must then repeat the request.
    ///
    /// # Errors
    /// Returns the errors of [`Self::ask`], and an error if eviction takes too long.
    pub fn moved(&self, of: &str, request: &Request, since: Instant) -> Result<bool, DaemonError> {
        match self.ask(of, request.clone())? {
            Answer::Moving(_) if since.elapsed() < GUARANTEE_TIMEOUT => Ok(false),
            Answer::Moving(what) => Err(DaemonError::Setting { of: of.to_owned(), what }),
            _ => Ok(true),
        }
    }
}

impl Drop for CudaCard {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.commands.send(Command::Stop);
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
        if let Some((mut supervisor, _)) = self.waiting.lock().take() {
            // Another daemon continues to use the owner.
            supervisor.leave();
        }
    }
}

/// The card as a [`CardBackend`], for callers that handle all kinds of cards.
pub(super) struct Backend {
    pub(super) card: Arc<CudaCard>,
    /// Directory of the sockets of the card's tenants, including VMs.
    pub(super) socket_dir: PathBuf,
}

impl CardBackend for Backend {
    fn status(&self) -> CardStatus {
        let seen = self.card.status_cell.seen();
        let memory = seen.as_ref().map(|seen| &seen.card.memory.summary).ok();
        let mib = |chunks: u32, chunk_bytes: u64| u64::from(chunks) * chunk_bytes / MIB;
        let placed = |memory: &vram::Summary| mib(memory.vms.values().map(|vm| vm.placed).sum(), memory.chunk_bytes);
        CardStatus {
            // The daemon restarts the owner, so the card does not fail.
            failed: None,
            trouble: seen.as_ref().err().cloned(),
            model: self.card.identity.model.clone(),
            uuid: Some(self.card.identity.uuid.clone()),
            owner_restarts: Some(self.card.status_cell.restarts()),
            vram_free_mib: memory.map(|memory| mib(memory.spare(), memory.chunk_bytes)),
            vram_placed_mib: memory.map_or(0, placed),
            unexplained_bytes: seen.as_ref().map_or(0, |seen| seen.card.unexplained_bytes),
            strangers: seen.iter().flat_map(|seen| &seen.card.strangers).map(card_views::stranger).collect(),
            ..CardStatus::default()
        }
    }

    fn irqs(&self) -> IrqCounts {
        vcuda::irqs()
    }

    fn build(&self, vm: &VmSpec, link: &Link) -> Result<Built, BackendError> {
        function::build(&self.card, vm, link, &self.socket_dir)
    }
}

/// Converts a tenant to the format used by the owner of one of the tenant's cards. `function` is the CUDA function of a
/// tenant that is a VM.
///
/// # Errors
/// Returns an error if the user or the group of the tenant's socket does not exist.
pub fn tenant(
    spec: &TenantSpec,
    card: &CardSpec,
    socket_dir: &Path,
    function: Option<FunctionSpec>,
) -> Result<Tenant, DaemonError> {
    let rights = account::socket_options(spec.mode, spec.owner.as_deref(), spec.group.as_deref())?;
    Ok(owner_settings::tenant(spec, card, socket_dir, function, (rights.uid, rights.gid)))
}
