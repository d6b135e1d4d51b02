//! Handles, and mappings in the process's address space.
//!
//! UNSAFETY: maps files over reserved addresses.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsRawFd as _, IntoRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::card::{self, Allocation, Card, Tier};
use crate::result::{INVALID_DEVICE, INVALID_VALUE, NOT_INITIALIZED, NOT_SUPPORTED, OUT_OF_MEMORY};
use crate::space::{Broken, GRANULE, Space};
use crate::{current, pairs};

/// An allocation of this process. All descriptors and mappings share its file description, which determines its
/// lifetime.
#[derive(Clone)]
pub struct Physical {
    file: Arc<Allocation>,
    bytes: u64,
    tier: Tier,
    /// Index of the card among all cards.
    card: usize,
    /// Set if the allocation was imported by [`import`].
    imported: bool,
    /// Handle types with which the allocation can be exported.
    kinds: i32,
    /// Number of the program's references to the handle. The allocation exists while it has references or mappings.
    references: u32,
    mappings: u32,
}

#[derive(Default)]
struct Memory {
    space: Space,
    handles: HashMap<u64, Physical>,
    next: u64,
    /// Sizes of `cuMemAlloc` allocations in bytes, keyed by address.
    plain: HashMap<u64, u64>,
    /// Tiers of mappings, keyed by address.
    tiers: HashMap<u64, Tier>,
    /// Access of each device to mappings, keyed by address.
    access: HashMap<u64, HashMap<i32, i32>>,
    /// Contents of each allocation while the process is off the card.
    taken_off: HashMap<u64, Vec<u8>>,
}

static MEMORY: Mutex<Option<Memory>> = Mutex::new(None);

/// Number of changes to mappings and access rights so far.
static GENERATION: AtomicU64 = AtomicU64::new(1);

/// Returns the number of changes to mappings and access rights so far.
pub fn generation() -> u64 {
    GENERATION.load(Ordering::SeqCst)
}

struct Locked(MutexGuard<'static, Option<Memory>>);

fn lock() -> Locked {
    Locked(MEMORY.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Locked {
    fn get(&mut self) -> &mut Memory {
        self.0.get_or_insert_default()
    }
}

fn broken(rule: Broken) -> i32 {
    if std::env::var_os("FAKE_CUDA_LOG").is_some() {
        eprintln!("fake libcuda: {}", rule.0);
    }
    rule.1
}

/// Allocates physical memory that can be exported with the handle types `kinds`. Returns its handle.
pub fn create(device: i32, tier: Tier, bytes: u64, kinds: i32) -> Result<u64, i32> {
    if bytes == 0 || !bytes.is_multiple_of(GRANULE) {
        return Err(INVALID_VALUE);
    }
    let card = card::of_device(device).ok_or(INVALID_DEVICE)?;
    let file = card.allocate(tier, bytes).ok_or(OUT_OF_MEMORY)?;
    Ok(insert(file, card.number(), tier, bytes, false, kinds))
}

fn insert(file: Allocation, card: usize, tier: Tier, bytes: u64, imported: bool, kinds: i32) -> u64 {
    let mut memory = lock();
    let memory = memory.get();
    memory.next += 1;
    let handle = 0x1000 + memory.next;
    let file = Arc::new(file);
    memory.handles.insert(handle, Physical { file, bytes, tier, card, imported, kinds, references: 1, mappings: 0 });
    handle
}

/// Returns the device number of a card in this process.
fn device(card: usize) -> i32 {
    card::visible().iter().position(|seen| *seen == card).map_or(-1, |at| at as i32)
}

impl Memory {
    /// Returns the allocation of a handle to which the program has a reference.
    fn handle(&mut self, handle: u64) -> Result<&mut Physical, i32> {
        self.handles.get_mut(&handle).filter(|physical| physical.references > 0).ok_or(INVALID_VALUE)
    }

    /// Removes a handle if it has neither references nor mappings.
    fn end(&mut self, handle: u64) {
        if self.handles.get(&handle).is_some_and(|p| p.references == 0 && p.mappings == 0) {
            self.handles.remove(&handle);
        }
    }
}

/// Drops a reference. Mappings remain valid.
pub fn release(handle: u64) -> Result<(), i32> {
    let mut memory = lock();
    let memory = memory.get();
    memory.handle(handle)?.references -= 1;
    memory.end(handle);
    Ok(())
}

/// Returns the handle mapped at an address and adds a reference.
pub fn retain(at: u64) -> Result<u64, i32> {
    let mut memory = lock();
    let memory = memory.get();
    let (start, mapping) = memory.space.find(at).ok_or(INVALID_VALUE)?;
    if memory.plain.contains_key(&start) {
        return Err(INVALID_VALUE);
    }
    memory.handles.get_mut(&mapping.handle).ok_or(INVALID_VALUE)?.references += 1;
    Ok(mapping.handle)
}

/// Returns the `CUmemAllocationProp` of a handle.
pub fn property(handle: u64) -> Result<[i32; 8], i32> {
    let mut memory = lock();
    let physical = memory.get().handle(handle)?;
    let (kinds, device) = (physical.kinds, device(physical.card));
    Ok(if physical.tier == Tier::Host { [1, kinds, 3, 0, 0, 0, 0, 0] } else { [1, kinds, 1, device, 0, 0, 0, 0] })
}

/// Returns a new descriptor for an allocation.
pub fn export(handle: u64) -> Result<i32, i32> {
    let mut memory = lock();
    let physical = memory.get().handle(handle)?;
    // As observed on an H100 with driver 580, imported memory cannot be exported. A program's chunks can therefore
    // reach a new owner only through descriptors that the program has kept.
    if physical.imported || physical.kinds & 1 == 0 {
        return Err(INVALID_VALUE);
    }
    // The kernel limits the process's descriptors, as with NVIDIA's driver.
    physical.file.try_clone().map(|file| file.into_raw_fd()).map_err(|_| OUT_OF_MEMORY)
}

/// Imports the allocation of a descriptor, and returns its handle.
pub fn import(descriptor: i32) -> Result<u64, i32> {
    // SAFETY: the descriptor is only borrowed for the copy.
    let copy = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the copy is new and owned by this function.
    let file = unsafe { <File as std::os::fd::FromRawFd>::from_raw_fd(copy) };
    let mut file = file;
    let first = card::visible().first().copied().ok_or(INVALID_DEVICE)?;
    if let Some(delay) = card::unimportable_after() {
        std::thread::sleep(delay);
        return Err(NOT_INITIALIZED);
    }
    for card in card::all() {
        let sees = card::visible().contains(&card.number());
        match card.import(file) {
            // Driver 580 returned this error on an H200 in a process that saw the card only because it was restored
            // there.
            Ok(_) if card::is_late(card.number()) => return Err(NOT_INITIALIZED),
            Ok((memory, tier, bytes)) if sees => return Ok(insert(memory, card.number(), tier, bytes, true, 1)),
            // Memory of a NUMA node does not belong to a card.
            Ok((memory, Tier::Host, bytes)) => return Ok(insert(memory, first, Tier::Host, bytes, true, 1)),
            Ok(_) => return Err(INVALID_VALUE),
            Err(back) => file = back,
        }
    }
    Err(INVALID_VALUE)
}

fn cover(at: u64, bytes: u64) -> bool {
    // SAFETY: the range is a reservation of this process, or a new one if `at` is 0.
    let found = unsafe {
        libc::mmap(
            at as *mut libc::c_void,
            bytes as usize,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    found as u64 == at
}

/// Reserves addresses. They start at `wish` if it is not 0 and the range is unused.
pub fn reserve(bytes: u64, align: u64, wish: u64) -> Result<u64, i32> {
    if bytes == 0 || !bytes.is_multiple_of(GRANULE) || (align != 0 && !align.is_power_of_two()) {
        return Err(INVALID_VALUE);
    }
    let align = align.max(GRANULE);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    if wish != 0 && wish.is_multiple_of(align) {
        let at = wish as *mut libc::c_void;
        // SAFETY: the mapping is new. The kernel rejects the address if the range is in use.
        let found =
            unsafe { libc::mmap(at, bytes as usize, libc::PROT_NONE, flags | libc::MAP_FIXED_NOREPLACE, -1, 0) };
        if found == at {
            lock().get().space.reserve(wish, bytes);
            return Ok(wish);
        }
    }
    let length = (bytes + align) as usize;
    // SAFETY: only the aligned part of the new mapping is used.
    let found = unsafe { libc::mmap(std::ptr::null_mut(), length, libc::PROT_NONE, flags, -1, 0) };
    if found == libc::MAP_FAILED {
        return Err(OUT_OF_MEMORY);
    }
    let at = (found as u64).next_multiple_of(align);
    lock().get().space.reserve(at, bytes);
    Ok(at)
}

/// Frees a reservation.
pub fn unreserve(at: u64, bytes: u64) -> Result<(), i32> {
    lock().get().space.unreserve(at, bytes).map_err(broken)
}

/// Maps an allocation. The program grants access later.
pub fn map(at: u64, bytes: u64, offset: u64, handle: u64) -> Result<(), i32> {
    let mut memory = lock();
    let memory = memory.get();
    let physical = memory.handle(handle)?.clone();
    memory.space.map(at, bytes, offset, handle, physical.bytes).map_err(broken)?;
    memory.handle(handle)?.mappings += 1;
    // SAFETY: the range lies in a reservation of this process and has no mappings.
    let found = unsafe {
        libc::mmap(
            at as *mut libc::c_void,
            bytes as usize,
            libc::PROT_NONE,
            libc::MAP_SHARED | libc::MAP_FIXED,
            physical.file.as_raw_fd(),
            0,
        )
    };
    memory.tiers.insert(at, physical.tier);
    if found as u64 == at { Ok(()) } else { Err(OUT_OF_MEMORY) }
}

/// Like [`unmap`], for mappings created by the program.
pub fn unmap_own(at: u64, bytes: u64) -> Result<(), i32> {
    let plain = |memory: &mut Memory| memory.space.find(at).is_some_and(|(start, _)| memory.plain.contains_key(&start));
    if plain(lock().get()) {
        return Err(INVALID_VALUE);
    }
    unmap(at, bytes)
}

/// Unmaps whole mappings. Later accesses kill the program.
pub fn unmap(at: u64, bytes: u64) -> Result<(), i32> {
    let mut memory = lock();
    let memory = memory.get();
    for (start, mapping) in memory.space.unmap(at, bytes).map_err(broken)? {
        memory.tiers.remove(&start);
        memory.access.remove(&start);
        GENERATION.fetch_add(1, Ordering::SeqCst);
        if let Some(physical) = memory.handles.get_mut(&mapping.handle) {
            physical.mappings -= 1;
        }
        memory.end(mapping.handle);
        if !cover(start, mapping.bytes) {
            return Err(OUT_OF_MEMORY);
        }
    }
    Ok(())
}

/// Sets a device's access to whole mappings. The pages get the combined access of all devices. [`access_of`]
/// distinguishes devices.
pub fn allow(of: i32, at: u64, bytes: u64, access: i32) -> Result<(), i32> {
    protection(access).ok_or(INVALID_VALUE)?;
    let mut memory = lock();
    let memory = memory.get();
    let found = memory.space.allow(at, bytes, access).map_err(broken)?;
    let imported = |handle| memory.handles.get(handle).is_some_and(|physical: &Physical| physical.imported);
    if found.iter().any(|(_, mapping)| imported(&mapping.handle)) && card::visible().iter().any(|at| card::is_late(*at))
    {
        return Err(INVALID_DEVICE);
    }
    for (start, mapping) in found {
        let devices = memory.access.entry(start).or_default();
        devices.insert(of, access);
        let all = devices.values().fold(0, |all, access| all | access);
        memory.space.allow(start, mapping.bytes, all).map_err(broken)?;
        let protection = protection(all).ok_or(INVALID_VALUE)?;
        // SAFETY: the range is mapped.
        let result = unsafe { libc::mprotect(start as *mut libc::c_void, mapping.bytes as usize, protection) };
        if result != 0 {
            return Err(INVALID_VALUE);
        }
    }
    GENERATION.fetch_add(1, Ordering::SeqCst);
    Ok(())
}

/// Returns the mapping that contains an address (its first address and size), and a device's access to it.
pub fn access_of(at: u64, device: i32) -> Option<((u64, u64), i32)> {
    let mut memory = lock();
    let memory = memory.get();
    let (start, mapping) = memory.space.find(at)?;
    let access = memory.access.get(&start).and_then(|devices| devices.get(&device)).copied().unwrap_or(0);
    Some(((start, mapping.bytes), access))
}

/// Sets device `from`'s access to all `cuMemAlloc` allocations on device `to`.
pub fn allow_plain(to: i32, from: i32, access: i32) -> Result<(), i32> {
    let plain: Vec<(u64, u64)> = lock().get().plain.iter().map(|(at, bytes)| (*at, *bytes)).collect();
    let of_device = plain.into_iter().filter(|(at, _)| find(*at).is_some_and(|found| found.device == to));
    of_device.collect::<Vec<_>>().into_iter().try_for_each(|(at, bytes)| allow(from, at, bytes, access))
}

fn protection(access: i32) -> Option<libc::c_int> {
    match access {
        0 => Some(libc::PROT_NONE),
        1 => Some(libc::PROT_READ),
        3 => Some(libc::PROT_READ | libc::PROT_WRITE),
        _ => None,
    }
}

/// Releases all memory of this process, but saves the contents of its own allocations.
pub fn take_off() {
    let mut memory = lock();
    let memory = memory.get();
    for (start, mapping) in memory.space.mappings() {
        cover(start, mapping.bytes);
    }
    for (&handle, physical) in &mut memory.handles {
        let mut contents = vec![0; physical.bytes as usize];
        if !physical.imported && physical.file.read_exact_at(&mut contents, 0).is_ok() {
            memory.taken_off.insert(handle, contents);
        }
        if let Some(nothing) = Allocation::nothing() {
            physical.file = Arc::new(nothing);
        }
    }
}

/// Restores this process's memory on its card, or moves memory of card `moves.0` to card `moves.1`. Changes nothing on
/// failure.
pub fn put_back(moves: Option<(&Card, &Card)>) -> Result<(), i32> {
    let mut memory = lock();
    let memory = memory.get();
    if memory.handles.values().any(|physical| physical.imported) {
        return Err(NOT_SUPPORTED);
    }
    let mut made = Vec::new();
    for (handle, contents) in &memory.taken_off {
        let Some(physical) = memory.handles.get(handle) else { continue };
        let card = match moves {
            Some((from, to)) if physical.card == from.number() => to,
            _ => card::all().get(physical.card).ok_or(INVALID_DEVICE)?,
        };
        let file = card.allocate(physical.tier, physical.bytes).ok_or(OUT_OF_MEMORY)?;
        file.write_all_at(contents, 0).map_err(|_| OUT_OF_MEMORY)?;
        made.push((*handle, card.number(), file));
    }
    memory.taken_off.clear();
    for (handle, card, file) in made {
        if let Some(physical) = memory.handles.get_mut(&handle) {
            (physical.file, physical.card) = (Arc::new(file), card);
        }
    }
    for (start, mapping) in memory.space.mappings() {
        let (Some(physical), Some(protection)) = (memory.handles.get(&mapping.handle), protection(mapping.access))
        else {
            continue;
        };
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        let (at, bytes) = (start as *mut libc::c_void, mapping.bytes as usize);
        // SAFETY: the range is in a reservation of this process and was mapped when its memory was removed.
        unsafe { libc::mmap(at, bytes, protection, flags, physical.file.as_raw_fd(), 0) };
    }
    Ok(())
}

/// A mapping, and the properties of its memory.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    /// First address and size of the mapping.
    pub mapping: (u64, u64),
    /// First address and size of the reservation.
    pub range: (u64, u64),
    /// Memory that backs the allocation.
    pub tier: Tier,
    /// Combined access of all devices, as `CUmemAccess_flags`.
    pub access: i32,
    /// Number of the allocation.
    pub id: u64,
    /// Handle types with which the allocation can be exported.
    pub kinds: i32,
    /// Set if the allocation was created by `cuMemAlloc`.
    pub plain: bool,
    /// Device of the allocation.
    pub device: i32,
}

/// Returns the mapping that contains an address.
pub fn find(at: u64) -> Option<Found> {
    let mut memory = lock();
    let memory = memory.get();
    let (start, mapping) = memory.space.find(at)?;
    let card = memory.handles.get(&mapping.handle).map(|physical| physical.card);
    Some(Found {
        device: card.map_or(-1, device),
        mapping: (start, mapping.bytes),
        range: memory.space.reservation(at)?,
        tier: memory.tiers.get(&start).copied()?,
        access: mapping.access,
        id: mapping.handle,
        kinds: memory.handles.get(&mapping.handle).map_or(0, |physical| physical.kinds),
        plain: memory.plain.contains_key(&start),
    })
}

/// Allocates memory like `cuMemAlloc`.
pub fn allocate(bytes: u64) -> Result<u64, i32> {
    allocate_counted(bytes, true)
}

/// Allocates memory like `cuMemAllocManaged`. NVML does not charge the memory to the process. All of it is resident
/// immediately.
pub fn allocate_managed(bytes: u64) -> Result<u64, i32> {
    allocate_counted(bytes, false)
}

fn allocate_counted(bytes: u64, counted: bool) -> Result<u64, i32> {
    let rounded = bytes.max(1).checked_next_multiple_of(GRANULE).ok_or(OUT_OF_MEMORY)?;
    let at = reserve(rounded, 0, 0)?;
    if let Err(error) = back_counted(at, rounded, counted) {
        let _ = unreserve(at, rounded);
        return Err(error);
    }
    lock().get().plain.insert(at, rounded);
    Ok(at)
}

/// Maps new memory at reserved addresses. Unmapping frees the memory.
pub fn back(at: u64, bytes: u64) -> Result<(), i32> {
    back_counted(at, bytes, true)
}

fn back_counted(at: u64, bytes: u64, counted: bool) -> Result<(), i32> {
    let device = current::current_device();
    let card = card::of_device(device).ok_or(INVALID_DEVICE)?;
    let memory = card.allocate(Tier::Device, bytes).ok_or(OUT_OF_MEMORY)?;
    let memory = if counted { memory } else { memory.uncounted() };
    let handle = insert(memory, card.number(), Tier::Device, bytes, false, 0);
    map(at, bytes, 0, handle)?;
    for device in std::iter::once(device).chain(pairs::of(device)) {
        allow(device, at, bytes, 3)?;
    }
    release(handle)
}

/// Frees memory returned by [`allocate`].
pub fn free(at: u64) -> Result<(), i32> {
    let bytes = lock().get().plain.remove(&at).ok_or(INVALID_VALUE)?;
    unmap(at, bytes)?;
    unreserve(at, bytes)
}
