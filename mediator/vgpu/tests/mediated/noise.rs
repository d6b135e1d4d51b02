//! Tests guests whose work keeps raising interrupts.

use super::{A, B, driver, rig};
use rig::driver::{CE0, ce_copy, methods, object};

#[test]
fn vm_with_interrupt_stream_is_paused_and_neighbour_is_not() {
    let rig = rig();
    let (mut noisy, mut quiet) = (driver(&rig, 0), driver(&rig, 1));
    let (mut stream, mut work) = (noisy.channel(1), quiet.channel(1));
    quiet.buffer(&work, A, 1, 1);
    let to = quiet.buffer(&work, B, 1, 2);
    let before = noisy.guest.counter("interrupts_caused");
    // Send methods to a subchannel without an object. The PBDMA reports each method, and stops until its report has
    // been handled.
    let words: Vec<u32> = (0..1000).flat_map(|_| methods(6, 0x100, &[0])).collect();
    let mut rounds = 0;
    while noisy.guest.counter("interrupt_pauses") == 0 {
        // The number of interrupts handled in a tenth of a second depends on the host's speed.
        rounds += 1;
        assert!(rounds < 1000, "{} interrupts, and no pause", noisy.guest.counter("interrupts_caused"));
        noisy.submit(&mut stream, &words);
        quiet.submit(&mut work, &[object(CE0), ce_copy(A, B, 1)].concat());
        quiet.wait(&work);
        // After each pause, the guest's work must continue, and it must complete in the end.
        noisy.wait(&stream);
    }
    assert!(noisy.guest.counter("interrupts_caused") - before >= 257);
    assert!(quiet.vram_holds(to, 1, 1));
    assert_eq!(quiet.guest.counter("interrupt_pauses"), 0);
    noisy.submit(&mut stream, &object(CE0));
    noisy.wait(&stream);
    assert_eq!((noisy.guest.counter("faults"), noisy.guest.counter("hangs")), (0, 0));
}
