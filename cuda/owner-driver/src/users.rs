//! A thread that regularly queries NVML for the processes that use the card, and NVML and the driver for the memory in
//! use.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use crate::{Driver, nvml_uuid};

/// File name of NVML's library.
const NAME: &str = "libnvidia-ml.so.1";
/// Interval between polls.
// TIMEOUT: an unmanaged process is detected within seconds; a poll takes NVML less than a millisecond.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Initial delay before NVML is polled again after a failure. The delay doubles with each further failure, up to
/// [`AGAIN_MOST`].
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Maximum delay before NVML is polled again after a failure.
// TIMEOUT: a driver upgrade or a card reset completes within minutes.
const AGAIN_MOST: Duration = Duration::from_secs(60);

/// Minimum utilization of a process in an NVML sample, in percent, for the process to count as occupying the card.
const OCCUPIES_PERCENT: u32 = 10;

/// Maximum wait for the first poll.
// TIMEOUT: a poll takes a fraction of a second; an owner starts serving even without a result.
const FIRST_POLL_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the path of NVML's library, which is in the folder of the driver's library.
pub(crate) fn library(driver: &Path) -> PathBuf {
    match driver.parent().is_some_and(|folder| !folder.as_os_str().is_empty()) {
        true => driver.with_file_name(NAME),
        false => NAME.into(),
    }
}

/// A process that uses the card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Process ID.
    pub pid: u32,
    /// Name of the process's program, or empty if the process has exited.
    pub program: String,
    /// Card memory that the process itself uses, in bytes, if known.
    pub bytes: Option<u64>,
    /// Set if a sample since the previous poll shows at least `OCCUPIES_PERCENT` utilization by the process.
    pub occupies: bool,
}

/// A result of a poll.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CardUse {
    /// The other processes that use the card, and the card memory of this process in bytes, if known.
    Users(Vec<User>, Option<u64>),
    /// Used card memory that NVML does not attribute to any process, in bytes.
    InUseForNobody(u64),
    /// NVML does not report which processes use the card, or how much memory they use.
    Unknown,
    /// The card has failed. Contains the reason.
    Lost(String),
}

/// Handle of the thread. Dropping it stops the thread.
#[derive(Debug)]
pub struct Users {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Users {
    /// Starts monitoring the card with this UUID. `driver` is the path of the driver's library; NVML's library is in
    /// the same folder. The thread passes each result to `report`. Returns after the first poll, a failure of NVML, or
    /// `FIRST_POLL_TIMEOUT`.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be started.
    pub fn start(
        driver: &Path,
        uuid: [u8; 16],
        card: &Arc<dyn Driver>,
        report: impl Fn(CardUse) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (end, ended) = channel();
        let card = Arc::clone(card);
        let path = library(driver);
        let (first, looked) = channel();
        let thread = std::thread::Builder::new().name("cuda-users".into());
        let thread = thread.spawn(move || {
            let mut fails = Fails::default();
            loop {
                let put = |found| {
                    report(found);
                    // The caller waits only for the first poll.
                    let _ = first.send(());
                };
                let watched = watch(&path, uuid, &*card, &put, &ended, &mut fails);
                let Err(error) = watched else { return };
                let _ = first.send(());
                report(CardUse::Unknown);
                let again = fails.again();
                let path = path.display();
                if fails.0 == 1 {
                    tracing::warn!(
                        %path, %error, again_in = ?again,
                        "NVML cannot list the processes that use the card: until it does, processes that bypass the \
                         owner are not detected"
                    );
                } else {
                    tracing::debug!(%path, %error, again_in = ?again, "NVML still fails");
                }
                if ended.recv_timeout(again) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        })?;
        let _ = looked.recv_timeout(FIRST_POLL_TIMEOUT);
        Ok(Self { end: Some(end), thread: Some(thread) })
    }
}

impl Drop for Users {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Number of consecutive NVML failures.
#[derive(Debug, Default)]
struct Fails(u32);

impl Fails {
    /// Records an NVML failure. Returns the delay before the next attempt.
    fn again(&mut self) -> Duration {
        let wait = MIN_RETRY_DELAY.saturating_mul(2u32.saturating_pow(self.0)).min(AGAIN_MOST);
        self.0 = self.0.saturating_add(1);
        wait
    }

    /// Records that NVML has succeeded.
    fn none(&mut self) {
        if std::mem::take(&mut self.0) > 0 {
            tracing::info!("NVML can list the processes that use the card again");
        }
    }
}

/// Polls until monitoring is stopped or NVML fails.
fn watch(
    path: &Path,
    uuid: [u8; 16],
    card: &dyn Driver,
    put: &dyn Fn(CardUse),
    ended: &Receiver<()>,
    fails: &mut Fails,
) -> Result<(), NvmlError> {
    let nvml = Nvml::builder().lib_path(path.as_os_str()).init()?;
    let device = nvml.device_by_uuid(nvml_uuid(uuid))?;
    let mut comparable = None;
    let mut sampled = 0;
    loop {
        let free = card.free_bytes();
        if let Err(error) = &free
            && error.is_card_lost()
        {
            put(CardUse::Lost(error.to_string()));
        }
        let users = users(&device, &mut sampled)?;
        fails.none();
        // The owner has a context. If NVML does not list the owner's process, as in a container, the other entries are
        // not valid either.
        let (mine, others): (Vec<_>, Vec<_>) = users.into_iter().partition(|user| user.pid == std::process::id());
        let own = !mine.is_empty();
        if own {
            let of_each: Option<Vec<u64>> = mine.iter().chain(&others).map(|user| user.bytes).collect();
            put(CardUse::Users(others, mine.first().and_then(|own| own.bytes)));
            put(match (of_each, free) {
                (Some(of_each), Ok(free)) => {
                    let used = card.device().total_bytes.saturating_sub(free);
                    let of_processes = of_each.into_iter().fold(0, u64::saturating_add);
                    CardUse::InUseForNobody(used.saturating_sub(of_processes))
                }
                // Some systems do not report the memory of a process, or the driver has failed.
                _ => CardUse::Unknown,
            });
        }
        if comparable != Some(own) && !own {
            put(CardUse::Unknown);
            tracing::info!("NVML does not list this process: processes that bypass the card's owner are not detected");
        }
        comparable = Some(own);
        if ended.recv_timeout(POLL_INTERVAL) != Err(RecvTimeoutError::Timeout) {
            return Ok(());
        }
    }
}

/// Returns the processes that have occupied the card since the timestamp `sampled`, and sets `sampled` to the timestamp
/// of the latest sample. The set is empty if NVML does not report utilization.
fn occupants(device: &Device<'_>, sampled: &mut u64) -> BTreeSet<u32> {
    let samples = device.process_utilization_stats(*sampled).unwrap_or_default();
    *sampled = samples.iter().map(|sample| sample.timestamp).fold(*sampled, u64::max);
    samples.iter().filter(|sample| sample.sm_util >= OCCUPIES_PERCENT).map(|sample| sample.pid).collect()
}

fn users(device: &Device<'_>, sampled: &mut u64) -> Result<Vec<User>, NvmlError> {
    let all = device.running_compute_processes()?;
    let occupants = occupants(device, sampled);
    Ok(all
        .into_iter()
        .map(|process| {
            let program = std::fs::read_to_string(format!("/proc/{}/comm", process.pid)).unwrap_or_default();
            let bytes = match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some(bytes),
                UsedGpuMemory::Unavailable => None,
            };
            // A process chooses its own name. The name must not start a new log line or send control sequences to a
            // terminal.
            let program = program.trim().replace(char::is_control, "\u{fffd}");
            User { pid: process.pid, program, bytes, occupies: occupants.contains(&process.pid) }
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failing_library_is_retried_with_backoff_until_it_answers() {
        let mut fails = Fails::default();
        let seconds: Vec<u64> = (0..9).map(|_| fails.again().as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        fails.none();
        assert_eq!(fails.again(), MIN_RETRY_DELAY);
    }
}
