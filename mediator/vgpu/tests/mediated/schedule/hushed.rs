//! Ends that nobody waits for.

use super::{A, B, COPY_NS, copies, driver, nothing_in_flight, rig_of, used, worker};
use nvspec::addr::SMALL_PAGE;
use rig::Rig;
use rig::driver::{Channel, Driver, FENCE_VA, M2MF, m2mf_copy, object, release};
use sched::{Config, VgpuParams};

/// Submits a copy whose guest wants no interrupt, and waits until its end has been seen. Returns whether there was one all the same.
fn is_told(rig: &Rig, driver: &mut Driver, channel: &mut Channel) -> bool {
    driver.service();
    while driver.guest.take_msi() {
        driver.service();
    }
    channel.fences += 1;
    let fence = release(FENCE_VA, channel.fences);
    let put = driver.queue(channel, &[object(M2MF), m2mf_copy(A, B, SMALL_PAGE as u32), fence].concat());
    driver.ring(channel, put);
    nothing_in_flight(rig);
    assert!(driver.is_done(channel));
    driver.guest.take_msi()
}

#[test]
fn end_that_nobody_waits_for_interrupts_nobody() {
    let rig = rig_of(Config::default(), COPY_NS / 20);
    let mut alone = driver(&rig, 0, VgpuParams::default());
    let mut channel = worker(&mut alone, 1);
    // How long the first ones took is forgotten after some short ones, if the host is not busy.
    let untold = (0..2000).any(|_| !is_told(&rig, &mut alone, &mut channel));
    assert!(untold, "each of 2,000 submissions was told of");
    let charged = used(&rig, 0);
    // Where somebody else has work, each end is told.
    let mut other = driver(&rig, 1, VgpuParams::default());
    let mut busy = worker(&mut other, 1);
    for _ in 0..3 {
        (0..20).for_each(|_| copies(&mut other, &mut busy, 50));
        channel.fences += 1;
        let fence = release(FENCE_VA, channel.fences);
        let put = alone.queue(&mut channel, &[object(M2MF), m2mf_copy(A, B, SMALL_PAGE as u32), fence].concat());
        alone.ring(&channel, put);
        alone.wait(&channel);
        other.wait(&busy);
    }
    assert!(used(&rig, 0) > charged);
}
