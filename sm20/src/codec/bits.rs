//! Bit fields of 64-bit words. Positions and widths are constants below 64 in the tables.

/// Returns a word with the low `width` bits set.
pub(super) const fn ones(width: u32) -> u64 {
    if width >= 64 { u64::MAX } else { 1_u64.wrapping_shl(width).wrapping_sub(1) }
}

/// Returns a mask of a field's bits.
pub(super) const fn mask(at: u32, width: u32) -> u64 {
    ones(width).wrapping_shl(at)
}

/// Returns a field's value.
pub(super) const fn take(word: u64, at: u32, width: u32) -> u64 {
    word.wrapping_shr(at) & ones(width)
}

/// Returns a field's value, sign-extended from its highest bit.
pub(super) const fn take_signed(word: u64, at: u32, width: u32) -> i64 {
    let unused = 64_u32.wrapping_sub(width);
    take(word, at, width).wrapping_shl(unused).cast_signed().wrapping_shr(unused)
}

/// Returns a word with this value in a field, or `None` if the value does not fit.
pub(super) const fn place(value: u64, at: u32, width: u32) -> Option<u64> {
    if value > ones(width) { None } else { Some(value.wrapping_shl(at)) }
}

/// Returns a word with this signed value in a field, or `None` if the value does not fit.
pub(super) const fn place_signed(value: i64, at: u32, width: u32) -> Option<u64> {
    let raw = value.cast_unsigned() & ones(width);
    if take_signed(raw, 0, width) == value { Some(raw.wrapping_shl(at)) } else { None }
}

/// Returns the low 8 bits.
pub(super) const fn low8(value: u64) -> u8 {
    let [byte, ..] = value.to_le_bytes();
    byte
}

/// Returns the low 16 bits.
pub(super) const fn low16(value: u64) -> u16 {
    let [a, b, ..] = value.to_le_bytes();
    u16::from_le_bytes([a, b])
}

/// Returns the low 32 bits.
pub(super) const fn low32(value: u64) -> u32 {
    let [a, b, c, d, ..] = value.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}
