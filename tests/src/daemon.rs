//! Runs `mediatord` and `mediatorctl` as an operator would.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;
use std::{env, thread};

use anyhow::{Context, Result, bail, ensure};
use rig::service_manager::ServiceManager;
use rustix::process::{Signal, kill_process};
use serde_json::Value;

use crate::children;
use crate::http;
use crate::process::Process;
use crate::wait::{self, Scratch};

/// Time limit for the daemon's admin socket to respond.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for the daemon to exit after SIGTERM.
const STOP_LIMIT: Duration = Duration::from_secs(30);
/// Time limit of a `mediatorctl` command.
const CONTROL_LIMIT: Duration = Duration::from_secs(60);

/// Paths of a test's daemon, for use in its configuration.
#[derive(Clone, Debug)]
pub struct Paths {
    /// Empty folder for sockets.
    pub folder: PathBuf,
    /// Path for `[daemon] admin_socket`.
    pub admin_socket: PathBuf,
}

impl Paths {
    /// Returns a path for `[daemon] read_socket`.
    pub fn read_socket(&self) -> PathBuf {
        self.folder.join("read.sock")
    }

    /// Returns the socket path for a VM called `name`.
    pub fn vm_socket(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.sock"))
    }
}

/// Output and exit code of a program.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// Exit code, or `None` if a signal terminated the program.
    pub code: Option<i32>,
}

impl Ended {
    /// Returns this value if the exit code is 0, or an error that contains the output otherwise.
    pub fn success(self) -> Result<Self> {
        if self.code != Some(0) {
            bail!("exited with code {:?}:\n{}{}", self.code, self.stdout, self.stderr);
        }
        Ok(self)
    }
}

/// A running `mediatord`, which is stopped on drop, and killed if it does not exit.
pub struct Daemon {
    process: Process,
    /// Path of the program. A test may replace this file before an upgrade.
    program: PathBuf,
    paths: Paths,
    /// Additional environment variables of the daemon.
    variables: Vec<(String, OsString)>,
    /// The service manager that started the daemon, if any.
    manager: Option<ServiceManager>,
    // Declared last, so that the folder is removed after the process has exited.
    scratch: Scratch,
}

impl Daemon {
    /// Starts the daemon with the TOML configuration that `configure` returns, and waits until its admin socket
    /// responds.
    pub fn start(name: &str, configure: impl FnOnce(&Paths) -> String) -> Result<Self> {
        let (scratch, paths) = prepare(name, configure)?;
        Self::start_by(None, scratch, paths)
    }

    /// Starts the daemon like [`Self::start`], with additional environment variables.
    pub fn start_with(
        name: &str,
        variables: &[(&str, &OsStr)],
        configure: impl FnOnce(&Paths) -> String,
    ) -> Result<Self> {
        let (scratch, paths) = prepare(name, configure)?;
        Self::start_program(binary("mediatord")?, (None, variables), scratch, paths)
    }

    /// Starts the daemon like [`Self::start_as_service`], with additional environment variables for each daemon
    /// process.
    pub fn start_as_service_with(
        name: &str,
        variables: &[(&str, &OsStr)],
        configure: impl FnOnce(&Paths) -> String,
    ) -> Result<Self> {
        let (scratch, paths) = prepare(name, configure)?;
        let manager = ServiceManager::new(&scratch.path().join("notify")).context("a service manager")?;
        Self::start_program(binary("mediatord")?, (Some(manager), variables), scratch, paths)
    }

    /// Starts the daemon as a service of a service manager, which keeps the daemon's sockets.
    pub fn start_as_service(name: &str, configure: impl FnOnce(&Paths) -> String) -> Result<Self> {
        let (scratch, paths) = prepare(name, configure)?;
        let manager = ServiceManager::new(&scratch.path().join("notify")).context("a service manager")?;
        Self::start_by(Some(manager), scratch, paths)
    }

    fn start_by(manager: Option<ServiceManager>, scratch: Scratch, paths: Paths) -> Result<Self> {
        Self::start_program(binary("mediatord")?, (manager, &[]), scratch, paths)
    }

    /// Starts the daemon from a copy of the program at `copy`, which the test can replace.
    pub fn start_copy(name: &str, copy: &Path, configure: impl FnOnce(&Paths) -> String) -> Result<Self> {
        fs::copy(binary("mediatord")?, copy).with_context(|| format!("cannot write {}", copy.display()))?;
        let (scratch, paths) = prepare(name, configure)?;
        Self::start_program(copy.to_owned(), (None, &[]), scratch, paths)
    }

    fn start_program(
        program: PathBuf,
        (manager, variables): (Option<ServiceManager>, &[(&str, &OsStr)]),
        scratch: Scratch,
        paths: Paths,
    ) -> Result<Self> {
        let variables: Vec<_> = variables.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        let mut command = command(&program, &scratch, manager.as_ref())?;
        let child = spawn(&scratch, command.envs(variables.iter().cloned()))?;
        let mut daemon = Self { process: Process::Started(child), program, paths, variables, manager, scratch };
        daemon.wait_ready()?;
        Ok(daemon)
    }

    /// Upgrades the daemon to the program now at its path, and waits until the old daemon has exited. Returns the
    /// output of `mediatorctl daemon upgrade`.
    pub fn upgrade(&mut self) -> Result<Value> {
        Process::adopt_orphans().context("orphaned processes cannot be adopted")?;
        let info = self.ctl_json(&["daemon", "upgrade"]).with_context(|| self.log_tail())?;
        let ended = wait::until("the previous daemon to exit", STOP_LIMIT, || Ok(self.process.try_wait()?));
        let status = ended.with_context(|| self.log_tail())?;
        ensure!(status.success(), "the previous daemon exited with {status}:\n{}", self.log_tail());
        let pid = info["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
        self.process = Process::adopted(pid.with_context(|| format!("no process in {info}"))?)?;
        Ok(info)
    }

    /// Returns the path of the program. The test may replace the file.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Returns the path of the configuration file.
    pub fn config(&self) -> PathBuf {
        config_of(&self.scratch)
    }

    /// Kills the daemon at an arbitrary point, and starts another one with the same configuration and log.
    pub fn kill_and_restart(&mut self) -> Result<()> {
        self.process.end().context("cannot kill mediatord")?;
        let mut command = command(&self.program, &self.scratch, self.manager.as_ref())?;
        command.envs(self.variables.iter().cloned());
        self.process = Process::Started(spawn(&self.scratch, &mut command)?);
        self.wait_ready()
    }

    fn wait_ready(&mut self) -> Result<()> {
        let ready = wait::until("mediatord to be ready", START_LIMIT, || {
            if let Some(status) = self.process.try_wait()? {
                bail!("mediatord has exited ({status})");
            }
            if let Some(manager) = &self.manager {
                return Ok(manager.wait(Duration::ZERO, |heard| heard.take("READY=1")).ok());
            }
            // The daemon's socket exists before its VMs do. A client that connects early waits until the daemon serves
            // it.
            Ok(self.get("/v1/vms").ok().map(drop))
        });
        ready.with_context(|| self.log_tail())
    }

    /// Runs the daemon with a configuration that it must reject. Returns the daemon's output.
    pub fn refused(name: &str, configure: impl FnOnce(&Paths) -> String) -> Result<Ended> {
        let (scratch, _paths) = prepare(name, configure)?;
        run_to_end(&mut command(&binary("mediatord")?, &scratch, None)?, START_LIMIT)
    }

    /// Returns the paths of the daemon's files.
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Returns the socket path for a VM called `name`.
    pub fn vm_socket(&self, name: &str) -> PathBuf {
        self.paths.vm_socket(name)
    }

    /// Runs `mediatorctl --socket PATH args...` to completion. Does not check the exit code.
    pub fn ctl(&self, args: &[&str]) -> Result<Ended> {
        let mut command = Command::new(binary("mediatorctl")?);
        command.arg("--socket").arg(&self.paths.admin_socket).args(args);
        run_to_end(&mut command, CONTROL_LIMIT).with_context(|| format!("mediatorctl {}", args.join(" ")))
    }

    /// Runs `mediatorctl --socket PATH --output json args...` and parses its output.
    pub fn ctl_json(&self, args: &[&str]) -> Result<Value> {
        let all: Vec<_> = ["--output", "json"].iter().chain(args).copied().collect();
        let text = self.ctl(&all)?.success().with_context(|| format!("mediatorctl {}", args.join(" ")))?.stdout;
        serde_json::from_str(&text)
            .with_context(|| format!("mediatorctl {} did not print JSON:\n{text}", args.join(" ")))
    }

    /// Sends `GET path` to the admin API, for values that no command prints verbatim.
    pub fn api(&self, path: &str) -> Result<Value> {
        let body = self.get(path)?;
        serde_json::from_str(&body).with_context(|| format!("GET {path} did not return JSON:\n{body}"))
    }

    /// Sends `GET path` to the admin socket. Returns the body of the response.
    pub fn get(&self, path: &str) -> Result<String> {
        let stream = UnixStream::connect(&self.paths.admin_socket).with_context(|| format!("GET {path}"))?;
        stream.set_read_timeout(Some(CONTROL_LIMIT))?;
        http::get(stream, path)
    }

    /// Returns true if the daemon is running.
    pub fn alive(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(None))
    }

    /// Returns the daemon's process ID.
    pub fn pid(&self) -> u32 {
        self.process.id().as_raw_pid().unsigned_abs()
    }

    /// Returns the daemon's log so far.
    pub fn log(&self) -> String {
        let bytes = fs::read(self.scratch.path().join("mediatord.log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Returns the end of the log, for error messages.
    pub fn log_tail(&self) -> String {
        wait::tail(&self.scratch.path().join("mediatord.log"))
    }

    /// Waits until the log contains a line with `text`, and returns the line.
    pub fn wait_log(&mut self, text: &str, limit: Duration) -> Result<String> {
        let found = wait::until(&format!("{text:?} in mediatord's log"), limit, || {
            Ok(self.log().lines().find(|l| l.contains(text)).map(str::to_owned))
        });
        found.with_context(|| self.log_tail())
    }

    /// Stops the daemon with SIGTERM and returns its exit status.
    pub fn stop(&mut self) -> Result<ExitStatus> {
        if let Some(status) = self.process.try_wait()? {
            return Ok(status);
        }
        kill_process(self.process.id(), Signal::TERM).context("cannot signal mediatord")?;
        let ended = wait::until("mediatord to exit after SIGTERM", STOP_LIMIT, || Ok(self.process.try_wait()?));
        ended.with_context(|| self.log_tail())
    }

    /// Keeps the folder with the log permanently, and returns its path.
    pub fn keep_logs(&mut self) -> &Path {
        self.scratch.keep()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.stop().is_err() {
            // The daemon may hang or have exited. `end` handles both cases.
            let _ = self.process.end();
        }
        if thread::panicking() {
            eprintln!("{}", self.log_tail());
        }
    }
}

fn prepare(name: &str, configure: impl FnOnce(&Paths) -> String) -> Result<(Scratch, Paths)> {
    let scratch = Scratch::new(name)?;
    let folder = scratch.path().join("run");
    fs::create_dir(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let paths = Paths { admin_socket: folder.join("admin.sock"), folder };
    let config = config_of(&scratch);
    fs::write(&config, configure(&paths)).with_context(|| format!("cannot write {}", config.display()))?;
    Ok((scratch, paths))
}

fn config_of(scratch: &Scratch) -> PathBuf {
    scratch.path().join("mediatord.toml")
}

fn command(program: &Path, scratch: &Scratch, manager: Option<&ServiceManager>) -> Result<Command> {
    let mut command = match manager {
        Some(manager) => manager.command(program).context("a service")?,
        None => Command::new(program),
    };
    command.arg("--config").arg(config_of(scratch));
    Ok(command)
}

/// Starts the daemon. Appends its output to the log.
fn spawn(scratch: &Scratch, command: &mut Command) -> Result<Child> {
    let log = scratch.path().join("mediatord.log");
    let output = File::options().create(true).append(true).open(&log);
    let output = output.with_context(|| format!("cannot write {}", log.display()))?;
    let errors = output.try_clone().context("the daemon's log")?;
    let name = command.get_program().to_string_lossy().into_owned();
    let child = children::spawn(command.stdin(Stdio::null()).stdout(output).stderr(errors));
    child.with_context(|| format!("cannot start {name}"))
}

/// Runs `command` to completion, or kills it after `limit`.
pub fn run_to_end(command: &mut Command, limit: Duration) -> Result<Ended> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {name}"))?;
    let stdout = child.stdout.take().map(read_all);
    let stderr = child.stderr.take().map(read_all);
    let ended = wait::until(&format!("{name} to exit"), limit, || Ok(child.try_wait()?));
    if ended.is_err() {
        let _ = child.kill();
        let _ = child.wait();
    }
    let text = |reader: Option<thread::JoinHandle<String>>| reader.and_then(|r| r.join().ok()).unwrap_or_default();
    let (stdout, stderr) = (text(stdout), text(stderr));
    let status = ended.with_context(|| format!("{stdout}{stderr}"))?;
    Ok(Ended { stdout, stderr, code: status.code() })
}

fn read_all(mut pipe: impl std::io::Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // Ignore read errors. The exit status shows whether the process failed.
        let _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Finds a program of this workspace in `GPU_MEDIATOR_BIN_DIR`, next to the running program, or in the release folder.
pub fn binary(name: &str) -> Result<PathBuf> {
    let mut folders: Vec<PathBuf> = env::var_os("GPU_MEDIATOR_BIN_DIR").map(PathBuf::from).into_iter().collect();
    if let Ok(own) = env::current_exe() {
        // The running program is target/PROFILE/NAME or target/PROFILE/deps/NAME, so the profile folder is at most two
        // levels up.
        let above: Vec<_> = own.ancestors().skip(1).take(3).map(Path::to_path_buf).collect();
        folders.extend(above.iter().take(2).cloned());
        folders.extend(above.iter().map(|a| a.join("release")));
    }
    match folders.iter().map(|f| f.join(name)).find(|p| p.is_file()) {
        Some(path) => Ok(path),
        None => bail!(
            "the program {name} is not built; run `cargo build --release --package mediatord --package mediatorctl`"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_ends_gives_output_and_code() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; echo err >&2; exit 4"]);
        let ended = run_to_end(&mut command, Duration::from_secs(20)).unwrap();
        assert_eq!((ended.stdout.as_str(), ended.stderr.as_str(), ended.code), ("out\n", "err\n", Some(4)));
        assert!(ended.success().unwrap_err().to_string().contains("err"));
    }

    #[test]
    fn missing_program_error_names_build_command() {
        let error = binary("no-such-program-of-ours").unwrap_err().to_string();
        assert!(error.contains("cargo build"), "{error}");
    }
}
