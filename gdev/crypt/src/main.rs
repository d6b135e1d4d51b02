//! The server: `gdev-crypt --file disk.img --key-file key --socket disk.sock --device cuda`.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use gdev::Target;
use gdev_crypt::cipher::{CardMin, Cipher};
use gdev_crypt::key::Key;
use gdev_crypt::nbd;
use gdev_crypt::volume::Volume;

/// Maximum number of concurrent clients. Each client may have a 32 MiB request in memory.
const MAX_CLIENTS: usize = 16;
/// Pause after a client is rejected.
const REFUSED_INTERVAL: Duration = Duration::from_millis(100);

/// Serves an encrypted file as a block device over NBD.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// File or block device that contains the encrypted sectors
    #[arg(long)]
    file: PathBuf,
    /// Key file: 64 bytes or 128 hexadecimal digits, readable by this user only
    #[arg(long)]
    key_file: PathBuf,
    /// UNIX socket for clients such as `qemu-img` and `nbdcopy`
    #[arg(long)]
    socket: PathBuf,
    /// Access rights of the socket, in octal
    #[arg(long, default_value = "600", value_parser = parse_mode)]
    mode: u32,
    /// Device for large requests: cuda, cuda:NUMBER, nouveau, or vgpu:/SOCKET; if not given, the CPU encrypts
    /// everything
    #[arg(long)]
    device: Option<String>,
    /// Minimum request size in bytes for the device; measured if not given
    #[arg(long)]
    device_min_bytes: Option<usize>,
}

fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| format!("{text:?} is not a mode such as 600"))
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let key = Key::read(&arguments.key_file)?;
    let target = arguments.device.as_deref().map(str::parse::<Target>).transpose()?;
    let card_min = arguments.device_min_bytes.map_or(CardMin::Measured, CardMin::Bytes);
    let volume = Arc::new(Volume::open(&arguments.file, Cipher::new(key, target, card_min)?)?);
    let listener = listen(&arguments.socket, arguments.mode)?;
    println!("listening on {}", arguments.socket.display());
    let clients = Arc::new(AtomicUsize::new(0));
    loop {
        let served = listener.accept().and_then(|(stream, _)| {
            if clients.fetch_add(1, Ordering::Relaxed) >= MAX_CLIENTS {
                clients.fetch_sub(1, Ordering::Relaxed);
                return Err(io::Error::other(format!("{MAX_CLIENTS} clients are connected")));
            }
            let (volume, served) = (Arc::clone(&volume), Arc::clone(&clients));
            let serve = move || {
                if let Err(error) = nbd::serve(stream, &volume) {
                    eprintln!("gdev-crypt: a client was disconnected: {error}");
                }
                served.fetch_sub(1, Ordering::Relaxed);
            };
            std::thread::Builder::new().spawn(serve).map(drop).inspect_err(|_| {
                clients.fetch_sub(1, Ordering::Relaxed);
            })
        });
        if let Err(error) = served {
            eprintln!("gdev-crypt: a client was rejected: {error}");
            // The process may be out of descriptors or memory until other clients disconnect.
            std::thread::sleep(REFUSED_INTERVAL);
        }
    }
}

/// Binds the socket. Replaces a stale socket of an earlier run.
fn listen(path: &Path, mode: u32) -> Result<UnixListener> {
    let name = path.display();
    match fs::symlink_metadata(path) {
        Ok(found) => {
            ensure!(found.file_type().is_socket(), "{name} exists and is not a socket");
            match UnixStream::connect(path) {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => fs::remove_file(path)?,
                _ => bail!("another server uses the socket {name}"),
            }
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("the socket {name}")),
    }
    // Prevent other users from connecting before the permissions are set.
    rustix::process::umask(rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
    let listener = UnixListener::bind(path).with_context(|| format!("the socket {name}"))?;
    fs::set_permissions(path, Permissions::from_mode(mode)).with_context(|| format!("the permissions of {name}"))?;
    Ok(listener)
}
