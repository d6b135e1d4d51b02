//! Saved form of a guest's channels. The saved state of the card's channels shows which of the guest's channels are on
//! the card, and their address spaces.

use super::{Bound, Channel, Runlist, Work};
use crate::memory::Objects;
use card_manager::Bindings;
use channels::SavedPlace;
use nvspec::fifo::{CHANNELS, VirtualChannelId};
use saved_state::{Invalid, ascend};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};

/// Saved form of all channels of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedWork {
    /// Channels, sorted by number.
    channels: Vec<SavedChannel>,
    blocked: u32,
    runlist: SavedRunlist,
}

/// Saved form of a channel that the guest has bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedChannel {
    number: u8,
    instance: SavedPlace,
    /// Number of the guest VRAM page that contains the channel's USERD.
    userd: Option<u64>,
    gp_put: [u8; 4],
}

/// Saved state of the guest's runlist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum SavedRunlist {
    InForce,
    Taken,
    Awaited,
}

impl Work {
    /// Saves the channels. Returns `None` while a channel that the guest has unbound is still on the card.
    pub(crate) fn save(&self) -> Option<SavedWork> {
        let Self { channels, userd, departing, blocked, runlist } = self;
        let saved = channels.iter().map(|(number, channel)| {
            let Channel {
                instance,
                // Saved with the card's channels.
                bound: _,
                gp_put,
                // Recomputed by the next process.
                polled: _,
                seen: _,
                objects: _,
                bindings: _,
            } = channel;
            let userd = userd.iter().find(|(_, owner)| *owner == number).map(|(page, _)| *page);
            SavedChannel { number: number.0, instance: (*instance).into(), userd, gp_put: *gp_put }
        });
        let runlist = match runlist {
            Runlist::InForce => SavedRunlist::InForce,
            Runlist::Taken => SavedRunlist::Taken,
            Runlist::Awaited => SavedRunlist::Awaited,
        };
        departing.is_empty().then(|| SavedWork { channels: saved.collect(), blocked: *blocked, runlist })
    }
}

impl SavedWork {
    /// Restores the channels. `bound` returns a channel's state if the channel is on the card. Returns an error if the
    /// saved state is invalid.
    pub(crate) fn restored(self, bound: impl Fn(VirtualChannelId) -> Option<Bound>) -> Result<Work, Invalid> {
        let Self { channels: saved, blocked, runlist } = self;
        let numbers = saved.iter().all(|channel| u32::from(channel.number) < CHANNELS);
        Invalid::unless(numbers && ascend(saved.iter().map(|channel| channel.number)), || {
            "the guest's channels are not in order, or do not exist".into()
        })?;
        let (mut channels, mut pages) = (BTreeMap::new(), HashMap::new());
        for SavedChannel { number, instance, userd, gp_put } in saved {
            let number = VirtualChannelId(number);
            let other = userd.and_then(|page| pages.insert(page, number));
            Invalid::unless(other.is_none(), || {
                format!("two channels have their USERD in the same page: {}", number.0)
            })?;
            let channel = Channel {
                instance: instance.into(),
                bound: bound(number),
                gp_put,
                polled: None,
                seen: None,
                objects: Objects::default(),
                bindings: Bindings::default(),
            };
            channels.insert(number, channel);
        }
        let runlist = match runlist {
            SavedRunlist::InForce => Runlist::InForce,
            SavedRunlist::Taken => Runlist::Taken,
            SavedRunlist::Awaited => Runlist::Awaited,
        };
        Ok(Work { channels, userd: pages, departing: BTreeMap::new(), blocked, runlist })
    }
}
