//! The latest status of a card's owner. The thread that communicates with the owner writes the status. Readers never
//! block on the owner.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_control::{Card, TenantView};
use locks::{Mutex, rank};
use sched::{History, Nanos, TenantId};
use tenancy::Window;

/// Time without a response after which an owner counts as unresponsive.
// TIMEOUT: the owner responds immediately; the limit allows for a very busy host.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// A card as described by its owner, with the complete recent usage of its time.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Last description of the card.
    pub card: Card,
}

impl Seen {
    /// Replaces the description with a new one, which contains only the most recent usage intervals. Keeps the older
    /// intervals, unless the description is from a new owner.
    fn renew(&mut self, mut card: Card) {
        // An earlier time means that the owner is new and its clock has restarted.
        let is_same = card.time.now >= self.card.time.now;
        for (id, time) in card.time.tenants.iter_mut().filter(|_| is_same) {
            let Some(before) = self.card.time.tenants.get_mut(id) else { continue };
            let mut recent = std::mem::take(&mut before.recent);
            // Intervals that were incomplete in the last report are repeated in this one.
            let first = time.recent.first().map_or(Nanos(u64::MAX), |sample| sample.from);
            recent.retain(|sample| sample.from < first);
            recent.append(&mut time.recent);
            recent.drain(..recent.len().saturating_sub(History::MAX_INTERVALS));
            time.recent = recent;
        }
        self.card = card;
    }

    /// Returns the start of the first interval that the owner must report again.
    fn since(&self) -> u64 {
        Window::last(self.card.time.now, History::INTERVAL_NS).from.0
    }

    /// Returns a tenant's ID and description.
    #[must_use]
    pub fn tenant(&self, name: &str) -> Option<(TenantId, &TenantView)> {
        self.card.tenants.iter().find(|(_, tenant)| tenant.name == name).map(|(&id, tenant)| (id, tenant))
    }

    /// Returns the names of the tenants by ID.
    #[must_use]
    pub fn names(&self) -> BTreeMap<TenantId, String> {
        self.card.tenants.iter().map(|(&id, tenant)| (id, tenant.name.clone())).collect()
    }
}

#[derive(Debug, Default)]
struct State {
    /// The card and its recent usage, or `None` if no owner is running or the owner has not responded yet.
    seen: Option<Arc<Seen>>,
    /// Send time of the outstanding request to the owner.
    asked: Option<Instant>,
    /// Reason why no owner is running.
    ended: Option<String>,
    /// Number of owner restarts.
    restarts: u64,
}

/// The status cell of one card.
#[derive(Debug)]
pub struct StatusCell {
    card: String,
    state: Mutex<rank::CudaStatusCell, State>,
}

impl StatusCell {
    /// Creates the cell of a card whose owner has not responded yet.
    #[must_use]
    pub fn new(card: &str) -> Self {
        Self { card: card.to_owned(), state: Mutex::new(State::default()) }
    }

    /// Counts an owner restart.
    pub fn restarted(&self) {
        self.state.lock().restarts += 1;
    }

    /// Returns the number of owner restarts.
    pub fn restarts(&self) -> u64 {
        self.state.lock().restarts
    }

    /// Returns the last description of the card.
    ///
    /// # Errors
    /// Returns the reason if the current state of the card is unknown.
    pub fn seen(&self) -> Result<Arc<Seen>, String> {
        let state = self.state.lock();
        self.trouble_in(&state)?;
        let card = &self.card;
        state.seen.clone().ok_or_else(|| format!("the owner of card `{card}` has not described it yet"))
    }

    /// Checks that the owner responds.
    ///
    /// # Errors
    /// Returns an error if no owner is running, or if it does not respond in time.
    pub fn trouble(&self) -> Result<(), String> {
        self.trouble_in(&self.state.lock())
    }

    fn trouble_in(&self, state: &State) -> Result<(), String> {
        let card = &self.card;
        if let Some(why) = &state.ended {
            return Err(format!("card `{card}` has no owner: {why}"));
        }
        match state.asked.map(|asked| asked.elapsed()).filter(|since| *since > ANSWER_TIMEOUT) {
            None => Ok(()),
            Some(since) => Err(format!("the owner of card `{card}` has not responded for {} s", since.as_secs())),
        }
    }

    /// Records that a request was sent to the owner.
    pub fn asks(&self) {
        self.state.lock().asked = Some(Instant::now());
    }

    /// Records that the owner has responded, or that it is not running.
    pub fn answered(&self) {
        self.state.lock().asked = None;
    }

    /// Returns the start of the first interval that the owner must report again.
    #[must_use]
    pub fn since(&self) -> u64 {
        self.state.lock().seen.as_ref().map_or(0, |seen| seen.since())
    }

    /// Records a new description of the card.
    pub fn described(&self, card: Card) {
        let mut state = self.state.lock();
        let mut seen = state.seen.take().map_or_else(Seen::default, Arc::unwrap_or_clone);
        seen.renew(card);
        (state.seen, state.ended) = (Some(Arc::new(seen)), None);
    }

    /// Records that the owner has exited.
    pub fn ended(&self, why: &str) {
        let mut state = self.state.lock();
        *state = State { seen: None, asked: None, ended: Some(why.to_owned()), restarts: state.restarts };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sched::{Config, Engine, Event, Sample, Scheduler, VgpuParams};
    use tenancy::TimeView;

    const MS: u64 = 1_000_000;
    const ONE: TenantId = TenantId(1);

    /// Returns the description of a card with one tenant at `now_ms`. `recent` contains the start and usage of each
    /// interval, in ms.
    fn card(now_ms: u64, recent: &[(u64, u64)]) -> Card {
        let mut scheduler = Scheduler::new(Config::default(), Nanos(0)).expect("defaults");
        let params = VgpuParams::default();
        scheduler.event(Nanos(0), Event::Added { vgpu: ONE, params }, &mut Vec::new());
        let mut time = TimeView::new(&scheduler, &[Engine::Compute], Nanos(now_ms * MS), Nanos(0));
        let sample = |(from, used): &(u64, u64)| Sample { from: Nanos(from * MS), used: [used * MS, 0, 0] };
        time.tenants.get_mut(&ONE).expect("there").recent = recent.iter().map(sample).collect();
        let tenant = TenantView { name: "a".to_owned(), ..TenantView::default() };
        Card { time, tenants: BTreeMap::from([(ONE, tenant)]), ..Card::default() }
    }

    fn received(seen: &Seen, window_ms: u64) -> u32 {
        let time = &seen.card.time.tenants[&seen.tenant("a").expect("there").0];
        time.received_permille(Engine::Compute, &Window::last(seen.card.time.now, window_ms * MS))
    }

    #[test]
    fn gpu_uses_accumulate_and_restart_with_new_cuda_owner() {
        let status_cell = StatusCell::new("fake");
        let seen = || status_cell.seen().expect("there");
        let starts =
            || seen().card.time.tenants[&ONE].recent.iter().map(|sample| sample.from.0 / MS).collect::<Vec<_>>();
        status_cell.described(card(250, &[(0, 50), (100, 60), (200, 10)]));
        assert_eq!((received(&seen(), 200), status_cell.since()), (550, 100 * MS));
        status_cell.described(card(410, &[(100, 60), (200, 80), (300, 40), (400, 1)]));
        assert_eq!((received(&seen(), 200), starts()), (600, vec![0, 100, 200, 300, 400]));
        status_cell.described(card(450, &[]));
        assert_eq!(starts(), [0, 100, 200, 300, 400], "no usage since then");
        status_cell.described(card(150, &[(0, 100)]));
        assert_eq!(starts(), [0]);
    }

    #[test]
    fn a_board_without_an_owner_says_why() {
        let status_cell = StatusCell::new("fake");
        assert!(status_cell.seen().expect_err("there is no description yet").contains("has not described it yet"));
        status_cell.described(card(10, &[]));
        status_cell.ended("signal: 9");
        assert_eq!(status_cell.trouble().expect_err("the owner has exited"), "card `fake` has no owner: signal: 9");
        assert!(status_cell.seen().is_err());
    }
}
