//! Version 1 of saved channels: each had the addresses of its physical number.

use super::{
    SavedBound, SavedChannels, SavedGate, SavedLayout, SavedPermit, SavedPlace, SavedPreemptions, SavedSlot, SavedVm,
};
use crate::ring::SavedRing;
use crate::watchdog::SavedEpisode;
use saved_state::{Invalid, Part};
use serde::{Deserialize, Serialize};

/// The physical channels of one card, as of version 1.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version1 {
    layout: SavedLayout,
    golden: Vec<u8>,
    slots: Vec<Slot>,
    vms: Vec<SavedVm>,
    second_page: bool,
    next_slot: u8,
    serial: u64,
    submissions: u64,
    deferred: bool,
    hang_limit: u64,
    episodes: Vec<Option<SavedEpisode>>,
    preemptions: SavedPreemptions,
    gate: SavedGate,
}

/// A physical channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Slot {
    Free,
    Bound(Box<Bound>),
    Stuck { vm: u32, directory: u64, stranded: bool },
}

/// Binding of a channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Bound {
    vm: u32,
    channel: u8,
    serial: u64,
    instance: SavedPlace,
    directory: u64,
    userd: u64,
    contexts: [Option<u64>; 3],
    next_contexts: Option<[Option<u64>; 3]>,
    enabled: bool,
    permit: SavedPermit,
    stranded: bool,
    still: Option<SavedEpisode>,
    ring: SavedRing,
}

impl Part for SavedChannels {
    const NAME: &'static str = "channels";
    const VERSION: u32 = 2;
    type Before = Version1;

    fn from_before(before: Version1) -> Result<Self, Invalid> {
        let Version1 {
            layout,
            golden,
            slots,
            vms,
            second_page,
            next_slot,
            serial,
            submissions,
            deferred,
            hang_limit,
            episodes,
            preemptions,
            gate,
        } = before;
        let slots = (0u8..).zip(slots).map(|(number, slot)| slot.at(number)).collect();
        Ok(Self {
            layout,
            golden,
            slots,
            vms,
            second_page,
            next_slot,
            serial,
            submissions,
            deferred,
            hang_limit,
            episodes,
            preemptions,
            gate,
        })
    }

    fn to_before(&self) -> Result<Version1, Invalid> {
        let Self {
            layout,
            golden,
            slots,
            vms,
            second_page,
            next_slot,
            serial,
            submissions,
            deferred,
            hang_limit,
            episodes,
            preemptions,
            gate,
        } = self.clone();
        let slots =
            (0u8..).zip(slots).map(|(number, slot)| Slot::from_saved(number, slot)).collect::<Result<_, _>>()?;
        Ok(Version1 {
            layout,
            golden,
            slots,
            vms,
            second_page,
            next_slot,
            serial,
            submissions,
            deferred,
            hang_limit,
            episodes,
            preemptions,
            gate,
        })
    }
}

impl Slot {
    fn at(self, number: u8) -> SavedSlot {
        match self {
            Self::Free => SavedSlot::Free,
            Self::Bound(bound) => {
                let Bound {
                    vm,
                    channel,
                    serial,
                    instance,
                    directory,
                    userd,
                    contexts,
                    next_contexts,
                    enabled,
                    permit,
                    stranded,
                    still,
                    ring,
                } = *bound;
                SavedSlot::Bound(Box::new(SavedBound {
                    vm,
                    channel,
                    serial,
                    instance,
                    directory,
                    userd,
                    contexts,
                    next_contexts,
                    enabled,
                    permit,
                    stranded,
                    still,
                    ring,
                    span: number,
                }))
            }
            Self::Stuck { vm, directory, stranded } => SavedSlot::Stuck { vm, directory, stranded, span: number },
        }
    }

    fn from_saved(number: u8, slot: SavedSlot) -> Result<Self, Invalid> {
        let same = |vm: u32, span: u8| {
            Invalid::unless(span == number, || {
                format!(
                    "a channel of VM {vm} has come from another card, and has addresses that are not those of its number \
                     ({number}), which the older program does not know; have the VM bind it anew, or move it back"
                )
            })
        };
        Ok(match slot {
            SavedSlot::Free => Self::Free,
            SavedSlot::Bound(bound) => {
                let SavedBound {
                    vm,
                    channel,
                    serial,
                    instance,
                    directory,
                    userd,
                    contexts,
                    next_contexts,
                    enabled,
                    permit,
                    stranded,
                    still,
                    ring,
                    span,
                } = *bound;
                same(vm, span)?;
                Self::Bound(Box::new(Bound {
                    vm,
                    channel,
                    serial,
                    instance,
                    directory,
                    userd,
                    contexts,
                    next_contexts,
                    enabled,
                    permit,
                    stranded,
                    still,
                    ring,
                }))
            }
            SavedSlot::Stuck { vm, directory, stranded, span } => {
                same(vm, span)?;
                Self::Stuck { vm, directory, stranded }
            }
        })
    }
}
