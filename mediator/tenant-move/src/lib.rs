//! Moves a tenant of a CUDA card to another card, with its programs. [`carry_over`] sends the requests to the owners of
//! both cards one by one, and reverts them if one fails. [`chosen`] selects the target card, or returns the obstacle.
//!
//! Both owners use the tenant's socket. The tenant belongs to the owner that listens on it, so a program that has left
//! one owner continues with the other one, or with the first one after a failure (decision 163).
//!
//! [`carry_vm`] moves a VM, whose programs continue in new workers (decision 168).
//!
//! The crate does not start owners, and does not know which tenants exist.

#![forbid(unsafe_code)]

mod target;
mod vm;

pub use target::chosen;
pub use vm::{VmPlan, carry_vm};

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use cuda_control::{Answer, Card, Request, Tenant};

/// Interval between progress queries to an owner. Programs are paused during this time.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Time limit for evicting the tenant's memory and draining the work of its programs.
// TIMEOUT: 60 GiB are evicted in 6 s, and a program whose kernel runs longer cannot move now.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for the programs to continue on the other card.
// TIMEOUT: the driver restores the memory of contexts within seconds; an owner that exits is restarted within seconds.
const ARRIVE_TIMEOUT: Duration = Duration::from_secs(45);
/// Time limit for evicting the memory of the other card's tenants for a guarantee.
// TIMEOUT: the same as for a new tenant.
const GUARANTEE_TIMEOUT: Duration = Duration::from_secs(6);
/// Time limit for undoing a step.
// TIMEOUT: an owner that exits is restarted within seconds.
const UNDO_TIMEOUT: Duration = Duration::from_secs(30);

/// Reason why an owner has not executed a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    /// The owner rejected the request.
    #[error("{0}")]
    Refused(String),
    /// No owner responds at present.
    #[error("{0}")]
    Absent(String),
}

/// The owner of a card.
pub trait Owner {
    /// Sends a request and waits for the response.
    ///
    /// # Errors
    /// Returns an error if the owner rejects the request or does not respond.
    fn ask(&self, request: Request) -> Result<Answer, Trouble>;
}

/// A tenant's move to another card.
#[derive(Clone, Copy)]
pub struct Plan<'a> {
    /// The owner of the tenant's card.
    pub from: &'a dyn Owner,
    /// The owner of the other card.
    pub to: &'a dyn Owner,
    /// The tenant in the form of its card's owner.
    pub here: &'a Tenant,
    /// The tenant in the form of the other card's owner.
    pub there: &'a Tenant,
    /// Set if running programs are moved too. The daemon does not set it: after driver 580 has restored a program on
    /// another card, the program can import chunks only if its driver saw both cards from the start, but the library
    /// shows only the tenant's cards to the driver (decision 163).
    pub moves_programs: bool,
}

/// A completed move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried {
    /// Number of programs that have moved.
    pub programs: usize,
    /// Total size of the tenant's chunks in bytes.
    pub bytes: u64,
    /// Time during which the programs could not use a card.
    pub pause: Duration,
}

/// A move that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The tenant stays on its card.
    #[error("{0}")]
    Stays(String),
    /// The tenant belongs to the other card, because it could not be returned.
    #[error("it has moved, but {0}")]
    Moved(String),
}

/// Moves a tenant to another card.
///
/// # Errors
/// Returns the reason why the move failed. The variant identifies the card that the tenant is on.
pub fn carry_over(plan: Plan<'_>) -> Result<Carried, Failure> {
    let stays = |trouble: Trouble| Failure::Stays(trouble.to_string());
    let bytes = plan.room().map_err(stays)?;
    plan.add(plan.to, &Tenant { arrives: true, ..plan.there.clone() }).map_err(stays)?;
    let left = plan.leave(plan.from, LEAVE_TIMEOUT);
    let began = Instant::now();
    let arrived = left.and_then(|pids| {
        plan.to.ask(Request::Arrive { name: plan.name(), pids: pids.clone() })?;
        Ok(pids)
    });
    let pids = match arrived {
        Ok(pids) => pids,
        Err(trouble) => {
            plan.undo("it stays", || plan.from.ask(Request::Stay(plan.name())).map(drop));
            plan.undo("the other card", || plan.remove(plan.to, false));
            return Err(stays(trouble));
        }
    };
    if let Err(trouble) = plan.remove(plan.from, false).and_then(|()| plan.wait_for(&pids)) {
        return Err(plan.take_back(&pids, trouble.to_string()));
    }
    Ok(Carried { programs: pids.len(), bytes, pause: began.elapsed() })
}

impl Plan<'_> {
    fn name(&self) -> String {
        self.here.name.clone()
    }

    /// Checks that both cards have space for the tenant's memory. Returns the size of this memory in bytes.
    fn room(&self) -> Result<u64, Trouble> {
        let (here, there) = (view(self.from)?, view(self.to)?);
        let found = here.tenants.iter().find(|(_, tenant)| tenant.name == self.here.name);
        let running = found.map_or(0, |(_, tenant)| tenant.programs.len());
        if running > 0 && !self.moves_programs {
            return Err(Trouble::Refused(format!(
                "{running} of its programs run, and NVIDIA's driver cannot yet continue them on another card: end them \
                 first"
            )));
        }
        let id = found.map(|(id, _)| *id);
        let account = id.and_then(|id| here.memory.summary.vms.get(&id)).copied().unwrap_or_default();
        let chunk_bytes = here.memory.summary.chunk_bytes;
        let mib = |chunks: u32| (u64::from(chunks) * chunk_bytes) >> 20;
        let host = |card: &Card| card.memory.summary.host.budget.saturating_sub(card.memory.summary.host.used);
        let lacks = |chunks: u32, room: u32, what: &str| {
            Err(Trouble::Refused(format!("{what} has space for {} MiB, but {} MiB are needed", mib(room), mib(chunks))))
        };
        if account.placed > host(&here) {
            return lacks(account.placed, host(&here), "the host memory of its card");
        }
        let (all, room) = (account.placed + account.host, there.memory.summary.spare().saturating_add(host(&there)));
        if all > room {
            return lacks(all, room, "the other card, with its host memory,");
        }
        Ok(u64::from(all) * chunk_bytes)
    }

    /// Adds the tenant to an owner.
    fn add(&self, owner: &dyn Owner, tenant: &Tenant) -> Result<(), Trouble> {
        let begin = Instant::now();
        loop {
            match owner.ask(Request::Add(tenant.clone()))? {
                Answer::Moving(_) if begin.elapsed() < GUARANTEE_TIMEOUT => std::thread::sleep(POLL_INTERVAL),
                Answer::Moving(why) => return Err(Trouble::Refused(why)),
                _ => return Ok(()),
            }
        }
    }

    /// Makes the tenant's programs leave a card. Returns their process IDs.
    fn leave(&self, owner: &dyn Owner, limit: Duration) -> Result<Vec<u32>, Trouble> {
        let begin = Instant::now();
        loop {
            match owner.ask(Request::Leave(self.name()))? {
                Answer::Moving(_) if begin.elapsed() < limit => std::thread::sleep(POLL_INTERVAL),
                Answer::Moving(why) => return Err(Trouble::Refused(format!("{why} after {} s", limit.as_secs()))),
                Answer::Left(pids) => return Ok(pids),
                other => return Err(unexpected(&other)),
            }
        }
    }

    /// Removes the tenant from an owner, which disconnects or kills its programs.
    fn remove(&self, owner: &dyn Owner, kills: bool) -> Result<(), Trouble> {
        let begin = Instant::now();
        loop {
            match owner.ask(Request::Remove { name: self.name(), kills })? {
                Answer::Leaving(_) if begin.elapsed() < UNDO_TIMEOUT => std::thread::sleep(POLL_INTERVAL),
                _ => return Ok(()),
            }
        }
    }

    /// Waits until all programs that are still running have arrived.
    fn wait_for(&self, pids: &[u32]) -> Result<(), Trouble> {
        let (begin, mut absent) = (Instant::now(), None);
        loop {
            let missing: Vec<u32> = match self.to.ask(Request::Arrivals(self.name())) {
                Ok(Answer::Arrived { failed: Some(why), .. }) => return Err(Trouble::Refused(why)),
                Ok(Answer::Arrived { here, .. }) => {
                    let here: BTreeSet<u32> = here.into_iter().collect();
                    pids.iter().copied().filter(|pid| !here.contains(pid) && lives(*pid)).collect()
                }
                Ok(other) => return Err(unexpected(&other)),
                // The daemon restarts an owner that has exited.
                Err(Trouble::Absent(why)) => {
                    absent = Some(why);
                    pids.iter().copied().filter(|pid| lives(*pid)).collect()
                }
                Err(refused) => return Err(refused),
            };
            if missing.is_empty() {
                return Ok(());
            }
            if begin.elapsed() >= ARRIVE_TIMEOUT {
                let why = absent.unwrap_or_else(|| "see the log of the owners".to_owned());
                let limit = ARRIVE_TIMEOUT.as_secs();
                return Err(Trouble::Refused(format!(
                    "the processes {missing:?} have not continued on it within {limit} s: {why}"
                )));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns the tenant to its card.
    fn take_back(&self, pids: &[u32], why: String) -> Failure {
        let undone = self.retry(|| self.leave(self.to, LEAVE_TIMEOUT).map(drop));
        let undone = undone.and_then(|()| {
            let pids: Vec<u32> = pids.iter().copied().filter(|pid| lives(*pid)).collect();
            self.retry(|| {
                // The owner may still have the tenant, if it restarted before it was requested to remove the tenant.
                let arrive = || self.from.ask(Request::Arrive { name: self.name(), pids: pids.clone() }).map(drop);
                match arrive() {
                    // If the tenant is not leaving, this request has no effect.
                    Ok(()) => self.from.ask(Request::Stay(self.name())).map(drop),
                    Err(Trouble::Refused(_)) => self.add(self.from, self.here).and_then(|()| arrive()),
                    absent => absent,
                }
            })
        });
        match undone {
            Ok(()) => {
                self.undo("the other card", || self.remove(self.to, false));
                Failure::Stays(why)
            }
            Err(trouble) => {
                self.undo("the move back", || self.to.ask(Request::Stay(self.name())).map(drop));
                Failure::Moved(format!("{why}; it cannot return to its card: {trouble}"))
            }
        }
    }

    /// Repeats an attempt while no owner responds.
    fn retry(&self, mut attempt: impl FnMut() -> Result<(), Trouble>) -> Result<(), Trouble> {
        let begin = Instant::now();
        loop {
            match attempt() {
                Err(Trouble::Absent(_)) if begin.elapsed() < UNDO_TIMEOUT => std::thread::sleep(POLL_INTERVAL),
                done => return done,
            }
        }
    }

    /// Reverts a step.
    fn undo(&self, what: &str, attempt: impl FnMut() -> Result<(), Trouble>) {
        if let Err(error) = self.retry(attempt) {
            tracing::error!(tenant = self.here.name, what, %error, "a step of a failed move could not be undone");
        }
    }
}

fn view(owner: &dyn Owner) -> Result<Card, Trouble> {
    match owner.ask(Request::View { since_ns: u64::MAX })? {
        Answer::View(card) => Ok(*card),
        other => Err(unexpected(&other)),
    }
}

fn unexpected(answer: &Answer) -> Trouble {
    Trouble::Refused(format!("the owner responded {answer:?}: it has a different version"))
}

/// Returns true if a process exists and is not a zombie.
fn lives(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

#[cfg(test)]
mod tests;
