//! The exported functions: one slot per symbol, and the stub that jumps through it.
//!
//! The slots and the function tables are static, because the stubs refer to them by address.
//!
//! UNSAFETY: calls functions with unknown signatures, with unchanged registers and stack.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, non_upper_case_globals, missing_docs, dead_code, reason = "names of the driver API")]
#![allow(clippy::missing_safety_doc, clippy::undocumented_unsafe_blocks, reason = "generated")]

use std::sync::atomic::{AtomicPtr, Ordering};

use super::{devices, gated, shim};
use crate::symbols::{ALL, Arguments, COUNT, NAMES, REAL, real};

include!(concat!(env!("OUT_DIR"), "/stubs.rs"));

/// Sets the function in a symbol's slot.
pub fn set(index: usize, function: *mut ()) {
    if let Some(slot) = SLOTS.get(index) {
        slot.store(function, Ordering::Release);
    }
}

/// Returns the function in a symbol's slot.
pub fn get(index: usize) -> *mut () {
    SLOTS.get(index).map_or(std::ptr::null_mut(), |slot| slot.load(Ordering::Acquire))
}

/// Handles the first call to a symbol in a process or in a forked child. Loads the library if necessary, and then jumps
/// through the slot, or fails.
#[unsafe(naked)]
unsafe extern "C" fn lazy_common() {
    // Input: [rsp] symbol index, [rsp + 8] return address. The argument registers are preserved.
    core::arch::naked_asm!(
        "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9",
        "sub rsp, 32",
        "movups [rsp], xmm0",
        "movups [rsp + 16], xmm1",
        "mov rdi, [rsp + 80]",
        "call {resolve}",
        "mov r11, rax",
        "movups xmm0, [rsp]",
        "movups xmm1, [rsp + 16]",
        "add rsp, 32",
        "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
        "add rsp, 8",
        "jmp r11",
        resolve = sym resolve,
    )
}

extern "C" fn resolve(index: usize) -> *mut () {
    if index < COUNT { super::loader::resolve(index) } else { super::nvml::resolve(index) }
}

/// Handles a call that may access memory but does not wait for a slice. Maps evicted chunks, and then calls the real
/// function.
#[unsafe(naked)]
unsafe extern "C" fn present_common() {
    // Input: same as for `lazy_common`.
    core::arch::naked_asm!(
        "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9",
        "sub rsp, 32",
        "movups [rsp], xmm0",
        "movups [rsp + 16], xmm1",
        "mov rdi, [rsp + 80]",
        "call {present}",
        "mov r11, rax",
        "movups xmm0, [rsp]",
        "movups xmm1, [rsp + 16]",
        "add rsp, 32",
        "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
        "add rsp, 8",
        "jmp r11",
        present = sym present,
    )
}

/// Handles a call that names a device. Calls the function that [`devices::target`] returns.
#[unsafe(naked)]
unsafe extern "C" fn device_common() {
    // Input: same as for `lazy_common`, and [rsp + 16] arguments from the seventh on.
    core::arch::naked_asm!(
        "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9",
        "sub rsp, 32",
        "movups [rsp], xmm0",
        "movups [rsp + 16], xmm1",
        "mov rdi, [rsp + 80]",
        "lea rsi, [rsp + 32]",
        "lea rdx, [rsp + 96]",
        "call {target}",
        "mov r11, rax",
        "movups xmm0, [rsp]",
        "movups xmm1, [rsp + 16]",
        "add rsp, 32",
        "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
        "add rsp, 8",
        "jmp r11",
        target = sym devices::target,
    )
}

/// Returns true if a function adds or changes a graph node.
fn changes_graph(index: usize) -> bool {
    let name = NAMES.get(index).map(|name| name.to_string_lossy()).unwrap_or_default();
    name.strip_prefix("cuGraph").is_some_and(|rest| ["Add", "Set", "Update"].iter().any(|part| rest.contains(part)))
}

extern "C" fn present(index: usize) -> *mut () {
    let shim = shim();
    if !shim.is_single() && changes_graph(index) {
        // A node may copy between cards, or run on a card other than that of the launch.
        shim.allow_cross_access();
    }
    shim.present();
    real(index)
}

/// Handles a submission. Passes the gate, calls the real function with copied stack arguments, and notifies the gate.
#[unsafe(naked)]
unsafe extern "C" fn gate_common() {
    // Input: [rsp] symbol index, [rsp + 8] return address, [rsp + 16] arguments from the seventh on. Copies ten stack
    // arguments; gated functions have at most eleven arguments in total.
    core::arch::naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9",
        "sub rsp, 8",
        "mov rdi, [rbp + 8]",
        "lea rsi, [rbp - 48]",
        "lea rdx, [rbp + 24]",
        "call {enter}",
        "mov [rbp - 56], rax",
        "sub rsp, 80",
        "mov rax, [rbp + 24]", "mov [rsp], rax",
        "mov rax, [rbp + 32]", "mov [rsp + 8], rax",
        "mov rax, [rbp + 40]", "mov [rsp + 16], rax",
        "mov rax, [rbp + 48]", "mov [rsp + 24], rax",
        "mov rax, [rbp + 56]", "mov [rsp + 32], rax",
        "mov rax, [rbp + 64]", "mov [rsp + 40], rax",
        "mov rax, [rbp + 72]", "mov [rsp + 48], rax",
        "mov rax, [rbp + 80]", "mov [rsp + 56], rax",
        "mov rax, [rbp + 88]", "mov [rsp + 64], rax",
        "mov rax, [rbp + 96]", "mov [rsp + 72], rax",
        "mov r11, [rbp + 8]",
        "lea rax, [rip + {real}]",
        "mov r11, [rax + 8 * r11]",
        "mov rdi, [rbp - 8]", "mov rsi, [rbp - 16]", "mov rdx, [rbp - 24]",
        "mov rcx, [rbp - 32]", "mov r8, [rbp - 40]", "mov r9, [rbp - 48]",
        "call r11",
        "add rsp, 80",
        "push rax", "push rax",
        "mov rdi, [rbp + 8]",
        "lea rsi, [rbp - 48]",
        "lea rdx, [rbp + 24]",
        "mov rcx, [rbp - 56]",
        "mov r8d, eax",
        "call {leave}",
        "pop rax",
        "mov rsp, rbp",
        "pop rbp",
        "add rsp, 8",
        "ret",
        enter = sym enter,
        leave = sym leave,
        real = sym REAL,
    )
}

extern "C" fn enter(index: usize, registers: *const u64, stack: *const u64) -> u64 {
    gated::enter(shim(), index, Arguments::new(registers, stack))
}

extern "C" fn leave(index: usize, registers: *const u64, stack: *const u64, token: u64, result: i32) {
    gated::leave(shim(), index, Arguments::new(registers, stack), token, result);
}
