//! The pages that carry accesses: their layouts, and functions that take and answer requests.
//!
//! Only Xen writes these pages, but this module does not trust their contents: it copies each field once, and the code
//! that uses the field validates it.
//!
//! Source: `hvm/ioreq.h`.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use vm_memory::VolatileMemory;
use vmm_glue::memory::Mapping;

/// Number of slots in the page of synchronous requests, one per virtual CPU.
pub const SLOTS: usize = 128;
/// Size of a slot in bytes.
const SLOT: usize = 32;
/// Number of entries in the ring of buffered requests.
pub const RING: u32 = 511;

mod slot {
    pub const ADDRESS: usize = 0;
    pub const DATA: usize = 8;
    pub const COUNT: usize = 16;
    pub const SIZE: usize = 20;
    pub const PORT: usize = 24;
    /// Offset of the byte whose low half contains the state. Its upper half contains three flags: `data` is an address,
    /// the access is a read, and the CPU's direction flag is set.
    pub const STATE: usize = 30;
    pub const KIND: usize = 31;
}

mod ring {
    pub const READ: usize = 0;
    pub const WRITE: usize = 4;
    pub const ENTRIES: usize = 8;
    pub const ENTRY: usize = 8;
}

/// States of a slot.
pub mod state {
    /// The slot is idle.
    pub const NONE: u8 = 0;
    /// A request is ready.
    pub const READY: u8 = 1;
    /// The server has taken the request.
    pub const IN_PROCESS: u8 = 2;
    /// The answer is ready.
    pub const ANSWERED: u8 = 3;
}

const STATE_MASK: u8 = 0xf;
const DATA_IS_ADDRESS: u8 = 1 << 4;
const READ: u8 = 1 << 5;
const BACKWARDS: u8 = 1 << 6;

/// Kinds of requests.
pub mod kind {
    /// A port access.
    pub const PORT: u8 = 0;
    /// A memory access.
    pub const MEMORY: u8 = 1;
    /// A PCI configuration space access. The function is in the upper half of the address, and the offset in the lower
    /// half.
    pub const PCI_CONFIG: u8 = 2;
    /// The guest has set its clock.
    pub const TIME_OFFSET: u8 = 7;
    /// Frames may have been removed.
    pub const INVALIDATE: u8 = 8;
}

/// A copied, unvalidated request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Address of the first item.
    pub address: u64,
    /// Data to write, or the guest physical address of the data.
    pub data: u64,
    /// Number of items, for a repeated instruction.
    pub count: u32,
    /// Size of an item in bytes.
    pub size: u32,
    /// Kind of request, a value in [`kind`].
    pub kind: u8,
    /// True if `data` is the guest physical address of the data.
    pub data_is_address: bool,
    /// True if the guest's access is a read.
    pub read: bool,
    /// True if the addresses of successive items decrease.
    pub backwards: bool,
}

impl Request {
    /// Encodes this request as a slot, excluding the port.
    #[cfg(feature = "fake")]
    pub(super) fn bytes(&self, state: u8) -> [u8; SLOT] {
        let mut bytes = [0; SLOT];
        let flags = [(self.data_is_address, DATA_IS_ADDRESS), (self.read, READ), (self.backwards, BACKWARDS)];
        let flags = flags.iter().filter(|(set, _)| *set).fold(0, |all, (_, flag)| all | flag);
        let mut put = |at: usize, from: &[u8]| bytes.iter_mut().skip(at).zip(from).for_each(|(to, from)| *to = *from);
        put(slot::ADDRESS, &self.address.to_le_bytes());
        put(slot::DATA, &self.data.to_le_bytes());
        put(slot::COUNT, &self.count.to_le_bytes());
        put(slot::SIZE, &self.size.to_le_bytes());
        put(slot::STATE, &[state & STATE_MASK | flags]);
        put(slot::KIND, &[self.kind]);
        bytes
    }
}

/// Returns the offset of a slot's field within the page, or `None` if no such slot exists.
fn place(number: usize, field: usize) -> Option<usize> {
    (number < SLOTS).then(|| number.saturating_mul(SLOT).saturating_add(field))
}

fn state_of(page: &Mapping, number: usize) -> Option<&AtomicU8> {
    page.get_atomic_ref::<AtomicU8>(place(number, slot::STATE)?).ok()
}

/// Returns a slot's port, or 0 if the virtual CPU does not exist.
#[must_use]
pub fn port(page: &Mapping, number: usize) -> u32 {
    let port = place(number, slot::PORT).and_then(|at| page.get_atomic_ref::<AtomicU32>(at).ok());
    port.map_or(0, |port| u32::from_le(port.load(Ordering::Relaxed)))
}

/// Returns true if a slot contains a request that has not been taken.
#[must_use]
pub fn is_ready(page: &Mapping, number: usize) -> bool {
    state_of(page, number).is_some_and(|state| state.load(Ordering::Relaxed) & STATE_MASK == state::READY)
}

/// Takes a slot's request, if any.
pub fn take(page: &Mapping, number: usize) -> Option<Request> {
    let state = state_of(page, number)?;
    let flags = state.load(Ordering::Acquire);
    if flags & STATE_MASK != state::READY {
        return None;
    }
    let mut bytes = [0; SLOT];
    page.get_slice(place(number, 0)?, SLOT).ok()?.copy_to(&mut bytes);
    state.store(flags & !STATE_MASK | state::IN_PROCESS, Ordering::Release);
    Some(Request {
        address: u64::from_le_bytes(field(&bytes, slot::ADDRESS)?),
        data: u64::from_le_bytes(field(&bytes, slot::DATA)?),
        count: u32::from_le_bytes(field(&bytes, slot::COUNT)?),
        size: u32::from_le_bytes(field(&bytes, slot::SIZE)?),
        kind: u8::from_le_bytes(field(&bytes, slot::KIND)?),
        data_is_address: flags & DATA_IS_ADDRESS != 0,
        read: flags & READ != 0,
        backwards: flags & BACKWARDS != 0,
    })
}

/// Answers a slot's request. `data` is the value of a read.
pub fn answer(page: &Mapping, number: usize, data: Option<u64>) {
    let Some(state) = state_of(page, number) else { return };
    if let Some(data) = data
        && let Some(slice) = place(number, slot::DATA).and_then(|at| page.get_slice(at, size_of::<u64>()).ok())
    {
        slice.copy_from(&data.to_le_bytes());
    }
    let flags = state.load(Ordering::Relaxed);
    state.store(flags & !STATE_MASK | state::ANSWERED, Ordering::Release);
}

/// Takes the oldest buffered request, if any. Returns an error and drops all requests in the ring if the ring is
/// invalid.
pub fn take_buffered(page: &Mapping) -> Result<Option<Request>, BadRing> {
    let pointer = |at| page.get_atomic_ref::<AtomicU32>(at).map_err(|_| BadRing { filled: 0 });
    let (read, write) = (pointer(ring::READ)?, pointer(ring::WRITE)?);
    let at = read.load(Ordering::Relaxed);
    let filled = write.load(Ordering::Acquire).wrapping_sub(at);
    if filled == 0 {
        return Ok(None);
    }
    let entry = |at: u32| {
        let at = usize::try_from(at % RING).unwrap_or(0).saturating_mul(ring::ENTRY).saturating_add(ring::ENTRIES);
        let mut bytes = [0; ring::ENTRY];
        page.get_slice(at, ring::ENTRY).ok()?.copy_to(&mut bytes);
        Some((u32::from_le_bytes(field(&bytes, 0)?), u32::from_le_bytes(field(&bytes, 4)?)))
    };
    let bad = || {
        read.fetch_add(filled, Ordering::Release);
        BadRing { filled }
    };
    if filled > RING {
        return Err(bad());
    }
    let (head, low) = entry(at).ok_or(BadRing { filled })?;
    let [kind, flags, ..] = head.to_le_bytes();
    let exponent = flags >> 2 & 3;
    let entries = if exponent == 3 { 2 } else { 1 };
    if filled < entries {
        return Err(bad());
    }
    let high = if entries == 2 { entry(at.wrapping_add(1)).map_or(0, |(_, high)| high) } else { 0 };
    read.fetch_add(entries, Ordering::Release);
    Ok(Some(Request {
        address: u64::from(head >> 12),
        data: u64::from(high) << 32 | u64::from(low),
        count: 1,
        size: 1u32.wrapping_shl(exponent.into()),
        kind,
        read: flags & 2 != 0,
        ..Request::default()
    }))
}

/// The ring of buffered requests is invalid: it claims to contain more entries than fit, or it ends with half of a
/// request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ring of buffered requests claims to contain {filled} entries")]
pub struct BadRing {
    filled: u32,
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// Xen's side of the pages, for the fake hypervisor.
#[cfg(feature = "fake")]
pub(crate) mod writer {
    use super::*;

    /// Puts a port into a slot.
    pub fn set_port(page: &Mapping, number: usize, port: u32) {
        let at = place(number, slot::PORT).expect("a slot");
        page.get_slice(at, 4).expect("a page").copy_from(&port.to_le_bytes());
    }

    /// Puts a request into a slot.
    pub fn put(page: &Mapping, number: usize, request: &Request) {
        let bytes = request.bytes(state::NONE);
        let (head, tail) = bytes.split_at(slot::PORT);
        let at = place(number, 0).expect("a slot");
        page.get_slice(at, head.len()).expect("a page").copy_from(head);
        let tail = tail.get(4..).unwrap_or_default();
        page.get_slice(at.saturating_add(slot::PORT).saturating_add(4), tail.len()).expect("a page").copy_from(tail);
        let state = state_of(page, number).expect("a slot");
        state.store(state.load(Ordering::Relaxed) | state::READY, Ordering::Release);
    }

    /// Returns a slot's state.
    pub fn state(page: &Mapping, number: usize) -> u8 {
        state_of(page, number).expect("a slot").load(Ordering::Acquire) & STATE_MASK
    }

    /// Takes a slot's answer, as its virtual CPU would.
    pub fn finish(page: &Mapping, number: usize) -> u64 {
        let mut data = [0; 8];
        let at = place(number, slot::DATA).expect("a slot");
        page.get_slice(at, 8).expect("a page").copy_to(&mut data);
        state_of(page, number).expect("a slot").store(state::NONE, Ordering::Release);
        u64::from_le_bytes(data)
    }

    /// Adds a write to the ring. Returns false if the ring is full.
    pub fn buffer(page: &Mapping, request: &Request) -> bool {
        let pointer = |at| page.get_atomic_ref::<AtomicU32>(at).expect("a page");
        let (read, write) = (pointer(ring::READ), pointer(ring::WRITE));
        let entries = if request.size == 8 { 2 } else { 1 };
        let at = write.load(Ordering::Relaxed);
        if at.wrapping_sub(read.load(Ordering::Acquire)) > RING.saturating_sub(entries) {
            return false;
        }
        let flags = u32::from(request.read) << 1 | request.size.trailing_zeros() << 2;
        let head = u32::from(request.kind) | flags << 8 | u32::try_from(request.address & 0xf_ffff).unwrap_or(0) << 12;
        for (number, data) in (0..entries).zip([request.data & 0xffff_ffff, request.data >> 32]) {
            let place = usize::try_from(at.wrapping_add(number) % RING).unwrap_or(0);
            let place = place.saturating_mul(ring::ENTRY).saturating_add(ring::ENTRIES);
            let bytes = [head.to_le_bytes(), u32::try_from(data).unwrap_or(0).to_le_bytes()].concat();
            page.get_slice(place, ring::ENTRY).expect("a page").copy_from(&bytes);
        }
        write.store(at.wrapping_add(entries), Ordering::Release);
        true
    }
}
