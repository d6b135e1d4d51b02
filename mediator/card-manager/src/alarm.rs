//! Alarm that wakes a card's interrupt thread for the scheduler.

use super::ManagerError;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::io;
use std::os::fd::OwnedFd;
use vmm_sys_util::eventfd::EventFd;

const NS_PER_S: u64 = 1_000_000_000;

/// A timer that wakes a thread, and can also wake it immediately.
pub trait Alarm {
    /// Arms the timer to expire in `in_ns` ns, replacing an earlier expiry time.
    ///
    /// # Errors
    /// Returns an error if the timer cannot be set.
    fn set(&mut self, in_ns: u64) -> io::Result<()>;

    /// Clears the expiry of the timer until it is armed again. Has no effect if the timer was armed again after the
    /// thread woke.
    ///
    /// # Errors
    /// Returns an error if the timer cannot be read.
    fn silence(&mut self) -> io::Result<()>;

    /// Wakes the thread, which delivers the events in the outbox.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be woken.
    fn wake(&mut self) -> io::Result<()>;
}

/// A timer and an event, as file descriptors.
#[derive(Debug)]
pub struct TimerAlarm {
    timer: OwnedFd,
    event: EventFd,
}

impl TimerAlarm {
    /// Creates a timer for a thread that also waits for `event`.
    ///
    /// # Errors
    /// Returns an error if the host cannot create a timer.
    pub(crate) fn new(event: EventFd) -> Result<Self, ManagerError> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)
            .map_err(|error| ManagerError::host("cannot create a timer for the scheduler", error))?;
        Ok(Self { timer, event })
    }

    /// Returns another file descriptor for the timer. It becomes readable when the timer expires.
    ///
    /// # Errors
    /// Returns an error if no more file descriptors are available.
    pub(crate) fn timer_fd(&self) -> io::Result<OwnedFd> {
        self.timer.try_clone()
    }
}

impl Alarm for TimerAlarm {
    fn set(&mut self, in_ns: u64) -> io::Result<()> {
        // A value of zero would disarm the timer.
        let in_ns = in_ns.max(1);
        let it_value = Timespec {
            tv_sec: i64::try_from(in_ns / NS_PER_S).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(in_ns % NS_PER_S).unwrap_or(0),
        };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once)?;
        Ok(())
    }

    fn silence(&mut self) -> io::Result<()> {
        match rustix::io::read(&self.timer, &mut [0; 8]) {
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn wake(&mut self) -> io::Result<()> {
        self.event.write(1)
    }
}
