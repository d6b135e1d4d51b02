//! The thread that supervises a group's daemon.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::control::{Control, ControlError, MpsConfig, ServerState};

/// Maximum interval between polls of the clients.
// TIMEOUT: the accounts remove an exited client long before this.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// First poll interval after [`GroupServer::poll_soon`]. The interval doubles until it reaches [`POLL_INTERVAL`].
// TIMEOUT: a program takes longer to start, and each poll starts three processes.
const SOON: Duration = Duration::from_millis(50);
/// Delay before an exited daemon is restarted. The delay doubles with each consecutive failure, up to
/// [`MAX_RETRY_DELAY`].
const MIN_RETRY_DELAY: Duration = Duration::from_millis(200);
/// Maximum delay before an exited daemon is restarted.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(30);
/// Uptime after which the exit of a daemon no longer counts as a consecutive failure.
const MIN_STABLE_UPTIME: Duration = Duration::from_secs(60);
/// Number of consecutive polls without a reply after which a daemon is killed.
const MAX_UNANSWERED: u32 = 3;

/// A change in the state of a group's daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// The daemon is running. Programs that start from now on become its clients.
    Serves {
        /// Set if the daemon was restarted.
        again: bool,
    },
    /// No daemon is running. The supervisor will retry.
    Unavailable {
        /// Human-readable reason.
        why: String,
    },
    /// Complete list of the servers, and of the clients of the servers without a fault.
    Clients {
        /// Process IDs of the servers.
        servers: BTreeSet<u32>,
        /// Process IDs of the clients.
        clients: BTreeSet<u32>,
    },
    /// These clients have lost their contexts. Their processes may still be running.
    Lost {
        /// Process IDs of the clients.
        clients: BTreeSet<u32>,
        /// Human-readable reason.
        why: String,
    },
    /// The daemon was retired, because no group needed it and it had no clients.
    Retired,
}

enum Order {
    Poll,
    /// Sets whether a group needs the daemon.
    Need(bool),
    /// Process ID of a client whose work must end.
    Terminate(u32),
    Leave,
}

/// The supervisor of one group's daemon. When the supervisor is dropped, the daemon keeps running for the next owner
/// of the card if it has clients, and is shut down otherwise.
#[derive(Debug)]
pub struct GroupServer {
    orders: Sender<Order>,
    /// Set while a poll order is in the channel. Clients trigger these orders, and must not be able to fill the
    /// channel.
    polls: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl GroupServer {
    /// Takes over the daemon of an earlier owner. If none exists and a group needs one (`needed`), starts a daemon.
    /// Passes changes to `report`.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be created.
    pub fn start(config: MpsConfig, needed: bool, report: impl Fn(Report) + Send + 'static) -> io::Result<Self> {
        let (orders, received) = channel();
        let polls: Arc<AtomicBool> = Arc::default();
        let worker = Worker {
            config,
            polls: Arc::clone(&polls),
            report: Box::new(report),
            control: None,
            needed,
            unanswered: 0,
            reports_all: false,
            failures: 0,
            retry_at: Instant::now(),
            since: Instant::now(),
            has_served: false,
            servers: Servers::default(),
            trouble: String::new(),
            interval: SOON,
        };
        let thread = std::thread::Builder::new().name("mps".to_owned()).spawn(move || worker.run(&received))?;
        Ok(Self { orders, polls, thread: Some(thread) })
    }

    /// Polls the clients soon, and repeatedly for a while, because a program may have become a client.
    pub fn poll_soon(&self) {
        if !self.polls.swap(true, Ordering::SeqCst) {
            // The thread exits only after it has reported that the daemon was retired.
            let _ = self.orders.send(Order::Poll);
        }
    }

    /// Terminates a client's work before the client is killed. Otherwise, if the client has work on the card, the kill
    /// also terminates all other clients of the server. Ignores processes that are not clients.
    pub fn terminate(&self, pid: u32) {
        let _ = self.orders.send(Order::Terminate(pid));
    }

    /// Sets whether a group needs the daemon. A daemon that is no longer needed serves its clients until they exit.
    pub fn set_needed(&self, needed: bool) {
        let _ = self.orders.send(Order::Need(needed));
    }
}

impl Drop for GroupServer {
    fn drop(&mut self) {
        let _ = self.orders.send(Order::Leave);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

type Servers = std::collections::BTreeMap<u32, ServerState>;

struct Worker {
    config: MpsConfig,
    polls: Arc<AtomicBool>,
    report: Box<dyn Fn(Report) + Send>,
    control: Option<Control>,
    needed: bool,
    /// Number of consecutive polls without a reply.
    unanswered: u32,
    /// Set if the next list of clients must be reported even if it has not changed.
    reports_all: bool,
    /// Number of consecutive failures of the daemon.
    failures: u32,
    retry_at: Instant,
    since: Instant,
    has_served: bool,
    /// State of the servers at the last poll.
    servers: Servers,
    /// Last reported reason why no daemon is running.
    trouble: String,
    /// Time until the next poll.
    interval: Duration,
}

impl Worker {
    fn run(mut self, orders: &Receiver<Order>) {
        loop {
            self.look();
            if !self.needed && self.clients().is_empty() {
                if let Some(control) = self.control.take() {
                    control.quit();
                }
                return (self.report)(Report::Retired);
            }
            let wait = match &self.control {
                Some(_) => self.interval,
                None => self.retry_at.saturating_duration_since(Instant::now()),
            };
            self.interval = (self.interval * 2).min(POLL_INTERVAL);
            match orders.recv_timeout(wait) {
                Ok(Order::Poll) => {
                    self.reports_all = true;
                    self.interval = self.interval.min(SOON);
                    // Limit the rate of polls that are caused by orders.
                    std::thread::sleep(SOON / 2);
                    self.polls.store(false, Ordering::SeqCst);
                }
                Ok(Order::Need(needed)) => {
                    self.needed = needed;
                    if needed && self.control.is_some() {
                        // The start of the daemon may have been reported before the group existed.
                        (self.report)(Report::Serves { again: false });
                        self.reports_all = true;
                    }
                }
                Ok(Order::Terminate(pid)) => self.terminate(pid),
                Err(RecvTimeoutError::Timeout) => {}
                Ok(Order::Leave) | Err(RecvTimeoutError::Disconnected) => return self.leave(),
            }
        }
    }

    fn terminate(&self, pid: u32) {
        let Some(control) = &self.control else { return };
        for (&server, _) in self.servers.iter().filter(|(_, server)| server.clients.contains(&pid)) {
            if let Err(error) = control.terminate(server, pid) {
                tracing::warn!(pid, %error, "the work of an MPS client was not ended before its kill");
            }
        }
    }

    fn clients(&self) -> BTreeSet<u32> {
        self.servers.values().flat_map(|server| server.clients.iter().copied()).collect()
    }

    /// Starts the daemon if it is not running and the retry delay has passed, and polls it.
    fn look(&mut self) {
        if self.control.is_none() && Instant::now() >= self.retry_at {
            self.open();
        }
        let Some(control) = &mut self.control else { return };
        if let Some(why) = control.ended() {
            return self.end(&format!("the MPS control daemon of the group exited: {why}"), Control::bury);
        }
        match control.servers() {
            Ok(servers) => {
                self.unanswered = 0;
                self.compare(servers);
            }
            // The host cannot start processes at present. This does not indicate a problem with the daemon.
            Err(error @ ControlError::Start { .. }) => tracing::warn!(%error, "MPS clients cannot be polled"),
            Err(_) if self.unanswered + 1 < MAX_UNANSWERED => self.unanswered += 1,
            Err(error) => self.end(&format!("{error}; killing it"), Control::kill),
        }
    }

    fn open(&mut self) {
        if !self.needed {
            self.control = Control::find(&self.config);
            self.has_served = self.control.is_some();
            return;
        }
        let opened = Control::open(&self.config).and_then(|(control, is_new)| {
            if is_new && let Err(error) = control.start_server() {
                control.kill();
                return Err(error);
            }
            Ok(control)
        });
        match opened {
            Ok(control) => {
                (self.control, self.since, self.unanswered) = (Some(control), Instant::now(), 0);
                self.trouble.clear();
                (self.report)(Report::Serves { again: std::mem::replace(&mut self.has_served, true) });
                self.interval = SOON;
            }
            Err(error) => {
                let is_known = self.trouble == error.to_string();
                self.trouble = error.to_string();
                self.delay();
                if matches!(error, ControlError::Missing(_)) {
                    self.retry_at = Instant::now() + MAX_RETRY_DELAY;
                }
                if !is_known {
                    (self.report)(Report::Unavailable { why: self.trouble.clone() });
                }
            }
        }
    }

    /// Schedules the next start.
    fn delay(&mut self) {
        let delay = MIN_RETRY_DELAY.saturating_mul(2u32.saturating_pow(self.failures)).min(MAX_RETRY_DELAY);
        self.failures = self.failures.saturating_add(1);
        self.retry_at = Instant::now() + delay;
    }

    /// Calls `dispose` for the daemon, reports the loss of its clients, and schedules a restart.
    fn end(&mut self, why: &str, dispose: impl FnOnce(Control)) {
        if let Some(control) = self.control.take() {
            dispose(control);
        }
        if self.since.elapsed() > MIN_STABLE_UPTIME {
            self.failures = 0;
        }
        let clients = self.clients();
        self.servers.clear();
        self.delay();
        self.lost(clients, why);
        (self.report)(Report::Unavailable { why: format!("{why}; it will be restarted") });
    }

    fn lost(&self, clients: BTreeSet<u32>, why: &str) {
        if !clients.is_empty() {
            (self.report)(Report::Lost { clients, why: why.to_owned() });
        }
    }

    /// Reports the changes since the last poll. If a server has exited, starts a new one.
    fn compare(&mut self, servers: Servers) {
        let before = std::mem::replace(&mut self.servers, servers);
        for (pid, old) in &before {
            let clients = || old.clients.iter().copied().collect();
            match self.servers.get(pid) {
                None => self.lost(clients(), &format!("the MPS server of the group, process {pid}, exited")),
                Some(new) if new.faulty && !old.faulty => {
                    self.lost(
                        clients(),
                        "a program of the group caused a fault, which terminates all clients of its MPS server",
                    );
                }
                Some(_) => {}
            }
        }
        if before.keys().any(|pid| !self.servers.contains_key(pid))
            && let Some(Err(error)) = self.control.as_ref().map(Control::start_server)
        {
            tracing::warn!(%error, "the MPS server of a group was not restarted; the next client starts it");
        }
        let of = |servers: &Servers| -> BTreeSet<u32> {
            // After a fault, the clients of a server have lost their contexts.
            let healthy = servers.values().filter(|server| !server.faulty);
            healthy.flat_map(|server| server.clients.iter().copied()).collect()
        };
        let reports_all = std::mem::take(&mut self.reports_all);
        if reports_all || before.keys().ne(self.servers.keys()) || of(&before) != of(&self.servers) {
            let servers = self.servers.keys().copied().collect();
            (self.report)(Report::Clients { servers, clients: of(&self.servers) });
        }
    }

    /// Shuts down the daemon if it has no clients, or kills it if it does not reply. Otherwise, the daemon keeps
    /// running for the next owner.
    fn leave(mut self) {
        let Some(control) = self.control.take() else { return };
        match control.servers() {
            Ok(servers) if servers.values().any(|server| !server.clients.is_empty()) => {
                tracing::info!("the MPS control daemon of a group has clients, and keeps running for the next owner");
            }
            Ok(_) => control.quit(),
            Err(_) => control.kill(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::PathBuf;

    use super::*;
    use crate::pipe_folder;

    /// Script that replaces NVIDIA's program. The test writes the servers, clients and state to files.
    const PROGRAM: &str = r#"#!/bin/sh
cd "$CUDA_MPS_PIPE_DIRECTORY" || exit 1
if [ "$1" = -f ]; then echo $$ > control; exec sleep 1000; fi
read -r command rest
kill -0 "$(cat control)" || exit 1
case $command in
    get_server_list) cat servers ;;
    start_server) echo 77 > servers; echo ACTIVE > status; : > clients ;;
    get_client_list) cat clients ;;
    get_server_status) cat status ;;
    terminate_client) echo "$rest" >> terminated ;;
    quit) kill "$(cat control)" ;;
esac
exit 0
"#;
    // TIMEOUT: only a failing test waits this long.
    const LONG: Duration = Duration::from_secs(60);

    struct Rig {
        folder: tempfile::TempDir,
        server: GroupServer,
        reports: Receiver<Report>,
    }

    fn config(folder: &tempfile::TempDir) -> MpsConfig {
        let program = folder.path().join("program");
        if !program.exists() {
            fs::write(&program, PROGRAM).expect("written");
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("set");
        }
        MpsConfig { program, folder: folder.path().join("g"), card: String::new(), user: None }
    }

    impl Rig {
        fn new(folder: tempfile::TempDir, needed: bool) -> Self {
            let (sender, reports) = channel();
            let report = move |report| sender.send(report).unwrap_or_default();
            let server = GroupServer::start(config(&folder), needed, report).expect("starts");
            Self { folder, server, reports }
        }

        fn file(&self, name: &str) -> PathBuf {
            pipe_folder(&self.folder.path().join("g")).join(name)
        }

        fn write(&self, name: &str, text: &str) {
            fs::write(self.file(name), text).expect("written");
        }

        fn pid(&self) -> String {
            fs::read_to_string(self.file("control")).expect("it runs").trim().to_owned()
        }

        /// Returns the next report accepted by `wanted`.
        fn await_report(&self, wanted: impl Fn(&Report) -> bool) -> Report {
            loop {
                let report = self.reports.recv_timeout(LONG).expect("the report comes");
                if wanted(&report) {
                    return report;
                }
            }
        }

        /// Waits until exactly the `wanted` clients are reported.
        fn await_clients(&self, wanted: &[u32]) {
            let wanted = wanted.iter().copied().collect();
            self.await_report(|report| matches!(report, Report::Clients { clients, .. } if *clients == wanted));
        }

        /// Starts a daemon with a server that has the given clients.
        fn with_clients(clients: &str) -> Self {
            let rig = Self::new(tempfile::tempdir().expect("a folder"), true);
            assert_eq!(rig.await_report(|_| true), Report::Serves { again: false });
            rig.write("status", "ACTIVE");
            rig.write("clients", clients);
            rig.write("servers", "77");
            rig.server.poll_soon();
            rig
        }
    }

    fn runs(pid: &str) -> bool {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with('Z'))
    }

    fn kill(pid: &str) {
        let pid = pid.parse().ok().and_then(rustix::process::Pid::from_raw).expect("a number");
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it runs");
    }

    #[test]
    fn killed_daemon_is_started_again_and_its_clients_are_reported() {
        let rig = Rig::with_clients("5\n6\n");
        rig.await_clients(&[5, 6]);
        kill(&rig.pid());
        let lost = rig.await_report(|report| matches!(report, Report::Lost { .. }));
        let Report::Lost { clients, why } = lost else { return };
        assert_eq!(clients, BTreeSet::from([5, 6]));
        assert!(why.contains("SIGKILL"), "{why}");
        rig.await_report(|report| *report == Report::Serves { again: true });
    }

    #[test]
    fn lost_server_and_fault_are_reported_with_their_clients() {
        let rig = Rig::with_clients("5\n");
        rig.await_clients(&[5]);
        rig.write("status", "FAULT");
        let report = rig.await_report(|report| matches!(report, Report::Lost { .. }));
        assert!(matches!(&report, Report::Lost { why, .. } if why.contains("caused a fault")), "{report:?}");
        rig.write("status", "ACTIVE");
        rig.await_clients(&[5]);
        rig.write("servers", "");
        let report = rig.await_report(|report| matches!(report, Report::Lost { .. }));
        assert!(matches!(&report, Report::Lost { why, .. } if why.contains("process 77, exited")), "{report:?}");
    }

    #[test]
    fn daemon_with_clients_is_taken_over_and_retired_without_them() {
        let rig = Rig::with_clients("5\n");
        rig.await_clients(&[5]);
        let pid = rig.pid();
        let Rig { folder, server, .. } = rig;
        drop(server);
        assert!(runs(&pid), "it has a client");
        let next = Rig::new(folder, false);
        next.await_clients(&[5]);
        assert_eq!(next.pid(), pid, "it is the same daemon");
        next.write("clients", "");
        next.await_report(|report| *report == Report::Retired);
        assert!(!runs(&pid) && !next.file("").exists(), "no files are left");
    }

    #[test]
    fn work_of_clients_ends_and_of_other_processes_does_not() {
        let rig = Rig::with_clients("5\n6\n");
        rig.await_clients(&[5, 6]);
        rig.server.terminate(4);
        rig.server.terminate(6);
        let begin = Instant::now();
        while !rig.file("terminated").exists() {
            assert!(begin.elapsed() < LONG, "no command came");
            std::thread::sleep(Duration::from_millis(5));
        }
        rig.write("clients", "5\n");
        rig.server.poll_soon();
        rig.await_clients(&[5]);
        assert_eq!(fs::read_to_string(rig.file("terminated")).expect("read"), "77 6\n");
    }

    #[test]
    fn daemon_without_clients_ends_with_its_owner() {
        let rig = Rig::with_clients("");
        let pid = rig.pid();
        drop(rig.server);
        assert!(!runs(&pid));
    }
}
