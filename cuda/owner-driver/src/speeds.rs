//! Measures how fast a card's driver creates chunks and copies them between the card and host memory.

use crate::{Address, Driver, DriverError, Memory, Queue};
use std::time::Instant;

/// Measured speeds of a card. Copies are measured on their second run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speeds {
    /// Time to create and map the chunks on the card, in seconds.
    pub make_card_s: f64,
    /// Time to create and map the chunks in host memory, in seconds.
    pub make_host_s: f64,
    /// Copy speed from the card to host memory, in 10^9 bytes per second.
    pub out_gb_per_s: f64,
    /// Copy speed from host memory to the card, in 10^9 bytes per second.
    pub in_gb_per_s: f64,
    /// Copy speed per direction while both directions are in use, in 10^9 bytes per second.
    pub both_gb_per_s_each: f64,
}

/// Allocations that are mapped at consecutive addresses of one reservation.
struct Pieces {
    at: Address,
    made_s: f64,
}

fn make(driver: &impl Driver, memory: Memory, bytes: u64, chunk: u64) -> Result<Pieces, DriverError> {
    let at = driver.reserve(bytes)?;
    let start = Instant::now();
    for offset in (0..bytes).step_by(chunk as usize) {
        let handle = driver.create(memory, chunk)?;
        driver.map(at.plus(offset), chunk, handle)?;
    }
    Ok(Pieces { at, made_s: start.elapsed().as_secs_f64() })
}

impl Speeds {
    /// Measures the speeds with two allocations on the card and two in host memory. Each allocation has `bytes` bytes,
    /// in chunks of `chunk` bytes. The memory is freed when the process exits.
    ///
    /// # Errors
    /// Returns the driver's error, for example if memory is insufficient.
    pub fn measure(driver: &impl Driver, bytes: u64, chunk: u64) -> Result<Self, DriverError> {
        let on = |memory| make(driver, memory, bytes, chunk);
        let (card, other) = (on(Memory::Device)?, on(Memory::Device)?);
        let (host, second) = (on(Memory::Host)?, on(Memory::Host)?);
        let copy = |queue, to: &Pieces, from: &Pieces, offset| {
            driver.copy(queue, to.at.plus(offset), from.at.plus(offset), chunk)
        };
        let offsets = || (0..bytes).step_by(chunk as usize);
        let rate = |run: &dyn Fn() -> Result<(), DriverError>| -> Result<f64, DriverError> {
            run()?;
            let start = Instant::now();
            run()?;
            Ok(bytes as f64 / start.elapsed().as_secs_f64() / 1e9)
        };
        let out_gb_per_s = rate(&|| {
            offsets().try_for_each(|offset| copy(Queue::Out, &host, &card, offset))?;
            driver.finish(Queue::Out)
        })?;
        let in_gb_per_s = rate(&|| {
            offsets().try_for_each(|offset| copy(Queue::In, &card, &host, offset))?;
            driver.finish(Queue::In)
        })?;
        let both_gb_per_s_each = rate(&|| {
            // Alternate between the directions. A queue holds about a thousand copies, and while one queue is full, no
            // copies can be queued in the other direction.
            for offset in offsets() {
                copy(Queue::Out, &host, &card, offset)?;
                copy(Queue::In, &other, &second, offset)?;
            }
            driver.finish(Queue::Out)?;
            driver.finish(Queue::In)
        })?;
        let (make_card_s, make_host_s) = (card.made_s, host.made_s);
        Ok(Self { make_card_s, make_host_s, out_gb_per_s, in_gb_per_s, both_gb_per_s_each })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Model;

    #[test]
    fn every_speed_of_a_model_card_is_measured() {
        let speeds = Speeds::measure(&Model::new(64 << 20), 8 << 20, 2 << 20).expect("the card has enough memory");
        let Speeds { out_gb_per_s, in_gb_per_s, both_gb_per_s_each, .. } = speeds;
        assert!([out_gb_per_s, in_gb_per_s, both_gb_per_s_each].iter().all(|speed| *speed > 0.0), "{speeds:?}");
    }
}
