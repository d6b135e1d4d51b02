//! The exported functions. Each function loads its symbol index, and calls [`dispatch`] with its arguments.
//!
//! UNSAFETY: exports functions without their real signatures, and reads arguments from registers and the stack as each
//! call requires.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, non_upper_case_globals, missing_docs, dead_code, reason = "names of the driver API")]
#![allow(clippy::missing_safety_doc, clippy::undocumented_unsafe_blocks, reason = "generated")]

use std::sync::LazyLock;

use cuda_calls::{CALLS, Treatment};

use crate::frame::{Frame, Handler};
use crate::lookup::{self, Tables};
use crate::result::{NOT_INITIALIZED, NOT_SUPPORTED};
use crate::{call, fork, output, report};

include!(concat!(env!("OUT_DIR"), "/stubs.rs"));

/// Handlers, indexed by call.
static HANDLERS: LazyLock<Vec<Handler>> = LazyLock::new(|| {
    lookup::install(Tables { entries: &ENTRIES, symbols: &SYMBOLS, families: FAMILIES });
    let own = handlers();
    let of = |(name, treatment): (&str, Treatment)| {
        let found = own.iter().find(|(of, _)| *of == name).map(|(_, handler)| *handler);
        match treatment {
            Treatment::Guest => found.unwrap_or(refuse),
            Treatment::Posted | Treatment::Answered => found.unwrap_or(call::described),
        }
    };
    CALLS.iter().map(|call| of((call.name, call.treatment))).collect()
});

/// Returns the handlers of all functions that the guest library completes.
fn handlers() -> Vec<(&'static str, Handler)> {
    let parts = [
        crate::devices::HANDLERS,
        crate::contexts::HANDLERS,
        crate::memory::HANDLERS,
        crate::copies::HANDLERS,
        crate::boxes::HANDLERS,
        crate::pinned::HANDLERS,
        crate::streams::HANDLERS,
        crate::captures::HANDLERS,
        crate::cached::HANDLERS,
        crate::code::HANDLERS,
        crate::functions::HANDLERS,
        crate::names::HANDLERS,
        crate::graphs::HANDLERS,
        crate::nodes::HANDLERS,
        crate::links::HANDLERS,
        crate::registered::HANDLERS,
        crate::launches::HANDLERS,
        crate::host_functions::HANDLERS,
        crate::lookup::HANDLERS,
        crate::errors::HANDLERS,
    ];
    parts.concat()
}

fn refuse(_: &Frame) -> i32 {
    NOT_SUPPORTED
}

/// Executes a call, given its symbol index, its six register arguments, and the address of its stack arguments.
extern "C" fn dispatch(symbol: usize, registers: *const u64, stack: *const u64) -> i32 {
    if fork::is_child() {
        return NOT_INITIALIZED;
    }
    let Some((name, index, per_thread)) = SYMBOLS.get(symbol).copied() else { return NOT_SUPPORTED };
    let Ok(index) = usize::try_from(index) else {
        call::report_refused(name);
        return NOT_SUPPORTED;
    };
    let Some(handler) = HANDLERS.get(index) else { return NOT_SUPPORTED };
    let frame = Frame { registers, stack, index, per_thread };
    // A panic must not unwind into the program.
    let perform = || {
        let code = handler(&frame);
        output::print();
        code
    };
    std::panic::catch_unwind(perform).unwrap_or_else(|_| {
        report!("{name} failed unexpectedly");
        crate::result::LAUNCH_FAILED
    })
}

/// Stores the argument registers, and calls [`dispatch`].
#[unsafe(naked)]
unsafe extern "C" fn common() {
    // Input: symbol index in eax, return address at [rsp].
    core::arch::naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "sub rsp, 48",
        "mov [rsp], rdi", "mov [rsp + 8], rsi", "mov [rsp + 16], rdx",
        "mov [rsp + 24], rcx", "mov [rsp + 32], r8", "mov [rsp + 40], r9",
        "mov edi, eax",
        "mov rsi, rsp",
        "lea rdx, [rbp + 16]",
        "call {dispatch}",
        "leave",
        "ret",
        dispatch = sym dispatch,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_call_of_the_guest_has_a_handler() {
        let own = handlers();
        let missing: Vec<_> = CALLS
            .iter()
            .filter(|call| call.treatment == Treatment::Guest && !own.iter().any(|(name, _)| *name == call.name))
            .map(|call| call.name)
            .collect();
        assert!(missing.is_empty(), "no handler for {missing:?}");
        let unknown: Vec<_> = own.iter().filter(|(name, _)| cuda_calls::find(name).is_none()).map(|(n, _)| n).collect();
        assert!(unknown.is_empty(), "not described: {unknown:?}");
    }
}
