use std::collections::{BTreeMap, BTreeSet};

use super::replay::Piece;
use super::trace::{Step, Submission, Use};
use super::*;

/// Creates a trace of steps. Each step lists its chunks, with a flag that is true for a write.
fn trace(pieces: &[&[(u32, bool)]]) -> Trace {
    let step = |piece: &&[(u32, bool)]| -> Step {
        piece.iter().map(|&(chunk, write)| (chunk, Use { read: 128, written: u64::from(write) * 128 })).collect()
    };
    let submission = |piece| Submission { seen: BTreeSet::new(), steps: vec![step(piece)] };
    Trace { submissions: pieces.iter().map(submission).collect(), buffers: Vec::new() }
}

/// Returns the minimum cost of all schedules, found by exhaustive search.
fn exhaustive(pieces: &[Piece<'_>], capacity: usize) -> u64 {
    // A state is the set of chunks on the card, each with a flag that is true if the chunk was written since its
    // arrival. The value is the state's minimum cost.
    let mut states: BTreeMap<BTreeMap<u32, bool>, u64> = [(BTreeMap::new(), 0)].into_iter().collect();
    let mut born = BTreeSet::new();
    for piece in pieces {
        let mut next: BTreeMap<BTreeMap<u32, bool>, u64> = BTreeMap::new();
        for (state, cost) in states {
            let others: Vec<u32> = state.keys().filter(|chunk| !piece.step.contains_key(chunk)).copied().collect();
            for kept in 0..1u32 << others.len() {
                let (mut state, mut cost) = (state.clone(), cost);
                for (_, chunk) in others.iter().enumerate().filter(|(at, _)| kept >> at & 1 == 0) {
                    cost += u64::from(state.remove(chunk) == Some(true));
                }
                for (chunk, used) in piece.step {
                    cost += u64::from(!state.contains_key(chunk) && born.contains(chunk));
                    *state.entry(*chunk).or_default() |= used.written > 0;
                }
                if state.len() <= capacity {
                    let known = next.entry(state).or_insert(cost);
                    *known = cost.min(*known);
                }
            }
        }
        born.extend(piece.step.keys().copied());
        states = next;
    }
    states.into_values().min().expect("a schedule")
}

#[test]
fn optimum_is_within_bounds_and_no_policy_beats_it() {
    let (mut random, mut exact) = (fastrand::Rng::with_seed(1), 0);
    for _ in 0..60 {
        let pieces: Vec<Vec<(u32, bool)>> =
            (0..14).map(|_| (0..random.u32(1..3)).map(|_| (random.u32(..6), random.u8(..3) == 0)).collect()).collect();
        let trace = trace(&pieces.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let known = Known::from_profile(&trace);
        let instances = [Instance { trace: &trace, known: &known }];
        let pieces = interleave(&instances);
        let (best, Optimum { least, reached }) = (exhaustive(&pieces, 3), optimum(&pieces, 1, 3));
        assert!((least..=reached).contains(&best), "{least} <= {best} <= {reached}");
        exact += u32::from(least == best);
        for contender in OTHERS.into_iter().chain([RANDOM]) {
            assert!(replay(&pieces, &instances, 3, contender, 1).sum() >= best, "{}", contender.name);
        }
    }
    assert!(exact > 0, "the lower bound is never the optimum");
}

#[test]
fn loop_larger_than_card_is_worst_case_for_clock() {
    let piece: Vec<Vec<(u32, bool)>> = (0..40).map(|at| vec![(at % 4, false)]).collect();
    let trace = trace(&piece.iter().map(Vec::as_slice).collect::<Vec<_>>());
    let known = Known::default();
    let instances = [Instance { trace: &trace, known: &known }];
    let pieces = interleave(&instances);
    let copied = |name: &str| {
        let contender = OTHERS.into_iter().find(|of| of.name == name).expect("a policy");
        replay(&pieces, &instances, 3, contender, 1)
    };
    // After the first round, Belady's rule misses once in three uses.
    assert_eq!(optimum(&pieces, 1, 3), Optimum { least: 12, reached: 12 });
    assert_eq!(copied("latest"), Copied { ins: 18, outs: 0 }, "two of four stay");
    assert_eq!(copied("clock_bits"), Copied { ins: 36, outs: 0 }, "each is gone when it is used again");
}

#[test]
fn value_worse_than_target_is_missed() {
    let met = |value, least| beside("of".to_owned(), value, least, true).met();
    assert_eq!((met(12.0, 10.0), met(12.1, 10.0)), (Some(true), Some(false)));
    assert_eq!((met(0.0, 0.0), met(0.125, 0.0)), (Some(true), Some(false)), "nothing has to be copied");
    assert_eq!(beside("of".to_owned(), 99.0, 10.0, false).met(), None);
    let mut verdicts = Verdicts::default();
    for copied in [10, 12, 13, 25] {
        verdicts.add(copied, Optimum { least: 10, reached: 20 });
    }
    assert_eq!((verdicts.all, verdicts.met, verdicts.missed), (4, 2, 1), "13 is within the bounds of what is known");
}
