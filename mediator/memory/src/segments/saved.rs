//! Saved form of segments and their pages. Each VM saves its own mappings of segments.

use super::{SEGMENTS_OF_A_VM, Scope, Segment, Segments};
use crate::Memory;
use nvspec::addr::{SMALL_PAGE, VramAddr};
use saved_state::{Invalid, ascend, first_version};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use vram::{PagePool, SavedPool, TenantId};

/// Maximum length of a group name in bytes.
const NAME_MAX: usize = 256;

/// Saved form of all segments of a card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedSegments {
    last: u32,
    /// Segments, sorted by ID.
    segments: Vec<SavedSegment>,
    /// Number of each VM that has created segments, and the pool for them.
    pools: Vec<(u32, SavedPool)>,
}

first_version!(SavedSegments, "card-memory.segments");

/// Saved form of a segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedSegment {
    id: u32,
    key: u64,
    /// Group in which the key identifies the segment, or `None` if only its creator can use the key.
    group: Option<String>,
    owner: u32,
    mode: u32,
    bytes: u64,
    at: u64,
    zeroed: u64,
    /// VM number, and number of the VM's address spaces that map the segment.
    attached: Vec<(u32, u32)>,
    removed: bool,
}

impl Memory {
    /// Saves the segments. Returns `None` if there are none.
    pub fn save_segments(&self) -> Option<SavedSegments> {
        let Segments { segments, last, pools } = &self.segments;
        let one = |(id, segment): (&u32, &Segment)| {
            let Segment { key, scope, owner, mode, bytes, at, zeroed, attached, removed } = segment;
            SavedSegment {
                id: *id,
                key: *key,
                group: match scope {
                    // Only the creator can use the key.
                    Scope::Own(_) => None,
                    Scope::Group(group) => Some(group.to_string()),
                },
                owner: owner.0,
                mode: *mode,
                bytes: *bytes,
                at: at.0,
                zeroed: *zeroed,
                attached: attached.iter().map(|(vm, count)| (vm.0, *count)).collect(),
                removed: *removed,
            }
        };
        (!segments.is_empty() || !pools.is_empty()).then(|| SavedSegments {
            last: *last,
            segments: segments.iter().map(one).collect(),
            pools: pools.iter().map(|(vm, pool)| (vm.0, pool.save())).collect(),
        })
    }

    /// Restores segments and their pools. Each VM must then restore its own mappings of segments
    /// ([`Self::segments_attached`]).
    ///
    /// # Errors
    /// Returns an error if the saved state is invalid.
    pub fn restore_segments(
        &mut self,
        saved: SavedSegments,
        pools: BTreeMap<TenantId, PagePool>,
    ) -> Result<(), Invalid> {
        let SavedSegments { last, segments, pools: _ } = saved;
        Invalid::unless(ascend(segments.iter().map(|segment| segment.id)), || {
            "shared segments are not in order".into()
        })?;
        let mut made = BTreeMap::new();
        let mut used: BTreeMap<TenantId, (usize, u64)> = BTreeMap::new();
        for saved in segments {
            let (id, owner, bytes) = (saved.id, TenantId(saved.owner), saved.bytes);
            let segment = saved.restored(|vm| self.vram.chunks.vm_bytes(vm).is_some())?;
            let pool = pools.get(&owner);
            let lies = pool.is_some_and(|pool| pool.allocations().holds(VramAddr(segment.at.0), bytes));
            let alone = made.values().all(|other: &Segment| other.at != segment.at);
            Invalid::unless(lies && alone, || format!("shared segment {id} is outside its creator's pages"))?;
            let (count, _) = used.entry(owner).or_default();
            *count = count.saturating_add(1);
            Invalid::unless(*count <= SEGMENTS_OF_A_VM, || format!("VM {owner} has too many shared segments"))?;
            made.insert(id, segment);
        }
        self.segments = Segments { segments: made, last, pools };
        Ok(())
    }

    /// Returns, for each segment that a VM has mapped, the number of address spaces, the VRAM address, and the size in
    /// bytes.
    pub fn segments_attached(&self, vm: TenantId) -> BTreeMap<u32, (u32, VramAddr, u64)> {
        let all = self.segments.segments.iter();
        all.filter_map(|(id, segment)| Some((*id, (*segment.attached.get(&vm)?, segment.at, segment.bytes)))).collect()
    }
}

impl SavedSegments {
    /// Returns the pools of the segments.
    #[must_use]
    pub fn pools(&self) -> Vec<(TenantId, SavedPool)> {
        self.pools.iter().map(|(vm, pool)| (TenantId(*vm), pool.clone())).collect()
    }
}

impl SavedSegment {
    fn restored(self, is_there: impl Fn(TenantId) -> bool) -> Result<Segment, Invalid> {
        let Self { id, key, group, owner, mode, bytes, at, zeroed, attached, removed } = self;
        let whole = bytes != 0 && bytes.is_multiple_of(SMALL_PAGE) && at.is_multiple_of(SMALL_PAGE);
        let within = bytes <= u64::from(shadow_pt::SHARED_PAGES) * SMALL_PAGE && zeroed <= bytes;
        Invalid::unless(whole && within && group.as_ref().is_none_or(|name| name.len() <= NAME_MAX), || {
            format!("shared segment {id} of {bytes:#x} bytes at {at:#x}, of which {zeroed:#x} are zeroed")
        })?;
        let known = attached.iter().all(|(vm, count)| is_there(TenantId(*vm)) && *count != 0);
        let ready = attached.is_empty() || zeroed == bytes;
        Invalid::unless(ascend(attached.iter().map(|(vm, _)| vm)) && known && ready, || {
            format!(
                "shared segment {id} is mapped by VMs that do not exist or are not in order, or before it is zeroed"
            )
        })?;
        let owner = TenantId(owner);
        Ok(Segment {
            key,
            scope: group.map_or(Scope::Own(owner), |group| Scope::Group(group.into())),
            owner,
            mode,
            bytes,
            at: VramAddr(at),
            zeroed,
            attached: attached.into_iter().map(|(vm, count)| (TenantId(vm), count)).collect(),
            removed,
        })
    }
}
