//! Memory in chunks that processes of one tenant share by `cuIpcGetMemHandle` and `cuIpcOpenMemHandle`.
//!
//! The owner keeps such chunks where they are and hands them to the other process. Contents of one of our handles: the
//! owner's token (32 bytes), [`MARK`], the offset and the length of the allocation in bytes, the number of chunks and
//! the card. The driver's own handles pass.
//!
//! UNSAFETY: reads and writes through the program's pointers, maps and unmaps memory of the card.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::{BTreeMap, HashSet};
use std::ffi::c_int;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use cuda_protocol::{Chunk, ChunkId, FromTenant, Refusal, Share};

use super::chunks;
use super::handles::{Backing, Pages as _};
use super::pages::Driver;
use crate::captures;
use crate::descriptors::ChunkDescriptor;
use crate::driver::{
    self, Access, Address, Handle, INVALID_CONTEXT, INVALID_VALUE, Ipc, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS,
};
use crate::requests::{self, Answer};
use crate::symbols::at;
use crate::tenant;

/// Mark of our handles.
const MARK: u64 = u64::from_le_bytes(*b"mediated");
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only flag, which must be set.
const LAZY: u32 = 1;
/// Time limit of the wait for a chunk in transit.
// TIMEOUT: a relocation of one process takes milliseconds; an owner that takes longer is stuck.
const UNDER_WAY: Duration = Duration::from_secs(20);

/// Memory of another process that is mapped here.
#[derive(Debug)]
struct Foreign {
    share: Share,
    device: c_int,
    card: u8,
    /// Start of the reservation.
    base: Address,
    chunk_bytes: u64,
    /// Size of the other process's allocation.
    bytes: u64,
    /// Number of times that it was opened.
    count: u32,
    pieces: Vec<(Handle, Backing)>,
}

/// Memory of other processes, by its address in this program.
#[derive(Debug, Default)]
pub struct Opened {
    foreign: BTreeMap<Address, Foreign>,
    /// Tokens of this process's own memory.
    own: HashSet<Share>,
}

/// A decoded handle of this library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Token {
    share: Share,
    offset: u64,
    bytes: u64,
    chunks: u32,
    card: u8,
}

impl Token {
    fn write(self) -> Ipc {
        let mut all = [0; 64];
        all[..32].copy_from_slice(&self.share.0);
        all[32..40].copy_from_slice(&MARK.to_le_bytes());
        all[40..48].copy_from_slice(&self.offset.to_le_bytes());
        all[48..56].copy_from_slice(&self.bytes.to_le_bytes());
        all[56..60].copy_from_slice(&self.chunks.to_le_bytes());
        all[60] = self.card;
        Ipc(all)
    }

    fn read(handle: &Ipc) -> Option<Self> {
        let word = |at: usize| Some(u64::from_le_bytes(handle.0.get(at..at + 8)?.try_into().ok()?));
        (word(32)? == MARK).then_some(())?;
        let share = Share(handle.0.get(..32)?.try_into().ok()?);
        let [chunks @ .., card, _, _, _] = word(56)?.to_le_bytes();
        Some(Self { share, offset: word(40)?, bytes: word(48)?, chunks: u32::from_le_bytes(chunks), card })
    }

    /// Returns true if the allocation is within the chunks: the handle came from another process.
    fn fits(&self, chunk_bytes: u64) -> bool {
        let all = u64::from(self.chunks).saturating_mul(chunk_bytes);
        self.bytes > 0 && self.offset < chunk_bytes && self.offset.saturating_add(self.bytes) <= all
    }
}

impl Opened {
    /// Returns first address, bytes and device of the allocation that contains an address.
    pub fn find(&self, address: Address) -> Option<(Address, u64, c_int)> {
        let (&start, foreign) = self.foreign.range(..=address).next_back()?;
        (address - start < foreign.bytes).then_some((start, foreign.bytes, foreign.device))
    }

    /// Returns each chunk with its card.
    pub fn chunks(&self) -> impl Iterator<Item = (u8, &Backing)> {
        self.foreign.values().flat_map(|f| f.pieces.iter().map(|(_, chunk)| (f.card, chunk)))
    }

    /// Returns true if a range contains our addresses.
    pub fn reserved(&self, at: Address, bytes: u64) -> bool {
        let end = at.saturating_add(bytes);
        self.foreign.values().any(|f| at < f.base + f.pieces.len() as u64 * f.chunk_bytes && end > f.base)
    }

    /// Opens an open share once more.
    fn again(&mut self, share: Share) -> Option<Address> {
        let (start, foreign) = self.foreign.iter_mut().find(|(_, foreign)| foreign.share == share)?;
        foreign.count += 1;
        Some(*start)
    }

    /// Maps chunks that were granted for a token. Returns their ids on failure.
    fn map(
        &mut self,
        token: Token,
        device: c_int,
        granted: Vec<(Chunk, ChunkDescriptor)>,
    ) -> Result<Address, Vec<ChunkId>> {
        let ids: Vec<_> = granted.iter().map(|part| part.0.id).collect();
        let chunk_bytes = tenant::get().map_or(2 << 20, |tenant| tenant.chunk_bytes);
        let length = u64::from(token.chunks) * chunk_bytes;
        let mut base = 0;
        // SAFETY: the pointer is valid.
        if unsafe { driver::mem_address_reserve(&raw mut base, length as usize, chunk_bytes as usize, 0, 0) } != SUCCESS
        {
            return Err(ids);
        }
        let mut pieces = Vec::new();
        for (chunk, descriptor) in granted {
            let Some(handle) = Driver.import(descriptor.as_fd()) else { break };
            if Driver.map(base + pieces.len() as u64 * chunk_bytes, chunk_bytes, handle) != SUCCESS {
                Driver.release(handle);
                break;
            }
            pieces.push((handle, Backing { shared: true, ..Backing::new(chunk, None) }));
        }
        let (share, bytes, card) = (token.share, token.bytes, token.card);
        let foreign = Foreign { share, device, card, base, chunk_bytes, bytes, count: 1, pieces };
        if foreign.pieces.len() != ids.len() || Driver.allow(base, length, &[Access::all(device)]) != SUCCESS {
            foreign.end(length);
            return Err(ids);
        }
        self.foreign.insert(base + token.offset, foreign);
        Ok(base + token.offset)
    }

    /// Closes one opening of the memory at an address. Returns the chunks that go back, or `None` if none of our memory
    /// starts there.
    fn close(&mut self, address: Address) -> Option<Vec<ChunkId>> {
        let foreign = self.foreign.get_mut(&address)?;
        foreign.count -= 1;
        if foreign.count > 0 {
            return Some(Vec::new());
        }
        let foreign = self.foreign.remove(&address)?;
        let length = foreign.pieces.len() as u64 * foreign.chunk_bytes;
        Some(foreign.end(length))
    }
}

impl Foreign {
    /// Unmaps the chunks, and frees the `length` bytes of addresses.
    fn end(self, length: u64) -> Vec<ChunkId> {
        if !self.pieces.is_empty() {
            Driver.unmap(self.base, self.pieces.len() as u64 * self.chunk_bytes);
        }
        // SAFETY: our own reservation without mappings.
        unsafe { driver::mem_address_free(self.base, length as usize) };
        self.pieces.iter().for_each(|(handle, _)| Driver.release(*handle));
        self.pieces.into_iter().map(|(_, chunk)| chunk.id).collect()
    }
}

unsafe extern "C" fn get_handle(handle: *mut Ipc, address: Address) -> c_int {
    let since = Instant::now();
    loop {
        if chunks::with(|memory| memory.opened.find(address).is_some()) {
            // As in the driver, a process cannot pass on memory that it opened.
            return INVALID_VALUE;
        }
        let backed = chunks::with(|memory| {
            let backed = memory.backing(address)?;
            // First: from the owner's answer on, the next owner must not move them for this process alone.
            memory.mark_shared(&backed.chunks);
            Some(backed)
        });
        let Some(backed) = backed else {
            // SAFETY: the caller's promise.
            return unsafe { driver::ipc_get_mem_handle(handle, address) };
        };
        if handle.is_null() {
            return INVALID_VALUE;
        }
        let count = u32::try_from(backed.chunks.len()).unwrap_or(u32::MAX);
        let list = backed.chunks.clone();
        match requests::request(|request| FromTenant::Export { request, chunks: list }) {
            Answer::Shared(share) => {
                chunks::with(|memory| memory.opened.own.insert(share));
                let (offset, bytes, card) = (backed.offset, backed.bytes, backed.card);
                // SAFETY: the caller's pointer, not null.
                unsafe { *handle = Token { share, offset, bytes, chunks: count, card }.write() };
                return SUCCESS;
            }
            // A relocation is in progress.
            Answer::Refused(Refusal::Moving, _) if since.elapsed() < UNDER_WAY => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Answer::Refused(Refusal::Exhausted | Refusal::Quota, _) => return OUT_OF_MEMORY,
            Answer::Away if requests::wait_for_owner() => {}
            _ => return NOT_SUPPORTED,
        }
    }
}

/// Opens a handle with `real`, or through the owner if this library made it.
unsafe fn open(to: *mut Address, handle: Ipc, flags: u32, real: unsafe fn(*mut Address, Ipc, u32) -> c_int) -> c_int {
    let Some(token) = Token::read(&handle) else {
        // SAFETY: the caller's promise.
        return unsafe { real(to, handle, flags) };
    };
    let Some(chunk_bytes) = tenant::get().map(|tenant| tenant.chunk_bytes) else { return INVALID_CONTEXT };
    if to.is_null() || flags != LAZY || !token.fits(chunk_bytes) {
        return INVALID_VALUE;
    }
    let device = match driver::current_device() {
        Ok(device) => device,
        Err(error) => return error,
    };
    tenant::note_context();
    let found = chunks::with(|memory| match memory.opened.own.contains(&token.share) {
        // The driver's answer for the process's own memory.
        true => Err(INVALID_CONTEXT),
        false => Ok(memory.opened.again(token.share)),
    });
    let mut opened = match found {
        Err(error) => return error,
        Ok(Some(address)) => Ok(address),
        Ok(None) => Err(INVALID_VALUE),
    };
    if opened.is_err() {
        let ask = |request| FromTenant::Open { request, share: token.share };
        chunks::obtain_by(ask, token.chunks, |memory, granted| {
            let Some(granted) = granted else { return Vec::new() };
            // Another thread may have been faster.
            if let Some(address) = memory.opened.again(token.share) {
                opened = Ok(address);
                return granted.iter().map(|part| part.0.id).collect();
            }
            match memory.opened.map(token, device, granted) {
                Ok(address) => {
                    opened = Ok(address);
                    Vec::new()
                }
                Err(back) => {
                    opened = Err(OUT_OF_MEMORY);
                    back
                }
            }
        });
    }
    match opened {
        Ok(address) => {
            // SAFETY: the caller's pointer, not null.
            unsafe { *to = address };
            SUCCESS
        }
        Err(error) => error,
    }
}

unsafe extern "C" fn open_handle(to: *mut Address, handle: Ipc, flags: u32) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { open(to, handle, flags, driver::ipc_open_mem_handle) }
}

unsafe extern "C" fn open_handle_v2(to: *mut Address, handle: Ipc, flags: u32) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { open(to, handle, flags, driver::ipc_open_mem_handle_v2) }
}

unsafe extern "C" fn close_handle(address: Address) -> c_int {
    if chunks::with(|memory| !memory.opened.foreign.contains_key(&address)) {
        // SAFETY: the caller's promise.
        return unsafe { driver::ipc_close_mem_handle(address) };
    }
    if !captures::any() {
        // SAFETY: no pointers. Work that uses the memory ends before the memory is released.
        unsafe { driver::ctx_synchronize() };
    }
    let closed = chunks::with(|memory| {
        let freed = driver::relaxed(|| memory.opened.close(address));
        freed.map(chunks::give_back)
    });
    if closed.is_some() { SUCCESS } else { INVALID_VALUE }
}

/// Functions of this module by symbol.
pub fn ours(index: usize) -> Option<*mut ()> {
    Some(match index {
        at::cuIpcGetMemHandle => get_handle as *mut (),
        at::cuIpcOpenMemHandle => open_handle as *mut (),
        at::cuIpcOpenMemHandle_v2 => open_handle_v2 as *mut (),
        at::cuIpcCloseMemHandle => close_handle as *mut (),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u64 = 2 << 20;

    #[test]
    fn handle_token_round_trips_and_driver_handle_is_rejected() {
        let token = Token { share: Share([7; 32]), offset: 4096, bytes: 3 * CHUNK, chunks: 4, card: 1 };
        assert_eq!(Token::read(&token.write()), Some(token));
        assert_eq!(Token::read(&Ipc([0; 64])), None);
    }

    #[test]
    fn a_handle_that_was_changed_does_not_reach_beyond_its_chunks() {
        let token = Token { share: Share([7; 32]), offset: 0, bytes: CHUNK, chunks: 1, card: 0 };
        assert!(token.fits(CHUNK));
        assert!(!Token { bytes: CHUNK + 1, ..token }.fits(CHUNK));
        assert!(!Token { offset: 1, ..token }.fits(CHUNK));
        assert!(!Token { offset: CHUNK, bytes: 1, chunks: 2, ..token }.fits(CHUNK));
        assert!(!Token { bytes: u64::MAX, offset: 5, ..token }.fits(CHUNK));
        assert!(!Token { bytes: 0, ..token }.fits(CHUNK));
        assert!(!Token { chunks: 0, ..token }.fits(CHUNK));
    }
}
