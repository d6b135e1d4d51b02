//! Saved form of a VM's map. It omits places, which are in the states of chunks and slots.

use super::VmMap;
use crate::TenantId;
use crate::chunks::Limits;
use crate::chunks::account::VmSummary;
use crate::chunks::moves::{Fate, Flight};
use crate::chunks::saved::{COUNT_MAX, SavedLimits};
use crate::chunks::state::{MoveId, Spot, Tier};
use saved_state::{Invalid, ascend};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Accounts of a VM's use of the card and of host memory, without places.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedVm {
    pub(crate) vm: u32,
    pub(crate) bytes: u64,
    pub(crate) limits: SavedLimits,
    /// Guest chunks in the reserve, in ascending order.
    pub(crate) parked: Vec<u32>,
    pub(crate) frozen: bool,
    pub(crate) peak: u32,
    pub(crate) host_peak: u32,
    pub(crate) born_in_host: u64,
    pub(crate) moved_out: u64,
    pub(crate) moved_in: u64,
}

impl VmMap {
    pub(in crate::chunks) fn save(&self, vm: u32, frozen: bool) -> SavedVm {
        let Self { bytes, shift: _, chunks: _, parked, sums, arriving: _, leaving: _ } = self;
        let VmSummary {
            // These values are derived from the places and moves.
            advertised: _,
            placed: _,
            parked: _,
            host: _,
            unbacked: _,
            moving: _,
            guarantee: _,
            limits,
            peak,
            host_peak,
            born_in_host,
            moved_out,
            moved_in,
        } = *sums;
        let parked = parked.iter().copied().collect();
        let (bytes, limits) = (*bytes, limits.into());
        SavedVm { vm, bytes, limits, parked, frozen, peak, host_peak, born_in_host, moved_out, moved_in }
    }

    /// Restores a map of chunks of `1 << shift` bytes from its `places` and the VM's moves among `flights`.
    pub(in crate::chunks) fn restored(
        saved: SavedVm,
        shift: u32,
        places: BTreeMap<u32, Spot>,
        flights: &BTreeMap<MoveId, Flight>,
    ) -> Result<Self, Invalid> {
        let SavedVm { vm, bytes, limits, parked, frozen: _, peak, host_peak, born_in_host, moved_out, moved_in } =
            saved;
        let limits = Limits::from(limits);
        Invalid::unless(limits.guarantee <= limits.quota && limits.weight > 0, || {
            format!("VM {vm} has a guarantee of {} beyond its quota, or no weight", limits.guarantee)
        })?;
        let count = bytes.div_ceil(1 << shift) as u32;
        let mut map = Self::new(bytes, count, shift, limits);
        for (index, spot) in places {
            let Some(place) = map.chunks.get_mut(index as usize) else {
                return Err(Invalid::new(format_args!("VM {vm} has no guest chunk {index}")));
            };
            *place = Some(spot);
            *map.count(spot) += 1;
        }
        Invalid::unless(ascend(&parked), || format!("VM {vm}: the reserve is not in order"))?;
        for index in parked {
            let on_card = map.get(index).is_some_and(|spot| spot.tier() == Tier::Card);
            Invalid::unless(on_card, || {
                format!("guest chunk {index} of VM {vm} is in the reserve, but not on the card")
            })?;
            map.park(index);
        }
        for flight in flights.values().filter(|flight| flight.vm == TenantId(vm) && flight.fate != Fate::Ownerless) {
            map.sums.moving += u32::from(flight.fate == Fate::Alive);
            if !flight.drains {
                *map.on_the_way(flight.to.tier()) += 1;
            }
        }
        let sound = peak >= map.used(Tier::Card) && host_peak >= map.used(Tier::Host);
        let counted = [born_in_host, moved_out, moved_in].into_iter().all(|count| count <= COUNT_MAX);
        Invalid::unless(sound && counted, || format!("VM {vm} has more chunks than its peak"))?;
        map.sums = VmSummary { peak, host_peak, born_in_host, moved_out, moved_in, ..map.sums };
        Ok(map)
    }
}
