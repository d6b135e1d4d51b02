//! Tests the PTIMER alarm as guest drivers use it.

use super::{driver, rig};
use nvspec::regs::{pmc, ppci, ptimer};

#[test]
fn alarm_armed_by_guest_interrupts_at_its_time() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let guest = &mut driver.guest;
    let _ = guest.take_msi();
    guest.wr(ptimer::INTR_EN::OFFSET, ptimer::INTR::ALARM.mask());
    for in_ns in [0, 2_000_000] {
        let now = guest.rd(ptimer::TIME_0::OFFSET);
        guest.wr(ptimer::ALARM_0::OFFSET, now.wrapping_add(in_ns + 100_000));
        // Do not access registers in the meantime, because each access would check the alarm.
        guest.wait_msi();
        assert!(pmc::INTR_0::PTIMER.is_set(guest.rd(pmc::INTR_0::OFFSET)));
        assert!(guest.rd(ptimer::TIME_0::OFFSET).wrapping_sub(now) >= in_ns);
        guest.wr(ptimer::INTR::OFFSET, ptimer::INTR::ALARM.mask());
        guest.wr(ppci::MSI_REARM::OFFSET, ppci::MSI_REARM::REARM.mask());
        assert!(!pmc::INTR_0::PTIMER.is_set(guest.rd(pmc::INTR_0::OFFSET)));
    }
}
