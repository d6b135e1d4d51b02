//! Floating-point arithmetic on bit patterns, for rounding modes that host arithmetic does not support.
//!
//! Every result is computed exactly and rounded once. NaN results are the hardware's canonical NaN.

use sm20::Rounding;

/// An IEEE 754 binary format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Format {
    fraction: u32,
    exponent: u32,
    /// The canonical NaN.
    pub(crate) nan: u64,
}

/// Half precision.
pub(crate) const F16: Format = Format { fraction: 10, exponent: 5, nan: 0x7fff };
/// Single precision.
pub(crate) const F32: Format = Format { fraction: 23, exponent: 8, nan: 0x7fff_ffff };
/// Double precision. GUESS: the canonical NaN is the one in NVIDIA's math library.
pub(crate) const F64: Format = Format { fraction: 52, exponent: 11, nan: 0xfff8_0000_0000_0000 };

impl Format {
    const fn bias(self) -> i32 {
        (1 << (self.exponent - 1)) - 1
    }

    const fn sign_bit(self) -> u64 {
        1 << (self.fraction + self.exponent)
    }

    const fn infinity(self) -> u64 {
        ((1 << self.exponent) - 1) << self.fraction
    }

    /// Returns the bits of 1.0.
    pub(crate) const fn one(self) -> u64 {
        (self.bias() as u64) << self.fraction
    }

    /// Flushes a denormal to zero of the same sign.
    pub(crate) const fn flush(self, bits: u64) -> u64 {
        if bits & self.infinity() == 0 { bits & self.sign_bit() } else { bits }
    }

    /// Returns true if the bits encode a NaN.
    pub(crate) const fn is_nan(self, bits: u64) -> bool {
        bits & !self.sign_bit() > self.infinity()
    }

    /// Returns true if the sign bit is set.
    pub(crate) const fn is_negative(self, bits: u64) -> bool {
        bits & self.sign_bit() != 0
    }

    /// Takes the absolute value if `absolute` is true, and then negates the value if `negate` is true.
    pub(crate) const fn modified(self, bits: u64, absolute: bool, negate: bool) -> u64 {
        let bits = if absolute { bits & !self.sign_bit() } else { bits };
        if negate { bits ^ self.sign_bit() } else { bits }
    }

    /// Clamps a number to the range 0 to 1. Converts NaN to 0.
    pub(crate) const fn saturated(self, bits: u64) -> u64 {
        if self.is_nan(bits) || bits & self.sign_bit() != 0 {
            0
        } else if bits > self.one() {
            self.one()
        } else {
            bits
        }
    }
}

/// An unrounded number: `mantissa` × 2^`exponent`.
#[derive(Clone, Copy, Debug)]
struct Exact {
    negative: bool,
    mantissa: u128,
    exponent: i32,
    /// True if there are nonzero bits below the mantissa.
    sticky: bool,
}

#[derive(Clone, Copy, Debug)]
enum Number {
    Nan,
    Infinity { negative: bool },
    Finite(Exact),
}

fn unpack(bits: u64, format: Format) -> Number {
    let negative = bits & format.sign_bit() != 0;
    let fraction = bits & ((1 << format.fraction) - 1);
    let biased = bits >> format.fraction & ((1 << format.exponent) - 1);
    if biased == (1 << format.exponent) - 1 {
        return if fraction == 0 { Number::Infinity { negative } } else { Number::Nan };
    }
    let mantissa = if biased == 0 { fraction } else { fraction | 1 << format.fraction };
    let exponent = (biased as i32).max(1) - format.bias() - format.fraction as i32;
    Number::Finite(Exact { negative, mantissa: u128::from(mantissa), exponent, sticky: false })
}

/// Returns true if a magnitude between two adjacent representable values is rounded up.
fn rounds_up(rounding: Rounding, negative: bool, odd: bool, order_to_half: std::cmp::Ordering, inexact: bool) -> bool {
    match rounding {
        Rounding::Nearest => match order_to_half {
            std::cmp::Ordering::Greater => true,
            std::cmp::Ordering::Equal => odd,
            std::cmp::Ordering::Less => false,
        },
        Rounding::Down => inexact && negative,
        Rounding::Up => inexact && !negative,
        Rounding::Zero => false,
    }
}

/// Returns the rounded magnitude in units of 2^`unit`. The result must fit in 128 bits.
fn to_units(number: Exact, unit: i32, rounding: Rounding) -> u128 {
    use std::cmp::Ordering;
    let Exact { negative, mantissa, exponent, sticky } = number;
    let shift = unit - exponent;
    let (units, rest, half) = match shift {
        ..=0 => (mantissa << shift.unsigned_abs().min(127), 0, 1),
        1..=127 => (mantissa >> shift, mantissa & ((1 << shift) - 1), 1 << (shift - 1)),
        // The mantissa has fewer than 127 bits, so it is less than half a unit.
        _ => (0, u128::from(mantissa != 0), 2),
    };
    let order = match rest.cmp(&half) {
        Ordering::Equal if sticky => Ordering::Greater,
        order => order,
    };
    let inexact = rest != 0 || sticky;
    units + u128::from(rounds_up(rounding, negative, units & 1 != 0, order, inexact))
}

fn pack(number: Exact, format: Format, rounding: Rounding) -> u64 {
    let sign = if number.negative { format.sign_bit() } else { 0 };
    if number.mantissa == 0 {
        return sign;
    }
    let top = number.exponent + 127 - number.mantissa.leading_zeros() as i32;
    let mut unit = top.max(1 - format.bias()) - format.fraction as i32;
    let mut units = to_units(number, unit, rounding) as u64;
    if units >> (format.fraction + 1) != 0 {
        units >>= 1;
        unit += 1;
    }
    if units >> format.fraction == 0 {
        return sign | units;
    }
    let biased = unit + format.fraction as i32 + format.bias();
    if biased >= (1 << format.exponent) - 1 {
        let to_infinity = match rounding {
            Rounding::Nearest => true,
            Rounding::Down => number.negative,
            Rounding::Up => !number.negative,
            Rounding::Zero => false,
        };
        return sign | (format.infinity() - u64::from(!to_infinity));
    }
    sign | (biased as u64) << format.fraction | units & ((1 << format.fraction) - 1)
}

/// Computes a * b + c.
pub(crate) fn fma(a: u64, b: u64, c: u64, format: Format, rounding: Rounding) -> u64 {
    let infinity = |negative| if negative { format.infinity() | format.sign_bit() } else { format.infinity() };
    let (a, b, c) = (unpack(a, format), unpack(b, format), unpack(c, format));
    let product = match (a, b) {
        (Number::Nan, _) | (_, Number::Nan) => return format.nan,
        (Number::Infinity { negative: a }, Number::Infinity { negative: b }) => Number::Infinity { negative: a != b },
        (Number::Infinity { negative }, Number::Finite(finite))
        | (Number::Finite(finite), Number::Infinity { negative }) => {
            if finite.mantissa == 0 {
                return format.nan;
            }
            Number::Infinity { negative: negative != finite.negative }
        }
        (Number::Finite(a), Number::Finite(b)) => Number::Finite(multiply(a, b)),
    };
    match (product, c) {
        (_, Number::Nan) | (Number::Nan, _) => format.nan,
        (Number::Infinity { negative: a }, Number::Infinity { negative: b }) => {
            if a == b {
                infinity(a)
            } else {
                format.nan
            }
        }
        (Number::Infinity { negative }, _) | (_, Number::Infinity { negative }) => infinity(negative),
        (Number::Finite(a), Number::Finite(b)) => pack(sum(a, b, rounding), format, rounding),
    }
}

/// Computes a + b.
pub(crate) fn add(a: u64, b: u64, format: Format, rounding: Rounding) -> u64 {
    fma(a, format.one(), b, format, rounding)
}

/// Computes a * b * 2^scale.
pub(crate) fn mul(a: u64, b: u64, scale: i32, format: Format, rounding: Rounding) -> u64 {
    match (unpack(a, format), unpack(b, format)) {
        (Number::Finite(a), Number::Finite(b)) => {
            let mut product = multiply(a, b);
            product.exponent += scale;
            pack(product, format, rounding)
        }
        // The product is an infinity or a NaN, and adding -0 does not change it.
        _ => fma(a, b, format.sign_bit(), format, rounding),
    }
}

fn multiply(a: Exact, b: Exact) -> Exact {
    Exact {
        negative: a.negative != b.negative,
        mantissa: a.mantissa * b.mantissa,
        exponent: a.exponent + b.exponent,
        sticky: false,
    }
}

fn sum(a: Exact, b: Exact, rounding: Rounding) -> Exact {
    match (a.mantissa == 0, b.mantissa == 0) {
        (true, true) => {
            let negative = if a.negative == b.negative { a.negative } else { rounding == Rounding::Down };
            return Exact { negative, ..a };
        }
        (true, false) => return b,
        (false, true) => return a,
        (false, false) => {}
    }
    // Leave headroom for a carry at the top, and for the relevant bits of the smaller number at the bottom.
    let normal = |x: Exact| {
        let shift = x.mantissa.leading_zeros() - 3;
        Exact { mantissa: x.mantissa << shift, exponent: x.exponent - shift as i32, ..x }
    };
    let (a, b) = (normal(a), normal(b));
    let (big, small) = if (a.exponent, a.mantissa) >= (b.exponent, b.mantissa) { (a, b) } else { (b, a) };
    let distance = (big.exponent - small.exponent) as u32;
    let (shifted, sticky) = if distance > 126 {
        (0, true)
    } else {
        (small.mantissa >> distance, small.mantissa & ((1 << distance) - 1) != 0)
    };
    let mantissa = if big.negative == small.negative {
        big.mantissa + shifted
    } else {
        // Subtract the lost bits of the smaller number as well: the exact result is between this value and the next
        // larger one.
        big.mantissa - shifted - u128::from(sticky)
    };
    let negative = if mantissa == 0 && !sticky { rounding == Rounding::Down } else { big.negative };
    Exact { negative, mantissa, exponent: big.exponent, sticky }
}

/// Converts a number to another format.
pub(crate) fn convert(bits: u64, from: Format, to: Format, rounding: Rounding) -> u64 {
    match unpack(bits, from) {
        Number::Nan => to.nan,
        Number::Infinity { negative } => to.infinity() | if negative { to.sign_bit() } else { 0 },
        Number::Finite(number) => pack(number, to, rounding),
    }
}

/// Rounds a number to an integer in the same format.
pub(crate) fn integral(bits: u64, format: Format, rounding: Rounding) -> u64 {
    match unpack(bits, format) {
        Number::Nan => format.nan,
        Number::Finite(number) if number.exponent < 0 => {
            let mantissa = to_units(number, 0, rounding);
            pack(Exact { mantissa, exponent: 0, ..number }, format, rounding)
        }
        Number::Finite(_) | Number::Infinity { .. } => bits,
    }
}

/// Rounds a number to an integer and clamps it to the integer type's range. Converts NaN to 0 (GUESS: for doubles,
/// too).
pub(crate) fn to_integer(bits: u64, format: Format, rounding: Rounding, width: u32, signed: bool) -> u64 {
    let (least, most) = range(width, signed);
    let value = match unpack(bits, format) {
        Number::Nan => return 0,
        Number::Infinity { negative } => {
            if negative {
                least
            } else {
                most
            }
        }
        Number::Finite(number) => {
            let magnitude = if number.exponent > 64 && number.mantissa != 0 {
                i128::MAX
            } else {
                to_units(number, 0, rounding).cast_signed()
            };
            if number.negative { -magnitude } else { magnitude }
        }
    };
    value.clamp(least, most) as u64
}

/// Returns the minimum and maximum values of an integer type.
pub(crate) const fn range(width: u32, signed: bool) -> (i128, i128) {
    if signed { (-(1 << (width - 1)), (1 << (width - 1)) - 1) } else { (0, (1 << width) - 1) }
}

/// Converts an integer to a float.
pub(crate) fn from_integer(value: i128, format: Format, rounding: Rounding) -> u64 {
    let exact = Exact { negative: value < 0, mantissa: value.unsigned_abs(), exponent: 0, sticky: false };
    pack(exact, format, rounding)
}
