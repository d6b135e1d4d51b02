//! Tenants with several cards: their turns on this card, and messages to the owners of their other cards.
//! [`gang::GangTurns`] makes the decisions. A gang's processes on this card are ordinary sessions. In a *step*, each
//! process lets one submission pass and then reports the end of its work, as after a recall.

use super::types::{Action, SessionId};
use super::{Core, TenantError, TenantSpec};
use cuda_protocol::{FromOwner, Run, VERSION_GANGS};
use owner_host::{CardState, Check, LinkEvent, Outcome, Probes};
use tenancy::Deadline;
use vram::TenantId;

impl Core {
    /// Checks whether the cards of a new tenant are valid.
    pub(super) fn check_gang(&self, spec: &TenantSpec) -> Result<(), TenantError> {
        let Some(gang) = &spec.gang else { return Ok(()) };
        let wrong = |why| Err(TenantError::Cards(spec.name.clone(), why));
        if !gang.cards.contains_key(&self.config.number) || gang.cards.len() < 2 {
            return wrong("this card and at least one other must be among them");
        }
        if spec.share_group.is_some() {
            return wrong("a share group shares one card");
        }
        if self.turns.view(gang.number).is_some() {
            return wrong("another tenant has the same number");
        }
        Ok(())
    }

    /// Coordinates a new tenant's turns on its cards, if it has several.
    pub(super) fn join_gang(&mut self, id: TenantId) {
        let gang = self.tenants.get(&id).and_then(|tenant| tenant.spec.gang.clone());
        if let Some(gang) = gang {
            let now = self.now();
            let cards = gang.card_numbers();
            let has_joined = self.turns.join(gang.number, id, &cards, now);
            self.gang_quanta.join(gang.number, id, cards);
            debug_assert!(has_joined, "the cards were checked");
            self.follow_up();
        }
    }

    pub(super) fn link_changed(&mut self, news: LinkEvent) {
        let now = self.now();
        let outcomes = match news {
            LinkEvent::Reached(card) => {
                self.turns.reached(card, now);
                self.gang_quanta.reached(card);
                self.needs_plan = true;
                self.probes.replied(card, false, self.clock)
            }
            LinkEvent::Lost(card) => {
                self.turns.lost(card, now);
                self.gang_quanta.lost(card);
                self.needs_plan = true;
                self.probes.replied(card, false, self.clock)
            }
            LinkEvent::Said(card, message) => return self.turns.receive(card, message, now),
            LinkEvent::Quantum(card, gang, state) => {
                self.gang_quanta.received(card, gang, state);
                self.needs_plan = true;
                let tenant =
                    self.tenants.iter().find(|(_, known)| known.spec.gang.as_ref().map(|g| g.number) == Some(gang));
                return tenant.map(|(id, _)| *id).into_iter().for_each(|id| self.pause_as_due(id));
            }
            LinkEvent::Replied(card) => self.probes.replied(card, true, self.clock),
        };
        for outcome in outcomes {
            match outcome {
                Outcome::Prompt(tenant) => self.overdue(tenant),
                Outcome::Late(tenant) => self.restart_limit(tenant),
            }
        }
    }

    /// Returns true if the limit for a tenant's work applies: the owners of its other cards respond, or have been
    /// silent for too long. If this is not known yet, sends probes, and checks the limit again later.
    pub(super) fn other_owners_respond(&mut self, tenant: TenantId) -> bool {
        let own = self.config.number;
        let gang = self.tenants.get(&tenant).and_then(|known| known.spec.gang.as_ref());
        let others = gang.into_iter().flat_map(|gang| gang.card_numbers()).filter(|card| *card != own);
        match self.probes.check(tenant, others, self.clock) {
            Check::Applies => return true,
            Check::Ask(cards) => self.actions.extend(cards.into_iter().map(|card| Action::Probe { card })),
            Check::Wait => {}
        }
        self.deadlines.set(Deadline::SecondLimit(tenant), self.clock.saturating_add(Probes::RECHECK_NS));
        false
    }

    /// Restarts the time limit for a tenant's work.
    fn restart_limit(&mut self, tenant: TenantId) {
        let clock = self.clock;
        for session in self.sessions.values_mut().filter(|session| session.tenant == Some(tenant)) {
            session.opened_at = clock;
        }
    }

    /// Sends pending messages to the owners of other cards.
    pub(super) fn tell_other_cards(&mut self) {
        self.tell_quanta();
        let messages = self.turns.take_messages().into_iter();
        self.actions.extend(messages.map(|(card, message)| Action::Tell { card, message }));
    }

    /// Applies the states of memory quanta on other cards to the quanta on this card.
    pub(super) fn follow_other_cards(&mut self) {
        self.machine.residency.follow(self.gang_quanta.leads(), self.gang_quanta.unready());
    }

    /// Sends new states of this card's memory quanta to the owners of other cards.
    fn tell_quanta(&mut self) {
        let (quanta, now) = (self.machine.residency.quanta(), self.clock);
        let turns = &self.turns;
        let is_stuck =
            |tenant| turns.gang_of(tenant).and_then(|gang| turns.view(gang)).is_some_and(|view| view.is_stuck);
        let state = |tenant| CardState { quantum: quanta.state(tenant, now), is_stuck: is_stuck(tenant) };
        let messages = self.gang_quanta.messages(state);
        self.actions.extend(messages.into_iter().map(Action::TellQuantum));
    }

    /// Returns true if a tenant has the turn. A tenant that waits for its other cards does not have the turn, even
    /// though this card is reserved for it.
    pub(super) fn runs(&self, tenant: TenantId) -> bool {
        let gang = self.turns.gang_of(tenant).and_then(|gang| self.turns.view(gang));
        gang.map_or_else(|| self.turns.turns().has_turn(tenant), |gang| gang.runs)
    }

    /// Permits one submission by each of a tenant's processes.
    pub(super) fn step(&mut self, tenant: TenantId) {
        let (terms, clock) = (self.terms(tenant), self.clock);
        // With an earlier version of the library, a process's work waits for the tenant's next turn.
        let can_step = |id: &SessionId| {
            self.sessions.get(id).is_some_and(|session| {
                session.version >= VERSION_GANGS && !session.stuck && session.stopped_in.is_none()
            })
        };
        let sessions: Vec<SessionId> = self.sessions_of(tenant).filter(can_step).collect();
        for id in sessions {
            let Some(session) = self.sessions.get_mut(&id) else { continue };
            session.turn += 1;
            (session.run, session.run_since, session.waiting) = (Some(session.turn), clock, false);
            session.opened_at = clock;
            let run = Run { turn: session.turn, ..terms };
            tracing::trace!(session = id.0, turn = run.turn, "a step");
            self.send(id, FromOwner::Step(run));
        }
        self.look_whether_ended(tenant);
    }
}
