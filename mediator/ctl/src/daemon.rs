//! `mediatorctl daemon`: the daemon's status, and its upgrade while virtual machines are running.

use std::thread;
use std::time::{Duration, Instant};

use clap::Subcommand;

use crate::Form;
use crate::client::{Client, ClientError};

/// Time limit for the new daemon to respond; it already serves the virtual machines.
// TIMEOUT: the new daemon serves its socket immediately after the takeover.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// Interval between attempts to reach the new daemon.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Clone, Debug, Subcommand)]
pub(super) enum DaemonCommand {
    /// Shows the daemon's version and process ID, and the pause of virtual machines at the last upgrade
    Show,
    /// Replaces the running daemon with the program installed at its path, which takes over all virtual machines
    ///
    /// Virtual machines are paused during the takeover. If the new daemon cannot take over everything, the running
    /// daemon continues, and the command reports the reason.
    Upgrade,
}

impl DaemonCommand {
    /// Runs the command.
    ///
    /// # Errors
    /// Returns a [`ClientError`] if a request fails, or if the new daemon does not respond.
    pub(super) fn run(self, client: &Client, form: Form) -> Result<String, ClientError> {
        match self {
            Self::Show => Ok(form.render(&client.get("/v1/daemon")?, show)),
            Self::Upgrade => {
                let api::Upgraded { pid } = client.post("/v1/daemon/upgrade", &())?;
                Ok(form.render(&next(client, pid)?, show))
            }
        }
    }
}

/// Waits until the new daemon responds.
fn next(client: &Client, pid: u32) -> Result<api::DaemonInfo, ClientError> {
    let began = Instant::now();
    loop {
        let found: Result<api::DaemonInfo, _> = client.get("/v1/daemon");
        match found {
            Ok(found) if found.pid == pid => return Ok(found),
            Err(error) if began.elapsed() > ANSWER_LIMIT => return Err(error),
            Ok(found) if began.elapsed() > ANSWER_LIMIT => {
                let what = format!("process {} responded instead of process {pid}, which has taken over", found.pid);
                return Err(ClientError::protocol(what));
            }
            _ => thread::sleep(POLL_INTERVAL),
        }
    }
}

fn show(info: &api::DaemonInfo) -> String {
    let api::DaemonInfo { version, pid, upgrades, upgraded_at, upgrade_pause_ms, upgrade_failures } = info;
    let pause = upgrade_pause_ms.map(|ms| format!("last pause  {ms} ms\n")).unwrap_or_default();
    let failures = if *upgrade_failures == 0 { String::new() } else { format!("failed      {upgrade_failures}\n") };
    let upgraded = upgraded_at.as_deref().map(|at| format!("upgraded    {at}\n")).unwrap_or_default();
    format!("version     {version}\nprocess     {pid}\nupgrades    {upgrades}\n{upgraded}{pause}{failures}")
}
