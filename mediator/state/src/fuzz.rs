//! Decodes arbitrary bytes as saved parts. Each part must either be rejected, or be restored to a usable state whose
//! saved form is accepted.

#![allow(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    reason = "a violated invariant must panic"
)]

use crate::{SavedCard, Surroundings, VmSurroundings};
use channels::{Channels, Layout, Moving, SavedChannels, SavedMoving};
use devmodel::{SavedVGpu, VGpu, VGpuConfig};
use nvspec::addr::{GuestVramAddr, VramAddr};
use nvspec::chip::GF100;
use pv::{SavedTables, Tables};
use saved_state::SavedState;
use saved_state::stream::{Item, PIECE_MAX, StreamError, StreamReader};
use sched::{Event, Nanos, SavedScheduler, Scheduler};
use shadow_pt::{Limits, Mode};
use std::sync::Arc;
use vram::{ChunkTable, Quanta, SavedChunks, SavedQuanta, TenantId};

/// Current time in ns.
const NOW_NS: u64 = 1 << 40;
/// Size of each guest's VRAM, in bytes.
pub(crate) const VRAM: u64 = 16 << 20;

/// Host with two VMs, and a card that accepts all writes.
pub(crate) struct Host;

impl Surroundings for Host {
    fn layout(&self) -> Layout {
        Layout {
            instances: VramAddr(0x10_0000),
            userd: VramAddr(0x20_0000),
            runlists: [VramAddr(0x30_0000), VramAddr(0x30_1000)],
            work: VramAddr(0x40_0000),
            images: VramAddr(0x80_0000),
            graph_image: 0x1000,
        }
    }

    fn own(&self) -> (u32, u32) {
        (0, 0)
    }

    fn now_ns(&self) -> u64 {
        NOW_NS
    }

    fn vm(&self, vm: TenantId) -> Option<VmSurroundings> {
        let limits = Limits { table_bytes: 1 << 20 };
        let set = VmSurroundings { config: config(), mode: Mode::LazyAdd, limits, table_bytes: 4 << 20 };
        (1..3).contains(&vm.0).then_some(set)
    }

    fn write(&mut self, _: VramAddr, _: &[u8]) {}
}

pub(crate) fn config() -> VGpuConfig {
    VGpuConfig { channels: 16, ..VGpuConfig::of_chip(&GF100, VRAM, Arc::from([0x55, 0xaa])) }
}

/// Decodes `data` as a part, a whole file or a stream, as selected by its first byte.
///
/// # Panics
/// Panics if an invariant is violated.
pub fn fuzz(data: &[u8]) {
    let Some((what, bytes)) = data.split_first() else { return };
    match what % 9 {
        0 => file(bytes),
        1 => part::<SavedChunks, ChunkTable>(bytes, |saved| saved.try_into().ok(), ChunkTable::save, use_chunks),
        2 => part::<SavedQuanta, Quanta>(
            bytes,
            |saved| saved.try_into().ok(),
            Quanta::save,
            |mut quanta| {
                quanta.relocated(NOW_NS, 1 << 20, 1000);
                let _ = quanta.tick(NOW_NS);
            },
        ),
        3 => part::<SavedChannels, Channels>(
            bytes,
            |saved| Channels::restored(saved, Host.layout()).ok(),
            Channels::save,
            |channels| drop((channels.pending_pull(), channels.stuck())),
        ),
        4 => part::<SavedScheduler, Scheduler>(
            bytes,
            |saved| Scheduler::restored(saved, Nanos(NOW_NS)).ok(),
            Scheduler::save,
            |mut scheduler| {
                for at in 0..20 {
                    scheduler.event(Nanos(NOW_NS + at * 1_000_000), Event::Tick, &mut Vec::new());
                }
            },
        ),
        5 => part::<SavedVGpu, VGpu>(bytes, |saved| VGpu::restored(saved, config()).ok(), VGpu::save, drop),
        7 => stream(bytes),
        8 => part::<SavedMoving, Moving>(
            bytes,
            |saved| saved.restored().ok(),
            |moving| moving.save().expect("cannot save a restored state"),
            drop,
        ),
        _ => part::<SavedTables, Tables>(
            bytes,
            |saved| Tables::restored(saved, GuestVramAddr(VRAM), 4 << 20).ok(),
            Tables::save,
            |mut tables| {
                tables.take_written(|_, _| ());
                tables.clear();
            },
        ),
    }
}

/// Exercises a chunk table, removes all of its VMs, and scrubs their chunks.
fn use_chunks(mut table: ChunkTable) {
    let _ = (table.summary(), table.for_vms(), table.kept_for_mediator());
    let _ = table.create_vm(TenantId(77), VRAM, vram::Limits::default());
    let _ = table.place(TenantId(77), vram::GuestVramAddr(0));
    for id in table.moves().map(|flight| flight.id).collect::<Vec<_>>() {
        table.abort_move(id);
    }
    for (vm, _) in table.vms().collect::<Vec<_>>() {
        let _ = table.destroy_vm(vm);
    }
    while let Some(work) = table.take_scrub_work() {
        table.scrubbed(work.place);
    }
}

/// Checks that a restored part is usable, and that its saved form is accepted.
fn part<S: saved_state::Part, T>(
    bytes: &[u8],
    restore: impl Fn(S) -> Option<T>,
    save: impl Fn(&T) -> S,
    exercise: impl Fn(T),
) {
    let Ok((saved, _)) = postcard::take_from_bytes::<S>(bytes) else { return };
    let Some(restored) = restore(saved) else { return };
    let bytes = postcard::to_allocvec(&save(&restored)).expect("cannot encode the part");
    let again = postcard::from_bytes(&bytes).expect("cannot decode the encoded part");
    assert!(restore(again).is_some(), "the saved part `{}` is rejected", S::NAME);
    exercise(restored);
}

/// Checks that reading a stream in segments of any length gives the same result as reading it as a whole. The first
/// item must be the head, and memory ranges must be in ascending order.
fn stream(bytes: &[u8]) {
    let Some((part, bytes)) = bytes.split_first() else { return };
    let read = |part: usize| {
        let (mut reader, mut items, mut last) = (StreamReader::default(), 0, None);
        let all = bytes.chunks(part).try_for_each(|part| {
            reader.feed(part, &mut |item| {
                assert_eq!(items == 0, matches!(item, Item::Head(_)), "the first item is not the head");
                if let Item::Piece(at, data) = item {
                    assert!(last.is_none_or(|last| at >= last) && !data.is_empty() && data.len() <= PIECE_MAX);
                    last = Some(at + data.len() as u64);
                }
                items += 1;
                Ok::<_, StreamError>(())
            })
        });
        (all.and_then(|()| reader.finish()).is_ok(), items)
    };
    assert_eq!(read(usize::from(*part) + 1), read(bytes.len().max(1)));
}

fn file(bytes: &[u8]) {
    let Ok(mut file) = SavedState::parse(bytes, &SavedCard::known()) else { return };
    let Ok(card) = SavedCard::read(&mut file) else { return };
    let _ = card.restore(&mut Host);
}

#[cfg(test)]
mod tests;
