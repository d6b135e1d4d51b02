//! Semaphores in memory: the data that a release writes and the condition of an acquire, for the host unit and the
//! engines.

use nvspec::addr::GpuVa;
use nvspec::fifo::host_method::semaphore_d;
use simgpu_memory::mmu::{MmuFault, Session};

/// Format of the data that a release writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Four bytes: the payload.
    OneWord,
    /// Sixteen bytes: the payload, zero, and the 64-bit time in ns.
    FourWords,
}

/// Releases the semaphore at `va`. The payload is written last, in a single access, so that a reader that sees the
/// payload also sees the time.
///
/// # Errors
/// Returns [`MmuFault`] if a page cannot be accessed. The payload is then not written.
pub fn release(session: &mut Session<'_>, va: GpuVa, payload: u32, form: Form, now_ns: u64) -> Result<(), MmuFault> {
    if form == Form::FourWords {
        // Translate first: a fault must report the first byte, regardless of which page of the range is unmapped.
        session.translate(va, true)?;
        let mut rest = [0; 12];
        rest[4..].copy_from_slice(&now_ns.to_le_bytes());
        session.write(va.offset(4), &rest)?;
    }
    session.write32(va, payload)
}

/// Condition of an acquire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acquire {
    /// The value in memory equals the payload.
    Equal,
    /// The value in memory is the payload or a later value: their signed difference is not negative.
    GreaterOrEqual,
    /// The value in memory and the payload have a set bit in common.
    And,
}

impl Acquire {
    /// Returns the condition for a semaphore operation of the host unit, or `None` if the operation is not an acquire.
    #[must_use]
    pub const fn from_operation(operation: u32) -> Option<Self> {
        match operation {
            semaphore_d::ACQUIRE => Some(Self::Equal),
            semaphore_d::ACQUIRE_GEQ => Some(Self::GreaterOrEqual),
            semaphore_d::ACQUIRE_AND => Some(Self::And),
            _ => None,
        }
    }

    /// Returns true if the value `memory` satisfies an acquire with `payload`.
    #[must_use]
    pub const fn is_satisfied(self, memory: u32, payload: u32) -> bool {
        match self {
            Self::Equal => memory == payload,
            Self::GreaterOrEqual => memory.wrapping_sub(payload).cast_signed() >= 0,
            Self::And => memory & payload != 0,
        }
    }
}

/// Returns true if the semaphore at `va` currently satisfies the acquire.
///
/// # Errors
/// Returns [`MmuFault`] if the page cannot be accessed.
pub fn acquired(session: &mut Session<'_>, va: GpuVa, payload: u32, how: Acquire) -> Result<bool, MmuFault> {
    Ok(how.is_satisfied(session.read32(va)?, payload))
}

#[cfg(test)]
mod tests {
    use super::{Acquire, Form, acquired, release};
    use nvspec::addr::GpuVa;
    use simgpu_memory::mmu::MmuFault;
    use simgpu_memory::mmu::fixture::{PTE_VALID, Tables};

    fn tables() -> Tables {
        let mut tables = Tables::new();
        tables.small(0x1000, PTE_VALID | 0x80_0000 >> 8);
        tables.session().write(GpuVa(0x1000), &[0xee; 0x1000]).expect("mapped");
        tables
    }

    #[test]
    fn release_of_four_words_is_payload_zero_time() {
        let tables = tables();
        release(&mut tables.session(), GpuVa(0x1010), 0x1122_3344, Form::FourWords, 0x0807_0605_0403_0201)
            .expect("mapped");
        let bytes = tables.bytes(0x100c, 24);
        assert_eq!(bytes[..4], [0xee; 4]);
        assert_eq!(bytes[4..20], [0x44, 0x33, 0x22, 0x11, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(bytes[20..], [0xee; 4]);
        assert_eq!(acquired(&mut tables.session(), GpuVa(0x1010), 0x1122_3344, Acquire::Equal), Ok(true));
        assert_eq!(acquired(&mut tables.session(), GpuVa(0x1010), 0x1122_3345, Acquire::GreaterOrEqual), Ok(false));
    }

    #[test]
    fn release_of_one_word_leaves_the_others() {
        let tables = tables();
        release(&mut tables.session(), GpuVa(0x1010), 7, Form::OneWord, 1).expect("mapped");
        assert_eq!(tables.bytes(0x1010, 8), [7, 0, 0, 0, 0xee, 0xee, 0xee, 0xee]);
    }

    #[test]
    fn release_that_faults_does_not_write_the_payload() {
        let tables = tables();
        let fault = |va| Err(MmuFault { reason: 2, va: GpuVa(va), write: true });
        let at = |va| release(&mut tables.session(), GpuVa(va), 7, Form::FourWords, 1);
        assert_eq!(at(0x1ff8), fault(0x2000), "the time is on the next page");
        assert_eq!(tables.bytes(0x1ff8, 4), [0xee; 4]);
        assert_eq!(at(0x0ff8), fault(0x0ff8), "the first byte of the payload faults");
        assert_eq!(
            acquired(&mut tables.session(), GpuVa(0x3000), 0, Acquire::Equal),
            Err(MmuFault { reason: 2, va: GpuVa(0x3000), write: false })
        );
    }

    #[test]
    fn geq_compares_across_the_wrap() {
        assert!(Acquire::GreaterOrEqual.is_satisfied(5, 5));
        assert!(Acquire::GreaterOrEqual.is_satisfied(3, 0xffff_fffe));
        assert!(!Acquire::GreaterOrEqual.is_satisfied(0xffff_fffe, 3));
        assert!(!Acquire::GreaterOrEqual.is_satisfied(0, 0x8000_0000));
        assert!(Acquire::GreaterOrEqual.is_satisfied(0x7fff_ffff, 0));
    }

    #[test]
    fn equal_and_and_compare_bits() {
        assert!(Acquire::Equal.is_satisfied(7, 7) && !Acquire::Equal.is_satisfied(7, 6));
        assert!(Acquire::And.is_satisfied(6, 2) && !Acquire::And.is_satisfied(6, 1));
        assert!(!Acquire::And.is_satisfied(0, u32::MAX));
    }

    #[test]
    fn operations_are_the_host_methods() {
        assert_eq!(Acquire::from_operation(1), Some(Acquire::Equal));
        assert_eq!(Acquire::from_operation(4), Some(Acquire::GreaterOrEqual));
        assert_eq!(Acquire::from_operation(8), Some(Acquire::And));
        assert_eq!(Acquire::from_operation(2), None);
        assert_eq!(Acquire::from_operation(0), None);
    }
}
