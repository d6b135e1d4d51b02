//! Page tables that the tests of this crate and of the engines build.
#![allow(
    missing_docs,
    clippy::missing_panics_doc,
    clippy::must_use_candidate,
    clippy::new_without_default,
    reason = "tests only"
)]
#![allow(clippy::expect_used, reason = "a test fails")]

use crate::memory::{BusAddr, Memory, VRAM_MIN, Vram};
use crate::mmu::{Access, AddressSpace, Mmu, MmuFault, Session, Translation};
use card::DmaMemory;
use nvspec::addr::{GpuVa, Iova, VramAddr};
use std::collections::HashMap;
use std::sync::Arc;
use vm_memory::MmapRegion;

pub const PTE_VALID: u64 = 1;
pub const PTE_PRIVILEGED: u64 = 2;
pub const PTE_READ_ONLY: u64 = 4;
pub const PTE_ENCRYPTED: u64 = 8;
/// PTE bits for a snooped host memory page.
pub const PTE_SYSTEM: u64 = 2 << 33;

/// First I/O virtual address of the host memory that tests may use as pages.
pub const SYSTEM_BASE: u64 = 0x4000_0000;
/// Size of the host memory at [`SYSTEM_BASE`], in bytes.
pub const SYSTEM_BYTES: u64 = 4 << 20;

/// A card's memory with one address space. Tables are in VRAM from 0x10000 to 4 MiB, and pages are above 4 MiB.
#[derive(Debug)]
pub struct Tables {
    pub memory: Memory,
    pub mmu: Mmu,
    pub space: AddressSpace,
    next: u64,
    /// Address of each table, by directory index and a flag that is true for tables of large pages.
    known: HashMap<(u64, bool), BusAddr>,
}

pub fn vram(address: u64) -> BusAddr {
    BusAddr::Vram(VramAddr(address))
}

impl Tables {
    pub fn new() -> Self {
        let memory = Memory::new(Vram::new(VRAM_MIN).expect("vram"));
        let region: Arc<MmapRegion> = Arc::new(MmapRegion::new(SYSTEM_BYTES as usize).expect("map"));
        let host = DmaMemory::new(region, 0, SYSTEM_BYTES as usize, true).expect("whole");
        memory.sysmem.map(Iova(SYSTEM_BASE), host).expect("mapped");
        let space = AddressSpace { directory: vram(0x1_0000), limit: GpuVa((1 << 40) - 1) };
        Self { memory, mmu: Mmu::new(), space, next: 0x2_0000, known: HashMap::new() }
    }

    pub fn write64(&self, address: BusAddr, value: u64) {
        self.memory.write(address, &value.to_le_bytes()).expect("a table");
    }

    pub fn read64(&self, address: BusAddr) -> u64 {
        self.memory.read64(address).expect("a table")
    }

    /// Returns the table for `va`, creating it if it does not exist.
    fn table(&mut self, va: u64, large: bool) -> BusAddr {
        let index = va >> 27;
        if let Some(table) = self.known.get(&(index, large)) {
            return *table;
        }
        let table = self.next;
        self.next += if large { 0x2000 } else { 0x4_0000 };
        assert!(self.next <= 0x40_0000, "too many tables for a test");
        let entry = self.space.directory.offset(index * 8);
        let bits = if large { 1 | table >> 8 } else { (1 | table >> 8) << 32 };
        self.write64(entry, self.read64(entry) | bits);
        self.known.insert((index, large), vram(table));
        vram(table)
    }

    /// Sets the PTE of the small page at `va`.
    pub fn small(&mut self, va: u64, pte: u64) {
        let entry = self.table(va, false).offset((va % (1 << 27) / 0x1000) * 8);
        self.write64(entry, pte);
    }

    /// Sets the PTE of the large page at `va`.
    pub fn large(&mut self, va: u64, pte: u64) {
        let entry = self.table(va, true).offset((va % (1 << 27) / 0x2_0000) * 8);
        self.write64(entry, pte);
    }

    pub fn session(&self) -> Session<'_> {
        self.mmu.session(&self.memory, &self.space, Access::USER)
    }

    pub fn translate(&self, va: u64, write: bool) -> Result<Translation, MmuFault> {
        self.session().translate(GpuVa(va), write)
    }

    /// Reads bytes through an uncached table walk, for comparison.
    pub fn bytes(&self, va: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        let fresh = Mmu::new();
        fresh.read(&self.memory, &self.space, GpuVa(va), &mut data, Access::PRIVILEGED).expect("mapped");
        data
    }
}
