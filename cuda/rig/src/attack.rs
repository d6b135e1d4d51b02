//! Makes system calls and illegal accesses in the driver's process, like a hostile guest's code.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::Cuda;

/// Interval between polls of the driver for a fault.
const FAULT_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Maximum number of such polls.
const MAX_FAULT_POLLS: u32 = 1000;
/// Size of the memory for strings, in bytes.
const TEXTS_BYTES: u64 = 64 << 10;

/// Makes the card access an illegal address after a line of input, and returns the next call's error.
///
/// # Errors
/// Returns an error if the driver fails earlier, or does not report the access.
pub fn fault(cuda: Cuda, lines: &std::sync::mpsc::Receiver<String>) -> Result<String> {
    let (illegal, stream) = (cuda.kernel("illegal")?, cuda.stream()?);
    println!("ready");
    lines.recv()?;
    cuda.launch(illegal, &[], stream)?;
    let lost = (0..MAX_FAULT_POLLS).find_map(|_| {
        std::thread::sleep(FAULT_POLL_INTERVAL);
        cuda.finish_all().err()
    });
    Ok(lost.context("the driver reports no fault")?.to_string())
}

/// Makes the system calls described by `words`, and prints each call's result or negated error number.
///
/// # Errors
/// Returns an error if the words are invalid or the driver fails. A process that makes a forbidden call is killed.
pub fn make(cuda: Cuda, words: &[String]) -> Result<()> {
    let kernel = cuda.kernel("syscall")?;
    let stream = cuda.stream()?;
    let memory = cuda.alloc(TEXTS_BYTES)?;
    let mut last = 0;
    for call in words.split(|word| word == "/") {
        let mut free = memory + 4096;
        let mut put = |bytes: &[u8]| -> Result<u64> {
            let at = free;
            // The text is NUL-terminated.
            let words = bytes.chunks(8).map(|part| {
                let mut word = [0; 8];
                word[..part.len()].copy_from_slice(part);
                u64::from_le_bytes(word)
            });
            let words: Vec<u64> = words.chain([0; 16]).collect();
            cuda.write(at, &words)?;
            free += words.len() as u64 * 8;
            Ok(at)
        };
        let mut arguments = vec![memory];
        for word in call {
            arguments.push(match word.split_once(':') {
                Some(("text", text)) => put(text.as_bytes())?,
                Some(("unix", path)) => put(&[&1u16.to_le_bytes(), path.as_bytes()].concat())?,
                _ if word == "last" => last,
                _ if word == "program" => std::process::id().into(),
                _ => word.parse::<i64>().with_context(|| format!("`{word}` is not an argument"))?.cast_unsigned(),
            });
        }
        ensure!((2..=8).contains(&arguments.len()), "a call has a number and up to six arguments");
        arguments.resize(8, 0);
        cuda.launch(kernel, &arguments, stream)?;
        cuda.finish(stream)?;
        last = cuda.read(memory, 1)?[0];
        println!("{}", last.cast_signed());
    }
    Ok(())
}
