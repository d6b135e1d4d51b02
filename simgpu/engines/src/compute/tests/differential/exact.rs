//! Computes floating-point results by definition. Values are integers with several thousand bits, and the result is
//! found by searching the format's values.

use sm20::Rounding;
use std::cmp::Ordering;

/// Number of 64-bit words in an integer. Products of doubles range from 2^-2148 to 2^2048.
const WORDS: usize = 70;
/// Weight of bit 0, as an exponent of two.
const UNIT: i32 = -2200;

/// An IEEE 754 binary format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Format {
    pub(super) fraction: u32,
    pub(super) exponent: u32,
    pub(super) nan: u64,
}

pub(super) const HALF: Format = Format { fraction: 10, exponent: 5, nan: 0x7fff };
pub(super) const SINGLE: Format = Format { fraction: 23, exponent: 8, nan: 0x7fff_ffff };
pub(super) const DOUBLE: Format = Format { fraction: 52, exponent: 11, nan: 0xfff8_0000_0000_0000 };

impl Format {
    pub(super) fn sign(self) -> u64 {
        1 << (self.fraction + self.exponent)
    }

    pub(super) fn infinity(self) -> u64 {
        (self.sign() - 1) >> self.fraction << self.fraction
    }

    pub(super) fn is_nan(self, bits: u64) -> bool {
        bits & (self.sign() - 1) > self.infinity()
    }

    pub(super) fn is_denormal(self, bits: u64) -> bool {
        bits & self.infinity() == 0 && bits & (self.sign() - 1) != 0
    }

    pub(super) fn flushed(self, bits: u64) -> u64 {
        if self.is_denormal(bits) { bits & self.sign() } else { bits }
    }

    /// Returns the value as a double, which can represent every value of every format.
    pub(super) fn value(self, bits: u64) -> f64 {
        let fraction = (bits & ((1 << self.fraction) - 1)) as f64 / (1u64 << self.fraction) as f64;
        let biased = (bits >> self.fraction & ((1 << self.exponent) - 1)) as i32;
        let bias = (1 << (self.exponent - 1)) - 1;
        let magnitude = match biased {
            _ if self == DOUBLE => return f64::from_bits(bits),
            0 => fraction * 2f64.powi(1 - bias),
            _ if biased == (1 << self.exponent) - 1 => {
                if fraction == 0.0 {
                    f64::INFINITY
                } else {
                    f64::NAN
                }
            }
            _ => (1.0 + fraction) * 2f64.powi(biased - bias),
        };
        if bits & self.sign() != 0 { -magnitude } else { magnitude }
    }
}

/// An unrounded non-negative number.
#[derive(Clone, PartialEq, Eq)]
struct Magnitude([u64; WORDS]);

impl Magnitude {
    /// Returns mantissa * 2^exponent.
    fn new(mantissa: u128, exponent: i32) -> Self {
        let mut words = [0; WORDS];
        let at = usize::try_from(exponent - UNIT).expect("not below the least unit");
        let (word, shift) = (at / 64, at % 64);
        let (low, high) = (mantissa as u64, (mantissa >> 64) as u64);
        words[word] |= low << shift;
        words[word + 1] |= high << shift | if shift == 0 { 0 } else { low >> (64 - shift) };
        words[word + 2] |= if shift == 0 { 0 } else { high >> (64 - shift) };
        Self(words)
    }

    /// Returns the value of a non-negative float. Converts infinity to the next power of two.
    fn from_bits(bits: u64, format: Format) -> Self {
        let (mantissa, exponent) = parts(bits, format);
        Self::new(u128::from(mantissa), exponent)
    }

    fn plus(&self, other: &Self) -> Self {
        let (mut words, mut carry) = ([0; WORDS], 0u128);
        for (index, word) in words.iter_mut().enumerate() {
            carry += u128::from(self.0[index]) + u128::from(other.0[index]);
            *word = carry as u64;
            carry >>= 64;
        }
        Self(words)
    }

    fn minus(&self, smaller: &Self) -> Self {
        let (mut words, mut borrow) = ([0; WORDS], false);
        for (index, word) in words.iter_mut().enumerate() {
            let (first, one) = self.0[index].overflowing_sub(smaller.0[index]);
            let (second, two) = first.overflowing_sub(u64::from(borrow));
            (*word, borrow) = (second, one || two);
        }
        Self(words)
    }

    fn order(&self, other: &Self) -> Ordering {
        self.0.iter().rev().cmp(other.0.iter().rev())
    }

    fn is_zero(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }
}

/// Returns the mantissa and the exponent of a finite number's magnitude.
fn parts(bits: u64, format: Format) -> (u64, i32) {
    let fraction = bits & ((1 << format.fraction) - 1);
    let biased = (bits >> format.fraction & ((1 << format.exponent) - 1)) as i32;
    let least = 2 - (1 << (format.exponent - 1)) - format.fraction as i32;
    if biased == 0 { (fraction, least) } else { (fraction | 1 << format.fraction, least + biased - 1) }
}

/// Rounds a number: finds the greatest float not above the number by bisection, and returns this float or its
/// successor.
fn rounded(negative: bool, number: &Magnitude, format: Format, rounding: Rounding) -> u64 {
    let sign = if negative { format.sign() } else { 0 };
    let (mut below, mut above) = (0, format.infinity() + 1);
    while above - below > 1 {
        let middle = (below + above) / 2;
        if Magnitude::from_bits(middle, format).order(number) == Ordering::Greater {
            above = middle
        } else {
            below = middle
        }
    }
    let exact = Magnitude::from_bits(below, format);
    if below != format.infinity() && exact == *number {
        return sign | below;
    }
    let away = match rounding {
        Rounding::Zero => false,
        Rounding::Down => negative,
        Rounding::Up => !negative,
        Rounding::Nearest if below == format.infinity() => true,
        Rounding::Nearest => {
            let next = Magnitude::from_bits(below + 1, format);
            match number.minus(&exact).order(&next.minus(number)) {
                Ordering::Less => false,
                Ordering::Greater => true,
                Ordering::Equal => below & 1 != 0,
            }
        }
    };
    // Beyond the greatest finite number, rounding away from zero results in infinity.
    let below = below.min(format.infinity() - 1);
    sign | if away { below + 1 } else { below }
}

/// Computes a * b * 2^scale + c with a single rounding.
pub(super) fn fma(a: u64, b: u64, scale: i32, c: u64, format: Format, rounding: Rounding) -> u64 {
    let special = |bits: u64| bits & format.infinity() == format.infinity();
    if [a, b, c].into_iter().any(special) {
        // Host arithmetic is exact here, because the factors cannot overflow.
        let factor = |bits: u64| {
            let value = format.value(bits);
            if value.is_finite() && value != 0.0 { value.signum() } else { value }
        };
        let result = factor(a) * factor(b) + if special(c) { format.value(c) } else { 0.0 };
        return if result.is_nan() {
            format.nan
        } else {
            format.infinity() | if result < 0.0 { format.sign() } else { 0 }
        };
    }
    let ((x, ex), (y, ey)) = (parts(a, format), parts(b, format));
    let (product, negative) = (u128::from(x) * u128::from(y), (a ^ b) & format.sign() != 0);
    let product = if product == 0 { Magnitude::new(0, 0) } else { Magnitude::new(product, ex + ey + scale) };
    sum(
        negative,
        product,
        c & format.sign() != 0,
        Magnitude::from_bits(c & (format.sign() - 1), format),
        format,
        rounding,
    )
}

fn sum(na: bool, a: Magnitude, nb: bool, b: Magnitude, format: Format, rounding: Rounding) -> u64 {
    if na == nb {
        let sum = a.plus(&b);
        return if sum.is_zero() { if na { format.sign() } else { 0 } } else { rounded(na, &sum, format, rounding) };
    }
    match a.order(&b) {
        Ordering::Greater => rounded(na, &a.minus(&b), format, rounding),
        Ordering::Less => rounded(nb, &b.minus(&a), format, rounding),
        Ordering::Equal => {
            if rounding == Rounding::Down {
                format.sign()
            } else {
                0
            }
        }
    }
}

/// Computes a + b.
pub(super) fn add(a: u64, b: u64, format: Format, rounding: Rounding) -> u64 {
    let one = (format.infinity() >> 1) & format.infinity();
    fma(a, one, 0, b, format, rounding)
}

/// Computes a * b * 2^scale.
pub(super) fn mul(a: u64, b: u64, scale: i32, format: Format, rounding: Rounding) -> u64 {
    // A zero with the product's sign does not change the result.
    fma(a, b, scale, (a ^ b) & format.sign(), format, rounding)
}

/// Converts a number to another format.
pub(super) fn convert(bits: u64, from: Format, to: Format, rounding: Rounding) -> u64 {
    let sign = if bits & from.sign() != 0 { to.sign() } else { 0 };
    match bits & (from.sign() - 1) {
        _ if from.is_nan(bits) => to.nan,
        0 => sign,
        magnitude if magnitude == from.infinity() => sign | to.infinity(),
        magnitude => rounded(sign != 0, &Magnitude::from_bits(magnitude, from), to, rounding),
    }
}

/// Converts an integer to a float.
pub(super) fn from_integer(value: i128, to: Format, rounding: Rounding) -> u64 {
    if value == 0 { 0 } else { rounded(value < 0, &Magnitude::new(value.unsigned_abs(), 0), to, rounding) }
}

#[test]
fn definition_agrees_with_the_host() {
    let mut random = super::super::rig::Random(77);
    for _ in 0..2000 {
        let [a, b, c] = std::array::from_fn(|_| {
            let bits = random.next();
            let near = bits & 0x803f_ffff_ffff_ffff | 0x3fc0_0000_0000_0000;
            if random.next() & 1 == 0 { bits } else { near }
        });
        let (x, y, z) = (f64::from_bits(a), f64::from_bits(b), f64::from_bits(c));
        let canonical = |value: f64| if value.is_nan() { DOUBLE.nan } else { value.to_bits() };
        assert_eq!(fma(a, b, 0, c, DOUBLE, Rounding::Nearest), canonical(x.mul_add(y, z)), "{x} {y} {z}");
        assert_eq!(add(a, b, DOUBLE, Rounding::Nearest), canonical(x + y), "{x} {y}");
        let single = |bits: u64| f32::from_bits(bits as u32);
        let product = single(a) * single(b);
        let expected = if product.is_nan() { 0x7fff_ffff } else { product.to_bits() };
        assert_eq!(mul(a & 0xffff_ffff, b & 0xffff_ffff, 0, SINGLE, Rounding::Nearest), u64::from(expected));
    }
}
