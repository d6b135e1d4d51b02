//! The golden context: the image of an unused context, as saved by PGRAPH's firmware.
//!
//! Every channel's context image starts as a copy of the golden context ([`channels::Channels`]). The golden context is
//! created once, when the card is taken over and no channels exist. FECS saves it on command, using the first channel's
//! instance block and context image, and page tables in the work areas. All of these are zeroed afterwards.

use super::CardError;
use super::layout::Layout;
use super::memory::CardMemory;
use card::Card;
use nvspec::addr::{SMALL_PAGE, VA_BITS, VramAddr};
use nvspec::instance::{INSTANCE_BYTES, context, vm};
use nvspec::mmu::{ENTRY_BYTES, PD_BYTES, Pde, Pte, Rights, SPT_BYTES, TableTarget};
use nvspec::regs::{fecs, fecs_command};

/// Maximum number of polls for a response from FECS. Saving a context takes tens of microseconds, and a poll is a bus
/// read of about a microsecond.
const ANSWER_POLLS: u32 = 2_000_000;
/// First small page of the image's mapping. Address 0 remains unmapped.
const FIRST_PAGE: u64 = 16;
/// Size code of the page table: one eighth of the full size, which is the minimum.
const SIZE_CODE: u8 = 3;

/// Makes PGRAPH create and save a context, and returns the context's image.
///
/// # Errors
/// Returns an error if the firmware does not respond, or saves an empty image.
pub fn make(card: &dyn Card, memory: &mut CardMemory, layout: &Layout) -> Result<Vec<u8>, CardError> {
    let bytes = layout.graph_image.next_multiple_of(SMALL_PAGE);
    let [directory, table] = [layout.work, layout.work.offset(PD_BYTES)];
    let (instance, image) = (layout.instances, layout.images);
    let pde = Pde::new().with_large_size(SIZE_CODE).with_small_target(TableTarget::Vram);
    memory.write(directory, &u64::from(pde.with_small_frame(frame(table))).to_le_bytes())?;
    for page in 0..bytes / SMALL_PAGE {
        let pte = Pte::granting(Rights::Privileged).with_frame(frame(image.offset(page * SMALL_PAGE)));
        memory.write(table.offset((FIRST_PAGE + page) * ENTRY_BYTES), &u64::from(pte).to_le_bytes())?;
    }
    let pointer = FIRST_PAGE * SMALL_PAGE + u64::from(context::VALID);
    for (offset, value) in [(vm::PDB_LO, directory.0), (vm::LIMIT_LO, (1 << VA_BITS) - 1), (context::GR, pointer)] {
        memory.write(instance.offset(offset), &value.to_le_bytes())?;
    }
    memory.invalidate(directory, false)?;
    let block = fecs::COMMAND_DATA::VALID.mask() | fecs::COMMAND_DATA::ADDRESS.encode(frame(instance));
    command(card, fecs_command::SET_CHANNEL, block)?;
    command(card, fecs_command::SAVE_CONTEXT, block)?;
    let mut golden = vec![0; layout.graph_image as usize];
    memory.read(image, &mut golden)?;
    if golden.iter().all(|byte| *byte == 0) {
        return Err(CardError::Unresponsive("context switching firmware saved an empty context"));
    }
    for (at, bytes) in
        [(directory, PD_BYTES), (table, SPT_BYTES >> SIZE_CODE), (image, bytes), (instance, INSTANCE_BYTES)]
    {
        memory.zero(at, bytes)?;
    }
    memory.invalidate(directory, false)?;
    Ok(golden)
}

/// Sends a command to FECS and waits for its completion.
fn command(card: &dyn Card, command: u32, data: u32) -> Result<(), CardError> {
    card.write32(fecs::MAILBOX_CLEAR::at(0), fecs::MAILBOX::READY.mask());
    card.write32(fecs::COMMAND_DATA::OFFSET, data);
    card.write32(fecs::COMMAND::OFFSET, command);
    let done = (0..ANSWER_POLLS).any(|_| fecs::MAILBOX::READY.is_set(card.read32(fecs::MAILBOX::at(0))));
    if done { Ok(()) } else { Err(CardError::Unresponsive("context switching firmware does not respond")) }
}

/// Converts an address to a 4 KiB frame number, as used in entries and registers.
fn frame(address: VramAddr) -> u32 {
    (address.0 / SMALL_PAGE) as u32
}
