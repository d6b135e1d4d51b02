//! Emulates NVIDIA's `nvidia-cuda-mps-control` and `nvidia-cuda-mps-server` on the fake driver.
//!
//! With `-f`, the program is the control daemon. Without arguments, it sends the lines of its standard input to the
//! daemon, like NVIDIA's program, and prints the replies. A daemon has one server, which serves one user. Clients of
//! another user wait until all of the server's clients have exited. After an illegal access by one client, the server
//! rejects new clients until all of its clients have exited. A server exits with its daemon. `FAKE_MPS_CLIENTS` limits
//! the clients of a server.
//!
//! `cuda-fake` implements the clients' side, and defines the protocol.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::net::sockopt::socket_peercred;

/// Environment variable with the maximum number of a server's clients.
const LIMIT: &str = "FAKE_MPS_CLIENTS";
/// The default limit of NVIDIA's servers.
const DEFAULT_LIMIT: usize = 48;
/// Interval at which the daemon polls for the exit of processes.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Number of polls after which the daemon rejects a client while another user's server runs.
const MAX_POLLS: u32 = 3000;

fn main() -> Result<()> {
    let folder =
        PathBuf::from(std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").context("CUDA_MPS_PIPE_DIRECTORY is unset")?);
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["-f"] => control(&folder),
        ["server"] => serve(&folder),
        [] => send(&folder),
        _ => bail!("expected -f, or commands on standard input"),
    }
}

fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends the lines of standard input to the daemon as commands, and prints the replies.
fn send(folder: &Path) -> Result<()> {
    for line in std::io::stdin().lines() {
        let mut daemon =
            UnixStream::connect(folder.join("control")).context("Cannot find MPS control daemon process")?;
        writeln!(daemon, "command {}", line?)?;
        let mut answer = String::new();
        daemon.read_to_string(&mut answer)?;
        print!("{answer}");
    }
    Ok(())
}

/// A server that the daemon has started.
struct Server {
    process: Child,
    user: u32,
    /// Active thread percentage for the server's next clients.
    threads: f32,
}

impl Server {
    fn start(user: u32) -> Result<Self> {
        let program = std::env::current_exe()?;
        let mut command = Command::new(program);
        let mut process = command.arg("server").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut ready = String::new();
        BufReader::new(process.stdout.take().context("piped")?).read_line(&mut ready)?;
        if ready.trim() != "ready" {
            bail!("the server does not start");
        }
        Ok(Self { process, user, threads: 100.0 })
    }

    fn ask(&self, folder: &Path, line: &str) -> Result<String> {
        let mut server = UnixStream::connect(folder.join(format!("server-{}", self.process.id())))?;
        writeln!(server, "{line}")?;
        let mut answer = String::new();
        server.read_to_string(&mut answer)?;
        Ok(answer)
    }
}

/// Runs the control daemon.
fn control(folder: &Path) -> Result<()> {
    let path = folder.join("control");
    if UnixStream::connect(&path).is_ok() {
        bail!("An instance of this daemon is already running");
    }
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path)?;
    let server: Arc<Mutex<Option<Server>>> = Arc::default();
    let own = folder.to_owned();
    std::thread::spawn(move || {
        // Exit when the folder is removed, so that a failing test does not leave a daemon behind.
        while own.exists() {
            std::thread::sleep(POLL_INTERVAL * 10);
        }
        std::process::exit(1);
    });
    for stream in listener.incoming().flatten() {
        let (server, folder) = (Arc::clone(&server), folder.to_owned());
        std::thread::spawn(move || answer(&folder, &server, stream));
    }
    Ok(())
}

/// Executes a command, and sends the reply.
fn answer(folder: &Path, server: &Mutex<Option<Server>>, mut stream: UnixStream) -> Result<()> {
    let mut line = String::new();
    BufReader::new(stream.try_clone()?).read_line(&mut line)?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let of = |pid: &str, server: &Server| pid.parse() == Ok(server.process.id());
    match words[..] {
        ["client"] => {
            let user = socket_peercred(&stream)?.uid.as_raw();
            let pid = server_of(folder, server, user)?;
            writeln!(stream, "server {pid}")?;
        }
        ["command", "get_server_list"] => {
            let mut server = guard(server);
            reap(&mut server);
            if let Some(server) = &*server {
                writeln!(stream, "{}", server.process.id())?;
            }
        }
        ["command", "start_server", "-uid", user] => drop(server_of(folder, server, user.parse()?)?),
        ["command", "get_client_list", pid] => {
            let known =
                guard(server).as_ref().filter(|server| of(pid, server)).map(|server| server.ask(folder, "list"));
            write!(stream, "{}", known.unwrap_or_else(|| Ok(format!("Server {pid} not found\n")))?)?;
        }
        ["command", "get_server_status", pid] => {
            let known =
                guard(server).as_ref().filter(|server| of(pid, server)).map(|server| server.ask(folder, "status"));
            write!(stream, "{}", known.unwrap_or_else(|| Ok(format!("Server {pid} not found\n")))?)?;
        }
        ["command", "terminate_client", pid, client] => {
            let known = guard(server);
            if let Some(server) = known.as_ref().filter(|server| of(pid, server)) {
                server.ask(folder, &format!("end {client}"))?;
            }
        }
        ["command", "set_active_thread_percentage", pid, percent] => {
            if let Some(server) = guard(server).as_mut().filter(|server| of(pid, server)) {
                server.threads = percent.parse()?;
                writeln!(stream, "{:.1}", server.threads)?;
            }
        }
        ["command", "get_active_thread_percentage", pid] => {
            if let Some(server) = guard(server).as_ref().filter(|server| of(pid, server)) {
                writeln!(stream, "{:.1}", server.threads)?;
            }
        }
        ["command", "quit", ..] => {
            std::fs::remove_file(folder.join("control"))?;
            while guard(server)
                .as_ref()
                .is_some_and(|server| server.ask(folder, "list").is_ok_and(|all| !all.is_empty()))
            {
                std::thread::sleep(POLL_INTERVAL);
            }
            // The server exits with this process.
            std::process::exit(0);
        }
        _ => writeln!(stream, "Unknown command")?,
    }
    Ok(())
}

/// Removes the record of a server that has exited.
fn reap(server: &mut Option<Server>) {
    if server.as_mut().is_some_and(|server| server.process.try_wait().is_ok_and(|ended| ended.is_some())) {
        *server = None;
    }
}

/// Returns the process ID of a user's server, after waiting until no other user has one. Starts the server if
/// necessary.
fn server_of(folder: &Path, server: &Mutex<Option<Server>>, user: u32) -> Result<u32> {
    for _ in 0..MAX_POLLS {
        let mut current = guard(server);
        reap(&mut current);
        if let Some(other) = current.as_mut().filter(|server| server.user != user)
            && other.ask(folder, "list").is_ok_and(|clients| clients.is_empty())
        {
            other.process.kill()?;
            other.process.wait()?;
            *current = None;
        }
        match &*current {
            Some(server) if server.user == user => return Ok(server.process.id()),
            Some(_) => {}
            None => {
                let new = Server::start(user)?;
                return Ok(current.insert(new).process.id());
            }
        }
        drop(current);
        std::thread::sleep(POLL_INTERVAL);
    }
    bail!("another user has the server")
}

/// A server's clients and fault state.
#[derive(Default)]
struct Clients {
    connected: Vec<(i32, UnixStream)>,
    /// Set after an illegal access, until all clients have exited.
    faulty: bool,
}

/// Runs a server.
fn serve(folder: &Path) -> Result<()> {
    let path = folder.join(format!("server-{}", std::process::id()));
    let listener = UnixListener::bind(&path)?;
    println!("ready");
    std::thread::spawn(move || {
        // Standard input is closed when the daemon exits.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = std::fs::remove_file(path);
        std::process::exit(0);
    });
    let clients: Arc<Mutex<Clients>> = Arc::default();
    let limit = std::env::var(LIMIT).ok().and_then(|text| text.parse().ok()).unwrap_or(DEFAULT_LIMIT);
    for stream in listener.incoming().flatten() {
        let clients = Arc::clone(&clients);
        std::thread::spawn(move || client(&clients, limit, stream));
    }
    Ok(())
}

/// Serves one connection.
fn client(clients: &Mutex<Clients>, limit: usize, mut stream: UnixStream) -> Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let words: Vec<&str> = line.split_whitespace().collect();
    match words[..] {
        ["list"] => {
            for (pid, _) in &guard(clients).connected {
                writeln!(stream, "{pid}")?;
            }
        }
        ["status"] => writeln!(stream, "{}", if guard(clients).faulty { "FAULT" } else { "ACTIVE" })?,
        ["end", pid] => {
            for (_, client) in guard(clients).connected.iter_mut().filter(|(of, _)| of.to_string() == pid) {
                writeln!(client, "terminated")?;
                client.shutdown(Shutdown::Write)?;
            }
        }
        ["attach"] => {
            let pid = socket_peercred(&stream)?.pid.as_raw_nonzero().get();
            let mut all = guard(clients);
            if all.faulty {
                writeln!(stream, "fault")?;
                return Ok(());
            }
            if all.connected.len() >= limit {
                writeln!(stream, "full")?;
                return Ok(());
            }
            writeln!(stream, "ok")?;
            all.connected.push((pid, stream));
            drop(all);
            attached(clients, reader);
            let mut all = guard(clients);
            all.connected.retain(|(of, _)| *of != pid);
            all.faulty &= !all.connected.is_empty();
        }
        _ => {}
    }
    Ok(())
}

/// Reads a client's messages until the client exits.
fn attached(clients: &Mutex<Clients>, reader: BufReader<UnixStream>) {
    for line in reader.lines().map_while(Result::ok) {
        if line == "fault" {
            let mut all = guard(clients);
            all.faulty = true;
            for (_, client) in &mut all.connected {
                let _ = writeln!(client, "fault");
            }
        }
    }
}
