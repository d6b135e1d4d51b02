//! The latest status of a card's owner. It is written by the thread that communicates with the owner, and readers do
//! not wait.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_control::{Card, TenantView};
use locks::{Mutex, rank};
use sched::History;

/// Time without an answer after which an owner counts as not answering.
// TIMEOUT: the owner answers at once; this limit allows for a very busy host.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// A card as its owner describes it, with the recent use of its time.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// The last description.
    pub card: Card,
    /// Time charged in each interval and the start of the interval, by tenant.
    uses: BTreeMap<String, VecDeque<(u64, u64)>>,
}

impl Seen {
    /// Replaces the description with a new one.
    fn renew(&mut self, card: Card) {
        if card.now_ns < self.card.now_ns {
            // A new owner has a different clock.
            self.uses.clear();
        }
        self.uses.retain(|name, _| card.tenants.iter().any(|tenant| tenant.name == *name));
        for tenant in &card.tenants {
            let uses = self.uses.entry(tenant.name.clone()).or_default();
            for &(from, used) in &tenant.recent {
                // Intervals that were incomplete when reported are reported again.
                while uses.pop_back_if(|(last, _)| *last >= from).is_some() {}
                uses.push_back((from, used));
            }
            uses.drain(..uses.len().saturating_sub(History::MAX_INTERVALS));
        }
        self.card = card;
    }

    /// Returns the start of the first interval that must be reported again.
    fn since(&self) -> u64 {
        self.end().saturating_sub(History::INTERVAL_NS)
    }

    /// Returns the end of the last complete interval.
    fn end(&self) -> u64 {
        self.card.now_ns - self.card.now_ns % History::INTERVAL_NS
    }

    /// Returns the time that a tenant was charged in each complete interval of the last `window_ns`, and the start of
    /// the interval.
    pub fn uses(&self, tenant: &str, window_ns: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        let (from, end) = (self.end().saturating_sub(window_ns), self.end());
        let uses = self.uses.get(tenant).into_iter().flatten().copied();
        uses.filter(move |(begin, _)| (from..end).contains(begin))
    }

    /// Returns the fraction of the last `window_ns` for which a tenant was charged, in thousandths.
    #[must_use]
    pub fn received_permille(&self, tenant: &str, window_ns: u64) -> u32 {
        let used: u64 = self.uses(tenant, window_ns).map(|(_, used)| used).fold(0, u64::saturating_add);
        let permille = u128::from(used) * u128::from(sched::PERMILLE) / u128::from(window_ns.max(1));
        u32::try_from(permille).unwrap_or(u32::MAX)
    }

    /// Returns the description of a tenant.
    #[must_use]
    pub fn tenant(&self, name: &str) -> Option<&TenantView> {
        self.card.tenants.iter().find(|tenant| tenant.name == name)
    }
}

#[derive(Debug, Default)]
struct State {
    /// `None` until the first owner has answered, and between the end of an owner and the first answer of the next.
    seen: Option<Arc<Seen>>,
    /// Time at which the outstanding request was sent to the owner.
    asked: Option<Instant>,
    /// Reason that no owner runs.
    ended: Option<String>,
    /// Number of times that an owner was started, not counting the first start.
    restarts: u64,
}

/// The status cell of one card.
#[derive(Debug)]
pub struct StatusCell {
    card: String,
    state: Mutex<rank::CudaStatusCell, State>,
}

impl StatusCell {
    /// Creates the cell of a card whose owner has not answered yet.
    #[must_use]
    pub fn new(card: &str) -> Self {
        Self { card: card.to_owned(), state: Mutex::new(State::default()) }
    }

    /// Counts a start of an owner, except the first.
    pub fn restarted(&self) {
        self.state.lock().restarts += 1;
    }

    /// Returns the number of times that an owner was started, not counting the first start.
    pub fn restarts(&self) -> u64 {
        self.state.lock().restarts
    }

    /// Returns the last description of the card.
    ///
    /// # Errors
    /// Returns the reason that the current state of the card is unknown.
    pub fn seen(&self) -> Result<Arc<Seen>, String> {
        let state = self.state.lock();
        self.trouble_in(&state)?;
        let card = &self.card;
        state.seen.clone().ok_or_else(|| format!("the owner of card `{card}` has not described it yet"))
    }

    /// Checks that the owner answers.
    ///
    /// # Errors
    /// Returns the reason that the owner does not answer.
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
            Some(since) => Err(format!("the owner of card `{card}` has not answered for {} s", since.as_secs())),
        }
    }

    /// Records that a request was sent to the owner.
    pub fn asks(&self) {
        self.state.lock().asked = Some(Instant::now());
    }

    /// Records that the owner has answered, or does not run.
    pub fn answered(&self) {
        self.state.lock().asked = None;
    }

    /// Returns the start of the first interval that must be reported again.
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

    /// Records that the owner has ended.
    pub fn ended(&self, why: &str) {
        let mut state = self.state.lock();
        *state = State { seen: None, asked: None, ended: Some(why.to_owned()), restarts: state.restarts };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(now_ms: u64, recent: &[(u64, u64)]) -> Card {
        const MS: u64 = 1_000_000;
        let recent = recent.iter().map(|(from, used)| (from * MS, used * MS)).collect();
        let tenant = TenantView { name: "a".to_owned(), recent, ..TenantView::default() };
        Card { now_ns: now_ms * MS, tenants: vec![tenant], ..Card::default() }
    }

    #[test]
    fn gpu_uses_accumulate_and_restart_with_new_cuda_owner() {
        let status_cell = StatusCell::new("fake");
        status_cell.described(card(250, &[(0, 50), (100, 60), (200, 10)]));
        assert_eq!(status_cell.seen().expect("there").received_permille("a", 200_000_000), 550);
        assert_eq!(status_cell.since(), 100_000_000);
        status_cell.described(card(410, &[(100, 60), (200, 80), (300, 40), (400, 1)]));
        let seen = status_cell.seen().expect("there");
        assert_eq!(seen.received_permille("a", 200_000_000), 600);
        assert_eq!(seen.uses("a", 1_000_000_000).count(), 4);
        status_cell.described(card(150, &[(0, 100)]));
        assert_eq!(status_cell.seen().expect("there").uses("a", 1_000_000_000).collect::<Vec<_>>(), [(0, 100_000_000)]);
    }

    #[test]
    fn a_board_without_an_owner_says_why() {
        let status_cell = StatusCell::new("fake");
        assert!(status_cell.seen().expect_err("nothing was said").contains("has not described it yet"));
        status_cell.described(card(10, &[]));
        status_cell.ended("signal: 9");
        assert_eq!(status_cell.trouble().expect_err("it ended"), "card `fake` has no owner: signal: 9");
        assert!(status_cell.seen().is_err());
    }
}
