//! The memory system of the software card.
//!
//! - [`memory`]: VRAM, the host memory that the card can access, and posted writes
//! - [`mmu`]: page tables, TLBs, and the sessions of engines that access virtual addresses
//!
//! The crate does not model timing or bus contention. Each module lists its other limitations.

pub mod memory;
pub mod mmu;
