//! Card memory for restored address spaces, allocated from the VM's own pool.

use nvspec::addr::VramAddr;
use shadow_pt::ShadowMemory;
use vram::{ChunkTable, PagePool};

/// A page pool, and a function that writes card memory.
pub(crate) struct PoolMemory<'a> {
    pub(crate) pool: &'a mut PagePool,
    pub(crate) chunks: &'a mut ChunkTable,
    pub(crate) write: &'a mut dyn FnMut(VramAddr, &[u8]),
}

impl ShadowMemory for PoolMemory<'_> {
    fn alloc(&mut self, bytes: u64) -> Option<VramAddr> {
        let address = VramAddr(self.pool.alloc(self.chunks, bytes).ok()?.0);
        // The memory may contain a stale table.
        let zeros = vec![0; usize::try_from(bytes).ok()?];
        (self.write)(address, &zeros);
        Some(address)
    }

    fn free(&mut self, address: VramAddr, _bytes: u64) {
        self.pool.free(VramAddr(address.0));
    }

    fn write(&mut self, address: VramAddr, data: &[u8]) {
        (self.write)(address, data);
    }
}
