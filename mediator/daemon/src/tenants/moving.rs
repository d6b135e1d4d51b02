//! Moves tenants of CUDA cards to other cards. The crate `tenant_move` defines the order of the requests to the owners.

use std::sync::Arc;
use std::time::Instant;

use cuda_control::{Answer, Request};
use guest_workers::CudaVm;
use tenant_move::{Carried, Failure, Owner, Plan, Trouble, carry_over, chosen};

use super::{Daemon, DaemonError, cuda};
use crate::cuda::CudaCard;
use api::{EventKind, TenantMoved};
use config::check;
use config::{CardSpec, TenantSpec, VmSpec};
use events::NewEvent;

/// A card's owner, for requests about one tenant.
struct CardOwner<'a>(&'a CudaCard, String);

impl Owner for CardOwner<'_> {
    fn ask(&self, request: Request) -> Result<Answer, Trouble> {
        let answer = self.0.change().and_then(|turn| turn.ask(&self.1, request));
        answer.map_err(|error| match error {
            DaemonError::Setting { what, .. } => Trouble::Refused(what),
            other => Trouble::Absent(other.to_string()),
        })
    }
}

impl Daemon {
    /// Moves a tenant to `card`, or to a card that the daemon chooses, if the revision is still `expected`. Returns an
    /// error if the revision differs, if the tenant or the card is not suitable, or if the move fails. The tenant then
    /// continues on its card, or on the other card if it cannot be moved back. Also returns an error if the change
    /// cannot be saved.
    pub(crate) fn move_tenant(
        &self,
        name: &str,
        card: Option<&str>,
        expected: Option<&str>,
        reason: &str,
    ) -> Result<TenantMoved, DaemonError> {
        let began = Instant::now();
        let (spec, turn) = self.tenant_turn(name)?;
        self.state.lock().expect(expected)?;
        card.map_or(Ok(()), |card| self.known(card).map(drop))?;
        let is_vm = self.state.lock().cuda_vm(name).is_some();
        let to = match is_vm {
            true => Err("it is a VM: `mediatorctl vm move` moves it".to_owned()),
            false => self.target(&spec, None, card),
        };
        let to = to.map_err(|why| {
            let to = card.map_or_else(|| "another card".to_owned(), |card| format!("card `{card}`"));
            DaemonError::TenantStays { tenant: name.to_owned(), to, why }
        })?;
        let _changing = self.changing_cards(name);
        drop(turn);
        let there = TenantSpec { card: to.clone(), ..spec.clone() };
        let event = |kind, what: String| self.events.add(NewEvent::tenant(kind, name, what).on(&to));
        event(EventKind::MoveBegan, format!("moves to card `{to}`: {reason}"));
        let done = self.carry_tenant(&spec, &there);
        if matches!(done, Ok(_) | Err(Failure::Moved(_))) {
            let mut state = self.state.lock();
            state.tenants.insert(name.to_owned(), there);
            state.revision.next();
        }
        self.keep()?;
        let ms = |time: std::time::Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        match done {
            Ok(Carried { programs, bytes, pause, phases }) => {
                let (from, pause_ms, memory_mib) = (spec.first_card().to_owned(), ms(pause), bytes >> 20);
                tracing::info!(tenant = name, from, to, programs, memory_mib, pause_ms, %phases, reason, "the tenant has moved");
                let paused = format!("paused for {pause_ms} ms: {phases}");
                event(EventKind::Moved, format!("moved from card `{from}` to card `{to}`: {reason}; {paused}"));
                let (tenant, total_ms, phases) = (name.to_owned(), ms(began.elapsed()), phases.into());
                Ok(TenantMoved { tenant, from, to, programs, pause_ms, phases, memory_mib, total_ms })
            }
            Err(failure) => {
                let (tenant, card, why) = (name.to_owned(), format!("card `{to}`"), failure.to_string());
                let error = DaemonError::TenantStays { tenant, to: card, why };
                tracing::warn!(tenant = name, to, %error, reason, "the move of a tenant failed");
                event(EventKind::MoveFailed, error.to_string());
                Err(error)
            }
        }
    }

    fn carry_tenant(&self, here: &TenantSpec, there: &TenantSpec) -> Result<Carried, Failure> {
        let owner = |spec: &TenantSpec| {
            let card = self.cuda(spec.first_card())?;
            let told = cuda::tenant(spec, card.spec(), &self.spec.socket_dir, None)?;
            Ok((CardOwner(card, format!("tenant `{}`", spec.name)), told))
        };
        let failed = |error: DaemonError| Failure::Stays(error.to_string());
        let ((from, here), (to, there)) = (owner(here).map_err(failed)?, owner(there).map_err(failed)?);
        carry_over(Plan { from: &from, to: &to, here: &here, there: &there })
    }

    /// Returns the card to which a tenant moves: the named one, or a suitable card according to the daemon's placement
    /// policy. `vm` is the tenant, if it is a VM. Returns the reason why the tenant cannot move to the named card, or
    /// to any card.
    pub(crate) fn target(&self, spec: &TenantSpec, vm: Option<&VmSpec>, named: Option<&str>) -> Result<String, String> {
        let model = |card: &CardSpec| self.cards.get(&card.name).map(|card| card.backend.status().model);
        let models: Vec<Option<String>> = self.specs.iter().map(model).collect();
        let links = self.links();
        let state = self.state.lock();
        let marked = state.marked(&self.specs);
        let cards: Vec<_> = marked.iter().cloned().zip(models).collect();
        let refusals = |there: &TenantSpec| {
            let moved = vm.map(|vm| VmSpec { card: there.card.clone(), ..vm.clone() });
            let of_vm = moved.map(|vm| check::vm(&vm, &self.spec, &marked, &state.others(&vm.name)));
            of_vm.into_iter().flatten().chain(state.refusals(there, self)).collect()
        };
        chosen(spec, named, &cards, refusals, |spec, cards| state.placed(spec, self, &links, cards))
    }

    /// Moves a VM whose programs use CUDA, after a successful [`Self::may_move`]. The caller must hold `changing`.
    /// Returns an error if the move fails. The VM and its programs then continue on their card.
    pub(crate) fn move_programs(&self, name: &str, card: &str, vm: &CudaVm) -> Result<api::Moved, DaemonError> {
        let began = Instant::now();
        let (_, turn) = self.tenant_turn(name)?;
        let _changing = self.changing_cards(name);
        drop(turn);
        let here = self.state.lock().vms.get(name).map(|entry| entry.spec.clone());
        let here = here.ok_or_else(|| DaemonError::NoVm(name.to_owned()))?;
        let there = VmSpec { card: card.to_owned(), ..here.clone() };
        let to = self.known(card)?.cuda.as_ref().ok_or_else(|| DaemonError::NoCard(card.to_owned()))?;
        let told = cuda::tenant(&there.as_tenant(), to.spec(), &self.spec.socket_dir, there.cuda)?;
        let owner = |card| CardOwner(card, format!("VM `{name}`"));
        let owners = (owner(self.cuda(&here.card)?), owner(&**to));
        let moved = || {
            if let Some(entry) = self.state.lock().vms.get_mut(name) {
                entry.spec.card.clone_from(&there.card);
            }
            self.state.lock().revision.next();
            if let Err(error) = self.keep() {
                tracing::warn!(vm = name, %error, "the VM's card is not saved yet");
            }
        };
        let done = vm.move_to(Arc::<CudaCard>::clone(to), (&owners.0, &owners.1), &told, moved).map_err(|failure| {
            DaemonError::CannotMove { vm: name.to_owned(), to: card.to_owned(), why: failure.to_string() }
        })?;
        let ms = |time: std::time::Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Ok(api::Moved {
            vm: name.to_owned(),
            from: here.card,
            to: card.to_owned(),
            pause_ms: ms(done.pause),
            pause: api::PauseParts::default(),
            memory_mib: done.bytes >> 20,
            total_ms: ms(began.elapsed()),
        })
    }
}
