//! Kernels, which are identified by name. Their arguments are 64-bit numbers.
//!
//! UNSAFETY: like a card, reads and writes addresses that the program specifies. An invalid address kills the program.
//! One kernel makes arbitrary system calls, for tests of sandboxes.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::time::Duration;

use crate::{access, mps, output, views};

/// Definition of a kernel.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// Name for `cuModuleGetFunction`.
    pub name: &'static str,
    /// Number of arguments.
    pub arguments: usize,
    /// Name of the module variable whose address is an additional argument. The address is 0 if the module lacks the
    /// variable.
    pub variable: Option<&'static str>,
    /// Function that returns the card time that the kernel takes in addition to its work.
    pub time: fn(&[u64]) -> Duration,
    /// Function that performs the kernel's work.
    pub run: fn(&[u64]),
}

/// All available kernels.
pub const KERNELS: [Kernel; 13] = [
    // Writes `value + i` to word `i` of `count` words.
    Kernel {
        name: "fill",
        arguments: 3,
        variable: None,
        time: |_| Duration::ZERO,
        run: |a| words(a[0], a[1], |i, _| a[2].wrapping_add(i)),
    },
    // Adds `value` to each of `count` words.
    Kernel {
        name: "add",
        arguments: 3,
        variable: None,
        time: |_| Duration::ZERO,
        run: |a| words(a[0], a[1], |_, word| word.wrapping_add(a[2])),
    },
    // Writes a checksum of `count` words to an address.
    Kernel {
        name: "checksum",
        arguments: 3,
        variable: None,
        time: |_| Duration::ZERO,
        run: |a| store(a[2], checksum(a[0], a[1])),
    },
    // Occupies the card for a number of microseconds, and adds this number to a word.
    Kernel {
        name: "spin",
        arguments: 2,
        variable: None,
        time: |a| Duration::from_micros(a[0]),
        run: |a| store(a[1], load(a[1]) + a[0]),
    },
    // Announces `round` in word `own` of `count` words, and spins until all words contain at least `round`. Then
    // occupies the card for a number of microseconds. Like a kernel of a collective operation, it completes only if its
    // peers run.
    Kernel { name: "meet", arguments: 5, variable: None, time: |a| Duration::from_micros(a[4]), run: |_| () },
    // Follows a chain of `steps` addresses, and writes the last one to an address.
    Kernel {
        name: "chase",
        arguments: 3,
        variable: None,
        time: |_| Duration::ZERO,
        run: |a| store(a[2], (0..a[1]).fold(a[0], |at, _| load(at))),
    },
    // Writes element (x, y) of a texture to an address.
    Kernel {
        name: "sample",
        arguments: 4,
        variable: None,
        time: |_| Duration::ZERO,
        run: |a| store(a[3], sample(a[0], a[1], a[2])),
    },
    // Writes a value to element (x, y) of a surface.
    Kernel {
        name: "paint",
        arguments: 4,
        variable: None,
        time: |_| Duration::ZERO,
        run: |a| paint(a[0], a[1], a[2], a[3]),
    },
    // Makes an illegal access, which destroys the contexts of the process and of all other clients of its MPS server.
    Kernel { name: "illegal", arguments: 0, variable: None, time: |_| Duration::ZERO, run: |_| mps::fault() },
    // Makes system call `number` with six arguments, and writes its result to an address. Kernels on a real card cannot
    // do this. This kernel simulates code that a guest manages to run in the driver's process.
    Kernel {
        name: "syscall",
        arguments: 8,
        variable: None,
        time: |_| Duration::ZERO,
        run: |a| store(a[0], system_call(&a[1..])),
    },
    // Adds 1 to the module's variable `tally`, and writes the sum to an address.
    Kernel {
        name: "tally",
        arguments: 1,
        variable: Some("tally"),
        time: |_| Duration::ZERO,
        run: |a| {
            store(a[1], load(a[1]) + 1);
            store(a[0], load(a[1]));
        },
    },
    // Writes the address of the module's variable `tally` to an address.
    Kernel {
        name: "locate",
        arguments: 1,
        variable: Some("tally"),
        time: |_| Duration::ZERO,
        run: |a| store(a[0], a[1]),
    },
    // Prints `count` lines with `value`.
    Kernel {
        name: "print",
        arguments: 2,
        variable: None,
        time: |_| Duration::ZERO,
        run: |a| output::store(a[0], a[1]),
    },
];

/// Makes a system call. Returns its result or the negated errno.
fn system_call(words: &[u64]) -> u64 {
    // SAFETY: see UNSAFETY. The set is a local variable that is initialized before it is read.
    let (result, error) = unsafe {
        // This library's threads block all signals, but hostile code would not, so unblock SIGSYS.
        let mut forbidden: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut forbidden, libc::SIGSYS);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const forbidden, std::ptr::null_mut());
        let number = words[0] as libc::c_long;
        let result = libc::syscall(number, words[1], words[2], words[3], words[4], words[5], words[6]);
        (result, *libc::__errno_location())
    };
    if result == -1 { i64::from(-error) as u64 } else { result as u64 }
}

/// Returns a texture element of at most eight bytes, or `u64::MAX` if the texture does not exist.
fn sample(texture: u64, x: u64, y: u64) -> u64 {
    let Some((at, bytes)) = views::element(texture, x, y) else { return u64::MAX };
    let mut word = [0u8; 8];
    // SAFETY: see UNSAFETY.
    unsafe { std::ptr::copy_nonoverlapping(at as *const u8, word.as_mut_ptr(), bytes.min(8) as usize) };
    u64::from_le_bytes(word)
}

fn paint(surface: u64, x: u64, y: u64, value: u64) {
    let Some((at, bytes)) = views::element(surface, x, y) else { return };
    // SAFETY: see UNSAFETY.
    unsafe { std::ptr::copy_nonoverlapping(value.to_le_bytes().as_ptr(), at as *mut u8, bytes.min(8) as usize) };
}

/// If the kernel must meet its peers, announces its round. Returns true while it must spin on the card to wait for
/// them.
pub fn spins(kernel: &Kernel, arguments: &[u64]) -> bool {
    let &[words, count, own, round, _] = arguments else { return false };
    if kernel.name != "meet" {
        return false;
    }
    store(words + 8 * own, round);
    (0..count).any(|at| load(words + 8 * at) < round)
}

fn load(at: u64) -> u64 {
    access::check(at);
    // SAFETY: see UNSAFETY.
    unsafe { (at as *const u64).read_volatile() }
}

fn store(at: u64, value: u64) {
    access::check(at);
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
