//! What part of an engine's time belongs to whom.

use crate::config::{PERMILLE, VgpuParams};

/// Parts of the whole in which shares are given.
pub const WHOLE: u64 = 1_000_000;

/// Shares of those that compete, in parts of [`WHOLE`], in their order: by weight, but no one less than its guarantee
/// or more than its cap. What a cap leaves goes to the others by weight; the shares are together at most the
/// whole, and less only when caps leave some or by rounding. Guarantees that are together more than the whole shrink alike.
pub fn shares(of: &[VgpuParams]) -> Vec<u64> {
    if of.iter().all(|params| params.guarantee_permille == 0 && params.cap_permille == PERMILLE) {
        let weights: u64 = of.iter().map(|params| u64::from(params.weight)).sum();
        return of.iter().map(|params| WHOLE * u64::from(params.weight) / weights).collect();
    }
    let promised: u64 = of.iter().map(|params| part(params.guarantee_permille)).sum();
    let guarantee = |params: &VgpuParams| match promised {
        0..=WHOLE => part(params.guarantee_permille),
        _ => part(params.guarantee_permille) * WHOLE / promised,
    };
    // Those that are held at a bound, with what they have there.
    let mut fixed: Vec<Option<u64>> = vec![None; of.len()];
    loop {
        let taken: u64 = fixed.iter().flatten().sum();
        let rest = WHOLE.saturating_sub(taken);
        let loose = || of.iter().zip(&fixed).filter(|(_, fixed)| fixed.is_none());
        let weights: u64 = loose().map(|(params, _)| u64::from(params.weight)).sum();
        let share = |params: &VgpuParams| (rest * u64::from(params.weight)).checked_div(weights).unwrap_or(0);
        // Who is to be held, and by how much that changes what is left for the others: the larger side first, as holding
        // it can bring those of the other side within their bounds.
        let below: u64 = loose().map(|(params, _)| guarantee(params).saturating_sub(share(params))).sum();
        let above: u64 = loose().map(|(params, _)| share(params).saturating_sub(part(params.cap_permille))).sum();
        if below == 0 && above == 0 {
            return of.iter().zip(&fixed).map(|(params, fixed)| fixed.unwrap_or_else(|| share(params))).collect();
        }
        let held: Vec<Option<u64>> = of
            .iter()
            .zip(&fixed)
            .map(|(params, fixed)| match fixed {
                Some(held) => Some(*held),
                None if below >= above && guarantee(params) > share(params) => Some(guarantee(params)),
                None if below < above && share(params) > part(params.cap_permille) => Some(part(params.cap_permille)),
                None => None,
            })
            .collect();
        // Each round holds at least one more, so there are at most as many rounds as vGPUs.
        fixed = held;
    }
}

fn part(permille: u32) -> u64 {
    u64::from(permille) * (WHOLE / u64::from(PERMILLE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn params(weight: u32, guarantee_permille: u32, cap_permille: u32) -> VgpuParams {
        VgpuParams { weight, guarantee_permille, cap_permille, ..VgpuParams::default() }
    }

    #[test]
    fn weights_alone_divide_the_whole() {
        let of = [1, 15, 84].map(VgpuParams::weight);
        assert_eq!(shares(&of), [10_000, 150_000, 840_000]);
        assert!(shares(&[]).is_empty());
    }

    #[test]
    fn a_guarantee_takes_from_the_others_by_weight() {
        assert_eq!(
            shares(&[params(1, 500, 1000), params(1, 0, 1000), params(3, 0, 1000)]),
            [500_000, 125_000, 375_000]
        );
    }

    #[test]
    fn what_a_cap_leaves_goes_to_the_others() {
        assert_eq!(shares(&[params(8, 0, 200), params(1, 0, 1000), params(1, 0, 1000)]), [200_000, 400_000, 400_000]);
        assert_eq!(shares(&[params(1, 0, 300)]), [300_000]);
    }

    #[test]
    fn guarantees_beyond_the_whole_shrink_alike() {
        assert_eq!(shares(&[params(1, 900, 1000), params(9, 900, 1000)]), [500_000, 500_000]);
    }

    proptest! {
        #[test]
        fn bounds_hold_and_nothing_is_left_that_someone_may_have(
            of in prop::collection::vec((1u32..=10_000, 0u32..=300, 0u32..=1000), 1..12)
        ) {
            let of: Vec<_> = of.into_iter().map(|(w, g, c)| params(w, g, c.max(g).max(1))).collect();
            let shares = shares(&of);
            let sum: u64 = shares.iter().sum();
            prop_assert!(sum <= WHOLE);
            let promised: u64 = of.iter().map(|p| part(p.guarantee_permille)).sum();
            for (params, share) in of.iter().zip(&shares) {
                prop_assert!(*share <= part(params.cap_permille));
                if promised <= WHOLE {
                    prop_assert!(*share >= part(params.guarantee_permille), "{params:?} has {share}");
                }
            }
            if shares.iter().zip(&of).any(|(share, params)| *share < part(params.cap_permille)) {
                prop_assert!(sum + of.len() as u64 >= WHOLE, "{sum}");
            }
        }
    }
}
