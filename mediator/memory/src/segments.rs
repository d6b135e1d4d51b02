//! Card memory segments that several address spaces map, in one or several VMs: shared device memory as in Gdev (4.2),
//! with System V names.
//!
//! A segment's memory belongs to the mediator, and is allocated from a pool of the VM that created the segment, so that
//! an operator can limit it per VM. The memory is zeroed before it is first mapped, and stays on the card. It is freed
//! when the segment was removed and no address space maps it. This module controls access, and `vgpu::pv` records the
//! address spaces that map a segment, and the addresses in them.

mod saved;

pub use saved::SavedSegments;

use super::Memory;
use super::vram::CardVram;
use super::zeroing::SCRUB_PIECE;
use crate::ManagerError;
use nvspec::addr::{SMALL_PAGE, VramAddr};
use pv::Control;
use pv::abi::{Status, share};
use std::collections::BTreeMap;
use std::sync::Arc;
use vram::{PagePool, TenantId};

/// Maximum number of segments that one VM may have created.
const SEGMENTS_OF_A_VM: usize = 1024;

/// A VM that uses segments.
#[derive(Clone, Debug)]
pub struct Party {
    /// ID of the VM.
    pub vm: TenantId,
    /// Group of VMs with which the operator permits this VM to share segments.
    pub group: Option<Arc<str>>,
    /// Maximum card memory for segments that the VM creates, in bytes.
    pub limit: u64,
}

/// Scope in which a key identifies a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Scope {
    Own(TenantId),
    Group(Arc<str>),
}

#[derive(Debug)]
struct Segment {
    key: u64,
    scope: Scope,
    owner: TenantId,
    mode: u32,
    bytes: u64,
    at: VramAddr,
    /// Number of bytes zeroed so far. The segment cannot be mapped before all of its bytes are zeroed.
    zeroed: u64,
    /// Number of address spaces that map the segment, by VM.
    attached: BTreeMap<TenantId, u32>,
    removed: bool,
}

/// Arguments of [`Memory::share_get`](crate::Memory::share_get).
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Key of the segment, or 0 for no key.
    pub key: u64,
    /// Minimum size if the segment exists, or exact size of a new one, in bytes.
    pub bytes: u64,
    /// Set to create the segment if it does not exist.
    pub create: bool,
    /// Set to fail if the segment exists.
    pub exclusive: bool,
    /// Set to look the key up in the group's scope.
    pub abroad: bool,
    /// Access rights of other VMs to the segment if it is created.
    pub mode: u32,
}

/// All segments of a card.
#[derive(Debug, Default)]
pub struct Segments {
    /// Segments by ID. An ID is reused only after 2^32 other IDs.
    segments: BTreeMap<u32, Segment>,
    last: u32,
    pools: BTreeMap<TenantId, PagePool>,
}

impl Segments {
    /// Returns the segment if it is visible to `party`.
    fn visible(&self, party: &Party, id: u32) -> Result<&Segment, Status> {
        let segment = self.segments.get(&id).ok_or(Status::NoObject)?;
        let visible = segment.owner == party.vm
            || matches!(&segment.scope, Scope::Group(group) if party.group.as_ref() == Some(group));
        visible.then_some(segment).ok_or(Status::NoObject)
    }

    /// Returns the segment if `party` owns it.
    fn owned(&mut self, party: &Party, id: u32) -> Result<&mut Segment, Status> {
        if self.visible(party, id)?.owner != party.vm {
            return Err(Status::Denied);
        }
        self.segments.get_mut(&id).ok_or(Status::NoObject)
    }

    /// Returns the total size of a VM's segments in bytes and their number.
    #[must_use]
    pub(crate) fn bytes_and_count(&self, vm: TenantId) -> (u64, usize) {
        let own = || self.segments.values().filter(|segment| segment.owner == vm);
        (own().map(|segment| segment.bytes).sum(), own().count())
    }

    fn next_id(&mut self) -> u32 {
        loop {
            self.last = self.last.wrapping_add(1).max(1);
            if !self.segments.contains_key(&self.last) {
                return self.last;
            }
        }
    }

    /// Frees a segment if it was removed and no address space has attached it.
    fn free_unused(&mut self, id: u32, vram: &mut CardVram) {
        let unused = self.segments.get(&id).is_some_and(|segment| segment.removed && segment.attached.is_empty());
        let Some(segment) = unused.then(|| self.segments.remove(&id)).flatten() else { return };
        let Some(pool) = self.pools.get_mut(&segment.owner) else { return };
        pool.free(VramAddr(segment.at.0));
        pool.reclaim(&mut vram.chunks);
        if pool.used_bytes() == 0 {
            self.pools.remove(&segment.owner);
        }
        vram.wakeup.ring();
    }
}

impl Memory {
    /// Finds or creates a segment and returns its ID.
    ///
    /// # Errors
    /// Returns a [`Status`] if the request is denied or fails.
    pub fn share_get(&mut self, party: &Party, wanted: Wanted) -> Result<u32, Status> {
        let Wanted { key, bytes, create, exclusive, abroad, mode } = wanted;
        let scope = match abroad {
            false => Scope::Own(party.vm),
            true => Scope::Group(party.group.clone().ok_or(Status::Denied)?),
        };
        let Self { segments, vram, .. } = self;
        let known =
            segments.segments.iter().find(|(_, it)| key != 0 && !it.removed && it.key == key && it.scope == scope);
        if let Some((id, segment)) = known {
            return match (exclusive, bytes <= segment.bytes) {
                (true, _) => Err(Status::Exists),
                (false, false) => Err(Status::Range),
                (false, true) => Ok(*id),
            };
        }
        if !create {
            return Err(Status::NoObject);
        }
        let bytes = bytes.checked_next_multiple_of(SMALL_PAGE).filter(|bytes| *bytes != 0).ok_or(Status::Range)?;
        if bytes > u64::from(shadow_pt::SHARED_PAGES) * SMALL_PAGE {
            return Err(Status::Range);
        }
        if segments.bytes_and_count(party.vm).1 >= SEGMENTS_OF_A_VM {
            return Err(Status::Limit);
        }
        let pool = segments.pools.entry(party.vm).or_insert_with(|| PagePool::new(party.limit));
        let at = match vram.take(pool, bytes) {
            Ok(at) => at,
            Err(error) => {
                tracing::debug!(vm = %party.vm, bytes, %error, "a shared segment could not be created");
                if pool.used_bytes() == 0 {
                    segments.pools.remove(&party.vm);
                }
                return Err(if matches!(error, ManagerError::Pool(_)) { Status::Limit } else { Status::Failed });
            }
        };
        let id = segments.next_id();
        let segment = Segment {
            key,
            scope,
            owner: party.vm,
            mode,
            bytes,
            at,
            zeroed: 0,
            attached: BTreeMap::new(),
            removed: false,
        };
        segments.segments.insert(id, segment);
        Ok(id)
    }

    /// Zeroes one part of a new segment. The card's lock is held for only one part at a time. Returns true if another
    /// part is left.
    ///
    /// # Errors
    /// Returns a [`Status`] if the request is denied or fails.
    pub fn share_zero(&mut self, party: &Party, id: u32) -> Result<bool, Status> {
        self.segments.visible(party, id)?;
        let segment = self.segments.segments.get_mut(&id).ok_or(Status::NoObject)?;
        let piece = (segment.bytes - segment.zeroed).min(SCRUB_PIECE);
        self.vram.memory.zero(segment.at.offset(segment.zeroed), piece).map_err(|_| Status::Failed)?;
        segment.zeroed += piece;
        Ok(segment.zeroed < segment.bytes)
    }

    /// Adds an address space of `party` to those that map the segment. The segment must already be zeroed. Returns the
    /// segment's VRAM address and its size in bytes.
    ///
    /// # Errors
    /// Returns a [`Status`] if the request is denied or fails.
    pub fn share_attach(&mut self, party: &Party, id: u32, write: bool) -> Result<(VramAddr, u64), Status> {
        let segment = self.segments.visible(party, id)?;
        let needed = if write { share::mode::READ | share::mode::WRITE } else { share::mode::READ };
        if segment.owner != party.vm && segment.mode & needed != needed {
            return Err(Status::Denied);
        }
        let segment = self.segments.segments.get_mut(&id).ok_or(Status::NoObject)?;
        if segment.zeroed < segment.bytes {
            return Err(Status::Failed);
        }
        *segment.attached.entry(party.vm).or_default() += 1;
        Ok((segment.at, segment.bytes))
    }

    /// Decrements the number of the VM's address spaces that map the segment. The card's TLBs must not contain
    /// translations to the segment.
    pub fn share_detach(&mut self, vm: TenantId, id: u32) {
        if let Some(segment) = self.segments.segments.get_mut(&id)
            && let Some(count) = segment.attached.get_mut(&vm)
        {
            *count -= 1;
            if *count == 0 {
                segment.attached.remove(&vm);
            }
        }
        self.segments.free_unused(id, &mut self.vram);
    }

    /// Queries or changes a segment.
    ///
    /// # Errors
    /// Returns a [`Status`] if the request is denied or fails.
    pub fn share_control(&mut self, party: &Party, id: u32, control: Control) -> Result<u64, Status> {
        let segments = &mut self.segments;
        let segment = segments.visible(party, id)?;
        match control {
            Control::Size => return Ok(segment.bytes),
            Control::Attached => return Ok(segment.attached.values().map(|count| u64::from(*count)).sum()),
            Control::Mode => return Ok(segment.mode.into()),
            Control::SetMode(mode) => segments.owned(party, id)?.mode = mode,
            Control::Remove => {
                segments.owned(party, id)?.removed = true;
                segments.free_unused(id, &mut self.vram);
            }
        }
        Ok(0)
    }

    /// Marks the segments of a removed VM as removed, so that no key refers to them. Segments that other VMs have
    /// attached stay until these VMs detach them.
    pub fn forget_segments(&mut self, vm: TenantId) {
        let own: Vec<u32> = self.segments.segments.iter().filter(|(_, it)| it.owner == vm).map(|(id, _)| *id).collect();
        for id in own {
            if let Some(segment) = self.segments.segments.get_mut(&id) {
                segment.removed = true;
            }
            self.segments.free_unused(id, &mut self.vram);
        }
    }
}
