use super::*;
use proptest::prelude::*;

const CHUNKS: u32 = 200;

fn victims(policy: VictimPolicy, hints: &mut Hints, candidates: &[u32], count: usize) -> Vec<u32> {
    let mut chosen = candidates.to_vec();
    policy.build(1).victims(hints, &mut chosen, count);
    chosen
}

fn returns(policy: VictimPolicy, hints: &mut Hints, candidates: &[u32], count: usize) -> Vec<u32> {
    let mut chosen = candidates.to_vec();
    policy.build(1).returns(hints, &mut chosen, count);
    chosen
}

#[test]
fn policies_are_known_by_name() {
    for policy in VictimPolicy::ALL {
        assert_eq!(policy.to_string().parse(), Ok(policy));
    }
    assert!("lru".parse::<VictimPolicy>().is_err_and(|text| text.contains("`clock` or `loops`")));
}

#[test]
fn priority_gives_up_the_lowest_and_returns_the_highest() {
    let mut hints = Hints::new(CHUNKS);
    hints.set_priority(10..=19, 5);
    hints.set_priority(15..=16, 200);
    let all: Vec<u32> = (8..24).collect();
    assert_eq!(victims(VictimPolicy::Priority, &mut hints, &all, 9), [10, 11, 12, 13, 14, 17, 18, 19, 8]);
    assert_eq!(returns(VictimPolicy::Priority, &mut hints, &all, 3), [15, 16, 8]);
    assert_eq!((hints.priority(9), hints.priority(CHUNKS + 5)), (PRIORITY_DEFAULT, PRIORITY_DEFAULT));
}

#[test]
fn profiled_gives_up_the_least_accessed_and_returns_the_most() {
    let mut hints = Hints::new(CHUNKS);
    for (index, count) in [(0, 9), (1, 0), (2, 70), (3, 3)] {
        hints.set_accesses(index..=index, count);
    }
    assert_eq!(victims(VictimPolicy::Profiled, &mut hints, &[0, 1, 2, 3], 2), [1, 3]);
    assert_eq!(returns(VictimPolicy::Profiled, &mut hints, &[0, 1, 2, 3], 2), [2, 0]);
}

#[test]
fn clock_gives_used_chunks_a_second_chance() {
    let (mut hints, policy) = (Hints::new(CHUNKS), VictimPolicy::Clock);
    let all: Vec<u32> = (0..6).collect();
    hints.touch(0..=1);
    hints.touch(3..=3);
    assert_eq!(victims(policy, &mut hints, &all, 2), [2, 4], "0, 1 and 3 were used");
    assert!(!hints.is_referenced(0) && !hints.is_referenced(3), "the clock hand has passed both");
    hints.touch(5..=5);
    assert_eq!(victims(policy, &mut hints, &[0, 1, 3, 5], 2), [0, 1], "the clock hand continues after 4 and spares 5");
    hints.touch(0..=5);
    assert_eq!(
        victims(policy, &mut hints, &[3, 5], 2),
        [3, 5],
        "all chunks were used, so the first ones that the hand passed are selected"
    );
    let mut hints = Hints::new(CHUNKS);
    hints.touch(1..=1);
    assert_eq!(returns(policy, &mut hints, &[0, 1, 2], 2), [1, 0], "used chunks are returned first");
}

#[test]
fn loops_keep_a_part_of_a_loop_that_is_too_large() {
    let (mut hints, mut policy) = (Hints::new(CHUNKS), VictimPolicy::Loops.build(1));
    let (mut on_card, mut copies) = (std::collections::BTreeSet::new(), 0);
    for at in 0..10 * 12 {
        let wanted = at % 12;
        if on_card.contains(&wanted) {
            continue;
        }
        copies += u32::from(at >= 12);
        hints.wants(wanted);
        if on_card.len() == 9 {
            let mut victims: Vec<u32> = on_card.iter().copied().collect();
            policy.victims(&mut hints, &mut victims, 1);
            on_card.remove(&victims[0]);
        }
        on_card.insert(wanted);
        hints.arrived(wanted..=wanted);
    }
    // With LRU, each of the 108 accesses would require a return. The minimum is 29.
    assert!((27..=30).contains(&copies), "{copies}");
}

#[test]
fn loops_policy_spares_chunks_wanted_again_at_once() {
    let (mut hints, policy) = (Hints::new(CHUNKS), VictimPolicy::Loops);
    for chunk in 0..4 {
        hints.arrived(chunk..=chunk);
    }
    let give = |hints: &mut Hints, candidates: &[u32]| victims(policy, hints, candidates, 1)[0];
    assert_eq!(give(&mut hints, &[0, 1, 2, 3]), 3, "chunk 3 arrived last");
    hints.arrived(9..=9);
    hints.arrived(3..=3);
    for _ in 0..15 {
        assert_eq!(give(&mut hints, &[2, 3]), 2, "chunk 3 was needed immediately");
    }
    assert_eq!(give(&mut hints, &[2, 3]), 2);
    assert_eq!(give(&mut hints, &[2, 3]), 3, "chunk 3 was spared for its allowance");
    hints.wants(2);
    assert_eq!(give(&mut hints, &[0, 1, 9]), 1, "chunk 1 precedes a needed chunk");
    assert_eq!(returns(policy, &mut hints, &[1, 2, 3], 1), [3], "chunks that were in use are returned first");
}

#[test]
fn random_takes_each_about_as_often() {
    let (mut policy, mut hints) = (VictimPolicy::Random.build(7), Hints::new(CHUNKS));
    let mut counts = [0u32; 10];
    for _ in 0..10_000 {
        let mut candidates: Vec<u32> = (0..10).collect();
        policy.victims(&mut hints, &mut candidates, 3);
        candidates.iter().for_each(|&index| counts[index as usize] += 1);
    }
    // Each count is expected to be 3000, with a standard deviation of 46.
    assert!(counts.iter().all(|count| (2700..3300).contains(count)), "{counts:?}");
}

#[test]
fn hints_beyond_guest_chunks_are_ignored() {
    let mut hints = Hints::new(70);
    hints.touch(60..=u32::MAX);
    hints.touch(u32::MAX..=u32::MAX);
    hints.set_priority(69..=4000, 1);
    hints.set_accesses(u32::MAX..=u32::MAX, 1);
    assert!(hints.is_referenced(60) && hints.is_referenced(69) && !hints.is_referenced(59) && !hints.is_referenced(70));
    assert_eq!((hints.priority(69), hints.priority(70), hints.accesses(69)), (1, PRIORITY_DEFAULT, 0));
}

proptest! {
    /// Checks that each policy selects the requested number of distinct candidates, and that the same seed leads to the
    /// same selection, for any hints.
    #[test]
    fn each_policy_chooses_among_the_candidates(
        mut candidates in prop::collection::btree_set(0..CHUNKS, 0..60).prop_map(|set| set.into_iter().collect::<Vec<_>>()),
        count in 0usize..80,
        said in prop::collection::vec((0..CHUNKS, 0..CHUNKS, any::<u8>()), 0..20),
        seed in any::<u64>(),
    ) {
        let said_of = |touched: bool| {
            let mut hints = Hints::new(CHUNKS);
            for &(from, to, value) in &said {
                hints.set_priority(from..=to, value);
                hints.set_accesses(from..=to, value.into());
                if touched {
                    hints.touch(from..=to);
                }
            }
            hints
        };
        for index in 0..CHUNKS {
            let touched = said.iter().any(|&(from, to, _)| (from..=to).contains(&index));
            prop_assert_eq!(said_of(true).is_referenced(index), touched);
        }
        for policy in VictimPolicy::ALL {
            let (mut hints, mut chosen) = (said_of(true), candidates.clone());
            policy.build(seed).victims(&mut hints, &mut chosen, count);
            let mut again = candidates.clone();
            policy.build(seed).victims(&mut said_of(true), &mut again, count);
            prop_assert_eq!(&chosen, &again);
            prop_assert_eq!(chosen.len(), count.min(candidates.len()));
            let key = |index: u32| match policy {
                VictimPolicy::Random | VictimPolicy::Loops => 0,
                VictimPolicy::Priority => u32::from(hints.priority(index)),
                VictimPolicy::Profiled => hints.accesses(index),
                VictimPolicy::Clock => said_of(true).is_referenced(index).into(),
            };
            let spared: Vec<u32> = candidates.iter().copied().filter(|index| !chosen.contains(index)).collect();
            let (worst, best) = (chosen.iter().map(|&at| key(at)).max(), spared.iter().map(|&at| key(at)).min());
            prop_assert!(worst.zip(best).is_none_or(|(worst, best)| worst <= best), "{}: wrong chunks", policy);
            chosen.extend(spared);
            chosen.sort_unstable();
            candidates.sort_unstable();
            prop_assert_eq!(&chosen, &candidates, "duplicate or invalid candidates");
        }
    }
}
