//! Upgrades, in which a daemon takes over another daemon's cards, virtual machines and sockets while guests run.
//!
//! The running daemon starts the next program with one end of a socket pair as its standard input, and hands over its
//! state with the crate `handover` ([decision 128](../../../../docs/decisions/128-upgrades.md)). `sender` is the side
//! of the running daemon, and `receiver` is the side of the next daemon. `cuda` contains both sides for cards with an
//! owner process. If anything fails before the next daemon reports that it has rebuilt its state, the first daemon
//! resumes. `handover::Roster` contains the state that cards and virtual machines do not serialize themselves. At the
//! points in `handover::points`, tests kill one of the two daemons.

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
pub(crate) mod receiver;
mod sender;

use handover::{CudaPart, Roster};

/// Timeout for the next program to introduce itself and read its configuration. No VM waits during this time.
// TIMEOUT: a busy host starts a program within seconds.
const MEET_LIMIT: Duration = Duration::from_secs(20);
/// Time limit from the suspension of the virtual machines until the next daemon has rebuilt the state. When it expires,
/// the upgrade is cancelled.
// TIMEOUT: QEMU aborts a request without a response after 5 s.
const PAUSE_LIMIT: Duration = Duration::from_secs(4);
/// Timeout for a channel to leave its engine. When it expires, the channel is considered hung.
const STILL_LIMIT: Duration = Duration::from_secs(1);
/// Timeout for the next daemon to receive the state, and the message that transfers ownership. The other daemon has
/// shorter timeouts, and its exit is detected immediately. If the next daemon stopped waiting for a daemon that is
/// merely slow, no daemon would own the state.
// TIMEOUT: longer than any other wait.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(3600);

/// Name prefix of listening sockets' descriptors, which have the same names as in the service manager's store.
const SOCKET: &str = "socket:";
/// Name prefix of the descriptors of sockets from systemd units.
const UNIT: &str = "unit:";
/// Name prefix of the descriptor of a card's memory.
const VRAM: &str = "vram:";
/// Name prefix of the descriptor of the host memory for a card's chunks.
const HOST_MEMORY: &str = "host-memory:";
/// Name prefix of the descriptor of the memory behind a VM's apertures, which its VMM maps.
const APERTURES: &str = "apertures:";
/// Name prefix of the descriptors of a virtual machine's clients.
const CLIENTS: &str = "clients:";
/// Name prefix of the descriptors of a CUDA card's owner: its pipes, and its process descriptor.
const OWNER: &str = "owner:";
/// Name prefix of the descriptors of a VM's CUDA function: its window, and its workers' links.
const FUNCTION: &str = "function:";
/// Name of the state directory's lock.
const STATE_LOCK: &str = "state-lock";

/// Parameters for starting the next daemon.
#[derive(Debug)]
pub(crate) struct UpgradeChain {
    /// Path of this daemon's executable, which is the next version after a package upgrade.
    pub program: PathBuf,
    /// Path of the configuration file.
    pub config: PathBuf,
    /// Admin socket and read-only socket with their names in the store, if this daemon created them.
    pub admin: Vec<(&'static str, UnixListener)>,
}

/// A daemon's relation to its predecessor and its successor.
#[derive(Debug, Default)]
pub(crate) struct Generations {
    succession: OnceLock<UpgradeChain>,
    /// True if another daemon owns the state.
    gone: AtomicBool,
    /// Notified when this daemon may exit.
    left: Notify,
    /// The upgrade in which this daemon took over.
    last: OnceLock<handover::Takeover>,
    /// Number of failed upgrades of this daemon.
    failures: AtomicU64,
}

impl Generations {
    /// Sets the parameters for starting the next daemon.
    pub(crate) fn continues_by(&self, succession: UpgradeChain) {
        let _already = self.succession.set(succession);
    }

    /// Returns true if another daemon owns the state.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Records that another daemon owns the state from now on, so that this process's card status is ignored.
    fn lets_go(&self) {
        self.gone.store(true, Ordering::Release);
    }

    /// Permits this daemon to exit.
    fn leave(&self) {
        self.left.notify_one();
    }

    /// Waits until this daemon may exit.
    pub(crate) async fn left(&self) {
        self.left.notified().await;
    }

    /// Records a failed upgrade, after which this daemon continues.
    fn has_failed(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of failed upgrades of this daemon.
    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Returns the upgrade in which this daemon took over, or `None` for the first daemon.
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

/// Returns the parts to write for a daemon that supports `reads`, each in the newest version that both daemons support.
fn written_for(mut reads: Vec<Known>) -> Vec<Known> {
    let known = known();
    for part in &mut reads {
        let own = known.iter().find(|known| known.name == part.name).map_or(part.version, |known| known.version);
        part.version = part.version.min(own);
    }
    reads
}

/// Returns the host's monotonic clock in ns, which is the same for all processes.
fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

/// The event log, as a part of the state. Earlier versions of the daemon ignore this part.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct EventsPart(pub events::SavedLog);

saved_state::first_version!(EventsPart, "events");
