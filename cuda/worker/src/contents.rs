//! Memory contents in files.

use std::os::fd::BorrowedFd;

use object_log::{Step, StepKind};

/// Maximum number of words per copy.
pub(crate) const COPY_WORDS: usize = 512 << 10;

/// Returns the size of the memory contents of a step, in words.
pub(crate) fn content_words(step: &Step) -> u64 {
    match (step.kind, &step.words[..]) {
        (StepKind::Memory, [_, bytes]) | (StepKind::Variable, [_, bytes, ..]) => bytes.div_ceil(8),
        _ => 0,
    }
}

/// Converts words to bytes.
pub(crate) fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Converts bytes to words, the last of which is padded with zeros.
pub(crate) fn words_of(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks(8).map(|part| part.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))).collect()
}

/// Error returned if a file cannot be read or is too short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadError;

/// Reads words at a byte offset of the file.
pub(crate) fn read(file: BorrowedFd<'_>, words: &mut [u64], mut offset: u64) -> Result<(), ReadError> {
    let mut bytes = vec![0u8; COPY_WORDS.min(words.len()) * 8];
    for part in words.chunks_mut(COPY_WORDS) {
        let room = bytes.get_mut(..part.len() * 8).unwrap_or_default();
        let mut filled = 0;
        while filled < room.len() {
            let rest = room.get_mut(filled..).unwrap_or_default();
            match rustix::io::pread(file, rest, offset) {
                Ok(0) => return Err(ReadError),
                Ok(count) => {
                    filled += count;
                    offset += count as u64;
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return Err(ReadError),
            }
        }
        for (word, bytes) in part.iter_mut().zip(room.chunks_exact(8)) {
            *word = bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        }
    }
    Ok(())
}
