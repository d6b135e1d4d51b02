//! Saved form of a scheduler: the form used in records, the accounts, and the copy engine shares.

use super::{Quarantine, Scheduler, Vgpu, lane_count};
use crate::account::{Account, History, SavedAccount, SavedHistory};
use crate::checks::COUNT_MAX;
use crate::flight::Flight;
use crate::params::CopyShare;
use crate::types::{Engine, Nanos, TenantId, Ticket};
use saved_state::{Invalid, ascend, only_version};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Maximum number of strikes of a vGPU.
const STRIKES_MAX: u32 = 1 << 30;

/// Saved form of a card's scheduler.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SavedScheduler {
    /// Serialized scheduler, which omits the accounts and copy engine shares.
    scheduler: Scheduler,
    /// Accounts by engine and recent use of each vGPU, sorted by vGPU number.
    accounts: Vec<(TenantId, [SavedAccount; Engine::COUNT], SavedHistory)>,
    /// Copy engine shares of the vGPUs that have separate ones, sorted by vGPU number.
    copies: Vec<(TenantId, CopyShare)>,
}

only_version!(SavedScheduler, "sched", 2);

impl Scheduler {
    /// Saves the scheduler.
    #[must_use]
    pub fn save(&self) -> SavedScheduler {
        let accounts = self.vgpus.iter().map(|(vgpu, known)| {
            let accounts = known.accounts.each_ref().map(Account::save);
            (*vgpu, accounts, known.history.save())
        });
        let copies = self.vgpus.iter().map(|(vgpu, known)| (*vgpu, known.params.copies));
        let copies = copies.filter(|(_, share)| !share.is_silent()).collect();
        let accounts = accounts.collect();
        let mut scheduler = self.clone();
        // The card's next owner sets the competing settings again.
        for vgpu in self.vgpus() {
            if self.competing(vgpu).is_some() {
                scheduler.compete(vgpu, None);
            }
        }
        SavedScheduler { scheduler, accounts, copies }
    }

    /// Restores the scheduler at time `now` on the feeder's clock.
    ///
    /// # Errors
    /// Returns an error if the saved state is invalid, or if it was saved after `now`.
    pub fn restored(saved: SavedScheduler, now: Nanos) -> Result<Self, Invalid> {
        let SavedScheduler { mut scheduler, accounts, copies } = saved;
        Invalid::unless(ascend(copies.iter().map(|(vgpu, _)| vgpu)), || "copy shares are not in order".into())?;
        for (vgpu, share) in copies {
            let known = scheduler.vgpus.get_mut(&vgpu);
            let known = known.ok_or_else(|| Invalid::new(format_args!("nonexistent vGPU {vgpu} has copy shares")))?;
            known.params.copies = share;
        }
        scheduler.check(now)?;
        Invalid::unless(scheduler.vgpus.keys().eq(accounts.iter().map(|(vgpu, ..)| vgpu)), || {
            "the accounts belong to other vGPUs".into()
        })?;
        for ((_, accounts, history), known) in accounts.into_iter().zip(scheduler.vgpus.values_mut()) {
            for (account, saved) in known.accounts.iter_mut().zip(accounts) {
                *account = Account::try_from(saved)?;
            }
            known.history = History::try_from(history)?;
        }
        Ok(scheduler)
    }

    /// Returns the tickets of all submissions that are queued or on the card, with their vGPUs.
    pub fn tickets(&self) -> impl Iterator<Item = (TenantId, Ticket)> {
        let on_card = self.engines.iter().flat_map(|engine| engine.flights().chain(engine.asides()));
        let queued = self.lanes.iter().flat_map(|lane| lane.waiting().map(|(vgpu, queued)| (vgpu, queued.ticket)));
        on_card.map(|flight| (flight.vgpu, flight.ticket)).chain(queued)
    }

    /// Checks that the deserialized state is valid.
    fn check(&self, now: Nanos) -> Result<(), Invalid> {
        let Self { config, vgpus, engines, lanes, order, ignored, now: last } = self;
        config.check().map_err(Invalid::new)?;
        Invalid::unless(lanes.len() == lane_count(config), || {
            format!("{} lanes are too many or too few", lanes.len())
        })?;
        Invalid::unless(*last <= now, || {
            format!("it was saved at {} ns, after the current time of {} ns", last.0, now.0)
        })?;
        Invalid::unless(*order <= COUNT_MAX && *ignored <= COUNT_MAX, || "the counts of events are too large".into())?;
        for (vgpu, known) in vgpus {
            known.params.check().map_err(|why| Invalid::new(format_args!("vGPU {vgpu}: {why}")))?;
            Invalid::unless(known.strikes <= STRIKES_MAX, || format!("vGPU {vgpu} has too many strikes"))?;
        }
        let flights = || engines.iter().flat_map(|engine| engine.flights().chain(engine.asides()));
        let stray = flights().find(|flight| !vgpus.contains_key(&flight.vgpu));
        Invalid::unless(stray.is_none(), || "a submission in flight is of a nonexistent vGPU".into())?;
        self.check_tickets(flights().map(|flight| flight.ticket))?;
        for (at, lane) in lanes.iter().enumerate() {
            let held = |known: &Vgpu| known.quarantine != Quarantine::Free;
            let params =
                vgpus.iter().map(|(vgpu, known)| (*vgpu, known.params.for_engine(Engine::ALL[at]), held(known)));
            let engines = Engine::ALL.into_iter().filter(|engine| self.lane_of(*engine) == at).collect::<Vec<_>>();
            let flights: Vec<&Flight> = engines.iter().flat_map(|of| self.engines[of.index()].flights()).collect();
            lane.check(config, params, &engines, &flights, *order)?;
        }
        Ok(())
    }

    /// Checks that no submission has two states.
    fn check_tickets(&self, on_card: impl Iterator<Item = Ticket>) -> Result<(), Invalid> {
        let queued = self.lanes.iter().flat_map(|lane| lane.waiting().map(|(_, queued)| queued.ticket));
        let mut seen = BTreeSet::new();
        let twice = on_card.chain(queued).find(|ticket| !seen.insert(*ticket));
        Invalid::unless(twice.is_none(), || "a submission has two states".into())
    }
}

#[cfg(test)]
mod tests;
