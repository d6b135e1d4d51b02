//! Processes that use the card but are not managed by the owner, because they bypass the shim or do not belong to a
//! tenant.

use std::collections::{BTreeMap, BTreeSet};

use super::Core;
use super::types::{Action, OnStranger, UnmanagedProcess, User};

/// Number of consecutive polls that must list a process before it is considered unmanaged. A process that is starting
/// or exiting may appear once.
const MIN_POLLS_PRESENT: u32 = 2;

/// Processes that may be unmanaged, each with the number of consecutive polls that listed it, up to
/// [`MIN_POLLS_PRESENT`].
#[derive(Debug, Default)]
pub(super) struct UnmanagedProcesses(BTreeMap<u32, (UnmanagedProcess, u32)>);

impl Core {
    /// Handles NVML's list of the processes that use the card, excluding the owner.
    pub(super) fn users(&mut self, users: Vec<User>) {
        let served: BTreeSet<u32> = self.pids().chain(self.expected.iter().copied()).collect();
        let mut before = std::mem::take(&mut self.strangers.0);
        self.moved.retain(|pid| users.iter().any(|user| user.pid == *pid));
        let is_ours = |pid: u32| served.contains(&pid) || self.moved.contains(&pid) || self.is_server(pid);
        let others: Vec<User> = users.into_iter().filter(|user| !is_ours(user.pid)).collect();
        for User { pid, program, bytes, occupies } in others {
            let looks = before.remove(&pid).map_or(0, |(_, looks)| looks) + 1;
            if looks == MIN_POLLS_PRESENT {
                let kills = self.config.on_stranger == OnStranger::Kill;
                tracing::warn!(pid, program, ?bytes, kills, "a process bypasses the card's owner");
                if kills {
                    self.actions.push(Action::KillStranger { pid });
                }
            }
            self.strangers
                .0
                .insert(pid, (UnmanagedProcess { pid, program, bytes, occupies }, looks.min(MIN_POLLS_PRESENT)));
        }
    }

    /// Returns the unmanaged processes that enough polls have listed.
    pub fn strangers(&self) -> impl Iterator<Item = &UnmanagedProcess> {
        self.strangers.0.values().filter(|(_, looks)| *looks >= MIN_POLLS_PRESENT).map(|(stranger, _)| stranger)
    }
}
