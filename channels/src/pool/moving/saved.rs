//! Saved form of migrating channels. Of the data on the card, it contains only values written by a channel's own work.
//! All other data (constants, addresses, and the ring entries and push buffers of completion records) is regenerated,
//! so that a file cannot change it.

use super::{Channel, Moving};
use crate::block::{BLOCK, CONTEXTS};
use crate::entry::Entry;
use crate::image::image_vas;
use crate::instance::{constants, context_words, put, put_wide, word};
use crate::pool::saved::{SavedBound, SavedVm};
use crate::ring::Ring;
use crate::work::{
    ENTRY_BYTES, RING_ENTRIES, SEMAPHORE_BYTES, Span, WORK_BYTES, entry_offset, push_offset, record_entry, record_push,
    semaphore_offset,
};
use nvspec::fifo::CHANNELS;
use nvspec::instance::{graph_image, ramfc, userd};
use saved_state::{Invalid, first_version};
use serde::{Deserialize, Serialize};

/// Offsets of the RAMFC dwords in which the card saves a channel's state.
const STATE: [u64; 18] = [
    ramfc::GP_GET,
    ramfc::GP_FETCH,
    ramfc::PB_GET_LO,
    ramfc::PB_GET_HI,
    ramfc::TOP_LEVEL_GET_LO,
    ramfc::TOP_LEVEL_GET_HI,
    ramfc::REF,
    ramfc::SEMAPHORE[0],
    ramfc::SEMAPHORE[1],
    ramfc::SEMAPHORE[2],
    ramfc::SEMAPHORE[3],
    ramfc::PB_FETCH_LO,
    ramfc::PB_FETCH_HI,
    ramfc::PB_PUT_LO,
    ramfc::PB_PUT_HI,
    ramfc::PB_HEADER,
    ramfc::PB_COUNT,
    ramfc::SUBDEVICE,
];
/// Number of subchannels, each of which has a saved object.
const SUBCHANNELS: u64 = 8;
/// Offsets of the USERD dwords in which the card reports progress.
const PROGRESS: [u64; 6] =
    [userd::GET, userd::REF, userd::TOP_LEVEL_GET, userd::TOP_LEVEL_GET_HI, userd::GET_HI, userd::GP_GET];

/// Saved form of a migrating VM's channels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedMoving {
    vm: SavedVm,
    channels: Vec<SavedChannel>,
}

first_version!(SavedMoving, "channels.moving");

/// Saved form of a migrating channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedChannel {
    bound: SavedBound,
    /// Values of the dwords at [`STATE`], followed by the objects.
    state: Vec<u32>,
    /// Values of the dwords at [`PROGRESS`].
    progress: Vec<u32>,
    /// Guest entries in flight, oldest first.
    entries: Vec<u64>,
    /// Contents of the semaphore of each submission in flight.
    released: Vec<[u32; SEMAPHORE_BYTES / 4]>,
    /// Images for PGRAPH, CE0 and CE1.
    images: [Vec<u8>; 3],
}

fn state_words() -> impl Iterator<Item = u64> {
    let objects = (0..SUBCHANNELS).map(|index| ramfc::OBJECTS.wrapping_add(index.wrapping_mul(4)));
    STATE.into_iter().chain(objects)
}

impl Moving {
    /// Saves the channels.
    ///
    /// # Errors
    /// Returns an error if the channels are not valid on any card.
    pub fn save(&self) -> Result<SavedMoving, Invalid> {
        let Self { vm, channels } = self;
        let channels = channels.iter().map(Channel::save).collect::<Result<_, _>>()?;
        Ok(SavedMoving { vm: vm.clone(), channels })
    }
}

impl Channel {
    fn save(&self) -> Result<SavedChannel, Invalid> {
        let Self { bound, block, userd, work, images } = self;
        let ring = Ring::restored(bound.ring.clone())?;
        let words = |bytes: &[u8; BLOCK], at| word(bytes, at).unwrap_or(0);
        let mut entries = Vec::new();
        for index in ring.guests_entries() {
            let at = usize::try_from(entry_offset(index)).unwrap_or(usize::MAX);
            let raw = work.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |raw| u64::from_le_bytes(*raw));
            entries.push(raw);
        }
        let released = ring.records.iter().map(|record| {
            let at = semaphore_offset(record.slot);
            [0u64, 4, 8, 12].map(|offset| word(work, at.saturating_add(offset)).unwrap_or(0))
        });
        Ok(SavedChannel {
            bound: bound.clone(),
            state: state_words().map(|at| words(block, at)).collect(),
            progress: PROGRESS.map(|at| words(userd, at)).to_vec(),
            entries,
            released: released.collect(),
            images: images.clone(),
        })
    }
}

impl SavedMoving {
    /// Restores the channels.
    ///
    /// # Errors
    /// Returns an error if the saved channels are invalid.
    pub fn restored(self) -> Result<Moving, Invalid> {
        let Self { vm, channels } = self;
        let few = channels.len() <= CHANNELS as usize;
        Invalid::unless(few, || format!("the file has {} channels, more than a card", channels.len()))?;
        let channels = channels.into_iter().map(SavedChannel::restored).collect::<Result<_, _>>()?;
        Ok(Moving { vm, channels })
    }
}

impl SavedChannel {
    fn restored(self) -> Result<Channel, Invalid> {
        let Self { bound, state, progress, entries, released, images } = self;
        let ring = Ring::restored(bound.ring.clone())?;
        Invalid::unless(u32::from(bound.span) < CHANNELS, || format!("a channel has the invalid span {}", bound.span))?;
        let span = Span(bound.span);
        let [graph, ..] = &images;
        let named = graph.iter().zip(0..graph_image::HEAD_BYTES).any(|(byte, _)| *byte != 0);
        Invalid::unless(!named, || "a context image lists registers".into())?;

        Invalid::unless(state.len() == state_words().count(), || {
            format!("the state of a channel has {} dwords", state.len())
        })?;
        let mut block = Box::new(constants(span));
        for (at, value) in state_words().zip(state) {
            put(&mut block, at, value);
        }
        put(&mut block, ramfc::GP_PUT, ring.allowed_index());
        for ((at, image), context) in CONTEXTS.into_iter().zip(image_vas(span)).zip(bound.contexts) {
            put_wide(&mut block, at, context_words(context.map(|_| image)));
        }

        Invalid::unless(progress.len() == PROGRESS.len(), || {
            format!("the progress of a channel has {} dwords", progress.len())
        })?;
        let mut page = Box::new([0; BLOCK]);
        PROGRESS.into_iter().zip(progress).for_each(|(at, value)| put(&mut page, at, value));
        put(&mut page, userd::GP_PUT, ring.allowed_index());

        let work = work_area(&ring, span, &entries, &released)?;
        Ok(Channel { bound, block, userd: page, work, images })
    }
}

/// Returns the work area of a channel that has the given guest entries in flight.
fn work_area(
    ring: &Ring,
    span: Span,
    entries: &[u64],
    released: &[[u32; SEMAPHORE_BYTES / 4]],
) -> Result<Vec<u8>, Invalid> {
    let places: Vec<u32> = ring.guests_entries().collect();
    Invalid::unless(entries.len() == places.len() && released.len() == ring.records.len(), || {
        format!("{} entries and {} records do not match the submissions in flight", entries.len(), released.len())
    })?;
    let mut work = vec![0; usize::try_from(WORK_BYTES).unwrap_or(0)];
    for (index, raw) in places.iter().zip(entries) {
        let same = Entry::check(*raw).is_some_and(|entry| entry.raw == *raw);
        Invalid::unless(same, || format!("entry {raw:#x} is not permitted to guests"))?;
        write(&mut work, entry_offset(*index), &raw.to_le_bytes());
    }
    for (record, semaphore) in ring.records.iter().zip(released) {
        let index = u32::try_from(record.end().wrapping_sub(1) & u64::from(RING_ENTRIES - 1)).unwrap_or(0);
        write(&mut work, entry_offset(index), &record_entry(span, record.slot).to_le_bytes());
        write(&mut work, push_offset(record.slot), &record_push(span, record.slot, record.sequence));
        let bytes: Vec<u8> = semaphore.iter().flat_map(|word| word.to_le_bytes()).collect();
        write(&mut work, semaphore_offset(record.slot), &bytes);
    }
    // The card has released the semaphore of the last record that ended, but may not have executed the rest of its push
    // buffer yet.
    if let Some(slot) = ring.last_ended() {
        write(&mut work, push_offset(slot), &record_push(span, slot, ring.completed));
    }
    Ok(work)
}

fn write(area: &mut [u8], at: u64, data: &[u8]) {
    let at = usize::try_from(at).unwrap_or(usize::MAX);
    if let Some(place) = area.get_mut(at..).and_then(|rest| rest.get_mut(..data.len())) {
        place.copy_from_slice(data);
    }
}

const _: () = assert!(ENTRY_BYTES == 8);
