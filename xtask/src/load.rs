//! Simulates a busy host: loops that take CPU time from tests or measurements.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

/// Maximum number of loops. More loops would only compete with each other.
pub const MAX_LOOPS: u32 = 64;

/// Busy loops, which end on drop or with the process.
pub struct BusyLoops {
    ends: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl BusyLoops {
    /// Starts `count` loops, but at most [`MAX_LOOPS`], each on its own thread.
    pub fn start(count: u32) -> Self {
        let ends = Arc::<AtomicBool>::default();
        if count > 0 {
            println!("next to {count} busy loops");
        }
        let spin = |ends: &AtomicBool| {
            while !ends.load(Ordering::Relaxed) {
                (0..10_000).for_each(|_| spin_loop());
            }
        };
        let start = |_| {
            let ends = Arc::clone(&ends);
            thread::spawn(move || spin(&ends))
        };
        Self { threads: (0..count.min(MAX_LOOPS)).map(start).collect(), ends }
    }
}

impl Drop for BusyLoops {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A panicked loop has also ended.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_end_when_they_are_dropped() {
        let loops = BusyLoops::start(2);
        let ends = Arc::clone(&loops.ends);
        drop(loops);
        assert!(ends.load(Ordering::Relaxed));
        assert_eq!(Arc::strong_count(&ends), 1, "a loop goes on");
    }
}
