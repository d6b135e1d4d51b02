//! Chooses virtual machines to move automatically from full cards to empty ones, and decides when to move them.
//!
//! [`Rebalancer`] decides from the given loads and time, and chooses at most one virtual machine per round.
//!
//! The crate does not read the load of cards, and does not move anything; the daemon does both.

use std::collections::BTreeMap;
use std::time::Duration;

use config::RebalanceSpec;
use sched::Engine;

/// A whole card, in thousandths.
const WHOLE_CARD_PERMILLE: u64 = 1000;
/// Minimum amount, in thousandths of a card, by which a move must reduce the difference, because loads fluctuate.
const MIN_GAIN_PERMILLE: u64 = 50;
/// Number by which the memory to copy is divided to obtain the cost of a move. A move must reduce the difference by its
/// cost plus the margin.
const COST: u64 = 10;

/// Used fraction of each engine's time, in thousandths.
pub type Busy = [u32; Engine::COUNT];

/// A card that virtual machines share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardLoad {
    /// Name of the card.
    pub name: String,
    /// Memory of the card for virtual machines, in MiB.
    pub shared_mib: u64,
    /// Part of this memory in use, in MiB.
    pub placed_mib: u64,
    /// Part of the last window for which each engine was busy.
    pub busy: Busy,
}

impl CardLoad {
    /// Returns the load of the card in thousandths: the used part of its memory, or of its busiest engine's time if
    /// that is higher.
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

/// A virtual machine's share of its card's load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmLoad {
    /// Name of the virtual machine.
    pub name: String,
    /// Current card of the virtual machine.
    pub card: String,
    /// Card memory that the virtual machine uses, in MiB.
    pub placed_mib: u64,
    /// Part of the last window for which each engine was busy for the virtual machine.
    pub busy: Busy,
    /// Cards to which the virtual machine can move.
    pub fits: Vec<String>,
}

/// A worthwhile move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// The virtual machine.
    pub vm: String,
    /// The card to which the virtual machine moves.
    pub to: String,
    /// Reason for the move, as text.
    pub why: String,
}

/// State of the decision between rounds.
#[derive(Debug)]
pub struct Rebalancer {
    spec: RebalanceSpec,
    /// Number of consecutive rounds in which the cards differed too much.
    rounds: u32,
    /// Time at which each virtual machine was last moved, or a move was last attempted.
    moved: BTreeMap<String, Duration>,
}

impl Rebalancer {
    /// Creates the state before the first round.
    #[must_use]
    pub fn new(spec: RebalanceSpec) -> Self {
        Self { spec, rounds: 0, moved: BTreeMap::new() }
    }

    /// Examines the loads once, and returns the move that is due, if any.
    pub fn round(&mut self, now: Duration, cards: &[CardLoad], vms: &[VmLoad]) -> Option<Advice> {
        let rest = Duration::from_secs(self.spec.rest_s);
        self.moved.retain(|_, then| now.saturating_sub(*then) < rest);
        // Among equal candidates, choose the first by name, so that equal rounds give equal results.
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
            // The fuller of the two cards must remain the fuller one, so that the next move never reverses this one.
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
            "`{name}` is {} full and `{least}` {}, {} rounds in a row; with this VM there, they differ by {}",
            percent(fullest.load()),
            percent(emptiest.load()),
            self.rounds,
            percent(after)
        );
        self.rounds = 0;
        Some(Advice { vm: vm.name.clone(), to: emptiest.name.clone(), why })
    }

    /// Prevents moves of a virtual machine for a while, because a move was just attempted.
    pub fn rests(&mut self, vm: String, now: Duration) {
        self.moved.insert(vm, now);
    }
}

/// Moves virtual machines off a card with `move_off`, one after the other. Retries machines for whose error
/// `is_retried` returns true as long as other machines leave, because an affinity may permit the card to which another
/// machine has moved. Returns the moved machines, and the names of the others in order with their errors.
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
