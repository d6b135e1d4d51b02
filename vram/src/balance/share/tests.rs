use super::*;
use proptest::prelude::*;

fn claim(weight: u32, least: u32, most: u32) -> Claim {
    Claim { weight, least, most, first: true }
}

fn floors(chunks: u32, claims: &[Claim]) -> Vec<u32> {
    let shares = Shares::divide(chunks, claims);
    (0..claims.len()).map(|at| shares.floor(at)).collect()
}

#[test]
fn unwanted_share_is_divided_among_others_by_weight() {
    assert_eq!(floors(100, &[claim(1, 0, 10), claim(1, 0, 90), claim(2, 0, 90)]), [10, 30, 60]);
    assert_eq!(floors(100, &[claim(1, 0, 10), claim(1, 0, 20)]), [10, 20], "all requests are satisfied");
    assert_eq!(floors(100, &[]), [0u32; 0]);
}

#[test]
fn a_guarantee_is_kept_before_the_rest_is_shared() {
    assert_eq!(floors(100, &[claim(1, 60, 90), claim(1, 0, 90), claim(1, 0, 90)]), [60, 20, 20]);
    assert_eq!(floors(10, &[claim(1, 8, 8), claim(1, 8, 8)]), [8, 8], "guarantees exceed the total");
}

#[test]
fn idle_tenants_share_memory_left_by_active_ones() {
    let idle = |least, most| Claim { first: false, ..claim(1, least, most) };
    assert_eq!(floors(100, &[claim(1, 0, 70), idle(0, 80)]), [70, 30]);
    assert_eq!(floors(100, &[claim(1, 0, 120), idle(10, 80)]), [90, 10]);
    assert_eq!(floors(100, &[idle(0, 80), idle(0, 80)]), [50, 50]);
}

#[test]
fn fractional_share_rounds_to_floor_and_ceiling() {
    let shares = Shares::divide(7, &[claim(1, 0, 9), claim(1, 0, 9)]);
    assert_eq!((shares.floor(0), shares.ceil(0)), (3, 4));
    assert!(shares.excess(0, 3) < 0 && shares.excess(0, 4) > 0 && shares.excess(0, 3) + shares.excess(1, 4) == 0);
    assert!((shares.lack(0, 0) - 1.0).abs() < 1e-9 && shares.lack(0, 4) == 0.0);
    let whole = Shares::divide(6, &[claim(7, 0, 9), claim(7, 0, 9)]);
    assert_eq!((whole.floor(0), whole.ceil(0), whole.excess(0, 3)), (3, 3, 0));
}

proptest! {
    /// Compares the shares with those at a level that the test computes separately, by bisection in floating point.
    #[test]
    fn shares_are_those_of_a_level_that_rises(
        chunks in 0u32..4000,
        claims in prop::collection::vec((1u32..1000, 0u32..100, 0u32..2000, any::<bool>()), 1..20),
    ) {
        let claims: Vec<_> = claims.into_iter().map(|(weight, least, more, first)| {
            Claim { weight, least, most: least + more, first }
        }).collect();
        let shares = Shares::divide(chunks, &claims);
        let least: u32 = claims.iter().map(|claim| claim.least).sum();
        let wanted: u32 = claims.iter().map(|claim| claim.most).sum();
        let target = f64::from(chunks.max(least).min(wanted));
        let urgent: u32 = claims.iter().map(|claim| if claim.first { claim.most } else { claim.least }).sum();
        let at = |level: f64, claim: &Claim| {
            let part = (level * f64::from(claim.weight)).clamp(claim.least.into(), claim.most.into());
            match (claim.first, urgent <= chunks) {
                (true, true) => claim.most.into(),
                (false, false) => claim.least.into(),
                _ => part,
            }
        };
        let (mut low, mut high) = (0.0, 1e6);
        for _ in 0..200 {
            let level = (low + high) / 2.0;
            let sum: f64 = claims.iter().map(|claim| at(level, claim)).sum();
            (low, high) = if sum < target { (level, high) } else { (low, level) };
        }
        let mut sum = 0.0;
        for (index, claim) in claims.iter().enumerate() {
            let exact = shares.parts[index] as f64 / shares.whole as f64;
            prop_assert!((exact - at(high, claim)).abs() < 1e-3, "{}: {}, expected {}", index, exact, at(high, claim));
            prop_assert!(shares.floor(index) <= shares.ceil(index) && shares.ceil(index) <= shares.floor(index) + 1);
            prop_assert!(f64::from(shares.floor(index)) <= exact && exact <= f64::from(shares.ceil(index)));
            sum += exact;
        }
        prop_assert!((sum - target).abs() < 1e-3);
    }
}
