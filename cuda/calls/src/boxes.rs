//! 2D and 3D copies: the words of `CUDA_MEMCPY2D` and `CUDA_MEMCPY3D`, and the byte ranges that a copy accesses.

/// `CU_MEMORYTYPE_HOST`.
pub const HOST: u64 = 1;
/// `CU_MEMORYTYPE_DEVICE`.
pub const DEVICE: u64 = 2;
/// `CU_MEMORYTYPE_ARRAY`.
pub const ARRAY: u64 = 3;
/// `CU_MEMORYTYPE_UNIFIED`.
pub const UNIFIED: u64 = 4;

/// Number of words in `CUDA_MEMCPY2D`.
pub const WORDS_2D: usize = 16;
/// Number of words in `CUDA_MEMCPY3D`.
pub const WORDS_3D: usize = 25;

/// Source or destination of a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct End {
    /// `CUmemorytype`: one of [`HOST`], [`DEVICE`], [`ARRAY`] and [`UNIFIED`].
    pub kind: u64,
    /// Address of linear memory.
    pub address: u64,
    /// Handle of an array.
    pub array: u64,
    /// Offset of the box in a row, in bytes.
    pub x: u64,
    /// Index of the first row.
    pub y: u64,
    /// Index of the first layer.
    pub z: u64,
    /// Mipmap level of an array.
    pub level: u64,
    /// Row pitch in bytes, or 0 if rows are contiguous.
    pub pitch: u64,
    /// Layer pitch in rows, or 0 if layers are contiguous.
    pub rows: u64,
}

/// A copy of a box.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BoxCopy {
    /// The source.
    pub from: End,
    /// The destination.
    pub to: End,
    /// Width in bytes.
    pub width: u64,
    /// Number of rows per layer.
    pub height: u64,
    /// Number of layers.
    pub depth: u64,
}

/// A range of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes {
    /// First address.
    pub start: u64,
    /// Size in bytes.
    pub count: u64,
}

/// Returns the address that an end's memory type selects.
fn address_of(kind: u64, host: u64, device: u64) -> u64 {
    match kind {
        HOST => host,
        DEVICE | UNIFIED => device,
        _ => 0,
    }
}

impl End {
    fn host(self) -> u64 {
        if self.kind == HOST { self.address } else { 0 }
    }

    fn device(self) -> u64 {
        if matches!(self.kind, DEVICE | UNIFIED) { self.address } else { 0 }
    }

    /// Returns the end with explicit pitches, or `None` if rows or layers would overlap.
    fn spread(mut self, width: u64, height: u64) -> Option<Self> {
        if self.kind == ARRAY {
            return Some(self);
        }
        let (row, layer) = (self.x.checked_add(width)?, self.y.checked_add(height)?);
        self.pitch = if self.pitch == 0 { row } else { self.pitch };
        self.rows = if self.rows == 0 { layer } else { self.rows };
        (self.pitch >= row && self.rows >= layer).then_some(self)
    }

    /// Returns the address of one of the box's rows in linear memory.
    pub fn row(self, layer: u64, row: u64) -> Option<u64> {
        let rows = self.z.checked_add(layer)?.checked_mul(self.rows)?.checked_add(self.y)?.checked_add(row)?;
        rows.checked_mul(self.pitch)?.checked_add(self.x)?.checked_add(self.address)
    }
}

impl BoxCopy {
    /// Decodes a `CUDA_MEMCPY2D`. Each memory type is in the low half of its word.
    pub fn from_2d(words: &[u64; WORDS_2D]) -> Self {
        let [sx, sy, sk, sh, sd, sa, sp, dx, dy, dk, dh, dd, da, dp, width, height] = *words;
        let end = |kind: u64, address, array, x, y, pitch| End { kind, address, array, x, y, pitch, ..End::default() };
        let (sk, dk) = (sk & 0xffff_ffff, dk & 0xffff_ffff);
        let from = end(sk, address_of(sk, sh, sd), sa, sx, sy, sp);
        let to = end(dk, address_of(dk, dh, dd), da, dx, dy, dp);
        Self { from, to, width, height, depth: 1 }
    }

    /// Decodes a `CUDA_MEMCPY3D`.
    pub fn from_3d(words: &[u64; WORDS_3D]) -> Self {
        let [
            sx,
            sy,
            sz,
            sl,
            sk,
            sh,
            sd,
            sa,
            _,
            sp,
            sr,
            dx,
            dy,
            dz,
            dl,
            dk,
            dh,
            dd,
            da,
            _,
            dp,
            dr,
            width,
            height,
            depth,
        ] = *words;
        let (sk, dk) = (sk & 0xffff_ffff, dk & 0xffff_ffff);
        Self {
            from: End {
                kind: sk,
                address: address_of(sk, sh, sd),
                array: sa,
                x: sx,
                y: sy,
                z: sz,
                level: sl,
                pitch: sp,
                rows: sr,
            },
            to: End {
                kind: dk,
                address: address_of(dk, dh, dd),
                array: da,
                x: dx,
                y: dy,
                z: dz,
                level: dl,
                pitch: dp,
                rows: dr,
            },
            width,
            height,
            depth,
        }
    }

    /// Encodes a `CUDA_MEMCPY2D`.
    pub fn to_2d(self) -> [u64; WORDS_2D] {
        let (f, t) = (self.from, self.to);
        [
            f.x,
            f.y,
            f.kind,
            f.host(),
            f.device(),
            f.array,
            f.pitch,
            t.x,
            t.y,
            t.kind,
            t.host(),
            t.device(),
            t.array,
            t.pitch,
            self.width,
            self.height,
        ]
    }

    /// Encodes a `CUDA_MEMCPY3D`.
    pub fn to_3d(self) -> [u64; WORDS_3D] {
        let (f, t) = (self.from, self.to);
        [
            f.x,
            f.y,
            f.z,
            f.level,
            f.kind,
            f.host(),
            f.device(),
            f.array,
            0,
            f.pitch,
            f.rows,
            t.x,
            t.y,
            t.z,
            t.level,
            t.kind,
            t.host(),
            t.device(),
            t.array,
            0,
            t.pitch,
            t.rows,
            self.width,
            self.height,
            self.depth,
        ]
    }

    /// Returns true if the box is empty.
    pub fn is_empty(self) -> bool {
        self.width == 0 || self.height == 0 || self.depth == 0
    }

    /// Returns the number of bytes to copy, or `None` on overflow.
    pub fn bytes(self) -> Option<u64> {
        self.width.checked_mul(self.height)?.checked_mul(self.depth)
    }

    /// Returns the copy with explicit row and layer pitches, so that both sides of a message access the same bytes.
    /// Returns `None` if an end has an unknown memory type, or if rows overlap.
    pub fn spread(mut self) -> Option<Self> {
        let is_known = |end: End| matches!(end.kind, HOST | DEVICE | ARRAY | UNIFIED);
        self.from = self.from.spread(self.width, self.height)?;
        self.to = self.to.spread(self.width, self.height)?;
        (is_known(self.from) && is_known(self.to)).then_some(self)
    }

    /// Returns the range from the first to the last byte that the copy accesses at an end in linear memory.
    pub fn touched(self, end: End) -> Option<Bytes> {
        if self.is_empty() {
            return Some(Bytes { start: end.address, count: 0 });
        }
        let start = end.row(0, 0)?;
        let last = end.row(self.depth - 1, self.height - 1)?.checked_add(self.width)?;
        Some(Bytes { start, count: last - start })
    }

    /// Returns the sub-box that starts at byte `x`, row `y` and layer `z` of the box and has the given dimensions.
    pub fn part(mut self, [x, y, z]: [u64; 3], [width, height, depth]: [u64; 3]) -> Self {
        for end in [&mut self.from, &mut self.to] {
            end.x = end.x.saturating_add(x);
            end.y = end.y.saturating_add(y);
            end.z = end.z.saturating_add(z);
        }
        (self.width, self.height, self.depth) = (width, height, depth);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn linear(address: u64, pitch: u64, rows: u64) -> End {
        End { kind: DEVICE, address, pitch, rows, ..End::default() }
    }

    #[test]
    fn words_of_both_structures_keep_each_field() {
        let words: [u64; WORDS_3D] = std::array::from_fn(|at| at as u64 + 10);
        let mut words = words;
        (words[4], words[15]) = (HOST, DEVICE);
        let back = BoxCopy::from_3d(&words).to_3d();
        for (at, (before, after)) in words.iter().zip(back).enumerate() {
            // The unused addresses and the reserved words are zeroed.
            let is_unused = matches!(at, 6 | 8 | 16 | 19);
            assert_eq!(after, if is_unused { 0 } else { *before }, "word {at}");
        }
        let mut words: [u64; WORDS_2D] = std::array::from_fn(|at| at as u64 + 10);
        (words[2], words[9]) = (UNIFIED | 7 << 32, ARRAY);
        let back = BoxCopy::from_2d(&words).to_2d();
        words[2] = UNIFIED;
        for (at, (before, after)) in words.iter().zip(back).enumerate() {
            assert_eq!(after, if matches!(at, 3 | 10 | 11) { 0 } else { *before }, "word {at}");
        }
    }

    #[test]
    fn touched_bytes_span_the_first_to_the_last_row() {
        let mut from = linear(1000, 100, 5);
        (from.x, from.y, from.z) = (10, 1, 2);
        let copy = BoxCopy { from, to: linear(0, 0, 0), width: 20, height: 3, depth: 2 };
        let spread = copy.spread().expect("fits");
        // Layer 2 begins at row 10, and the box at row 11. The box's last row is row 18.
        let first = 1000 + 11 * 100 + 10;
        let expected = Bytes { start: first, count: 7 * 100 + 20 };
        assert_eq!(spread.touched(spread.from), Some(expected));
        assert_eq!((spread.to.pitch, spread.to.rows), (20, 3), "adjacent");
        assert_eq!(spread.touched(spread.to), Some(Bytes { start: 0, count: 120 }));
    }

    #[test]
    fn overlapping_rows_and_overflows_are_refused() {
        let copy =
            |pitch, rows| BoxCopy { from: linear(0, pitch, rows), to: linear(0, 0, 0), width: 20, height: 3, depth: 2 };
        assert_eq!(copy(19, 0).spread(), None);
        assert_eq!(copy(20, 2).spread(), None);
        assert!(copy(20, 3).spread().is_some());
        let wide = BoxCopy { width: u64::MAX, ..copy(0, 0) };
        assert_eq!(wide.spread().and_then(|wide| wide.touched(wide.from)), None);
        let unknown = BoxCopy { from: End { kind: 9, ..linear(0, 0, 0) }, ..copy(0, 0) };
        assert_eq!(unknown.spread(), None);
    }
}
