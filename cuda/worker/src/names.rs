//! Names of functions and kernels.
//!
//! UNSAFETY: reads names at the addresses that the driver returns.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{CStr, c_char};

use cuda_calls::own::MAX_NAME_BYTES;
use cuda_calls::{Fault, Handles as _, Kind};

use crate::driver::{NOT_SUPPORTED, Needed};
use crate::executor::{Broken, Executor};
use crate::pending::Origin;

impl Executor {
    /// Replies with the name of a function or kernel.
    pub(crate) fn function_name(&mut self, origin: Origin, words: &[u64]) -> Result<(), Broken> {
        let [handle, is_kernel @ (0 | 1)] = *words else { return Err(Broken::Malformed) };
        let call = if is_kernel == 1 { Needed::KernelName } else { Needed::FunctionName };
        let name = match self.objects.find(Kind::Function, handle) {
            Ok(function) => self.read_name(call, function),
            Err(Fault::Refused(code)) => Err(code),
            Err(Fault::Malformed) => return Err(Broken::Malformed),
        };
        match name {
            Ok(words) => self.finish(origin, 0, &words),
            Err(code) => self.finish(origin, code, &[]),
        }
        Ok(())
    }

    /// Returns the length of a name in bytes, followed by the bytes.
    fn read_name(&self, call: Needed, function: u64) -> Result<Vec<u64>, i32> {
        let mut address = 0u64;
        match self.driver.invoke(call, &[(&raw mut address).addr() as u64, function]) {
            0 if address == 0 => return Ok(vec![0]),
            0 => {}
            code => return Err(code),
        }
        // SAFETY: the driver returns a string that is valid as long as the function exists.
        let name = unsafe { CStr::from_ptr(address as *const c_char) }.to_bytes();
        if name.len() > MAX_NAME_BYTES {
            return Err(NOT_SUPPORTED);
        }
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        Ok(std::iter::once(name.len() as u64).chain(name.chunks(8).map(word)).collect())
    }
}
