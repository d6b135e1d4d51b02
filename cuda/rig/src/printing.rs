//! Kernels that print.
//!
//! UNSAFETY: flushes the C library's streams.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::sync::mpsc::Receiver;

use anyhow::{Result, bail};

use crate::Cuda;

/// Number of lines whose size exceeds that of a pipe.
const MANY: u64 = 20_000;

/// For each line of input, launches a kernel that prints, waits for its end as the line says, and prints the line.
pub fn work(cuda: Cuda, lines: &Receiver<String>) -> Result<()> {
    let (kernel, stream, word) = (cuda.kernel("print")?, cuda.stream()?, cuda.alloc(4096)?);
    for (number, line) in (0..).zip(lines) {
        let count = if line == "many" { MANY } else { 2 };
        cuda.launch(kernel, &[number, count], stream)?;
        match line.as_str() {
            "context" | "many" => cuda.finish_all()?,
            "stream" => cuda.finish(stream)?,
            "copy" => {
                cuda.finish(stream)?;
                cuda.read(word, 1)?;
            }
            "launch" => {}
            _ => bail!("cannot wait as `{line}`"),
        }
        // The driver writes to the C library's stream, which has its own buffer.
        // SAFETY: flushes all streams.
        unsafe { libc::fflush(std::ptr::null_mut()) };
        println!("{line}");
    }
    Ok(())
}
