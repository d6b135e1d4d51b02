//! The price of a doorbell for those who want the card's lock as well.

use super::{A, B, driver, rig};
use rig::driver::{CE0, ce_copy, object};

#[test]
fn a_doorbell_takes_the_cards_lock_once() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let mut channel = driver.channel(1);
    driver.buffer(&channel, A, 1, 1);
    let to = driver.buffer(&channel, B, 1, 2);
    let taken = locks::taken::<locks::rank::Card>;
    let times = (0..8).map(|_| {
        let put = driver.queue_fenced(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
        let before = taken();
        driver.ring(&channel, put);
        let times = taken() - before;
        driver.wait(&channel);
        times
    });
    // Events that come meanwhile are taken up by who rings.
    assert_eq!(times.min(), Some(1));
    assert!(driver.vram_holds(to, 1, 1));
}
