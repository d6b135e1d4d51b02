//! Thrash detection. If the working sets of VMs do not fit together and their chunks are moved repeatedly, the VMs take
//! turns: each of them gets exclusive use of the card's memory for a quantum.
//!
//! The detector implements the anti-thrashing scheduler of the unified-memory thesis (section 11.5), with two
//! extensions that the thesis names as future work (section 13.2): traffic between card and host in a sliding window
//! activates quanta, and the length of a quantum depends on the number of bytes to copy when the turn changes. If the
//! GPU accesses host memory directly, it can thrash without any relocation, so its bus traffic is included if the card
//! counts it. Without a counter, quanta are [probed](probes).

mod probes;
mod saved;
mod sets;

pub use probes::Done;
pub use saved::SavedQuanta;
pub(crate) use saved::SavedTurn;
pub use sets::WorkingSet;

use crate::TenantId;
use probes::{Probes, Verdict};
use serde::{Deserialize, Serialize};
use sets::WorkingSets;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::{Display, Formatter};
use std::str::FromStr;

/// Number of slots in the sliding window.
const SLOTS: u64 = 32;

/// Condition for using quanta.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Use quanta if VMs thrash.
    #[default]
    Auto,
    /// Never use quanta.
    Off,
    /// Always use quanta if two or more VMs are active, for comparison.
    Forced,
}

impl Mode {
    /// Returns the mode's name in configuration files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Off => "off",
            Self::Forced => "forced",
        }
    }
}

impl Display for Mode {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::Auto, Self::Off, Self::Forced];
        let known = all.into_iter().find(|mode| mode.name() == text);
        known.ok_or_else(|| format!("`{text}` is not a mode for time quanta: `auto`, `off` or `forced`"))
    }
}

/// Settings of quanta.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantaConfig {
    /// Condition for using quanta.
    pub mode: Mode,
    /// Length of the sliding window over which traffic is summed, in ns.
    pub window_ns: u64,
    /// Minimum bus traffic that counts as thrashing, in permille of the bytes that can be copied within the window.
    pub on_permille: u32,
    /// Hysteresis, in permille. Quanta end after this part of the memory has been free for one window.
    pub margin_permille: u32,
    /// Length of a quantum, as a multiple of the copy time for a change of turns.
    pub factor: u32,
    /// Minimum length of a quantum, in ns.
    pub min_ns: u64,
    /// Maximum length of a quantum, in ns.
    pub max_ns: u64,
}

impl Default for QuantaConfig {
    /// Returns settings with a window of 1 s, a threshold of a fifth of the bandwidth, and quanta of ten times the copy
    /// time, but at least 100 ms and at most 30 s (as in the thesis).
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            window_ns: 1_000_000_000,
            on_permille: 200,
            margin_permille: 50,
            factor: 10,
            min_ns: 100_000_000,
            max_ns: 30_000_000_000,
        }
    }
}

/// Quantum of a VM. The holder's submissions run, and those of the other members wait. The holder's chunks are returned
/// to the card, and those of the other members are evicted ([`Balancer::set_turn`](crate::Balancer::set_turn)).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    /// All VMs that take turns, sorted by number.
    pub members: Vec<TenantId>,
    /// VM that has the current turn.
    pub holder: TenantId,
    /// Length of the quantum in ns, excluding the copies at its start.
    pub quantum_ns: u64,
}

/// State of a VM in the quanta of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum QuantumState {
    /// The VM can use its memory at any time. Either it does not take turns, or its quantum is over and no other VM has
    /// work.
    Free,
    /// Another VM has the quantum.
    Waits,
    /// Memory is being copied for the VM's quantum.
    Loads,
    /// The VM has the quantum.
    Holds,
}

/// State of a tenant on the card that controls the tenant's quanta on all of its cards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lead {
    /// Another tenant has the quantum on that card, so a quantum on this card would be useless.
    Waits,
    /// The tenant has the quantum on that card. A quantum on this card lasts as long as that one.
    Holds,
}

/// A change of turns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// From now on, VMs take turns, or the members have changed.
    On(Turn),
    /// The quantum of the next VM starts.
    Next(Turn),
    /// Quanta end, and no VM waits.
    Off,
}

/// Thrash detector and current quantum. Callers pass the traffic, the working sets, and the time.
#[derive(Debug)]
pub struct Quanta {
    config: QuantaConfig,
    /// Number of each window slot, and the bytes of bus traffic in the slot.
    traffic: VecDeque<(u64, u64)>,
    /// Bandwidth of copies between the card and the host in bytes per second, or 0 before the first copy.
    bandwidth: u64,
    /// Bandwidth from which the lengths of quanta are computed in the current round, in which each member has one
    /// quantum. It is constant during the round, so that copies for one member do not change the shares of others. It
    /// is 0 if the bandwidth was unknown at the start of the round.
    round_bandwidth: u64,
    /// Working sets of the active VMs.
    sets: WorkingSets,
    /// Time since each active VM last had work, in ns. VMs with work have no entry.
    idle: BTreeMap<TenantId, u64>,
    /// Multi-card tenants for which another card controls the quanta.
    leads: BTreeMap<TenantId, Lead>,
    /// Value of `granted` when another card began the tenant's quantum.
    led_since: BTreeMap<TenantId, u64>,
    /// Multi-card tenants that cannot use their memory on another card yet.
    unready: BTreeSet<TenantId>,
    /// Time at which other VMs began to wait for a quantum that has not started, in ns.
    awaited_since: Option<u64>,
    /// Sequence number of each VM's last quantum.
    last: BTreeMap<TenantId, u64>,
    /// Number of quanta so far.
    granted: u64,
    /// True if the last quantum was given to a member that had not waited the longest.
    went_first: bool,
    /// Current quantum, and its start time in ns. The time is `None` while memory is being copied for the quantum.
    turn: Option<(Turn, Option<u64>)>,
    /// Time at which the working sets began to fit together during quanta, in ns.
    fits_since: Option<u64>,
    probes: Probes,
}

impl Quanta {
    /// Creates a detector without any measurements.
    #[must_use]
    pub fn new(config: QuantaConfig) -> Self {
        Self {
            config,
            traffic: VecDeque::new(),
            bandwidth: 0,
            round_bandwidth: 0,
            sets: WorkingSets::default(),
            idle: BTreeMap::new(),
            leads: BTreeMap::new(),
            led_since: BTreeMap::new(),
            unready: BTreeSet::new(),
            awaited_since: None,
            last: BTreeMap::new(),
            granted: 0,
            went_first: false,
            turn: None,
            fits_since: None,
            probes: Probes::default(),
        }
    }

    /// Returns the detector for the card's next owner, with new settings. The measured bandwidth and the results of
    /// probes are kept. Traffic, working sets and the current quantum are discarded.
    #[must_use]
    pub fn at_rest(self, config: QuantaConfig) -> Self {
        let Self { bandwidth, round_bandwidth, probes, .. } = self;
        Self { bandwidth, round_bandwidth, probes, ..Self::new(config) }
    }

    /// Returns the settings.
    #[must_use]
    pub fn config(&self) -> &QuantaConfig {
        &self.config
    }

    /// Changes the settings. They take effect at the next [`Self::tick`].
    pub fn set_config(&mut self, config: QuantaConfig) {
        self.traffic.clear();
        self.probes.end();
        self.config = config;
    }

    /// Returns the current quantum, if VMs take turns.
    #[must_use]
    pub fn turn(&self) -> Option<&Turn> {
        self.turn.as_ref().map(|(turn, _)| turn)
    }

    /// Returns the remaining time of the current quantum in ns, or `None` if there is no quantum or memory is still
    /// being copied for it.
    #[must_use]
    pub fn left_ns(&self, now_ns: u64) -> Option<u64> {
        let (turn, since) = self.turn.as_ref()?;
        since.map(|since| turn.quantum_ns.saturating_sub(now_ns.saturating_sub(since)))
    }

    /// Returns the measured copy bandwidth in bytes per second, or 0 before the first copy.
    #[must_use]
    pub fn bandwidth(&self) -> u64 {
        self.bandwidth
    }

    /// Records that `bytes` bytes were relocated in the last `took_ns` ns.
    pub fn relocated(&mut self, now_ns: u64, bytes: u64, took_ns: u64) {
        let measured = u128::from(bytes) * 1_000_000_000 / u128::from(took_ns.max(1));
        let measured = u64::try_from(measured).unwrap_or(u64::MAX);
        // Average over about eight copies, because a copy may have waited for other work.
        self.bandwidth = match self.bandwidth {
            0 => measured,
            old => old - old / 8 + measured / 8,
        };
        self.accessed(now_ns, bytes);
    }

    /// Records that VMs' work has transferred `bytes` over the bus by accessing host memory.
    pub fn accessed(&mut self, now_ns: u64, bytes: u64) {
        let slot = now_ns / self.slot_ns();
        match self.traffic.back_mut() {
            Some((at, sum)) if *at >= slot => *sum = sum.saturating_add(bytes),
            _ => self.traffic.push_back((slot, bytes)),
        }
        self.expire(now_ns);
    }

    /// Sets the working sets of the active VMs and the number of card bytes available to them.
    pub fn set_working_sets(&mut self, capacity: u64, sets: BTreeMap<TenantId, WorkingSet>) {
        self.sets = WorkingSets { capacity, by_vm: sets };
    }

    /// Sets the time since active VMs last had work, in ns. VMs with running or queued work have no entry.
    pub fn set_idle(&mut self, idle: BTreeMap<TenantId, u64>) {
        self.idle = idle;
    }

    /// Sets the multi-card tenants for which another card controls the quanta. The next [`Self::tick`] follows that
    /// card.
    pub fn set_leads(&mut self, leads: BTreeMap<TenantId, Lead>) {
        let (granted, holds) = (self.granted, |vm: &TenantId| leads.get(vm) == Some(&Lead::Holds));
        self.led_since.retain(|vm, _| holds(vm));
        for vm in leads.keys().filter(|vm| holds(vm)) {
            self.led_since.entry(*vm).or_insert(granted);
        }
        self.leads = leads;
    }

    /// Sets the multi-card tenants that cannot use their memory on another card yet.
    pub fn set_unready(&mut self, unready: BTreeSet<TenantId>) {
        self.unready = unready;
    }

    /// Returns true if the quantum should not start yet although its copies are complete: the holder has several cards,
    /// and its memory is not ready on one of them. Other VMs with work wait for this for at most three times the
    /// quantum's length, because the owner of another card may be stopped.
    #[must_use]
    pub fn waits_for_cards(&self, now_ns: u64) -> bool {
        let turn = self.turn().filter(|turn| self.unready.contains(&turn.holder));
        let waited_ns = self.awaited_since.map_or(0, |since| now_ns.saturating_sub(since));
        turn.is_some_and(|turn| waited_ns < turn.quantum_ns.saturating_mul(3))
    }

    /// Returns a VM's state, to be sent to the other cards of a tenant with several cards.
    #[must_use]
    pub fn state(&self, vm: TenantId, now_ns: u64) -> QuantumState {
        let Some((turn, since)) = self.turn.as_ref().filter(|(turn, _)| turn.members.contains(&vm)) else {
            return QuantumState::Free;
        };
        let contested = self.is_contested(turn, vm) || self.left_ns(now_ns) != Some(0);
        match (turn.holder == vm, since) {
            (false, _) => QuantumState::Waits,
            (true, None) => QuantumState::Loads,
            (true, Some(_)) if contested => QuantumState::Holds,
            (true, Some(_)) => QuantumState::Free,
        }
    }

    /// Sets the work completed for each VM so far, which shows whether probed quanta help.
    pub fn set_done(&mut self, done: BTreeMap<TenantId, Done>) {
        self.probes.set_done(done);
    }

    /// Returns true if VMs take turns only because of a probe.
    #[must_use]
    pub fn tries(&self) -> bool {
        self.turn.is_some() && self.probes.tries()
    }

    /// Returns true if bus traffic may soon determine whether VMs take turns.
    #[must_use]
    pub fn watches(&self) -> bool {
        self.config.mode == Mode::Auto && self.turn.is_none()
    }

    /// Returns true if bus traffic currently determines whether VMs take turns. This is the case if their working sets
    /// do not fit together and they do not take turns yet.
    #[must_use]
    pub fn detects(&self) -> bool {
        self.watches() && !self.sets.fit(0) && self.members().len() > 1
    }

    /// Returns true if the next decision depends on the copy bandwidth, which has not been measured yet.
    #[must_use]
    pub fn wants_bandwidth(&self) -> bool {
        self.bandwidth == 0 && self.detects()
    }

    /// Records that the copies for the new quantum are complete. The quantum's time starts now.
    pub fn copies_done(&mut self, now_ns: u64) {
        let Some((turn, since)) = self.turn.take() else { return };
        // The bandwidth may have been unknown when the quantum was granted.
        let quantum_ns = if since.is_none() { self.quantum_ns(&turn.members, turn.holder) } else { turn.quantum_ns };
        if since.is_none() {
            self.probes.begins(turn.holder);
        }
        self.turn = Some((Turn { quantum_ns, ..turn }, since.or(Some(now_ns))));
    }

    /// Returns the change that is due now, if any. The interval between calls should be short compared with a quantum.
    pub fn tick(&mut self, now_ns: u64) -> Option<Change> {
        self.expire(now_ns);
        let change = if self.turn.is_some() { self.go_on(now_ns) } else { self.begin(now_ns) };
        let starts = self.turn.as_ref().filter(|(_, since)| since.is_none());
        let is_awaited = starts.is_some_and(|(turn, _)| self.is_contested(turn, turn.holder));
        let before = self.awaited_since.filter(|_| change.is_none());
        self.awaited_since = is_awaited.then(|| before.unwrap_or(now_ns));
        change
    }

    fn begin(&mut self, now_ns: u64) -> Option<Change> {
        let members = self.members();
        let due = match self.config.mode {
            Mode::Auto => {
                let is_led = members.iter().any(|vm| self.leads.contains_key(vm));
                !self.sets.fit(0) && (is_led || self.thrashes() || self.are_worth_a_trial(now_ns, &members))
            }
            Mode::Off => false,
            Mode::Forced => true,
        };
        let works = |vm: &&TenantId| self.can_work(**vm);
        let &holder = members.iter().find(works).or(members.first()).filter(|_| due && members.len() > 1)?;
        self.round_bandwidth = self.bandwidth;
        Some(Change::On(self.grant(members, holder)))
    }

    /// Returns true if quanta should be probed. The bandwidth must be known because it determines the length of quanta.
    fn are_worth_a_trial(&mut self, now_ns: u64, members: &[TenantId]) -> bool {
        let window_ns = self.config.window_ns;
        self.bandwidth > 0 && members.len() > 1 && self.probes.should_probe(now_ns, members, window_ns)
    }

    /// Ends the quanta, and returns this change.
    fn end(&mut self) -> Change {
        // Traffic during quanta does not predict the traffic without quanta.
        self.traffic.clear();
        self.probes.end();
        (self.turn, self.fits_since) = (None, None);
        Change::Off
    }

    fn go_on(&mut self, now_ns: u64) -> Option<Change> {
        let auto = self.config.mode == Mode::Auto;
        let fits = auto && self.sets.fit(self.config.margin_permille);
        self.fits_since = fits.then(|| self.fits_since.unwrap_or(now_ns));
        let long = self.fits_since.is_some_and(|since| now_ns.saturating_sub(since) >= self.config.window_ns);
        let (turn, since) = self.turn.clone()?;
        // Members remain until the working sets certainly fit together, but removed VMs leave.
        let fit_now = auto && self.sets.fit(0);
        let present = || turn.members.iter().copied().filter(|vm| self.sets.by_vm.contains_key(vm)).collect();
        let members: Vec<TenantId> = if fit_now { present() } else { self.members() };
        if self.config.mode == Mode::Off || members.len() < 2 || long {
            return Some(self.end());
        }
        let lead = self.leads.get(&turn.holder);
        let gone = !members.contains(&turn.holder) || lead == Some(&Lead::Waits);
        let over = since.is_some_and(|since| {
            let idle = self.idle.get(&turn.holder).copied().unwrap_or(0);
            // This is a ski-rental problem: if the wait for an idle holder does not exceed the duration of a change of
            // turns, the total cost is at most twice the optimum. Memory allocated during the quantum must also be
            // copied at its end.
            let quantum_ns = turn.quantum_ns.max(self.quantum_ns(&members, turn.holder));
            let had_ns = now_ns.saturating_sub(since);
            let enough =
                self.probes.has_seen_enough(turn.holder) || had_ns >= self.whole_quantum_ns(&members, turn.holder);
            (had_ns >= quantum_ns && enough && lead.is_none()) || (idle > 0 && idle >= self.change_ns(&members))
        });
        // A quantum is useless for a VM without work.
        let may = |vm: TenantId| self.can_work(vm) || gone && !self.leads.contains_key(&vm);
        let next = if self.leads.is_empty() {
            next(&members, turn.holder, may)
        } else {
            self.longest_waiting(&members, turn.holder, &may)
        };
        let went_first = next != self.longest(&members, turn.holder, &may);
        if let Some(holder) = next.filter(|_| gone || over) {
            let same = members == turn.members;
            if auto && self.probes.ends(now_ns, turn.holder, &members, self.config.on_permille) == Verdict::End {
                return Some(self.end());
            }
            if !same || holder < turn.holder {
                self.round_bandwidth = self.bandwidth;
            }
            self.went_first = went_first && !self.leads.is_empty();
            let turn = self.grant(members, holder);
            return Some(if same { Change::Next(turn) } else { Change::On(turn) });
        }
        if members == turn.members {
            return None;
        }
        let turn = Turn { members, ..turn };
        self.turn = Some((turn.clone(), since));
        Some(Change::On(turn))
    }

    /// Returns the member that has waited longest for a quantum. At most every second time, a member to which another
    /// card has given a quantum goes first if it has waited on this card since before the last quantum. Otherwise, its
    /// quantum on the other card could end before its turn.
    fn longest_waiting(
        &self,
        members: &[TenantId],
        holder: TenantId,
        may: &dyn Fn(TenantId) -> bool,
    ) -> Option<TenantId> {
        let has_waited = |vm: TenantId| self.led_since.get(&vm).is_some_and(|since| *since < self.granted);
        let led = self.longest(members, holder, &|vm| !self.went_first && has_waited(vm) && may(vm));
        led.or_else(|| self.longest(members, holder, may))
    }

    /// Returns the member with the oldest last quantum, among those other than `holder` that satisfy `may`.
    fn longest(&self, members: &[TenantId], holder: TenantId, may: &dyn Fn(TenantId) -> bool) -> Option<TenantId> {
        let others = members.iter().copied().filter(|vm| *vm != holder && may(*vm));
        others.min_by_key(|vm| self.last.get(vm).copied().unwrap_or(0))
    }

    /// Returns true if members other than `vm` have work.
    fn is_contested(&self, turn: &Turn, vm: TenantId) -> bool {
        turn.members.iter().any(|&member| member != vm && self.can_work(member))
    }

    /// Returns true if a quantum would be useful for a VM.
    fn can_work(&self, vm: TenantId) -> bool {
        !self.idle.contains_key(&vm) && self.leads.get(&vm) != Some(&Lead::Waits)
    }

    fn grant(&mut self, members: Vec<TenantId>, holder: TenantId) -> Turn {
        let quantum_ns = self.quantum_ns(&members, holder);
        self.granted += 1;
        self.last.retain(|vm, _| members.contains(vm));
        self.last.insert(holder, self.granted);
        let turn = Turn { members, holder, quantum_ns };
        self.turn = Some((turn.clone(), None));
        turn
    }

    /// Returns the VMs with working sets that do not fit together, sorted by number. In forced mode, returns all VMs
    /// with evictable memory.
    fn members(&self) -> Vec<TenantId> {
        self.sets.members(self.config.mode == Mode::Forced)
    }

    /// Returns the length of a member's quantum in ns. A probed quantum takes as long as its copies.
    fn quantum_ns(&self, members: &[TenantId], vm: TenantId) -> u64 {
        if self.probes.tries() { self.bounded(self.change_ns(members)) } else { self.whole_quantum_ns(members, vm) }
    }

    fn whole_quantum_ns(&self, members: &[TenantId], vm: TenantId) -> u64 {
        let mean_ns = self.bounded(self.change_ns(members).saturating_mul(u64::from(self.config.factor)));
        self.sets.quantum_ns(members, vm, mean_ns, (self.config.min_ns, self.max_ns()))
    }

    fn bounded(&self, quantum_ns: u64) -> u64 {
        quantum_ns.clamp(self.config.min_ns, self.max_ns())
    }

    fn max_ns(&self) -> u64 {
        self.config.max_ns.max(self.config.min_ns)
    }

    /// Returns the copy time for a change of turns, in ns.
    fn change_ns(&self, members: &[TenantId]) -> u64 {
        let bytes = self.sets.change_bytes(members);
        let bandwidth = if self.round_bandwidth == 0 { self.bandwidth } else { self.round_bandwidth };
        u64::try_from(bytes * 1_000_000_000 / u128::from(bandwidth.max(1))).unwrap_or(u64::MAX)
    }

    /// Returns true if bus traffic in the window reaches the threshold. Returns false until a copy has been measured.
    fn thrashes(&self) -> bool {
        let bytes: u128 = self.traffic.iter().map(|&(_, bytes)| u128::from(bytes)).sum();
        let most = u128::from(self.bandwidth) * u128::from(self.config.window_ns) / 1_000_000_000;
        self.bandwidth > 0 && bytes > 0 && bytes * 1000 >= most * u128::from(self.config.on_permille)
    }

    fn slot_ns(&self) -> u64 {
        (self.config.window_ns / SLOTS).max(1)
    }

    /// Removes traffic older than the window.
    fn expire(&mut self, now_ns: u64) {
        let oldest = (now_ns / self.slot_ns()).saturating_sub(SLOTS - 1);
        while self.traffic.front().is_some_and(|&(slot, _)| slot < oldest) {
            self.traffic.pop_front();
        }
    }
}

/// Returns the first member after `holder`, in cyclic order, that satisfies `may`. `holder` may already have been
/// removed.
fn next(members: &[TenantId], holder: TenantId, may: impl Fn(TenantId) -> bool) -> Option<TenantId> {
    let others = || members.iter().copied().filter(|&vm| vm != holder && may(vm));
    others().find(|&vm| vm > holder).or_else(|| others().next())
}

#[cfg(test)]
mod tests;
