//! Decides when to move which VMs from busy cards to idle ones.
//!
//! [`Rebalancer`] selects at most one VM per round, based on the given loads and time.
//!
//! The crate does not measure loads or move VMs; the daemon does both.

use std::collections::BTreeMap;
use std::time::Duration;

use config::RebalanceSpec;
use sched::Engine;

/// Load of a fully used card, in permille.
const WHOLE_CARD_PERMILLE: u64 = 1000;
/// Minimum reduction of the load difference by a move, in permille of a card. Compensates for load fluctuations.
const MIN_GAIN_PERMILLE: u64 = 50;
/// Divisor that converts the amount of memory to copy into the cost of a move. A move must reduce the load difference
/// by more than its cost plus the minimum.
const COST: u64 = 10;

/// Utilization of each engine in permille.
pub type Busy = [u32; Engine::COUNT];

/// Load of a shared card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardLoad {
    /// Card name.
    pub name: String,
    /// Size of the card memory available to VMs, in MiB.
    pub shared_mib: u64,
    /// Size of the card memory used by VMs, in MiB.
    pub placed_mib: u64,
    /// Utilization of each engine in the last measurement window.
    pub busy: Busy,
}

impl CardLoad {
    /// Returns the load of the card in permille, which is the maximum of its memory utilization and the utilization of
    /// each engine.
    fn load(&self) -> u64 {
        let memory = self.placed_mib.saturating_mul(WHOLE_CARD_PERMILLE) / self.shared_mib.max(1);
        let busy = self.busy.iter().copied().max().unwrap_or(0);
        memory.max(u64::from(busy)).min(WHOLE_CARD_PERMILLE)
    }

    fn with(&self, vm: &VmLoad) -> Self {
        let mut busy = self.busy;
        busy.iter_mut().zip(vm.busy).for_each(|(all, one)| *all = all.saturating_add(one));
        Self { placed_mib: self.placed_mib.saturating_add(vm.placed_mib), busy, ..self.clone() }
    }

    fn without(&self, vm: &VmLoad) -> Self {
        let mut busy = self.busy;
        busy.iter_mut().zip(vm.busy).for_each(|(all, one)| *all = all.saturating_sub(one));
        Self { placed_mib: self.placed_mib.saturating_sub(vm.placed_mib), busy, ..self.clone() }
    }
}

/// Load that a VM places on its card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmLoad {
    /// VM name.
    pub name: String,
    /// Name of the VM's card.
    pub card: String,
    /// Size of the VM's card memory, in MiB.
    pub placed_mib: u64,
    /// Utilization of each engine by the VM in the last measurement window.
    pub busy: Busy,
    /// Names of the cards that can accept the VM.
    pub fits: Vec<String>,
}

/// Recommended move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// VM name.
    pub vm: String,
    /// Name of the target card.
    pub to: String,
    /// Human-readable reason for the move.
    pub why: String,
}

/// State that persists between rounds.
#[derive(Debug)]
pub struct Rebalancer {
    spec: RebalanceSpec,
    /// Number of consecutive rounds in which the load difference exceeded the limit.
    rounds: u32,
    /// Time of the last move or attempted move of each VM.
    moved: BTreeMap<String, Duration>,
}

impl Rebalancer {
    /// Creates the initial state.
    #[must_use]
    pub fn new(spec: RebalanceSpec) -> Self {
        Self { spec, rounds: 0, moved: BTreeMap::new() }
    }

    /// Evaluates the current loads, and returns the move to execute, if any.
    pub fn round(&mut self, now: Duration, cards: &[CardLoad], vms: &[VmLoad]) -> Option<Advice> {
        let rest = Duration::from_secs(self.spec.rest_s);
        self.moved.retain(|_, then| now.saturating_sub(*then) < rest);
        // Among cards with the same load, select the first one, so that the result is deterministic.
        let fullest = cards.iter().rev().max_by_key(|card| card.load())?;
        let emptiest = cards.iter().min_by_key(|card| card.load())?;
        let before = fullest.load() - emptiest.load();
        if before <= self.spec.above_percent.saturating_mul(WHOLE_CARD_PERMILLE / 100) {
            self.rounds = 0;
            return None;
        }
        self.rounds = self.rounds.saturating_add(1);
        if self.rounds < self.spec.for_rounds {
            return None;
        }
        let worth = |vm: &&VmLoad| {
            let (from, to) = (fullest.without(vm).load(), emptiest.with(vm).load());
            // The source must remain the busier card, so that the next move never reverses this one.
            let after = from.checked_sub(to)?;
            let cost = vm.placed_mib.saturating_mul(WHOLE_CARD_PERMILLE) / emptiest.shared_mib.max(1) / COST;
            (before.saturating_sub(after) > MIN_GAIN_PERMILLE.saturating_add(cost)).then_some(after)
        };
        let here = vms.iter().filter(|vm| vm.card == fullest.name && vm.fits.contains(&emptiest.name));
        let here = here.filter(|vm| !self.moved.contains_key(&vm.name));
        let best = here
            .filter_map(|vm| Some((worth(&vm)?, vm.placed_mib, &vm.name, vm)))
            .min_by_key(|one| (one.0, one.1, one.2));
        let (after, _, _, vm) = best?;
        let (name, least) = (&fullest.name, &emptiest.name);
        let percent = |load: u64| format!("{}.{} %", load / 10, load % 10);
        let why = format!(
            "`{name}` has a load of {} and `{least}` of {}, {} rounds in a row; the move reduces the difference to {}",
            percent(fullest.load()),
            percent(emptiest.load()),
            self.rounds,
            percent(after)
        );
        self.rounds = 0;
        Some(Advice { vm: vm.name.clone(), to: emptiest.name.clone(), why })
    }

    /// Suspends moves of a VM for the configured rest time after an attempted move.
    pub fn rests(&mut self, vm: String, now: Duration) {
        self.moved.insert(vm, now);
    }
}

/// Moves VMs off a card with `move_off`, one after the other. After each pass in which a VM has moved, retries the VMs
/// whose errors `is_retried` accepts, because an affinity rule may permit another card after a move. Returns the
/// results of the moves, and the remaining VMs with their errors, sorted by name.
pub fn emptied<T, E>(
    mut vms: Vec<String>,
    mut move_off: impl FnMut(&str) -> Result<Option<T>, E>,
    is_retried: impl Fn(&E) -> bool,
) -> (Vec<T>, Vec<(String, E)>) {
    let (mut moved, mut left) = (Vec::new(), Vec::new());
    loop {
        let before = moved.len();
        let mut again = Vec::new();
        for vm in std::mem::take(&mut vms) {
            match move_off(&vm) {
                Ok(done) => moved.extend(done),
                Err(error) if is_retried(&error) => again.push((vm, error)),
                Err(error) => left.push((vm, error)),
            }
        }
        if again.is_empty() || moved.len() == before {
            left.extend(again);
            left.sort_by(|(one, _), (other, _)| one.cmp(other));
            return (moved, left);
        }
        vms = again.into_iter().map(|(vm, _)| vm).collect();
    }
}

#[cfg(test)]
mod tests;
