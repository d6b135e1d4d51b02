//! Runs the property tests on arbitrary input.

#![allow(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    reason = "failed checks must panic"
)]

use crate::tests::model::{Op, Rig};

/// Maximum number of operations in an input.
const OPS: usize = 256;

/// Decodes `data` as a sequence of actions by two guests (instance blocks, ring contents, runlists, doorbells), the
/// card and the host. Checks the invariants after each action, and finally checks that all work completes.
///
/// # Panics
/// Panics if a check fails.
pub fn fuzz(data: &[u8]) {
    let mut rig = Rig::new();
    let mut bytes = Bytes(data);
    for _ in 0..OPS {
        if bytes.0.is_empty() {
            break;
        }
        rig.apply(&bytes.op());
        rig.check();
    }
    rig.drain();
}

/// Rest of the input. Bytes beyond its end read as zeros.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn half(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    fn word(&mut self) -> u32 {
        u32::from(self.half()) | u32::from(self.half()) << 16
    }

    fn wide(&mut self) -> u64 {
        u64::from(self.word()) | u64::from(self.word()) << 32
    }

    /// Returns true for three of four values of a byte.
    fn more(&mut self) -> bool {
        self.byte() & 3 != 0
    }

    /// Reads at most `max` bytes.
    fn some(&mut self, max: usize) -> Vec<u8> {
        let len = usize::from(self.half()) % (max + 1);
        let (some, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        some.to_vec()
    }

    fn op(&mut self) -> Op {
        let what = self.byte();
        // Use few channels in most cases, so that operations affect the same channel. Occasionally, use any channel.
        let who = self.byte();
        let (second, channel) = (who & 0x80 != 0, if who & 0x40 == 0 { who % 6 } else { self.byte() });
        match what % 24 {
            0 | 1 => Op::Bind(second, channel, self.byte(), self.half() % 16, self.half() % 16),
            2 => Op::BindBytes(second, channel, self.some(4096)),
            3 => Op::Unbind(second, channel),
            4 => Op::Enable(second, channel, self.more()),
            5 => Op::List(second, self.some(8).into_iter().map(|id| id % 8).collect()),
            6 => Op::Preempt(second, channel),
            7 => Op::Pause(second, self.byte() & 1 != 0),
            8 => Op::Refuse(second, channel),
            9 | 10 => Op::Ring(second, channel, u32::from(self.half()) % 1100, self.more()),
            11 => Op::Ring(second, channel, self.word(), true),
            12 => Op::Pull(self.byte()),
            13 => Op::Pending,
            14 => Op::Write(second, channel, self.half(), self.wide()),
            15 => Op::Unmap(second, channel, !self.more()),
            16 => Op::Fetch(second, channel, self.byte()),
            17 => Op::Execute(second, channel, self.byte()),
            18 => Op::Forge(second, channel, self.byte() % 8, self.word() % 8),
            19 => Op::Swallow(second, channel),
            20 => Op::Completed,
            21 => Op::NonStall(self.byte() % 8),
            22 => Op::Look(self.wide()),
            _ => match self.byte() % 16 {
                // Hang the card only in tests, because waiting for it would take too long in a fuzzer.
                0 if cfg!(test) => Op::Hang(second, channel),
                1 => Op::LetGo,
                2 => Op::Destroy(second),
                3 => Op::Reset,
                4 => Op::Gate(self.byte() & 1 != 0),
                5..10 => Op::Start(self.byte()),
                10 | 11 => Op::Restore,
                _ => Op::Completed,
            },
        }
    }
}

#[cfg(test)]
mod tests;
