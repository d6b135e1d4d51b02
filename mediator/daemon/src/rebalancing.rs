//! Moves virtual machines automatically from busy cards to idle ones.
//!
//! The crate [`rebalance`] decides which virtual machines to move, and when. This module supplies the cards' state, and
//! executes moves as if an operator had requested them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rebalance::{Advice, Busy, CardLoad, Rebalancer, VmLoad};
use sched::Engine;
use tokio::time::{MissedTickBehavior, interval};

use super::{Daemon, HISTORY_MS};
use config::RebalanceSpec;

/// Returns the utilization of each engine, as reported by the card's scheduler.
fn busy<T>(engines: &BTreeMap<Engine, T>, part: impl Fn(&T) -> u32) -> Busy {
    let mut busy = Busy::default();
    for (engine, of) in engines {
        if let Some(place) = busy.get_mut(engine.index()) {
            *place = part(of);
        }
    }
    busy
}

impl Daemon {
    /// Evaluates the loads once, and executes the move that is due, if any.
    fn rebalance(&self, rebalancer: &mut Rebalancer, window_ms: u64, began: Instant) {
        let (cards, vms) = self.loads(window_ms);
        let Some(Advice { vm, to, why }) = rebalancer.round(began.elapsed(), &cards, &vms) else { return };
        if let Err(error) = self.move_for(&vm, Some(&to), None, &why) {
            tracing::warn!(vm, to, why, %error, "an automatic move of the VM failed");
        }
        // Do not move the same virtual machine in every round, even if the move has failed.
        rebalancer.rests(vm, began.elapsed());
    }

    /// Returns the loads of the working, undrained cards for mediated virtual machines, and of the virtual machines on
    /// them.
    fn loads(&self, window_ms: u64) -> (Vec<CardLoad>, Vec<VmLoad>) {
        let shared = |card: &api::Card| {
            let of_tenants = self.known(&card.name).is_ok_and(|card| card.cuda.is_some());
            card.error.is_none() && !of_tenants && !card.passthrough && !card.drained
        };
        let cards: Vec<_> = self.cards().into_iter().filter(shared).collect();
        let mut loads = (Vec::new(), Vec::new());
        for card in &cards {
            let name = &card.name;
            let (Ok(time), Ok(memory)) = (self.scheduler(name, window_ms), self.memory(name)) else { continue };
            loads.0.push(CardLoad {
                name: name.clone(),
                shared_mib: card.vram_mib.saturating_sub(card.vram_reserved_mib),
                placed_mib: card.vram_placed_mib,
                busy: busy(&time.engines, |engine| engine.busy_permille),
            });
            for vm in memory.vms {
                let share = time.vms.iter().find(|share| share.vm == vm.vm);
                let fits = cards.iter().map(|card| &card.name).filter(|to| self.may_move(&vm.vm, to).is_ok());
                loads.1.push(VmLoad {
                    card: name.clone(),
                    placed_mib: vm.on_card_bytes >> 20,
                    busy: share
                        .map(|share| busy(&share.engines, |engine| engine.received_permille))
                        .unwrap_or_default(),
                    fits: fits.cloned().collect(),
                    name: vm.vm,
                });
            }
        }
        loads
    }
}

/// Rebalances periodically. The task ends with its runtime.
pub(super) async fn run(daemon: Arc<Daemon>, spec: RebalanceSpec) {
    let (mut rebalancer, began) = (Rebalancer::new(spec), Instant::now());
    let window_ms = spec.every_s.saturating_mul(1000).min(HISTORY_MS);
    let mut turns = interval(Duration::from_secs(spec.every_s.max(1)));
    // A move can take longer than a round; skip the missed rounds.
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    turns.tick().await;
    loop {
        turns.tick().await;
        let daemon = Arc::clone(&daemon);
        let round = tokio::task::spawn_blocking(move || {
            daemon.rebalance(&mut rebalancer, window_ms, began);
            rebalancer
        });
        match round.await {
            Ok(after) => rebalancer = after,
            Err(error) => {
                tracing::error!(%error, "cards are no longer rebalanced; restart the daemon");
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests;
