//! The control socket, which accepts requests to restart workers.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::programs::Programs;

/// Maximum length of a request in bytes.
const MAX_REQUEST: u64 = 64;
/// Time limit for each read of a client's request.
// TIMEOUT: only a client that does not send a complete line waits this long.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// Listens on a socket, with a thread for each connection.
pub fn listen(path: &Path, programs: Arc<Programs>) -> Result<()> {
    let socket = UnixListener::bind(path).with_context(|| format!("bind {}", path.display()))?;
    std::thread::spawn(move || {
        for connection in socket.incoming().flatten() {
            let programs = Arc::clone(&programs);
            std::thread::spawn(move || serve(&connection, &programs));
        }
    });
    Ok(())
}

/// Handles a connection's request.
fn serve(mut connection: &UnixStream, programs: &Programs) {
    let reply = match request(connection).and_then(|process| programs.restart(process)) {
        // The supervising thread replies at the latest when the worker exits.
        Ok(result) => result.recv().unwrap_or_else(|_| Err("the worker has ended".to_owned())),
        Err(error) => Err(format!("{error:#}")),
    };
    // Ignore errors, because the client may have disconnected.
    let _ = match reply {
        Ok(process) => writeln!(connection, "worker {process}"),
        Err(reason) => writeln!(connection, "refused: {reason}"),
    };
}

/// Reads a request. Returns the worker's process ID.
fn request(connection: &UnixStream) -> Result<u32> {
    connection.set_read_timeout(Some(REQUEST_LIMIT))?;
    let mut line = String::new();
    BufReader::new(connection.take(MAX_REQUEST)).read_line(&mut line).context("read a request")?;
    let process = line.trim().strip_prefix("restart ").and_then(|process| process.parse().ok());
    process.with_context(|| format!("{:?} is not a request: use \"restart PID\"", line.trim()))
}
