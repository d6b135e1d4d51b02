//! Connects the NVML functions of `guest-nvml` to the worker.
//!
//! UNSAFETY: runs a function when the library is loaded, and stores results through pointer arguments.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use cuda_calls::{CALLS, encode, unpack};
use guest_nvml::{Failure, Worker};

use crate::result::{INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, SUCCESS};
use crate::{connection, fork, thread};

/// The worker connection for NVML's functions.
struct Connected;

/// Function that runs when the library is loaded. It passes the connection to the NVML crate, which exports the
/// functions.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

extern "C" fn at_load() {
    connection::on_start(fork::watch);
    guest_nvml::install(&Connected);
}

/// Converts the result code of a call that did not reach the worker's NVML.
fn failure(code: i32) -> Failure {
    match code {
        INVALID_VALUE | INVALID_HANDLE => Failure::Arguments,
        NOT_SUPPORTED => Failure::Missing,
        _ => Failure::Lost,
    }
}

impl Worker for Connected {
    fn start(&self) -> Result<(), Failure> {
        connection::connect().map(drop).map_err(|_| Failure::Lost)
    }

    unsafe fn call(&self, number: usize, arguments: &[u64], handle: u64) -> Result<i32, Failure> {
        let connection = connection::get().map_err(failure)?;
        let described = CALLS.get(number).ok_or(Failure::Missing)?;
        let op = u16::try_from(number).map_err(|_| Failure::Missing)?;
        let outcome = thread::with(|thread| {
            // NVML does not use contexts, so the call must not fail because of a lost context.
            let before = thread.current.replace(0);
            let area = connection.area();
            let mut words = 0;
            let begun = connection.begin_always(thread, op, &area, |message| {
                // SAFETY: guaranteed by the caller.
                words = unsafe { encode(described, arguments, &mut |_| handle, message)? }.result_words;
                Ok(())
            });
            thread.current.set(before);
            let answer = connection.end(begun?, Some(&area))?;
            let mut results = vec![0; words];
            if answer.code == SUCCESS {
                answer.read(connection, &mut results);
                // SAFETY: as above.
                unsafe { unpack(described, arguments, &results) };
            }
            Ok(answer.code)
        });
        match outcome {
            // These results come from the worker itself, and not from NVML.
            Ok(code @ (INVALID_HANDLE | NOT_SUPPORTED)) => Err(failure(code)),
            other => other.map_err(failure),
        }
    }
}
