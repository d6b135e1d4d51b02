//! The card's clock, and the durations of its work.
//!
//! The card has two time scales. The *card time* runs from the card's creation and orders all work. The *timer time*,
//! which PTIMER and semaphore timestamps show, is the card time plus an offset that the driver sets.

use crate::faults::EngineId;
use nvspec::chip::GF100;
use serde::{Deserialize, Serialize};
use simgpu_engines::compute::TRANSACTION_BYTES;
use simgpu_engines::engines::Work;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Card time in nanoseconds.
pub(crate) type CardNs = u64;

/// Resolution of PTIMER in nanoseconds.
pub(crate) const TIMER_STEP_NS: u64 = 32;

/// Timing of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineTiming {
    /// Bandwidth in bytes per second, or 0 for no limit.
    pub bytes_per_second: u64,
    /// Fixed cost of each launch in nanoseconds, in addition to the transfer.
    pub launch_ns: u64,
}

impl EngineTiming {
    /// Returns the duration of this amount of work in nanoseconds.
    #[must_use]
    pub fn cost_ns(&self, bytes: u64, launches: u32) -> u64 {
        let moving = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second.max(1));
        let moving = if self.bytes_per_second == 0 { 0 } else { u64::try_from(moving).unwrap_or(u64::MAX) };
        self.launch_ns.saturating_mul(u64::from(launches)).saturating_add(moving)
    }
}

/// Timing of kernels. Memory accesses and arithmetic overlap, so the slower of the two determines the duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComputeTiming {
    /// Warp instructions per second across all multiprocessors, or 0 for no limit.
    pub warp_instructions_per_second: u64,
    /// Shader memory bandwidth in bytes per second, or 0 for no limit.
    pub bytes_per_second: u64,
}

impl Default for ComputeTiming {
    /// Returns the timing of a Quadro 6000, derived from its shader clock and memory bandwidth.
    fn default() -> Self {
        Self::at(1150, 144_000_000_000)
    }
}

impl ComputeTiming {
    /// Returns the timing of the card's multiprocessors at `mhz` with one instruction per clock cycle.
    #[must_use]
    pub const fn at(mhz: u64, bytes_per_second: u64) -> Self {
        let multiprocessors = (GF100.gpcs * GF100.tpcs_per_gpc) as u64;
        Self { warp_instructions_per_second: mhz.saturating_mul(1_000_000 * multiprocessors), bytes_per_second }
    }

    /// Returns the duration of these warp instructions and memory transfers in nanoseconds.
    #[must_use]
    pub fn cost_ns(&self, instructions: u64, bytes: u64) -> u64 {
        let rate = |per_second| EngineTiming { bytes_per_second: per_second, launch_ns: 0 };
        rate(self.warp_instructions_per_second)
            .cost_ns(instructions, 0)
            .max(rate(self.bytes_per_second).cost_ns(bytes, 0))
    }
}

/// Model of the duration of the card's work. Until the card time at which work completes, the card reports it as in
/// progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeModel {
    /// Timing of PGRAPH, including M2MF.
    pub graph: EngineTiming,
    /// Additional time for kernels on PGRAPH's multiprocessors.
    pub compute: ComputeTiming,
    /// Timing of each copy engine.
    pub copy: EngineTiming,
    /// Duration of a channel switch in nanoseconds.
    pub switch_ns: u64,
    /// An engine's bandwidth to and from system memory in bytes per second, both directions combined, or 0 for no
    /// limit. Each engine has the full bandwidth: engines do not slow each other down.
    pub bus_bytes_per_second: u64,
}

impl TimeModel {
    /// Returns the duration of `work` on an engine in ns. Bus transfers overlap with the rest, so the slower of the two
    /// determines the duration.
    #[must_use]
    pub fn cost_ns(&self, engine: EngineId, work: &Work) -> u64 {
        let timing = match engine {
            EngineId::Graph => self.graph,
            EngineId::Copy0 | EngineId::Copy1 => self.copy,
        };
        let kernels = self.compute.cost_ns(work.instructions, work.transactions.saturating_mul(TRANSACTION_BYTES));
        let own = timing.cost_ns(work.bytes, 0).saturating_add(kernels);
        let bus = EngineTiming { bytes_per_second: self.bus_bytes_per_second, launch_ns: 0 }.cost_ns(work.bus_bytes, 0);
        timing.cost_ns(0, work.launches).saturating_add(own.max(bus))
    }
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct SavedClock {
    /// Card time of the save.
    now: CardNs,
    /// Host time at card time `now`, in ns.
    pub(crate) host: u64,
    timer_offset: u64,
    alarm: Option<CardNs>,
}

/// Returns the host's monotonic time in ns, which all processes share.
fn host_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

/// Source of card time. Callers also use this clock to timestamp requests that arrive while the card's thread sleeps.
#[derive(Debug)]
pub(crate) enum CardTime {
    /// The clock follows the host's clock. The value is the host time at card time 0.
    System(AtomicU64),
    /// The clock advances only on request.
    #[cfg(test)]
    Manual(AtomicU64),
}

impl CardTime {
    pub(crate) fn now(&self) -> CardNs {
        match self {
            // The subtraction may wrap, because a card saved on another host can be older than this host's clock.
            Self::System(origin) => host_ns().wrapping_sub(origin.load(Ordering::Relaxed)),
            #[cfg(test)]
            Self::Manual(now) => now.load(Ordering::Relaxed),
        }
    }

    fn set(&self, now: CardNs) {
        match self {
            Self::System(origin) => origin.store(host_ns().wrapping_sub(now), Ordering::Relaxed),
            #[cfg(test)]
            Self::Manual(then) => then.store(now, Ordering::Relaxed),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Clock {
    time: Arc<CardTime>,
    timer_offset: u64,
    /// Card time at which the alarm fires.
    alarm: Option<CardNs>,
}

impl Clock {
    /// Creates a clock that follows the host's clock.
    pub(crate) fn system() -> Self {
        Self { time: Arc::new(CardTime::System(AtomicU64::new(host_ns()))), timer_offset: 0, alarm: None }
    }

    /// Creates a clock that advances only on request.
    #[cfg(test)]
    pub(crate) fn manual() -> Self {
        Self { time: Arc::new(CardTime::Manual(AtomicU64::new(0))), timer_offset: 0, alarm: None }
    }

    /// Advances a manual clock.
    #[cfg(test)]
    pub(crate) fn advance(&mut self, ns: u64) {
        if let CardTime::Manual(now) = &*self.time {
            now.fetch_add(ns, Ordering::Relaxed);
        }
    }

    pub(crate) fn now(&self) -> CardNs {
        self.time.now()
    }

    pub(crate) fn time(&self) -> Arc<CardTime> {
        Arc::clone(&self.time)
    }

    /// Returns PTIMER's value at card time `at`.
    pub(crate) fn timer_at(&self, at: CardNs) -> u64 {
        at.wrapping_add(self.timer_offset) & !(TIMER_STEP_NS - 1)
    }

    pub(crate) fn timer(&self) -> u64 {
        self.timer_at(self.now())
    }

    pub(crate) fn set_timer(&mut self, time: u64) {
        self.timer_offset = time.wrapping_sub(self.now());
    }

    /// Sets the alarm to fire when PTIMER's low dword next reaches `low`.
    pub(crate) fn set_alarm(&mut self, low: u32) {
        let now = self.now();
        let ahead = low.wrapping_sub(self.timer_at(now) as u32);
        self.alarm = Some(now.saturating_add(u64::from(ahead)));
    }

    /// Returns the card time at which the alarm fires, if it is set.
    pub(crate) fn alarm(&self) -> Option<CardNs> {
        self.alarm
    }

    /// Returns true if the alarm is due, and disables it.
    pub(crate) fn take_alarm(&mut self) -> bool {
        let due = self.alarm.is_some_and(|at| self.now() >= at);
        if due {
            self.alarm = None;
        }
        due
    }

    pub(crate) fn save(&self) -> SavedClock {
        let Self { time: _, timer_offset, alarm } = self;
        SavedClock { now: self.now(), host: host_ns(), timer_offset: *timer_offset, alarm: *alarm }
    }

    /// Resumes from the saved time plus the host time that has passed since the save.
    pub(crate) fn restore(&mut self, saved: &SavedClock) {
        let SavedClock { now, host, timer_offset, alarm } = *saved;
        // The host's clock restarts at zero after a reboot.
        let passed = host_ns().saturating_sub(host);
        match &*self.time {
            CardTime::System(_) => self.time.set(now.saturating_add(passed)),
            #[cfg(test)]
            CardTime::Manual(_) => self.time.set(now),
        }
        (self.timer_offset, self.alarm) = (timer_offset, alarm);
    }

    /// Sets PTIMER to zero and disables the alarm.
    pub(crate) fn reset(&mut self) {
        self.alarm = None;
        self.set_timer(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timer_continues_from_set_value_in_steps_of_32() {
        let mut clock = Clock::manual();
        clock.advance(1000);
        clock.set_timer(0x5_0000_0000);
        clock.advance(77);
        assert_eq!(clock.timer(), 0x5_0000_0040);
    }

    #[test]
    fn alarm_fires_once_when_the_low_word_matches() {
        let mut clock = Clock::manual();
        clock.set_timer(0xffff_ff00);
        clock.set_alarm(0x100);
        clock.advance(0x1ff);
        assert!(!clock.take_alarm());
        clock.advance(1);
        assert!(clock.take_alarm());
        assert!(!clock.take_alarm());
    }

    #[test]
    fn cost_is_launches_plus_bytes_over_bandwidth() {
        let timing = EngineTiming { bytes_per_second: 1_000_000_000, launch_ns: 500 };
        assert_eq!(timing.cost_ns(4096, 2), 5096);
        assert_eq!(EngineTiming { bytes_per_second: 0, launch_ns: 0 }.cost_ns(u64::MAX, 1), 0);
    }
}
