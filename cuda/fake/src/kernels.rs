//! Kernels, identified by name. Arguments are 64-bit numbers.
//!
//! UNSAFETY: reads and writes addresses that the program names, as a card does; a wrong address kills the program.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::time::Duration;

/// A kernel: its name, the number of its arguments, and its function.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// Name for `cuModuleGetFunction`.
    pub name: &'static str,
    /// Number of arguments.
    pub arguments: usize,
    /// Returns the card time that it takes in addition to the work.
    pub time: fn(&[u64]) -> Duration,
    /// The work.
    pub run: fn(&[u64]),
}

/// All kernels.
pub const KERNELS: [Kernel; 5] = [
    // Writes `value + i` to word `i` of `count` words.
    Kernel {
        name: "fill",
        arguments: 3,
        time: |_| Duration::ZERO,
        run: |a| words(a[0], a[1], |i, _| a[2].wrapping_add(i)),
    },
    // Adds `value` to each of `count` words.
    Kernel {
        name: "add",
        arguments: 3,
        time: |_| Duration::ZERO,
        run: |a| words(a[0], a[1], |_, word| word.wrapping_add(a[2])),
    },
    // Writes a checksum of `count` words to an address.
    Kernel { name: "checksum", arguments: 3, time: |_| Duration::ZERO, run: |a| store(a[2], checksum(a[0], a[1])) },
    // Takes a number of microseconds of the card's time, and adds them to a word.
    Kernel {
        name: "spin",
        arguments: 2,
        time: |a| Duration::from_micros(a[0]),
        run: |a| store(a[1], load(a[1]) + a[0]),
    },
    // Follows a chain of `steps` addresses from the first one, and writes the last to an address.
    Kernel {
        name: "chase",
        arguments: 3,
        time: |_| Duration::ZERO,
        run: |a| store(a[2], (0..a[1]).fold(a[0], |at, _| load(at))),
    },
];

fn load(at: u64) -> u64 {
    // SAFETY: see UNSAFETY.
    unsafe { (at as *const u64).read_volatile() }
}

fn store(at: u64, value: u64) {
    // SAFETY: see UNSAFETY.
    unsafe { (at as *mut u64).write_volatile(value) }
}

fn words(at: u64, count: u64, value: impl Fn(u64, u64) -> u64) {
    for i in 0..count {
        store(at + 8 * i, value(i, load(at + 8 * i)));
    }
}

fn checksum(at: u64, count: u64) -> u64 {
    (0..count).fold(0xcbf2_9ce4_8422_2325, |sum: u64, i| (sum ^ load(at + 8 * i)).wrapping_mul(0x100_0000_01b3))
}
