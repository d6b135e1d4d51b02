//! Variables of modules and libraries. Their names come from the images, and their addresses from the driver.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::Arc;

use cuda_calls::own::Route;
use cuda_calls::{Handles as _, Kind, kind_of};
use cuda_images::{Unreadable, examine, is_literal};
use object_log::{Image, Step, StepKind, created_by};
use worker_link::Obstacle;

use crate::contents::words_of;
use crate::driver::Needed;
use crate::executor::Executor;

/// `CUDA_ERROR_NOT_FOUND`.
const NOT_FOUND: i32 = 500;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `_MINOR`.
const CAPABILITY: [u64; 2] = [75, 76];
/// Maximum number of variables of one program.
const MAX_VARIABLES: usize = 1 << 17;
/// Maximum length of a variable's name in a report, in bytes.
const MAX_REPORTED_BYTES: usize = 256;

/// A variable in a context.
#[derive(Clone, Debug)]
pub(crate) struct Variable {
    /// Number of the variable's context.
    pub context: u32,
    /// Handle of the variable's module or library.
    owner: u64,
    name: Vec<u8>,
    /// Address in this worker.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
}

impl Variable {
    /// Returns the step that restores the variable in another worker.
    pub fn step(&self) -> Step {
        let mut words = vec![self.owner, self.bytes, self.name.len() as u64];
        words.extend(words_of(&self.name));
        Step { kind: StepKind::Variable, op: 0, route: self.context.into(), words, image: None }
    }
}

/// The addresses of variables, which change when a program continues in another worker.
#[derive(Debug, Default)]
pub(crate) struct Addresses {
    /// End addresses (exclusive) of the variables, keyed by first address.
    ranges: BTreeMap<u64, u64>,
    /// First address and end address (exclusive) of the span of all ranges.
    all: (u64, u64),
}

impl Addresses {
    /// Collects the addresses of variables.
    pub fn of(variables: &[Variable]) -> Self {
        let ranges = variables.iter().map(|it| (it.address, it.address.saturating_add(it.bytes)));
        let ranges: BTreeMap<u64, u64> = ranges.collect();
        let first = ranges.keys().next().copied().unwrap_or_default();
        let end = ranges.values().max().copied().unwrap_or_default();
        Self { ranges, all: (first, end) }
    }

    /// Returns true if one of the words is an address within a variable.
    pub fn are_in(&self, words: &[u64]) -> bool {
        let (first, end) = self.all;
        let is_in = |word: u64| self.ranges.range(..=word).next_back().is_some_and(|(_, end)| word < *end);
        words.iter().any(|word| (first..end).contains(word) && is_in(*word))
    }
}

/// Logs why a program cannot continue in another worker.
fn report(text: &str) {
    // Ignore errors, because the reader of standard error may have exited with the daemon.
    let _ = writeln!(std::io::stderr(), "cuda-worker: the program cannot continue in another worker: {text}");
}

impl Executor {
    /// Returns the variables of all modules and libraries.
    ///
    /// # Errors
    /// Returns the obstacle if the variables cannot be determined, or if another worker could not restore the state of
    /// a module or library.
    pub(crate) fn variables(&mut self, steps: &[Step]) -> Result<Vec<Variable>, Obstacle> {
        // Later objects replace earlier ones with the same handle, because the earlier ones no longer exist.
        let mut images: BTreeMap<u64, (Kind, u32, Arc<Image>)> = BTreeMap::new();
        for step in steps {
            if let (Some((kind @ (Kind::Module | Kind::Library), handle)), Some(image)) =
                (created_by(step), step.image.clone())
                && self.has_object(kind, handle)
            {
                images.insert(handle, (kind, Route::from_word(step.route).context, image));
            }
        }
        let capability = self.capability();
        let mut found = Vec::new();
        for (handle, (kind, context, image)) in images {
            let code = examine(&image.to_bytes(), capability).map_err(|reason: Unreadable| {
                report(&reason.to_string());
                Obstacle::Variables
            })?;
            if code.allocates {
                return Err(Obstacle::Heap);
            }
            if code.has_addresses {
                report("initial values of a module's variables contain addresses");
                return Err(Obstacle::Addresses);
            }
            // A library's variables exist in each context, but a module's variables exist only in the module's context.
            let mut contexts = self.objects.contexts();
            contexts.retain(|number| kind == Kind::Library || *number == context);
            if code.variables.is_empty() {
                continue;
            }
            for context in contexts {
                self.enter(context).map_err(|_| Obstacle::Variables)?;
                for name in &code.variables {
                    match self.find_variable(handle, name) {
                        Ok((_, 0)) => {}
                        Ok((address, bytes)) if found.len() < MAX_VARIABLES => {
                            found.push(Variable { context, owner: handle, name: name.clone(), address, bytes });
                        }
                        Err(NOT_FOUND) if is_literal(name) => {}
                        Ok(_) => {
                            report("its modules have too many variables");
                            return Err(Obstacle::Variables);
                        }
                        Err(code) => {
                            let name = name.get(..MAX_REPORTED_BYTES).unwrap_or(name).escape_ascii();
                            report(&format!("the driver does not find variable {name} of a module: error {code}"));
                            return Err(Obstacle::Variables);
                        }
                    }
                }
            }
        }
        Ok(found)
    }

    /// Returns the compute capability of the program's card.
    fn capability(&self) -> (u32, u32) {
        let [major, minor] = CAPABILITY.map(|attribute| {
            let mut value = 0u32;
            self.driver.invoke(Needed::DeviceAttribute, &[(&raw mut value).addr() as u64, attribute, 0]);
            value
        });
        (major, minor)
    }

    /// Returns the address and the size of a variable in the current context.
    fn find_variable(&self, owner: u64, name: &[u8]) -> Result<(u64, u64), i32> {
        let (kind, call) = match kind_of(owner) {
            Some(Kind::Module) => (Kind::Module, Needed::ModuleVariable),
            Some(Kind::Library) => (Kind::Library, Needed::LibraryVariable),
            _ => return Err(0),
        };
        let real = self.objects.find(kind, owner).map_err(|_| 0)?;
        let text = std::ffi::CString::new(name).map_err(|_| 0)?;
        let (mut address, mut bytes) = (0u64, 0u64);
        let places = [&raw mut address, &raw mut bytes].map(|place| place.addr() as u64);
        let [address_at, bytes_at] = places;
        match self.driver.invoke(call, &[address_at, bytes_at, real, text.as_ptr().addr() as u64]) {
            0 => Ok((address, bytes)),
            code => Err(code),
        }
    }

    /// Returns the address and size of a step's variable, and makes the step's context current.
    ///
    /// # Errors
    /// Returns the driver's error, or 0 if the step is malformed or the variable has a different size.
    pub(crate) fn variable_of(&mut self, step: &Step) -> Result<(u64, u64), i32> {
        let [owner, bytes, name_bytes, name @ ..] = &step.words[..] else { return Err(0) };
        let count = usize::try_from(*name_bytes).ok().filter(|count| count.div_ceil(8) == name.len()).ok_or(0)?;
        let mut name: Vec<u8> = name.iter().flat_map(|word| word.to_le_bytes()).collect();
        name.truncate(count);
        if !self.enter_step(step) {
            return Err(0);
        }
        let (address, found) = self.find_variable(*owner, &name)?;
        if found == *bytes { Ok((address, found)) } else { Err(0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variable(address: u64, bytes: u64) -> Variable {
        Variable { context: 1, owner: 7, name: b"name".to_vec(), address, bytes }
    }

    #[test]
    fn only_addresses_within_variables_are_found() {
        let known = Addresses::of(&[variable(0x1000, 16), variable(0x5000, 1), variable(0x1010, 8)]);
        for word in [0x1000, 0x100f, 0x1010, 0x1017, 0x5000] {
            assert!(known.are_in(&[0, word, u64::MAX]), "{word:#x}");
        }
        for word in [0, 0xfff, 0x1018, 0x2000, 0x4fff, 0x5001, u64::MAX] {
            assert!(!known.are_in(&[word]), "{word:#x}");
        }
        assert!(!Addresses::of(&[]).are_in(&[0, 1, u64::MAX]));
    }
}
