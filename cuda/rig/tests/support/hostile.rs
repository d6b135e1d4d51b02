//! Runs hostile programs next to an honest neighbour under the real owner, as separate processes.
//!
//! A test starts the owner ([`super::owner`]) and a [`Neighbour`] of tenant `b`, and then a hostile program of tenant
//! `a`: a [`Raw`] client, which can send any message to the owner, or a CUDA program. The test compares the neighbour's
//! reports and the owner's accounts during the attack with those of a control in the same run.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use cuda_protocol::{ChunkId, FromOwner, FromTenant, Hello, VERSION};
pub use cuda_rig::neighbour::Report;
#[allow(unused_imports, reason = "each test file uses a part of it")]
pub use cuda_rig::raw::{Answer, Command, Manner, Reply, Through};
use serde_json::Value;

use super::{PROGRAM, Program, Rig};

/// A tenant's honest program. It keeps the card busy, holds memory, and requests more memory every 20 ms.
pub struct Neighbour {
    pub program: Program,
    log: PathBuf,
    works: bool,
}

impl Neighbour {
    /// Starts the program and waits until it submits work. It allocates 8 MiB unless `arguments` change this.
    pub fn start(rig: &Rig, tenant: &str, arguments: &[&str]) -> Self {
        let mut neighbour = Self::begin(rig, tenant, arguments);
        neighbour.works();
        neighbour
    }

    /// Starts the program without waiting for it.
    pub fn begin(rig: &Rig, tenant: &str, arguments: &[&str]) -> Self {
        let log = rig.folder.path().join(format!("neighbour-{tenant}.log"));
        let mut command = rig.command(PROGRAM, "shim");
        command.env(cuda_protocol::SOCKET_VARIABLE, rig.socket()).env(cuda_protocol::TENANT_VARIABLE, tenant);
        command.stderr(Stdio::from(std::fs::File::create(&log).expect("a file")));
        command.arg("neighbour").args(arguments);
        Self { program: Program::start(&mut command), log, works: false }
    }

    /// Waits until the program submits work.
    pub fn works(&mut self) {
        if !std::mem::replace(&mut self.works, true) {
            assert_eq!(self.program.line(), "works", "{}", self.log());
        }
    }

    /// Returns the program's progress since its last report.
    pub fn report(&mut self) -> Report {
        self.program.say("report");
        let line = self.program.line();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}; {}", self.log()))
    }

    /// Returns the program's progress during the next `time`.
    pub fn during(&mut self, time: Duration) -> Report {
        self.report();
        std::thread::sleep(time);
        self.report()
    }

    /// Returns true if the program's connection was ever lost or refused.
    pub fn lost_connection(&self) -> bool {
        ["connection to the owner ended", "owner refuses", "owner cannot be reached"]
            .iter()
            .any(|end| self.log().contains(end))
    }

    /// Returns the log messages of the program's library.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Ends the program. Fails if it has lost its connection or its memory contents.
    pub fn end(self) {
        assert!(!self.lost_connection(), "the neighbour lost its connection: {}", self.log());
        assert_eq!(self.program.end(), "worked");
    }
}

/// Minimum fraction of its share that a neighbour must keep during an attack.
const MIN_SHARE_KEPT: f64 = 0.96;
/// Minimum duration of each round.
const MIN_ROUND_TIME: Duration = Duration::from_millis(250);
/// Minimum and maximum number of rounds of each kind. On a busy host, single rounds differ by more than
/// [`MIN_SHARE_KEPT`] permits.
const ROUND_LIMITS: std::ops::RangeInclusive<u32> = 2..=16;

/// The neighbour's progress in several rounds, with the time that the owner charged to it and the elapsed time on the
/// owner's clock, both in ns.
#[derive(Debug, Default)]
struct Gains {
    report: Report,
    charged: u64,
    time: u64,
}

impl Gains {
    fn turns(&self) -> f64 {
        self.charged as f64 / self.time.max(1) as f64
    }

    fn card(&self) -> f64 {
        self.report.card_us as f64 / (self.report.ms * 1e3)
    }

    /// Returns the fraction of late replies. Each request counts as two replies, because a memory query precedes it.
    fn late(&self) -> f64 {
        self.report.late as f64 / (2.0 * self.report.requests.max(1) as f64)
    }

    /// Compares the neighbour's progress during an attack with the control. Returns the reason if it is insufficient.
    fn fault(&self, control: &Self) -> Option<String> {
        let turns = (self.turns(), control.turns());
        let card = (self.card(), control.card());
        if turns.0 < MIN_SHARE_KEPT * turns.1 {
            return Some(format!(
                "the neighbour has the turn for {:.3} of the time instead of {:.3}",
                turns.0, turns.1
            ));
        }
        // An attack also uses CPU time, which the owner does not schedule, so the neighbour may submit less on a busy
        // host.
        if card.0 < card.1 / 2.0 {
            return Some(format!("the neighbour has {:.3} of the card instead of {:.3}", card.0, card.1));
        }
        if self.report.requests == 0 || self.report.refused > 0 {
            return Some("its requests for memory are refused, or not made".to_owned());
        }
        // On a busy host, one more reply in fifty may be late.
        let late = self.report.late > 0 && self.late() > control.late() + 0.02;
        late.then(|| "replies take longer than 100 ms".to_owned())
    }
}

/// Returns the time charged to tenant `b`, and the time of the owner's clock, in ns.
fn charged(serving: &mut Program) -> (u64, u64) {
    let view = accounts(serving);
    (account(&view, 1, "charged_ns"), view["clock_ns"].as_u64().expect("a number"))
}

/// Fails unless the neighbour keeps 96 % of the turn time that it gets next to a well-behaved tenant, works during its
/// turns, gets all requested memory, and gets its replies within 100 ms. Each call of `behaves` and `attacks` is one
/// round. The rounds alternate, so that other work on the host affects both. The owner must have the option
/// [`NEVER_IDLE`].
pub fn assert_keeps(
    serving: &mut Program,
    neighbour: &mut Neighbour,
    mut behaves: impl FnMut(),
    mut attacks: impl FnMut(),
) {
    neighbour.works();
    let (mut control, mut attacked) = (Gains::default(), Gains::default());
    for round in 1..=*ROUND_LIMITS.end() {
        for (gains, acts) in
            [(&mut control, &mut behaves as &mut dyn FnMut()), (&mut attacked, &mut attacks as &mut dyn FnMut())]
        {
            neighbour.report();
            let (before, begin) = (charged(serving), std::time::Instant::now());
            acts();
            std::thread::sleep(MIN_ROUND_TIME.saturating_sub(begin.elapsed()));
            let after = charged(serving);
            gains.report.add(&neighbour.report());
            gains.charged += after.0 - before.0;
            gains.time += after.1 - before.1;
        }
        match attacked.fault(&control) {
            None if round >= *ROUND_LIMITS.start() => return,
            None => {}
            Some(fault) => assert!(round < *ROUND_LIMITS.end(), "{fault}: {control:?}, attacked {attacked:?}"),
        }
    }
}

/// Fails unless tenant `b` gets 96 % of its entitled turn time, which is `entitled_permille` thousandths of the elapsed
/// time. Used after an attack, or for an attack without rounds. Also checks that the neighbour works, that its requests
/// are granted within 100 ms, and that its connection stays open.
///
/// The check compares the owner's charges with the owner's clock, so a host that delays the neighbour's submissions
/// does not affect the result.
pub fn assert_has_share(serving: &mut Program, neighbour: &mut Neighbour, entitled_permille: u64) {
    neighbour.works();
    let mut gains = Report::default();
    let before = charged(serving);
    neighbour.report();
    for round in 1..=*ROUND_LIMITS.end() {
        std::thread::sleep(2 * MIN_ROUND_TIME);
        gains.add(&neighbour.report());
        let now = charged(serving);
        let (charged, time) = (now.0 - before.0, now.1 - before.1);
        // The current slice is not charged yet.
        let has = charged + SLICE_NS >= time / 1000 * entitled_permille / 100 * 96;
        let answered = gains.late == 0 || (gains.late as f64) < 0.04 * gains.requests as f64;
        let works = gains.kernels > 0 && gains.card_us > 0 && gains.requests > 0;
        if round >= *ROUND_LIMITS.start() && has && answered && works {
            break;
        }
        assert!(round < *ROUND_LIMITS.end(), "{charged} of {time} ns, {entitled_permille} permille: {gains:?}");
    }
    assert_eq!(gains.refused, 0, "{gains:?}");
    assert!(!neighbour.lost_connection(), "{}", neighbour.log());
}

/// Length of a slice of the owner, in ns.
const SLICE_NS: u64 = 15_000_000;

/// Owner option that lets a program keep its turn during pauses, because a neighbour on a busy host sometimes submits
/// late.
pub const NEVER_IDLE: [&str; 2] = ["--idle-us", "1000000000"];

/// Returns the accounts of a running owner.
pub fn accounts(owner: &mut Program) -> Value {
    owner.say("accounts");
    let line = owner.line();
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
}

/// Returns a value from a tenant's account. Index 0 is tenant `a`, and index 1 is tenant `b`.
pub fn account(view: &Value, tenant: usize, key: &str) -> u64 {
    view["tenants"][tenant][key].as_u64().unwrap_or_else(|| panic!("{key}: {view}"))
}

/// Polls the owner's accounts until `done` returns true.
pub fn until_accounts(owner: &mut Program, what: &str, done: impl Fn(&Value) -> bool) -> Value {
    let mut view = Value::Null;
    // TIMEOUT: only a failing test waits this long.
    for _ in 0..300 {
        view = accounts(owner);
        if done(&view) {
            return view;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("{what}: {view}");
}

/// A process that speaks the owner's protocol without the library. The process may have several connections.
pub struct Raw {
    pub program: Program,
}

impl Raw {
    /// Starts a process. If `uid` is set, the process runs as that user, which requires root.
    pub fn start(rig: &Rig, uid: Option<u32>) -> Self {
        let mut command = rig.command(env!("CARGO_BIN_EXE_cuda-raw"), "plain");
        command.arg("--socket").arg(rig.socket());
        if let Some(uid) = uid {
            rig.let_others_in();
            command.args(["--uid", &uid.to_string()]);
        }
        Self { program: Program::start(&mut command) }
    }

    pub fn ask(&mut self, command: &Command) -> Answer {
        self.program.say(&serde_json::to_string(command).expect("JSON"));
        let line = self.program.line();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?} to {command:?}"))
    }

    /// Connects and returns the number of the connection. Without `manner`, no thread reads the connection.
    pub fn connect(&mut self, through: Through, manner: Option<Manner>) -> usize {
        match self.ask(&Command::Connect { through, manner }) {
            Answer::Link(link) => link,
            other => panic!("{other:?}"),
        }
    }

    /// Sends a message several times. Returns the number of successful sends.
    pub fn say(&mut self, link: usize, message: FromTenant, times: u32) -> u32 {
        match self.ask(&Command::Say { link, message, times }) {
            Answer::Sent(count) => count,
            other => panic!("{other:?}"),
        }
    }

    /// Closes a connection.
    pub fn close(&mut self, link: usize) {
        let answer = self.ask(&Command::Close { link });
        assert!(matches!(answer, Answer::Done), "{answer:?}");
    }

    /// Launches a kernel of `ms` milliseconds bypassing the owner, and leaves it in flight.
    pub fn launch(&mut self, ms: u64) {
        let answer = self.ask(&Command::Launch { ms });
        assert!(matches!(answer, Answer::Done), "{answer:?}");
    }

    /// Makes the process exit. A child continues with the connections and the commands.
    pub fn desert(&mut self) {
        let answer = self.ask(&Command::Desert);
        assert!(matches!(answer, Answer::Done), "{answer:?}");
        self.program.child.wait().expect("ends");
    }

    /// Waits for `count` messages, but at most for `within`. Returns the messages since the last call, and true if the
    /// owner has closed the connection.
    pub fn hear(&mut self, link: usize, count: usize, within: Duration) -> (Vec<FromOwner>, bool) {
        let within_ms = u64::try_from(within.as_millis()).expect("short");
        match self.ask(&Command::Hear { link, count, within_ms }) {
            Answer::Heard { messages, closed, .. } => (messages, closed),
            other => panic!("{other:?}"),
        }
    }

    /// Waits for a message accepted by `is_it`, and drops all other messages that have arrived.
    pub fn wait_for<T>(&mut self, link: usize, is_it: impl Fn(FromOwner) -> Option<T>) -> T {
        // TIMEOUT: only a failing test waits this long.
        for _ in 0..30 {
            let (messages, closed) = self.hear(link, 1, Duration::from_secs(1));
            let text = format!("{messages:?}");
            if let Some(found) = messages.into_iter().find_map(&is_it) {
                return found;
            }
            assert!(!closed, "the owner has closed the connection after {text}");
        }
        panic!("the owner does not send the expected message");
    }

    /// Returns the number of descriptors received over a connection that are still open.
    pub fn descriptors(&mut self, link: usize) -> usize {
        match self.ask(&Command::Hear { link, count: 0, within_ms: 0 }) {
            Answer::Heard { descriptors, .. } => descriptors,
            other => panic!("{other:?}"),
        }
    }

    /// Connects and sends `Hello`. Returns the number of the connection, and the reply if `manner` is set.
    pub fn hello(&mut self, tenant: &str, through: Through, manner: Option<Manner>) -> (usize, Option<FromOwner>) {
        let link = self.connect(through, manner);
        self.say(link, FromTenant::Hello(hello(tenant, false)), 1);
        // TIMEOUT: only a failing test waits this long.
        let answer = manner.and_then(|_| self.hear(link, 1, Duration::from_secs(30)).0.into_iter().next());
        (link, answer)
    }

    /// Allocates chunks and waits until they arrive. Returns the chunks' IDs.
    pub fn allocate(&mut self, link: usize, request: u32, chunks: u32) -> Vec<ChunkId> {
        self.say(link, FromTenant::Allocate { request, card: 0, chunks }, 1);
        let mut ids = Vec::new();
        while ids.len() < chunks as usize {
            ids.extend(self.wait_for(link, |message| match message {
                FromOwner::Granted { chunks, .. } => Some(chunks.into_iter().map(|chunk| chunk.id).collect::<Vec<_>>()),
                FromOwner::Refused { reason, .. } => panic!("refused: {reason:?}"),
                _ => None,
            }));
        }
        ids
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = self.program.child.kill();
        let _ = self.program.child.wait();
    }
}

/// Returns a `Hello` message.
pub fn hello(tenant: &str, adopts: bool) -> Hello {
    let (tenant, program) = (tenant.to_owned(), "hostile".to_owned());
    Hello { version: VERSION, pid: std::process::id(), instance: 1, tenant, program, adopts }
}

/// Shuts down a program's connection to the owner from outside, as if the owner had failed. The program keeps running.
pub fn break_connection(pid: u32) {
    use std::os::fd::{AsFd as _, AsRawFd as _};
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).expect("a process");
    let handle = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).expect("there");
    let mut broken = 0;
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).expect("readable").flatten() {
        let number: i32 = entry.file_name().to_string_lossy().parse().expect("a number");
        let is_socket = std::fs::read_link(entry.path()).is_ok_and(|to| to.to_string_lossy().starts_with("socket:"));
        if !is_socket {
            continue;
        }
        let flags = rustix::process::PidfdGetfdFlags::empty();
        let Ok(ours) = rustix::process::pidfd_getfd(handle.as_fd(), number, flags) else { continue };
        if rustix::net::sockopt::socket_type(&ours).is_ok_and(|kind| kind == rustix::net::SocketType::SEQPACKET) {
            rustix::net::shutdown(&ours, rustix::net::Shutdown::Both)
                .unwrap_or_else(|error| panic!("{error}: {}", ours.as_raw_fd()));
            broken += 1;
        }
    }
    assert_eq!(broken, 1, "one connection to the owner");
}

/// Returns true if this process is root and may start processes as another user. Tests that need this are skipped
/// otherwise.
pub fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("skipped: only root starts programs as another user");
    }
    root
}
