//! The messages and their encoding.

use crate::obstacle::Obstacle;

/// Length of each packet in bytes.
pub const PACKET: usize = 32;

/// A message to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToWorker {
    /// The guest program has a new blob.
    Blob {
        /// Identifier of the blob in the guest's messages.
        id: u32,
        /// `cuda_ring::BlobKind` as a number.
        kind: u32,
        /// Serial number, which distinguishes uses of the same identifier.
        serial: u32,
        /// Offset in the window, in bytes.
        offset: u64,
        /// Size in bytes.
        size: u64,
    },
    /// The guest program releases a blob.
    Remove {
        /// Identifier of the blob.
        id: u32,
        /// Serial number of the blob.
        serial: u32,
    },
    /// The guest has rung the doorbell because its rings contain messages.
    Doorbell,
    /// The guest program has exited, or the device does not know the worker.
    Goodbye,
    /// The worker must save its state in the packet's file and exit, so that the program can continue in another
    /// worker. If part of the state cannot be saved, the worker replies with `Refused` and continues.
    Save,
    /// Like `Save`, but the worker does not exit: it executes no messages until `Resume` arrives or the connection is
    /// closed.
    Hold,
    /// The worker executes its program again after `Hold`, or for the first time if it was started for a program of
    /// another worker.
    Resume,
}

/// A message from a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromWorker {
    /// The worker and the card no longer use a blob.
    Removed {
        /// Identifier of the blob.
        id: u32,
        /// Serial number of the blob.
        serial: u32,
    },
    /// Words in the control blob have changed while a guest thread waits.
    Check,
    /// The worker exits because of an error.
    Failed {
        /// Cause of the error.
        reason: Reason,
    },
    /// The worker's state is in the file of `Save` or `Hold`. After `Save`, the worker exits.
    Saved,
    /// The worker has restored the state of the program's previous worker, and can continue the program.
    Restored,
    /// The worker has not saved its state, and continues to serve the program.
    Refused {
        /// Part of the state that cannot be saved.
        obstacle: Obstacle,
    },
}

/// Reason why a worker exits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The driver library cannot be loaded or initialized.
    Driver,
    /// The addresses that the guest and the worker must share are in use.
    Addresses,
    /// A ring contains an unknown or malformed message, or a blob is invalid.
    Malformed,
    /// The guest has exceeded a limit on blobs, handles or bytes.
    Limit,
    /// The sandbox cannot be set up.
    Sandbox,
    /// The worker made a system call that its sandbox forbids. Contains the number of the call.
    Forbidden(u32),
    /// The state saved by the program's previous worker cannot be restored.
    Restore,
    /// A reason that is unknown to this version.
    Unknown(u32),
}

/// A packet that is not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the packet is not a message of this link")]
pub struct Malformed;

impl Reason {
    fn number(self) -> u32 {
        match self {
            Self::Driver => 1,
            Self::Addresses => 2,
            Self::Malformed => 3,
            Self::Limit => 4,
            Self::Sandbox => 5,
            Self::Forbidden(_) => 6,
            Self::Restore => 7,
            Self::Unknown(number) => number,
        }
    }

    /// Returns the number that a reason contains, or 0.
    fn detail(self) -> u64 {
        if let Self::Forbidden(call) = self { call.into() } else { 0 }
    }

    fn from_numbers(number: u32, detail: u64) -> Self {
        match number {
            1 => Self::Driver,
            2 => Self::Addresses,
            3 => Self::Malformed,
            4 => Self::Limit,
            5 => Self::Sandbox,
            6 => Self::Forbidden(u32::try_from(detail).unwrap_or(u32::MAX)),
            7 => Self::Restore,
            other => Self::Unknown(other),
        }
    }
}

/// Fields of a packet: type, identifier, kind, serial number, offset and size.
type Fields = (u32, u32, u32, u32, u64, u64);

fn pack((tag, id, kind, serial, offset, size): Fields) -> [u8; PACKET] {
    let mut packet = [0; PACKET];
    packet[..4].copy_from_slice(&tag.to_le_bytes());
    packet[4..8].copy_from_slice(&id.to_le_bytes());
    packet[8..12].copy_from_slice(&kind.to_le_bytes());
    packet[12..16].copy_from_slice(&serial.to_le_bytes());
    packet[16..24].copy_from_slice(&offset.to_le_bytes());
    packet[24..].copy_from_slice(&size.to_le_bytes());
    packet
}

fn unpack(packet: &[u8]) -> Result<Fields, Malformed> {
    let packet: &[u8; PACKET] = packet.try_into().map_err(|_| Malformed)?;
    let word = |at: usize| packet.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes);
    let long = |at: usize| packet.get(at..at + 8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes);
    let all = || Some((word(0)?, word(4)?, word(8)?, word(12)?, long(16)?, long(24)?));
    all().ok_or(Malformed)
}

impl ToWorker {
    /// Encodes the message.
    pub fn encode(self) -> [u8; PACKET] {
        pack(match self {
            Self::Blob { id, kind, serial, offset, size } => (1, id, kind, serial, offset, size),
            Self::Remove { id, serial } => (2, id, 0, serial, 0, 0),
            Self::Doorbell => (3, 0, 0, 0, 0, 0),
            Self::Goodbye => (4, 0, 0, 0, 0, 0),
            Self::Save => (5, 0, 0, 0, 0, 0),
            Self::Hold => (6, 0, 0, 0, 0, 0),
            Self::Resume => (7, 0, 0, 0, 0, 0),
        })
    }

    /// Decodes a packet.
    ///
    /// # Errors
    /// Returns an error if the packet has a different length or an unknown type.
    pub fn decode(packet: &[u8]) -> Result<Self, Malformed> {
        match unpack(packet)? {
            (1, id, kind, serial, offset, size) => Ok(Self::Blob { id, kind, serial, offset, size }),
            (2, id, _, serial, ..) => Ok(Self::Remove { id, serial }),
            (3, ..) => Ok(Self::Doorbell),
            (4, ..) => Ok(Self::Goodbye),
            (5, ..) => Ok(Self::Save),
            (6, ..) => Ok(Self::Hold),
            (7, ..) => Ok(Self::Resume),
            _ => Err(Malformed),
        }
    }
}

impl FromWorker {
    /// Encodes the message.
    pub fn encode(self) -> [u8; PACKET] {
        pack(match self {
            Self::Removed { id, serial } => (1, id, 0, serial, 0, 0),
            Self::Check => (2, 0, 0, 0, 0, 0),
            Self::Failed { reason } => (3, 0, reason.number(), 0, reason.detail(), 0),
            Self::Saved => (4, 0, 0, 0, 0, 0),
            Self::Restored => (6, 0, 0, 0, 0, 0),
            Self::Refused { obstacle } => {
                let (number, detail) = obstacle.numbers();
                (5, 0, number, 0, detail, 0)
            }
        })
    }

    /// Decodes a packet.
    ///
    /// # Errors
    /// Returns an error if the packet has a different length or an unknown type.
    pub fn decode(packet: &[u8]) -> Result<Self, Malformed> {
        match unpack(packet)? {
            (1, id, _, serial, ..) => Ok(Self::Removed { id, serial }),
            (2, ..) => Ok(Self::Check),
            (3, _, reason, _, detail, _) => Ok(Self::Failed { reason: Reason::from_numbers(reason, detail) }),
            (4, ..) => Ok(Self::Saved),
            (6, ..) => Ok(Self::Restored),
            (5, _, number, _, detail, _) => Ok(Self::Refused { obstacle: Obstacle::from_numbers(number, detail) }),
            _ => Err(Malformed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_message_decodes_to_itself() {
        let to = [
            ToWorker::Blob { id: 7, kind: 4, serial: 9, offset: 1 << 40, size: 65536 },
            ToWorker::Remove { id: 7, serial: 9 },
            ToWorker::Doorbell,
            ToWorker::Goodbye,
            ToWorker::Save,
            ToWorker::Hold,
            ToWorker::Resume,
        ];
        for message in to {
            assert_eq!(ToWorker::decode(&message.encode()), Ok(message));
        }
        let reasons =
            [Reason::Driver, Reason::Addresses, Reason::Malformed, Reason::Limit, Reason::Sandbox, Reason::Restore];
        let failed = reasons
            .into_iter()
            .chain([Reason::Forbidden(59), Reason::Unknown(99)])
            .map(|reason| FromWorker::Failed { reason });
        let others =
            [FromWorker::Removed { id: 3, serial: 8 }, FromWorker::Check, FromWorker::Saved, FromWorker::Restored];
        for message in others.into_iter().chain(failed) {
            assert_eq!(FromWorker::decode(&message.encode()), Ok(message));
        }
    }

    #[test]
    fn packet_of_other_length_or_type_is_malformed() {
        assert_eq!(ToWorker::decode(&ToWorker::Doorbell.encode()[..31]), Err(Malformed));
        assert_eq!(FromWorker::decode(&[0; PACKET]), Err(Malformed));
        assert_eq!(ToWorker::decode(&[9; PACKET]), Err(Malformed));
    }
}
