//! Reasons why a program cannot continue in another worker.

use std::fmt;

/// A part of a program's state that a worker cannot save. The program is unchanged when the obstacle is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// A stream is being captured into a graph.
    Capture,
    /// The program's context has failed with the given CUDA error.
    Sticky(u32),
    /// An object that cannot be recreated. Contains the message type of the call that created it.
    Object(u32),
    /// A module whose variables cannot be found. The worker logs the variable or the reason.
    Variables,
    /// A recorded event with timing. Its time would be lost.
    Timing,
    /// Memory that the driver library has not backed by chunks, or cannot allocate at a given address.
    Placement,
    /// The program's memory and images are larger than the file. Contains their size in bytes.
    Size(u64),
    /// The program has had more objects than the worker can log.
    Log,
    /// The program's work has not completed in time.
    Busy,
    /// The program has not started.
    Starting,
    /// Memory contents could not be read, or the file could not be written.
    Copy,
    /// The program knows the address of a module's variable, or its memory contains the address. The address would
    /// differ in the next worker.
    Addresses,
    /// A module whose kernels allocate memory. The contents of this memory would be lost.
    Heap,
    /// An obstacle that is unknown to this version.
    Unknown(u32),
}

impl Obstacle {
    /// Returns the number of the obstacle's kind, and its detail.
    pub(crate) fn numbers(self) -> (u32, u64) {
        match self {
            Self::Capture => (1, 0),
            Self::Sticky(code) => (2, code.into()),
            Self::Object(op) => (3, op.into()),
            Self::Variables => (4, 0),
            Self::Timing => (5, 0),
            Self::Placement => (6, 0),
            Self::Size(bytes) => (7, bytes),
            Self::Log => (8, 0),
            Self::Busy => (9, 0),
            Self::Starting => (10, 0),
            Self::Copy => (11, 0),
            Self::Addresses => (12, 0),
            Self::Heap => (13, 0),
            Self::Unknown(number) => (number, 0),
        }
    }

    pub(crate) fn from_numbers(number: u32, detail: u64) -> Self {
        let short = u32::try_from(detail).unwrap_or(u32::MAX);
        match number {
            1 => Self::Capture,
            2 => Self::Sticky(short),
            3 => Self::Object(short),
            4 => Self::Variables,
            5 => Self::Timing,
            6 => Self::Placement,
            7 => Self::Size(detail),
            8 => Self::Log,
            9 => Self::Busy,
            10 => Self::Starting,
            11 => Self::Copy,
            12 => Self::Addresses,
            13 => Self::Heap,
            other => Self::Unknown(other),
        }
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Capture => f.write_str("a stream captures a graph: retry when the capture has ended"),
            Self::Sticky(code) => write!(f, "its context has failed with CUDA error {code}"),
            Self::Object(op) => write!(f, "it has an object of call {op} that cannot be created again"),
            Self::Variables => {
                f.write_str("a module has variables that are not found: the messages of its worker name them")
            }
            Self::Timing => f.write_str("it has recorded an event with timing, whose time would be lost"),
            Self::Placement => f.write_str("it has memory outside chunks, which cannot get the same address again"),
            Self::Size(bytes) => write!(f, "its memory and images have {} MiB, more than the limit", bytes >> 20),
            Self::Log => f.write_str("it has more objects than the log of its worker"),
            Self::Busy => f.write_str("its work has not ended in time: retry when it computes less"),
            Self::Starting => f.write_str("it has not started yet: retry"),
            Self::Copy => f.write_str("its memory could not be read, or the host has no memory for a copy of it"),
            Self::Addresses => f.write_str("it uses the address of a module's variable, which would change"),
            Self::Heap => f.write_str("its kernels allocate memory (malloc), whose contents would be lost"),
            Self::Unknown(number) => write!(f, "an obstacle with number {number}: update the daemon"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_obstacle_has_its_numbers_and_its_text() {
        let known: Vec<_> = (1..=13).map(|number| Obstacle::from_numbers(number, 700)).collect();
        for (obstacle, number) in known.iter().zip(1..) {
            let (found, detail) = obstacle.numbers();
            assert_eq!(found, number);
            assert_eq!(Obstacle::from_numbers(found, detail), *obstacle);
            assert!(!matches!(obstacle, Obstacle::Unknown(_)) && !obstacle.to_string().is_empty());
        }
        assert_eq!(Obstacle::from_numbers(99, 5), Obstacle::Unknown(99));
        assert_eq!(Obstacle::from_numbers(7, u64::MAX), Obstacle::Size(u64::MAX));
    }
}
