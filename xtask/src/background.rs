//! Runs work in the background, and waits for it when the result is needed.

use std::thread::{self, JoinHandle};

use anyhow::{Result, anyhow};

/// Priority of background work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Same priority as all other work. Long work on which all later work depends must not yield at first: in the end
    /// processors would be idle.
    Equal,
    /// Only idle processors.
    Behind,
}

/// Niceness of work with [`Priority::Behind`].
const NICE: i32 = 19;

/// Background work, or its result.
pub enum Background {
    /// It is running.
    Pending(JoinHandle<Result<()>>),
    /// It has ended, with the reason of a failure.
    Ended(Result<(), String>),
}

impl Background {
    /// Starts `work` on a new thread. The thread and its children have that priority.
    pub fn start(priority: Priority, work: impl FnOnce() -> Result<()> + Send + 'static) -> Self {
        Self::Pending(thread::spawn(move || {
            if priority == Priority::Behind {
                // Linux has a priority for each thread, and children inherit it. A failure only costs time.
                let _ = rustix::process::nice(NICE);
            }
            work()
        }))
    }

    /// Waits for the end. Returns the reason if the work has failed, in each call.
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
