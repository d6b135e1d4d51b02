//! Manages the process of a CUDA card's owner: starts it, communicates with it, and restarts it when it exits.
//!
//! [`Supervisor`] runs on a thread of its caller and receives [`Command`]s. `incidents` reports the owner's actions on
//! tenants in the log and as events.
//!
//! Modules: `handle` (the process and its pipes), and `handed_over` (upgrades in which the next daemon takes over the
//! process).
//!
//! The crate does not decide which tenants exist, and does not keep their settings across daemon restarts.

mod handed_over;
mod handle;
mod incidents;

pub use handed_over::{HandedOver, HandingOver, SavedOwner};

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use api::EventKind;
use cuda_control::{Answer, Request, Settings, Tenant};
use cuda_status::StatusCell;
use events::{Log, NewEvent};
use handle::{Handle, Process};
use listening::folders;

/// Time limit for an owner's response.
// TIMEOUT: a working owner responds immediately; an unresponsive one is stuck in the driver.
const ANSWER: Duration = Duration::from_secs(10);
/// Time limit for providing a guarantee by evicting other tenants' memory.
// TIMEOUT: programs quiesce within 2 s each, and 60 GiB can be moved in this time.
pub const GUARANTEE_TIMEOUT: Duration = Duration::from_secs(6);
/// Interval between attempts to provide a guarantee that needs evictions.
pub const GUARANTEE_RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Name of the owner program.
const PROGRAM: &str = "cuda-owner";
/// Folder where the package installs the program.
const INSTALLED: &str = "/usr/lib/gpu-mediator";
/// Interval at which the process is checked and queried for a description of the card. This also detects a hung
/// process.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Delay before an exited owner is restarted. The delay doubles each time the owner exits shortly after its start, up
/// to [`DELAY_MOST`].
const MIN_RESTART_DELAY: Duration = Duration::from_millis(100);
/// Maximum delay before a restart.
const DELAY_MOST: Duration = Duration::from_secs(30);
/// Uptime after which an exit no longer doubles the delay.
const MIN_STABLE_UPTIME: Duration = Duration::from_secs(60);
/// Time limit for the driver to open the card.
// TIMEOUT: the driver's initialization takes up to several seconds on a host with many cards.
const OPEN: Duration = Duration::from_secs(60);
/// Time limit for a killed process to exit when the daemon exits too.
// TIMEOUT: a process stuck in the driver exits only when the driver returns, and the daemon does not wait for that.
const KILLED: Duration = Duration::from_secs(2);
/// Time limit for an owner to stop its MPS servers and exit when the daemon exits.
// TIMEOUT: servers without clients exit within a fraction of a second.
const CLOSED: Duration = Duration::from_secs(2);

/// Time limit for a process to exit after it has closed its output.
// TIMEOUT: a killed or exiting process terminates within a few milliseconds.
const ENDS: Duration = Duration::from_millis(100);
/// Reason why a card has no owner after a reset.
const CARD_LOST: &str =
    "the card was reset or has failed: programs that used it have lost their memory and must be restarted";

/// A command to the thread of a [`Supervisor`].
pub enum Command {
    /// Sends a request to the owner. The error is the reason why the owner has not responded.
    Ask(Box<Request>, Sender<Result<Answer, String>>),
    /// Hands the owner over to another daemon. No message is sent to the owner until the handover has succeeded or
    /// failed.
    HandOver(HandingOver),
    /// Stops the owner.
    Stop,
}

/// Identifiers of a card according to the driver.
#[derive(Clone, Debug)]
pub struct CardIdentity {
    /// Model name of the card.
    pub model: String,
    /// UUID of the card in NVML's format.
    pub uuid: String,
    /// Number of NVLink connections to each other card of the host, keyed by the other card's UUID.
    pub links: BTreeMap<String, u32>,
}

/// The owner of a card, across restarts of its process.
pub struct Supervisor {
    card: String,
    settings: Settings,
    /// Configured tenants, sent to each new process.
    tenants: BTreeMap<String, Tenant>,
    process: Option<Process>,
    /// Set if the process runs an earlier version that does not support tenants with several cards.
    lacks_gangs: bool,
    /// NVLink connections that the last started process reported.
    links: BTreeMap<String, u32>,
    /// A killed process, which must exit before the next one is started.
    dying: Option<Handle>,
    /// Number of consecutive exits of the process shortly after its start.
    failures: u32,
    retry: Instant,
    looked: Instant,
    status_cell: Arc<StatusCell>,
    /// Set when callers no longer need responses.
    stop: Arc<AtomicBool>,
    events: Arc<Log>,
}

impl Supervisor {
    /// Creates the supervisor of a card, without a process. Events are added to the log `events`. Callers set `stop`
    /// when they no longer need responses.
    pub fn new(
        card: &str,
        settings: Settings,
        status_cell: &Arc<StatusCell>,
        (stop, events): (&Arc<AtomicBool>, &Arc<Log>),
    ) -> Self {
        let now = Instant::now();
        Self {
            card: card.to_owned(),
            settings,
            tenants: BTreeMap::new(),
            process: None,
            lacks_gangs: false,
            links: BTreeMap::new(),
            dying: None,
            failures: 0,
            retry: now,
            looked: now,
            status_cell: Arc::clone(status_cell),
            stop: Arc::clone(stop),
            events: Arc::clone(events),
        }
    }

    /// Starts a process and sends it the configured tenants. Returns the card's identity.
    ///
    /// # Errors
    /// Returns an error if the owner does not start, or if the driver does not open the card.
    pub fn start(&mut self) -> Result<CardIdentity, String> {
        let mut process = Process::spawn()?;
        let started = self.tell_all(&mut process);
        match &started {
            Err(_) => self.dying = Some(process.kill()),
            Ok(identity) => {
                (self.process, self.lacks_gangs) = (Some(process), false);
                self.links.clone_from(&identity.links);
                self.describe();
            }
        }
        started
    }

    /// Sends the settings and the tenants to a new process. Returns the card's identity.
    fn tell_all(&self, process: &mut Process) -> Result<CardIdentity, String> {
        let identity = match process.exchange(&self.settings, OPEN, &self.stop)? {
            Answer::Ready { name, uuid, links, .. } => CardIdentity { model: name, uuid, links },
            Answer::Failed(what) => return Err(what),
            other => return Err(format!("{PROGRAM} responded {other:?}: it has a different version")),
        };
        let socket_dir = self.settings.journal.parent().unwrap_or(Path::new("/"));
        for tenant in self.tenants.values() {
            // The folder may have been removed since the previous owner started.
            if let Err(error) = folders::make(&tenant.name, &tenant.socket, socket_dir) {
                tracing::error!(card = self.card, tenant = tenant.name, %error, "a tenant has no folder for its socket");
            }
            let begin = Instant::now();
            let answer = loop {
                let answer = process.exchange(&Request::Add(tenant.clone()), ANSWER, &self.stop)?;
                if !matches!(answer, Answer::Moving(_)) || begin.elapsed() >= GUARANTEE_TIMEOUT {
                    break answer;
                }
                // Reconnected programs of earlier tenants may use memory that is guaranteed to this tenant.
                std::thread::sleep(GUARANTEE_RETRY_INTERVAL);
            };
            if let Answer::Failed(what) | Answer::Moving(what) = answer {
                tracing::error!(card = self.card, tenant = tenant.name, what, "a tenant cannot be served");
            }
        }
        Ok(identity)
    }

    /// Serves requests until it receives a stop command or all senders are dropped.
    pub fn run(mut self, commands: &Receiver<Command>) {
        loop {
            match commands.recv_timeout(POLL_INTERVAL) {
                Ok(Command::Ask(request, reply)) => {
                    let answer = self.ask(&request);
                    // Readers must see a change once its response has been sent.
                    self.describe();
                    // The caller may have stopped waiting.
                    let _ = reply.send(answer);
                }
                Ok(Command::HandOver(handing_over)) => {
                    if self.hand_over(handing_over) {
                        return;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Ok(Command::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            }
            self.look();
        }
    }

    fn ask(&mut self, request: &Request) -> Result<Answer, String> {
        if self.lacks_gangs && matches!(request, Request::Add(tenant) if tenant.gang.is_some()) {
            let why = "the owner of its card was started by an earlier version and does not support tenants with several cards: \
                       restart the daemon without an upgrade";
            return Ok(Answer::Failed(why.to_owned()));
        }
        let answer = self.exchange(request)?;
        match (request, &answer) {
            (Request::Add(tenant) | Request::Change(tenant), Answer::Done) => record(&mut self.tenants, tenant),
            (Request::Remove { name, .. }, Answer::Done | Answer::Leaving(_)) => {
                self.tenants.remove(name);
            }
            // The next process listens on the tenant's socket from its start.
            (Request::Arrive { name, .. }, Answer::Done) => {
                self.tenants.get_mut(name).into_iter().for_each(|tenant| tenant.arrives = false);
            }
            (Request::Tune(rules), Answer::Done) => self.settings.rules = (**rules).clone(),
            _ => {}
        }
        Ok(answer)
    }

    /// Sends a request to the process. Kills a process that does not respond.
    fn exchange(&mut self, request: &Request) -> Result<Answer, String> {
        let process = self.process.as_mut().ok_or("it will be restarted shortly")?;
        self.status_cell.asks();
        let answer = process.exchange(request, ANSWER, &self.stop);
        self.status_cell.answered();
        if let Err(what) = &answer {
            self.end(what);
        }
        answer
    }

    /// Requests a description of the card from the process, and publishes it to all readers.
    fn describe(&mut self) {
        self.looked = Instant::now();
        if self.process.is_none() {
            return;
        }
        match self.exchange(&Request::View { since_ns: self.status_cell.since() }) {
            Ok(Answer::View(mut card)) => {
                incidents::report(&self.card, std::mem::take(&mut card.incidents), &self.events);
                self.status_cell.described(*card);
            }
            Ok(other) => self.end(&format!("{PROGRAM} responded {other:?}: it has a different version")),
            Err(_) => {}
        }
    }

    /// Checks the running process, or starts a new one once the delay has passed.
    fn look(&mut self) {
        if let Some(process) = &mut self.process
            && let Some(status) = process.handle.end()
        {
            self.end(&status);
        }
        if self.process.is_some() {
            if self.looked.elapsed() >= POLL_INTERVAL {
                self.describe();
            }
            return;
        }
        if Instant::now() < self.retry || self.dying.as_mut().is_some_and(|process| process.end().is_none()) {
            return;
        }
        self.dying = None;
        match self.start() {
            Ok(_) => {
                self.status_cell.restarted();
                tracing::warn!(card = self.card, "the owner of the CUDA card was restarted");
                let what = "the owner of the card was restarted";
                self.events.add(NewEvent::card(EventKind::OwnerStarted, &self.card, what));
            }
            Err(error) => self.failed(&error),
        }
    }

    /// Kills the process, which is restarted after a delay. The owner's programs keep their memory and connect to the
    /// next owner.
    fn end(&mut self, why: &str) {
        let Some(mut process) = self.process.take() else { return };
        let why = if process.has_lost_card() { CARD_LOST } else { why };
        // The programs of these tenants on other cards wait, but the event for this card does not name the tenants.
        for tenant in self.tenants.values().filter(|tenant| tenant.gang.is_some()) {
            let what = format!(
                "the owner of its card `{}` has exited, and it gets no turns on any card until the owner is restarted: {why}",
                self.card
            );
            tracing::warn!(card = self.card, tenant = tenant.name, "{what}");
            self.events.add(NewEvent::tenant(EventKind::OwnerLost, &tenant.name, what).on(&self.card));
        }
        if process.since.elapsed() > MIN_STABLE_UPTIME {
            self.failures = 0;
        }
        self.dying = Some(process.kill());
        self.failed(why);
    }

    fn failed(&mut self, why: &str) {
        self.status_cell.ended(why);
        let delay = (MIN_RESTART_DELAY * 2u32.saturating_pow(self.failures.min(16))).min(DELAY_MOST);
        self.failures += 1;
        self.retry = Instant::now() + delay;
        tracing::error!(card = self.card, why, again_in = ?delay, "the owner of the CUDA card exited");
        let what = format!("the owner of the card has exited, and will be restarted in {delay:?}: {why}");
        self.events.add(NewEvent::card(EventKind::OwnerLost, &self.card, what));
    }
}

impl Supervisor {
    /// Returns true if the owner may have MPS servers. On exit, the owner stops MPS servers without clients.
    fn has_groups(&self) -> bool {
        self.tenants.values().any(|tenant| tenant.share_group.is_some())
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        if self.has_groups()
            && let Some(process) = self.process.take()
        {
            let mut handle = process.close();
            let closed = Instant::now();
            while handle.end().is_none() && closed.elapsed() < CLOSED {
                std::thread::sleep(Duration::from_millis(5));
            }
            self.dying = Some(handle.killed());
        }
        let Some(mut child) = self.process.take().map(Process::kill).or(self.dying.take()) else { return };
        let killed = Instant::now();
        while child.end().is_none() && killed.elapsed() < KILLED {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Returns the path of the file `name` next to the daemon's executable if it exists, and otherwise the path of
/// `installed` in the package's folder.
#[must_use]
pub fn beside(name: &str, installed: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default().with_file_name(name);
    if own.exists() { own } else { Path::new(INSTALLED).join(installed) }
}

/// Records an added or changed tenant. A change does not affect the socket, because the programs know its path.
fn record(tenants: &mut BTreeMap<String, Tenant>, tenant: &Tenant) {
    let socket = tenants.get(&tenant.name).unwrap_or(tenant).socket.clone();
    tenants.insert(tenant.name.clone(), Tenant { socket, ..tenant.clone() });
}

#[cfg(test)]
mod tests {
    use cuda_control::{MemoryShare, TimeShare};

    use super::*;

    fn tenant(socket: &str, weight: u32) -> Tenant {
        let (on_full, class) = ("swap".to_owned(), "normal".to_owned());
        Tenant {
            name: "vm".to_owned(),
            memory_bytes: 1 << 20,
            window_bytes: 0,
            memory: MemoryShare { quota: None, guarantee: 0, swap_cap: None, weight: 100, on_full },
            time: TimeShare { weight, guarantee_permille: 0, cap_permille: 1000, class, max_run_ns: None },
            suspends: false,
            socket: socket.into(),
            mode: 0o600,
            uid: None,
            gid: None,
            share_group: None,
            sharing: Default::default(),
            gang: None,
            arrives: false,
        }
    }

    #[test]
    fn changed_tenant_keeps_the_socket_that_its_programs_know() {
        let mut tenants = BTreeMap::new();
        record(&mut tenants, &tenant("/run/cuda.sock", 100));
        record(&mut tenants, &tenant("/run/card.sock", 200));
        assert_eq!(tenants["vm"], tenant("/run/cuda.sock", 200));
        tenants.clear();
        record(&mut tenants, &tenant("/run/card.sock", 200));
        assert_eq!(tenants["vm"].socket, Path::new("/run/card.sock"));
    }
}
