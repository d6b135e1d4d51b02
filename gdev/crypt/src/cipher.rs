//! Encrypts sectors on the card if this is faster, and otherwise on the CPU.
//!
//! If the card is busy with another request or is being opened, the CPU encrypts instead, so that a request never waits
//! for the card.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aes::Aes256;
use aes::cipher::KeyInit;
use anyhow::{Context, Result};
use gdev::Target;
use parking_lot::Mutex;
use xts_mode::{Xts128, get_tweak_default};

use crate::SECTOR_BYTES;
use crate::card::Card;
use crate::key::Key;
use crate::tables::Direction;

/// Delay between a card failure and the next attempt to open the card.
const REOPEN_INTERVAL: Duration = Duration::from_secs(30);
/// Request sizes in bytes at which the card and the CPU are compared.
const TRIAL_BYTES: [usize; 5] = [16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];
/// Number of trials per size. The fastest one is used.
const TRIALS: usize = 3;

/// Minimum size of the requests that are sent to the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CardMin {
    /// A fixed size in bytes.
    Bytes(usize),
    /// The smallest size at which the card was faster than the CPU, as measured when the card was opened.
    Measured,
}

/// Statistics of a [`Cipher`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of bytes transformed by the card.
    pub card_bytes: u64,
    /// Number of bytes transformed by the CPU.
    pub cpu_bytes: u64,
    /// Number of card failures.
    pub card_failures: u64,
}

/// An open card.
struct Opened {
    card: Card,
    /// Minimum size of the requests that are sent to the card, in bytes.
    min_bytes: usize,
}

#[derive(Default)]
struct Counters {
    card_bytes: AtomicU64,
    cpu_bytes: AtomicU64,
    card_failures: AtomicU64,
}

/// Encrypts and decrypts sectors with one key.
pub struct Cipher {
    key: Key,
    cpu: Xts128<Aes256>,
    target: Option<Target>,
    card_min: CardMin,
    /// The card, which transforms the data of one request at a time. `None` while no card is open.
    card: Mutex<Option<Opened>>,
    counters: Counters,
}

impl Cipher {
    /// Creates a cipher that uses the CPU, and also the card if `target` is given. If the card cannot be opened, logs
    /// the error and retries later.
    ///
    /// # Errors
    /// Returns an error if the key is invalid.
    pub fn new(key: Key, target: Option<Target>, card_min: CardMin) -> Result<Arc<Self>> {
        let data = Aes256::new_from_slice(key.data()).context("the key")?;
        let tweak = Aes256::new_from_slice(key.tweak()).context("the key")?;
        let (cpu, counters) = (Xts128::new(data, tweak), Counters::default());
        let cipher = Arc::new(Self { key, cpu, target, card_min, card: Mutex::new(None), counters });
        cipher.open_card();
        Ok(cipher)
    }

    /// Returns the current statistics.
    pub fn counts(&self) -> Counts {
        let Counters { card_bytes, cpu_bytes, card_failures } = &self.counters;
        let [card_bytes, cpu_bytes, card_failures] =
            [card_bytes, cpu_bytes, card_failures].map(|counter| counter.load(Ordering::Relaxed));
        Counts { card_bytes, cpu_bytes, card_failures }
    }

    /// Transforms data in place. `sector` is the number of the first sector.
    ///
    /// # Panics
    /// Panics if the data does not consist of whole sectors.
    pub fn run(self: &Arc<Self>, direction: Direction, sector: u64, data: &mut [u8]) {
        assert!(data.len().is_multiple_of(SECTOR_BYTES), "callers check the size");
        let counter = if self.try_card(direction, sector, data) {
            &self.counters.card_bytes
        } else {
            self.on_cpu(direction, sector, data);
            &self.counters.cpu_bytes
        };
        counter.fetch_add(data.len() as u64, Ordering::Relaxed);
    }

    fn on_cpu(&self, direction: Direction, sector: u64, data: &mut [u8]) {
        let first = u128::from(sector);
        match direction {
            Direction::Encrypt => self.cpu.encrypt_area(data, SECTOR_BYTES, first, get_tweak_default),
            Direction::Decrypt => self.cpu.decrypt_area(data, SECTOR_BYTES, first, get_tweak_default),
        }
    }

    /// Transforms data on the card if the data is large enough. Returns false and leaves the data unchanged if the CPU
    /// must transform it.
    fn try_card(self: &Arc<Self>, direction: Direction, sector: u64, data: &mut [u8]) -> bool {
        let Some(mut opened) = self.card.try_lock() else { return false };
        let Some(Opened { card, .. }) = opened.as_mut().filter(|opened| data.len() >= opened.min_bytes) else {
            return false;
        };
        let mut copy = data.to_vec();
        match card.run(direction, sector, &mut copy) {
            Ok(()) => {
                data.copy_from_slice(&copy);
                true
            }
            Err(error) => {
                *opened = None;
                self.fail(&error);
                false
            }
        }
    }

    /// Logs a card failure, and schedules another attempt to open the card.
    fn fail(self: &Arc<Self>, error: &anyhow::Error) {
        let seconds = REOPEN_INTERVAL.as_secs();
        eprintln!("gdev-crypt: the card failed: {error:#}; the CPU continues, and the card is reopened in {seconds} s");
        self.counters.card_failures.fetch_add(1, Ordering::Relaxed);
        let cipher = Arc::downgrade(self);
        let reopen = move || {
            std::thread::sleep(REOPEN_INTERVAL);
            if let Some(cipher) = cipher.upgrade() {
                cipher.open_card();
            }
        };
        if let Err(error) = std::thread::Builder::new().spawn(reopen) {
            eprintln!("gdev-crypt: the card cannot be reopened: {error}");
        }
    }

    /// Opens the card and compares its speed with the CPU's.
    fn open_card(self: &Arc<Self>) {
        let Some(target) = &self.target else { return };
        let opened = Card::open(target, &self.key).and_then(|mut card| Ok((self.min_bytes(&mut card)?, card)));
        match opened {
            Ok((usize::MAX, _)) => {
                eprintln!("gdev-crypt: the CPU is faster than {target:?} at all sizes, and does all work");
            }
            Ok((min_bytes, card)) => {
                eprintln!("gdev-crypt: {target:?} transforms requests of at least {min_bytes} bytes");
                *self.card.lock() = Some(Opened { card, min_bytes });
            }
            Err(error) => self.fail(&error),
        }
    }

    /// Checks the card's results against the CPU's. Returns the minimum request size in bytes for the card, or
    /// [`usize::MAX`] if the CPU is faster at all sizes.
    fn min_bytes(&self, card: &mut Card) -> Result<usize> {
        let mut fastest = usize::MAX;
        for bytes in TRIAL_BYTES.into_iter().rev() {
            let plain: Vec<u8> = (0..bytes).map(|index| ((index * 31) >> 3) as u8).collect();
            let (mut on_card, mut on_cpu) = (plain.clone(), plain);
            let [mut card_time, mut cpu_time] = [Duration::MAX; 2];
            for trial in 0..TRIALS {
                let direction = Direction::ALL[trial % 2];
                let start = Instant::now();
                card.run(direction, trial as u64, &mut on_card)?;
                card_time = card_time.min(start.elapsed());
                let start = Instant::now();
                self.on_cpu(direction, trial as u64, &mut on_cpu);
                cpu_time = cpu_time.min(start.elapsed());
                anyhow::ensure!(on_card == on_cpu, "the card computed {direction:?} of {bytes} bytes wrongly");
            }
            if let CardMin::Bytes(bytes) = self.card_min {
                return Ok(bytes);
            }
            if card_time >= cpu_time {
                break;
            }
            fastest = bytes;
        }
        Ok(fastest)
    }
}
