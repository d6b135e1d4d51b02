//! Matrix elements, which are wrapping integers or floats.

use crate::{Bound, Random, Results, Slot};
use anyhow::Result;

pub(crate) trait Element: Copy + 'static {
    fn random(random: &mut Random, count: usize) -> Vec<Self>;
    fn slot(name: &'static str, input: &[Self]) -> Slot;
    fn plus(self, other: Self) -> Self;
    /// Returns the sum of products, computed on the CPU: modulo 2^32 for integers, and in double precision for floats.
    fn dot(products: impl Iterator<Item = (Self, Self)>) -> Self;
    /// Compares elements. Integers must be equal regardless of the bound.
    fn same(results: &Results, name: &str, expected: &[Self], bound: Bound) -> Result<u64>;
}

impl Element for u32 {
    fn random(random: &mut Random, count: usize) -> Vec<Self> {
        random.words(count)
    }

    fn slot(name: &'static str, input: &[Self]) -> Slot {
        Slot::words(name, input)
    }

    fn plus(self, other: Self) -> Self {
        self.wrapping_add(other)
    }

    fn dot(products: impl Iterator<Item = (Self, Self)>) -> Self {
        products.fold(0, |sum, (a, b)| sum.wrapping_add(a.wrapping_mul(b)))
    }

    fn same(results: &Results, name: &str, expected: &[Self], _: Bound) -> Result<u64> {
        results.same_words(name, expected)
    }
}

impl Element for f32 {
    fn random(random: &mut Random, count: usize) -> Vec<Self> {
        random.units(count)
    }

    fn slot(name: &'static str, input: &[Self]) -> Slot {
        Slot::floats(name, input)
    }

    fn plus(self, other: Self) -> Self {
        self + other
    }

    fn dot(products: impl Iterator<Item = (Self, Self)>) -> Self {
        products.map(|(a, b)| f64::from(a) * f64::from(b)).sum::<f64>() as Self
    }

    fn same(results: &Results, name: &str, expected: &[Self], bound: Bound) -> Result<u64> {
        results.same_floats(name, expected, bound)
    }
}
