//! Numbers and sums of numbers.

use super::cursor::{Cursor, Failure};
use super::symbols::Symbols;

/// Maximum nesting depth of parentheses.
const MAX_DEPTH: u32 = 16;

/// Reads a sum of products of numbers, constants and labels.
pub(super) fn expression(cursor: &mut Cursor<'_>, symbols: &Symbols) -> Result<i64, Failure> {
    sum(cursor, symbols, MAX_DEPTH)
}

fn sum(cursor: &mut Cursor<'_>, symbols: &Symbols, depth: u32) -> Result<i64, Failure> {
    let mut total = product(cursor, symbols, depth)?;
    loop {
        cursor.skip_spaces();
        let at = *cursor;
        let next = if cursor.eat("+") {
            total.checked_add(product(cursor, symbols, depth)?)
        } else if cursor.eat("-") {
            total.checked_sub(product(cursor, symbols, depth)?)
        } else {
            return Ok(total);
        };
        total = next.ok_or(()).or_else(|()| at.fail("the number is too large"))?;
    }
}

fn product(cursor: &mut Cursor<'_>, symbols: &Symbols, depth: u32) -> Result<i64, Failure> {
    let mut total = factor(cursor, symbols, depth)?;
    loop {
        cursor.skip_spaces();
        let at = *cursor;
        if !cursor.eat("*") {
            return Ok(total);
        }
        let factor = factor(cursor, symbols, depth)?;
        total = total.checked_mul(factor).ok_or(()).or_else(|()| at.fail("the number is too large"))?;
    }
}

fn factor(cursor: &mut Cursor<'_>, symbols: &Symbols, depth: u32) -> Result<i64, Failure> {
    let mut negative = false;
    loop {
        if cursor.eat("-") {
            negative = !negative;
        } else if !cursor.eat("+") {
            break;
        }
    }
    cursor.skip_spaces();
    let at = *cursor;
    let value = if cursor.eat("(") {
        let Some(depth) = depth.checked_sub(1) else { return at.fail("parentheses are nested too deeply") };
        let value = sum(cursor, symbols, depth)?;
        cursor.expect(")")?;
        value
    } else {
        let word = cursor.dotted();
        match word.chars().next() {
            None => return at.fail("a number is needed here"),
            Some(first) if first.is_ascii_digit() => {
                number(word).ok_or(()).or_else(|()| at.fail(format!("`{word}` is not a number")))?
            }
            Some(_) => symbols.value(word).ok_or(()).or_else(|()| at.fail(format!("`{word}` has no value")))?,
        }
    };
    if negative { value.checked_neg().ok_or(()).or_else(|()| at.fail("the number is too large")) } else { Ok(value) }
}

/// Parses a number: decimal, or with the prefix 0x or 0b. Underscores may separate digits.
fn number(word: &str) -> Option<i64> {
    let digits: String = word.chars().filter(|c| *c != '_').collect::<String>().to_ascii_lowercase();
    let magnitude = match digits.get(..2) {
        Some("0x") => u64::from_str_radix(digits.get(2..)?, 16),
        Some("0b") => u64::from_str_radix(digits.get(2..)?, 2),
        _ => digits.parse(),
    };
    // `.quad` also accepts the upper half of the unsigned 64-bit range and stores the same bits.
    magnitude.ok().map(u64::cast_signed)
}
