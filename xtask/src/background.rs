//! Runs work in the background, and waits for it when its result is needed.

use std::thread::{self, JoinHandle};

use anyhow::{Result, anyhow};

/// Priority of background work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// The same priority as all other work. This is for long work on which all later work depends: if it yielded, CPUs
    /// would be idle at the end.
    Equal,
    /// Uses only idle CPUs.
    Behind,
}

/// Nice value of work with [`Priority::Behind`].
const NICE: i32 = 19;

/// Background work, or its result.
pub enum Background {
    /// The work is running.
    Pending(JoinHandle<Result<()>>),
    /// The work has ended. Contains the reason if it failed.
    Ended(Result<(), String>),
}

impl Background {
    /// Starts `work` on a new thread. The priority applies to the thread and its children.
    pub fn start(priority: Priority, work: impl FnOnce() -> Result<()> + Send + 'static) -> Self {
        Self::Pending(thread::spawn(move || {
            if priority == Priority::Behind {
                // On Linux, priorities are per thread, and children inherit them. If setting the priority fails, the
                // work still completes.
                let _ = rustix::process::nice(NICE);
            }
            work()
        }))
    }

    /// Waits for the work to end. If it failed, every call returns the reason.
    pub fn wait(&mut self) -> Result<()> {
        if let Self::Pending(_) = self
            && let Self::Pending(thread) = std::mem::replace(self, Self::Ended(Ok(())))
        {
            let ended = thread.join().unwrap_or_else(|_| Err(anyhow!("its thread has panicked")));
            *self = Self::Ended(ended.map_err(|error| format!("{error:#}")));
        }
        match self {
            Self::Ended(Err(reason)) => Err(anyhow!("{reason}")),
            Self::Ended(Ok(())) | Self::Pending(_) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_is_reported_on_each_wait() {
        let mut work = Background::start(Priority::Equal, || Err(anyhow!("the cause").context("the work")));
        for _ in 0..2 {
            assert_eq!(work.wait().unwrap_err().to_string(), "the work: the cause");
        }
    }

    #[test]
    fn success_and_panic_are_distinguished() {
        assert!(Background::start(Priority::Equal, || Ok(())).wait().is_ok());
        assert!(Background::start(Priority::Equal, || panic!("on purpose")).wait().is_err());
    }
}
