//! To be written.

pub mod engines;
pub mod memory;
pub mod mmu;
