//! Saves a VM and its memory as a byte stream, and restores it.
//!
//! The stream contains the state that a VM takes to another card ([`moving`](super::moving)). Guest RAM belongs to the
//! client and is not included. The stream is as untrusted as a guest: each part is checked, and a channel's state on
//! the card is rebuilt, except for values that its own work has written.

use super::device::{MediatedVm, Settings};
use super::memory::Overlay;
use super::moving::{Left, Migrating};
use super::saved::SavedOwn;
use card_manager::{Departing, Halted, ManagerError};
use channels::SavedMoving;
use devmodel::SavedVGpu;
use pv::SavedTables;
use saved_state::stream::{Item, PIECE_MAX, StreamReader, StreamWriter};
use saved_state::{Invalid, Known, ReadError, SavedState, Writer, first_version};
use serde::{Deserialize, Serialize};
use shadow_pt::SavedSpaces;
use std::sync::Arc;
use std::time::Duration;
use vram::GuestVramAddr;

/// Identity in the stream header. It is the same for all VMs, because checksums identify the VM.
const IDENTITY: [u8; 16] = *b"VM of a mediator";
/// Owner number of all parts. A stream contains only one VM.
const OWNER: u32 = 0;

/// Origin of a saved VM: its requirements for a card, its settings, and values that its parts do not contain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Origin {
    /// Value of PMC_BOOT_0.
    chip: u32,
    vram_bytes: u64,
    /// Sizes of BAR1 and BAR3 in bytes.
    apertures: [u64; 2],
    /// Capability of the paravirtual interface, or empty if it is not offered.
    paravirtual: Vec<u8>,
    strikes: u32,
    /// Card time at which the VM was saved, in ns.
    now_ns: u64,
}

first_version!(Origin, "vgpu.origin");

impl Origin {
    fn for_vm(vm: &MediatedVm, strikes: u32) -> Self {
        let config = vm.origin();
        Self {
            chip: config.chip.boot0,
            vram_bytes: config.vram_bytes,
            apertures: [config.pci.bar1_bytes, config.pci.bar3_bytes],
            paravirtual: config.vendor_capability,
            strikes,
            now_ns: card_manager::time::now_ns(&**vm.host().card()),
        }
    }

    /// Checks that a VM of this origin can be restored on this card.
    fn check(&self, here: &Self) -> Result<(), Invalid> {
        let Self { chip, vram_bytes, apertures, paravirtual, strikes: _, now_ns: _ } = self;
        let mib = |bytes: u64| bytes >> 20;
        Invalid::unless(*chip == here.chip, || format!("it had chip {chip:#x}, but this card has {:#x}", here.chip))?;
        Invalid::unless(*vram_bytes == here.vram_bytes, || {
            format!("it had `vram_mib` = {}, but this VM has {}", mib(*vram_bytes), mib(here.vram_bytes))
        })?;
        Invalid::unless(*apertures == here.apertures, || {
            let ([bar1, bar3], [own1, own3]) = (apertures.map(mib), here.apertures.map(mib));
            format!("it had apertures of {bar1} and {bar3} MiB, but this card has {own1} and {own3}")
        })?;
        Invalid::unless(*paravirtual == here.paravirtual, || {
            let offered = |capability: &[u8]| if capability.is_empty() { "no" } else { "a" };
            let (there, here) = (offered(paravirtual), offered(&here.paravirtual));
            format!(
                "it was offered {there} paravirtual interface, and this VM is offered {here} one, or one with other \
                 features"
            )
        })
    }
}

/// A VM that is being saved. Its work stays stopped until this value is dropped.
#[must_use = "the VM continues when this is dropped"]
pub struct Saving {
    halted: Halted,
    overlay: Overlay,
    first: Option<Vec<u8>>,
    writer: Option<StreamWriter>,
    chunks: std::vec::IntoIter<GuestVramAddr>,
    /// Address range of the current chunk that has not been written to the stream yet.
    left: std::ops::Range<u64>,
    chunk_bytes: u64,
    data: Vec<u8>,
    memory_bytes: u64,
}

impl MediatedVm {
    /// Halts the VM, which must not be served, and starts saving it. Channels that do not leave their engines within
    /// `limit` are killed.
    ///
    /// # Errors
    /// Returns the errors of [`Self::check_movable`], or an error if the VM does not quiesce.
    pub fn save_all(&self, limit: Duration) -> Result<Saving, ManagerError> {
        self.check_movable()?;
        let halted = self.host().halt(self.id(), limit)?;
        let head = self.head(&halted, limit)?;
        let overlay = self.core().backend.remap().overlay();
        Ok(Saving::for_halted(halted, &head, overlay))
    }

    /// Returns the head of the stream, which precedes the memory. The VM must be halted and not served. Returns an
    /// error if a part of the VM does not quiesce within `limit`, or cannot be saved.
    pub(super) fn head(&self, halted: &Halted, limit: Duration) -> Result<Vec<u8>, ManagerError> {
        let Migrating { gpu, spaces, tables, side, departing, since_ns: _ } = self.migrate_out(halted, limit)?;
        let (channels, strikes) = departing.save()?;
        let mut file = Writer::new(IDENTITY);
        let put = || {
            file.put(OWNER, &Origin::for_vm(self, strikes))?;
            file.put(OWNER, &gpu)?;
            file.put(OWNER, &spaces)?;
            tables.as_ref().map_or(Ok(()), |tables| file.put(OWNER, tables))?;
            file.put(OWNER, &SavedOwn::new(side))?;
            file.put(OWNER, &channels)
        };
        put().map_err(Invalid::new)?;
        Ok(file.finish())
    }
}

impl Saving {
    /// Creates the value for a halted VM. `head` is the head of the stream.
    pub(super) fn for_halted(halted: Halted, head: &[u8], overlay: Overlay) -> Self {
        let (writer, first) = StreamWriter::new(head);
        let chunk_bytes = halted.chunk_bytes();
        let chunk_of = |at: u64| GuestVramAddr(at - at.checked_rem(chunk_bytes).unwrap_or(0));
        let mut chunks = halted.chunks();
        chunks.extend(overlay.addresses().map(chunk_of));
        chunks.sort_unstable();
        chunks.dedup();
        let chunks = chunks.into_iter();
        Self {
            halted,
            overlay,
            first: Some(first),
            writer: Some(writer),
            chunks,
            left: 0..0,
            chunk_bytes,
            data: vec![0; usize::try_from(chunk_bytes).unwrap_or(PIECE_MAX).min(PIECE_MAX)],
            memory_bytes: 0,
        }
    }

    /// Returns the VM, which stays halted.
    fn into_halted(self) -> Halted {
        self.halted
    }

    /// Returns the next part of the stream, or `None` at its end.
    ///
    /// # Errors
    /// Returns an error if the card does not respond.
    pub fn next_bytes(&mut self) -> Result<Option<Vec<u8>>, ManagerError> {
        if let Some(first) = self.first.take() {
            return Ok(Some(first));
        }
        loop {
            let Some(at) = self.next_piece() else { return Ok(self.writer.take().map(StreamWriter::end)) };
            let there = self.halted.read(GuestVramAddr(at), &mut self.data)?;
            if !there {
                self.data.fill(0);
            }
            let over = self.overlay.lay_over(at, &mut self.data);
            // Chunks without memory read as zeros, as do pages that the stream omits.
            if !(there || over) || self.data.iter().all(|byte| *byte == 0) {
                continue;
            }
            let Some(writer) = &mut self.writer else { return Ok(None) };
            self.memory_bytes = self.memory_bytes.saturating_add(self.data.len() as u64);
            return Ok(Some(writer.piece(at, &self.data)));
        }
    }

    /// Returns the number of bytes of memory written to the stream so far.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    fn next_piece(&mut self) -> Option<u64> {
        if self.left.is_empty() {
            let chunk = self.chunks.next()?.0;
            self.left = chunk..chunk.saturating_add(self.chunk_bytes);
        }
        let at = self.left.start;
        self.left.start = at.saturating_add(self.data.len() as u64);
        Some(at)
    }
}

/// Phase of a migration that the client controls.
#[derive(Default)]
pub(super) enum Phase {
    #[default]
    Running,
    Stopped(Halted),
    Saving(Box<Reading>),
    Loading(Halted, Box<Coming>),
    /// Loading a state has failed, so the incomplete VM is unusable until it is reset.
    Failed(#[expect(dead_code, reason = "keeps the VM halted")] Option<Halted>),
}

/// State of a VM that the client is reading.
pub(super) struct Reading {
    saving: Saving,
    /// Current part of the stream, and the offset of its first byte that has not been read yet.
    left: (Vec<u8>, usize),
}

impl Reading {
    pub(super) fn new(saving: Saving) -> Self {
        Self { saving, left: (Vec::new(), 0) }
    }

    /// Returns the VM, which stays halted.
    pub(super) fn into_halted(self) -> Halted {
        self.saving.into_halted()
    }

    /// Copies the next bytes into `data`. Fills `data` completely, except at the end of the stream.
    pub(super) fn read(&mut self, data: &mut [u8]) -> Result<usize, ManagerError> {
        let mut done = 0;
        while done < data.len() {
            let (bytes, at) = &mut self.left;
            let rest = &bytes[*at..];
            if rest.is_empty() {
                match self.saving.next_bytes()? {
                    Some(next) => self.left = (next, 0),
                    None => break,
                }
                continue;
            }
            let len = rest.len().min(data.len() - done);
            data[done..done + len].copy_from_slice(&rest[..len]);
            *at += len;
            done += len;
        }
        Ok(done)
    }
}

/// A saved VM that is being loaded. Its memory is written directly to the receiving VM. Other state is checked, and
/// stored until the stream ends.
#[must_use]
pub struct Coming {
    there: Arc<MediatedVm>,
    settings: Settings,
    reader: StreamReader,
    come: Option<Migrating>,
    memory_bytes: u64,
}

impl Coming {
    /// Creates the value for `there`, a newly built VM that [awaits the state](MediatedVm::await_arrival).
    ///
    /// # Errors
    /// Returns an error if the VM's card does not accept state from a stream.
    pub fn new(there: &Arc<MediatedVm>, settings: &Settings) -> Result<Self, ManagerError> {
        if !there.host().card().takes_any_image() {
            return Err(ManagerError::Stays("the effect of channel contexts from a file is unknown on a real card"));
        }
        Ok(Self {
            there: Arc::clone(there),
            settings: settings.clone(),
            reader: StreamReader::default(),
            come: None,
            memory_bytes: 0,
        })
    }

    /// Checks and loads the next part of the stream.
    ///
    /// # Errors
    /// Returns an error if the bytes do not describe a VM that can run on this card or too little memory is free. After
    /// an error, the VM that awaits the state must be [released](MediatedVm::release).
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), ManagerError> {
        let Self { there, reader, come, memory_bytes, .. } = self;
        let vram_bytes = there.origin().vram_bytes;
        reader.feed(bytes, &mut |item| match item {
            Item::Head(head) => {
                *come = Some(read_head(head, there)?);
                Ok(())
            }
            Item::Piece(at, data) => {
                let within = at.checked_add(data.len() as u64).is_some_and(|end| end <= vram_bytes);
                Invalid::unless(within, || {
                    format!("{:#x} bytes at {at:#x} exceed the VM's VRAM of {vram_bytes:#x} bytes", data.len())
                })?;
                *memory_bytes = memory_bytes.saturating_add(data.len() as u64);
                there.host().write_received(there.id(), GuestVramAddr(at), data)
            }
        })
    }

    /// Returns the number of bytes of memory received so far.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// Returns the loaded state after all bytes were processed. `strikes` is the number of the receiving VM's strikes.
    /// Returns an error if bytes are missing.
    pub(super) fn finish(self, strikes: u32) -> Result<Migrating, ManagerError> {
        let Self { reader, come, .. } = self;
        reader.finish()?;
        let come = come.ok_or_else(|| Invalid::new("it has no header"))?;
        Ok(Migrating { departing: come.departing.beyond(strikes), ..come })
    }

    /// Replaces `old` with the VM that has received all bytes. `old` must not be served. A channel that does not leave
    /// its engines within `limit` is killed as hung. The new VM may be served before the result is dropped.
    ///
    /// # Errors
    /// Returns an error if the bytes do not describe a valid VM for this card. In this case, `old` continues unchanged,
    /// and the caller must [release](MediatedVm::release) the other VM.
    pub fn take_place(self, old: &MediatedVm, limit: Duration) -> Result<Left<'_>, ManagerError> {
        let Self { there, settings, reader, come, memory_bytes } = self;
        reader.finish()?;
        let come = come.ok_or_else(|| Invalid::new("it has no header"))?;
        old.check_movable()?;
        let halted = old.host().halt(old.id(), limit)?;
        there.await_arrival()?;
        there.take_windows(old, false)?;
        // A VM keeps its own strikes, regardless of the loaded state.
        let departing = come.departing.struck(halted.strikes());
        there.arrive(Migrating { departing, ..come }, &settings)?;
        Ok(Left::for_vm(old, halted, memory_bytes))
    }
}

/// Reads the head of the stream, which precedes the memory.
fn read_head(head: &[u8], there: &MediatedVm) -> Result<Migrating, ManagerError> {
    let known = [
        Known::for_part::<Origin>(),
        Known::for_part::<SavedVGpu>(),
        Known::for_part::<SavedSpaces>(),
        Known::for_part::<SavedTables>(),
        Known::for_part::<SavedOwn>(),
        Known::for_part::<SavedMoving>(),
    ];
    let wrong = |error: ReadError| ManagerError::from(Invalid::new(error));
    let mut file = SavedState::parse(head, &known).map_err(wrong)?;
    let origin: Origin = file.take(OWNER).map_err(wrong)?;
    origin.check(&Origin::for_vm(there, 0))?;
    let Origin { strikes, now_ns, .. } = origin;
    let gpu = file.take(OWNER).map_err(wrong)?;
    let spaces = file.take(OWNER).map_err(wrong)?;
    let tables = if file.owners::<SavedTables>().is_empty() { None } else { Some(file.take(OWNER).map_err(wrong)?) };
    let side: SavedOwn = file.take(OWNER).map_err(wrong)?;
    let channels = file.take(OWNER).map_err(wrong)?;
    file.finish().map_err(wrong)?;
    let departing = Departing::restored(channels, strikes)?;
    Ok(Migrating { gpu, spaces, tables, side: side.into_inner(), departing, since_ns: Some(now_ns) })
}
