//! Makes system calls in the driver's process, as the code of a hostile guest would.

use anyhow::{Context as _, Result, ensure};

use crate::Cuda;

/// Size of the memory for texts in bytes.
const TEXTS_BYTES: u64 = 64 << 10;

/// Makes the calls that `words` describe, and prints the result of each, or its negative error number.
///
/// # Errors
/// Returns an error if the words are invalid or the driver fails. A process that makes a forbidden call is ended.
pub fn make(cuda: Cuda, words: &[String]) -> Result<()> {
    let kernel = cuda.kernel("syscall")?;
    let stream = cuda.stream()?;
    let memory = cuda.alloc(TEXTS_BYTES)?;
    let mut last = 0;
    for call in words.split(|word| word == "/") {
        let mut free = memory + 4096;
        let mut put = |bytes: &[u8]| -> Result<u64> {
            let at = free;
            // Zeros follow the text.
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
