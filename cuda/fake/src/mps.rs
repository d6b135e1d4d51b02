//! The client side of NVIDIA's Multi-Process Service (MPS), stricter than NVIDIA's implementation.
//!
//! `cuInit` connects to the control daemon whose pipe is in the folder named by [`PIPES`], and then to the server that
//! the daemon names. The process remains a client until it exits. Kernels of one server's clients run concurrently.
//! Kernels of different servers, and of processes that are not clients, run in separate time slices of the engine.
//!
//! An illegal access by one client or the exit of the server destroys the contexts of all clients of the server. If the
//! control daemon does not accept a connection, `cuInit` fails, whereas NVIDIA's driver may continue without MPS. The
//! server-side programs are in `cuda-rig`.
//!
//! The messages are lines on UNIX sockets. The client sends `client` to the control daemon, which replies `server PID`.
//! The client then sends `attach` to the server's socket, and the reply is `ok`, `full` or `fault`. Later, the server
//! can send `fault` or `terminated`, and the client can send `fault`.

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
    /// Number that identifies the server in the engine's file.
    tag: u16,
}

static CLIENT: OnceLock<Client> = OnceLock::new();

/// Error that all later calls of this process return, or [`SUCCESS`] if its contexts are not lost.
static LOST: AtomicI32 = AtomicI32::new(SUCCESS);

/// Connects this process to its server if its environment specifies a control daemon.
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

/// Sends a line and returns the connection and the reply.
fn ask(path: &Path, line: &str) -> std::io::Result<(UnixStream, String)> {
    let mut stream = UnixStream::connect(path)?;
    writeln!(stream, "{line}")?;
    let (mut answer, mut byte) = (String::new(), [0]);
    // A buffered reader could also consume the server's next line.
    while byte != *b"\n" {
        stream.read_exact(&mut byte)?;
        answer.push(char::from(byte[0]));
    }
    Ok((stream, answer.trim().to_owned()))
}

fn lose(error: i32) {
    let _ = LOST.compare_exchange(SUCCESS, error, Ordering::SeqCst, Ordering::SeqCst);
}

/// Returns the error of all calls after the contexts were lost, or [`SUCCESS`] until then.
pub fn lost() -> i32 {
    LOST.load(Ordering::SeqCst)
}

/// Returns the number of this process's server, or 0 if the process is not a client.
pub fn tag() -> u16 {
    CLIENT.get().map_or(0, |client| client.tag)
}

/// Records an illegal access by this process's work: all later calls fail. If the process is a client, notifies its
/// server.
pub fn fault() {
    lose(ILLEGAL_ADDRESS);
    if let Some(client) = CLIENT.get() {
        let _ = writeln!(&client.server, "fault");
    }
}
