//! Saves virtual machines to files, and restores them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Form;
use super::client::{self, Client, ClientError};
use super::progress::Progress;
use api::Restored;
use serde_json::json;

/// Time limit for a save or restore.
// TIMEOUT: longer than the daemon's own limit, so that the daemon can report the cause.
const SAVE_TIMEOUT: Duration = Duration::from_secs(1200);

/// A temporary file next to its target. Dropping it removes the temporary name.
struct Beside {
    file: File,
    path: PathBuf,
}

impl Beside {
    /// Creates the file, readable only by its owner because it contains guest memory.
    fn create(target: &Path) -> io::Result<Self> {
        let name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let name = format!(".{}.{}.part", name.to_string_lossy(), std::process::id());
        let path = target.with_file_name(name);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        Ok(Self { file, path })
    }

    /// Moves the file to its target. Replaces an existing target if `force` is set.
    fn finish(self, target: &Path, force: bool) -> io::Result<()> {
        self.file.sync_all()?;
        // The link fails if the target has been created in the meantime.
        if force { fs::rename(&self.path, target) } else { fs::hard_link(&self.path, target) }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // After a rename, the temporary name no longer exists.
        let _ = fs::remove_file(&self.path);
    }
}

/// Saves a virtual machine and returns the output.
pub(super) fn save(client: Client, form: Form, name: &str, file: &Path, force: bool) -> Result<String, ClientError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::AlreadyExists if !force => ClientError::Exists { path: file.to_owned() },
        _ => ClientError::File { path: file.to_owned(), source },
    };
    if !force && fs::symlink_metadata(file).is_ok() {
        return Err(ClientError::Exists { path: file.to_owned() });
    }
    let mut beside = Beside::create(file).map_err(failed)?;
    let progress = Progress::of_bytes(form, None, format!("saving VM {name}"));
    let mut bytes = 0u64;
    client.waiting(SAVE_TIMEOUT).stream_out(&format!("/v1/vms/{}/save", client::segment(name)), |piece| {
        bytes = bytes.saturating_add(piece.len() as u64);
        progress.advance(piece.len());
        beside.file.write_all(piece).map_err(failed)
    })?;
    beside.finish(file, force).map_err(failed)?;
    drop(progress);
    let done = json!({ "vm": name, "file": file.display().to_string(), "bytes": bytes });
    Ok(form.render(&done, |_| format!("VM {name} saved to {}: {} MiB\n", file.display(), bytes.div_ceil(1 << 20))))
}

/// Restores a virtual machine and returns the output.
pub(super) fn restore(client: Client, form: Form, name: &str, file: &Path) -> Result<String, ClientError> {
    let source = File::open(file).map_err(|source| ClientError::Unreadable { path: file.to_owned(), source })?;
    let path = format!("/v1/vms/{}/restore", client::segment(name));
    let total = source.metadata().ok().map(|metadata| metadata.len());
    let progress = Progress::of_bytes(form, total, format!("restoring VM {name}"));
    let done: Restored = client.waiting(SAVE_TIMEOUT).stream_in(&path, progress.counted(source))?;
    drop(progress);
    Ok(form.render(&done, |done| {
        let Restored { vm, card, memory_mib, pause_ms } = done;
        format!("VM {vm} continues from {} on {card}: {memory_mib} MiB, paused for {pause_ms} ms\n", file.display())
    }))
}
