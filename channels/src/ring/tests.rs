use super::*;
use crate::tests::fake::Guest;

const NOP: Entry = Entry { raw: 0, end: None };

fn ring() -> Ring {
    Ring::new(&Guest::default().instance(0, 0x5000))
}

#[test]
fn no_submission_has_the_sequence_of_a_cleared_semaphore() {
    let mut ring = ring();
    ring.sequence = u32::MAX - 1;
    let sequences: Vec<u32> = (0..3).map(|now| ring.submit(Submission(now), &[NOP], now).sequence).collect();
    assert_eq!(sequences, [u32::MAX, 1, 2]);
}

#[test]
fn a_gp_get_that_cannot_be_is_not_believed() {
    let mut ring = ring();
    ring.submit(Submission(7), &[NOP; 9], 0);
    ring.observe(4);
    assert_eq!(ring.reached(), 0, "the card has not received the work yet");
    assert_eq!(ring.start(Submission(6)), None);
    assert_eq!(ring.start(Submission(7)), Some(10));
    assert_eq!(ring.start(Submission(7)), None);
    ring.submit(Submission(8), &[NOP; 9], 0);
    ring.observe(4);
    assert_eq!(ring.reached(), 4);
    for index in [3, 11, 511, 512, 512 + 5, u32::MAX] {
        ring.observe(index);
        assert_eq!(ring.reached(), 4, "{index}");
    }
    ring.observe(10);
    assert!(ring.drained());
}

#[test]
fn ring_positions_continue_when_indices_wrap() {
    let mut ring = ring();
    for round in 1..=1000u64 {
        assert_eq!(ring.room(), 510);
        let record = ring.submit(Submission(round), &[NOP; 99], round);
        ring.start(Submission(round)).unwrap();
        assert_eq!(record.slot as u64, (round - 1) % 256);
        ring.observe((round * 100 % 512) as u32);
        assert_eq!((ring.reached(), ring.fetched()), (100 * round, 1));
        assert_eq!(u64::from(ring.virtual_get(ring.reached())), 99 * round % 1024);
        ring.complete().unwrap();
    }
}
