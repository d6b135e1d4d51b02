//! Tests a card that has its own thread. The tests wait for its interrupt.

use super::driver::{CE0, Driver, PAGE, ce_copy, methods, object, release, small, words};
use crate::{Config, SimGpu};
use card::{Card, InterruptMode};
use nvspec::regs::{pfifo, ppci};
use std::sync::Arc;
use vmm_sys_util::eventfd::EventFd;

#[test]
fn many_copies_are_done_and_signalled() {
    let card = Arc::new(SimGpu::new(&Config { vram_mib: 128, ..small() }).expect("a card"));
    let mut driver = Driver::on(card);
    let event = EventFd::new(0).expect("event");
    driver.card.set_interrupt(InterruptMode::Msi, Some(event.try_clone().expect("clone")));
    let mut channel = driver.only_channel(1);
    let (a, b, sem_va) = (0x100_0000, 0x200_0000, 0x300_0000);
    driver.buffer(&channel, a, 16, 1);
    let to = driver.buffer(&channel, b, 16, 2);
    let sem = driver.buffer(&channel, sem_va, 1, 3);
    driver.push(&mut channel, &object(CE0));
    for round in 1..200u32 {
        let source = if round % 2 == 0 { (a, b) } else { (b, a) };
        let copy = ce_copy(source.0, source.1, 16);
        driver.push(&mut channel, &words(&[copy, release(sem_va, round), methods(4, 0x20, &[0])]));
        while driver.peek(sem) != round {
            // Follow a driver's sequence: sleep until a message arrives, rearm MSI, acknowledge the interrupts, and
            // check the semaphore.
            event.read().expect("a message");
            driver.wr(ppci::MSI_REARM::OFFSET, 0xff);
            driver.wr(pfifo::NON_STALL_INTR::at(4), 1);
            driver.wr(pfifo::RUNLIST_INTR::OFFSET, u32::MAX);
        }
    }
    assert!(driver.holds(to, 16, 2));
    let _ = PAGE;
}
