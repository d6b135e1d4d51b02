//! A Debian host in namespaces of this machine, with its own files, users, processes, mounts and network. It shares
//! this machine's kernel.
//!
//! Such a host starts in seconds, whereas an emulated machine takes minutes. The host does not run systemd:
//! [`Debian::start`] and related functions start and stop units. The init process reaps orphans as systemd does.
//!
//! Requirements: root, or a user ID range in `/etc/subuid` and the programs of Debian's `uidmap` package.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use images::{Progress, cpio};

use crate::agent::Output;
use crate::children;
use crate::daemon::run_to_end;
use crate::files::Files;
use crate::wait::{self, Scratch};

/// Time limit of a command.
const COMMAND_LIMIT: Duration = Duration::from_secs(180);
/// The browser's folder on the host.
const BROWSER: &str = "/opt/browser";
/// Time limit for loading a page's data, in ms of the browser's virtual clock, which skips idle time.
const BROWSER_MS: u32 = 5000;
/// Number of lines of each unit's log shown after an error.
const LOG_LINES: u32 = 30;
/// Folder of the units' logs.
const LOGS: &str = "/var/log/units";
/// Folder of the units' PID files.
const UNITS: &str = "/run/units";

/// Namespaces, as arguments of `unshare`. When `unshare` exits, all processes in the namespaces are killed.
pub(crate) const NAMESPACES: [&str; 8] =
    ["--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup", "--fork", "--kill-child"];
/// Additional arguments of `unshare` for non-root users.
pub(crate) const USERS: [&str; 3] = ["--user", "--map-root-user", "--map-auto"];

/// Script of the init process, which mounts the host's file systems and keeps running. Its argument is the new root
/// folder.
const INIT: &str = r#"
set -e
mount --make-rprivate /
mount --bind "$1" "$1"
cd "$1"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
for folder in run tmp dev; do mount -t tmpfs -o mode=755 $folder $folder; done
chmod 1777 tmp
for device in null zero full random urandom tty; do
    touch dev/$device
    mount --bind /dev/$device dev/$device
done
mkdir dev/shm dev/pts run/units
mount -t tmpfs -o mode=1777 shm dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
hostname host
exec chroot . /bin/sh -c '
ip link set lo up
# A host that has no address but 127.0.0.1 is none that has IPv4, by the rules of getaddrinfo.
ip address add 192.0.2.1/32 dev lo
echo up
# Who ignores the end of children has the kernel wait for them: orphans are not to stay as zombies.
exec env --ignore-signal=CHLD sleep infinity'
"#;

/// Environment variables of commands.
const ENVIRONMENT: [(&str, &str); 3] = [
    ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
    ("HOME", "/root"),
    ("LC_ALL", "C.UTF-8"),
];

/// A running host.
pub struct Debian {
    namespaces: Child,
    /// Process ID of the host's init process on this machine.
    init: u32,
    users: bool,
    up: Instant,
    root: Scratch,
}

/// Returns the reason why this machine cannot run such a host, or `None` if it can.
pub fn impossible() -> Option<String> {
    let mut command = Command::new("unshare");
    command.args(NAMESPACES).args(if is_root() { &[][..] } else { &USERS });
    match run_to_end(command.args(["sh", "-c", "mount --make-rprivate /"]), COMMAND_LIMIT) {
        Ok(ended) if ended.code == Some(0) => None,
        Ok(ended) => Some(format!(
            "no namespaces with several users can be made here; be root, or have a range in /etc/subuid and the package uidmap: {}",
            ended.stderr.trim()
        )),
        Err(error) => Some(format!("unshare of the package util-linux: {error:#}")),
    }
}

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

impl Debian {
    /// Starts a host with `files`. Workload managers are installed but not running.
    pub fn start_up(name: &str, files: Files) -> Result<Self> {
        let archive = images::ensure_fleet(&Progress::stderr())?;
        let scratch = Scratch::new(name)?;
        let root = scratch.path().join("root");
        fs::create_dir(&root).context("the host's root")?;
        let read = fs::read(&archive).with_context(|| format!("cannot read {}", archive.display()))?;
        cpio::unpack(&read, &root).with_context(|| archive.display().to_string())?;
        cpio::unpack(&files.finish().finish(), &root).context("the test's files")?;
        let users = !is_root();
        let mut command = Command::new("unshare");
        command.args(NAMESPACES).args(if users { &USERS[..] } else { &[] });
        command.args(["sh", "-c", INIT, "init"]).arg(&root).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut namespaces = children::spawn(&mut command).context("unshare of the package util-linux")?;
        let mut line = String::new();
        let output = namespaces.stdout.take().context("its output")?;
        BufReader::new(output).read_line(&mut line).context("its first process")?;
        ensure!(line == "up\n", "the namespaces' first process has ended: {:?}", namespaces.wait());
        let init = only_child(namespaces.id())?;
        Ok(Self { namespaces, init, users, up: Instant::now(), root: scratch })
    }

    /// Returns a process command that runs a shell command on the host.
    fn command(&self, command: &str) -> Command {
        let mut enter = Command::new("nsenter");
        enter.arg("--target").arg(self.init.to_string());
        enter.args(["--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup", "--root"]);
        if self.users {
            enter.arg("--user");
        }
        enter.args(["env", "--chdir=/", "/bin/sh", "-c", command]).env_clear().envs(ENVIRONMENT);
        enter
    }

    /// Runs a command to completion. Returns its output and exit code.
    pub fn run(&self, command: &str) -> Result<Output> {
        let ended = run_to_end(&mut self.command(command), COMMAND_LIMIT)?;
        let text = format!("{}{}", ended.stdout, ended.stderr);
        Ok(Output { lines: text.lines().map(str::to_owned).collect(), code: ended.code.unwrap_or(-1) })
    }

    /// Runs a shell command. Does not check the exit code. Prints the command and its output.
    pub fn sh(&self, command: &str) -> Result<Output> {
        self.say(command);
        let output = self.run(command)?;
        println!("{}{}", output.text(), if output.code == 0 { String::new() } else { format!("\n[{}]", output.code) });
        Ok(output)
    }

    /// Calls [`Self::sh`], but treats a nonzero exit code as an error, which contains the last lines of the units'
    /// logs. Returns the output.
    pub fn ok(&self, command: &str) -> Result<String> {
        let output = self.sh(command)?;
        let text = output.text();
        ensure!(output.code == 0, "{command}: exited with code {}:\n{text}\n{}", output.code, self.logs());
        Ok(text)
    }

    /// Waits until a shell command succeeds. Returns the command's output.
    pub fn until(&self, what: &str, command: &str, limit: Duration) -> Result<String> {
        self.say(&format!("until {command}"));
        let ended = wait::until(what, limit, || {
            let output = self.run(command)?;
            Ok((output.code == 0).then(|| output.text()))
        });
        ended.with_context(|| self.logs())
    }

    /// Writes a file with permissions `mode`. Creates its parent folders.
    pub fn write(&self, path: &str, mode: u32, text: &str) -> Result<()> {
        let quoted = text.replace('\'', "'\\''");
        self.ok(&format!("mkdir -p $(dirname {path}) && printf %s '{quoted}' > {path} && chmod {mode:o} {path}"))
            .map(drop)
    }

    /// Starts a unit: a long-running shell command.
    pub fn start(&self, unit: &str, command: &str) -> Result<()> {
        let quoted = format!("echo $$ > {UNITS}/{unit}; {command}").replace('\'', "'\\''");
        self.ok(&format!(
            "mkdir -p {LOGS}; rm -f {UNITS}/{unit}; setsid sh -c '{quoted}' </dev/null >>{LOGS}/{unit}.log 2>&1 & \
             until test -s {UNITS}/{unit}; do sleep 0.02; done"
        ))
        .map(drop)
    }

    /// Kills the main process of a unit, and waits until it has exited.
    pub fn kill(&self, unit: &str) -> Result<()> {
        self.end(unit, "KILL")
    }

    /// Terminates a unit, and waits until it has exited.
    pub fn stop(&self, unit: &str) -> Result<()> {
        self.end(unit, "TERM")
    }

    fn end(&self, unit: &str, signal: &str) -> Result<()> {
        let process = format!("$(cat {UNITS}/{unit})");
        self.ok(&format!("kill -{signal} {process}"))?;
        self.until("a unit to exit", &format!("! kill -0 {process} 2>/dev/null"), COMMAND_LIMIT).map(drop)
    }

    fn say(&self, command: &str) {
        println!("[{:6.1} s] # {command}", self.up.elapsed().as_secs_f64());
    }

    /// Makes a browser available to [`Self::browse`], in a folder on the host.
    pub fn install_browser(&self) -> Result<()> {
        let browser = images::ensure_browser(&Progress::stderr())?;
        let to = self.root.path().join("root").join(BROWSER.trim_start_matches('/'));
        let copied =
            Command::new("cp").arg("-a").arg(&browser).arg(&to).status().context("cp of the package coreutils")?;
        ensure!(copied.success(), "cp of {} failed ({copied})", browser.display());
        let mounts = ["proc", "dev"].map(|name| format!("mount --rbind /{name} {BROWSER}/{name}")).join(" && ");
        self.ok(&mounts).map(drop)
    }

    /// Opens a page in the browser, and returns the browser's output. `options` contains command-line options, such as
    /// those for printing the document.
    pub fn browse(&self, options: &str, url: &str) -> Result<String> {
        let program = images::browser::PROGRAM;
        // Disable the browser's sandbox, which needs privileges that are not available in these namespaces. The browser
        // only opens pages of the tests.
        self.ok(&format!(
            "chroot {BROWSER} {program} --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir=/tmp/browser \
             --virtual-time-budget={BROWSER_MS} {options} '{url}' 2>/tmp/browser.log || {{ tail -n 5 /tmp/browser.log; false; }}"
        ))
    }

    /// Reads a file written by the browser. `path` is relative to the browser's root folder.
    pub fn browser_file(&self, path: &str) -> Result<Vec<u8>> {
        let file = format!("root{BROWSER}{path}");
        fs::read(self.root.path().join(&file)).with_context(|| file)
    }

    /// Returns the last lines of the units' logs.
    pub fn logs(&self) -> String {
        let command = format!("tail --lines={LOG_LINES} {LOGS}/*.log");
        let logs = self.run(&command).map(|output| output.text());
        format!("the ends of the units' logs:\n{}", logs.unwrap_or_else(|error| format!("{error:#}")))
    }
}

impl Drop for Debian {
    fn drop(&mut self) {
        // Kill all processes in the namespaces before the files are removed.
        let _ = self.namespaces.kill();
        let _ = self.namespaces.wait();
        let _ = wait::until("the host's processes to exit", COMMAND_LIMIT, || Ok(has_ended(self.init).then_some(())));
        if self.users && self.root.is_removed() {
            // Only a process with access to the mapped users can remove their files.
            let mut remove = Command::new("unshare");
            remove.args(USERS).args(["rm", "--recursive", "--force"]).arg(self.root.path().join("root"));
            let _ = run_to_end(&mut remove, COMMAND_LIMIT);
        }
    }
}

/// Returns true if a process has exited, even if its parent has not reaped it.
fn has_ended(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
}

/// Returns the process ID of a process's only child.
fn only_child(process: u32) -> Result<u32> {
    let path = PathBuf::from(format!("/proc/{process}/task/{process}/children"));
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    match text.split_whitespace().collect::<Vec<_>>()[..] {
        [child] => Ok(child.parse()?),
        _ => bail!("{} says {text:?}, expected one number", path.display()),
    }
}
