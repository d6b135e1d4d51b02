//! Gang home: decides when the gang's cards are gathered, and when its turns start and end.

use super::{CardId, CardState, Command, GangConfig};
use sched::Nanos;
use std::collections::{BTreeMap, BTreeSet};

/// Last report of a card.
#[derive(Clone, Copy, Debug)]
struct Report {
    round: u64,
    state: CardState,
    wants: bool,
    /// Number of the last numbered command sent to the card, or `None` if no command was sent since the connection was
    /// established.
    sent: Option<u64>,
}

impl Report {
    const ABSENT: Self = Self { round: 0, state: CardState::Absent, wants: false, sent: None };

    /// Returns true if the card had received its last numbered command when it sent the report.
    fn is_current(&self) -> bool {
        self.sent.is_none_or(|sent| self.round == sent)
    }

    fn is(&self, states: &[CardState]) -> bool {
        states.contains(&self.state)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No gather or turn is in progress.
    Idle,
    /// The cards are being gathered.
    Gathering { since: Nanos },
    /// The gates are open.
    Running,
    /// The cards were instructed to stop. `quiet` is the time of the last report or step.
    Stopping { since: Nanos, quiet: Nanos, step_ns: u64, is_released: bool },
}

/// State of a gang at its home.
#[derive(Debug)]
pub(super) struct Home {
    cards: BTreeMap<CardId, Report>,
    /// Number of the last numbered command.
    round: u64,
    phase: Phase,
    /// Timestamp of the request for the current or next turn, or `None` if the gang has no work.
    age: Option<u64>,
    /// Cards that were instructed to compete for a turn.
    competing: BTreeSet<CardId>,
}

impl Home {
    pub(super) fn new(cards: &BTreeSet<CardId>) -> Self {
        let cards = cards.iter().map(|&card| (card, Report::ABSENT)).collect();
        Self { cards, round: 0, phase: Phase::Idle, age: None, competing: BTreeSet::new() }
    }

    pub(super) fn has(&self, card: CardId) -> bool {
        self.cards.contains_key(&card)
    }

    pub(super) fn cards(&self) -> impl Iterator<Item = CardId> + '_ {
        self.cards.keys().copied()
    }

    /// Processes a card's report.
    pub(super) fn reported(&mut self, card: CardId, report: (u64, CardState, bool), now: Nanos) {
        let (round, state, wants) = report;
        if let Some(report) = self.cards.get_mut(&card) {
            if report.state == CardState::Absent || state == CardState::Absent {
                self.competing.remove(&card);
                report.sent = None;
            }
            *report = Report { round, state, wants, ..*report };
        }
        if let Phase::Stopping { quiet, .. } = &mut self.phase {
            *quiet = now;
        }
    }

    /// Records that a card is unreachable.
    pub(super) fn lose(&mut self, card: CardId, now: Nanos) {
        self.reported(card, (0, CardState::Absent, false), now);
    }

    /// Returns the time at which [`Self::commands`] must be called again if no report arrives earlier.
    pub(super) fn deadline(&self, config: &GangConfig) -> Option<Nanos> {
        match self.phase {
            Phase::Gathering { since } => Some(since.after(config.gather_ns)),
            Phase::Stopping { since, quiet, step_ns, is_released } => {
                let limit = since.after(config.gather_ns);
                // Without a new report, a step or release is due only if a card has drained.
                let has_drained = !is_released && self.drained().next().is_some();
                let step = has_drained.then(|| quiet.after(step_ns).min(limit));
                step.or_else(|| (!self.competing.is_empty()).then_some(limit))
            }
            Phase::Idle | Phase::Running => None,
        }
    }

    /// Returns the commands to send, based on the reports and the time. `clock` is the timestamp of a new request.
    pub(super) fn commands(&mut self, config: &GangConfig, clock: u64, now: Nanos) -> Vec<(CardId, u64, Command)> {
        let mut commands = Vec::new();
        // The loop terminates: after each command, the next transition requires a report or a later time.
        while let Some(command) = self.step(config, clock, now) {
            self.send(command, &mut commands);
        }
        let active = self.age.is_some() && !self.is_held_up(config, now);
        let told: Vec<CardId> = self.present().filter(|card| self.competing.contains(card) != active).collect();
        for card in told {
            let command = if active { Command::Compete } else { Command::Rest };
            if active {
                self.competing.insert(card);
            } else {
                self.competing.remove(&card);
            }
            commands.push((card, self.round, command));
        }
        commands
    }

    /// Queues a command for its destination cards. Reports sent before a numbered command become obsolete.
    fn send(&mut self, command: Command, commands: &mut Vec<(CardId, u64, Command)>) {
        let numbered = matches!(command, Command::Gather { .. } | Command::Step | Command::Release);
        let only_drained = matches!(command, Command::Step | Command::Release);
        self.round += u64::from(numbered);
        for (&card, report) in &mut self.cards {
            let drained = report.is_current() && report.state == CardState::Drained;
            if report.state == CardState::Absent || only_drained && !drained {
                continue;
            }
            if numbered {
                report.sent = Some(self.round);
            }
            commands.push((card, report.sent.unwrap_or(0), command));
        }
    }

    /// Returns true if the gang should not compete on its other cards, because one card has not stopped within the
    /// gather limit. The process that owns that card may be suspended.
    fn is_held_up(&self, config: &GangConfig, now: Nanos) -> bool {
        matches!(self.phase, Phase::Stopping { since, .. } if now >= since.after(config.gather_ns))
    }

    fn present(&self) -> impl Iterator<Item = CardId> + '_ {
        self.cards.iter().filter(|(_, report)| report.state != CardState::Absent).map(|(&card, _)| card)
    }

    fn drained(&self) -> impl Iterator<Item = &Report> + '_ {
        self.cards.values().filter(|card| card.is_current() && card.state == CardState::Drained)
    }

    /// Returns true if all cards have reported one of `states` after their last numbered command.
    fn all(&self, states: &[CardState]) -> bool {
        self.cards.values().all(|card| card.is_current() && card.is(states))
    }

    /// Returns the next command, if one is due.
    fn step(&mut self, config: &GangConfig, clock: u64, now: Nanos) -> Option<Command> {
        use CardState::{Absent, Contested, Drained, Gathering, Offered, Ready, Resting, Running, Stuck, Waiting};
        let has_work = self.cards.values().any(|card| card.wants);
        let stopping = Phase::Stopping { since: now, quiet: now, step_ns: config.step_ns, is_released: false };
        match self.phase {
            Phase::Idle => {
                self.age = if has_work { self.age.or(Some(clock)) } else { None };
                let age = self.age.filter(|_| self.all(&[Offered, Stuck]))?;
                self.phase = Phase::Gathering { since: now };
                Some(Command::Gather { age })
            }
            Phase::Gathering { since } => {
                let is_late = now >= since.after(config.gather_ns);
                if self.all(&[Ready]) && !is_late {
                    self.phase = Phase::Running;
                    return Some(Command::Run);
                }
                let continues = |card: &Report| {
                    // A report of `Offered`, `Stuck` or `Waiting` may predate the gather command.
                    card.is(&[Gathering, Ready]) || card.is(&[Offered, Stuck, Waiting]) && !card.is_current()
                };
                if self.cards.values().all(continues) && !is_late {
                    return None;
                }
                self.phase = stopping;
                Some(Command::Stop)
            }
            Phase::Running => {
                // A `Contested` report may predate the command that opens the gates.
                let continues = |card: &Report| card.is(&[Ready, Contested, Running, Resting]);
                let has_ended = self.all(&[Resting]) && !has_work;
                if self.cards.values().all(continues) && !has_ended {
                    return None;
                }
                // The next turn requires a new request.
                self.age = has_work.then_some(clock);
                self.phase = stopping;
                Some(Command::Stop)
            }
            Phase::Stopping { since, quiet, step_ns, is_released } => {
                if self.all(&[Absent, Waiting, Offered, Stuck]) {
                    self.phase = Phase::Idle;
                    return self.step(config, clock, now);
                }
                self.drained().next()?;
                let is_over = is_released || now >= since.after(config.gather_ns);
                if is_over || self.all(&[Absent, Waiting, Offered, Stuck, Drained]) {
                    self.phase = Phase::Stopping { since, quiet, step_ns, is_released: true };
                    return Some(Command::Release);
                }
                if now < quiet.after(step_ns) {
                    return None;
                }
                // Double the interval between steps. Otherwise, cards with long kernels could keep draining at
                // different times.
                self.phase = Phase::Stopping { since, quiet: now, step_ns: step_ns.saturating_mul(2), is_released };
                Some(Command::Step)
            }
        }
    }
}
