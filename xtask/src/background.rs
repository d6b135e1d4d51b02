//! Work beside other work, which is waited for when it is needed.

use std::thread::{self, JoinHandle};

use anyhow::{Result, anyhow};

/// Priority of work that goes on beside other work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// As much as anybody else. What takes long and is waited for by all that comes later leaves processors idle in the end if it
    /// yields in the beginning.
    Equal,
    /// Only what others leave.
    Behind,
}

/// Niceness of what runs behind.
const NICE: i32 = 19;

/// Work that goes on, or what has become of it.
pub enum Background {
    /// Somebody works on it.
    Pending(JoinHandle<Result<()>>),
    /// It is done, or this is why not.
    Ended(Result<(), String>),
}

impl Background {
    /// Starts `work` on a thread of its own. The thread and its children have that priority.
    pub fn start(priority: Priority, work: impl FnOnce() -> Result<()> + Send + 'static) -> Self {
        Self::Pending(thread::spawn(move || {
            if priority == Priority::Behind {
                // Linux has a priority for each thread, and children inherit it. Without it, only time is lost.
                let _ = rustix::process::nice(NICE);
            }
            work()
        }))
    }

    /// Waits for the end. Fails with the reason if the work has failed, each time that it is asked.
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
    fn a_failure_is_told_each_time() {
        let mut work = Background::start(Priority::Equal, || Err(anyhow!("the cause").context("the work")));
        for _ in 0..2 {
            assert_eq!(work.wait().unwrap_err().to_string(), "the work: the cause");
        }
    }

    #[test]
    fn what_has_ended_well_or_by_a_panic_is_told_apart() {
        assert!(Background::start(Priority::Equal, || Ok(())).wait().is_ok());
        assert!(Background::start(Priority::Equal, || panic!("on purpose")).wait().is_err());
    }
}
