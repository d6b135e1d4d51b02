//! The owner's process: started, spoken to, and started again when it ends.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use cuda_control::{Answer, Request, Settings, Tenant};

use super::ANSWER;

/// Name of the owner's program.
const PROGRAM: &str = "cuda-owner";
/// Folder of the program where it is installed by the package.
const INSTALLED: &str = "/usr/lib/gpu-mediator";
/// Time between two looks at whether the process lives.
const LOOK: Duration = Duration::from_millis(200);
/// Time before an owner that ended is started again, doubled each time that it ends at once, up to [`DELAY_MOST`].
const DELAY: Duration = Duration::from_millis(100);
/// Longest such time.
const DELAY_MOST: Duration = Duration::from_secs(30);
/// An owner that lived so long did not end at once.
const LIVED: Duration = Duration::from_secs(60);
/// Time that the driver has to open the card.
// TIMEOUT: the driver's initialisation takes up to several seconds on a host with many cards.
const OPEN: Duration = Duration::from_secs(60);

/// A word to the thread of a [`Supervisor`].
pub(super) enum Command {
    /// Asks the owner.
    Ask(Box<Request>, Sender<Answer>),
    /// Ends it.
    Stop,
}

/// A process that answers.
struct Process {
    child: Child,
    input: ChildStdin,
    answers: Receiver<Answer>,
    since: Instant,
}

/// The owner of a card, whichever process it is.
pub(super) struct Supervisor {
    card: String,
    settings: Settings,
    /// Told to each new process.
    tenants: BTreeMap<String, Tenant>,
    process: Option<Process>,
    /// Ends of the process shortly after its start, one behind the other.
    failures: u32,
    retry: Instant,
}

impl Supervisor {
    pub(super) fn new(card: &str, settings: Settings) -> Self {
        let (tenants, retry) = (BTreeMap::new(), Instant::now());
        Self { card: card.to_owned(), settings, tenants, process: None, failures: 0, retry }
    }

    /// Starts a process and tells it its tenants; the name of the card's model.
    pub(super) fn start(&mut self) -> Result<String, String> {
        let mut process = Process::spawn()?;
        let name = match process.exchange(&self.settings, OPEN)? {
            Answer::Ready { name, .. } => name,
            Answer::Failed(what) => return Err(what),
            other => return Err(format!("{PROGRAM} answers {other:?}: it is of another version")),
        };
        for tenant in self.tenants.values() {
            if let Answer::Failed(what) = process.exchange(&Request::Add(tenant.clone()), ANSWER)? {
                tracing::error!(card = self.card, tenant = tenant.name, what, "a tenant cannot be served");
            }
        }
        self.process = Some(process);
        Ok(name)
    }

    /// Serves requests until it is told to stop, or nobody can ask any more.
    pub(super) fn run(mut self, commands: &Receiver<Command>) {
        loop {
            match commands.recv_timeout(LOOK) {
                Ok(Command::Ask(request, reply)) => {
                    let answer = self.ask(&request).unwrap_or_else(|error| {
                        self.end(&error);
                        Answer::Failed(format!("the owner of card `{}` ended: {error}", self.card))
                    });
                    // Who asked may have given up.
                    let _ = reply.send(answer);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Ok(Command::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            }
            self.look();
        }
    }

    fn ask(&mut self, request: &Request) -> Result<Answer, String> {
        let process = self.process.as_mut().ok_or("it is started again shortly")?;
        let answer = process.exchange(request, ANSWER)?;
        if let (Request::Add(tenant) | Request::Change(tenant), Answer::Done) = (request, &answer) {
            self.tenants.insert(tenant.name.clone(), tenant.clone());
        }
        Ok(answer)
    }

    /// Starts another process where there is none, when it is time.
    fn look(&mut self) {
        if let Some(process) = &mut self.process
            && let Ok(Some(status)) = process.child.try_wait()
        {
            self.end(&status.to_string());
        }
        if self.process.is_some() || Instant::now() < self.retry {
            return;
        }
        match self.start() {
            Ok(_) => tracing::warn!(card = self.card, "the owner of the CUDA card was started again"),
            Err(error) => self.failed(&error),
        }
    }

    /// The process is of no use any more.
    fn end(&mut self, why: &str) {
        let Some(process) = self.process.take() else { return };
        if process.since.elapsed() > LIVED {
            self.failures = 0;
        }
        drop(process);
        self.failed(why);
    }

    fn failed(&mut self, why: &str) {
        let delay = (DELAY * 2u32.saturating_pow(self.failures.min(16))).min(DELAY_MOST);
        self.failures += 1;
        self.retry = Instant::now() + delay;
        tracing::error!(card = self.card, why, again_in = ?delay, "the owner of the CUDA card ended");
    }
}

impl Process {
    fn spawn() -> Result<Self, String> {
        let program = program();
        let failed = |error: std::io::Error| format!("{} cannot be started: {error}", program.display());
        let mut command = std::process::Command::new(&program);
        let mut child = command.arg("work").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(failed)?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(format!("{} has no input or output", program.display()));
        };
        let (sender, answers) = channel();
        std::thread::Builder::new()
            .name("cuda-answers".to_owned())
            .spawn(move || {
                let lines = BufReader::new(output).lines().map_while(Result::ok);
                let parsed = lines.map_while(|line| serde_json::from_str(&line).ok());
                // Ends with the process, or when nobody listens any more.
                for answer in parsed {
                    if sender.send(answer).is_err() {
                        return;
                    }
                }
            })
            .map_err(failed)?;
        Ok(Self { child, input, answers, since: Instant::now() })
    }

    fn exchange(&mut self, line: &impl serde::Serialize, limit: Duration) -> Result<Answer, String> {
        let mut text = serde_json::to_vec(line).map_err(|error| error.to_string())?;
        text.push(b'\n');
        self.input.write_all(&text).map_err(|error| format!("{PROGRAM} has ended: {error}"))?;
        self.answers.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Timeout => format!("{PROGRAM} did not answer within {} s", limit.as_secs()),
            RecvTimeoutError::Disconnected => format!("{PROGRAM} has ended"),
        })
    }
}

impl Drop for Process {
    /// Kills it. Its programs go on with what they have, and look for the next owner.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The program: beside the daemon's own, or where the package installs it.
fn program() -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    let beside = own.with_file_name(PROGRAM);
    if beside.exists() { beside } else { Path::new(INSTALLED).join(PROGRAM) }
}
