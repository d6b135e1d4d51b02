//! Locks on words of global memory: LDLK acquires a lock, and STUL releases it.
//!
//! Locks belong to a grid and are released when it ends. GUESS: a lock identifies a word by its virtual address. Words
//! with the same hash share a set of the table. If a set is full, LDLK fails to acquire the lock, and the program must
//! retry.

use parking_lot::Mutex;

/// Number of sets in the table.
const SETS: usize = 512;
/// Number of ways per set.
const WAYS: usize = 8;

/// Locked words by set. Each word is stored as its index plus one, where 0 means unused.
type Table = Box<[[u64; WAYS]; SETS]>;

#[derive(Debug, Default)]
pub(crate) struct Locks {
    /// The locked words. The table is allocated on the first lock, because few programs use locks. The mutex is held
    /// for one lookup.
    table: Mutex<Option<Table>>,
}

fn place(address: u64) -> (usize, u64) {
    let word = address / 4;
    ((word.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 55) as usize % SETS, word + 1)
}

impl Locks {
    /// Locks the word at an address. Returns false if the word is already locked or its set is full.
    pub(crate) fn lock(&self, address: u64) -> bool {
        let (set, word) = place(address);
        let mut table = self.table.lock();
        let ways = &mut table.get_or_insert_with(|| Box::new([[0; WAYS]; SETS]))[set];
        if ways.contains(&word) {
            return false;
        }
        let free = ways.iter_mut().find(|way| **way == 0);
        free.map(|way| *way = word).is_some()
    }

    pub(crate) fn unlock(&self, address: u64) {
        let (set, word) = place(address);
        if let Some(way) = self.table.lock().as_mut().and_then(|table| table[set].iter_mut().find(|way| **way == word))
        {
            *way = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_locked_once_and_a_full_table_refuses() {
        let locks = Locks::default();
        locks.unlock(0x100);
        assert!(locks.lock(0x100) && !locks.lock(0x103) && locks.lock(0x104));
        locks.unlock(0x100);
        assert!(locks.lock(0x100));
        let held = (0..100_000u64).filter(|word| locks.lock(0x1_0000 + 4 * word)).count();
        assert!(held <= SETS * WAYS && held > SETS * WAYS / 2, "{held}");
        (0..100_000u64).for_each(|word| locks.unlock(0x1_0000 + 4 * word));
        assert!(locks.lock(0x1_0000) && !locks.lock(0x104));
    }
}
