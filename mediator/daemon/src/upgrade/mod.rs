//! One daemon goes on with the cards, virtual machines and sockets of another one, in the middle of their work.
//!
//! The running daemon starts the next program with one end of a socket as its standard input, and gives it what it has by the
//! crate `handover` ([decision 069](../../../../docs/decisions/069-from-one-process-to-the-next.md)): `giver` is its side,
//! `taker` the next one's. Until the next daemon has said that it has made everything of what it was given, the first goes on when
//! anything fails. `roster` is what goes over beside what a card and its virtual machines write down themselves; at `points` tests
//! have one of the two die.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use owner::SavedHost;
use physical::GoingCard;
use rustix::time::{ClockId, clock_gettime};
use saved_state::Known;
use tokio::sync::Notify;
use vgpu::SavedSide;
use vmm_glue::SavedClients;

mod giver;
pub(crate) mod points;
mod roster;
pub(crate) mod taker;

use roster::Roster;

/// Time for which the next program may take to say who it is, and to read its configuration: nothing waits for it.
// TIMEOUT: a host that is busy starts a program in seconds.
const MEET_LIMIT: Duration = Duration::from_secs(20);
/// Time for which virtual machines may wait until the next daemon has made everything of what it was given, or the upgrade is refused.
// TIMEOUT: QEMU gives up a request that was not answered for 5 s.
const PAUSE_LIMIT: Duration = Duration::from_secs(4);
/// Time for which a channel may take to leave its engine; one that has not is treated as one that hangs.
const STILL_LIMIT: Duration = Duration::from_secs(1);
/// Time for which the next daemon waits for what it is given, and for the word that it is its own. The other one has shorter limits,
/// and its end is noticed at once: should it only be held up, everything is nobody's without this one.
// TIMEOUT: longer than anybody waits.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Begins the names of descriptors that go over: listening sockets by their names in the service manager's store.
const SOCKET: &str = "socket:";
/// The same of sockets of the service manager's units.
const UNIT: &str = "unit:";
/// A card's memory.
const VRAM: &str = "vram:";
/// Host memory for a card's chunks.
const HOST_MEMORY: &str = "host-memory:";
/// Memory under the apertures of a VM, which its VMM maps.
const APERTURES: &str = "apertures:";
/// Descriptors of a virtual machine's clients.
const CLIENTS: &str = "clients:";
/// The lock of the state folder.
const STATE_LOCK: &str = "state-lock";

/// Means by which this daemon starts the next one.
#[derive(Debug)]
pub(crate) struct Succession {
    /// The program of this daemon; after an upgrade of the package, the next version's.
    pub program: PathBuf,
    /// The configuration file.
    pub config: PathBuf,
    /// The admin socket, and the read-only one, as they are served here.
    pub admin: Vec<(&'static str, UnixListener)>,
}

/// State of a daemon between the one before and the one behind it.
#[derive(Debug, Default)]
pub(crate) struct Line {
    succession: OnceLock<Succession>,
    /// Everything is another daemon's.
    gone: AtomicBool,
    /// Rung when it is.
    left: Notify,
    /// Pause of the last takeover, in this process.
    last: OnceLock<(Duration, u64)>,
    /// Upgrades in which this process has gone on itself.
    failures: AtomicU64,
}

impl Line {
    /// Sets how the next daemon is started.
    pub(crate) fn continues_by(&self, succession: Succession) {
        let _already = self.succession.set(succession);
    }

    /// Returns whether everything is another daemon's.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// From now on all is another daemon's: what cards say of themselves here means nothing.
    fn lets_go(&self) {
        self.gone.store(true, Ordering::Release);
    }

    /// This daemon may end.
    fn leave(&self) {
        self.left.notify_one();
    }

    /// Waits until everything is another daemon's.
    pub(crate) async fn left(&self) {
        self.left.notified().await;
    }

    /// Notes that this daemon goes on, though another was to.
    fn has_failed(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }

    /// Upgrades in which this daemon has gone on itself.
    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Pause of the last upgrade, and the upgrades since the first daemon; none if this is the first.
    pub(crate) fn last(&self) -> Option<(Duration, u64)> {
        self.last.get().copied()
    }
}

/// The parts that are read and written here.
fn known() -> Vec<Known> {
    let mut known = SavedHost::known();
    known.extend(SavedSide::known());
    known.extend([GoingCard::known(), Known::of::<SavedClients>(), Known::of::<Roster>()]);
    points::spoken(known)
}

/// The parts that are written for a reader of `reads`: none is newer than this program or that one knows it.
fn written_for(mut reads: Vec<Known>) -> Vec<Known> {
    let known = known();
    for part in &mut reads {
        let own = known.iter().find(|known| known.name == part.name).map_or(part.version, |known| known.version);
        part.version = part.version.min(own);
    }
    reads
}

/// Time of the host's monotonic clock, which is the same for all processes, in ns.
fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}
