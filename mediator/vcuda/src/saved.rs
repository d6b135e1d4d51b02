//! Saved state of the function, for upgrades and for the journal.

use saved_state::{Invalid, Part};
use serde::{Deserialize, Serialize};

use crate::command::{Answer, Header};
use crate::core::{SavedCore, SavedWait};
use crate::registers::SavedRegisters;

/// Maximum number of commands without a response, which is the number of descriptors of the control queue.
pub(crate) const MAX_OUTSTANDING: usize = 1024;
/// Maximum number of writable buffers of a command.
pub(crate) const MAX_WRITABLE: usize = 8;

/// Saved state of a function. The descriptors of its window and of its workers' links are handed over separately.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedFunction {
    /// The PCI configuration space.
    pub(crate) config: Vec<u8>,
    pub(crate) registers: SavedRegisters,
    pub(crate) progress: Progress,
    pub(crate) outstanding: Vec<SavedCommand>,
    pub(crate) structure: SavedStructure,
    /// IDs of workers whose links are handed over, in the order of their descriptors.
    pub(crate) links: Vec<u64>,
}

/// The first version of [`SavedFunction`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedFunctionV1 {
    config: Vec<u8>,
    registers: SavedRegisters,
    progress: Progress,
    outstanding: Vec<SavedCommand>,
    structure: SavedStructureV1,
    links: Vec<u64>,
}

impl Part for SavedFunction {
    const NAME: &'static str = "vcuda";
    const VERSION: u32 = 2;
    type Before = SavedFunctionV1;

    fn from_before(before: SavedFunctionV1) -> Result<Self, Invalid> {
        let SavedFunctionV1 { config, registers, progress, outstanding, structure, links } = before;
        let structure = SavedStructure::from_before(structure)?;
        Ok(Self { config, registers, progress, outstanding, structure, links })
    }

    fn to_before(&self) -> Result<SavedFunctionV1, Invalid> {
        let Self { config, registers, progress, outstanding, structure, links } = self.clone();
        let structure = structure.to_before()?;
        Ok(SavedFunctionV1 { config, registers, progress, outstanding, structure, links })
    }
}

/// The part of the state that changes with contexts, blobs and workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedStructure {
    pub core: SavedCore,
    pub processes: Vec<SavedProcess>,
    /// Number of popped commands whose effects this state includes.
    pub popped: u32,
    pub last_ticket: u64,
    /// Name of the card that the workers use. `None` in the first version, in which VMs do not change their card.
    pub card: Option<String>,
}

/// The first version of [`SavedStructure`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedStructureV1 {
    core: SavedCore,
    processes: Vec<SavedProcess>,
    popped: u32,
    last_ticket: u64,
}

impl Part for SavedStructure {
    const NAME: &'static str = "vcuda.structure";
    const VERSION: u32 = 2;
    type Before = SavedStructureV1;

    fn from_before(before: SavedStructureV1) -> Result<Self, Invalid> {
        let SavedStructureV1 { core, processes, popped, last_ticket } = before;
        Ok(Self { core, processes, popped, last_ticket, card: None })
    }

    fn to_before(&self) -> Result<SavedStructureV1, Invalid> {
        // An earlier program starts all workers of a VM on the card that the VM's configuration names.
        let Self { core, processes, popped, last_ticket, card: _ } = self.clone();
        Ok(SavedStructureV1 { core, processes, popped, last_ticket })
    }
}

/// A worker and its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedProcess {
    pub worker: u64,
    pub id: ProcessId,
}

/// Unique identity of a process on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// Process ID, which may be reused after the process has exited.
    pub pid: i32,
    /// Start time of the process in clock ticks since boot.
    pub started: u64,
}

/// Command counts of the current queue. They wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Progress {
    /// Number of commands popped from the queue.
    pub popped: u32,
    /// Number of commands with a response.
    pub answered: u32,
}

/// A command without a response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedCommand {
    /// First descriptor of the command's chain.
    pub head: u16,
    /// Number of commands that were popped before this command.
    pub index: u32,
    /// Number of earlier responses, once this command's response is being sent.
    pub answering: Option<u32>,
    pub ticket: u64,
    pub header: [u8; 24],
    pub reply: Reply,
    /// Guest address and size in bytes of each range of memory for the response.
    pub writable: Vec<(u64, u64)>,
}

/// Condition for sending the response to a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// A word has reached its value.
    Word(SavedWait),
    /// A worker has removed a blob, or has exited.
    Removal,
    /// No condition: the response is already known.
    Ready(ReadyAnswer),
}

/// Response to a command that changes the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ReadyAnswer {
    Ok,
    Mapped,
    OutOfMemory,
    NoResource,
    Invalid,
    Unspecified,
}

impl ReadyAnswer {
    /// All responses, in the order of their codes in the journal.
    pub(crate) const ALL: [Self; 6] =
        [Self::Ok, Self::Mapped, Self::OutOfMemory, Self::NoResource, Self::Invalid, Self::Unspecified];

    /// Returns the saved form of a response, or `None` for responses to queries, which change nothing.
    pub(crate) fn new(answer: Answer) -> Option<Self> {
        Some(match answer {
            Answer::Ok => Self::Ok,
            Answer::Mapped => Self::Mapped,
            Answer::OutOfMemory => Self::OutOfMemory,
            Answer::NoResource => Self::NoResource,
            Answer::Invalid => Self::Invalid,
            Answer::Unspecified => Self::Unspecified,
            Answer::NoDisplays | Answer::CapsetInfo | Answer::Capset { .. } => return None,
        })
    }

    pub(crate) fn answer(self) -> Answer {
        match self {
            Self::Ok => Answer::Ok,
            Self::Mapped => Answer::Mapped,
            Self::OutOfMemory => Answer::OutOfMemory,
            Self::NoResource => Answer::NoResource,
            Self::Invalid => Answer::Invalid,
            Self::Unspecified => Answer::Unspecified,
        }
    }
}

impl SavedCommand {
    /// Returns the command's header.
    pub(crate) fn header(&self) -> Header {
        Header::from(self.header)
    }

    /// Checks the values of this command in isolation.
    ///
    /// # Errors
    /// Returns an error if a value is invalid.
    pub(crate) fn check(&self) -> Result<(), Invalid> {
        let fits = usize::from(self.head) < MAX_OUTSTANDING && self.writable.len() <= MAX_WRITABLE;
        Invalid::unless(fits, || format!("command {} is invalid", self.head))
    }
}

#[cfg(test)]
mod tests {
    use saved_state::{Known, SavedState, Writer};

    use super::*;
    use crate::core::{Core, Limits};

    /// A structure of the first version: no contexts, one process, and two counts.
    const FIRST_VERSION: [u8; 11] = [0, 0, 0, 0, 0, 1, 5, 14, 9, 3, 4];

    #[test]
    fn structure_of_first_version_has_no_card() {
        let core = Core::new(Limits { window_bytes: 1 << 20, workers: 1 }).save();
        let id = ProcessId { pid: 7, started: 9 };
        let processes = vec![SavedProcess { worker: 5, id }];
        let structure = SavedStructure { core, processes, popped: 3, last_ticket: 4, card: Some("gpu0".to_owned()) };
        let reader = Known { name: SavedStructure::NAME.to_owned(), version: 1 };
        let mut writer = Writer::for_reader([0; 16], vec![reader]);
        writer.put(0, &structure).expect("the first version is written");
        let file = writer.finish();
        assert!(file.ends_with(&FIRST_VERSION), "{file:?}");
        let mut read = SavedState::parse(&file, &[Known::for_part::<SavedStructure>()]).expect("known");
        assert_eq!(read.take(0), Ok(SavedStructure { card: None, ..structure }));
    }
}
