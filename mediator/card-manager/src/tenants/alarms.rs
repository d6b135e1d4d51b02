//! Alarms that guests have armed on their PTIMERs. A single timer per card is set to the earliest one.

use crate::alarm::{Alarm, TimerAlarm};
use std::collections::BTreeMap;
use vram::TenantId;

/// Minimum time from arming an alarm to its expiry, in ns. It limits how often a guest can wake the card's interrupt
/// thread.
const SOONEST_NS: u64 = 100_000;

/// Each VM's alarm, and the timer that expires at the earliest one.
#[derive(Debug)]
pub(crate) struct GuestAlarms<A = TimerAlarm> {
    timer: A,
    /// Expiry time of each VM's alarm, in ns since the card was taken over.
    at: BTreeMap<TenantId, u64>,
}

impl<A: Alarm> GuestAlarms<A> {
    pub(crate) fn new(timer: A) -> Self {
        Self { timer, at: BTreeMap::new() }
    }

    /// Arms a VM's alarm to expire `in_ns` ns after `now`, replacing the previous one. `None` disarms it.
    pub(crate) fn arm(&mut self, vm: TenantId, now: u64, in_ns: Option<u64>) {
        match in_ns {
            Some(in_ns) => drop(self.at.insert(vm, now.saturating_add(in_ns.max(SOONEST_NS)))),
            None => drop(self.at.remove(&vm)),
        }
        self.set(now);
    }

    /// Removes the due alarms and returns their VMs. Must be called when the timer has expired.
    pub(crate) fn due(&mut self, now: u64) -> Vec<TenantId> {
        if let Err(error) = self.timer.silence() {
            tracing::error!(%error, "cannot read the timer for guest alarms");
        }
        let due: Vec<TenantId> = self.at.iter().filter(|(_, at)| **at <= now).map(|(vm, _)| *vm).collect();
        self.at.retain(|_, at| *at > now);
        self.set(now);
        due
    }

    fn set(&mut self, now: u64) {
        let Some(first) = self.at.values().min() else { return };
        if let Err(error) = self.timer.set(first.saturating_sub(now)) {
            tracing::error!(%error, "cannot set the timer for guest alarms; they will not expire");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[derive(Debug, Default)]
    struct Timer(Option<u64>);

    impl Alarm for Timer {
        fn set(&mut self, in_ns: u64) -> io::Result<()> {
            self.0 = Some(in_ns);
            Ok(())
        }

        fn silence(&mut self) -> io::Result<()> {
            self.0 = None;
            Ok(())
        }

        fn wake(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_timer_is_set_to_the_first_alarm_and_each_rings_once() {
        let mut alarms = GuestAlarms::new(Timer::default());
        alarms.arm(TenantId(1), 0, Some(3_000_000));
        alarms.arm(TenantId(2), 0, Some(1_000_000));
        assert_eq!(alarms.timer.0, Some(1_000_000));
        assert_eq!(alarms.due(1_000_000), [TenantId(2)]);
        assert_eq!(alarms.timer.0, Some(2_000_000));
        alarms.arm(TenantId(1), 1_500_000, None);
        assert_eq!(alarms.due(3_000_000), []);
        assert_eq!(alarms.timer.0, None);
    }

    #[test]
    fn repeatedly_armed_alarm_wakes_no_thread_earlier() {
        let mut alarms = GuestAlarms::new(Timer::default());
        for now in 0..1000 {
            alarms.arm(TenantId(1), now, Some(0));
            assert_eq!(alarms.timer.0, Some(SOONEST_NS));
        }
    }
}
