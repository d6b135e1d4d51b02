//! Operations in binary format, and structural problems of batches.

use crate::abi::{MAX_BATCH_OPS, OpHeader, UNIT};
use zerocopy::{FromBytes, Immutable, KnownLayout};

/// An operation as encoded in a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawOp<'a> {
    pub(crate) code: u16,
    pub(crate) handle: u32,
    /// The bytes that follow the header.
    pub(crate) body: &'a [u8],
}

impl<'a> RawOp<'a> {
    /// Splits the first operation off `bytes`.
    pub(crate) fn split(bytes: &mut &'a [u8]) -> Result<Self, Problem> {
        let (header, _) = OpHeader::read_from_prefix(bytes).map_err(|_| Problem::Missing)?;
        let size = usize::from(header.units).saturating_mul(UNIT as usize);
        let body = bytes.get(size_of::<OpHeader>()..size).ok_or(Problem::Outside(header.units))?;
        *bytes = bytes.get(size..).unwrap_or_default();
        Ok(Self { code: header.code, handle: header.handle, body })
    }

    /// Returns the body if it consists of exactly one `T`.
    pub(crate) fn exact<T: FromBytes>(&self) -> Result<T, Problem> {
        T::read_from_bytes(self.body).map_err(|_| self.size())
    }

    /// Returns the body: a `T` followed by elements, padded to whole units. `count` returns the number of elements,
    /// given the `T`.
    pub(crate) fn list<T: FromBytes, E: FromBytes + Immutable + KnownLayout>(
        &self,
        count: impl FnOnce(&T) -> u32,
    ) -> Result<(T, &'a [E], &'a [u8]), Problem> {
        let (fixed, rest) = T::read_from_prefix(self.body).map_err(|_| self.size())?;
        // A count that exceeds the address space also exceeds the body.
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
    /// The batch is shorter than a [`BatchHeader`](crate::abi::BatchHeader).
    #[error("has no header")]
    Short,
    /// The number of operations is 0 or exceeds [`MAX_BATCH_OPS`].
    #[error("declares {0} operations; must be from 1 to {MAX_BATCH_OPS}")]
    Ops(u32),
    /// The size exceeds the available bytes, or [`MAX_BATCH_BYTES`](crate::abi::MAX_BATCH_BYTES).
    #[error("declares {0} bytes of operations, more than it contains or than the maximum")]
    Bytes(u32),
    /// Bytes remain after the last operation.
    #[error("has {0} bytes after its last operation")]
    Rest(usize),
    /// The batch ends before an operation's header.
    #[error("has no header")]
    Missing,
    /// The operation is shorter than its header, or extends beyond the batch.
    #[error("declares {0} units, less than its header or more than are left")]
    Outside(u16),
    /// Version 1 does not define this code.
    #[error("has the code {0:#x}, which version 1 does not have")]
    Code(u16),
    /// The operation's size does not match its code or its count.
    #[error("has {bytes} bytes after its header, which do not match the code {code:#x} or its count")]
    Size {
        /// Code of the operation.
        code: u16,
        /// Size of the operation's body in bytes.
        bytes: usize,
    },
}
