//! Computes the number of card chunks to which each VM is entitled, by weighted max-min fairness.

/// Bounds and weight of one VM's share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    /// Weight, which is at least 1.
    pub(super) weight: u32,
    /// Guaranteed number of chunks.
    pub(super) least: u32,
    /// Maximum number of chunks that the VM can use, which is at least the guarantee.
    pub(super) most: u32,
    /// True if this claim takes priority over claims that are not `first`.
    pub(super) first: bool,
}

/// Exact shares of the card's chunks. They are not rounded, so that no chunk moves only because of rounding.
#[derive(Debug)]
pub(super) struct Shares {
    /// Common denominator of the shares. `parts` contains the numerators.
    whole: i128,
    parts: Vec<i128>,
}

impl Shares {
    /// Divides `chunks` chunks among the claims. Each claim gets at least its `least` and at most its `most`. Within
    /// these bounds, claims grow in proportion to their weights until all chunks are assigned (water filling): the
    /// `first` claims up to their `most`, and then the others. The sum of the shares is `chunks`, or the sum of all
    /// `most` if that is lower. If `chunks` is lower than the sum of all `least`, each claim gets its `least`. The
    /// chunk table prevents this case.
    pub(super) fn divide(chunks: u32, claims: &[Claim]) -> Self {
        let sum = |of: fn(&Claim) -> u32| claims.iter().map(|claim| i128::from(of(claim))).sum::<i128>();
        let (chunks, urgent) = (i128::from(chunks), sum(|claim| if claim.first { claim.most } else { claim.least }));
        // Either the `first` claims get their maximum and the level applies to the other claims, or the other claims
        // get their minimum and the level applies to the `first` claims.
        let rest = urgent <= chunks;
        let bounds: Vec<(i128, i128)> = claims
            .iter()
            .map(|claim| {
                let (least, most) = (claim.least.into(), claim.most.max(claim.least).into());
                match (claim.first, rest) {
                    (true, true) => (most, most),
                    (false, false) => (least, least),
                    _ => (least, most),
                }
            })
            .collect();
        let (level, whole) = level(chunks, claims, &bounds);
        let parts = claims
            .iter()
            .zip(&bounds)
            .map(|(claim, &(least, most))| (level * i128::from(claim.weight)).clamp(least * whole, most * whole));
        Self { whole, parts: parts.collect() }
    }

    /// Returns the excess of `used` chunks over the share of claim `at`, in units of 1/`whole` chunk. It may be
    /// negative. Results for different claims are comparable.
    pub(super) fn excess(&self, at: usize, used: u32) -> i128 {
        i128::from(used) * self.whole - self.parts[at]
    }

    /// Returns the number of whole chunks in a non-negative excess.
    pub(super) fn chunks(&self, excess: i128) -> u32 {
        u32::try_from(excess / self.whole).unwrap_or(u32::MAX)
    }

    /// Returns the missing fraction of claim `at`'s share, from 0 to 1.
    pub(super) fn lack(&self, at: usize, used: u32) -> f64 {
        let (part, lack) = (self.parts[at], -self.excess(at, used));
        if part > 0 { lack.max(0) as f64 / part as f64 } else { 0.0 }
    }

    /// Returns the share of claim `at`, rounded down.
    pub(super) fn floor(&self, at: usize) -> u32 {
        self.parts[at].div_euclid(self.whole) as u32
    }

    /// Returns the share of claim `at`, rounded up.
    pub(super) fn ceil(&self, at: usize) -> u32 {
        self.floor(at) + u32::from(self.parts[at].rem_euclid(self.whole) > 0)
    }
}

/// Returns the level per unit of weight, as a fraction, at which the bounded shares add up to `chunks`.
fn level(chunks: i128, claims: &[Claim], bounds: &[(i128, i128)]) -> (i128, i128) {
    /// At the level `at.0 / at.1`, the sum of the constant shares changes by `fixed`, and the growth rate of the other
    /// shares changes by `slope`.
    struct Bend {
        at: (i128, i128),
        fixed: i128,
        slope: i128,
    }
    let mut bends = Vec::with_capacity(2 * claims.len());
    for (claim, &(least, most)) in claims.iter().zip(bounds) {
        let weight = i128::from(claim.weight);
        bends.push(Bend { at: (least, weight), fixed: -least, slope: weight });
        bends.push(Bend { at: (most, weight), fixed: most, slope: -weight });
    }
    // The sort is stable, so a claim with equal bounds starts growing before it stops.
    bends.sort_by(|a, b| (a.at.0 * b.at.1).cmp(&(b.at.0 * a.at.1)));
    let (mut fixed, mut slope) = (bounds.iter().map(|&(least, _)| least).sum::<i128>(), 0);
    let highest = bends.last().map_or((0, 1), |bend| bend.at);
    for bend in &bends {
        if fixed * bend.at.1 + slope * bend.at.0 >= chunks * bend.at.1 {
            // If no share grows here, the sum of the minimum shares is at least `chunks`.
            return if slope > 0 { (chunks - fixed, slope) } else { (0, 1) };
        }
        fixed += bend.fixed;
        slope += bend.slope;
    }
    highest
}

#[cfg(test)]
mod tests;
