//! Sets of integers below 64 or 512.

/// Number of 64-bit words in a [`Set512`].
pub(crate) const WORDS: usize = 8;

/// A set with one bit for each of 512 entries or pages.
pub(crate) type Set512 = [u64; WORDS];

/// Returns the set that contains only `index`, which must be less than 64.
pub(crate) const fn bit(index: u32) -> u64 {
    1u64.wrapping_shl(index)
}

/// Returns the set of all numbers less than `count`, which must be at most 64.
pub(crate) const fn below(count: u32) -> u64 {
    if count >= u64::BITS { u64::MAX } else { bit(count).wrapping_sub(1) }
}

/// Returns the members of a set, in ascending order.
pub(crate) fn members(mut set: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let index = set.trailing_zeros();
        set &= set.wrapping_sub(1);
        (index < u64::BITS).then_some(index)
    })
}

/// Returns the members of a [`Set512`], in ascending order.
pub(crate) fn members512(set: &Set512) -> impl Iterator<Item = u32> {
    (0u32..).zip(*set).flat_map(|(word, set)| members(set).map(move |index| word.wrapping_mul(u64::BITS) | index))
}

/// Returns true if `index` is in the set.
pub(crate) fn has(set: &Set512, index: u32) -> bool {
    set.get((index >> 6) as usize).is_some_and(|word| word & bit(index & 63) != 0)
}

/// Adds `index` to the set.
pub(crate) fn insert(set: &mut Set512, index: u32) {
    if let Some(word) = set.get_mut((index >> 6) as usize) {
        *word |= bit(index & 63);
    }
}

/// Removes `index` from the set.
pub(crate) fn remove(set: &mut Set512, index: u32) {
    if let Some(word) = set.get_mut((index >> 6) as usize) {
        *word &= !bit(index & 63);
    }
}

/// Returns the set of all numbers less than `count`, which must be at most 512.
pub(crate) fn below512(count: usize) -> Set512 {
    let mut set = [0; WORDS];
    for (word, set) in set.iter_mut().enumerate() {
        let before = word.wrapping_mul(u64::BITS as usize);
        *set = below(u32::try_from(count.saturating_sub(before)).unwrap_or(u64::BITS));
    }
    set
}
