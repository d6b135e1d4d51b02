//! Scheduler state machine, which maps events and the time to decisions.

mod saved;

pub use saved::SavedScheduler;

use crate::account::{Account, History};
use crate::config::{Config, ConfigError, Queues};
use crate::flight::{EngineState, Flight};
use crate::lane::Lane;
use crate::member::Queued;
use crate::params::VgpuParams;
use crate::policy::Standing;
use crate::types::{Channel, Decision, Engine, Event, Nanos, Place, TenantId, Ticket};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Quarantine state of a vGPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Quarantine {
    /// The vGPU is not quarantined.
    Free,
    /// The vGPU is quarantined until this time, unless the operator ends the quarantine earlier.
    Until(Nanos),
    /// The vGPU is quarantined until the operator ends the quarantine.
    Held,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Vgpu {
    params: VgpuParams,
    /// Settings that determine the vGPU's share instead of its own. The caller must set them again after a restart.
    #[serde(skip)]
    competing: Option<VgpuParams>,
    /// Accounts do not affect decisions, so records omit them.
    #[serde(skip)]
    accounts: [Account; Engine::COUNT],
    #[serde(skip)]
    history: History,
    strikes: u32,
    quarantine: Quarantine,
}

impl Vgpu {
    /// Returns the settings that determine the vGPU's share.
    fn effective(&self) -> VgpuParams {
        self.competing.unwrap_or(self.params)
    }
}

/// Scheduler of a card. The serialized form contains all state that affects decisions, but not the accounts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Scheduler {
    config: Config,
    vgpus: BTreeMap<TenantId, Vgpu>,
    engines: [EngineState; Engine::COUNT],
    /// One lane for each engine, by index, or a single lane for all engines at the index of the compute engine.
    lanes: Vec<Lane>,
    /// Sequence number of the next arrival.
    order: u64,
    ignored: u64,
    now: Nanos,
}

impl Scheduler {
    /// Creates the scheduler of a card without vGPUs.
    ///
    /// # Errors
    /// Returns an error if a setting is out of bounds.
    pub fn new(config: Config, now: Nanos) -> Result<Self, ConfigError> {
        config.check()?;
        let engines = Default::default();
        let lanes = lanes(&config, now);
        Ok(Self { config, vgpus: BTreeMap::new(), engines, lanes, order: 0, ignored: 0, now })
    }

    /// Returns true if a deserialized scheduler has valid settings, and lanes that match them.
    pub(crate) fn is_whole(&self) -> bool {
        let lanes = lane_count(&self.config);
        self.config.check().is_ok()
            && self.lanes.len() == lanes
            && self.lanes.iter().all(|lane| lane.is_of(&self.config))
    }

    /// Applies an event, and appends the resulting decisions in order. If `now` is before the previous time, the
    /// previous time is used.
    pub fn event(&mut self, now: Nanos, event: Event, decisions: &mut Vec<Decision>) {
        self.now = self.now.max(now);
        let known = match event {
            Event::Added { vgpu, params } => self.add(vgpu, params),
            Event::Removed { vgpu } => self.remove(vgpu),
            Event::Arrival { vgpu, channel, engine, ticket } => self.arrive(vgpu, channel, engine, ticket),
            Event::Adopted { vgpu, channel, engine, ticket } => self.adopt(vgpu, channel, engine, ticket),
            Event::Started { ticket } => self.started(ticket),
            Event::Waiting { ticket } => self.wait(ticket),
            Event::Resumed { ticket } => self.resume(ticket),
            Event::Requeued { ticket } => self.requeue(ticket),
            Event::Moved { ticket, since } => self.moved(ticket, since),
            Event::Shared { engine, since } => self.shared(engine, since),
            Event::Kept { engine, vgpu, since } => self.kept(engine, vgpu, since),
            Event::Occupied { engine, vgpu, channel } => self.occupied(engine, vgpu, channel),
            Event::Unoccupied { engine, since } => {
                self.engines[engine.index()].begin_anew(since.unwrap_or(self.now).min(self.now));
                true
            }
            Event::Struck { vgpu, engine } => self.strike(vgpu, engine, decisions),
            Event::Completed { ticket, ended } => self.complete(ticket, ended),
            Event::Withdrawn { ticket } => self.withdraw(ticket),
            Event::ChannelEnded { vgpu, channel } => self.end_channel(vgpu, channel),
            Event::Changed { vgpu, params } => self.change(vgpu, params),
            Event::Competes { vgpu, params } => self.compete(vgpu, params),
            Event::Configured(config) => self.configure(config),
            Event::Released { vgpu } => self.release(vgpu, decisions),
            Event::Tick => {
                self.lanes.iter_mut().for_each(Lane::touch);
                true
            }
        };
        if !known {
            self.ignored += 1;
        }
        self.enforce_limits(decisions);
        self.end_quarantines(decisions);
        self.start_what_may(decisions);
    }

    /// Returns the time at which an [`Event::Tick`] is due if no event occurs earlier. Returns `None` if the passage of
    /// time alone causes no decision, for example because no work is queued or in flight and no quarantine expires.
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Nanos> {
        let lanes = self.lanes.iter().filter_map(Lane::wakeup);
        let limits = self.engines.iter().filter_map(|engine| self.deadline(engine));
        let releases = self.vgpus.values().filter_map(|vgpu| match vgpu.quarantine {
            Quarantine::Until(until) => Some(until),
            Quarantine::Free | Quarantine::Held => None,
        });
        lanes.chain(limits).chain(releases).min()
    }

    /// Returns the card's settings.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the vGPUs, in ascending order.
    pub fn vgpus(&self) -> impl Iterator<Item = TenantId> {
        self.vgpus.keys().copied()
    }

    /// Returns the settings of a vGPU.
    #[must_use]
    pub fn params(&self, vgpu: TenantId) -> Option<&VgpuParams> {
        self.vgpus.get(&vgpu).map(|vgpu| &vgpu.params)
    }

    /// Returns the settings that determine a vGPU's share instead of its own, or `None` if there are none.
    #[must_use]
    pub fn competing(&self, vgpu: TenantId) -> Option<&VgpuParams> {
        self.vgpus.get(&vgpu)?.competing.as_ref()
    }

    /// Returns a vGPU's account on an engine.
    #[must_use]
    pub fn account(&self, vgpu: TenantId, engine: Engine) -> Option<&Account> {
        self.vgpus.get(&vgpu).map(|vgpu| &vgpu.accounts[engine.index()])
    }

    /// Returns the recent use of a vGPU.
    #[must_use]
    pub fn history(&self, vgpu: TenantId) -> Option<&History> {
        self.vgpus.get(&vgpu).map(|vgpu| &vgpu.history)
    }

    /// Returns the vGPU's quarantine state, and the number of its submissions that have exceeded their run time limit
    /// since it was added or last released.
    #[must_use]
    pub fn strikes(&self, vgpu: TenantId) -> Option<(u32, Quarantine)> {
        self.vgpus.get(&vgpu).map(|vgpu| (vgpu.strikes, vgpu.quarantine))
    }

    /// Returns two values that change with the accounts: the total number of strikes of all vGPUs, and the total busy
    /// time of all engines in ns.
    #[must_use]
    pub fn strikes_and_use(&self) -> (u64, u64) {
        let strikes = self.vgpus.values().map(|vgpu| u64::from(vgpu.strikes)).sum();
        (strikes, Engine::ALL.into_iter().fold(0, |sum: u64, engine| sum.saturating_add(self.busy(engine))))
    }

    /// Returns a vGPU's account in the policy, for an engine.
    #[must_use]
    pub fn standing(&self, vgpu: TenantId, engine: Engine) -> Standing {
        self.lanes[self.lane_of(engine)].standing(vgpu)
    }

    /// Returns the busy time of an engine in ns, including work of removed vGPUs.
    #[must_use]
    pub fn busy(&self, engine: Engine) -> u64 {
        self.engines[engine.index()].busy
    }

    /// Returns the part of [`Self::busy`] charged to removed vGPUs, in ns.
    #[must_use]
    pub fn departed(&self, engine: Engine) -> u64 {
        self.engines[engine.index()].departed
    }

    /// Returns the number of submissions in flight on all engines.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.engines.iter().map(|engine| engine.flights().count()).sum()
    }

    /// Returns the number of queued submissions.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.lanes.iter().map(Lane::queued).sum()
    }

    /// Returns the queued submissions, followed by the submissions on the card.
    pub(crate) fn pending(&self) -> impl Iterator<Item = (TenantId, Channel, Engine, Ticket)> {
        let queued = self.lanes.iter().flat_map(Lane::waiting);
        let queued = queued.map(|(vgpu, queued)| (vgpu, queued.channel, queued.engine, queued.ticket));
        let flights = Engine::ALL.into_iter().flat_map(|engine| {
            let flights = self.engines[engine.index()].flights();
            flights.map(move |flight| (flight.vgpu, flight.channel, engine, flight.ticket))
        });
        queued.chain(flights)
    }

    /// Returns true if an engine has work.
    #[must_use]
    pub fn is_busy(&self, engine: Engine) -> bool {
        self.engines[engine.index()].running().is_some()
    }

    /// Returns the time from which the running submission of an engine will be charged.
    pub(crate) fn charged_from(&self, engine: Engine) -> Option<Nanos> {
        self.engines[engine.index()].running().map(|(_, since)| since)
    }

    /// Returns true if a vGPU has been the only user of an engine for a period, has no queued submissions, and is
    /// expected to send submissions of at most `most` ns. Then no other vGPU waits for the engine.
    #[must_use]
    pub fn is_brief_and_alone(&self, vgpu: TenantId, engine: Engine, now: Nanos, most: u64) -> bool {
        self.lanes[self.lane_of(engine)].is_brief_and_alone(vgpu, now, self.config.band.period_ns, most)
    }

    /// Returns the state of a submission, or `None` if it is unknown.
    #[must_use]
    pub fn place(&self, ticket: Ticket) -> Option<Place> {
        if self.engine_of(ticket).is_some() {
            return Some(Place::OnEngine);
        }
        if self.engines.iter().any(|engine| engine.asides().any(|flight| flight.ticket == ticket)) {
            return Some(Place::Aside);
        }
        self.lanes.iter().any(|lane| lane.holder(ticket).is_some()).then_some(Place::Queued)
    }

    /// Returns the number of ignored events. These have unknown vGPUs or submissions, add an existing vGPU, or have
    /// invalid settings.
    #[must_use]
    pub const fn ignored(&self) -> u64 {
        self.ignored
    }

    fn lane_of(&self, engine: Engine) -> usize {
        if self.lanes.len() == 1 { 0 } else { engine.index() }
    }

    fn add(&mut self, vgpu: TenantId, params: VgpuParams) -> bool {
        if self.vgpus.contains_key(&vgpu) || params.check().is_err() {
            return false;
        }
        let (accounts, history) = Default::default();
        let known = Vgpu { params, competing: None, accounts, history, strikes: 0, quarantine: Quarantine::Free };
        self.vgpus.insert(vgpu, known);
        for (engine, lane) in Engine::ALL.into_iter().zip(&mut self.lanes) {
            lane.join(vgpu, params.for_engine(engine), false, self.now);
        }
        true
    }

    fn remove(&mut self, vgpu: TenantId) -> bool {
        let Some(gone) = self.vgpus.remove(&vgpu) else { return false };
        for engine in Engine::ALL {
            let state = &mut self.engines[engine.index()];
            state.departed = state.departed.saturating_add(gone.accounts[engine.index()].used);
            self.drop_flights(engine, |flight| flight.vgpu == vgpu);
        }
        for lane in &mut self.lanes {
            lane.leave(vgpu);
        }
        true
    }

    fn arrive(&mut self, vgpu: TenantId, channel: Channel, engine: Engine, ticket: Ticket) -> bool {
        let Some(known) = self.vgpus.get_mut(&vgpu) else { return false };
        known.accounts[engine.index()].arrived += 1;
        let queued = Queued { ticket, channel, engine, arrived: self.now, order: self.order, again: false };
        self.order += 1;
        let lane = self.lane_of(engine);
        self.lanes[lane].enqueue(&self.config, vgpu, queued, self.now);
        true
    }

    fn adopt(&mut self, vgpu: TenantId, channel: Channel, engine: Engine, ticket: Ticket) -> bool {
        let Some(known) = self.vgpus.get_mut(&vgpu) else { return false };
        let account = &mut known.accounts[engine.index()];
        (account.arrived, account.started) = (account.arrived + 1, account.started + 1);
        let flight = Flight { ticket, vgpu, channel, started: self.now, began: None, killed: false };
        self.engines[engine.index()].adopt(flight);
        true
    }

    fn started(&mut self, ticket: Ticket) -> bool {
        let Some(engine) = self.engine_of(ticket) else { return false };
        let first = self.engines[engine.index()].running().filter(|(flight, _)| flight.ticket == ticket);
        // The engine has been idle since the last submission ended.
        let idle = first.map(|(flight, since)| (flight.vgpu, self.now.since(since)));
        self.engines[engine.index()].given(ticket, self.now);
        if let Some((vgpu, ns)) = idle {
            let lane = self.lane_of(engine);
            self.lanes[lane].idled(&self.config, vgpu, ns, self.now);
        }
        true
    }

    fn wait(&mut self, ticket: Ticket) -> bool {
        let Some(engine) = self.engine_of(ticket) else { return false };
        let Some((flight, used)) = self.engines[engine.index()].set_aside(ticket, self.now) else { return false };
        self.charge(engine, &flight, used);
        let lane = self.lane_of(engine);
        self.lanes[lane].ended(&self.config, flight.vgpu, used, 0, self.now);
        true
    }

    fn resume(&mut self, ticket: Ticket) -> bool {
        let Some((engine, flight)) = self.take_aside(ticket) else { return false };
        self.put_back(engine, flight);
        true
    }

    /// Adds a submission to the work in flight on an engine.
    fn put_back(&mut self, engine: Engine, flight: Flight) {
        let flight = Flight { started: self.now, began: None, killed: false, ..flight };
        self.engines[engine.index()].start(flight);
        let lane = self.lane_of(engine);
        self.lanes[lane].adopt_flight(flight.vgpu);
    }

    fn requeue(&mut self, ticket: Ticket) -> bool {
        let Some((engine, Flight { ticket, vgpu, channel, .. })) = self.take_aside(ticket) else { return false };
        let queued = Queued { ticket, channel, engine, arrived: self.now, order: self.order, again: true };
        self.order += 1;
        let lane = self.lane_of(engine);
        self.lanes[lane].requeue(&self.config, vgpu, queued, self.now);
        true
    }

    fn moved(&mut self, ticket: Ticket, since: Nanos) -> bool {
        let now = self.now;
        let charged = Engine::ALL
            .into_iter()
            .find_map(|engine| Some((engine, self.engines[engine.index()].charge_aside(ticket, since, now)?)));
        let Some((engine, (flight, used))) = charged else { return false };
        self.charge(engine, &flight, used);
        let lane = self.lane_of(engine);
        self.lanes[lane].charged(&self.config, flight.vgpu, used, now);
        true
    }

    fn shared(&mut self, engine: Engine, since: Nanos) -> bool {
        let (now, lane) = (self.now, self.lane_of(engine));
        let state = &mut self.engines[engine.index()];
        let sharing: Vec<Flight> = state.asides().chain(state.running().map(|(flight, _)| flight)).copied().collect();
        if sharing.is_empty() {
            return true;
        }
        let used = state.charge_until(since, now);
        for (at, flight) in (0..).zip(&sharing) {
            let count = sharing.len() as u64;
            let part = used / count + u64::from(at < used % count);
            self.charge(engine, flight, part);
            self.lanes[lane].charged(&self.config, flight.vgpu, part, now);
        }
        true
    }

    /// Charges a vGPU for blocking an engine. Submissions that the engine received in the meantime are not charged.
    fn kept(&mut self, engine: Engine, vgpu: TenantId, since: Nanos) -> bool {
        let now = self.now;
        let Some(known) = self.vgpus.get_mut(&vgpu) else { return false };
        let used = self.engines[engine.index()].pass(since, now);
        let account = &mut known.accounts[engine.index()];
        account.used = account.used.saturating_add(used);
        known.history.add(now, engine, used);
        let lane = self.lane_of(engine);
        self.lanes[lane].charged(&self.config, vgpu, used, now);
        true
    }

    /// Corrects the accounts after a query of the card. The channel that has the engine on the card becomes the running
    /// one in the accounts. The submission that was running in the accounts has not used the engine.
    fn occupied(&mut self, engine: Engine, vgpu: TenantId, channel: Channel) -> bool {
        let of = |flight: &Flight| (flight.vgpu, flight.channel) == (vgpu, channel);
        if self.engines[engine.index()].bring_forward(of) {
            return true;
        }
        let found = Engine::ALL.into_iter().find_map(|other| {
            let state = &self.engines[other.index()];
            let ticket = state.asides().chain(state.flights()).find(|flight| of(flight))?.ticket;
            Some((other, ticket))
        });
        let Some((other, ticket)) = found else {
            self.engines[engine.index()].begin_anew(self.now);
            return true;
        };
        let flight = match self.engines[other.index()].take_aside(ticket) {
            Some(flight) => flight,
            None => {
                let Some((flight, used)) = self.engines[other.index()].end(ticket, self.now) else { return false };
                self.charge(other, &flight, used);
                let lane = self.lane_of(other);
                self.lanes[lane].ended(&self.config, vgpu, used, 0, self.now);
                flight
            }
        };
        self.put_back(engine, flight);
        self.engines[engine.index()].bring_forward(of)
    }

    fn take_aside(&mut self, ticket: Ticket) -> Option<(Engine, Flight)> {
        Engine::ALL.into_iter().find_map(|engine| Some((engine, self.engines[engine.index()].take_aside(ticket)?)))
    }

    fn complete(&mut self, ticket: Ticket, ended: Option<Nanos>) -> bool {
        if let Some((engine, flight)) = self.take_aside(ticket) {
            // The engine time of the submission since it was deferred is unknown.
            if let Some(vgpu) = self.vgpus.get_mut(&flight.vgpu) {
                vgpu.accounts[engine.index()].completed += 1;
            }
            return true;
        }
        let Some(engine) = self.engine_of(ticket) else { return self.complete_queued(ticket) };
        let earliest = Nanos(self.now.0.saturating_sub(self.config.stamp_slack_ns));
        let ended = ended.unwrap_or(self.now).clamp(earliest, self.now);
        let Some((flight, used)) = self.engines[engine.index()].end(ticket, ended) else { return false };
        // After this end, the engine was idle until the start of the next submission, or until now if there is none.
        let idle_until = self.engines[engine.index()].running().map_or(self.now, |(_, since)| since.min(self.now));
        self.leave_engine(engine, &flight, used, idle_until.since(ended), true);
        true
    }

    /// Completes a queued submission that had ended before it was removed from the card.
    fn complete_queued(&mut self, ticket: Ticket) -> bool {
        let holds = |lane: &Lane| lane.holder(ticket);
        let Some((lane, vgpu)) = self.lanes.iter().enumerate().find_map(|(at, lane)| Some((at, holds(lane)?))) else {
            return false;
        };
        for queued in self.lanes[lane].drop_queued(vgpu, |queued| queued.ticket == ticket) {
            if let Some(known) = self.vgpus.get_mut(&vgpu) {
                known.accounts[queued.engine.index()].completed += 1;
            }
        }
        true
    }

    fn withdraw(&mut self, ticket: Ticket) -> bool {
        if let Some((engine, flight)) = self.take_aside(ticket) {
            if let Some(vgpu) = self.vgpus.get_mut(&flight.vgpu) {
                vgpu.accounts[engine.index()].dropped += 1;
            }
            return true;
        }
        if let Some(engine) = self.engine_of(ticket) {
            if let Some(flight) = self.engines[engine.index()].withdraw(ticket) {
                self.leave_engine(engine, &flight, 0, 0, false);
            }
            return true;
        }
        let holder = |lane: &Lane| lane.holder(ticket);
        let Some((lane, vgpu)) = self.lanes.iter().enumerate().find_map(|(at, lane)| Some((at, holder(lane)?))) else {
            return false;
        };
        self.drop_queued(lane, vgpu, |queued| queued.ticket == ticket);
        true
    }

    fn end_channel(&mut self, vgpu: TenantId, channel: Channel) -> bool {
        if !self.vgpus.contains_key(&vgpu) {
            return false;
        }
        for lane in 0..self.lanes.len() {
            self.drop_queued(lane, vgpu, |queued| queued.channel == channel);
        }
        for engine in Engine::ALL {
            self.drop_flights(engine, |flight| flight.vgpu == vgpu && flight.channel == channel);
        }
        true
    }

    fn change(&mut self, vgpu: TenantId, params: VgpuParams) -> bool {
        let Some(known) = self.vgpus.get_mut(&vgpu).filter(|_| params.check().is_ok()) else { return false };
        known.params = params;
        self.renew_lanes(vgpu);
        true
    }

    fn compete(&mut self, vgpu: TenantId, params: Option<VgpuParams>) -> bool {
        let is_valid = params.is_none_or(|params| params.check().is_ok());
        let Some(known) = self.vgpus.get_mut(&vgpu).filter(|_| is_valid) else { return false };
        known.competing = params;
        self.renew_lanes(vgpu);
        true
    }

    /// Applies a vGPU's effective settings to the lanes.
    fn renew_lanes(&mut self, vgpu: TenantId) {
        let Some(params) = self.vgpus.get(&vgpu).map(Vgpu::effective) else { return };
        for (engine, lane) in Engine::ALL.into_iter().zip(&mut self.lanes) {
            lane.change(vgpu, params.for_engine(engine), self.now);
        }
    }

    fn configure(&mut self, config: Config) -> bool {
        if config.check().is_err() {
            return false;
        }
        let same = (self.config.policy, self.config.queues) == (config.policy, config.queues);
        self.config = config;
        self.lanes.iter_mut().for_each(Lane::touch);
        if !same {
            self.remake_lanes();
        }
        true
    }

    /// Recreates the lanes with all queued and in-flight submissions after a change of the policy or of the assignment
    /// of engines to lanes.
    fn remake_lanes(&mut self) {
        let mut old = std::mem::replace(&mut self.lanes, lanes(&self.config, self.now));
        for (vgpu, known) in &self.vgpus {
            let held = known.quarantine != Quarantine::Free;
            for (engine, lane) in Engine::ALL.into_iter().zip(&mut self.lanes) {
                lane.join(*vgpu, known.effective().for_engine(engine), held, self.now);
            }
            let mut queued: Vec<Queued> = old.iter_mut().flat_map(|lane| lane.leave(*vgpu)).collect();
            queued.sort_by_key(|queued| queued.order);
            for queued in queued {
                let lane = if self.lanes.len() == 1 { 0 } else { queued.engine.index() };
                self.lanes[lane].adopt(*vgpu, queued);
            }
        }
        for engine in Engine::ALL {
            let lane = self.lane_of(engine);
            for flight in self.engines[engine.index()].flights() {
                self.lanes[lane].adopt_flight(flight.vgpu);
            }
        }
    }

    fn release(&mut self, vgpu: TenantId, decisions: &mut Vec<Decision>) -> bool {
        let Some(known) = self.vgpus.get_mut(&vgpu) else { return false };
        known.strikes = 0;
        if std::mem::replace(&mut known.quarantine, Quarantine::Free) != Quarantine::Free {
            decisions.push(Decision::Released { vgpu });
        }
        for lane in &mut self.lanes {
            lane.hold(vgpu, false);
        }
        true
    }

    /// Returns the engine of a submission, according to the accounts.
    #[must_use]
    pub fn engine_of(&self, ticket: Ticket) -> Option<Engine> {
        Engine::ALL.into_iter().find(|engine| self.engines[engine.index()].flights().any(|f| f.ticket == ticket))
    }

    /// Charges a submission that has left an engine, and counts it as completed or dropped.
    fn leave_engine(&mut self, engine: Engine, flight: &Flight, used: u64, late: u64, completed: bool) {
        self.charge(engine, flight, used);
        if let Some(vgpu) = self.vgpus.get_mut(&flight.vgpu) {
            let account = &mut vgpu.accounts[engine.index()];
            *(if completed { &mut account.completed } else { &mut account.dropped }) += 1;
        }
        let lane = self.lane_of(engine);
        self.lanes[lane].ended(&self.config, flight.vgpu, used, late, self.now);
    }

    fn charge(&mut self, engine: Engine, flight: &Flight, used: u64) {
        match self.vgpus.get_mut(&flight.vgpu) {
            Some(vgpu) => {
                let account = &mut vgpu.accounts[engine.index()];
                account.used = account.used.saturating_add(used);
                account.longest = account.longest.max(used);
                vgpu.history.add(self.now, engine, used);
            }
            None => {
                let state = &mut self.engines[engine.index()];
                state.departed = state.departed.saturating_add(used);
            }
        }
    }

    fn drop_flights(&mut self, engine: Engine, gone: impl Fn(&Flight) -> bool) {
        for flight in self.engines[engine.index()].drop_aside(&gone) {
            if let Some(vgpu) = self.vgpus.get_mut(&flight.vgpu) {
                vgpu.accounts[engine.index()].dropped += 1;
            }
        }
        while let Some((flight, used)) = self.engines[engine.index()].drop_first(self.now, &gone) {
            self.leave_engine(engine, &flight, used, 0, false);
        }
    }

    fn drop_queued(&mut self, lane: usize, vgpu: TenantId, gone: impl Fn(&Queued) -> bool) {
        let dropped = self.lanes[lane].drop_queued(vgpu, gone);
        let Some(known) = self.vgpus.get_mut(&vgpu) else { return };
        for queued in dropped {
            known.accounts[queued.engine.index()].dropped += 1;
        }
    }

    /// Returns the time at which the first submission on an engine reaches its run time limit, or `None` if it has no
    /// limit or its channel is being killed.
    fn deadline(&self, engine: &EngineState) -> Option<Nanos> {
        let (flight, since) = engine.running().filter(|(flight, _)| !flight.killed)?;
        Some(since.after(self.vgpus.get(&flight.vgpu)?.params.max_run_ns?))
    }

    fn enforce_limits(&mut self, decisions: &mut Vec<Decision>) {
        for engine in Engine::ALL {
            let state = &self.engines[engine.index()];
            if self.deadline(state).is_none_or(|deadline| self.now < deadline) {
                continue;
            }
            let Some((Flight { vgpu, channel, ticket, .. }, since)) = state.running().map(|(f, since)| (*f, since))
            else {
                continue;
            };
            let ran_ns = self.now.since(since);
            decisions.push(Decision::Kill { vgpu, channel, engine, ticket, ran_ns });
            self.engines[engine.index()].mark_killed();
        }
    }

    fn strike(&mut self, vgpu: TenantId, engine: Engine, decisions: &mut Vec<Decision>) -> bool {
        let Some(known) = self.vgpus.get_mut(&vgpu) else { return false };
        known.accounts[engine.index()].killed += 1;
        known.strikes += 1;
        let Config { strikes, quarantine_ns, .. } = self.config;
        if strikes == 0 || known.strikes < strikes || known.quarantine != Quarantine::Free {
            return true;
        }
        let until = (quarantine_ns > 0).then(|| self.now.after(quarantine_ns));
        known.quarantine = until.map_or(Quarantine::Held, Quarantine::Until);
        decisions.push(Decision::Quarantined { vgpu, until });
        for lane in &mut self.lanes {
            lane.hold(vgpu, true);
        }
        true
    }

    fn end_quarantines(&mut self, decisions: &mut Vec<Decision>) {
        let over = |vgpu: &Vgpu| matches!(vgpu.quarantine, Quarantine::Until(until) if self.now >= until);
        let released: Vec<_> = self.vgpus.iter().filter(|(_, known)| over(known)).map(|(vgpu, _)| *vgpu).collect();
        for vgpu in released {
            self.release(vgpu, decisions);
        }
    }

    fn start_what_may(&mut self, decisions: &mut Vec<Decision>) {
        for lane in &mut self.lanes {
            while let Some((vgpu, queued)) = lane.next(&self.config, self.now) {
                let Queued { ticket, channel, engine, arrived, again, .. } = queued;
                let flight = Flight { ticket, vgpu, channel, started: self.now, began: None, killed: false };
                self.engines[engine.index()].start(flight);
                if let Some(known) = self.vgpus.get_mut(&vgpu).filter(|_| !again) {
                    let account = &mut known.accounts[engine.index()];
                    account.started += 1;
                    account.waits.add(self.now.since(arrived));
                }
                decisions.push(Decision::Start(ticket));
            }
        }
    }
}

fn lane_count(config: &Config) -> usize {
    match config.queues {
        Queues::Separate => Engine::COUNT,
        Queues::Single => 1,
    }
}

fn lanes(config: &Config, now: Nanos) -> Vec<Lane> {
    (0..lane_count(config)).map(|_| Lane::new(config, now)).collect()
}
