//! `mediatorctl sched replay`: replays the decisions in a recording of a card's scheduler.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use sched::trace::Trace;
use sched::{Config, Engine, PolicyKind, Scheduler};
use serde::Serialize;

use super::client::ClientError;

/// Result of replaying a recording.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Replayed {
    /// Number of events in the recording.
    pub events: usize,
    /// Time from the start of the recording to the last event, in ns.
    pub length_ns: u64,
    /// Policy at the end of the replay.
    pub policy: PolicyKind,
    /// True if the replay used the recorded policy, so its decisions match the recording; false with `--policy`.
    pub recorded: bool,
    /// Usage of each engine by each virtual machine. Unused engines are omitted.
    pub uses: Vec<ReplayedUse>,
}

/// A virtual machine's usage of an engine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReplayedUse {
    /// Name of the virtual machine, or its ID if it was added after the start of the recording.
    pub vm: String,
    /// Engine that the virtual machine used.
    pub engine: Engine,
    /// Engine time that the virtual machine used, in ns.
    pub used_ns: u64,
    /// The VM's fraction of the engine's total use, in percent.
    pub share_percent: f64,
    /// Number of completed submissions.
    pub completed: u64,
    /// Median time from arrival to start, in ns.
    pub wait_p50_ns: u64,
    /// 99th percentile of the time from arrival to start, in ns.
    pub wait_p99_ns: u64,
}

/// Replays a recording with the recorded policy, or with another one.
///
/// # Errors
/// Returns an error if the file is not a recording, or if, under the recorded policy, a decision differs from the
/// recorded one.
pub fn replay(file: &Path, policy: Option<PolicyKind>) -> Result<Replayed, ClientError> {
    let wrong = |source| ClientError::Record { path: file.to_owned(), source };
    let opened = File::open(file).map_err(|error| wrong(error.into()))?;
    let trace = Trace::read(BufReader::new(opened)).map_err(wrong)?;
    let scheduler = match policy {
        Some(policy) => {
            let config = Config { policy, ..*trace.scheduler.config() };
            trace.under(config).map_err(|error| ClientError::protocol(error.to_string()))?
        }
        None => {
            let replay = trace.replay();
            if let Some((first, _)) = replay.other.first() {
                let (other, events) = (replay.other.len(), trace.entries.len());
                let first = trace.lines.get(*first).copied().unwrap_or_default();
                return Err(ClientError::Differs { other, events, first });
            }
            replay.scheduler
        }
    };
    Ok(Replayed {
        events: trace.entries.len(),
        length_ns: trace.length(),
        policy: scheduler.config().policy,
        recorded: policy.is_none(),
        uses: uses(&trace, &scheduler),
    })
}

fn uses(trace: &Trace, scheduler: &Scheduler) -> Vec<ReplayedUse> {
    let mut uses = Vec::new();
    for engine in Engine::ALL {
        let accounts: Vec<_> = scheduler.vgpus().filter_map(|vm| Some((vm, scheduler.account(vm, engine)?))).collect();
        let all: u64 = accounts.iter().map(|(_, account)| account.used).fold(0, u64::saturating_add);
        for (vm, account) in accounts.into_iter().filter(|(_, account)| account.completed > 0) {
            uses.push(ReplayedUse {
                vm: trace.names.get(&vm).cloned().unwrap_or_else(|| format!("#{}", vm.0)),
                engine,
                used_ns: account.used,
                share_percent: account.used as f64 / all.max(1) as f64 * 100.0,
                completed: account.completed,
                wait_p50_ns: account.waits.quantile(500),
                wait_p99_ns: account.waits.quantile(990),
            });
        }
    }
    uses
}
