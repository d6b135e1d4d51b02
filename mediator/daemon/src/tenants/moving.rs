//! Moves tenants of CUDA cards to other cards. The crate `tenant_move` defines the order of the requests to the owners.

use std::time::Instant;

use cuda_control::{Answer, Request};
use tenant_move::{Carried, Failure, Owner, Plan, Trouble, carry_over, chosen};

use super::{Daemon, DaemonError, cuda};
use crate::cuda::CudaCard;
use api::{EventKind, TenantMoved};
use config::{CardSpec, TenantSpec};
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
    /// Moves a tenant to `card`, or to a card that the daemon chooses, if the revision is still `expected`.
    ///
    /// # Errors
    /// Returns an error if the tenant or the card is not suitable; the tenant then continues on its card.
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
        let to = self.target(&spec, card)?;
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

    /// Returns the card that a tenant moves to: the named one, or the suitable card with the most free memory.
    fn target(&self, spec: &TenantSpec, named: Option<&str>) -> Result<String, DaemonError> {
        named.map_or(Ok(()), |card| self.known(card).map(drop))?;
        let model = |card: &CardSpec| self.cards.get(&card.name).map(|card| card.backend.status().model);
        let models: Vec<Option<String>> = self.specs.iter().map(model).collect();
        let links = self.links();
        let state = self.state.lock();
        let cards: Vec<_> = state.marked(&self.specs).into_iter().zip(models).collect();
        let place = |spec: TenantSpec, cards: &[CardSpec]| state.placed(spec, self, &links, cards);
        let chosen = match state.cuda_vm(&spec.name) {
            Some(_) => Err("it is a VM, whose workers cannot change their card".to_owned()),
            None => chosen(spec, named, &cards, |there| state.refusals(there, self), place),
        };
        let to = named.map_or_else(|| "another card".to_owned(), |card| format!("card `{card}`"));
        chosen.map_err(|why| DaemonError::TenantStays { tenant: spec.name.clone(), to, why })
    }
}
