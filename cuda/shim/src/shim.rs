//! The library's state for its program. It is one object, which the functions of `abi` and the thread of `agent` share.
//! Other modules get the parts that they need as arguments.
//!
//! UNSAFETY: binds contexts of the program to the thread.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::c_int;
use std::sync::OnceLock;
use std::time::Instant;

use crate::captures::Captures;
use crate::contexts::Contexts;
use crate::driver;
use crate::gate::{self, Gate, Wake};
use crate::link::Link;
use crate::memory::{Memory, Operations};
use crate::pacing::Pacing;
use crate::process::Once;
use crate::settings::Settings;

/// The real libraries that are loaded.
#[derive(Debug)]
pub struct Libraries {
    /// Loads the driver once.
    pub driver: Once,
    /// Loads NVML once.
    pub nvml: Once,
    /// Indices of the driver's symbols, sorted by the address of the real function.
    pub by_address: OnceLock<Vec<(usize, usize)>>,
    /// UUIDs of the tenant's cards, from the first owner that answered an NVML query.
    pub cards: OnceLock<Vec<[u8; 16]>>,
}

/// The state of the library.
#[derive(Debug)]
pub struct Shim {
    pub settings: Settings,
    pub libraries: Libraries,
    pub gate: Gate,
    /// Captures that the program has open.
    pub captures: Captures,
    pub contexts: Contexts,
    /// The program's work in flight.
    pub pacing: Pacing,
    memory: Memory,
    pub link: Link,
}

impl Shim {
    /// Returns the state of a program that has not called any function yet.
    pub fn new(settings: Settings) -> Self {
        let (by_address, cards) = (OnceLock::new(), OnceLock::new());
        Self {
            settings,
            libraries: Libraries { driver: Once::new(), nvml: Once::new(), by_address, cards },
            gate: Gate::new(),
            captures: Captures::default(),
            contexts: Contexts::default(),
            pacing: Pacing::new(),
            memory: Memory::new(),
            link: Link::new(),
        }
    }

    /// Returns the program's memory.
    pub fn memory(&self) -> Operations<'_> {
        Operations { memory: &self.memory, captures: &self.captures, contexts: &self.contexts, link: &self.link }
    }

    /// Waits until the gate is open and counts this thread as inside. Returns the stripe for [`Gate::done`].
    pub fn pass(&self) -> usize {
        loop {
            if let Some(stripe) = self.gate.pass() {
                return stripe;
            }
            self.wait_at_gate();
        }
    }

    #[cold]
    fn wait_at_gate(&self) {
        let held = self.gate.hold();
        while held.wait() == Wake::NotifyOwner {
            self.link.notify_waiting();
        }
    }

    /// Waits until no work is in flight. Returns false if the deadline passes first. The gate must be closed.
    pub fn drain(&self, deadline: Option<Instant>) -> bool {
        self.pacing.drain(&self.captures, &self.contexts, deadline)
    }

    /// Runs `work` on a thread of the program while none of its work is in flight, with one of its contexts current.
    pub fn drained(&self, work: impl FnOnce() -> c_int) -> c_int {
        let before = driver::current_context();
        self.gate.close(gate::EXPORT, None);
        let result = if self.captures.any() {
            // Waiting for a capture's work is not allowed.
            driver::CAPTURE_UNSUPPORTED
        } else {
            self.drain(None);
            if before.is_null() {
                self.contexts.bind();
            } else {
                // SAFETY: the context was current before.
                unsafe { driver::ctx_set_current(before) };
            }
            driver::relaxed(work)
        };
        self.gate.open(gate::EXPORT);
        // SAFETY: as above.
        unsafe { driver::ctx_set_current(before) };
        result
    }
}
