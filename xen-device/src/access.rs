//! Translates I/O requests into device calls.
//!
//! An item that spans two BARs, or that is only partly in a BAR, is split at the end of the BAR. Bytes outside all BARs
//! read as 0xff. A malformed request is handled as if no device existed, so that the virtual CPU continues.

use vmm_glue::counters::{add, worth_logging};
use vmm_glue::device::{Device, RegionIndex};
use vmm_glue::link::Link;
use vmm_glue::pieces::{next, piece};
use vmm_glue::protocol::Command;

use crate::function::Function;
use crate::requests::{Request, kind};

/// Maximum number of items per request. Xen sends at most one page of items.
const MAX_ITEMS: u32 = 4096;
/// Size of the accessible configuration space in bytes.
const CONFIG_BYTES: u64 = 256;
/// Value read if the access has no target.
const UNMAPPED_READ: u64 = u64::MAX;

/// The target of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Space {
    /// Memory space.
    Memory,
    /// Configuration space of this function.
    Config,
    /// No target.
    None,
}

/// Serves one domain's accesses.
pub(crate) struct Accesses<'a> {
    pub link: &'a Link,
    pub function: &'a mut Function,
    pub device: &'a mut dyn Device,
    /// PCI slot (device number) of the function.
    pub slot: u8,
    /// Number of malformed requests.
    pub malformed: &'a mut u64,
}

impl Accesses<'_> {
    /// Serves a request if it is an access. Returns the value of a read, unless it was stored in guest memory.
    pub fn serve(&mut self, request: &Request) -> Option<u64> {
        let (space, address) = self.place(request);
        if !matches!(request.size, 1 | 2 | 4 | 8) || request.count == 0 || request.count > MAX_ITEMS {
            return self.malformed(request, "its size is not 1, 2, 4 or 8, or it has no item or too many");
        }
        let reach = u64::from(request.size).saturating_mul(u64::from(request.count).saturating_sub(1));
        let moves = if space == Space::Memory { reach } else { 0 };
        let fits = |from: u64, by: u64| match request.backwards {
            true => from.checked_sub(by).is_some() && from.checked_add(u64::from(request.size)).is_some(),
            false => from.checked_add(by).and_then(|last| last.checked_add(u64::from(request.size))).is_some(),
        };
        if !fits(address, moves) || request.data_is_address && !fits(request.data, reach) {
            return self.malformed(request, "it exceeds the address space");
        }
        self.count(request);
        let was_up = self.function.is_up();
        let mut read = request.data;
        for item in 0..u64::from(request.count) {
            let step = item.saturating_mul(u64::from(request.size));
            let at = |from: u64| if request.backwards { from.saturating_sub(step) } else { from.saturating_add(step) };
            let address = if space == Space::Memory { at(address) } else { address };
            read = self.item(request, space, address, at(request.data));
        }
        if was_up {
            self.function.acknowledge();
        }
        (request.read && !request.data_is_address).then_some(read)
    }

    /// Returns the space of the first item, and the item's address within it.
    fn place(&self, request: &Request) -> (Space, u64) {
        match request.kind {
            kind::MEMORY => (Space::Memory, request.address),
            kind::PCI_CONFIG if request.address >> 32 == u64::from(self.slot) << 3 => {
                (Space::Config, request.address & 0xffff_ffff)
            }
            _ => (Space::None, request.address),
        }
    }

    /// Serves one item. Returns the value of a read.
    fn item(&mut self, request: &Request, space: Space, address: u64, data: u64) -> u64 {
        let mut bytes = [0; 8];
        let size = usize::try_from(request.size).unwrap_or(0).min(bytes.len());
        let Some(place) = bytes.get_mut(..size) else { return UNMAPPED_READ };
        // Bytes that no device provides read as 0xff.
        place.fill(0xff);
        if request.read {
            self.access(space, address, Data::Read(place));
            if request.data_is_address {
                // Drop writes to missing memory, such as a page that the guest has released.
                let _ = self.link.memory().write(data, place);
            }
        } else {
            match request.data_is_address {
                true if self.link.memory().read(data, place).is_err() => place.fill(0xff),
                true => {}
                false => place.iter_mut().zip(data_bytes(request.data)).for_each(|(to, from)| *to = from),
            }
            self.access(space, address, Data::Write(place));
        }
        u64::from_le_bytes(bytes)
    }

    fn access(&mut self, space: Space, address: u64, data: Data<'_>) {
        match space {
            Space::None => {}
            Space::Config => self.config(address, data),
            Space::Memory => self.memory(address, data),
        }
    }

    /// Splits an item at BAR boundaries, and accesses the parts that are in BARs.
    fn memory(&mut self, address: u64, mut data: Data<'_>) {
        let mut at = address;
        while !data.is_empty() {
            let windows = self.function.windows();
            let inside = windows.iter().find(|window| (window.range.first..=window.range.last).contains(&at)).copied();
            let border = match inside {
                Some(window) => window.range.last.saturating_add(1),
                None => windows.iter().map(|window| window.range.first).find(|first| *first > at).unwrap_or(u64::MAX),
            };
            let len = usize::try_from(border.saturating_sub(at)).unwrap_or(usize::MAX).min(data.len()).max(1);
            let (head, tail) = data.split(len);
            if let Some(window) = inside {
                self.device(window.region, at.saturating_sub(window.range.first), head);
            }
            at = next(at, len);
            data = tail;
        }
    }

    fn config(&mut self, offset: u64, data: Data<'_>) {
        let len = u64::try_from(data.len()).unwrap_or(u64::MAX);
        if offset.checked_add(len).is_none_or(|end| end > CONFIG_BYTES) {
            return;
        }
        let writes = matches!(data, Data::Write(_));
        self.device(RegionIndex::Config, offset, data);
        if writes {
            self.function.look(self.device);
        }
    }

    /// Splits an access within a region into parts that a device accepts.
    fn device(&mut self, region: RegionIndex, offset: u64, mut data: Data<'_>) {
        let mut offset = offset;
        while !data.is_empty() {
            let len = piece(offset, data.len());
            let (head, tail) = data.split(len);
            let info = self.function.region(region);
            let done = match head {
                Data::Read(bytes) if info.is_some_and(vmm_glue::RegionInfo::readable) => {
                    self.device.region_read(region, offset, bytes)
                }
                // Complete each write now, because the hypervisor gets its answer only after all items of the request
                // are complete.
                Data::Write(bytes) if info.is_some_and(vmm_glue::RegionInfo::writable) => {
                    self.device.region_write(region, offset, bytes).map(|ack| ack.complete_now(self.device))
                }
                _ => Err(vmm_glue::AccessError::Denied),
            };
            if let Err(error) = done {
                self.function.denied(error);
            }
            offset = next(offset, len);
            data = tail;
        }
    }

    fn malformed(&mut self, request: &Request, why: &str) -> Option<u64> {
        *self.malformed = self.malformed.saturating_add(1);
        add(&self.link.counters().errors, 1);
        if worth_logging(*self.malformed) {
            tracing::warn!(?request, why, "dropped a malformed request from the hypervisor");
        }
        request.read.then_some(UNMAPPED_READ)
    }

    fn count(&self, request: &Request) {
        let counters = self.link.counters();
        let (command, accesses) = match request.read {
            true => (Command::REGION_READ, &counters.region_reads),
            false => (Command::REGION_WRITE, &counters.region_writes),
        };
        counters.count_message(command);
        add(accesses, request.count.into());
    }
}

fn data_bytes(data: u64) -> [u8; 8] {
    data.to_le_bytes()
}

/// Bytes to read or write.
enum Data<'a> {
    Read(&'a mut [u8]),
    Write(&'a [u8]),
}

impl<'a> Data<'a> {
    fn len(&self) -> usize {
        match self {
            Self::Read(bytes) => bytes.len(),
            Self::Write(bytes) => bytes.len(),
        }
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Splits off the first `len` bytes.
    fn split(self, len: usize) -> (Self, Self) {
        let len = len.min(self.len());
        match self {
            Self::Read(bytes) => {
                let (head, tail) = bytes.split_at_mut(len);
                (Self::Read(head), Self::Read(tail))
            }
            Self::Write(bytes) => {
                let (head, tail): (&'a [u8], &'a [u8]) = bytes.split_at(len);
                (Self::Write(head), Self::Write(tail))
            }
        }
    }
}
