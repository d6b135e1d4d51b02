//! Encoded operations and structural problems of batches.

use crate::abi::{MAX_BATCH_OPS, OpHeader, UNIT};
use zerocopy::{FromBytes, Immutable, KnownLayout};

/// An encoded operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawOp<'a> {
    pub(crate) code: u16,
    pub(crate) handle: u32,
    /// Bytes after the header.
    pub(crate) body: &'a [u8],
}

impl<'a> RawOp<'a> {
    /// Removes the first operation from `bytes` and returns it.
    pub(crate) fn split(bytes: &mut &'a [u8]) -> Result<Self, Problem> {
        let (header, _) = OpHeader::read_from_prefix(bytes).map_err(|_| Problem::Missing)?;
        let size = usize::from(header.units).saturating_mul(UNIT as usize);
        let body = bytes.get(size_of::<OpHeader>()..size).ok_or(Problem::Outside(header.units))?;
        *bytes = bytes.get(size..).unwrap_or_default();
        Ok(Self { code: header.code, handle: header.handle, body })
    }

    /// Returns the body, which must consist of exactly one `T`.
    pub(crate) fn exact<T: FromBytes>(&self) -> Result<T, Problem> {
        T::read_from_bytes(self.body).map_err(|_| self.size())
    }

    /// Splits the body into a `T`, elements, and padding to a whole unit. `count` returns the number of elements for a
    /// `T`.
    pub(crate) fn list<T: FromBytes, E: FromBytes + Immutable + KnownLayout>(
        &self,
        count: impl FnOnce(&T) -> u32,
    ) -> Result<(T, &'a [E], &'a [u8]), Problem> {
        let (fixed, rest) = T::read_from_prefix(self.body).map_err(|_| self.size())?;
        // A count that does not fit in `usize` also exceeds the body.
        let count = count(&fixed) as usize;
        let (entries, rest) = <[E]>::ref_from_prefix_with_elems(rest, count).map_err(|_| self.size())?;
        if rest.len() < UNIT as usize { Ok((fixed, entries, rest)) } else { Err(self.size()) }
    }

    fn size(&self) -> Problem {
        Problem::Size { code: self.code, bytes: self.body.len() }
    }
}

/// Structural problems of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The batch is too short for a [`BatchHeader`](crate::abi::BatchHeader).
    #[error("has no header")]
    Short,
    /// The number of operations is 0 or exceeds [`MAX_BATCH_OPS`].
    #[error("declares {0} operations; must be from 1 to {MAX_BATCH_OPS}")]
    Ops(u32),
    /// The declared size exceeds the size of the batch, or [`MAX_BATCH_BYTES`](crate::abi::MAX_BATCH_BYTES).
    #[error("declares {0} bytes of operations, which exceeds its size or the maximum")]
    Bytes(u32),
    /// There are bytes after the last operation.
    #[error("has {0} bytes after its last operation")]
    Rest(usize),
    /// The batch ends before the header of an operation.
    #[error("has no header")]
    Missing,
    /// The size of the operation is less than that of its header, or exceeds the batch.
    #[error("declares {0} units, which is less than its header or exceeds the batch")]
    Outside(u16),
    /// Version 1 does not define this code.
    #[error("has code {0:#x}, which version 1 does not define")]
    Code(u16),
    /// The size of the operation does not match its code or its count.
    #[error("has a body of {bytes} bytes, which does not match code {code:#x} or its count")]
    Size {
        /// Code of the operation.
        code: u16,
        /// Size of the body in bytes.
        bytes: usize,
    },
}
