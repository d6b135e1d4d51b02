//! The library's state for its program. The functions of `abi` and the threads of `agent` share one object. Other
//! modules receive the parts that they need as arguments.
//!
//! A program has one [`Card`] for each socket in its environment. A call belongs to the card of its stream, address or
//! handle, or else to the card of the thread's current context. With a single card, calls skip this search.
//!
//! UNSAFETY: makes the program's contexts current, and queries streams' contexts.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, RwLock};
use std::time::Instant;

use crate::captures::Captures;
use crate::contexts::Contexts;
use crate::cross::CrossAccess;
use crate::driver::{self, Address, SUCCESS};
use crate::gate::{self, Gate, Wake};
use crate::link::Link;
use crate::memory::{Memory, Operations};
use crate::pacing::Pacing;
use crate::peers::Peers;
use crate::process::{Lock, Once};
use crate::settings::Settings;
use crate::streams::Stream;
use crate::{events, memory};

/// The loaded real libraries.
#[derive(Debug)]
pub struct Libraries {
    /// Loads the driver once.
    pub driver: Once,
    /// Loads NVML once.
    pub nvml: Once,
    /// Indices of the driver's symbols, sorted by the address of the real function.
    pub by_address: OnceLock<Vec<(usize, usize)>>,
    /// UUIDs of the tenant's cards, each with the index of its owner's socket. Set once all owners have replied to an
    /// NVML query.
    pub cards: OnceLock<Vec<(usize, [u8; 16])>>,
}

/// The program's state for one owner, and thus for one card.
#[derive(Debug)]
pub struct Card {
    /// Index of the owner's socket in the program's list.
    pub number: usize,
    pub gate: Gate,
    pub contexts: Contexts,
    /// Limits on the program's work in flight on the card.
    pub pacing: Pacing,
    memory: Memory,
    pub link: Link,
}

/// Progress of the program's first `cuInit` call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// `cuInit` has not connected to the owners yet.
    #[default]
    Not,
    /// An owner rejected the process. The process cannot become a tenant's program later.
    Refused,
    /// The owners are connected, and the driver is initialized.
    Connected,
}

/// The state of the library.
#[derive(Debug)]
pub struct Shim {
    pub settings: Settings,
    pub libraries: Libraries,
    /// The program's open captures, on any card.
    pub captures: Captures,
    first: Card,
    more: Vec<Card>,
    pub start: Lock<Start>,
    /// Set once the agent threads have started.
    pub started: AtomicBool,
    /// Controls access between the program's cards.
    pub cross: CrossAccess,
    pub peers: Peers,
    /// Card number and context of each stream, for a program with several cards.
    streams: RwLock<HashMap<u64, (usize, u64)>>,
    /// Held by a thread that quiesces a card to copy memory.
    exports: Mutex<()>,
}

impl Card {
    fn new(number: usize) -> Self {
        Self {
            number,
            gate: Gate::new(),
            contexts: Contexts::default(),
            pacing: Pacing::new(number),
            memory: Memory::new(number),
            link: Link::new(),
        }
    }

    /// Waits until the gate is open, and enters it. Returns the stripe for [`Gate::done`].
    #[inline]
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

    /// Records that the program has memory of this card outside the card's region.
    pub fn memory_is_elsewhere(&self) {
        self.memory.set_elsewhere();
    }

    /// Returns true if an address belongs to the program's memory on this card.
    fn has(&self, address: Address) -> bool {
        self.memory.has(address)
    }
}

impl Shim {
    /// Creates the state of a program that has not called any function yet.
    pub fn new(settings: Settings) -> Self {
        let (by_address, cards) = (OnceLock::new(), OnceLock::new());
        // `cuInit` rejects a list with more sockets.
        let count = settings.sockets.len().min(gate::MAX_CARDS);
        Self {
            settings,
            libraries: Libraries { driver: Once::new(), nvml: Once::new(), by_address, cards },
            captures: Captures::default(),
            first: Card::new(0),
            more: (1..count).map(Card::new).collect(),
            start: Lock::new(Start::Not),
            started: AtomicBool::new(false),
            cross: CrossAccess::default(),
            peers: Peers::default(),
            streams: RwLock::default(),
            exports: Mutex::default(),
        }
    }

    /// Returns true if the program has one card.
    #[inline]
    pub fn is_single(&self) -> bool {
        self.more.is_empty()
    }

    /// Returns the program's first or only card.
    #[inline]
    pub fn first(&self) -> &Card {
        &self.first
    }

    /// Returns all cards.
    pub fn cards(&self) -> impl Iterator<Item = &Card> {
        std::iter::once(&self.first).chain(&self.more)
    }

    /// Returns the card with the given number, or the first card if no such card exists.
    pub fn card(&self, number: usize) -> &Card {
        number.checked_sub(1).and_then(|at| self.more.get(at)).unwrap_or(&self.first)
    }

    /// Returns the memory operations for a card.
    #[inline]
    pub fn memory<'a>(&'a self, card: &'a Card) -> Operations<'a> {
        Operations { memory: &card.memory, captures: &self.captures, contexts: &card.contexts, link: &card.link }
    }

    /// Returns the card of this thread's current context, or the first card if no context is current.
    #[inline]
    pub fn current(&self) -> &Card {
        if self.is_single() { &self.first } else { self.of_current_context() }
    }

    fn of_current_context(&self) -> &Card {
        let found = driver::current_device().ok().and_then(|device| self.of_device(device));
        found.unwrap_or(&self.first)
    }

    /// Runs `work` with one of a card's contexts current, if the program has one there.
    pub fn in_context<T>(&self, card: &Card, work: impl FnOnce() -> T) -> T {
        if self.is_single() || self.of_current_context().number == card.number {
            return work();
        }
        let before = driver::current_context();
        card.contexts.bind();
        let result = work();
        // SAFETY: the context was current before.
        unsafe { driver::ctx_set_current(before) };
        result
    }

    /// Returns the card of a driver device.
    pub fn of_device(&self, device: c_int) -> Option<&Card> {
        self.cards().find(|card| card.link.card(device).is_some())
    }

    /// Returns the card of a context that the program has created.
    pub fn of_context(&self, context: u64) -> Option<&Card> {
        self.cards().find(|card| card.contexts.knows(context))
    }

    /// Returns the card that an address belongs to, or else the card of the current context.
    pub fn of_address(&self, address: Address) -> &Card {
        if self.is_single() {
            return &self.first;
        }
        self.cards().find(|card| card.has(address)).unwrap_or_else(|| self.of_current_context())
    }

    /// Returns the card that one of this library's handles belongs to.
    pub fn of_handle(&self, handle: driver::Handle) -> &Card {
        self.card(memory::handles::Handles::card(handle))
    }

    /// Returns the card that a stream's work runs on.
    pub fn of_stream(&self, stream: Stream) -> &Card {
        self.place_of_stream(stream).0
    }

    /// Returns the card that a stream's work runs on, and the stream's context if it may not be current.
    pub fn place_of_stream(&self, stream: Stream) -> (&Card, Option<u64>) {
        // Each context has its own default streams.
        if self.is_single() || stream.is_default() {
            return (self.current(), None);
        }
        let known = self.streams.read().unwrap_or_else(PoisonError::into_inner).get(&stream.handle).copied();
        let found = known.map(|(number, context)| (self.card(number), context)).or_else(|| self.find_stream(stream));
        found.map_or_else(|| (self.current(), None), |(card, context)| (card, Some(context)))
    }

    #[cold]
    fn find_stream(&self, stream: Stream) -> Option<(&Card, u64)> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the pointer is valid, and the driver rejects nonexistent streams.
        if unsafe { driver::stream_get_ctx(stream.object(), &raw mut context) } != SUCCESS {
            return None;
        }
        let context = context as u64;
        let card = self.of_context(context).unwrap_or_else(|| events::within(context, || self.of_current_context()));
        let mut streams = self.streams.write().unwrap_or_else(PoisonError::into_inner);
        streams.insert(stream.handle, (card.number, context));
        Some((card, context))
    }

    /// Removes the record of a destroyed stream, or of all streams if `handle` is `None`.
    pub fn stream_ends(&self, handle: Option<u64>) {
        if self.is_single() {
            return;
        }
        let mut streams = self.streams.write().unwrap_or_else(PoisonError::into_inner);
        match handle {
            Some(handle) => drop(streams.remove(&handle)),
            None => streams.clear(),
        }
    }

    /// Maps the evicted chunks of each card for a call that may access memory but does not wait for a slice.
    pub fn present(&self) {
        self.cards().for_each(|card| self.memory(card).present());
    }

    /// Permits work on each card to access the memory of the program's other cards. From then on, memory moves only
    /// while the process is quiesced on all its cards.
    pub fn allow_cross_access(&self) {
        if !self.cross.is_ready() {
            // Mapped chunks stay mapped from now on, because work on another card may use them at any time.
            self.cross.allow(|| self.present());
        }
    }

    /// Returns true if the memory at an address belongs to a card other than `card`.
    pub fn is_on_other_card(&self, card: &Card, address: Address) -> bool {
        self.cards().any(|other| other.number != card.number && other.has(address))
    }

    /// Waits until no work is in flight on a card. Returns false if the deadline passes first. The gate must be closed.
    pub fn drain(&self, card: &Card, deadline: Option<Instant>) -> bool {
        card.pacing.drain(&self.captures, &card.contexts, deadline)
    }

    /// Returns the cards that must have no work in flight while memory of `card` is replaced: `card`, followed by all
    /// other cards if `all` is true.
    pub fn users<'a>(&'a self, card: &'a Card, all: bool) -> impl Iterator<Item = &'a Card> {
        let others = self.cards().filter(move |other| all && other.number != card.number);
        std::iter::once(card).chain(others)
    }

    /// Waits for all work that may use memory on `card`, and then runs `work` with one of the card's contexts current.
    /// No such work is in flight meanwhile. Fails during a capture.
    pub fn drained(&self, card: &Card, work: impl FnOnce() -> c_int) -> c_int {
        let _one = self.exports.lock().unwrap_or_else(PoisonError::into_inner);
        let before = driver::current_context();
        // Other cards cannot start using the memory before `end`.
        let all = self.cross.begin(card.number);
        for user in self.users(card, all) {
            user.gate.close(gate::EXPORT, None);
        }
        let result = if self.captures.any() {
            // Waiting for work is not permitted during a capture.
            driver::CAPTURE_UNSUPPORTED
        } else {
            for user in self.users(card, all) {
                self.drain(user, None);
            }
            if before.is_null() || !card.contexts.knows(before as u64) {
                card.contexts.bind();
            } else {
                // SAFETY: the context was current before.
                unsafe { driver::ctx_set_current(before) };
            }
            driver::relaxed(work)
        };
        self.users(card, all).for_each(|user| user.gate.open(gate::EXPORT));
        self.cross.end(card.number);
        // SAFETY: as above.
        unsafe { driver::ctx_set_current(before) };
        result
    }

    /// Returns true once the owners are connected and the agent threads have started.
    pub fn has_started(&self) -> bool {
        self.started.load(Ordering::SeqCst)
    }
}
