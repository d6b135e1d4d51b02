//! The memory system of the software card.
//!
//! - [`memory`]: VRAM, the memory of the host that the card can access, and posted writes
//! - [`mmu`]: page tables, TLBs, and the sessions of engines that access virtual addresses
//!
//! The crate does not model timing or bus contention; each module lists its further limits.

pub mod memory;
pub mod mmu;
