//! Splits accesses of any size and alignment into aligned 32-bit accesses with byte lanes.

/// Part of an access that is within one aligned dword.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Byte offset of the dword in the region.
    pub dword: u64,
    /// Offset of the first accessed byte in the dword.
    pub first: usize,
    /// Number of accessed bytes in the dword.
    pub count: usize,
}

impl Lane {
    /// Returns true if all bytes of the dword are accessed.
    #[must_use]
    pub fn is_whole(self) -> bool {
        self.count == 4
    }

    /// Returns `old` with the accessed bytes replaced by `data`.
    #[must_use]
    pub fn merge(self, old: u32, data: &[u8]) -> u32 {
        let mut bytes = old.to_le_bytes();
        for (byte, new) in bytes.iter_mut().skip(self.first).take(self.count).zip(data) {
            *byte = *new;
        }
        u32::from_le_bytes(bytes)
    }

    /// Copies the accessed bytes of `value` to `data`.
    pub fn extract(self, value: u32, data: &mut [u8]) {
        for (byte, new) in data.iter_mut().zip(value.to_le_bytes().into_iter().skip(self.first).take(self.count)) {
            *byte = new;
        }
    }
}

/// Returns the lane at byte `offset`, for an access with `left` remaining bytes. The lane is empty only if `left` is 0.
#[must_use]
pub fn lane(offset: u64, left: usize) -> Lane {
    let first = (offset & 3) as u8;
    let room = usize::from(4u8.saturating_sub(first));
    Lane { dword: offset & !3, first: usize::from(first), count: room.min(left) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_accesses_are_cut_at_dwords() {
        assert_eq!(lane(0x6013d5, 1), Lane { dword: 0x6013d4, first: 1, count: 1 });
        assert_eq!(lane(0x103, 8), Lane { dword: 0x100, first: 3, count: 1 });
        assert_eq!(lane(0x104, 7), Lane { dword: 0x104, first: 0, count: 4 });
        assert_eq!(lane(u64::MAX, 4), Lane { dword: u64::MAX - 3, first: 3, count: 1 });
    }

    #[test]
    fn bytes_go_to_their_place() {
        let lane = lane(0x6013d5, 1);
        assert_eq!(lane.merge(0x1122_3344, &[0xaa]), 0x1122_aa44);
        let mut data = [0];
        lane.extract(0x1122_3344, &mut data);
        assert_eq!(data, [0x33]);
    }
}
