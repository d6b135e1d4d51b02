//! The free indices of a tenant's memory, for an owner that assigns the indices itself.

use std::collections::BTreeSet;

/// Unused indices. The lowest one is found without visiting the used indices.
#[derive(Debug, Default)]
pub struct Indices {
    /// Previously used indices that are free again.
    freed: BTreeSet<u32>,
    /// Lowest index that was never used.
    fresh: u32,
}

impl Indices {
    /// Returns the lowest free index.
    #[must_use]
    pub fn lowest(&self) -> u32 {
        self.freed.first().copied().unwrap_or(self.fresh)
    }

    /// Removes the lowest free index and returns it.
    pub fn take(&mut self) -> u32 {
        self.freed.pop_first().unwrap_or_else(|| {
            self.fresh += 1;
            self.fresh - 1
        })
    }

    /// Frees an index that was taken.
    pub fn free(&mut self, index: u32) {
        self.freed.insert(index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_index_that_is_free_is_taken() {
        let mut indices = Indices::default();
        assert_eq!((0..5).map(|_| indices.take()).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        indices.free(3);
        indices.free(1);
        assert_eq!((indices.lowest(), indices.take(), indices.take(), indices.take()), (1, 1, 3, 5));
    }
}
