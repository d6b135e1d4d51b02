//! Batches of operations: decodes bytes copied from shared memory into typed operations, and encodes the answers.
//!
//! A batch can contain two kinds of errors:
//! - *Structure*: sizes and counts are inconsistent, or codes are not defined by version 1. [`Batch::parse`] first
//!   checks the whole batch. If this check fails, the batch is [`Malformed`], and no operation is started.
//! - *Values*: a reserved field is nonzero, a value is undefined, or a feature was not accepted. The answer to the
//!   operation reports the error ([`Batch::ops`]). Previous operations are completed, and subsequent operations are not
//!   started.

use crate::abi::{Answer, AnswerHeader, BatchHeader, MAX_BATCH_BYTES, MAX_BATCH_OPS, Status, feature, op, share};
use crate::operation::{Fault, Op};
use crate::raw::{Problem, RawOp};
use std::fmt;
use zerocopy::{FromBytes, IntoBytes};

/// A structurally valid batch.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    count: u32,
    bytes: &'a [u8],
}

impl<'a> Batch<'a> {
    /// Parses `data`, the device-readable part of a chain. The caller must have copied it from shared memory exactly
    /// once, because the guest can modify shared memory at any time.
    ///
    /// # Errors
    /// Returns the structural error and its location if the batch is malformed.
    pub fn parse(data: &'a [u8]) -> Result<Self, Malformed> {
        let whole = |problem| Malformed { op: None, problem };
        let Ok((header, rest)) = BatchHeader::read_from_prefix(data) else {
            return Err(whole(Problem::Short));
        };
        if !(1..=MAX_BATCH_OPS).contains(&header.ops) {
            return Err(whole(Problem::Ops(header.ops)));
        }
        let most = (MAX_BATCH_BYTES as usize).saturating_sub(size_of::<BatchHeader>());
        let bytes = rest.get(..header.bytes as usize).filter(|bytes| bytes.len() <= most);
        let bytes = bytes.ok_or(whole(Problem::Bytes(header.bytes)))?;
        let mut left = bytes;
        for index in 0..header.ops {
            let at = |problem| Malformed { op: Some(index), problem };
            let raw = RawOp::split(&mut left).map_err(at)?;
            match Op::decode(raw) {
                Err(Fault::Structure(problem)) => return Err(at(problem)),
                Ok(_) | Err(Fault::Value(_)) => {}
            }
        }
        if left.is_empty() { Ok(Self { count: header.ops, bytes }) } else { Err(whole(Problem::Rest(left.len()))) }
    }

    /// Returns the number of operations, from 1 to [`MAX_BATCH_OPS`].
    #[must_use]
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// Returns the operations, given the accepted features ([`feature`]). Each item is an operation, or the status with
    /// which it is rejected.
    pub fn ops(&self, features: u32) -> impl Iterator<Item = Result<Op<'a>, Status>> + use<'a> {
        let mut left = self.bytes;
        (0..self.count).map(move |_| next(&mut left, features))
    }
}

/// Removes and decodes the first operation of structurally valid bytes.
fn next<'a>(left: &mut &'a [u8], features: u32) -> Result<Op<'a>, Status> {
    // The batch was validated, so it is not malformed.
    let raw = RawOp::split(left).map_err(|_| Status::Malformed)?;
    if needs(raw) & !features != 0 {
        return Err(Status::Unsupported);
    }
    Op::decode(raw).map_err(|fault| match fault {
        Fault::Structure(_) => Status::Malformed,
        Fault::Value(status) => status,
    })
}

/// A batch in progress, which can be suspended between two operations and resumed later. Contains the bytes and the
/// current position.
#[derive(Clone, Debug)]
pub struct Begun {
    bytes: Vec<u8>,
    /// Byte offset of the current operation.
    at: usize,
    answers: Answers,
}

impl Begun {
    /// Parses bytes like [`Batch::parse`], but takes ownership of them.
    ///
    /// # Errors
    /// See [`Batch::parse`].
    pub fn new(bytes: Vec<u8>) -> Result<Self, Malformed> {
        let answers = Answers::new(Batch::parse(&bytes)?.count);
        Ok(Self { bytes, at: size_of::<BatchHeader>(), answers })
    }

    /// Returns the current operation, or the status with which it is rejected. Returns `None` after the last operation.
    #[must_use]
    pub fn current(&self, features: u32) -> Option<Result<Op<'_>, Status>> {
        if self.answers.status != Status::Done || self.answers.done >= self.answers.count {
            return None;
        }
        Some(next(&mut self.bytes.get(self.at..)?, features))
    }

    /// Records the answer to the current operation, and advances to the next one.
    pub fn answer(&mut self, result: Result<u64, Status>) {
        if let Some(mut left) = self.bytes.get(self.at..)
            && RawOp::split(&mut left).is_ok()
        {
            self.at = self.bytes.len().saturating_sub(left.len());
        }
        self.answers.push(result);
    }

    /// Returns the answers.
    #[must_use]
    pub fn into_answers(self) -> Answers {
        self.answers
    }
}

/// Returns the feature to which an operation code belongs, or `None` if version 1 does not define the code.
#[must_use]
pub const fn feature_of(code: u16) -> Option<u32> {
    match code {
        op::TABLE_CREATE
        | op::TABLE_DESTROY
        | op::DIRECTORY_SET
        | op::ENTRIES_RUN
        | op::ENTRIES_LIST
        | op::ENTRIES_ZERO
        | op::DIRECTORY_BIND
        | op::FLUSH => Some(feature::TABLES),
        op::CHANNEL_CREATE
        | op::CHANNEL_BIND
        | op::CHANNEL_ENABLE
        | op::CHANNEL_DISABLE
        | op::CHANNEL_DESTROY
        | op::RUNLIST => Some(feature::CHANNELS),
        op::MEMORY_FILL | op::MEMORY_COPY => Some(feature::MEMORY),
        op::BUFFER_PRIORITY => Some(feature::PRIORITY),
        op::SHARE_GET | op::SHARE_ATTACH | op::SHARE_DETACH | op::SHARE_CONTROL => Some(feature::SHARE),
        op::QUERY => Some(feature::QUERY),
        _ => None,
    }
}

/// Returns all features that an operation requires.
fn needs(raw: RawOp<'_>) -> u32 {
    let abroad = raw.code == op::SHARE_GET
        && crate::abi::ShareGet::read_from_prefix(raw.body).is_ok_and(|(body, _)| body.flags & share::ABROAD != 0);
    feature_of(raw.code).unwrap_or(0) | if abroad { feature::SHARE_ABROAD } else { 0 }
}

/// Reason why a batch cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Malformed {
    /// Index of the malformed operation, or `None` if the batch itself is malformed.
    pub op: Option<u32>,
    /// The structural problem.
    pub problem: Problem,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.op {
            Some(op) => write!(f, "operation {op}: {}", self.problem),
            None => write!(f, "the batch: {}", self.problem),
        }
    }
}

const ANSWER_BYTES: usize = size_of::<Answer>();

/// Answers to the executed operations of a batch.
#[derive(Clone, Debug)]
pub struct Answers {
    status: Status,
    /// Number of completed operations.
    done: u32,
    count: u32,
    /// Answers to the started operations.
    answers: Vec<Answer>,
}

impl Answers {
    /// Creates an empty list of answers for a batch of `count` operations.
    #[must_use]
    pub fn new(count: u32) -> Self {
        Self { status: Status::Done, done: 0, count: count.min(MAX_BATCH_OPS), answers: Vec::new() }
    }

    /// Creates the answer to a malformed batch, which contains no answers to operations.
    #[must_use]
    pub const fn malformed() -> Self {
        Self { status: Status::Malformed, done: 0, count: 0, answers: Vec::new() }
    }

    /// Records that the next operation was completed with a value (0 if it has none), or that it failed. Returns true
    /// if the subsequent operation may be started.
    pub fn push(&mut self, result: Result<u64, Status>) -> bool {
        if self.status != Status::Done || self.done >= self.count {
            return false;
        }
        match result {
            Ok(value) => {
                self.done = self.done.saturating_add(1);
                self.answers.push(Answer { status: Status::Done as u32, reserved: 0, value });
                true
            }
            Err(status) => {
                self.status = status;
                self.answers.push(Answer { status: status as u32, reserved: 0, value: 0 });
                false
            }
        }
    }

    /// Returns the status of the batch.
    #[must_use]
    pub const fn status(&self) -> Status {
        self.status
    }

    /// Returns the number of completed operations.
    #[must_use]
    pub const fn done(&self) -> u32 {
        self.done
    }

    /// Encodes the answers in at most `room` bytes, for the device-writable part of a chain. Includes as many whole
    /// answers as fit. Returns no bytes if the header does not fit.
    #[must_use]
    pub fn bytes(&self, room: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        let Some(left) = room.checked_sub(size_of::<AnswerHeader>()) else { return bytes };
        bytes.extend_from_slice(AnswerHeader { status: self.status as u32, done: self.done }.as_bytes());
        let not_begun = Answer { status: Status::NotBegun as u32, reserved: 0, value: 0 };
        let all = self.answers.iter().chain(std::iter::repeat(&not_begun)).take(self.count as usize);
        for answer in all.take(left / ANSWER_BYTES) {
            bytes.extend_from_slice(answer.as_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests;
