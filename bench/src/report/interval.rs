//! 95 % confidence intervals of figures.
//!
//! Bootstrap: draws as many rounds as were measured, with replacement, computes the figure from them, and repeats this.
//! The interval is the middle 95 % of the results. The method does not assume a distribution, and works for any figure
//! computed from rounds. A measurement and its baseline in the same round are drawn together, so that changes in the
//! host's speed between rounds do not widen the interval.

use fastrand::Rng;
use serde_json::Value;

/// Number of bootstrap resamples.
const DRAWS: usize = 4000;
/// Fraction of the results discarded at each end.
const TAIL_FRACTION: f64 = 0.025;
/// Minimum number of rounds. With fewer rounds, nearly every draw repeats the measured rounds.
const MIN_ROUNDS: usize = 5;

/// Confidence interval of a figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Lower bound.
    pub low: f64,
    /// Upper bound.
    pub high: f64,
}

impl Interval {
    /// Returns the interval of a figure that is computed from rounds. `figure` gets round indices, which may repeat.
    /// Returns `None` if there are too few rounds, or if the figure cannot be computed.
    pub fn of_rounds(rounds: usize, figure: impl Fn(&[usize]) -> Option<f64>) -> Option<Self> {
        if rounds < MIN_ROUNDS {
            return None;
        }
        // Use a fixed seed, so that equal samples result in equal intervals.
        let mut random = Rng::with_seed(rounds as u64);
        let mut drawn = vec![0; rounds];
        let draw = |_| {
            drawn.fill_with(|| random.usize(..rounds));
            figure(&drawn).filter(|figure| figure.is_finite())
        };
        let mut figures = (0..DRAWS).map(draw).collect::<Option<Vec<f64>>>()?;
        figures.sort_by(f64::total_cmp);
        let outside = (TAIL_FRACTION * DRAWS as f64) as usize;
        Some(Self { low: figures[outside], high: figures[DRAWS - 1 - outside] })
    }

    /// Returns the interval of a figure that is computed from samples, such as their [median](super::median).
    pub fn from_samples(samples: &[f64], figure: impl Fn(&[f64]) -> Option<f64>) -> Option<Self> {
        Self::of_rounds(samples.len(), |rounds| figure(&picked(samples, rounds)))
    }

    /// Returns the confidence interval of the ratio between a figure of the samples and the same figure of a baseline
    /// measured in the same rounds.
    pub fn of_ratio(samples: &[f64], baseline: &[f64], figure: impl Fn(&[f64]) -> Option<f64>) -> Option<Self> {
        let rounds = samples.len().min(baseline.len());
        Self::of_rounds(rounds, |rounds| Some(figure(&picked(samples, rounds))? / figure(&picked(baseline, rounds))?))
    }

    /// Parses the interval in a row of a results file.
    pub(super) fn of_json(row: &Value) -> Option<Self> {
        Some(Self { low: row["low"].as_f64()?, high: row["high"].as_f64()? })
    }
}

/// Returns the samples of the given rounds.
pub fn picked(samples: &[f64], rounds: &[usize]) -> Vec<f64> {
    rounds.iter().filter_map(|round| samples.get(*round).copied()).collect()
}

/// Returns the mean of `values`, or `None` if `values` is empty.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::super::median;
    use super::*;

    /// Returns samples from a uniform distribution between 0 and 1.
    fn uniform(random: &mut Rng, count: usize) -> Vec<f64> {
        (0..count).map(|_| random.f64()).collect()
    }

    #[test]
    fn interval_has_the_true_value_in_about_95_of_100_measurements() {
        let mut random = Rng::with_seed(7);
        let inside = |figure: fn(&[f64]) -> Option<f64>, random: &mut Rng| {
            let has = |_: &i32| {
                let interval = Interval::from_samples(&uniform(random, 25), figure).unwrap();
                (interval.low..=interval.high).contains(&0.5)
            };
            (0..200).filter(has).count()
        };
        let (of_means, of_medians) = (inside(mean, &mut random), inside(median, &mut random));
        assert!((182..=198).contains(&of_means) && (182..=200).contains(&of_medians), "{of_means} {of_medians} of 200");
    }

    #[test]
    fn shared_round_variation_does_not_widen_ratio_interval() {
        let hosts: Vec<f64> = (0..12).map(|round| 1.0 + f64::from(round % 5)).collect();
        let slower: Vec<f64> = hosts.iter().map(|host| host * 1.05).collect();
        let interval = Interval::of_ratio(&slower, &hosts, mean).unwrap();
        assert!((interval.low - 1.05).abs() < 1e-9 && (interval.high - 1.05).abs() < 1e-9, "{interval:?}");
        let alone = Interval::from_samples(&hosts, mean).unwrap();
        assert!(alone.high - alone.low > 0.5, "{alone:?}");
    }

    #[test]
    fn too_few_samples_have_no_interval() {
        assert_eq!(Interval::from_samples(&[1.0, 2.0, 3.0, 4.0], median), None);
        assert_eq!(Interval::of_ratio(&[1.0; 9], &[1.0; 4], median), None);
        assert_eq!(Interval::from_samples(&[1.0; 5], |_| None), None);
        assert_eq!(Interval::of_ratio(&[1.0; 5], &[0.0; 5], median), None, "no ratio");
        assert_eq!(Interval::from_samples(&[3.0; 5], median), Some(Interval { low: 3.0, high: 3.0 }));
    }
}
