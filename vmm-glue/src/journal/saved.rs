//! The contents of a journal, and their restoration in the next process.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use saved_state::{Invalid, Known, SavedState, ascend, only_version};
use serde::{Deserialize, Serialize};

use super::{CLIENT, Journal, Kept, SLOTS, Slots, file};
use crate::connection::{Connection, EXTRA_RECEIVE_BYTES, SavedConnection, max_message};
use crate::device::{Device, NUM_REGIONS, RegionIndex, RegionInfo};
use crate::link::{ClientInfo, Link, SavedLink};
use crate::options::ServerOptions;
use vmm_memory::descriptors::{Given, ParkError};
use vmm_memory::keeper::Keeper;

/// Number of saved configuration space dwords: the header and the capabilities, which contain the registers that a
/// client can set.
const WORDS: usize = 64;
/// Size of a dword in bytes.
const WORD: u64 = 4;
/// Index of the dword that consists of the command register (lower half) and the status register (upper half).
const COMMAND: usize = 1;

/// Configuration space dwords, as read from the device.
pub(crate) type Words = Vec<u32>;

/// The committed state of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedJournal {
    /// Number of the commit.
    pub(crate) sequence: u64,
    /// Stream position just past the last message that this commit includes.
    pub(crate) position: u64,
    /// Number of processes that were killed while they served this client.
    pub(crate) deaths: u32,
    /// First dwords of PCI configuration space, or empty for a client that has not negotiated.
    pub(crate) words: Words,
    /// Region sizes in bytes, as reported to the client.
    pub(crate) regions: Vec<u64>,
    pub(crate) connection: SavedConnection,
    pub(crate) link: SavedLink,
    /// Descriptors of region files that the client may have mapped, by region number.
    pub(crate) files: Vec<(u8, u32)>,
    /// Descriptor of the device's own journal.
    pub(crate) device: Option<u32>,
}

only_version!(SavedJournal, "vmm-glue.journal", 3);

/// Changes that bring a new device to the state that the client expects from its previous device.
#[derive(Clone, Debug, Default)]
pub(crate) struct Revival {
    words: Words,
    regions: Vec<u64>,
    files: Vec<(RegionIndex, Arc<OwnedFd>)>,
    device: Option<Arc<OwnedFd>>,
    pub deaths: u32,
}

impl Revival {
    /// Returns true if the device continues as if the process had not been killed.
    pub fn keeps_state(&self) -> bool {
        self.device.is_some()
    }

    /// Applies the changes for a client that has negotiated. The device either resumes from its journal, or is reset
    /// and receives its old configuration and the client's memory.
    pub fn carry_out(&self, device: &mut dyn Device, link: &Link) -> Result<(), Invalid> {
        let sizes: Vec<u64> = device.regions().iter().map(RegionInfo::size).collect();
        Invalid::unless(device.is_renewable() && sizes == self.regions, || "the device's regions have changed".into())?;
        if let Some(journal) = &self.device {
            device.take_journal(Arc::clone(journal)).map_err(Invalid::new)?;
        }
        for (region, file) in &self.files {
            device
                .take_file(*region, Arc::clone(file))
                .map_err(|error| Invalid::new(format_args!("{region:?}: {error}")))?;
        }
        device.connected();
        for region in link.memory().snapshot().regions() {
            device.dma_map(region).map_err(|error| {
                Invalid::new(format_args!("memory at {:#x} of {:#x} bytes: {error}", region.gpa, region.size))
            })?;
        }
        let mut write = |at: usize, bytes: &[u8]| {
            let offset = u64::try_from(at).unwrap_or(u64::MAX).saturating_mul(WORD);
            let written = device.region_write(RegionIndex::Config, offset, bytes);
            written
                .map(|ack| ack.complete_now(device))
                .map_err(|error| Invalid::new(format_args!("configuration at {offset:#x}: {error}")))
        };
        let others = self.words.iter().enumerate().filter(|(at, _)| *at != COMMAND);
        others.clone().try_for_each(|(at, word)| write(at, &word.to_le_bytes()))?;
        // This write enables bus mastering, so it comes last. It omits the status half, because writing ones to it
        // would clear bits.
        if let Some([low, high, ..]) = self.words.get(COMMAND).map(|word| word.to_le_bytes()) {
            write(COMMAND, &[low, high])?;
        }
        let now = read_words(device);
        let command = |words: &Words| words.get(COMMAND).map(|word| word & 0xffff);
        let same = others.into_iter().all(|(at, word)| now.get(at) == Some(word));
        Invalid::unless(same && command(&now) == command(&self.words), || "the kind of the device has changed".into())
    }
}

/// Reads the first [`WORDS`] dwords of PCI configuration space. Returns an empty vector if a read fails.
pub(crate) fn read_words(device: &mut dyn Device) -> Words {
    let mut words = Vec::with_capacity(WORDS);
    for offset in (0..u64::MAX).step_by(size_of::<u32>()).take(WORDS) {
        let mut word = [0; 4];
        if device.region_read(RegionIndex::Config, offset, &mut word).is_err() {
            return Vec::new();
        }
        words.push(u32::from_le_bytes(word));
    }
    words
}

impl SavedJournal {
    /// Returns the newest complete commit in a file.
    fn newest(journal: &OwnedFd) -> Result<Self, ParkError> {
        let mut newest: Option<Self> = None;
        let mut why = Invalid::new("nothing was committed");
        for half in [0, 1] {
            let Some(bytes) = file::read_half(journal.as_fd(), half) else { continue };
            let saved = SavedState::parse(&bytes, &[Known::for_part::<Self>()]).and_then(|mut file| {
                let saved: Self = file.take(CLIENT)?;
                file.finish().map(|()| saved)
            });
            match saved {
                Ok(saved) if newest.as_ref().is_none_or(|newest| newest.sequence < saved.sequence) => {
                    newest = Some(saved)
                }
                Ok(_) => {}
                Err(error) => why = Invalid::new(error),
            }
        }
        newest.ok_or(ParkError::Invalid(why))
    }
}

impl Journal {
    /// Restores a killed process's client from its journal. Restores the client's memory and interrupts to `link`,
    /// which must be new.
    pub(crate) fn restored(
        keeper: Arc<dyn Keeper>,
        kept: Vec<(Kept, OwnedFd)>,
        link: &Link,
        client: ClientInfo,
        options: &ServerOptions,
    ) -> Result<Connection, ParkError> {
        let mut journal = None;
        let mut slots: [Option<OwnedFd>; SLOTS as usize] = Default::default();
        for (place, fd) in kept {
            match place {
                Kept::Journal => journal = Some(fd),
                Kept::Slot(at) => {
                    if let Some(slot) = slots.get_mut(usize::from(at)) {
                        *slot = Some(fd);
                    }
                }
            }
        }
        let journal = journal.ok_or_else(|| Invalid::new("its journal is missing"))?;
        let there: Vec<u8> = (0u8..).zip(&slots).filter_map(|(at, slot)| slot.as_ref().map(|_| at)).collect();
        let saved = SavedJournal::newest(&journal)?;
        let SavedJournal {
            sequence,
            position,
            deaths,
            words,
            regions,
            mut connection,
            link: mut behind,
            files,
            device,
        } = saved;
        Invalid::unless(words.len() <= WORDS && regions.len() <= NUM_REGIONS, || {
            format!("{} dwords and {} regions are too many", words.len(), regions.len())
        })?;
        let message = max_message(connection.max_transfer()?);
        let room = file::adopt(&journal, message, EXTRA_RECEIVE_BYTES)?;
        let marks = room.marks();
        if marks.sent >= sequence {
            connection.forget_output();
        }
        // The client may still reply to earlier messages, whose IDs are unknown.
        behind.renew(marks.next_id);
        let given = Given::slots(slots);
        let deaths = deaths.saturating_add(1);
        Invalid::unless(ascend(files.iter().map(|(region, _)| region)), || "region files are out of order".into())?;
        let mapped = |(region, fd): (u8, u32)| -> Result<_, ParkError> {
            let region = RegionIndex::from_wire(region.into());
            let region = region.ok_or_else(|| Invalid::new("a file belongs to a region that does not exist"))?;
            Ok((region, Arc::new(given.take(fd)?)))
        };
        let files = files.into_iter().map(mapped).collect::<Result<Vec<_>, ParkError>>()?;
        let device = device.map(|fd| given.take(fd)).transpose()?.map(Arc::new);
        let revival = Revival { words: words.clone(), regions, files, device, deaths };
        let mut restored = Connection::revived(connection, &given, link.clone(), client, options, room, position)?;
        link.restore(behind, &given, &options.memory, client)?;
        link.dma().go_on_from(marks.next_id);
        let taken: Vec<_> = given.taken().into_iter().map(|(name, fd)| (name, fd.as_raw_fd())).collect();
        let mut journal = Self::with(keeper, journal, Slots::from_taken(&taken, &there));
        (journal.sequence, journal.deaths, journal.words, journal.kept) = (sequence, deaths, words, true);
        restored.goes_on_with(journal, revival);
        Ok(restored)
    }
}
