//! Call arguments.
//!
//! UNSAFETY: reads arguments from registers and the stack as each call requires, and stores results through pointers.
#![allow(unsafe_code, reason = "see UNSAFETY")]

/// The arguments and index of a call.
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    /// The first six arguments.
    pub registers: *const u64,
    /// The remaining arguments, as the caller pushed them.
    pub stack: *const u64,
    /// Index of the call's description.
    pub index: usize,
    /// Set for a function variant that uses the per-thread default stream.
    pub per_thread: bool,
}

impl Frame {
    /// Returns an argument. The called function must have this argument.
    pub fn arg(&self, index: usize) -> u64 {
        // SAFETY: the stub stored six registers, and the caller pushed the other arguments before the return address.
        unsafe { if index < 6 { *self.registers.add(index) } else { *self.stack.add(index - 6) } }
    }

    /// Returns an argument as a 32-bit integer.
    pub fn int(&self, index: usize) -> u32 {
        self.arg(index) as u32
    }

    /// Stores a result through a pointer argument. Returns 0, or error 1 if the pointer is null.
    pub fn put<T>(&self, index: usize, value: T) -> i32 {
        let pointer = self.arg(index) as *mut T;
        if pointer.is_null() {
            return crate::result::INVALID_VALUE;
        }
        // SAFETY: the program passes a pointer to memory for the result, as the driver API requires.
        unsafe { pointer.write_unaligned(value) };
        0
    }

    /// Like [`Self::put`], but the pointer may be null.
    pub fn put_optional<T>(&self, index: usize, value: T) {
        if self.arg(index) != 0 {
            self.put(index, value);
        }
    }
}

/// A function that completes a call in the guest.
pub type Handler = fn(&Frame) -> i32;
