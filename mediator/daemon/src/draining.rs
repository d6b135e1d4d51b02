//! Drains cards: marks a card so that it rejects new VMs and tenants, and moves its VMs and tenants to other cards.
//!
//! The mark is set first, so that a virtual machine that arrives during the drain is placed elsewhere or rejected.
//! Virtual machines move one by one, and other changes can run between two moves.

use super::{Daemon, DaemonError, Entry, Life, State};
use api::{DrainReport, EventKind, Left, Moved};
use config::check::{self, Refusal};
use config::{CardSpec, VmSpec, place};
use events::NewEvent;

/// Reason why a virtual machine or tenant is placed on a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// The configuration file names the card. A drained card still accepts the virtual machine or tenant.
    Configured,
    /// An operator is adding the virtual machine or tenant.
    New,
}

impl Arrival {
    /// Returns the reason why a card rejects this arrival, or `None` if the card accepts it.
    pub fn refused(self, card: &str, cards: &[CardSpec]) -> Option<Refusal> {
        let card = cards.iter().find(|known| known.name == card).filter(|_| self == Self::New)?;
        place::drained(card)
    }
}

impl State {
    /// Returns a configuration's cards, with their current drain marks.
    pub(super) fn marked(&self, cards: &[CardSpec]) -> Vec<CardSpec> {
        cards.iter().map(|card| CardSpec { drained: self.tuning(card).drained, ..card.clone() }).collect()
    }

    /// Returns a virtual machine if its own state permits a move.
    fn movable(&self, name: &str) -> Result<&Entry, DaemonError> {
        let entry = self.vms.get(name).ok_or_else(|| DaemonError::NoVm(name.to_owned()))?;
        let what = match &entry.life {
            Life::Starting => return Err(DaemonError::Busy(name.to_owned(), "added")),
            Life::Stopping(_) => return Err(DaemonError::Busy(name.to_owned(), "removed")),
            Life::Running(_) if entry.spec.passthrough => {
                "it uses its card in passthrough: its guest drives the card itself"
            }
            Life::Running(_) if entry.spec.xen_domain.is_some() => "it is a Xen domain, which cannot change its card",
            Life::Running(_) => return Ok(entry),
        };
        Err(DaemonError::Immovable { vm: name.to_owned(), why: what.to_owned() })
    }

    pub(super) fn others(&self, name: &str) -> Vec<&VmSpec> {
        self.vms.values().map(|entry| &entry.spec).filter(|vm| vm.name != name).collect()
    }
}

impl Daemon {
    /// Returns the cards that have not failed.
    fn working(&self) -> Vec<CardSpec> {
        let fails =
            |card: &CardSpec| self.cards.get(&card.name).is_none_or(|card| card.backend.status().failed.is_some());
        self.specs.iter().filter(|card| !fails(card)).cloned().collect()
    }

    /// Checks that a virtual machine may move to a card: the virtual machine supports moves, and the card has not
    /// failed, accepts the virtual machine, and has enough memory. Returns the obstacle as an error if the virtual
    /// machine cannot move.
    pub(crate) fn may_move(&self, name: &str, to: &str) -> Result<(), DaemonError> {
        let failed = self.known(to)?.backend.status().failed;
        let vm = self.state.lock().movable(name)?.spec.clone();
        if vm.cuda.is_some() {
            let no = |why| DaemonError::CannotMove { vm: name.to_owned(), to: to.to_owned(), why };
            return self.target(&vm.as_tenant(), Some(&vm), Some(to)).map(drop).map_err(no);
        }
        let state = self.state.lock();
        let spec = &state.movable(name)?.spec;
        let no = |why: String| Err(DaemonError::CannotMove { vm: name.to_owned(), to: to.to_owned(), why });
        if spec.card == to {
            return no("it already has that card".to_owned());
        }
        if let Some(why) = failed {
            return no(format!("the card is out of service: {why}"));
        }
        let (cards, there) = (state.marked(&self.specs), VmSpec { card: to.to_owned(), ..spec.clone() });
        let refusals = check::vm(&there, &self.spec, &cards, &state.others(name));
        match refusals.into_iter().chain(Arrival::New.refused(to, &cards)).next() {
            Some(Refusal { field, what, .. }) => no(format!("{field}: {what}")),
            None => Ok(()),
        }
    }

    /// Chooses another card for a virtual machine according to the daemon's policy.
    fn other_card(&self, name: &str) -> Result<String, DaemonError> {
        let vm = self.state.lock().movable(name)?.spec.clone();
        let immovable = |why| DaemonError::Immovable { vm: name.to_owned(), why };
        if vm.cuda.is_some() {
            return self.target(&vm.as_tenant(), Some(&vm), None).map_err(immovable);
        }
        let working = self.working();
        let state = self.state.lock();
        let spec = &state.movable(name)?.spec;
        let cards: Vec<_> = state.marked(&working).into_iter().filter(|card| card.name != spec.card).collect();
        let others = state.others(name);
        if let Some(card) = place::chosen(spec, &self.spec, &cards, &others) {
            return Ok(card.name.clone());
        }
        let why = place::nowhere(spec, &self.spec, &cards, &others).filter(|_| !cards.is_empty());
        Err(immovable(why.map_or_else(|| "there is no other working card".to_owned(), |refusal| refusal.what)))
    }

    /// Moves a virtual machine to `card`, or to a card that the daemon chooses, if the revision is still `expected`.
    /// Returns an error if the revision differs, if the virtual machine or the card is not suitable, or if the move
    /// fails; the virtual machine then continues on its current card. Also returns an error if the change cannot be
    /// saved.
    pub(crate) fn move_if(&self, name: &str, card: Option<&str>, expected: Option<&str>) -> Result<Moved, DaemonError> {
        self.move_for(name, card, expected, "requested by an operator")
    }

    /// Like [`Self::move_if`], but logs `reason` instead of an operator's request.
    pub(super) fn move_for(
        &self,
        name: &str,
        card: Option<&str>,
        expected: Option<&str>,
        reason: &str,
    ) -> Result<Moved, DaemonError> {
        let _one_at_a_time = self.changing.lock();
        self.state.lock().expect(expected)?;
        let card = card.map_or_else(|| self.other_card(name), |card| Ok(card.to_owned()))?;
        let moved = self.move_counted(name, &card, reason)?;
        self.keep()?;
        Ok(moved)
    }

    /// Moves a virtual machine to a card if it may move there, and counts and logs the move. The caller must hold
    /// `changing`.
    fn move_counted(&self, name: &str, card: &str, reason: &str) -> Result<Moved, DaemonError> {
        self.may_move(name, card)?;
        let event = |kind, what: String| self.events.add(NewEvent::vm(kind, name, what).on(card));
        event(EventKind::MoveBegan, format!("moves to card `{card}`: {reason}"));
        let done = self.move_vm_now(name, card);
        match &done {
            Ok(moved) => {
                self.moves.record(moved);
                let Moved { from, pause_ms, memory_mib, total_ms, .. } = moved;
                tracing::info!(vm = name, from, to = card, pause_ms, memory_mib, total_ms, reason, "the VM has moved");
                let what =
                    format!("moved from card `{from}` to card `{card}`, its guest waited for {pause_ms} ms: {reason}");
                event(EventKind::Moved, what);
            }
            Err(error) => {
                self.moves.failed();
                tracing::warn!(vm = name, to = card, %error, reason, "the VM stays on its card");
                event(EventKind::MoveFailed, error.to_string());
            }
        }
        done
    }

    /// Sets or clears a card's drain mark, without saving the change.
    pub(super) fn mark(&self, card: &str, drained: bool, expected: Option<&str>) -> Result<(), DaemonError> {
        let spec = &self.known(card)?.spec;
        let mut state = self.state.lock();
        state.expect(expected)?;
        let mut tuning = state.tuning(spec);
        if tuning.drained != drained {
            tuning.drained = drained;
            state.tunings.insert(card.to_owned(), tuning);
            state.revision.next();
            tracing::info!(card, drained, "the card's drained state is set");
            let (kind, what) = match drained {
                true => (EventKind::DrainBegan, "accepts no further VMs or tenants"),
                false => (EventKind::Undrained, "accepts VMs and tenants again"),
            };
            self.events.add(NewEvent::card(kind, card, what));
        }
        Ok(())
    }

    /// Drains a card if the revision is still `expected`, and moves its virtual machines and tenants to other cards,
    /// one after the other. Those that cannot move continue on the card and are reported; another call retries them.
    /// Returns an error if the card does not exist, the revision differs, or the change cannot be saved.
    pub(crate) fn drain_if(&self, card: &str, expected: Option<&str>) -> Result<DrainReport, DaemonError> {
        {
            // The mark must not change while the state is being handed over to another daemon.
            let _settings = self.tuning.lock();
            self.mark(card, true, expected)?;
        }
        self.keep()?;
        let (vms, tenants) = {
            // Each arrival that began before the card was marked has now completed or failed.
            let _one_at_a_time = self.changing.lock();
            let state = self.state.lock();
            let of_card = |entry: &&Entry| entry.spec.card == card;
            let vms: Vec<String> = state.vms.values().filter(of_card).map(|entry| entry.spec.name.clone()).collect();
            let tenants = state.tenants.values().filter(|tenant| tenant.uses(card));
            (vms, tenants.map(|tenant| tenant.name.clone()).collect::<Vec<_>>())
        };
        let (moved, mut left) = emptied(vms, |vm| self.move_off(vm, card));
        let mut gone = Vec::new();
        for tenant in tenants {
            match self.move_tenant(&tenant, None, None, "its card is drained") {
                Ok(done) => gone.push(done),
                Err(DaemonError::NoTenant(_)) => {} // It was removed in the meantime.
                Err(error) => left.push(reported(tenant, &error)),
            }
        }
        // Save again, because the save after a move may have failed.
        self.keep()?;
        let count = moved.len() + gone.len();
        tracing::info!(card, moved = count, left = left.len(), "the card is drained");
        let what = format!("drained: {count} VMs and tenants were moved, {} remain", left.len());
        self.events.add(NewEvent::card(EventKind::Drained, card, what));
        Ok(DrainReport { card: card.to_owned(), moved, tenants: gone, left })
    }

    /// Moves a virtual machine off a card that is being drained. Does nothing if the virtual machine has already left.
    fn move_off(&self, name: &str, card: &str) -> Result<Option<Moved>, DaemonError> {
        let _one_at_a_time = self.changing.lock();
        {
            let state = self.state.lock();
            state.expect(None)?;
            if state.vms.get(name).is_none_or(|entry| entry.spec.card != card) {
                return Ok(None);
            }
            if !state.tuning(&self.known(card)?.spec).drained {
                let why = format!("card `{card}` was undrained during the move");
                return Err(DaemonError::Immovable { vm: name.to_owned(), why });
            }
        }
        let to = self.other_card(name)?;
        let moved = self.move_counted(name, &to, "its card is drained")?;
        if let Err(error) = self.keep() {
            tracing::warn!(vm = name, %error, "the VM's card is not saved yet");
        }
        Ok(Some(moved))
    }

    /// Lets a card accept virtual machines and tenants again if the revision is still `expected`. Returns an error if
    /// the card does not exist, the revision differs, or the change cannot be saved.
    pub(crate) fn undrain_if(&self, card: &str, expected: Option<&str>) -> Result<api::Card, DaemonError> {
        {
            let _settings = self.tuning.lock();
            self.mark(card, false, expected)?;
        }
        self.keep()?;
        self.card(card)
    }
}

/// Moves virtual machines with `move_off`. Returns those that moved, and those that remain.
fn emptied(
    vms: Vec<String>,
    move_off: impl FnMut(&str) -> Result<Option<Moved>, DaemonError>,
) -> (Vec<Moved>, Vec<Left>) {
    let (moved, left) = rebalance::emptied(vms, move_off, |error| matches!(error, DaemonError::Immovable { .. }));
    (moved, left.into_iter().map(|(vm, error)| reported(vm, &error)).collect())
}

fn reported(vm: String, error: &DaemonError) -> Left {
    Left { vm, why: error.to_string() }
}

#[cfg(test)]
mod tests;
