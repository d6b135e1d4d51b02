//! Enforces the rules of virtual memory management for reserved addresses and their mappings.

use std::collections::BTreeMap;

use crate::result::{INVALID_VALUE, NOT_SUPPORTED};

/// Granularity of sizes and addresses in bytes.
pub const GRANULE: u64 = 2 << 20;

/// A mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Size in bytes.
    pub bytes: u64,
    /// Handle passed when the allocation was mapped.
    pub handle: u64,
    /// The card's access, as `CUmemAccess_flags`.
    pub access: i32,
}

/// A violated rule, and the corresponding result code of NVIDIA's driver 580.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken(pub &'static str, pub i32);

/// Reservations and mappings, keyed by first address.
#[derive(Debug, Default)]
pub struct Space {
    reserved: BTreeMap<u64, u64>,
    mapped: BTreeMap<u64, Mapping>,
}

fn ensure(good: bool, rule: &'static str) -> Result<(), Broken> {
    if good { Ok(()) } else { Err(Broken(rule, INVALID_VALUE)) }
}

impl Space {
    /// Records a reservation.
    pub fn reserve(&mut self, at: u64, bytes: u64) {
        self.reserved.insert(at, bytes);
    }

    /// Removes a reservation. The range must be a whole reservation without mappings.
    pub fn unreserve(&mut self, at: u64, bytes: u64) -> Result<(), Broken> {
        ensure(self.reserved.get(&at) == Some(&bytes), "a reservation is freed whole")?;
        ensure(self.within(at, bytes).is_empty(), "a reservation is freed with nothing mapped")?;
        self.reserved.remove(&at);
        Ok(())
    }

    /// Maps a whole allocation of `length` bytes.
    pub fn map(&mut self, at: u64, bytes: u64, offset: u64, handle: u64, length: u64) -> Result<(), Broken> {
        ensure(bytes > 0, "a mapping has a length")?;
        ensure(at.is_multiple_of(GRANULE), "mappings are aligned to the granularity")?;
        if offset != 0 || bytes != length {
            return Err(Broken("an allocation is mapped whole", NOT_SUPPORTED));
        }
        let room = self.reserved.range(..=at).next_back().is_some_and(|(start, len)| at + bytes <= start + len);
        ensure(room, "mappings lie in a reservation")?;
        ensure(self.within(at, bytes).is_empty(), "only addresses with nothing mapped can be mapped")?;
        self.mapped.insert(at, Mapping { bytes, handle, access: 0 });
        Ok(())
    }

    /// Unmaps a contiguous range of whole mappings, and returns them.
    pub fn unmap(&mut self, at: u64, bytes: u64) -> Result<Vec<(u64, Mapping)>, Broken> {
        let found = self.cover(at, bytes)?;
        for (start, _) in &found {
            self.mapped.remove(start);
        }
        Ok(found)
    }

    /// Sets the card's access to a contiguous range of whole mappings, and returns them.
    pub fn allow(&mut self, at: u64, bytes: u64, access: i32) -> Result<Vec<(u64, Mapping)>, Broken> {
        let found = self.cover(at, bytes)?;
        for (start, _) in &found {
            if let Some(mapping) = self.mapped.get_mut(start) {
                mapping.access = access;
            }
        }
        Ok(found)
    }

    /// Returns the reservation that contains an address.
    pub fn reservation(&self, at: u64) -> Option<(u64, u64)> {
        let (&start, &bytes) = self.reserved.range(..=at).next_back()?;
        (at < start + bytes).then_some((start, bytes))
    }

    /// Returns the mapping that contains an address.
    pub fn find(&self, at: u64) -> Option<(u64, Mapping)> {
        let (&start, &mapping) = self.mapped.range(..=at).next_back()?;
        (at < start + mapping.bytes).then_some((start, mapping))
    }

    /// Returns all mappings with their first addresses.
    pub fn mappings(&self) -> impl Iterator<Item = (u64, Mapping)> {
        self.mapped.iter().map(|(start, mapping)| (*start, *mapping))
    }

    fn within(&self, at: u64, bytes: u64) -> Vec<(u64, Mapping)> {
        let before = self.find(at).into_iter();
        let after = self.mapped.range(at + 1..at + bytes).map(|(start, mapping)| (*start, *mapping));
        before.chain(after).collect()
    }

    fn cover(&self, at: u64, bytes: u64) -> Result<Vec<(u64, Mapping)>, Broken> {
        ensure(bytes > 0, "a range has a length")?;
        let found = self.within(at, bytes);
        let mut next = at;
        for (start, mapping) in &found {
            ensure(*start == next, "mappings are taken whole and without a gap")?;
            next = start + mapping.bytes;
        }
        ensure(next == at + bytes, "mappings are taken whole and without a gap")?;
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: u64 = GRANULE;

    fn space() -> Space {
        let mut space = Space::default();
        space.reserve(0, 8 * G);
        space
    }

    #[test]
    fn every_rule_of_mapping_is_checked() {
        let mut space = space();
        let code = |result: Result<(), Broken>| result.map_err(|broken| broken.1);
        assert_eq!(code(space.map(0, G, 1, 1, G)), Err(NOT_SUPPORTED), "an offset");
        assert_eq!(code(space.map(0, G, 0, 1, 2 * G)), Err(NOT_SUPPORTED), "a part of an allocation");
        assert_eq!(code(space.map(0, 0, 0, 1, G)), Err(INVALID_VALUE), "nothing");
        assert!(space.map(G / 2, G, 0, 1, G).is_err(), "an odd address");
        assert!(space.map(7 * G, 2 * G, 0, 1, 2 * G).is_err(), "beyond the reservation");
        assert_eq!(space.map(G, 2 * G, 0, 1, 2 * G), Ok(()));
        assert!(space.map(2 * G, G, 0, 2, G).is_err(), "mapped already");
        assert!(space.map(0, 2 * G, 0, 2, 2 * G).is_err(), "mapped in part");
    }

    #[test]
    fn only_whole_mappings_are_taken_away() {
        let mut space = space();
        assert_eq!(space.map(0, 2 * G, 0, 1, 2 * G), Ok(()));
        assert_eq!(space.map(2 * G, G, 0, 2, G), Ok(()));
        assert!(space.unmap(0, G).is_err());
        assert!(space.unmap(0, 0).is_err());
        assert!(space.unmap(G, 2 * G).is_err());
        assert!(space.allow(0, 4 * G, 3).is_err(), "a gap at the end");
        assert_eq!(space.allow(0, 3 * G, 3).map(|found| found.len()), Ok(2));
        assert_eq!(space.find(G).map(|(start, m)| (start, m.handle, m.access)), Some((0, 1, 3)));
        assert!(space.unreserve(0, 8 * G).is_err(), "something is mapped");
        assert_eq!(space.unmap(0, 3 * G).map(|found| found.len()), Ok(2));
        assert!(space.unmap(0, 3 * G).is_err(), "nothing is mapped");
        assert_eq!(space.unreserve(0, 8 * G), Ok(()));
    }
}
