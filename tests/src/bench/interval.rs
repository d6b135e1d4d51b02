//! Intervals of figures: where 95 of 100 repetitions of a measurement would have its figure, as far as its samples tell.
//!
//! By the bootstrap: the same number of rounds is drawn from those that were measured, with repetition, and the figure computed
//! from them, again and again; the middle 95 % of what comes out are the interval. It supposes no distribution, and serves any
//! figure that is computed from rounds. What is compared in a round (ours and its baseline) is drawn together, so that a change
//! of the host's speed between rounds does not widen the interval.

use serde_json::Value;

/// Figures that are drawn.
const DRAWS: usize = 4000;
/// Part of them that is left out at each end.
const OUTSIDE: f64 = 0.025;
/// Rounds without which there is no interval: with fewer, what is drawn is almost always what was measured.
const LEAST: usize = 5;

/// Ends of an interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl Interval {
    /// The interval of a figure that is computed from rounds, given by their numbers; some may stand there several times.
    /// `None` with too few rounds, or when the figure cannot be computed.
    pub fn of_rounds(rounds: usize, figure: impl Fn(&[usize]) -> Option<f64>) -> Option<Self> {
        if rounds < LEAST {
            return None;
        }
        // The same draws each time, so that the same samples have the same interval.
        let mut random = Random(rounds as u64);
        let mut drawn = vec![0; rounds];
        let draw = |_| {
            drawn.fill_with(|| random.below(rounds));
            figure(&drawn).filter(|figure| figure.is_finite())
        };
        let mut figures = (0..DRAWS).map(draw).collect::<Option<Vec<f64>>>()?;
        figures.sort_by(f64::total_cmp);
        let outside = (OUTSIDE * DRAWS as f64) as usize;
        Some(Self { low: figures[outside], high: figures[DRAWS - 1 - outside] })
    }

    /// The interval of a figure of samples, as their [median](super::median).
    pub fn of(samples: &[f64], figure: impl Fn(&[f64]) -> Option<f64>) -> Option<Self> {
        Self::of_rounds(samples.len(), |rounds| figure(&picked(samples, rounds)))
    }

    /// The interval of a figure of samples over the same of a baseline's, one of each in a round.
    pub fn of_ratio(samples: &[f64], baseline: &[f64], figure: impl Fn(&[f64]) -> Option<f64>) -> Option<Self> {
        let rounds = samples.len().min(baseline.len());
        Self::of_rounds(rounds, |rounds| Some(figure(&picked(samples, rounds))? / figure(&picked(baseline, rounds))?))
    }

    /// As it stands in a file of figures.
    pub(super) fn of_json(row: &Value) -> Option<Self> {
        Some(Self { low: row["low"].as_f64()?, high: row["high"].as_f64()? })
    }
}

/// The samples of some rounds.
pub fn picked(samples: &[f64], rounds: &[usize]) -> Vec<f64> {
    rounds.iter().filter_map(|round| samples.get(*round).copied()).collect()
}

/// The mean of some measurements.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Numbers that look random (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::super::median;
    use super::*;

    /// Samples of a uniform distribution from 0 to 1.
    fn uniform(random: &mut Random, count: usize) -> Vec<f64> {
        (0..count).map(|_| random.below(1 << 20) as f64 / f64::from(1 << 20)).collect()
    }

    #[test]
    fn interval_has_the_true_value_in_about_95_of_100_measurements() {
        let mut random = Random(7);
        let inside = |figure: fn(&[f64]) -> Option<f64>, random: &mut Random| {
            let has = |_: &i32| {
                let interval = Interval::of(&uniform(random, 25), figure).unwrap();
                (interval.low..=interval.high).contains(&0.5)
            };
            (0..200).filter(has).count()
        };
        let (of_means, of_medians) = (inside(mean, &mut random), inside(median, &mut random));
        assert!((182..=198).contains(&of_means) && (182..=200).contains(&of_medians), "{of_means} {of_medians} of 200");
    }

    #[test]
    fn what_both_of_a_round_share_does_not_widen_the_interval_of_their_ratio() {
        let hosts: Vec<f64> = (0..12).map(|round| 1.0 + f64::from(round % 5)).collect();
        let slower: Vec<f64> = hosts.iter().map(|host| host * 1.05).collect();
        let interval = Interval::of_ratio(&slower, &hosts, mean).unwrap();
        assert!((interval.low - 1.05).abs() < 1e-9 && (interval.high - 1.05).abs() < 1e-9, "{interval:?}");
        let alone = Interval::of(&hosts, mean).unwrap();
        assert!(alone.high - alone.low > 0.5, "{alone:?}");
    }

    #[test]
    fn too_few_samples_have_no_interval() {
        assert_eq!(Interval::of(&[1.0, 2.0, 3.0, 4.0], median), None);
        assert_eq!(Interval::of_ratio(&[1.0; 9], &[1.0; 4], median), None);
        assert_eq!(Interval::of(&[1.0; 5], |_| None), None);
        assert_eq!(Interval::of_ratio(&[1.0; 5], &[0.0; 5], median), None, "no ratio");
        assert_eq!(Interval::of(&[3.0; 5], median), Some(Interval { low: 3.0, high: 3.0 }));
    }
}
