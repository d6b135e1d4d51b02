//! Constant cache. A line contains the bank's contents at the time of the worker's first access to the line in this
//! grid.

use super::launch::{Bank, Banks, Failure};
use nvspec::addr::GpuVa;
use nvspec::class::compute90c0::{limit, warp_error};
use simgpu_memory::mmu::Session;

const LINE_BYTES: usize = 256;
const LINE_WORDS: usize = LINE_BYTES / 4;
const LINES: usize = limit::CONSTANT_BYTES as usize / LINE_BYTES;

#[derive(Debug)]
struct Cache {
    words: Vec<u32>,
    /// Bitmap of the valid lines.
    present: [u64; LINES / 64],
}

/// A worker's constant cache. Its contents do not change during a grid. Writes by the grid remain invisible, as they do
/// on the card without an invalidation.
#[derive(Debug)]
pub(crate) struct Constants {
    banks: Banks,
    caches: [Option<Box<Cache>>; limit::CONSTANT_BANKS as usize],
}

impl Constants {
    pub(crate) fn new() -> Self {
        Self { banks: Banks::default(), caches: std::array::from_fn(|_| None) }
    }

    /// Starts a grid that uses these banks.
    pub(crate) fn begin(&mut self, banks: &Banks) {
        self.banks = *banks;
        for cache in self.caches.iter_mut().flatten() {
            cache.present.fill(0);
        }
    }

    /// Returns the word at `offset` of a bank, or the error `outside` if the offset is beyond the end of the bank.
    pub(crate) fn word(
        &mut self,
        bank: u8,
        offset: u32,
        outside: u32,
        session: &mut Session<'_>,
    ) -> Result<u32, Failure> {
        if !offset.is_multiple_of(4) {
            return Err(Failure::Warp(warp_error::MISALIGNED_CONSTANT));
        }
        let index = usize::from(bank);
        let known = self.banks.get(index).filter(|known| offset < known.bytes);
        let Some(known) = known else { return Err(Failure::Warp(outside)) };
        let line = offset as usize / LINE_BYTES;
        if let Some(cache) = &self.caches[index]
            && cache.present[line / 64] & 1 << (line % 64) != 0
        {
            return Ok(cache.words[offset as usize / 4]);
        }
        self.fill(index, *known, line, session)?;
        Ok(self.caches[index].as_ref().map_or(0, |cache| cache.words[offset as usize / 4]))
    }

    #[cold]
    fn fill(&mut self, index: usize, bank: Bank, line: usize, session: &mut Session<'_>) -> Result<(), Failure> {
        let start = line * LINE_BYTES;
        // Do not read beyond the bound memory.
        let len = (bank.bytes as usize - start).min(LINE_BYTES);
        let mut bytes = [0; LINE_BYTES];
        session.read(GpuVa(bank.base).offset(start as u64), &mut bytes[..len])?;
        let cache = self.caches[index].get_or_insert_with(|| {
            Box::new(Cache { words: vec![0; limit::CONSTANT_BYTES as usize / 4], present: [0; LINES / 64] })
        });
        let words = &mut cache.words[line * LINE_WORDS..(line + 1) * LINE_WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        cache.present[line / 64] |= 1 << (line % 64);
        Ok(())
    }
}
