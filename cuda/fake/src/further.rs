//! Card memory used for purposes other than the program's allocations: contexts, context limits, and module variables.
//!
//! Sizes were measured with driver 580 on an H100: a context has a stack for each thread that the card can run. On the
//! H100, the heap and the `printf` buffer do not use memory until a kernel needs them. Here, they are allocated
//! immediately.
//!
//! UNSAFETY: maps the memory for variables.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::HashMap;
use std::os::fd::AsRawFd as _;
use std::sync::{Mutex, PoisonError};

use crate::card::{Allocation, Card, Tier};
use crate::output;
use crate::result::{INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS};
use crate::space::GRANULE;

/// Handle of every memory pool: the devices' default pools, and all pools that programs create.
pub const POOL: u64 = 0x9001;
/// Number of threads that a card can run concurrently.
const THREADS: u64 = 1024;
/// Initial sizes in bytes of a thread's stack, the `printf` buffer and the heap. They are part of a new context's size.
const DEFAULT_LIMITS_BYTES: [u64; 3] = [1024, 1 << 20, 8 << 20];

/// An object that occupies memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Of {
    Context(u64),
    Limit(usize, i32),
    Module(u64),
}

type Memory = HashMap<Of, Option<Allocation>>;

/// Memory of all objects, and the last assigned number.
static HAS: Mutex<Option<(Memory, u64)>> = Mutex::new(None);

fn with<T>(work: impl FnOnce(&mut Memory, &mut u64) -> T) -> T {
    let mut has = HAS.lock().unwrap_or_else(PoisonError::into_inner);
    let (has, next) = has.get_or_insert_default();
    work(has, next)
}

fn take(card: &Card, bytes: u64) -> Result<Option<Allocation>, i32> {
    if bytes == 0 {
        return Ok(None);
    }
    let bytes = bytes.checked_next_multiple_of(GRANULE).ok_or(OUT_OF_MEMORY)?;
    card.allocate(Tier::Device, bytes).map(Some).ok_or(OUT_OF_MEMORY)
}

/// Creates a context in addition to the primary one. Returns its number.
pub fn create(card: &Card) -> Result<u64, i32> {
    let memory = card.context().map_err(|()| OUT_OF_MEMORY)?;
    with(|has, next| {
        *next += 1;
        has.insert(Of::Context(*next), memory);
        Ok(*next)
    })
}

/// Destroys a context created by [`create`].
pub fn destroy(number: u64) -> i32 {
    output::write();
    with(|has, _| if has.remove(&Of::Context(number)).is_some() { SUCCESS } else { INVALID_CONTEXT })
}

/// Returns true if the context with the given number exists.
pub fn is_there(number: u64) -> bool {
    number == 0 || with(|has, _| has.contains_key(&Of::Context(number)))
}

/// Sets a context limit, and allocates card memory for it.
pub fn limit(card: &Card, limit: i32, value: u64) -> i32 {
    // `CU_LIMIT_STACK_SIZE`, `CU_LIMIT_PRINTF_FIFO_SIZE` and `CU_LIMIT_MALLOC_HEAP_SIZE`.
    let known = match limit {
        0 => Some((DEFAULT_LIMITS_BYTES[0], THREADS)),
        1 => Some((DEFAULT_LIMITS_BYTES[1], 1)),
        2 => Some((DEFAULT_LIMITS_BYTES[2], 1)),
        _ => None,
    };
    let Some((included, each)) = known else { return INVALID_VALUE };
    let of = Of::Limit(card.number(), limit);
    // The new allocation replaces the old one.
    with(|has, _| has.remove(&of));
    match take(card, value.saturating_sub(included).saturating_mul(each)) {
        Ok(memory) => {
            with(|has, _| has.insert(of, memory));
            SUCCESS
        }
        Err(error) => error,
    }
}

/// Allocates and maps memory for a module's variables. Returns the module's number, and the address of the memory.
pub fn load(card: &Card, bytes: u64) -> Result<(u64, u64), i32> {
    let memory = take(card, bytes)?;
    let address = match &memory {
        None => 0,
        Some(memory) => map(memory, bytes.next_multiple_of(GRANULE)).ok_or(OUT_OF_MEMORY)?,
    };
    with(|has, next| {
        *next += 1;
        has.insert(Of::Module(*next + 1), memory);
        Ok((*next + 1, address))
    })
}

/// Maps an allocation at an address that the kernel chooses.
fn map(memory: &Allocation, bytes: u64) -> Option<u64> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the mapping is new, and does not overlap another one.
    let found =
        unsafe { libc::mmap(std::ptr::null_mut(), bytes as usize, access, libc::MAP_SHARED, memory.as_raw_fd(), 0) };
    (found != libc::MAP_FAILED).then_some(found as u64)
}

/// Returns true if the module with the given number is loaded.
pub fn is_loaded(module: u64) -> bool {
    with(|has, _| has.contains_key(&Of::Module(module)))
}

/// Unloads a module.
pub fn unload(module: u64) -> i32 {
    output::write();
    with(|has, _| if has.remove(&Of::Module(module)).is_some() { SUCCESS } else { INVALID_HANDLE })
}

/// Allocates memory for all objects on another card, and returns it for use with [`replace`].
pub fn allocate_on(card: &Card) -> Result<Vec<(Of, Allocation)>, i32> {
    with(|has, _| {
        let sized = has.iter().filter_map(|(of, memory)| Some((*of, memory.as_ref()?.metadata().ok()?.len())));
        let allocate = |(of, bytes)| Ok((of, card.allocate(Tier::Device, bytes).ok_or(OUT_OF_MEMORY)?));
        sized.map(allocate).collect()
    })
}

/// Replaces the memory of objects, and thereby frees their old memory.
pub fn replace(new: Vec<(Of, Allocation)>) {
    with(|has, _| has.extend(new.into_iter().map(|(of, memory)| (of, Some(memory)))));
}
