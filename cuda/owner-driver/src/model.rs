//! An in-process model of a driver, for tests. The model's memory is in anonymous files, and the model checks the rules
//! of the virtual memory functions.
//!
//! Panics on invalid calls, because the owner must never make one. A call that fails because of a program's descriptor
//! returns an error.

use super::{Address, Device, Driver, DriverError, FetchTimes, Handle, Memory, Queue};
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

const OUT_OF_MEMORY: i32 = 2;

#[derive(Debug)]
struct Allocation {
    memory: Memory,
    bytes: u64,
    file: std::fs::File,
    mapped: u32,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    allocations: BTreeMap<Handle, Allocation>,
    /// Sizes of reserved ranges, keyed by start address.
    reserved: BTreeMap<u64, u64>,
    /// Sizes and handles of mappings, keyed by start address.
    mappings: BTreeMap<u64, (u64, Handle)>,
    fail_creates: u32,
    suspended: Vec<u32>,
}

/// A model of a card and its driver. Card memory is limited; host memory is not.
#[derive(Debug)]
pub struct Model {
    device: Device,
    state: Mutex<State>,
}

impl Model {
    /// Creates a card with `total_bytes` of memory.
    #[must_use]
    pub fn new(total_bytes: u64) -> Self {
        let device = Device {
            name: "model".into(),
            uuid: *b"a card in memory",
            total_bytes,
            granularity: 64 << 10,
            suspends: true,
            fetches: true,
        };
        Self { device, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the next `count` allocations fail.
    pub fn fail_creates(&self, count: u32) {
        self.lock().fail_creates = count;
    }

    /// Returns the number of unreleased handles for this kind of memory.
    #[must_use]
    pub fn handles(&self, memory: Memory) -> usize {
        self.lock().allocations.values().filter(|allocation| allocation.memory == memory).count()
    }

    /// Returns the suspended processes.
    #[must_use]
    pub fn suspended(&self) -> Vec<u32> {
        self.lock().suspended.clone()
    }
}

impl State {
    fn allocation(&mut self, handle: Handle) -> &mut Allocation {
        self.allocations.get_mut(&handle).unwrap_or_else(|| panic!("{handle:?} is not an allocation"))
    }

    /// Returns the allocation that is mapped at a range, and the offset of the range in it.
    fn within(&self, at: Address, bytes: u64) -> (&Allocation, u64) {
        let found = self.mappings.range(..=at.0).next_back();
        let (start, (length, handle)) = found.unwrap_or_else(|| panic!("nothing is mapped at {at:?}"));
        assert!(at.0 + bytes <= start + length, "{bytes} bytes from {at:?} on exceed their mapping");
        (&self.allocations[handle], at.0 - start)
    }
}

impl Driver for Model {
    fn device(&self) -> &Device {
        &self.device
    }

    fn free_bytes(&self) -> Result<u64, DriverError> {
        let state = self.lock();
        let on_card = state.allocations.values().filter(|allocation| allocation.memory == Memory::Device);
        Ok(self.device.total_bytes - on_card.map(|allocation| allocation.bytes).sum::<u64>())
    }

    fn create(&self, memory: Memory, bytes: u64) -> Result<Handle, DriverError> {
        assert!(bytes > 0 && bytes.is_multiple_of(self.device.granularity), "{bytes} is not a multiple");
        let full = DriverError::Call { call: "cuMemCreate", code: OUT_OF_MEMORY };
        if memory == Memory::Device && self.free_bytes()? < bytes {
            return Err(full);
        }
        let mut state = self.lock();
        if state.fail_creates > 0 {
            state.fail_creates -= 1;
            return Err(full);
        }
        let file = memfd_create("model of a chunk", MemfdFlags::CLOEXEC).map_err(|_| full.clone())?;
        ftruncate(&file, bytes).map_err(|_| full)?;
        let file = std::fs::File::from(file);
        // New memory has arbitrary contents.
        file.write_all_at(&vec![0xa5; bytes as usize], 0).expect("the memory file can be written");
        state.next += 1;
        let handle = Handle(state.next);
        state.allocations.insert(handle, Allocation { memory, bytes, file, mapped: 0 });
        Ok(handle)
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd, DriverError> {
        let mut state = self.lock();
        let file = &state.allocation(handle).file;
        file.as_fd()
            .try_clone_to_owned()
            .map_err(|_| DriverError::Call { call: "cuMemExportToShareableHandle", code: 999 })
    }

    fn import(&self, descriptor: BorrowedFd<'_>) -> Result<Handle, DriverError> {
        let refused = || DriverError::Call { call: "cuMemImportFromShareableHandle", code: 1 };
        let bytes = fstat(descriptor).map_err(|_| refused())?.st_size as u64;
        if bytes == 0 || !bytes.is_multiple_of(self.device.granularity) {
            return Err(refused());
        }
        let file = std::fs::File::from(descriptor.try_clone_to_owned().map_err(|_| refused())?);
        let mut state = self.lock();
        state.next += 1;
        let handle = Handle(state.next);
        state.allocations.insert(handle, Allocation { memory: Memory::Device, bytes, file, mapped: 0 });
        Ok(handle)
    }

    fn release(&self, handle: Handle) -> Result<(), DriverError> {
        let mut state = self.lock();
        let allocation = state.allocation(handle);
        assert_eq!(allocation.mapped, 0, "{handle:?} is still mapped: its memory would not be freed");
        state.allocations.remove(&handle);
        Ok(())
    }

    fn reserve(&self, bytes: u64) -> Result<Address, DriverError> {
        let mut state = self.lock();
        let at = state.reserved.last_key_value().map_or(1 << 32, |(start, bytes)| start + bytes + (1 << 20));
        state.reserved.insert(at, bytes);
        Ok(Address(at))
    }

    fn map(&self, at: Address, bytes: u64, handle: Handle) -> Result<(), DriverError> {
        let mut state = self.lock();
        let inside = state.reserved.range(..=at.0).next_back().is_some_and(|(start, all)| at.0 + bytes <= start + all);
        assert!(inside, "{at:?} is not reserved");
        let free = state.mappings.range(..at.0 + bytes).next_back().is_none_or(|(start, (all, _))| start + all <= at.0);
        assert!(free, "something is mapped at {at:?}");
        if state.allocation(handle).bytes != bytes {
            return Err(DriverError::Call { call: "cuMemMap", code: 1 });
        }
        state.allocation(handle).mapped += 1;
        state.mappings.insert(at.0, (bytes, handle));
        Ok(())
    }

    fn memory_at(&self, at: Address) -> Result<Memory, DriverError> {
        Ok(self.lock().within(at, 1).0.memory)
    }

    fn unmap(&self, at: Address, bytes: u64) -> Result<(), DriverError> {
        let mut state = self.lock();
        let (length, handle) = state.mappings.remove(&at.0).unwrap_or_else(|| panic!("nothing is mapped at {at:?}"));
        assert_eq!(length, bytes, "a mapping cannot be unmapped in part");
        state.allocation(handle).mapped -= 1;
        Ok(())
    }

    fn copy(&self, _queue: Queue, to: Address, from: Address, bytes: u64) -> Result<(), DriverError> {
        let state = self.lock();
        let mut data = vec![0; bytes as usize];
        let (source, offset) = state.within(from, bytes);
        source.file.read_exact_at(&mut data, offset).expect("the memory file can be read");
        let (target, offset) = state.within(to, bytes);
        target.file.write_all_at(&data, offset).expect("the memory file can be written");
        Ok(())
    }

    fn zero(&self, _queue: Queue, at: Address, bytes: u64) -> Result<(), DriverError> {
        let state = self.lock();
        let (target, offset) = state.within(at, bytes);
        target.file.write_all_at(&vec![0; bytes as usize], offset).expect("the memory file can be written");
        Ok(())
    }

    fn finish(&self, _queue: Queue) -> Result<(), DriverError> {
        Ok(())
    }

    fn suspend(&self, pid: u32) -> Result<(), DriverError> {
        self.lock().suspended.push(pid);
        Ok(())
    }

    fn fetch(&self, pid: u32, _from: [u8; 16], _sees: &[[u8; 16]]) -> Result<FetchTimes, DriverError> {
        self.resume(pid).map(|()| FetchTimes::default())
    }

    fn uuid_of(&self, _device: &str) -> Option<[u8; 16]> {
        // The model has one card.
        None
    }

    fn resume(&self, pid: u32) -> Result<(), DriverError> {
        self.lock().suspended.retain(|&suspended| suspended != pid);
        Ok(())
    }
}
