//! Makes client memory accessible to a card as host memory.

use std::sync::Arc;

use card::{DmaMemory, HostMemory};
use vm_memory::{VolatileMemory, VolatileMemoryError, VolatileSlice};
use vmm_glue::Mapping;

/// A client's mapping as host memory of a card.
#[derive(Debug)]
struct ClientMemory(Arc<Mapping>);

impl HostMemory for ClientMemory {
    fn as_volatile_slice(&self) -> VolatileSlice<'_, ()> {
        VolatileMemory::as_volatile_slice(&*self.0)
    }

    fn may_touch(&self, offset: usize, len: usize) -> bool {
        self.0.may_touch(offset, len)
    }
}

/// Returns a mapping as host memory.
#[must_use]
pub(crate) fn shared_memory(mapping: &Arc<Mapping>) -> Arc<dyn HostMemory> {
    Arc::new(ClientMemory(Arc::clone(mapping)))
}

/// Returns a whole mapping as host memory of a card, which the card may write if `writable` is true.
///
/// # Errors
/// Returns an error if the mapping is shorter than its declared length.
pub fn memory_of(mapping: &Arc<Mapping>, writable: bool) -> Result<DmaMemory, VolatileMemoryError> {
    DmaMemory::new(shared_memory(mapping), 0, mapping.len(), writable)
}
