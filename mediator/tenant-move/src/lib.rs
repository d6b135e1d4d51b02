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
use std::fmt;
use std::time::{Duration, Instant};

use cuda_control::{Answer, ArrivalTimes, Card, Request, Tenant};

/// Interval between progress queries to an owner. Programs may be paused during this time.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Time limit for programs of a card's previous owner to reconnect.
// TIMEOUT: an owner waits 2 s for them.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(6);
/// Time limit for allocating host memory, evicting the tenant's memory and draining the work of its programs.
// TIMEOUT: host memory for 140 GiB is allocated in 50 s while the programs run. 60 GiB are evicted in 6 s, and a
// program whose kernel runs longer cannot move.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(120);
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
    /// No owner currently responds.
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
    /// The tenant, as described to the owner of its card.
    pub here: &'a Tenant,
    /// The tenant, as described to the owner of the other card.
    pub there: &'a Tenant,
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
    /// Durations of the parts of the move.
    pub phases: Phases,
}

/// Durations of the parts of a move. The driver's times are those of the program that took longest, because programs
/// move concurrently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Phases {
    /// Time until all memory was in host memory and all programs had unmapped it. The programs run while host memory
    /// is allocated, which takes most of this time.
    pub leave: Duration,
    /// Part of the pause until the programs were connected to the other owner.
    pub connect: Duration,
    /// Part of the pause in which the driver stopped a program and copied its remaining memory from the card.
    pub checkpoint: Duration,
    /// Part of the pause in which the driver restored a program on the other card.
    pub restore: Duration,
    /// Part of the pause after the driver's calls, in which the owner mapped the last chunks.
    pub adopt: Duration,
}

impl Phases {
    /// Sets the phases of the pause to the times of the program that took longest to arrive. `pause` is the whole
    /// pause.
    fn arrived(&mut self, times: &[ArrivalTimes], pause: Duration) {
        let us = Duration::from_micros;
        let Some(longest) = times.iter().max_by_key(|times| times.arrive_us) else { return };
        (self.checkpoint, self.restore) = (us(longest.checkpoint_us), us(longest.restore_us));
        let arrive = us(longest.arrive_us);
        self.adopt = arrive.saturating_sub(self.checkpoint + self.restore);
        self.connect = pause.saturating_sub(arrive);
    }
}

impl From<Phases> for api::TenantMovePhases {
    fn from(phases: Phases) -> Self {
        let Phases { leave, connect, checkpoint, restore, adopt } = phases;
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        Self {
            leave_us: us(leave),
            connect_us: us(connect),
            checkpoint_us: us(checkpoint),
            restore_us: us(restore),
            adopt_us: us(adopt),
        }
    }
}

impl fmt::Display for Phases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { leave, connect, checkpoint, restore, adopt } = self;
        let [leave, connect, checkpoint, restore, adopt] =
            [leave, connect, checkpoint, restore, adopt].map(Duration::as_millis);
        write!(
            f,
            "eviction {leave} ms; connection {connect} ms, checkpoint {checkpoint} ms, restore {restore} ms, chunks \
             {adopt} ms"
        )
    }
}

/// A move that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The tenant stays on its card.
    #[error("{0}")]
    Stays(String),
    /// The tenant is on the other card, because it could not be returned.
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
    let evicting = Instant::now();
    let left = plan.leave(plan.from, LEAVE_TIMEOUT);
    let (began, mut phases) = (Instant::now(), Phases { leave: evicting.elapsed(), ..Phases::default() });
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
    let times = match plan.remove(plan.from, false).and_then(|()| plan.wait_for(&pids)) {
        Ok(times) => times,
        Err(trouble) => return Err(plan.take_back(&pids, trouble.to_string())),
    };
    let pause = began.elapsed();
    phases.arrived(&times, pause);
    Ok(Carried { programs: pids.len(), bytes, pause, phases })
}

impl Plan<'_> {
    fn name(&self) -> String {
        self.here.name.clone()
    }

    /// Checks that the tenant's programs can move, and that both cards have enough space for its memory. Returns the
    /// size of this memory in bytes.
    fn room(&self) -> Result<u64, Trouble> {
        let there = view(self.to)?;
        let may_move = self.check_programs(&there.uuid)?;
        let here = view(self.from)?;
        let found = here.tenants.iter().find(|(_, tenant)| tenant.name == self.here.name);
        if !may_move && found.is_some_and(|(_, tenant)| !tenant.programs.is_empty()) {
            let why = "an owner of the cards has an earlier version and cannot move programs: end them first";
            return Err(Trouble::Refused(why.to_owned()));
        }
        let (placed, in_host) = self.chunks(&here);
        let chunk_bytes = here.memory.summary.chunk_bytes;
        let mib = |chunks: u32| (u64::from(chunks) * chunk_bytes) >> 20;
        let host = |card: &Card| card.memory.summary.host.budget.saturating_sub(card.memory.summary.host.used);
        let lacks = |chunks: u32, room: u32, what: &str| {
            Err(Trouble::Refused(format!("{what} has space for {} MiB, but {} MiB are needed", mib(room), mib(chunks))))
        };
        if placed > host(&here) {
            return lacks(placed, host(&here), "the host memory of its card");
        }
        let (all, room) = (placed.saturating_add(in_host), there.memory.summary.spare().saturating_add(host(&there)));
        if all > room {
            return lacks(all, room, "the other card, with its host memory,");
        }
        Ok(u64::from(all) * chunk_bytes)
    }

    /// Returns the numbers of the tenant's chunks on its card and in host memory.
    fn chunks(&self, here: &Card) -> (u32, u32) {
        let found = here.tenants.iter().find(|(_, tenant)| tenant.name == self.here.name);
        let account = found.and_then(|(id, _)| here.memory.summary.vms.get(id)).copied().unwrap_or_default();
        (account.placed, account.host)
    }

    /// Checks that the tenant's programs can move to the other card, which has the UUID `to`. Waits for programs that
    /// have not reconnected to a restarted owner. Returns false if one of the owners cannot move programs.
    fn check_programs(&self, to: &str) -> Result<bool, Trouble> {
        if to.is_empty() {
            return Ok(false);
        }
        let begin = Instant::now();
        loop {
            match self.from.ask(Request::MayLeave { name: self.name(), to: to.to_owned() }) {
                Ok(Answer::Moving(_)) if begin.elapsed() < RECONNECT_TIMEOUT => std::thread::sleep(POLL_INTERVAL),
                Ok(Answer::Moving(why)) => return Err(Trouble::Refused(format!("{why}: try again"))),
                Err(Trouble::Refused(why)) if why.starts_with("invalid request") => return Ok(false),
                checked => return checked.map(|_| true),
            }
        }
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

    /// Removes the tenant from an owner, which disconnects its programs, or kills them if `kills` is true.
    fn remove(&self, owner: &dyn Owner, kills: bool) -> Result<(), Trouble> {
        let begin = Instant::now();
        loop {
            match owner.ask(Request::Remove { name: self.name(), kills })? {
                Answer::Leaving(_) if begin.elapsed() < UNDO_TIMEOUT => std::thread::sleep(POLL_INTERVAL),
                _ => return Ok(()),
            }
        }
    }

    /// Waits until all programs that still run have arrived. Returns their arrival times.
    fn wait_for(&self, pids: &[u32]) -> Result<Vec<ArrivalTimes>, Trouble> {
        let (begin, mut absent, mut moved) = (Instant::now(), None, Vec::new());
        loop {
            let missing: Vec<u32> = match self.to.ask(Request::Arrivals(self.name())) {
                // A failure to move a program that has exited does not affect the others.
                Ok(Answer::Arrived { failed: Some(why), .. })
                    if pids.iter().any(|pid| lives(*pid) && why.contains(&format!("(process {pid})"))) =>
                {
                    return Err(Trouble::Refused(why));
                }
                Ok(Answer::Arrived { here, times, .. }) => {
                    moved = times;
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
                return Ok(moved);
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

    /// Moves the tenant back to its card, and returns the failure to report.
    fn take_back(&self, pids: &[u32], why: String) -> Failure {
        let undone = self.retry(|| self.leave(self.to, LEAVE_TIMEOUT).map(drop));
        let undone = undone.and_then(|()| {
            let pids: Vec<u32> = pids.iter().copied().filter(|pid| lives(*pid)).collect();
            self.retry(|| {
                // The owner may still have the tenant if the owner restarted before it received the request to remove
                // the tenant.
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

    /// Repeats an attempt while an owner does not respond, for at most [`UNDO_TIMEOUT`].
    fn retry(&self, mut attempt: impl FnMut() -> Result<(), Trouble>) -> Result<(), Trouble> {
        let begin = Instant::now();
        loop {
            match attempt() {
                Err(Trouble::Absent(_)) if begin.elapsed() < UNDO_TIMEOUT => std::thread::sleep(POLL_INTERVAL),
                done => return done,
            }
        }
    }

    /// Reverts a step. Logs an error if this fails.
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
