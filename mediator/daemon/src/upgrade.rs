//! Upgrades: a daemon takes over the cards, virtual machines and sockets of another daemon while they work.
//!
//! The running daemon starts the next program with one end of a socket as its standard input, and hands its state over
//! with the crate `handover` ([decision 128](../../../../docs/decisions/128-upgrades.md)). `sender` is the side of the
//! running daemon, and `receiver` is the side of the next daemon. `cuda` contains both sides for cards with an owner
//! process. If anything fails before the next daemon reports that it has rebuilt its state, the first daemon resumes.
//! `handover::Roster` contains the state that cards and virtual machines do not serialize themselves. At the points in
//! `points`, tests kill one of the two daemons.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use card_manager::SavedHost;
use physical::GoingCard;
use rustix::time::{ClockId, clock_gettime};
use saved_state::Known;
use tokio::sync::Notify;
use vcuda::SavedFunction;
use vgpu::SavedSide;
use vmm_glue::SavedClients;

mod cuda;
pub(crate) mod points;
pub(crate) mod receiver;
mod sender;

use handover::{CudaPart, Roster};

/// Time limit for the next program to introduce itself and to read its configuration; no VM waits during this time.
// TIMEOUT: a busy host starts a program within seconds.
const MEET_LIMIT: Duration = Duration::from_secs(20);
/// Time limit for the next daemon to rebuild everything while virtual machines wait; otherwise the upgrade is canceled.
// TIMEOUT: QEMU gives up on a request that gets no response within 5 s.
const PAUSE_LIMIT: Duration = Duration::from_secs(4);
/// Time limit for a channel to leave its engine; a channel that stays counts as hung.
const STILL_LIMIT: Duration = Duration::from_secs(1);
/// Time limit for the next daemon to wait for the state, and for the message that it owns the state. The other daemon
/// has shorter limits, and its end is detected immediately. If this daemon gave up while the other daemon is only slow,
/// no daemon would own the state.
// TIMEOUT: longer than any other wait.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(3600);

/// Prefix of the descriptors of listening sockets, which have the same names as in the service manager's store.
const SOCKET: &str = "socket:";
/// Prefix of the descriptors of sockets from the service manager's units.
const UNIT: &str = "unit:";
/// Prefix of the descriptor of a card's memory.
const VRAM: &str = "vram:";
/// Prefix of the descriptor of the host memory for a card's chunks.
const HOST_MEMORY: &str = "host-memory:";
/// Prefix of the descriptor of the memory behind a VM's apertures, which its VMM maps.
const APERTURES: &str = "apertures:";
/// Prefix of the descriptors of a virtual machine's clients.
const CLIENTS: &str = "clients:";
/// Prefix of the pipes of a CUDA card's owner, and of the descriptor of its process.
const OWNER: &str = "owner:";
/// Prefix of the window of a VM's CUDA function, and of the links of its workers.
const FUNCTION: &str = "function:";
/// Name of the state folder's lock.
const STATE_LOCK: &str = "state-lock";

/// Parameters with which this daemon starts the next daemon.
#[derive(Debug)]
pub(crate) struct UpgradeChain {
    /// Path of this daemon's executable; after an upgrade of the package, this is the executable of the next version.
    pub program: PathBuf,
    /// The configuration file.
    pub config: PathBuf,
    /// The admin socket, and the read-only socket, if this daemon serves them.
    pub admin: Vec<(&'static str, UnixListener)>,
}

/// State of a daemon between its predecessor and its successor.
#[derive(Debug, Default)]
pub(crate) struct Generations {
    succession: OnceLock<UpgradeChain>,
    /// Another daemon owns everything.
    gone: AtomicBool,
    /// Notified when this daemon may end.
    left: Notify,
    /// The upgrade in which this daemon has taken over.
    last: OnceLock<handover::Takeover>,
    /// Number of upgrades that failed in this process.
    failures: AtomicU64,
}

impl Generations {
    /// Sets how the next daemon is started.
    pub(crate) fn continues_by(&self, succession: UpgradeChain) {
        let _already = self.succession.set(succession);
    }

    /// Returns true if another daemon owns everything.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Records that another daemon owns everything from now on. After that, status reports of cards in this process are
    /// meaningless.
    fn lets_go(&self) {
        self.gone.store(true, Ordering::Release);
    }

    /// Lets this daemon end.
    fn leave(&self) {
        self.left.notify_one();
    }

    /// Waits until this daemon may end.
    pub(crate) async fn left(&self) {
        self.left.notified().await;
    }

    /// Records that an upgrade failed and this daemon continues.
    fn has_failed(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of failed upgrades in this daemon.
    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Returns the upgrade in which this daemon took over; `None` in the first daemon.
    pub(crate) fn last(&self) -> Option<handover::Takeover> {
        self.last.get().copied()
    }
}

/// Returns the parts of the state that this program reads and writes.
fn known() -> Vec<Known> {
    let mut known = SavedHost::known();
    known.extend(SavedSide::known());
    known.extend([GoingCard::known(), Known::for_part::<SavedClients>(), Known::for_part::<Roster>()]);
    known.push(Known::for_part::<EventsPart>());
    known.extend([Known::for_part::<CudaPart>(), Known::for_part::<SavedFunction>()]);
    known
}

/// Returns the parts to write for a daemon that can read `reads`, in the newest versions that both daemons support.
fn written_for(mut reads: Vec<Known>) -> Vec<Known> {
    let known = known();
    for part in &mut reads {
        let own = known.iter().find(|known| known.name == part.name).map_or(part.version, |known| known.version);
        part.version = part.version.min(own);
    }
    reads
}

/// Returns the host's monotonic clock, which is the same for all processes, in ns.
fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

/// The log of events. Daemons of earlier versions ignore this part.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct EventsPart(pub events::SavedLog);

saved_state::first_version!(EventsPart, "events");
