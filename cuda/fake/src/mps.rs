//! The client's side of NVIDIA's Multi-Process Service (MPS), stricter than NVIDIA's.
//!
//! `cuInit` connects to the control daemon whose pipe is in the folder of [`PIPES`], and then to the server that the
//! daemon names. The process is a client until it ends. Kernels of one server's clients run at the same time; kernels
//! of two servers, and of processes that are not clients, share the engine in slices.
//!
//! An illegal access by one client, or the end of the server, ends the contexts of all clients of the server. A control
//! daemon that does not accept a connection makes `cuInit` fail, where NVIDIA's driver may continue without MPS. The
//! programs for the server's side are in `cuda-rig`.
//!
//! Lines over UNIX sockets: `client` to the control daemon, answered by `server PID`; then `attach` to the server's
//! socket, answered by `ok`, `full` or `fault`. Later the server sends `fault` or `terminated`, and the client `fault`.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::result::{
    ILLEGAL_ADDRESS, MPS_CLIENT_TERMINATED, MPS_CONNECTION_FAILED, MPS_MAX_CLIENTS_REACHED, MPS_RPC_FAILURE,
    MPS_SERVER_NOT_READY, SUCCESS,
};

/// NVIDIA's environment variable for the folder of the control daemon's pipes.
const PIPES: &str = "CUDA_MPS_PIPE_DIRECTORY";

/// A connection to a server.
struct Client {
    server: UnixStream,
    /// Identifies the server in the engine's file.
    tag: u16,
}

static CLIENT: OnceLock<Client> = OnceLock::new();

/// Error that all further calls of this process return; [`SUCCESS`] if its contexts are not lost.
static LOST: AtomicI32 = AtomicI32::new(SUCCESS);

/// Connects this process to its server, if its environment names a control daemon.
pub fn connect() -> Result<(), i32> {
    let Some(folder) = std::env::var_os(PIPES).map(PathBuf::from) else { return Ok(()) };
    let control = folder.join("control");
    if !control.exists() || CLIENT.get().is_some() {
        return Ok(());
    }
    let server = ask(&control, "client").map_err(|_| MPS_CONNECTION_FAILED)?;
    let server = server.1.strip_prefix("server ").and_then(|pid| pid.parse::<u32>().ok());
    let server = server.ok_or(MPS_CONNECTION_FAILED)?;
    let (stream, answer) = ask(&folder.join(format!("server-{server}")), "attach").map_err(|_| MPS_RPC_FAILURE)?;
    match answer.as_str() {
        "ok" => {}
        "full" => return Err(MPS_MAX_CLIENTS_REACHED),
        _ => return Err(MPS_SERVER_NOT_READY),
    }
    let reader = stream.try_clone().map_err(|_| MPS_RPC_FAILURE)?;
    let tag = (server % u32::from(u16::MAX)) as u16 + 1;
    if CLIENT.set(Client { server: stream, tag }).is_ok() {
        crate::spawn("fake-mps", move || {
            let line = BufReader::new(reader).lines().next().and_then(Result::ok);
            lose(match line.as_deref() {
                Some("fault") => ILLEGAL_ADDRESS,
                Some("terminated") => MPS_CLIENT_TERMINATED,
                _ => MPS_RPC_FAILURE,
            });
        });
    }
    Ok(())
}

/// Sends a line, and returns the connection with the answer.
fn ask(path: &Path, line: &str) -> std::io::Result<(UnixStream, String)> {
    let mut stream = UnixStream::connect(path)?;
    writeln!(stream, "{line}")?;
    let (mut answer, mut byte) = (String::new(), [0]);
    // A buffer would also take the server's next line.
    while byte != *b"\n" {
        stream.read_exact(&mut byte)?;
        answer.push(char::from(byte[0]));
    }
    Ok((stream, answer.trim().to_owned()))
}

fn lose(error: i32) {
    let _ = LOST.compare_exchange(SUCCESS, error, Ordering::SeqCst, Ordering::SeqCst);
}

/// Returns the error that all calls return after the contexts are lost.
pub fn lost() -> i32 {
    LOST.load(Ordering::SeqCst)
}

/// Returns a number of this process's server; 0 if the process is not a client.
pub fn tag() -> u16 {
    CLIENT.get().map_or(0, |client| client.tag)
}

/// Handles an illegal access of this process's work.
pub fn fault() {
    lose(ILLEGAL_ADDRESS);
    if let Some(client) = CLIENT.get() {
        let _ = writeln!(&client.server, "fault");
    }
}
