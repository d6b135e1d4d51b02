//! Directives.

use super::cursor::{Cursor, Failure};
use super::expression::expression;
use super::layout::{Draft, Layout, Place};
use super::symbols::{Named, Symbols, plain_predicate, plain_register, usable};
use crate::asm::Parameter;
use crate::ir::Form;

/// Maximum `.align` value in bytes.
const MAX_ALIGNMENT: i64 = 4096;
/// Maximum number of registers per thread, excluding RZ.
const MAX_REGISTERS: i64 = 63;
/// Maximum shared memory per block in bytes.
const MAX_SHARED: i64 = 48 << 10;
/// Maximum local memory per thread in bytes.
const MAX_LOCAL: i64 = 512 << 10;
const MAX_BARRIERS: i64 = 16;
/// Maximum size of the parameters in bytes.
const MAX_PARAMS: i64 = 4096;

/// Applies a directive to `layout`, in the first pass. `start` is the position of its name `word`, and `cursor` is the
/// position after it.
pub(super) fn first_pass<'a>(
    layout: &mut Layout<'a>,
    word: &str,
    start: Cursor<'a>,
    mut cursor: Cursor<'a>,
) -> Result<(), Failure> {
    match word {
        ".word" | ".quad" => {
            let form = if word == ".word" { Form::Short } else { Form::Long };
            layout.push(Place::Data { form }, cursor);
            let count = u32::try_from(commas(cursor).saturating_add(1)).unwrap_or(u32::MAX);
            layout.advance(count.saturating_mul(if form == Form::Short { 4 } else { 8 }), start)
        }
        ".align" => {
            let at = operand(cursor);
            let value = ranged(&mut cursor, &layout.symbols, MAX_ALIGNMENT)?;
            cursor.finish()?;
            if value < 4 || !value.is_power_of_two() {
                return at.fail("an alignment is a power of two from 4 to 4096");
            }
            layout.align(value, start)
        }
        ".equ" => {
            let at = operand(cursor);
            let name = new_name(&mut cursor)?;
            // The comma is optional.
            _ = cursor.eat(",");
            let value = expression(&mut cursor, &layout.symbols)?;
            cursor.finish()?;
            layout.symbols.constant(name, value, at.column())
        }
        ".reg" => {
            layout.push(Place::Name, cursor);
            Ok(())
        }
        ".kernel" => {
            let at = operand(cursor);
            let name = new_name(&mut cursor)?;
            cursor.finish()?;
            layout.open_kernel(name, at)
        }
        ".registers" | ".shared" | ".local" | ".barriers" => {
            let limit = match word {
                ".registers" => MAX_REGISTERS,
                ".shared" => MAX_SHARED,
                ".local" => MAX_LOCAL,
                _ => MAX_BARRIERS,
            };
            let value = ranged(&mut cursor, &layout.symbols, limit)?;
            cursor.finish()?;
            let Some(Draft { kernel, registers, barriers }) = layout.kernels.last_mut() else {
                return start.fail(format!("{word} belongs to a kernel, but no kernel has begun"));
            };
            match word {
                ".registers" => (kernel.registers, *registers) = (value, true),
                ".barriers" => (kernel.barriers, *barriers) = (value, true),
                ".shared" => kernel.shared_bytes = value,
                _ => kernel.local_bytes = value,
            }
            Ok(())
        }
        ".params" => {
            let (bytes, parameters) = parameters(&mut cursor, &layout.symbols)?;
            let Some(Draft { kernel, .. }) = layout.kernels.last_mut() else {
                return start.fail(format!("{word} belongs to a kernel, but no kernel has begun"));
            };
            (kernel.params, kernel.parameters) = (bytes, parameters);
            Ok(())
        }
        _ => start.fail(format!("there is no directive {word}")),
    }
}

/// Reads the total size of the parameters, or the comma-separated sizes of the individual parameters. A parameter is
/// aligned to its size if the size is 1, 2, 4, 8 or 16 bytes, and to 4 bytes otherwise.
fn parameters(cursor: &mut Cursor<'_>, symbols: &Symbols) -> Result<(u32, Vec<Parameter>), Failure> {
    let first = ranged(cursor, symbols, MAX_PARAMS)?;
    if !cursor.eat(",") {
        cursor.finish()?;
        return Ok((first, Vec::new()));
    }
    let mut list = vec![Parameter { offset: 0, bytes: first }];
    let mut end = first;
    loop {
        let at = operand(*cursor);
        let bytes = ranged(cursor, symbols, MAX_PARAMS)?;
        let align = if bytes.is_power_of_two() && bytes <= 16 { bytes } else { 4 };
        let offset = end.next_multiple_of(align);
        end = offset.saturating_add(bytes);
        if i64::from(end) > MAX_PARAMS {
            return at.fail(format!("parameters have at most {MAX_PARAMS} bytes"));
        }
        list.push(Parameter { offset, bytes });
        if !cursor.eat(",") {
            cursor.finish()?;
            return Ok((end, list));
        }
    }
}

/// Second pass: reads the values of `.word` and `.quad`.
pub(super) fn values(cursor: &mut Cursor<'_>, symbols: &Symbols, form: Form) -> Result<Vec<u64>, Failure> {
    let mut values = Vec::new();
    loop {
        let at = operand(*cursor);
        let value = expression(cursor, symbols)?;
        values.push(match form {
            Form::Long => value.cast_unsigned(),
            Form::Short => match (u32::try_from(value), i32::try_from(value)) {
                (Ok(value), _) => value.into(),
                (_, Ok(value)) => value.cast_unsigned().into(),
                _ => return at.fail("the value does not fit 32 bits"),
            },
        });
        if !cursor.eat(",") {
            cursor.finish()?;
            return Ok(values);
        }
    }
}

/// Second pass: reads the name and the register of `.reg`.
pub(super) fn name(cursor: &mut Cursor<'_>, symbols: &mut Symbols) -> Result<(), Failure> {
    let name = new_name(cursor)?;
    _ = cursor.eat(",");
    let at = operand(*cursor);
    let word = cursor.name();
    cursor.finish()?;
    let register = plain_register(word).map(Named::Register);
    match register.or_else(|| plain_predicate(word).map(Named::Predicate)).or_else(|| symbols.named(word)) {
        Some(named) => symbols.register(name, named),
        None => return at.fail(format!("`{word}` is not a register")),
    }
    Ok(())
}

/// Returns the position of the next operand.
fn operand(mut cursor: Cursor<'_>) -> Cursor<'_> {
    cursor.skip_spaces();
    cursor
}

/// Reads a name that a directive defines.
fn new_name<'a>(cursor: &mut Cursor<'a>) -> Result<&'a str, Failure> {
    let at = operand(*cursor);
    let name = cursor.name();
    match name {
        "" => at.fail("a name is missing"),
        name if usable(name) => Ok(name),
        name => at.fail(format!("`{name}` cannot be redefined")),
    }
}

/// Reads a number from 0 to `limit`. Rejects numbers that do not fit in 32 bits.
fn ranged(cursor: &mut Cursor<'_>, symbols: &Symbols, limit: i64) -> Result<u32, Failure> {
    let at = operand(*cursor);
    let value = expression(cursor, symbols)?;
    match u32::try_from(value) {
        Ok(small) if value <= limit => Ok(small),
        _ => at.fail(format!("a number from 0 to {limit} is needed here, not {value}")),
    }
}

/// Returns the number of commas in the rest of a statement.
fn commas(mut cursor: Cursor<'_>) -> usize {
    cursor.take(|_| true).matches(',').count()
}
