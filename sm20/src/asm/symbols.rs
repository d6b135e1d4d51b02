//! Names: labels, constants, registers.

use std::collections::HashMap;

use super::cursor::Failure;
use crate::ir::{Predicate, Register};

/// Meaning of a name defined by `.reg`.
#[derive(Clone, Copy)]
pub(super) enum Named {
    Register(Register),
    Predicate(Predicate),
}

/// Names by the kernel in which they are valid. Names under `None` are valid everywhere.
#[derive(Default)]
pub(super) struct Symbols {
    /// The kernel being parsed.
    pub(super) scope: Option<usize>,
    values: HashMap<(Option<usize>, String), u32>,
    constants: HashMap<String, i64>,
    registers: HashMap<(Option<usize>, String), Named>,
}

impl Symbols {
    /// Adds a label at this address in the current scope. A kernel's name is a label that is valid everywhere.
    pub(super) fn label(&mut self, name: &str, address: u32, everywhere: bool, column: u32) -> Result<(), Failure> {
        let scope = if everywhere { None } else { self.scope };
        if self.values.insert((scope, name.to_owned()), address).is_some() {
            return Err(Failure::new(column, format!("the label `{name}` already exists")));
        }
        Ok(())
    }

    /// Adds a constant, which is valid everywhere.
    pub(super) fn constant(&mut self, name: &str, value: i64, column: u32) -> Result<(), Failure> {
        if self.constants.insert(name.to_owned(), value).is_some() {
            return Err(Failure::new(column, format!("the constant `{name}` already exists")));
        }
        Ok(())
    }

    /// Names a register. From here on, the name is valid in the current scope and can be redefined.
    pub(super) fn register(&mut self, name: &str, named: Named) {
        self.registers.insert((self.scope, name.to_owned()), named);
    }

    /// Returns the value of a label or constant.
    pub(super) fn value(&self, name: &str) -> Option<i64> {
        let label = |scope| self.values.get(&(scope, name.to_owned())).map(|address| i64::from(*address));
        label(self.scope).or_else(|| label(None)).or_else(|| self.constants.get(name).copied())
    }

    /// Returns the meaning of a name defined by `.reg`.
    pub(super) fn named(&self, name: &str) -> Option<Named> {
        let find = |scope| self.registers.get(&(scope, name.to_owned())).copied();
        find(self.scope).or_else(|| find(None))
    }
}

/// Returns the register that a name denotes, from R0 to R62, or RZ.
pub(super) fn plain_register(name: &str) -> Option<Register> {
    match split(name)? {
        ('R', "Z" | "z") => Some(Register::ZERO),
        ('R', digits) => Register::new(number(digits)?).filter(|register| !register.is_zero()),
        _ => None,
    }
}

/// Returns the predicate that a name denotes, from P0 to P6, or PT.
pub(super) fn plain_predicate(name: &str) -> Option<Predicate> {
    match split(name)? {
        ('P', "T" | "t") => Some(Predicate::TRUE),
        ('P', digits) => Predicate::new(number(digits)?).filter(|predicate| !predicate.is_true()),
        _ => None,
    }
}

fn split(name: &str) -> Option<(char, &str)> {
    let first = name.chars().next()?.to_ascii_uppercase();
    Some((first, name.get(1..)?))
}

fn number(digits: &str) -> Option<u8> {
    // Without this check, `parse` would accept a sign.
    if digits.chars().all(|c| c.is_ascii_digit()) { digits.parse().ok() } else { None }
}

/// Returns true if a name can be defined: it is not a register, a reserved word or a number.
pub(super) fn usable(name: &str) -> bool {
    let reserved = ["pc", "c", "C", "PR", "CC"].contains(&name);
    let starts_well = name.chars().next().is_some_and(|c| !c.is_ascii_digit());
    starts_well && !reserved && plain_register(name).is_none() && plain_predicate(name).is_none()
}
