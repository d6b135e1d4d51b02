//! PTIMER: the card's clock with a per-VM offset, and an alarm.

use super::{At, Cx};
use nvspec::regs::ptimer::{INTR, Reg, TIME_0, TIME_1};
use serde::{Deserialize, Serialize};

/// Mask of the bits that the clock implements.
const CLOCK_MASK: u64 = (TIME_1::NSEC.mask() as u64) << 32 | u32::MAX as u64;

/// The guest's clock, which is the card's clock plus an offset. A guest write to the clock changes the offset.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Ptimer {
    /// Guest time minus card time in ns, modulo 2^64.
    offset: u64,
    intr: u32,
    intr_en: u32,
    alarm: u32,
    /// Guest time in ns at which the alarm fires.
    ring_at: Option<u64>,
}

impl Ptimer {
    pub(crate) fn read(&mut self, reg: Reg, at: At, cx: &mut Cx) -> u32 {
        match reg {
            Reg::TIME_0 => low(self.now(cx.backend.now_ns())) & TIME_0::NSEC.mask(),
            Reg::TIME_1 => high(self.now(cx.backend.now_ns())) & TIME_1::NSEC.mask(),
            Reg::INTR => {
                self.tick(cx.backend.now_ns());
                self.intr
            }
            Reg::INTR_EN => self.intr_en,
            Reg::ALARM_0 => self.alarm,
            _ => cx.plain_read(at),
        }
    }

    pub(crate) fn write(&mut self, reg: Reg, at: At, value: u32, cx: &mut Cx) {
        match reg {
            Reg::TIME_0 => self.set(value & TIME_0::NSEC.mask(), u32::MAX, 0, cx),
            Reg::TIME_1 => self.set(value & TIME_1::NSEC.mask(), TIME_1::NSEC.mask(), 32, cx),
            Reg::INTR => self.intr &= !value,
            Reg::INTR_EN => self.intr_en = value & INTR::ALARM.mask(),
            Reg::ALARM_0 => {
                let now = self.now(cx.backend.now_ns());
                // The alarm fires when the low dword of the clock reaches the written value.
                let ahead = value.wrapping_sub(low(now));
                self.alarm = value;
                self.ring_at = Some(now.wrapping_add(u64::from(ahead)) & CLOCK_MASK);
            }
            _ => cx.plain_write(at, value),
        }
    }

    pub(crate) fn reset(&mut self) {
        let Self { offset, intr, intr_en, alarm, ring_at } = self;
        (*offset, *intr, *intr_en, *alarm, *ring_at) = (0, 0, 0, 0, None);
    }

    /// Adds `ns` to the offset after the card's clock has gone back by `ns`, so that the guest's clock is monotonic.
    pub(crate) fn advance(&mut self, ns: u64) {
        self.offset = self.offset.wrapping_add(ns);
    }

    /// Raises the alarm interrupt if the alarm is due.
    pub(crate) fn tick(&mut self, card_ns: u64) {
        let now = self.now(card_ns);
        if self.ring_at.is_some_and(|at| now >= at) {
            self.ring_at = None;
            self.intr |= INTR::ALARM.mask();
        }
    }

    /// Returns the card time in ns at which the alarm fires, if the alarm is set and its interrupt is enabled.
    pub(crate) fn alarm_at(&self) -> Option<u64> {
        let wanted = INTR::ALARM.is_set(self.intr_en);
        self.ring_at.filter(|_| wanted).map(|at| at.wrapping_sub(self.offset) & CLOCK_MASK)
    }

    pub(crate) fn pending(&self) -> bool {
        self.intr & self.intr_en != 0
    }

    /// Returns the guest time in ns at card time `card_ns`.
    pub(crate) fn now(&self, card_ns: u64) -> u64 {
        card_ns.wrapping_add(self.offset) & CLOCK_MASK
    }

    /// Replaces the clock bits selected by `mask << shift` with `value << shift`.
    fn set(&mut self, value: u32, mask: u32, shift: u32, cx: &mut Cx) {
        let card = cx.backend.now_ns();
        let half = |value: u32| u64::from(value).checked_shl(shift).unwrap_or(0);
        let wanted = (self.now(card) & !half(mask)) | half(value);
        self.offset = wanted.wrapping_sub(card);
    }
}

#[expect(clippy::cast_possible_truncation, reason = "only the low dword is used")]
fn low(time: u64) -> u32 {
    time as u32
}

fn high(time: u64) -> u32 {
    (time >> 32) as u32
}
