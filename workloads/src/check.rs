//! Compares results.

use anyhow::{Result, ensure};

/// Error bound of a float.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// Bound relative to the expected value.
    pub relative: f32,
    /// Absolute bound, added to the relative bound.
    pub absolute: f32,
}

impl Bound {
    /// Requires identical bits, except for the sign of zero.
    pub const EXACT: Self = Self { relative: 0.0, absolute: 0.0 };
}

/// Compares words bit for bit. Returns the number of bytes compared.
///
/// # Errors
/// Returns an error if words differ. The error contains the first difference and the number of other differences.
pub fn compare_words(what: &str, got: &[u32], expected: &[u32]) -> Result<u64> {
    compare(what, got, expected, |got, expected| got == expected)
}

/// Compares floats within a bound. Returns the number of bytes compared.
///
/// # Errors
/// Returns an error if values differ. The error contains the first difference and the number of other differences. A
/// NaN differs from every value.
pub fn compare_floats(what: &str, got: &[f32], expected: &[f32], bound: Bound) -> Result<u64> {
    compare(what, got, expected, |got, expected| {
        (got - expected).abs() <= bound.relative * expected.abs() + bound.absolute
    })
}

fn compare<T: Copy + std::fmt::Debug>(
    what: &str,
    got: &[T],
    expected: &[T],
    same: impl Fn(T, T) -> bool,
) -> Result<u64> {
    ensure!(got.len() == expected.len(), "{what} has {} values instead of {}", got.len(), expected.len());
    let mut wrong = got.iter().zip(expected).enumerate().filter(|(_, (got, expected))| !same(**got, **expected));
    if let Some((at, (got, expected))) = wrong.next() {
        let more = wrong.count();
        anyhow::bail!("{what}[{at}] is {got:?} instead of {expected:?}, and {more} more are wrong");
    }
    Ok(size_of_val(got) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compare_names_the_differing_word() {
        assert_eq!(compare_words("x", &[1, 2], &[1, 2]).expect("same"), 8);
        let error = compare_words("x", &[1, 2, 3], &[1, 3, 4]).expect_err("differ").to_string();
        assert_eq!(error, "x[1] is 2 instead of 3, and 1 more are wrong");
        assert!(compare_words("x", &[1], &[1, 2]).is_err());
    }

    #[test]
    fn floats_have_a_bound_and_must_be_numbers() {
        let bound = Bound { relative: 1e-3, absolute: 0.0 };
        compare_floats("x", &[1000.5], &[1000.0], bound).expect("within");
        compare_floats("x", &[1002.0], &[1000.0], bound).expect_err("beyond");
        compare_floats("x", &[f32::NAN], &[1000.0], bound).expect_err("no number");
        compare_floats("x", &[-0.0], &[0.0], Bound::EXACT).expect("zero is zero");
    }
}
