//! Saved form of I/O virtual addresses: the ranges in use, and each VM's share. The number of bytes charged to a VM
//! follows from the ranges that it claims.

use super::{IovaSpace, Part, RamShare, SHARED, charge};
use nvspec::addr::{BUS_BITS, Iova};
use saved_state::{Invalid, ascend};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use vram::TenantId;

/// Saved form of an [`IovaSpace`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedIova {
    /// Start and length in bytes of each range in use, in ascending order. Includes ranges that the host cannot map.
    taken: Vec<(u64, u64)>,
    /// VMs' shares, sorted by VM number.
    vms: Vec<SavedPart>,
}

/// Saved form of a VM's share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedPart {
    vm: u32,
    quota: u64,
    guarantee: u64,
    window: Option<(u64, u64)>,
}

/// Ranges of a restored address space that have not been claimed yet. Each range has exactly one owner.
#[derive(Debug, Default)]
pub struct Claims(BTreeMap<u64, u64>);

impl IovaSpace {
    /// Saves the address space.
    pub(crate) fn save(&self) -> SavedIova {
        let Self { taken, vms } = self;
        let vms = vms.iter().map(|(vm, part)| {
            let Part { share: RamShare { quota, guarantee }, window, charged: _ } = part;
            let window = window.as_ref().map(|window| (window.start, window.end));
            SavedPart { vm: vm.0, quota: *quota, guarantee: *guarantee, window }
        });
        SavedIova { taken: taken.iter().map(|(start, len)| (*start, *len)).collect(), vms: vms.collect() }
    }

    /// Restores the address space on a host that cannot map `unmappable`. Also returns the ranges to claim. A range
    /// that is never claimed stays in use, because the card may still use it.
    ///
    /// # Errors
    /// Returns an error if ranges overlap or the card cannot access them.
    pub(crate) fn restored(saved: SavedIova, unmappable: &[Range<u64>]) -> Result<(Self, Claims), Invalid> {
        let SavedIova { taken, vms } = saved;
        let mut space = Self::without(unmappable);
        let mut claims = Claims::default();
        for (start, len) in taken {
            if space.taken.get(&start) == Some(&len) && !claims.0.contains_key(&start) {
                continue;
            }
            let end = start.checked_add(len).filter(|end| len != 0 && *end <= 1 << BUS_BITS);
            let end =
                end.ok_or_else(|| Invalid::new(format_args!("no card can access I/O addresses {start:#x}+{len:#x}")))?;
            let before = space.taken.range(..end).next_back().map(|(start, len)| start.saturating_add(*len));
            Invalid::unless(before.is_none_or(|before| before <= start), || {
                format!("I/O addresses {start:#x}+{len:#x} are used twice, or cannot be mapped here")
            })?;
            space.taken.insert(start, len);
            claims.0.insert(start, len);
        }
        Invalid::unless(ascend(vms.iter().map(|part| part.vm)), || "shares of RAM are not in order".into())?;
        let mut behind = SHARED.start;
        let mut windows: Vec<(u64, u64)> = vms.iter().filter_map(|part| part.window).collect();
        windows.sort_unstable();
        for (start, end) in windows {
            Invalid::unless(behind <= start && start < end && end <= SHARED.end, || {
                format!("I/O addresses {start:#x} to {end:#x} do not belong to exactly one VM")
            })?;
            behind = end;
        }
        for SavedPart { vm, quota, guarantee, window } in vms {
            let window = window.map(|(start, end)| start..end);
            space.vms.insert(TenantId(vm), Part { share: RamShare { quota, guarantee }, window, charged: 0 });
        }
        Ok((space, claims))
    }

    /// Claims a range for VM `vm`, or for the mediator if `vm` is `None`. A VM's range counts towards its quota.
    ///
    /// # Errors
    /// Returns an error if the range is not in use, or belongs to another owner.
    pub fn claim(&mut self, claims: &mut Claims, vm: Option<TenantId>, iova: Iova, len: u64) -> Result<(), Invalid> {
        let claimed = claims.0.get(&iova.0) == Some(&len);
        Invalid::unless(claimed, || format!("I/O addresses {iova}+{len:#x} are claimed twice, or not in use"))?;
        claims.0.remove(&iova.0);
        if let Some(vm) = vm {
            let part = self.vms.get_mut(&vm).ok_or_else(|| Invalid::new(format_args!("VM {vm} may not lend RAM")))?;
            part.charged = part.charged.saturating_add(charge(len).unwrap_or(u64::MAX));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::slice;

    const VM: TenantId = TenantId(3);

    /// Returns an address space with a range of the mediator, a range of a VM, and unmappable ranges.
    fn space() -> (IovaSpace, Iova, Iova) {
        let mut space = IovaSpace::without(slice::from_ref(&HOLE));
        space.set_share(VM, RamShare::default()).unwrap();
        let (own, ram) = (space.allocate(0x1000, 0).unwrap(), space.allocate_for(VM, 0x20_0000, 0).unwrap());
        (space, own, ram)
    }

    const HOLE: Range<u64> = 0xfee0_0000..0xfef0_0000;

    #[test]
    fn a_space_is_as_it_was_once_each_has_claimed_its_own() {
        let (before, own, ram) = space();
        let (mut after, mut claims) = IovaSpace::restored(before.save(), slice::from_ref(&HOLE)).unwrap();
        assert_eq!(after.share_and_charged(VM), (RamShare::default(), 0));
        after.claim(&mut claims, None, own, 0x1000).unwrap();
        after.claim(&mut claims, Some(VM), ram, 0x20_0000).unwrap();
        assert_eq!((after.save(), after.share_and_charged(VM)), (before.save(), before.share_and_charged(VM)));
        assert_eq!(after.allocate_for(VM, 0x20_0000, 0), { before }.allocate_for(VM, 0x20_0000, 0));
    }

    #[test]
    fn restored_iova_range_is_claimed_only_by_its_owner() {
        let (before, own, ram) = space();
        let (mut after, mut claims) = IovaSpace::restored(before.save(), slice::from_ref(&HOLE)).unwrap();
        assert!(after.claim(&mut claims, Some(VM), ram, 0x10_0000).is_err(), "a part of a range cannot be claimed");
        assert!(after.claim(&mut claims, Some(TenantId(4)), ram, 0x20_0000).is_err(), "this VM does not exist");
        after.claim(&mut claims, None, own, 0x1000).unwrap();
        assert!(after.claim(&mut claims, Some(VM), own, 0x1000).is_err(), "the range belongs to the mediator");
        assert!(after.claim(&mut claims, None, Iova(0xfee0_0000), 0x10_0000).is_err(), "the range is not in use");
    }

    #[test]
    fn overlapping_or_unreachable_saved_range_is_rejected() {
        let refused = |edit: &dyn Fn(&mut SavedIova)| {
            let mut saved = space().0.save();
            edit(&mut saved);
            IovaSpace::restored(saved, slice::from_ref(&HOLE)).unwrap_err()
        };
        for range in [(0xfeef_f000, 0x1000), (1 << BUS_BITS, 0x1000), (u64::MAX, 1), (5 << 20, 0)] {
            refused(&|saved| saved.taken.push(range));
        }
        refused(&|saved| saved.taken.extend([(4 << 30, 0x2000), ((4 << 30) + 0x1000, 0x1000)]));
        refused(&|saved| saved.vms[0].window = Some((SHARED.start, SHARED.end + 1)));
        refused(&|saved| {
            let window = saved.vms[0].window;
            saved.vms.push(SavedPart { vm: 9, quota: 0, guarantee: 0, window });
        });
        refused(&|saved| saved.vms.push(SavedPart { vm: 0, quota: 0, guarantee: 0, window: None }));
    }
}
