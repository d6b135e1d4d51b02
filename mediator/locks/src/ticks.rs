//! Clock for hold times, which is read twice per hold: the time stamp counter if the kernel uses it as its clock
//! source, and the kernel's clock otherwise.

// UNSAFETY: reads the time stamp counter, which all processors of this architecture have. All other code in this module
// is safe.
#![cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "see above"))]

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// File with the name of the kernel's clock source. `tsc` means that the time stamp counter has a constant rate and is
/// synchronized across all CPUs.
#[cfg(target_arch = "x86_64")]
const SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
/// Duration of the counter's calibration against the kernel's clock, once per process. Yields an accuracy of one part
/// in ten thousand.
#[cfg(target_arch = "x86_64")]
const COMPARED: Duration = Duration::from_millis(2);
/// Number of readings at each end of the calibration. The fastest one is used, because the thread may be preempted
/// during a reading.
#[cfg(target_arch = "x86_64")]
const READINGS_PER_END: usize = 8;

/// A point in time. Only differences are meaningful.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticks(Reading);

#[derive(Clone, Copy, Debug)]
enum Reading {
    /// Value of the time stamp counter.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "this architecture has no time stamp counter"))]
    Counter(u64),
    /// Time of the kernel's clock.
    Kernel(Instant),
}

impl Ticks {
    /// Returns the current time.
    pub(crate) fn now() -> Self {
        Self(if scale().is_some() { Reading::Counter(counter()) } else { Reading::Kernel(Instant::now()) })
    }

    /// Returns the elapsed time in ns.
    pub(crate) fn elapsed_ns(self) -> u64 {
        match (self.0, scale()) {
            (Reading::Counter(then), Some(scale)) => scaled(counter().saturating_sub(then), scale),
            (Reading::Counter(_), None) => 0,
            (Reading::Kernel(then), _) => ns(then.elapsed()),
        }
    }
}

/// Calibrates the counter early. Otherwise, the first reading would calibrate it while a lock is held.
pub(crate) fn prepare() {
    let _ = scale();
}

/// Converts ticks to ns.
fn scaled(ticks: u64, scale: u64) -> u64 {
    u64::try_from((u128::from(ticks) * u128::from(scale)) >> 32).unwrap_or(u64::MAX)
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the length of a counter tick in ns, multiplied by 2^32, or `None` if the counter is not used.
fn scale() -> Option<u64> {
    static SCALE: OnceLock<Option<u64>> = OnceLock::new();
    *SCALE.get_or_init(measured)
}

#[cfg(target_arch = "x86_64")]
fn counter() -> u64 {
    // SAFETY: the instruction has no preconditions, and does not access memory.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn counter() -> u64 {
    0
}

#[cfg(not(target_arch = "x86_64"))]
fn measured() -> Option<u64> {
    None
}

/// Calibrates the counter against the kernel's clock, if the kernel uses the counter.
#[cfg(target_arch = "x86_64")]
fn measured() -> Option<u64> {
    if std::fs::read_to_string(SOURCE).ok()?.trim() != "tsc" {
        return None;
    }
    let look = || {
        let looks = (0..READINGS_PER_END).map(|_| {
            let before = counter();
            let at = Instant::now();
            (counter().saturating_sub(before), at, before)
        });
        looks.min_by_key(|(took, ..)| *took).map(|(_, at, ticks)| (at, ticks))
    };
    let (began, first) = look()?;
    while began.elapsed() < COMPARED {
        std::hint::spin_loop();
    }
    let (ended, last) = look()?;
    let ticks = last.checked_sub(first).filter(|ticks| *ticks > 0)?;
    u64::try_from((u128::from(ns(ended.duration_since(began))) << 32) / u128::from(ticks)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_passes_as_the_kernel_has_it() {
        // Calibrate first, so that the calibration is not measured.
        let _ = Ticks::now();
        let (outside, then) = (Instant::now(), Ticks::now());
        let inside = Instant::now();
        std::thread::sleep(Duration::from_millis(20));
        let least = ns(inside.elapsed());
        let told = then.elapsed_ns();
        let most = ns(outside.elapsed());
        // Permit a deviation of one part in a thousand, which is ten times the calibration error.
        assert!(told >= least - least / 1000 && told <= most + most / 1000, "{told} ns of {least} to {most}");
    }

    #[test]
    fn ticks_of_any_number_are_scaled_without_overflow() {
        assert_eq!(scaled(3_000_000_000, (1 << 32) / 3), 999_999_999);
        assert_eq!(scaled(u64::MAX, 1 << 32), u64::MAX);
        assert_eq!(scaled(u64::MAX, u64::MAX), u64::MAX);
        assert_eq!(scaled(0, u64::MAX), 0);
    }
}
