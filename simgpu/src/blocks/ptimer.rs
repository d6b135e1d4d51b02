//! PTIMER: the clock that drivers read and set, and its alarm.

use crate::cx::Cx;
use nvspec::regs::ptimer::{ALARM_0, INTR, INTR_EN, Reg};

pub(crate) fn read(reg: Reg, offset: u32, cx: &Cx) -> u32 {
    match reg {
        Reg::TIME_0 => cx.clock.timer() as u32,
        Reg::TIME_1 => (cx.clock.timer() >> 32) as u32,
        Reg::MMIO_FAULT_ADDRESS
        | Reg::MMIO_FAULT_DATA
        | Reg::INTR
        | Reg::INTR_EN
        | Reg::NUMERATOR
        | Reg::DENOMINATOR
        | Reg::CLOCK_MUL
        | Reg::ALARM_0 => cx.storage.read(reg.info(), offset),
    }
}

pub(crate) fn write(reg: Reg, offset: u32, value: u32, cx: &mut Cx) {
    cx.storage.write(reg.info(), offset, value);
    let value = u64::from(value);
    match reg {
        Reg::TIME_0 => cx.clock.set_timer(cx.clock.timer() & !0xffff_ffff | value),
        Reg::TIME_1 => cx.clock.set_timer(value << 32 | cx.clock.timer() & 0xffff_ffff),
        Reg::ALARM_0 => cx.clock.set_alarm(cx.storage.peek(ALARM_0::OFFSET)),
        Reg::MMIO_FAULT_ADDRESS
        | Reg::MMIO_FAULT_DATA
        | Reg::INTR
        | Reg::INTR_EN
        | Reg::NUMERATOR
        | Reg::DENOMINATOR
        | Reg::CLOCK_MUL => {}
    }
}

/// Raises the alarm interrupt if the alarm is due.
pub(crate) fn step(cx: &mut Cx) {
    if cx.clock.take_alarm() {
        cx.storage.poke(INTR::OFFSET, cx.storage.peek(INTR::OFFSET) | INTR::ALARM.mask());
    }
}

/// Returns true if the unit asserts its interrupt line to PMC.
pub(crate) fn asserts(cx: &Cx) -> bool {
    cx.storage.peek(INTR::OFFSET) & cx.storage.peek(INTR_EN::OFFSET) != 0
}

#[cfg(test)]
mod tests {
    use crate::gpu::Gpu;
    use nvspec::regs::{pmc, ptimer};

    #[test]
    fn alarm_raises_the_timers_line_until_it_is_cleared() {
        let mut gpu = Gpu::for_test();
        gpu.write32(ptimer::INTR_EN::OFFSET, 1);
        gpu.write32(ptimer::ALARM_0::OFFSET, 0x1000);
        gpu.advance(0xfff);
        gpu.step();
        assert_eq!(gpu.read32(pmc::INTR_0::OFFSET), 0);
        gpu.advance(1);
        gpu.step();
        assert_eq!(gpu.read32(pmc::INTR_0::OFFSET), pmc::INTR_0::PTIMER.mask());
        gpu.write32(ptimer::INTR::OFFSET, 1);
        assert_eq!(gpu.read32(pmc::INTR_0::OFFSET), 0);
    }

    #[test]
    fn time_can_be_set_word_by_word() {
        let mut gpu = Gpu::for_test();
        gpu.advance(12345);
        gpu.write32(ptimer::TIME_1::OFFSET, 7);
        gpu.write32(ptimer::TIME_0::OFFSET, 0x40);
        gpu.advance(64);
        assert_eq!((gpu.read32(ptimer::TIME_1::OFFSET), gpu.read32(ptimer::TIME_0::OFFSET)), (7, 0x80));
    }
}
