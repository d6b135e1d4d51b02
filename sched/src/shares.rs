//! Division of an engine's time into shares.

use crate::config::PERMILLE;
use crate::params::VgpuParams;

/// A share of 100 %, in parts per million.
pub const WHOLE_SHARE_PPM: u64 = 1_000_000;

/// Weight and bounds of one claimant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) weight: u32,
    /// Minimum part, regardless of the weight.
    pub(crate) least: u64,
    /// Maximum part.
    pub(crate) most: u64,
}

impl Claim {
    /// Converts a vGPU's settings to a claim on a whole of `whole` parts.
    pub(crate) fn from_params(params: &VgpuParams, whole: u64) -> Self {
        Self {
            weight: params.weight,
            least: part(whole, params.guarantee_permille),
            most: part(whole, params.cap_permille),
        }
    }
}

/// Returns each competing vGPU's share, in parts of [`WHOLE_SHARE_PPM`]. Shares are proportional to the weights, but
/// each is at least the vGPU's guarantee and at most its cap. The other vGPUs share the rest by weight. The sum is
/// [`WHOLE_SHARE_PPM`], or lower because of caps or rounding. If the guarantees exceed the whole in total, they are
/// reduced proportionally.
pub fn shares(of: &[VgpuParams]) -> Vec<u64> {
    let claims: Vec<_> = of.iter().map(|params| Claim::from_params(params, WHOLE_SHARE_PPM)).collect();
    divide(WHOLE_SHARE_PPM, &claims)
}

/// Divides `whole` among claims according to the rules of [`shares`].
pub(crate) fn divide(whole: u64, of: &[Claim]) -> Vec<u64> {
    if of.iter().all(|claim| claim.least == 0 && claim.most >= whole) {
        let weights: u64 = of.iter().map(|claim| u64::from(claim.weight)).sum();
        return of.iter().map(|claim| scale(whole, claim.weight.into(), weights)).collect();
    }
    // A guarantee above the cap is reduced to the cap.
    let promise = |claim: &Claim| claim.least.min(claim.most);
    let promised = of.iter().map(promise).fold(0u64, u64::saturating_add);
    let least = |claim: &Claim| if promised <= whole { promise(claim) } else { scale(whole, promise(claim), promised) };
    // Part of each claim that has been fixed at one of its bounds.
    let mut fixed: Vec<Option<u64>> = vec![None; of.len()];
    loop {
        let taken: u64 = fixed.iter().flatten().sum();
        let rest = whole.saturating_sub(taken);
        let loose = || of.iter().zip(&fixed).filter(|(_, fixed)| fixed.is_none());
        let weights: u64 = loose().map(|(claim, _)| u64::from(claim.weight)).sum();
        let share = |claim: &Claim| scale(rest, claim.weight.into(), weights);
        // Compute the total violation of the lower bounds and of the upper bounds. First fix the claims on the side
        // with the larger violation, because the remaining claims may then be within their bounds.
        let below: u64 = loose().map(|(claim, _)| least(claim).saturating_sub(share(claim))).sum();
        let above: u64 = loose().map(|(claim, _)| share(claim).saturating_sub(claim.most)).sum();
        if below == 0 && above == 0 {
            return of.iter().zip(&fixed).map(|(claim, fixed)| fixed.unwrap_or_else(|| share(claim))).collect();
        }
        let held: Vec<Option<u64>> = of
            .iter()
            .zip(&fixed)
            .map(|(claim, fixed)| match fixed {
                Some(held) => Some(*held),
                None if below >= above && least(claim) > share(claim) => Some(least(claim)),
                None if below < above && share(claim) > claim.most => Some(claim.most),
                None => None,
            })
            .collect();
        // Each round fixes at least one claim, which bounds the number of rounds.
        fixed = held;
    }
}

/// Returns `of * part / whole`, or 0 if `whole` is 0, which means that nothing remains to be divided.
pub(crate) fn scale(of: u64, part: u64, whole: u64) -> u64 {
    let scaled = (u128::from(of) * u128::from(part)).checked_div(whole.into()).unwrap_or(0);
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

fn part(whole: u64, permille: u32) -> u64 {
    scale(whole, permille.into(), PERMILLE.into())
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
    fn share_above_cap_goes_to_other_vgpus() {
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
            prop_assert!(sum <= WHOLE_SHARE_PPM);
            let promised: u64 = of.iter().map(|p| part(WHOLE_SHARE_PPM, p.guarantee_permille)).sum();
            for (params, share) in of.iter().zip(&shares) {
                prop_assert!(*share <= part(WHOLE_SHARE_PPM, params.cap_permille));
                if promised <= WHOLE_SHARE_PPM {
                    prop_assert!(*share >= part(WHOLE_SHARE_PPM, params.guarantee_permille), "{params:?}: {share}");
                }
            }
            if shares.iter().zip(&of).any(|(share, params)| *share < part(WHOLE_SHARE_PPM, params.cap_permille)) {
                prop_assert!(sum + of.len() as u64 >= WHOLE_SHARE_PPM, "{sum}");
            }
        }
    }
}
